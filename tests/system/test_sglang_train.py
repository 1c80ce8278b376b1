"""Training on real SGLang servers: it learns, a killed server costs nothing, actors outlive what may pass."""

import json
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from impala_llm.config import load
from impala_llm.learning.policy.scratch import make_scratch_policy
from tests.helpers import has_ended
from tests.system.runs import Process, Run, column
from tests.system.sglang import mapped_shared_files, needs_sglang, sglang_python, shared_files

pytestmark = [pytest.mark.system, pytest.mark.timeout(900), needs_sglang]

UPDATES = 200
"""At most: 60 are enough for a third of the score, and to outlast the new start of a server."""
START_S = 300.0
"""Deadline of each phase; generous, since machines may be busy."""


def servers_of(run: Run) -> list[psutil.Process]:
    """Without their guards, whose command lines have the same words."""
    found = []
    for process in run.processes("sglang.launch_server"):
        with suppress(psutil.Error):
            if not any("sglang/guard.py" in word for word in process.cmdline()):
                found.append(process)
    return found


def family(process: Process) -> set[psutil.Process]:
    """With what descends from it: SGLang writes over the variables that `Run.processes` knows its own by."""
    parent = psutil.Process(process.pid)
    return {parent, *parent.children(recursive=True)}


def weight_version(server: psutil.Process) -> int:
    """Version of the weights that a server says it has; -1 while it does not answer."""
    try:
        words = server.cmdline()
        port = words[words.index("--port") + 1]
        key = json.loads(Path(words[words.index("--config") + 1]).read_text())["api-key"]
        headers = {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/model_info", headers=headers)
        with urllib.request.urlopen(request, timeout=5) as reply:
            return int(json.load(reply)["weight_version"])
    except (OSError, psutil.Error, ValueError):
        return -1


def test_two_actors_with_servers_learn_although_one_server_is_killed(tmp_path: Path) -> None:
    settings = (f"engine.python={sglang_python()}", "actor.num_actors=2", "actor.max_episodes=16", "run.seed=1")
    updates = f"learner.total_updates={UPDATES}"
    with Run(tmp_path, "experiment=toy", "engine=sglang", updates, *settings) as run:
        training = run.train()
        run.wait_for(
            lambda: sum(weight_version(server) >= 5 for server in servers_of(run)) == 2,
            "five versions on both",
            START_S,
        )
        victim, other = servers_of(run)
        left = family(training)
        files = mapped_shared_files(left)

        version = len(run.rows())
        victim.kill()
        run.wait_for(
            lambda: any(weight_version(p) >= version for p in servers_of(run) if p not in (victim, other)),
            "the return of the server with newer weights",
            START_S,
        )
        back = len(run.rows())
        assert back >= version + 5, "the learner goes on with the other server"
        left |= family(training)
        files |= mapped_shared_files(left)

        def has_learned() -> bool:
            scores = column(run.rows(), "rollout/score")
            return bool(np.mean(scores[-10:]) >= 0.3)

        run.wait_for(lambda: len(run.rows()) > back and has_learned(), "a score of 0.3", START_S)
        training.send_signal(signal.SIGINT)
        assert training.wait(START_S) == 128 + signal.SIGINT, run.printed()
        run.assert_gone()
        assert [process for process in left if not has_ended(process, 0)] == []
        assert files and not files & shared_files()

        rows = run.rows()
        config = load(["experiment=toy"])
        assert (
            "is lost, its completions go on"
            in (tmp_path / "logs" / "actor-0.log").read_text() + (tmp_path / "logs" / "actor-1.log").read_text()
        )
        assert column(rows, "actor/engine_restarts")[-1] >= 1.0
        scores = column(rows, "rollout/score")
        assert np.mean(scores[:5]) < 0.1

        # Weights changed while completions were under way, and no completion was older than allowed.
        assert max(column(rows, "staleness/span")) > 0
        assert max(column(rows, "staleness/oldest")) <= config.algorithm.max_staleness
        pauses, transfers = column(rows, "weights/pause_s"), column(rows, "weights/transfer_s")
        assert 0 < transfers[-1] < pauses[-1]
        assert max(column(rows, "mismatch/logprob_max")) < 1e-3

        # Every episode was played to its end once and trained on at most once.
        for name in ("refused", "duplicates", "regranted", "expired", "malformed"):
            assert sum(column(rows, f"pipeline/{name}")) == 0, name
        assert sum(column(rows, "actor/failed_episodes")) == 0
        assert set(column(rows, "buffer/reuse")) == {1.0}
        trained = len(rows) * config.learner.batch_size
        assert trained + sum(column(rows, "buffer/evicted")) <= sum(column(rows, "pipeline/received"))


def test_actors_outlive_what_keeps_their_servers_from_coming_up_unless_it_will_again(tmp_path: Path) -> None:
    """Each says why. Where no server can start with its settings it ends; else it keeps its heartbeat while a healthy
    actor feeds the learner, and ends when the learner says so. Weights that are not of the server's model:
    tests/test_actor_starts.py and test_sglang_engine.py."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    empty = make_scratch_policy(tmp_path / "empty", hidden_size=32)
    (empty / "model.safetensors").unlink()
    python = f"engine.python={sglang_python()}"
    reasons = {
        "has no sglang installed": [f"engine.python={bare / 'bin' / 'python'}"],
        "has no weights": [python, f"model.path={empty}"],
        "did not come up within 2 s (engine.start_timeout_s)": [python, "engine.start_timeout_s=2"],
    }
    settings = ("actor.num_actors=4", "learner.total_updates=60", "learner.batch_size=32", "pipeline.actor_timeout_s=4")
    with Run(tmp_path, "experiment=toy", *settings) as run:
        learner = run.call("learner")
        given = enumerate(reasons.values())
        actors = [run.call("actor", "--index", str(i), "engine=sglang", *own) for i, own in given]
        for i, reason in enumerate(reasons):
            run.wait_for(
                lambda i=i, reason=reason: any(
                    line.startswith((f"actor-{i}: ", f"actor {i}: ")) and reason in line
                    for line in run.log.read_text().splitlines()
                ),
                f"the reason of actor {i}: {reason}",
                START_S,
            )
        assert [process.wait(START_S) for process in actors[:2]] == [2, 2], run.printed()
        assert [process.poll() for process in (learner, *actors[2:])] == [None] * 2
        actors.append(run.call("actor", "--index", "3"))  # the first that can play: from now on there are updates
        assert learner.wait(START_S) == 0, run.printed()
        assert [process.wait(START_S) for process in actors] == [2, 2, 0, 0], run.printed()
        run.assert_gone()
        rows = run.rows()
        # From a heartbeat, and there is one every second. Those that have ended count until they are missed.
        assert len(rows) == 60 and 1 / 4 - 1e-6 <= max(column(rows, "actor/engine_up")) <= 1 / 2 + 1e-6
