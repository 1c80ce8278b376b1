"""Limits of a container, as the kernel shows them in files of cgroups: laid out in a temporary folder."""

import math
import os
from pathlib import Path

import psutil
import pytest

from impala_llm.commands import doctor
from impala_llm.config import load, threads_per_process
from impala_llm.processes import cgroups

UNLIMITED_V1 = "9223372036854771712"
"""Limit of memory that version 1 shows where there is none: the largest number of whole pages."""


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 64 cores and 256 GB, whose files of cgroups lie in the temporary folder."""
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    memory = psutil.virtual_memory()._replace(total=256 * 10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def lay_out(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


OWN, V1, V1_MEMORY = "proc/self/cgroup", "sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup/memory/memory"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        # Version 2. A container sees its own group as the root.
        ({OWN: "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, 64),
        ({OWN: "0::/", "sys/fs/cgroup/cpu.max": "400000 100000"}, 4),
        ({OWN: "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
        ({OWN: "0::/", "sys/fs/cgroup/cpu.max": "1000 100000"}, 1),
        ({OWN: "0::/", "sys/fs/cgroup/cpu.max": "9999900000 100000"}, 64),
        # A job of Slurm or systemd: the limit is the group's, or a parent's.
        ({OWN: "0::/job/step", "sys/fs/cgroup/job/step/cpu.max": "600000 200000"}, 3),
        ({OWN: "0::/job/step", "sys/fs/cgroup/job/cpu.max": "200000 100000",
          "sys/fs/cgroup/job/step/cpu.max": "max 100000"}, 2),
        ({OWN: "0::/job/step", "sys/fs/cgroup/job/cpu.max": "200000 100000",
          "sys/fs/cgroup/job/step/cpu.max": "800000 100000"}, 2),
        ({OWN: "0::/job", "sys/fs/cgroup/other/cpu.max": "200000 100000"}, 64),
        # Version 1, where /proc may name the host's path, and the container's own group is mounted as the root.
        ({OWN: "4:cpu,cpuacct:/\n0::/", f"{V1}/cpu.cfs_quota_us": "-1", f"{V1}/cpu.cfs_period_us": "100000"}, 64),
        ({OWN: "4:cpu,cpuacct:/pods/a b", f"{V1}/cpu.cfs_quota_us": "250000", f"{V1}/cpu.cfs_period_us": "100000"}, 3),
        ({OWN: "4:cpuacct,cpu:/", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
          "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 2),
        ({OWN: "4:cpu,cpuacct:/", f"{V1}/cpu.cfs_period_us": "100000"}, 64),
        ({OWN: "9:memory:/a\n4:cpu,cpuacct:/b", f"{V1}/b/cpu.cfs_quota_us": "50000",
          f"{V1}/b/cpu.cfs_period_us": "10000"}, 5),
    ],
)  # fmt: skip
def test_the_cores_of_a_container_are_those_of_its_quota(
    tmp_path: Path, files: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    lay_out(tmp_path, files)
    assert cgroups.num_cores() == cores
    assert threads_per_process(load(["experiment=toy", "learner.num_ranks=1", "actor.num_actors=1"])) == max(
        1, cores // 2
    )


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "64 cores, 256.0 GB"),
        ({OWN: "0::/", "sys/fs/cgroup/memory.max": "max"}, "64 cores, 256.0 GB"),
        ({OWN: "0::/pod", "sys/fs/cgroup/memory.max": "32000000000"}, "64 cores, 32.0 GB"),
        ({OWN: "2:memory:/", "sys/fs/cgroup/memory/memory.limit_in_bytes": "16000000000"}, "64 cores, 16.0 GB"),
        ({OWN: "2:memory:/", "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1}, "64 cores, 256.0 GB"),
    ],
)
def test_doctor_counts_the_memory_of_a_container(tmp_path: Path, files: dict[str, str], said: str) -> None:
    lay_out(tmp_path, files)
    assert doctor.processor_and_memory().state.startswith(f"{said},")


def test_a_model_that_the_container_cannot_hold_is_wrong(tmp_path: Path) -> None:
    config = load(["model=tiny_shopper", "env=webshop", "actor.num_actors=1", "model.device=cpu"])
    assert doctor.learner_memory(config, {"gpus": []}).problems == []
    lay_out(tmp_path, {OWN: "0::/", "sys/fs/cgroup/memory.max": "1000"})
    [problem] = doctor.learner_memory(config, {"gpus": []}).problems
    assert "of this host's 0.0 GB" in problem


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, math.inf),
        ({OWN: "0::/", "sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "5"}, math.inf),
        # Of 100 bytes 80 are used, 30 of them by files that nothing has open.
        ({OWN: "0::/", "sys/fs/cgroup/memory.max": "100", "sys/fs/cgroup/memory.current": "80",
          "sys/fs/cgroup/memory.stat": "anon 50\ninactive_file 30"}, 50),
        ({OWN: "2:memory:/", f"{V1_MEMORY}.limit_in_bytes": "100", f"{V1_MEMORY}.usage_in_bytes": "80",
          "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 30"}, 50),
        ({OWN: "0::/", "sys/fs/cgroup/memory.max": "100", "sys/fs/cgroup/memory.current": "101"}, 0),
    ],
)  # fmt: skip
def test_the_memory_that_a_container_has_left(tmp_path: Path, files: dict[str, str], left: float) -> None:
    lay_out(tmp_path, files)
    assert cgroups.memory_left() == left
