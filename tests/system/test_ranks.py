"""Runs whose learner has several processes: they train, go on as another number of them, and lose one of them."""

import signal
import sys
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from impala_llm.learning.policy.model import PolicyModel
from tests.system.runs import ROOT, Run, column

STOP_S = 60.0
TOY = ("experiment=toy", "actor.num_actors=1", "learner.batch_size=32")
ALONE = ("learner.num_ranks=1",)
FSDP2 = ("learner.num_ranks=2", "learner.sharding=fsdp2")
TENSOR = ("learner.num_ranks=1", "learner.tensor_parallel=2")


def learners(run: Run) -> dict[int, psutil.Process]:
    """Processes of the learner, by their number: they are started in this order."""
    found = run.processes(str(ROOT / "impala_llm" / "learner.py"))
    found = [process for process in found if "torch.distributed.run" not in process.cmdline()]
    return dict(enumerate(sorted(found, key=lambda process: (process.create_time(), process.pid))))


@pytest.mark.system
def test_a_learner_of_two_tensor_parallel_processes_trains_is_evaluated_and_goes_on(tmp_path: Path) -> None:
    length = ("learner.total_updates=20", "evaluation.every_updates=10", "evaluation.run_tasks=16")
    with Run(tmp_path, *TOY, *TENSOR, *length) as run:
        supervisor = run.train()
        run.wait_for_updates(5)
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait(STOP_S) == 128 + signal.SIGINT, run.printed()
        run.assert_gone()
        assert run.train().wait(300) == 0, run.printed()
        run.assert_gone()
        rows = run.rows()
        trained = [row for row in rows if "loss/total" in row]  # the last evaluation has a row of its own
        assert column(trained, "step") == list(range(1, 21)) and "going on from update" in run.log.read_text()
        # What the engine plays is what the processes share: its log-probabilities are the learner's.
        assert all(row["mismatch/logprob_mean"] < 1e-4 for row in trained if row["mismatch/tokens"])
        assert len(column(rows, "evaluation/score")) >= 3
        AutoModelForCausalLM.from_pretrained(tmp_path / "policy")


@pytest.mark.system
def test_a_run_goes_on_as_another_number_of_ranks_with_the_policy_in_other_parts(tmp_path: Path) -> None:
    """From the checkpoint alone: the memory of the host has nothing of a run that has ended."""
    lives = (TENSOR, FSDP2, ALONE)
    with Run(tmp_path, *TOY) as run:
        settings = list(run.settings)
        for number, ranks in enumerate(lives, start=1):
            run.settings = [*settings, *ranks, f"learner.total_updates={3 * number}"]
            assert run.train().wait(240) == 0, run.printed()
            run.assert_gone()
        said = run.log.read_text()
        for number in range(1, len(lives)):
            assert f"going on from update {3 * number}, checkpoint" in said
        assert said.count("it is of learner.num_ranks=") == 2
        assert "anew:" not in said and "begins anew" not in said
        rows = run.rows()
        assert column(rows, "step") == column(rows, "learner/version") == list(range(1, 3 * len(lives) + 1))
        # The weights are those that engines have, and the moments those of the run: nothing jumps.
        assert all(row["mismatch/logprob_mean"] < 1e-4 for row in rows if row["mismatch/tokens"])


@pytest.mark.system
def test_ranks_that_wait_for_a_batch_in_vain_say_so_in_the_terminal(tmp_path: Path) -> None:
    """The last line of their log is that of the rank that lost the other one."""
    too_much = (
        "learner.batch_size=65536",
        "replay.capacity=65536",
        "replay.capacity_mb=256",
        "learner.stall_timeout_s=2",
    )
    with Run(tmp_path, *TOY, "learner.num_ranks=2", *too_much) as run:
        supervisor = run.train()
        run.wait_for(lambda: "learner died (exit code 1)" in run.printed(), "the learner to give up")
        said = run.printed()
        before, _, after = said.partition("learner died")
        assert "no batch for 2 s (learner.stall_timeout_s)" in before and "no batch" not in after.splitlines()[0], said
        supervisor.send_signal(signal.SIGINT)
        supervisor.wait(STOP_S)
        run.assert_gone()


@pytest.mark.system
def test_ranks_of_which_one_is_killed_start_again_and_actors_stay(tmp_path: Path) -> None:
    """By the supervisor; the next test has torchrun, and ranks that share the policy in the other way."""
    with Run(tmp_path, *TOY, *TENSOR, "learner.total_updates=24") as run:
        supervisor = run.train()
        run.wait_for_updates(4)
        actors = {process.pid for process in run.processes(str(ROOT / "impala_llm" / "actor.py"))}
        before = learners(run)
        assert actors and set(before) == {0, 1}
        before[1].kill()
        assert supervisor.wait(300) == 0, run.printed()
        log = (tmp_path / "logs" / "learner.log").read_text()
        assert log.count("going on from update") == 1, run.printed()
        assert "begun again" not in log
        rows = run.rows()
        versions = column(rows, "learner/version")
        # The row of the version that was being published is written with the other ranks, and may be lost.
        assert versions == sorted({*versions}) and versions[-1] == 24 and len(versions) >= 23
        # Each of 24 updates of 32 trajectories was played once, but for what was under way to the rank that died.
        assert sum(column(rows, "pipeline/received")) <= 24 * 32 + 2 * 32
        assert sum(column(rows, "pipeline/refused")) == 0
        assert "left" not in log, "no actor has left"
        with torch.no_grad():
            policy = PolicyModel.from_pretrained(tmp_path / "policy")
            assert all(bool(p.isfinite().all()) for p in policy.parameters())
        run.assert_gone()


@pytest.mark.system
def test_torchrun_starts_ranks_again_of_which_one_is_killed_and_actors_stay(tmp_path: Path) -> None:
    toy = ("experiment=toy", "learner.batch_size=32")
    with Run(tmp_path, *toy, *FSDP2, "learner.total_updates=24") as run:
        actors = run.start("tools/launch_actors.sh", "--num-actors", "2")
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        learner = run.start(*torchrun, "--max-restarts", "3", str(ROOT / "impala_llm" / "learner.py"))
        run.wait_for_updates(4)
        learners(run)[1].kill()
        assert learner.wait(300) == 0, run.printed()
        assert actors.wait(60) == 0, run.printed()
        assert run.printed().count("going on from update") == 1, run.printed()
        versions = column(run.rows(), "learner/version")
        assert versions == sorted({*versions}) and versions[-1] == 24 and len(versions) >= 23
        assert sum(column(run.rows(), "pipeline/refused")) == 0
        assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["actor-0.log", "actor-1.log"]
        run.assert_gone()


@pytest.mark.system
def test_a_signal_to_one_process_of_a_rank_ends_all_of_them_in_order(tmp_path: Path) -> None:
    """Also while the rank waits for a batch, which the process that is told does not wait for itself."""
    with Run(tmp_path, *TOY, *TENSOR, "actor.num_actors=0", "run.terminal=true") as run:
        supervisor = run.train()
        run.wait_for(lambda: "no batch yet" in run.log.read_text(), "a wait for a batch", 300)
        learners(run)[1].terminate()
        run.wait_for(lambda: "learner died (exit code 143)" in run.log.read_text(), "the end of the learner")
        assert "the policy is saved in" in run.log.read_text(), run.printed()
        assert "Traceback" not in (tmp_path / "logs" / "learner.log").read_text(), run.printed()
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait(STOP_S) == 128 + signal.SIGINT, run.printed()
        run.assert_gone()
