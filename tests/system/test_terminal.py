"""The live view of a run, in terminals of the usual widths."""

import json
import re
import shlex
import signal
import uuid
from pathlib import Path

import pytest

from tests.system.runs import MARK, ROOT
from tests.system.watching import Watched

START_S = 120.0
"""Deadline for whatever includes the start of processes."""
PATIENCE_S = 30.0
"""Far longer than a person should see nothing move, for machines on which tests are slow."""


def watch(columns: int, directory: Path, *settings: str) -> Watched:
    name = f"test-{uuid.uuid4().hex[:12]}"
    command = ["train", *settings, f"run.name={name}", "run.dir=outputs/first"]
    return Watched(columns, command, directory, {MARK: name, "PYTHONPATH": str(ROOT)}, is_forked=True)


def all_that_was_seen(watched: Watched) -> str:
    return "\n".join(text for _, text in watched.seen)


@pytest.mark.system
def test_a_quickstart_always_moves_fits_its_terminal_and_ends_with_where_everything_is(tmp_path: Path) -> None:
    """In the narrower of the usual widths; the next test has the other one."""
    short = ("learner.total_updates=2", "learner.batch_size=16", "evaluation.num_tasks=8")
    with watch(80, tmp_path, "experiment=quickstart", *short) as watched:
        assert watched.wait(timeout_s=280, patience_s=PATIENCE_S) == 0, watched.text
        seen = all_that_was_seen(watched)
        for moment in (
            "the learner and its actors are starting",
            "learner: actor-0 joined, 1 connected",
            r"update    2 \(100%\)  \d:\d\d gone  actors 1",
            "1 of 4, before: webshop",
            r"after: webshop, unseen catalogue 7, split test.* 8/8",
            r"after\s+-\s+before\s+over\s+8\s+tasks:[\s\S]+?score",  # folded between two words
        ):
            assert re.search(moment, seen), moment
        assert watched.long_rows == []
        assert watched.rows[-1] == "impala-llm: policy, logs, tensorboard are in outputs/first"


@pytest.mark.system
def test_a_killed_learner_is_told_above_the_lines_and_the_clock_goes_on(tmp_path: Path) -> None:
    with watch(120, tmp_path, "experiment=toy", "learner.total_updates=100000") as watched:
        step = re.compile(r"^update +(\d+) .* (\d+):(\d\d) gone", re.MULTILINE)

        def shown_step() -> int:
            found = step.search(watched.text)
            return int(found[1]) if found else 0

        def seconds_gone() -> int:
            found = step.search(watched.text)
            assert found is not None
            return 60 * int(found[2]) + int(found[3])

        watched.wait_for(lambda: shown_step() >= 5, "five steps", START_S, PATIENCE_S)
        before = seconds_gone()
        [learner] = watched.processes("learner.py")
        learner.kill()
        watched.wait_for(lambda: "the learner is started again" in watched.rows[-1], "the news", START_S, PATIENCE_S)
        assert shown_step() and seconds_gone() >= before
        watched.wait_for(lambda: "learner: going on from update" in watched.text, "a start", START_S, PATIENCE_S)
        stood_at = shown_step()
        watched.wait_for(lambda: shown_step() > stood_at + 2, "more steps", START_S, PATIENCE_S)
        assert seconds_gone() > before
        # Messages have rows of their own, above the five lines.
        rows = watched.rows
        assert any(row.startswith("impala-llm: learner died (killed by SIGKILL)") for row in rows)
        assert any(row.startswith("learner: going on from update") for row in rows)
        assert [row.split()[0] for row in rows[-5:]] == ["update", "episodes", "losses", "lag", "speed"]
        assert sum(row.startswith("update ") for row in rows) == 1
        watched.signal(signal.SIGINT)
        assert watched.wait(timeout_s=60) == 128 + signal.SIGINT
        assert watched.long_rows == []
        assert watched.rows[-1] == "impala-llm: policy, logs, tensorboard are in outputs/first"
    lines = (tmp_path / "outputs" / "first" / "tensorboard" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    versions = [row["learner/version"] for row in metrics]
    assert len(set(versions)) == len(versions), "no version is made twice"
    assert sum(row["pipeline/refused"] for row in metrics) == 0


@pytest.mark.system
def test_a_learner_and_actors_started_by_hand_say_what_they_wait_for_and_do(tmp_path: Path) -> None:
    name = f"test-{uuid.uuid4().hex[:12]}"
    settings = [
        "experiment=toy",
        f"run.name={name}",
        "run.dir=out",
        "learner.total_updates=60",
        "learner.batch_size=16",
    ]
    environment = {MARK: name, "PYTHONPATH": str(ROOT)}
    with Watched(80, ["actors", *settings], tmp_path, environment, is_forked=True) as actors:
        actors.wait_for(lambda: "waiting for the learner" in actors.text, "the news", START_S, PATIENCE_S)
        with Watched(80, ["learner", *settings], tmp_path, environment, is_forked=True) as learner:
            learner.wait_for(lambda: "learner: actor-0 joined, 1 connected" in learner.text, "an actor", START_S)
            actors.wait_for(lambda: "1 of 1 actors play" in actors.text, "an episode", START_S, PATIENCE_S)
            assert learner.wait(START_S) == 0
            assert [row.split()[0] for row in learner.rows[-5:]] == ["update", "episodes", "losses", "lag", "speed"]
            assert actors.wait(START_S) == 0
            assert learner.long_rows == actors.long_rows == []


UNTIL_OVER = "bash -c 'until [ -e over ]; do sleep 0.05; done'"


@pytest.mark.system
def test_seconds_are_counted_while_something_is_installed_and_its_exit_code_is_kept(tmp_path: Path) -> None:
    functions = shlex.quote(f"{ROOT}/tools/lib/venv.sh")
    script = f"set -e; venv=/none name=setup; . {functions}; counting {UNTIL_OVER}; counting bash -c 'exit 3'"
    with Watched(80, ["bash", "-c", script], tmp_path) as watched:

        def counts() -> set[str]:
            return set(re.findall(r"^setup: (\d+) s$", all_that_was_seen(watched), re.MULTILINE))

        watched.wait_for(lambda: len(counts()) >= 2, "a second count", START_S, PATIENCE_S)
        (tmp_path / "over").touch()
        assert watched.wait(START_S) == 3
        assert watched.rows == []
