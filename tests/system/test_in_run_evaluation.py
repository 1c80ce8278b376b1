"""Evaluations inside of a run of real processes: beside training, through the loss of an actor, and as its end."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.system.runs import ROOT, Run, column

ENDLESS = "learner.total_updates=100000"
STOP_S = 30.0


def evaluations(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.rows() if row.get("evaluation/episodes") is not None]


@pytest.mark.system
def test_scores_come_beside_training_also_when_an_actor_is_killed_amid_an_evaluation(tmp_path: Path) -> None:
    """Several ranks: the first one asks. All tasks of the split, few at a time, so that they take many updates."""
    settings = ("experiment=toy", "learner.num_ranks=2", "actor.num_actors=2", ENDLESS)
    evaluated = ("evaluation.every_updates=1", "evaluation.run_tasks=1000", "evaluation.run_share=0.01")
    with Run(tmp_path, *settings, *evaluated) as run:
        supervisor = run.train()
        run.wait_for(lambda: evaluations(run), "an evaluation")
        begun, updates = len(evaluations(run)), len(run.rows())
        run.wait_for_updates(1)
        actors = run.processes(str(ROOT / "impala_llm/actor.py"))
        assert len(actors) == 2 and run.listening() <= {"127.0.0.1", "::1"}
        actors[0].kill()
        run.wait_for(lambda: len(evaluations(run)) >= begun + 2, "evaluations after the loss of an actor")
        found = evaluations(run)
        assert {row["evaluation/episodes"] for row in found} == {200.0}, "validation has a fifth of 1,000 tasks"
        assert len(run.rows()) > updates + 5, "training went on"
        versions = column(found, "evaluation/version")
        assert versions[0] == 0 and versions == sorted(set(versions))
        for row in found:
            assert row["evaluation/version"] <= row["evaluation/last_version"] <= row["learner/version"]
            assert row["evaluation/score_low"] <= row["evaluation/score"] <= row["evaluation/score_high"]
        rows = run.rows()  # once: training goes on
        steps, tokens, seconds = (column(rows, name) for name in ("step", "progress/tokens", "progress/seconds"))
        assert len(tokens) == len(seconds) == len(steps)
        for axis in (steps, tokens, seconds):
            assert axis == sorted(set(axis))
        assert sum(column(rows, "pipeline/malformed")) == sum(column(rows, "pipeline/refused")) == 0
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait(STOP_S) == 128 + signal.SIGINT
        run.assert_gone()
        assert (tmp_path / "policy" / "model.safetensors").is_file()


@pytest.mark.system
def test_a_run_without_gain_ends_early_with_its_best_policy_also_when_it_was_interrupted(tmp_path: Path) -> None:
    """With a learning rate of zero nothing is ever better than the start."""
    settings = ("experiment=toy", "learner.learning_rate=0", "evaluation.patience=4", ENDLESS)
    with Run(tmp_path, *settings, "evaluation.every_updates=3", "evaluation.run_tasks=20") as run:
        supervisor = run.train()
        run.wait_for(lambda: len(evaluations(run)) >= 2, "two evaluations")
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait(STOP_S) == 128 + signal.SIGINT
        assert run.train().wait(120) == 0, run.printed()
        run.assert_gone()
        found = evaluations(run)
        assert column(found, "evaluation/without_gain") == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert set(column(found, "evaluation/best_version")) == {0.0}
        assert "the run ends early" in run.log.read_text()
        kept = json.loads((tmp_path / "policy-best" / "evaluation.json").read_text())
        assert (kept["evaluation/version"], kept["evaluation/episodes"]) == (0, 20)
        AutoModelForCausalLM.from_pretrained(tmp_path / "policy-best")
        assert (tmp_path / "policy" / "config.json").is_file() and not (tmp_path / "policy-candidate").exists()
        for name in ("progress/tokens", "progress/episodes", "progress/seconds"):
            counted = column(run.rows(), name)
            assert counted == sorted(counted)


HANGING = """
import asyncio
from impala_llm.envs.toy import ParrotSession, ParrotSuite


class Suite(ParrotSuite):
    def session(self, training):
        return ParrotSession(self) if training else Session(self)


class Session(ParrotSession):
    def reset(self, task_id):
        self.hangs = task_id % 4 == 3
        return super().reset(task_id)

    async def step(self, action):
        if self.hangs:
            await asyncio.Event().wait()
        return super().step(action)
"""


@pytest.mark.system
def test_results_that_never_come_are_given_up_and_the_last_version_is_evaluated(tmp_path: Path) -> None:
    """One evaluation task in four never ends; the last version is published for its evaluation alone."""
    (tmp_path / "hanging.py").write_text(HANGING)
    settings = ("experiment=toy", "env.name=hanging:Suite", "learner.total_updates=12", "evaluation.every_updates=5")
    settings += ("learner.sync_interval=5", "algorithm.max_staleness=5")
    limits = ("evaluation.run_tasks=20", "evaluation.run_timeout_s=2", "evaluation.run_share=0.5")
    with Run(tmp_path / "run", *settings, *limits) as run:
        run.python_path.append(str(tmp_path))
        assert run.train().wait(120) == 0, run.printed()
        run.assert_gone()
        found = evaluations(run)
        assert {row["evaluation/episodes"] for row in found} == {15.0}
        assert column(found, "evaluation/version")[0] == 0 and column(found, "evaluation/version")[-1] == 12
        assert column(run.rows(), "learner/version") == list(range(1, 13)), "training went on"
        assert "15 of 20 validation tasks" in run.log.read_text()


@pytest.mark.system
def test_ctrl_c_while_the_last_evaluation_is_awaited_saves_policy_and_checkpoint(tmp_path: Path) -> None:
    """One evaluation task in four never ends. The ranks share the policy, and save it together; ranks that each hold
    all of it are interrupted in the next test."""
    (tmp_path / "hanging.py").write_text(HANGING)
    settings = ("experiment=toy", "env.name=hanging:Suite", "learner.total_updates=4", "evaluation.every_updates=50")
    ranks = ("learner.num_ranks=2", "learner.sharding=fsdp2", "actor.num_actors=2")
    with Run(tmp_path / "run", *settings, *ranks, "evaluation.run_tasks=20") as run:
        run.python_path.append(str(tmp_path))
        supervisor = run.train()
        run.wait_for(lambda: "Ctrl-C ends without it" in run.log.read_text(), "the wait for the evaluation")
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait(STOP_S) == 128 + signal.SIGINT, run.printed()
        run.assert_gone()
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy")
        assert (tmp_path / "run" / "checkpoints" / "update-000004" / "manifest.json").is_file()


SLOW_DISK = """
import time
from pathlib import Path
from impala_llm.envs.toy import ParrotSuite as Suite
from impala_llm.learning.policy_export import PolicyExport

saves = PolicyExport.save


def save(self, directory, files):
    if "candidate" in str(directory):
        Path(__file__).with_name("begun").touch()
        time.sleep(7)  # longer than a signal waits for the end of an update, and than the supervisor for a process
    saves(self, directory, files)


PolicyExport.save = save
"""


@pytest.mark.system
def test_ctrl_c_while_a_candidate_is_written_slowly_ends_all_ranks_after_the_update(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_DISK)
    settings = ("experiment=toy", "env.name=slow:Suite", "evaluation.every_updates=3", "evaluation.run_tasks=20")
    with Run(tmp_path / "run", *settings, "learner.num_ranks=2", ENDLESS) as run:
        run.python_path.append(str(tmp_path))
        supervisor = run.train()
        run.wait_for(lambda: evaluations(run), "the first evaluation")
        (tmp_path / "begun").unlink()
        run.wait_for((tmp_path / "begun").exists, "the second candidate")
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait(60) == 128 + signal.SIGINT, run.printed()
        run.assert_gone()
        last = int(run.rows()[-1]["step"])
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy")
        assert (tmp_path / "run" / "checkpoints" / f"update-{last:06d}" / "manifest.json").is_file(), run.printed()
