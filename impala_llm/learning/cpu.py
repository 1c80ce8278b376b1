"""How PyTorch uses the cores of this process: its share of threads, and the faster of two exact matrix products."""

import torch


def prepare_cpu(num_threads: int) -> None:
    """Set the number of threads and, where it is exact, oneDNN's float32 matrix product.

    PyTorch multiplies float32 matrices with MKL, which leaves AVX-512 unused on CPUs that are not Intel's: oneDNN was
    2.3 times faster on an AMD EPYC of the fifth generation. It is reached only by allowing bfloat16 inside of products,
    which oneDNN then does where there are instructions for it (AMX). So the products are tried, and kept only if they
    are as exact as float32 is.
    """
    torch.set_num_threads(num_threads)
    before = torch.get_float32_matmul_precision()
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    torch.set_float32_matmul_precision("medium")
    if (a @ b - exact).abs().max() > 1e-4:  # float32 over 256 terms: 2e-5; bfloat16: 0.1
        torch.set_float32_matmul_precision(before)
