"""Others fill /dev/shm after a run has started: what it goes on to write has its memory already."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

SMALL = 'mount -t tmpfs -o size=8m tmpfs "$0" && exec "$@"'
RUN = """
import sys
from pathlib import Path
import numpy as np
from impala_llm.pipeline.shm.owned_directory import read_file
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.weights.board import WeightPublisher, WeightReader, WeightsError

base = Path(sys.argv[1])
run = RunDirectory.create("run", base)

def fill():
    with open(base / "of others", "ab", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2

"""
"""The start of a script on a small file system."""


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Command in front of a script, for which the folder that it ends with is a file system of 8 MB."""
    for options in (["--mount"], ["--mount", "--map-root-user"]):
        prefix = ["unshare", *options, "sh", "-c", SMALL, str(tmp_path)]
        if shutil.which("unshare") and not subprocess.run([*prefix, "true"], capture_output=True).returncode:
            return prefix
    pytest.skip("no right to mount here")


def run(small: list[str], script: str) -> None:
    ended = subprocess.run([*small, sys.executable, "-c", RUN + script, small[-1]], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


PUBLISH = """
def make(version):
    '''So many tensors that a manifest takes several pages; in some versions many checksums are short.'''
    data = np.full(8, 1 + version, np.uint8), np.zeros(8, np.uint8)
    return {f"w{i}": ("U8", (8,), data[i % (1 + version) > 0]) for i in range(400)}

def publish(publisher, version):
    extra = bytes([version]) * 9000
    publisher.publish(make(version), version, extra=extra)
    with WeightReader(publisher.directory).lease() as lease:
        assert lease.version == version and lease.extra() == extra
        assert {name: data.tobytes() for name, (_, _, data) in lease.tensors().items()} == {
            name: data.tobytes() for name, (_, _, data) in make(version).items()
        }

files = {"config.json": b"{}", "tokenizer.json": bytes(9000)}
publisher = WeightPublisher(run.weights_path, 3, files)
"""


def test_versions_are_published_where_the_start_has_reserved_all(small: list[str]) -> None:
    run(
        small,
        PUBLISH + "publisher.reserve(make(0), extra_bytes=9000)\n"
        "for version in range(10):\n"
        "    fill()\n"
        "    publish(publisher, version)\n",
    )


def test_versions_are_published_where_the_first_one_has_found_room(small: list[str]) -> None:
    """The first version determines the size of the files beside it."""
    run(
        small,
        PUBLISH + "publisher.reserve(make(0))\n"
        "for version in range(10):\n"
        "    publish(publisher, version)\n"
        "    fill()\n",
    )


def test_a_learner_that_is_started_again_finds_all_that_it_writes(small: list[str]) -> None:
    run(
        small,
        PUBLISH + "run.note_learner(1, 2)\n"
        "publisher.reserve(make(0))\n"
        "publish(publisher, 0)\n"
        "for version in range(1, 10):\n"
        "    fill()\n"
        "    RunDirectory.attach('run', base).note_learner(1, 2)\n"
        "    publisher = WeightPublisher(run.weights_path, 3, files)\n"
        "    publisher.reserve(make(0))\n"
        "    publish(publisher, version)\n"
        "assert read_file(run.path, 'learner.json') == {'life': 1, 'num_ranks': 2}\n",
    )


def test_a_board_without_room_is_an_error_at_the_start(small: list[str]) -> None:
    run(
        small,
        PUBLISH + "fill()\n"
        "try:\n"
        "    publisher.reserve(make(0))\n"
        "except WeightsError as error:\n"
        "    assert 'Free memory' in str(error)\n"
        "else:\n"
        "    raise AssertionError\n",
    )


def test_the_time_of_a_run_is_noted(small: list[str]) -> None:
    run(
        small,
        "fill()\n"
        "began_at = run.began_at(used_s=5.0)\n"
        "for seconds in (1.0, 123456.789):\n"
        "    run.note_used(seconds)\n"
        "    seen = RunDirectory.attach('run', base)\n"
        "    assert (seen.used_s, seen.began_at()) == (seconds, began_at)\n",
    )
