"""Errors that count as a lack of memory: each library of a GPU words its own."""

import pytest
import torch

from impala_llm.engines.embedded.model_check import refusing
from impala_llm.engines.out_of_memory import is_out_of_memory

SAID = (
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA driver error: out of memory",
    "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.27.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 608 bytes",
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory",
)


@pytest.mark.parametrize("said", SAID)
def test_what_says_that_memory_ran_out_is_a_lack_of_memory(said: str) -> None:
    for kind in (RuntimeError, torch.AcceleratorError, torch.distributed.DistBackendError):
        assert is_out_of_memory(kind(said))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("NCCL error: unhandled system error. Last error: Cuda failure 1 'invalid argument'"),
        RuntimeError("out of resource: shared memory, Required: 114688, Hardware limit: 101376"),
        ValueError("CUDA error: out of memory"),
    ],
)
def test_other_errors_are_no_lack_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory."), *map(RuntimeError, SAID)]
)
def test_a_lack_of_memory_refuses_no_model(error: Exception) -> None:
    """It says nothing about the model's code."""
    with pytest.raises(type(error)), refusing("the model cannot be computed"):
        raise error
