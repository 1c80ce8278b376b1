"""The whole way as real processes: it learns, ends when told to, survives its actors, and repeats itself to the bit."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from impala_llm.config import load
from impala_llm.pipeline.shared_settings import shared_settings
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.transport.actor_channel import ActorChannel
from impala_llm.pipeline.transport.learner_connection import ChannelTimes
from impala_llm.pipeline.transport.messages import Grant, Refused
from tests.pipeline.support import make_trajectory, turns_until
from tests.system.forked_command import forked_command
from tests.system.runs import ROOT, Process, Run, column

ENDLESS = "learner.total_updates=100000"
STOP_S = 30.0
"""Seconds that the design allows from a signal to the end of everything."""


@pytest.mark.system
def test_a_learner_and_two_actors_learn_and_leave_nothing(tmp_path: Path) -> None:
    """The threshold: better than any policy without memory for what it was just shown. The toy is learned on SGLang,
    in test_sglang_train.py."""
    out_of_reach = 0.75
    # The preset has 400 updates, and needs 250 for a score of 0.9.
    settings = ("experiment=corridor", "learner.total_updates=300", "actor.num_actors=2", "run.seed=1")
    with Run(tmp_path, *settings, "evaluation.before_and_after=true", "evaluation.num_tasks=200") as run:
        assert run.train().wait(280) == 0, run.printed()
        run.assert_gone()
        before, after = json.loads((tmp_path / "evaluation.json").read_text())
        assert before["score"] < 0.5 * out_of_reach
        assert after["score"] >= 0.9 > out_of_reach
        scores = column(run.rows(), "rollout/score")  # sampled and not greedy: lower
        assert np.mean(scores[:5]) < 0.1 < 0.7 < np.mean(scores[-10:])


@pytest.mark.system
def test_it_learns_from_unrolls_of_episodes_that_go_on(tmp_path: Path) -> None:
    """Unrolls have one turn each, so that the reward, which comes after the last, reaches the first two by the values
    alone: that takes longer, and here it is only seen to begin."""
    settings = ("experiment=corridor", "actor.unroll_turns=1", "learner.batch_size=192", "run.seed=1")
    pace = ("learner.total_updates=160", "learner.decay=constant", "learner.learning_rate=1e-3")
    with Run(tmp_path, *settings, *pace, "model.value_trunk_gradient=true") as run:

        def has_clearly_begun() -> bool:
            """Beyond what chance brings to one of many looks: a score of 0.015 is twenty episodes of 20 updates."""
            scores = column(run.rows(), "rollout/score")
            return len(scores) >= 60 and bool(np.mean(scores[-20:]) > 2.5 * np.mean(scores[:20]))

        run.train_until(has_clearly_begun, 280)
        rows = run.rows()
        scores = column(rows, "rollout/score")
        assert np.mean(scores[-20:]) > 1.5 * np.mean(scores[:20])
        assert set(column(rows, "rollout/turns")) == {3.0}
        received, episodes = sum(column(rows, "pipeline/received")), sum(column(rows, "rollout/episodes"))
        assert received == pytest.approx(3 * episodes, rel=0.05)
        # Only before anything is known of the episodes' unrolls.
        assert sum(column(rows[20:], "buffer/evicted")) < 0.01 * received


@pytest.mark.system
def test_a_run_whose_folder_another_learner_has_taken_ends_and_says_so(tmp_path: Path) -> None:
    """As after a node that was cut off, and whose run has gone on elsewhere."""
    with Run(tmp_path, "experiment=toy", "actor.num_actors=1", ENDLESS) as run:
        supervisor = run.train()
        run.wait_for_updates(3)
        mine = json.loads((tmp_path / "owner.json").read_text())
        (tmp_path / "owner.json").write_text(json.dumps({**mine, "id": "other", "host": "node-7"}))
        assert supervisor.wait(STOP_S) == 2
        assert "on node-7 has gone on with the run" in run.printed() and "Traceback" not in run.printed()
        assert not (tmp_path / "policy").exists()
        run.assert_gone()


@pytest.mark.system
def test_a_lost_terminal_ends_a_run_in_three_lines_and_keeps_what_was_learned(tmp_path: Path) -> None:
    """By SIGHUP; SIGTERM below, SIGINT, and that the same command goes on, in test_resume.py."""
    with Run(tmp_path / "run", "experiment=toy", "actor.num_actors=1", "learner.save_every=0", ENDLESS) as run:
        errors = tmp_path / "errors"
        supervisor = run.start(sys.executable, "-m", "impala_llm.cli", "train", errors=errors)
        run.wait_for_updates(3)
        supervisor.send_signal(signal.SIGHUP)
        assert supervisor.wait(STOP_S) == 128 + signal.SIGHUP
        run.assert_gone()
        assert len(errors.read_text().splitlines()) <= 3 and "Traceback" not in errors.read_text()
        assert "the run was interrupted by SIGHUP; the same command goes on with it" in errors.read_text()
        assert "the policy is saved in" in (tmp_path / "run" / "logs" / "learner.log").read_text()
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy")
        evaluation = ("--config", str(tmp_path / "run" / "config.yaml"), "evaluation.num_tasks=8")
        played = forked_command(["evaluate", *evaluation], ROOT)
        assert played.returncode == 0, played.stderr
        assert f"playing what the run has learned, {tmp_path}/run/policy" in played.stderr
        assert "8 of 200 tasks are played (evaluation.num_tasks=8)" in played.stderr


@pytest.mark.system
def test_ctrl_c_again_and_again_ends_learner_and_actor_quietly_and_keeps_the_policy(tmp_path: Path) -> None:
    """Both started by hand: as their supervisor's children they do not get it."""
    with Run(tmp_path, "experiment=toy", ENDLESS) as run:
        learner, actor = run.call("learner"), run.call("actor", "--index", "0")
        run.wait_for_updates(2)
        for process in (actor, learner):
            while process.poll() is None:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.05)
            assert process.returncode == 128 + signal.SIGINT
        assert "Traceback" not in run.log.read_text() and "the policy is saved in" in run.log.read_text()
        assert (tmp_path / "policy" / "model.safetensors").is_file()
        run.assert_gone()


@pytest.mark.system
def test_the_defaults_begin_with_a_policy_that_scores(tmp_path: Path) -> None:
    """Nothing would be learned from scores that are 0 throughout."""
    with Run(tmp_path, "learner.total_updates=2", "learner.batch_size=16") as run:
        assert run.train().wait(280) == 0, run.printed()
        assert min(column(run.rows(), "rollout/score")) > 0.2
        run.assert_gone()


@pytest.mark.system
def test_a_learner_alone_waits_for_actors_that_are_started_apart(tmp_path: Path) -> None:
    with Run(tmp_path, "experiment=toy", "learner.total_updates=5") as run:
        settings, run.settings = run.settings, [*run.settings, "actor.num_actors=0"]
        learner = run.train()
        run.wait_for(lambda: "start actors with `impala-llm actors" in run.log.read_text(), "a word on how actors join")
        run.settings = settings
        actors = run.start(sys.executable, "-m", "impala_llm.cli", "actors", "--num-actors", "1")
        assert (learner.wait(120), actors.wait(30)) == (0, 0), run.printed()
        assert len(run.rows()) == 5
        run.assert_gone()


@pytest.mark.system
def test_training_survives_the_loss_of_actor_and_learner_and_a_malformed_trajectory_and_ends_on_sigterm(
    tmp_path: Path,
) -> None:
    """With one actor no update beyond what is buffered can come but from the one that was started again. The learner
    ends in order, by a signal of somebody else; one that is killed, in the next test and in test_ranks.py."""
    with Run(tmp_path, "experiment=toy", "actor.num_actors=1", ENDLESS) as run:
        supervisor = run.train()
        run.wait_for_updates(3)
        assert run.listening() == set()
        [actor] = run.processes(str(ROOT / "impala_llm/actor.py"))
        actor.kill()
        run.wait_for(
            lambda: [p.pid for p in run.processes(str(ROOT / "impala_llm/actor.py"))] not in ([], [actor.pid]),
            "a new start of the actor",
        )
        run.wait_for_updates(8)
        assert "actor 0 died (killed by SIGKILL)" in run.log.read_text()

        refuse_one_trajectory(run)
        run.wait_for_updates(8)
        [learner] = run.processes(str(ROOT / "impala_llm/learner.py"))
        learner.terminate()
        run.wait_for(lambda: "going on from update" in run.log.read_text(), "a new start of the learner")
        run.wait_for_updates(8)
        assert sum(column(run.rows(), "pipeline/refused")) == 1
        steps = column(run.rows(), "step")
        assert steps == sorted(set(steps)), "no version is made twice"

        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(STOP_S) == 128 + signal.SIGTERM
        run.assert_gone()
        assert "the run was interrupted by SIGTERM; the same command goes on with it" in run.log.read_text()
        # What was learned is there, and the last line says where.
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
            f.name for f in (tmp_path / "policy").iterdir()
        }
        assert f"policy, logs, tensorboard are in {tmp_path}" in run.log.read_text().splitlines()[-1]


@pytest.mark.system
def test_an_offline_run_outlasts_its_arena_and_goes_on_with_its_own_policy_after_a_kill(tmp_path: Path) -> None:
    """Four times as many trajectories as the trajectory store has slots for, all from the first weights."""
    offline = ("learner.sync_interval=null", "algorithm.max_staleness=null")
    small = ("learner.batch_size=32", "replay.capacity=32", "learner.stall_timeout_s=30")
    with Run(tmp_path, "experiment=toy", *offline, *small, ENDLESS) as run:
        supervisor = run.train()
        run.wait_for_updates(4 * 128 // 32)
        [learner] = [
            p for p in run.processes(str(ROOT / "impala_llm/learner.py")) if "torch.distributed.run" not in p.cmdline()
        ]
        learner.kill()
        run.wait_for(lambda: "going on from update" in run.log.read_text(), "a new start of the learner")
        run.wait_for_updates(4)
        versions = column(run.rows(), "step")
        goes_on_with = int(run.log.read_text().split("going on from update ")[1].split(",")[0]) + 1
        assert goes_on_with > 8 and versions.count(goes_on_with) >= 1 and versions.count(1) == 1
        ages = {row["step"]: row["staleness/mean"] for row in run.rows()}
        assert ages == {step: step - 1 for step in ages}, "all of it was sampled by version 0"
        assert sum(column(run.rows(), "pipeline/refused")) == 0
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(STOP_S) == 128 + signal.SIGTERM
        run.assert_gone()


def refuse_one_trajectory(run: Run) -> None:
    """Play an actor whose only trajectory holds a token outside of the vocabulary."""
    run_dir = RunDirectory.attach(run.name)
    intruder = ActorChannel(run_dir.endpoint(0), "intruder", run_dir, arena_bytes=1 << 16, times=ChannelTimes(0.1))
    try:
        intruder.hello(shared_settings(load([f"experiment={run.directory}/config.yaml"])))
        intruder.request(1)
        events = turns_until(lambda: intruder.held, intruder)
        [ticket] = [ticket for event in events if isinstance(event, Grant) for ticket in event.tickets]
        intruder.request(0)
        good = make_trajectory(ticket, version=ticket.min_version, actor_id="intruder")
        intruder.send(dataclasses.replace(good, tokens=np.full_like(good.tokens, 10**6)))
        events = turns_until(lambda: intruder.num_unacknowledged == 0, intruder)
        [refused] = [event for event in events if isinstance(event, Refused)]
        assert "vocabulary" in refused.reason
    finally:
        intruder.close()


@pytest.mark.system
def test_synchronous_runs_of_one_seed_are_equal_to_the_last_bit(tmp_path: Path) -> None:
    """The algorithm is group-relative; V-trace in test_resume.py. Without torchrun: one rank needs none. The second
    run is started by forks. The environment's module is the user's, and has the name of one of ours."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "trainer.py").write_text("from impala_llm.envs.toy import ParrotSuite")
    losses, policies = [], []
    for number in range(2):
        settings = ("algorithm.max_staleness=0", "learner.total_updates=15", "run.seed=3", "env=trainer:ParrotSuite")
        with Run(tmp_path / str(number), "experiment=toy", *settings) as run:
            run.python_path.append(str(tmp_path / "own"))
            if number == 0:
                learner: Process = run.start(sys.executable, "impala_llm/learner.py")
                actor: Process = run.start(sys.executable, "impala_llm/actor.py", "--index", "0")
            else:
                learner, actor = run.call("learner"), run.call("actor", "--index", "0")
            assert (learner.wait(120), actor.wait(30)) == (0, 0), run.printed()
            assert OmegaConf.load(run.directory / "config.yaml").run.name == run.name
            printed = run.log.read_text()
            assert "connected to the learner" in printed and "the learner has ended the run" in printed
            assert "the policy is saved in" in printed
            assert f"impala-llm evaluate --config {run.directory}/config.yaml" in printed
            run.assert_gone()
            rows = run.rows()
            assert set(column(rows, "staleness/oldest")) == {0.0}
            names = ("loss/policy", "loss/value", "loss/total", "optimizer/gradient_norm", "ratio/mean")
            losses.append({name: column(rows, name) for name in names})
            policies.append((run.directory / "policy" / "model.safetensors").read_bytes())
    assert len(losses[0]["loss/total"]) == 15 and len(set(losses[0]["loss/total"])) > 10
    assert losses[0] == losses[1]
    assert policies[0] == policies[1]


@pytest.mark.system
def test_actors_of_the_tool_end_on_a_signal_and_without_a_learner(tmp_path: Path) -> None:
    with Run(tmp_path / "signal", "experiment=toy") as run:
        actors = run.start("tools/launch_actors.sh", "--num-actors", "2")
        run.wait_for(lambda: len(run.processes(str(ROOT / "impala_llm/actor.py"))) == 2, "the start of two actors")
        actors.send_signal(signal.SIGTERM)
        assert actors.wait(STOP_S) == 128 + signal.SIGTERM
        run.assert_gone()
    with Run(tmp_path / "alone", "experiment=toy", "pipeline.learner_timeout_s=0.1") as run:
        assert run.start("tools/launch_actors.sh", "--num-actors", "1").wait(120) == 1
        assert "start its learner first" in run.log.read_text()
        run.assert_gone()
    with Run(tmp_path / "usage", "experiment=toy") as run:
        assert run.start("tools/launch_actors.sh", "--actors", "2").wait(30) == 2
        assert "--actors is no option" in run.log.read_text()


@pytest.mark.system
def test_a_killed_supervisor_takes_its_processes_along_and_the_next_run_of_the_name_begins_anew(tmp_path: Path) -> None:
    with Run(tmp_path, "experiment=toy", "learner.num_ranks=2", "actor.num_actors=1", ENDLESS) as run:
        supervisor = run.train(as_users_do=True)
        run.wait_for_updates(3)
        supervisor.kill()
        supervisor.wait()
        deadline = time.monotonic() + STOP_S
        while run.processes():
            assert time.monotonic() < deadline, run.processes()
            time.sleep(0.05)
        for folder in ("tensorboard", "checkpoints"):
            shutil.rmtree(tmp_path / folder)
        supervisor = run.train()
        run.wait_for_updates(3)
        assert column(run.rows(), "step")[0] == 1
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(STOP_S) == 128 + signal.SIGTERM
        run.assert_gone()


@pytest.mark.system
def test_ranks_on_several_hosts_are_refused_at_the_start(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}
    command = [sys.executable, str(ROOT / "impala_llm/learner.py"), "experiment=toy", "learner.num_ranks=4"]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "4 ranks, 2 of them on this host" in ended.stderr and "--nnodes 1" in ended.stderr
