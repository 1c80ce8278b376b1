"""Precision of float32 products: a CPU's and a GPU's are set apart from each other."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from impala_llm.learning.policy.products import prepare_cpu, prepare_cuda
from impala_llm.processes.supervised import ALLOCATOR


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_what_is_chosen_for_the_cpu_leaves_the_gpu_alone(precision: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = precision
    prepare_cpu(torch.get_num_threads())
    assert torch.backends.cuda.matmul.fp32_precision == precision


def test_products_of_the_cpu_stay_exact() -> None:
    prepare_cpu(torch.get_num_threads())
    a, b = torch.randn(64, 300), torch.randn(300, 64)
    torch.testing.assert_close((a @ b).double(), a.double() @ b.double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("setting", "expected"), [("float32", "ieee"), ("tf32", "tf32")])
def test_the_gpus_precision_is_a_setting_of_its_own(setting: str, expected: str) -> None:
    prepare_cuda(setting)
    assert torch.backends.cuda.matmul.fp32_precision == expected


@pytest.mark.system
def test_freed_tensors_give_their_memory_back_to_the_system() -> None:
    """In a process of its own, with the supervisor's settings: the holes between what is kept take no memory."""
    program = (
        "import psutil, torch\n"
        "from impala_llm.learning.policy.products import give_back_memory\n"
        "torch.zeros(1 << 20)\n"
        "before = psutil.Process().memory_info().rss\n"
        "kept = []\n"
        "for _ in range(40):\n"
        "    between = [torch.ones(5 << 18) for _ in range(4)]\n"
        "    del between\n"
        "    kept.append(torch.ones(1 << 20))\n"
        "give_back_memory()\n"
        "print(psutil.Process().memory_info().rss - before)\n"
    )
    environment = {**os.environ, **ALLOCATOR}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert int(done.stdout) < 1.2 * 40 * (4 << 20), "the 40 tensors that are kept; 1.5 times that by itself"
