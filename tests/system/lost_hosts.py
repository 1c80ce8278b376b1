"""A run that loses its host again and again, beside one that nobody disturbs: for a test, and tools/lost_hosts.py.

Only what lies in the run's folder on disk survives a loss. With η = 0, one actor and one seed both runs must make the
same updates to the last bit, under versions that are never used for two contents.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from impala_llm.pipeline.weights.board import WeightReader
from tests.system.runs import Run, column

LOSSES = ("loss/policy", "loss/value", "loss/total", "optimizer/gradient_norm", "optimizer/learning_rate", "ratio/mean")
BATCH = 32
SYNCHRONOUS = (
    "experiment=corridor",
    "algorithm.max_staleness=0",
    "actor.num_actors=1",
    "run.seed=3",
    f"learner.batch_size={BATCH}",
    "algorithm.curriculum=0.1",
)
END_S = 900.0


def lose_host(run: Run) -> int:
    """Kill all processes of a run at once, and delete its folder in shared memory.

    Returns:
        The newest version that the run has published; -1: none.
    """
    killed = run.processes()
    for process in killed:
        process.kill()
    for process in run.started:
        process.wait()
    psutil.wait_procs(killed)
    newest = -1
    for folder in Path("/dev/shm").glob(f"*{run.name}*"):
        versions = [WeightReader(board).latest() for board in folder.glob("*/weights")]
        newest = max([newest, *(version for version in versions if version is not None)])
        shutil.rmtree(folder)
    return newest


def losses(rows: Sequence[dict[str, Any]]) -> dict[int, list[float]]:
    """By update; a step that was made again counts as it was made last."""
    return {row["step"]: [row[name] for name in LOSSES] for row in rows}


def violations(directory: Path, num_updates: int, moments: Sequence[Callable[[Run], object]]) -> list[str]:
    """Lose a run's host at these moments, and compare the run with an undisturbed one.

    Args:
        directory: for the folders of both runs.
        num_updates: of both, more than are made by the last moment.
        moments: each is called when the run has been started again, and returns when its host is to be lost.

    Returns:
        A sentence for each promise that was not kept.
    """
    settings = (*SYNCHRONOUS, f"learner.total_updates={num_updates}")
    with Run(directory / "whole", *settings, "learner.checkpoints_kept=0") as run:
        assert run.train().wait(END_S) == 0, run.printed()
        expected = losses(run.rows())
        policy = (run.directory / "policy" / "model.safetensors").read_bytes()
    assert len(expected) == num_updates
    found = []
    with Run(directory / "lost", *settings, "learner.checkpoint_every=4") as run:
        seen: dict[float, dict[str, Any]] = {}
        published = -1
        for moment in moments:
            supervisor = run.train()
            moment(run)
            assert supervisor.poll() is None, f"the run has ended before all losses: {run.printed()}"
            published = max(published, lose_host(run))
            for row in run.rows():
                if row != seen.setdefault(row["learner/version"], row):
                    found.append(f"version {row['learner/version']:.0f} was made twice")
        assert run.train().wait(END_S) == 0, run.printed()
        rows = run.rows()
        again = [row["learner/version"] for row in rows if row != seen.get(row["learner/version"], row)]
        new = [row["learner/version"] for row in rows if row["learner/version"] not in seen]
        found += [f"version {version:.0f} was made twice" for version in again]
        if new and min(new) <= published:
            found.append(f"version {min(new):.0f} was made after version {published} had been published")
        if column(rows, "step") != list(range(1, num_updates + 1)):
            found.append(f"the updates are {column(rows, 'step')}")
        versions = column(rows, "learner/version")
        if versions != sorted(set(versions)):
            found.append(f"the versions are {versions}")
        if differing := [update for update, values in losses(rows).items() if values != expected.get(update)]:
            found.append(f"the losses of updates {differing} are others")
        if (run.directory / "policy" / "model.safetensors").read_bytes() != policy:
            found.append("the last weights are others")
        if (received := sum(column(rows, "pipeline/received"))) != num_updates * BATCH:
            found.append(f"{received:.0f} trajectories were received for {num_updates} updates of {BATCH}")
        lives = json.loads((run.directory / "checkpoints" / "versions.json").read_text())["life"]
        if not 0 < lives <= len(moments):  # fewer where a learner was lost before it had begun
            found.append(f"the run has gone on {lives} times from a checkpoint alone, after {len(moments)} losses")
        run.assert_gone()
    return found
