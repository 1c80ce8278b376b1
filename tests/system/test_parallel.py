"""Ranks as processes: two share a batch and get the gradient of one; a rank that stays away ends the wait."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from impala_llm.learning.ranks.parallel import Ranks
from tests.learning.builders import save_lm
from tests.system.forked_ranks import forked_ranks

ROOT = Path(__file__).parents[2]


@pytest.mark.system
def test_two_ranks_give_the_gradient_of_one(tmp_path: Path) -> None:
    policy = save_lm(tmp_path / "policy")
    with forked_ranks("tests.system.gradient_rank") as start:
        for number in (1, 2):
            (output := tmp_path / str(number)).mkdir()
            result = start(number, [str(policy), str(output)])
            assert result.returncode == 0, result.stderr
    alone = load_file(tmp_path / "1" / "gradient-0")
    assert any(bool(g.any()) for g in alone.values())
    for rank in (0, 1):
        together = load_file(tmp_path / "2" / f"gradient-{rank}")
        assert together.keys() == alone.keys()
        for name, expected in alone.items():
            torch.testing.assert_close(together[name], expected, atol=1e-6, rtol=1e-5, msg=name)
        facts = json.loads((tmp_path / "2" / f"facts-{rank}.json").read_text())
        assert facts["is_main"] == (rank == 0)
        assert facts["counts"] == json.loads((tmp_path / "1" / "facts-0.json").read_text())["counts"]
        assert facts["missing"] == {"first": [2.0], "second": None}
        assert facts["gathered"] == [{"rank-0": [0.0, 1.0]}, {"rank-1": [1.0, 1.0]}]


@pytest.mark.system
def test_ranks_read_models_in_turns_where_memory_does_not_hold_them_for_all(tmp_path: Path) -> None:
    """Half of the free memory holds one, two or three policies."""
    policy = save_lm(tmp_path / "policy")
    size = sum(4 * tensor.numel() for tensor in load_file(policy / "model.safetensors").values())
    notes = {}
    with forked_ranks("tests.system.making_rank") as start:
        for sharding, at_once in (("fsdp2", 1), ("fsdp2", 2), ("fsdp2", 3), ("replicated", 1)):
            (output := tmp_path / f"{sharding}-{at_once}").mkdir()
            result = start(3, [str(policy), str(output), str(2 * at_once * size), sharding])
            assert result.returncode == 0, result.stderr
            assert len({(output / f"end-{rank}").read_text() for rank in range(3)}) == 1, "of one policy"
            notes[sharding, at_once] = (output / "notes").read_text().splitlines()
        (output := tmp_path / "refused").mkdir()
        result = start(3, [str(policy), str(output), "0", "fsdp2", "refused"])
    of_policy, of_reference = (
        [f"{what} {rank}" for rank in range(3) for what in ("reads", f"has the {model}")]
        for model in ("policy", "reference")
    )
    assert notes["fsdp2", 1] == notes["replicated", 1] == of_policy + of_reference
    assert notes["fsdp2", 2][4:6] == ["reads 2", "has the policy 2"], "the third waits for both"
    assert sorted(notes["fsdp2", 3]) == sorted(of_policy + of_reference)
    assert result.returncode == 0, result.stderr
    ends = {(output / f"end-{rank}").read_text() for rank in range(3)}
    assert ends == {"refused: packed rows are computed wrongly"}, "each rank tells the reason"


def test_a_process_alone_needs_no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    ranks = Ranks("cpu")
    assert (ranks.rank, ranks.world_size, ranks.is_main) == (0, 1, True)
    assert ranks.sum([1.0, 2.5]) == [1.0, 2.5]
    assert ranks.gather({"a": [1.0, 2.0]}) == [{"a": [1.0, 2.0]}]
    ranks.barrier()
    ranks.close()


@pytest.mark.system
def test_a_rank_that_never_joins_ends_with_an_error_after_the_time_out(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "from impala_llm.learning.ranks.parallel import Ranks\n"
        "ranks = Ranks('cpu', timeout_s=5.0)\n"
        "ranks.barrier()\n"
        "if ranks.rank == 0:\n"
        "    try:\n"
        "        ranks.barrier()\n"
        "    except RuntimeError:\n"
        "        print('TIMED OUT', flush=True)\n"
        "else:\n"
        "    input()\n"  # alive, and absent, until the test says
    )
    base = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        output, _ = processes[0].communicate(timeout=120)
        assert "TIMED OUT" in output
    finally:
        for process in processes:
            process.kill()
            process.wait()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
