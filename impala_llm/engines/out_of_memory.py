"""Recognition of errors by which torch, and the libraries that it calls, report that memory has run out."""

import re

import torch

_SAID = re.compile(
    r"can't allocate memory|DefaultCPUAllocator: not enough memory"  # torch on a CPU: on Linux and macOS; elsewhere
    r"|CUDA (driver )?error: out of memory"
    r"|_STATUS_ALLOC_FAILED"  # cuBLAS, cuDNN, cuSPARSE, cuSOLVER
    r"|Cuda failure( \d+)? 'out of memory'|Failed to CUDA (host )?[cm]?alloc"  # NCCL
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out: that of a GPU, of torch's allocator on a CPU, or Python's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _SAID.search(str(error)) is not None
