"""Matrix products in float32: the share of threads and the library on a CPU, and the precision on a GPU; and how a
CPU's memory is given back.

Invariant: the choices for a CPU change nothing on a GPU, and the other way round.
"""

import ctypes
from typing import Any

import torch


def prepare_cpu(num_threads: int) -> None:
    """Set the number of threads and, where it is exact, oneDNN's float32 matrix product.

    PyTorch multiplies float32 matrices with MKL, which leaves AVX-512 unused on CPUs that are not Intel's: oneDNN was
    2.3 times faster on an AMD EPYC of the fifth generation. It is reached only by allowing bfloat16 inside of products,
    which oneDNN then does where there are instructions for it (AMX). So the products are tried, and kept only if they
    are as exact as float32 is.
    """
    torch.set_num_threads(num_threads)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    # Not torch.set_float32_matmul_precision, which also allows TF32 on every GPU.
    mkldnn: Any = torch.backends.mkldnn  # sets its attributes when it is imported
    products = mkldnn.matmul
    before = products.fp32_precision
    products.fp32_precision = "bf16"
    if (a @ b - exact).abs().max() > 1e-4:  # float32 over 256 terms: 2e-5; bfloat16: 0.1
        products.fp32_precision = before


def uses_onednn(precision: torch.dtype | None) -> bool:
    """Whether a CPU multiplies matrices by oneDNN: those in bfloat16, and in float32 where `prepare_cpu` chose it.

    Args:
        precision: of the products; None: float32.
    """
    mkldnn: Any = torch.backends.mkldnn
    return precision == torch.bfloat16 or bool(mkldnn.matmul.fp32_precision == "bf16")


def give_back_memory() -> None:
    """Have glibc give all memory that is free at this moment back to the system; elsewhere nothing happens.

    By itself it keeps what was freed, blocks of up to 32 MB, and what a layer keeps for the backward pass then lies
    between holes that nothing else fits into: the heap grows to several times of what is in use.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def prepare_cuda(precision: str) -> None:
    """Set how GPUs multiply float32 matrices.

    Args:
        precision: float32 (exact) | tf32 (10 bits of the mantissa, several times as fast).
    """
    torch.backends.cuda.matmul.fp32_precision = {"float32": "ieee", "tf32": "tf32"}[precision]
