"""Compiled loops of the embedded engine: equal bits in each process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NORMS = """
import hashlib, numpy as np
from impala_llm.engines.embedded import cpu_kernels
rng = np.random.default_rng(0)
hidden, update = (rng.normal(size=(37, 64)).astype(np.float32) for _ in range(2))
normed = np.empty_like(hidden)
cpu_kernels.add_norm(hidden, update, rng.normal(size=64).astype(np.float32), 1e-6, normed)
print(hashlib.sha256(normed.tobytes()).hexdigest())
"""


@pytest.mark.system
def test_a_process_that_compiles_computes_the_bits_of_those_that_load(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    found = [
        subprocess.run(
            [sys.executable, "-c", NORMS], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert found[0] == found[1]
