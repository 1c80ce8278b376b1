"""Environments, and losses, that break: the run ends with the reason, or with its time, and never in a loop."""

import json
from pathlib import Path

import pytest

from tests.system.runs import IMPATIENT, Run, column

OWN_SUITE = """
import time
from impala_llm.envs import toy

class Session(toy.ParrotSession):
    count = 0

    def step(self, action):
        Session.count += 1
        if Session.count > {sound}:
            {fault}
        observation, reward, terminated, truncated, info = super().step(action)
        {info}
        return observation, reward, terminated, truncated, info

class Suite(toy.ParrotSuite):
    def session(self, training):
        {session}
        return Session(self)
"""


def own_suite(folder: Path, session: str = "pass", sound: int = 0, fault: str = "pass", info: str = "pass") -> str:
    """Write a user's environment `broken:Suite`, and return its folder, for PYTHONPATH.

    Args:
        session: statement before a session is made.
        sound: steps of a process before `fault`.
        fault: statement before each later step.
        info: statement after each step, which may change `info`.
    """
    folder.mkdir()
    (folder / "broken.py").write_text(OWN_SUITE.format(session=session, sound=sound, fault=fault, info=info))
    return str(folder)


TOY = ("experiment=toy", "env=broken:Suite", "actor.num_actors=1")


@pytest.mark.system
def test_an_environment_that_always_raises_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    with Run(tmp_path / "run", *TOY, "learner.total_updates=100000", IMPATIENT) as run:
        fault = 'raise KeyError("no such room")'
        run.python_path.insert(0, own_suite(tmp_path / "own", sound=200, fault=fault))
        assert run.train().wait(200) == 2, run.printed()
        run.assert_gone()
        printed = run.log.read_text()
        assert "episodes failed one after the other" in printed and "no such room" in printed
        assert "Traceback" not in printed
        actor_log = (tmp_path / "run" / "logs" / "actor-0.log").read_text()
        assert actor_log.count("KeyError: 'no such room'") >= 1 and actor_log.count("Traceback") <= 3
        assert sum(column(run.rows(), "actor/failed_episodes")) < 500  # each slot waits longer after each fault


@pytest.mark.system
def test_an_environment_that_breaks_before_its_first_page_ends_the_run_as_well(tmp_path: Path) -> None:
    with Run(tmp_path / "run", *TOY, IMPATIENT) as run:
        run.python_path.insert(0, own_suite(tmp_path / "own", session='raise KeyError("no such house")'))
        assert run.train().wait(200) == 2, run.printed()
        run.assert_gone()
        printed = run.log.read_text()
        assert "episodes failed one after the other" in printed and "no such house" in printed


@pytest.mark.system
def test_an_environment_that_returns_what_it_must_not_ends_the_run_at_its_first_episodes(tmp_path: Path) -> None:
    """Without a score; what else is wrong, and how it is named, tests/envs/test_contract.py shows."""
    with Run(tmp_path / "run", *TOY) as run:
        run.python_path.insert(0, own_suite(tmp_path / "own", info='info.pop("score", None)'))
        printed = run.refused()
        assert "episodes failed one after the other" in printed
        assert "info['score'] is None at the end: a number in [0, 1] is expected" in printed


@pytest.mark.system
@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_data_files_that_are_none_are_named(command: str, tmp_path: Path) -> None:
    for name in ("items", "attributes"):
        (tmp_path / name).write_text("no JSON")
    files = [f"env.webshop.{name}={tmp_path / name}" for name in ("items", "attributes")]
    with Run(tmp_path / "run", "experiment=quickstart", *files) as run:
        said = run.refused(command)
        assert "env.name=webshop cannot be made" in said and "must hold a JSON" in said


@pytest.mark.system
def test_a_split_without_tasks_is_named_before_the_run_and_not_after_it(tmp_path: Path) -> None:
    rows = [{"prompt": str(n), "answer": "1", "split": split} for n, split in enumerate(("train", "validation"))]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (
        "model=scratch",
        "env=tasks",
        f"env.args.file={tmp_path}/tasks.jsonl",
        "evaluation.before_and_after=true",
    )
    with Run(tmp_path / "run", *settings, IMPATIENT) as run:
        assert run.train().wait(200) == 2, run.printed()
        run.assert_gone()
        assert "tasks('test') returned []: at least one task is expected" in run.log.read_text()
        assert not run.rows(), "no update was made"


@pytest.mark.system
def test_pages_that_leave_no_room_for_a_completion_end_the_run_with_the_fix(tmp_path: Path) -> None:
    settings = ("experiment=toy", "actor.num_actors=1", "engine.max_length=3", "engine.max_new_tokens=1", IMPATIENT)
    with Run(tmp_path / "run", *settings) as run:
        assert run.train().wait(200) == 2, run.printed()
        run.assert_gone()
        assert "raise engine.max_length" in run.log.read_text()
        # Said while the first batch is waited for, which may take long.
        assert "actor-0 joined, 1 connected" in (tmp_path / "run" / "logs" / "learner.log").read_text()


@pytest.mark.system
def test_the_time_of_a_run_ends_it_while_it_waits_for_an_environment_that_blocks_its_actors(tmp_path: Path) -> None:
    """The environment stands still after some updates. Its actor is started again, and there it does so anew."""
    settings = (
        *TOY,
        "learner.total_updates=100000",
        "learner.max_minutes=0.15",
        "pipeline.actor_timeout_s=1.5",
        "pipeline.heartbeat_s=0.2",
        "actor.episode_timeout_s=2",
    )
    with Run(tmp_path / "run", *settings) as run:
        run.python_path.insert(0, own_suite(tmp_path / "own", sound=300, fault="time.sleep(1000)"))
        assert run.train().wait(120) == 0, run.printed()
        run.assert_gone()
        assert run.rows() and (tmp_path / "run" / "policy" / "model.safetensors").is_file()
        printed = run.log.read_text()
        assert "actor-0: a call has blocked all episodes of this process for 2 s" in printed
        assert (
            "actor 0 died (exit code 1), again in 1 s: a call has blocked all episodes of this process for 5 s"
            in printed
        )
        assert "in step" in (tmp_path / "run" / "logs" / "actor-0.log").read_text(), "where it stands"


OWN_LOSS = """
import torch
from impala_llm.algorithms.interface import Loss, LossOutput

class Broken(Loss):
    def __call__(self, scored, advantages):
        per_token = -advantages * scored.log_probs
        return LossOutput(per_token * float("nan"), {}, torch.ones_like(advantages))
"""


@pytest.mark.system
def test_a_loss_from_which_nothing_can_be_learned_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    """Other mistakes of a loss, and how they are named, tests/learning/test_own_parts.py shows."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "own_loss.py").write_text(OWN_LOSS)
    settings = ("experiment=toy", "actor.num_actors=1", "learner.total_updates=100000", IMPATIENT)
    with Run(tmp_path / "run", *settings, "algorithm.loss=own_loss:Broken") as run:
        run.python_path.insert(0, str(own))
        assert run.train().wait(200) == 2, run.printed()
        assert run.processes() == []
        printed = run.log.read_text()
        assert f"{run.name} stays in memory, since it holds work" in printed, "what was learned before it, if anything"
        assert "50 optimizer steps in a row were left out" in printed and "again in" not in printed
        assert "A STEP IS LEFT OUT" in printed and "check algorithm.loss=own_loss:Broken" in printed
