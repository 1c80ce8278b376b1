"""The fuzzer finds nothing in the decoders, and does find what is put there for it."""

import contextlib
import importlib.util
import json
import mmap
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.examples import examples
from tests.system.fuzz.decoders import DECODERS
from tests.system.fuzz.inputs import Decoder
from tests.system.fuzz.sequences import Refusal, World

ROOT = Path(__file__).parents[2]
NUM_INPUTS = examples(10_000)
pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def fuzzer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz", ROOT / "tools" / "fuzz.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_no_decoder_breaks() -> None:
    command = [sys.executable, "tools/fuzz.py", "--inputs", str(NUM_INPUTS), "--seed", "7", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    figures = json.loads(done.stdout)
    assert figures["violations"] == 0 and done.returncode == 0, done.stdout + done.stderr
    assert abs(figures["inputs"] - NUM_INPUTS) <= len(DECODERS)
    assert [report["decoder"] for report in figures["decoders"]] == list(DECODERS)
    for report in figures["decoders"]:
        assert report["inputs"] == report["accepted"] + report["refused"] > 0
        assert report["accepted"] > 0 and report["refused"] > 0  # else it tests but one side


def test_the_same_seed_gives_the_same_answer() -> None:
    counts = []
    for seed in (1, 1, 2):
        command = [sys.executable, "tools/fuzz.py", "--inputs", "300", "--seed", str(seed), "--decoder", "safetensors"]
        report = json.loads(
            subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        )["decoders"][0]
        counts.append(report["accepted"])
    assert counts[0] == counts[1] != counts[2]


def test_an_error_that_is_not_the_decoders_own_is_a_violation(fuzzer: ModuleType) -> None:
    inputs = iter([b"fine", b"refused", b"broken", b"fine"])

    def decode(data: bytes) -> None:
        if data == b"refused":
            raise ValueError("no")
        if data == b"broken":
            raise KeyError("oh")

    noted: list[bytes] = []
    report = fuzzer.fuzz("some", Decoder(lambda: next(inputs), decode, (ValueError,)), 4, noted.append)
    assert (report.inputs, report.accepted, report.refused, report.violations) == (4, 2, 1, 1)
    assert "KeyError" in report.examples[0] and b"broken".hex() in report.examples[0]
    assert noted == [b"fine", b"refused", b"broken", b"fine"]


def test_memory_that_grows_is_a_violation(fuzzer: ModuleType) -> None:
    kept: list[mmap.mmap] = []

    def leak(data: bytes) -> None:
        # Pages of its own: bytes may find room in what other tests of this process have given back.
        kept.append(mmap.mmap(-1, 4_000_000))
        kept[-1].write(b"x" * 4_000_000)

    decoder = Decoder(lambda: b"x", leak, ())
    report = fuzzer.fuzz("some", decoder, 20, lambda data: None)
    assert report.violations == 1 and "memory grew" in report.examples[0]


@pytest.mark.parametrize(
    ("code", "shown"),
    [("import os; os.abort()", "ended with -6"), ("import ctypes; ctypes.string_at(8)", "ended with -11")],
)
def test_the_death_of_a_process_is_a_violation_that_shows_the_input(
    fuzzer: ModuleType, tmp_path: Path, code: str, shown: str
) -> None:
    notes = tmp_path / "notes"
    notes.write_bytes(struct.pack("<Q", 6) + b"poison" + bytes(100))
    report = fuzzer.supervise("some", [sys.executable, "-c", code], notes)
    assert report.violations == 1
    assert shown in report.examples[0] and b"poison".hex() in report.examples[0]


def test_a_process_that_is_silent_over_one_input_is_ended(
    fuzzer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzer, "HANG_S", 0.2)
    notes = tmp_path / "notes"
    notes.write_bytes(struct.pack("<Q", 4) + b"slow" + bytes(100))
    report = fuzzer.supervise("some", [sys.executable, "-c", "import time; time.sleep(600)"], notes)
    assert report.violations == 1 and "hung" in report.examples[0]


def test_an_error_that_only_ends_a_session_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(ticket_id: int, actor_id: str) -> None:
        raise ZeroDivisionError("a defect")

    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: socket paths must be short
        world = World(Path(folder))
        monkeypatch.setattr(world.ledger, "failed", broken)
        with pytest.raises(AssertionError, match="a defect"):
            for seed in range(100):
                with contextlib.suppress(Refusal):
                    world.play(seed.to_bytes(8, "little"))
        world.close()
