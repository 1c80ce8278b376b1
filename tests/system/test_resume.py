"""Runs that lose their host, or are interrupted: from the checkpoint on they are what they would have been."""

import json
import random
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from tests.system.lost_hosts import SYNCHRONOUS, lose_host, losses, violations
from tests.system.runs import ROOT, Run, column

STOP_S = 30.0


@pytest.mark.system
def test_a_run_that_loses_its_host_makes_the_same_updates_under_new_versions(tmp_path: Path) -> None:
    """Killed at random moments, and started elsewhere from its checkpoints: losses equal an undisturbed run's to the
    last bit, no version has two contents, and each update trains on the tickets that it would have trained on."""
    rng = random.Random(0)
    moments = [lambda run: run.wait_for_updates(rng.randint(5, 9))] * 2
    assert violations(tmp_path, 24, moments) == []


@pytest.mark.system
def test_a_run_that_loses_its_host_before_the_first_checkpoint_begins_again(tmp_path: Path) -> None:
    """By the same command, and under new versions: its curve is that of an undisturbed run."""
    settings = (*SYNCHRONOUS, "learner.total_updates=4")
    with Run(tmp_path / "whole", *settings) as run:
        assert run.train().wait(240) == 0, run.printed()
        expected = losses(run.rows())
    with Run(tmp_path / "lost", *settings) as run:
        run.train()
        run.wait_for_updates(2)
        published = lose_host(run)
        for path in (run.directory / "checkpoints").glob("update-*"):  # as if it had been lost a little earlier
            shutil.rmtree(path)
        assert run.train().wait(240) == 0, run.printed()
        assert run.log.read_text().count("was lost before its first checkpoint, and begins again") == 1
        assert column(run.rows(), "step") == [1, 2, 3, 4] and losses(run.rows()) == expected
        assert min(column(run.rows(), "learner/version")) > published > 0
        events = EventAccumulator(str(run.directory / "tensorboard"))
        events.Reload()
        assert [event.step for event in events.Scalars("time/step_s")] == [1, 2, 3, 4]
        run.assert_gone()


@pytest.mark.system
def test_ctrl_c_and_the_same_command_again_is_one_curve(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    settings = ("experiment=toy", "actor.num_actors=1", "learner.save_every=0", "learner.total_updates=60")
    with Run(tmp_path, *settings, "learner.batch_size=16") as run:
        supervisor = run.start(sys.executable, "-m", "impala_llm.cli", "train", errors=errors)
        run.wait_for_updates(10)
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait(STOP_S) == 128 + signal.SIGINT
        run.assert_gone()
        assert len(errors.read_text().splitlines()) <= 3 and "Traceback" not in errors.read_text()
        assert "the run was interrupted by SIGINT; the same command goes on with it" in errors.read_text()
        assert "the policy is saved in" in (tmp_path / "logs" / "learner.log").read_text()
        AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
        last = int(run.rows()[-1]["step"])
        assert (tmp_path / "checkpoints" / f"update-{last:06d}" / "manifest.json").is_file(), run.printed()
        assert run.train().wait(240) == 0, run.printed()
        said = run.log.read_text()
        assert said.count("learner: going on from update") == 1
        assert f"going on from update {last}, checkpoint {tmp_path}/checkpoints/update-{last:06d}\n" in said
        assert column(run.rows(), "step") == list(range(1, 61)) == column(run.rows(), "learner/version")
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        assert [event.step for event in events.Scalars("time/step_s")] == list(range(1, 61))
        refused = run.train()
        assert refused.wait(STOP_S) == 2
        assert "has finished at update 60: raise learner.total_updates=60" in run.log.read_text()
        run.assert_gone()


@pytest.mark.system
def test_what_a_killed_supervisor_left_outlives_an_interrupted_start(tmp_path: Path) -> None:
    """Ctrl-C while the learner that takes it over is starting: no disk has anything of the run."""
    with Run(tmp_path, "experiment=toy", "actor.num_actors=1", "learner.total_updates=100000") as run:
        supervisor = run.train()
        run.wait_for_updates(3)
        killed = run.processes()
        supervisor.kill()
        supervisor.wait(STOP_S)
        psutil.wait_procs(killed, STOP_S)
        last = int(run.rows()[-1]["step"])
        supervisor = run.train()
        run.wait_for(lambda: run.processes(str(ROOT / "impala_llm" / "learner.py")), "the start of the next learner")
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait(STOP_S) == 128 + signal.SIGINT
        said = run.log.read_text()
        assert "stays in memory" in said and "the same command goes on with it" in said
        supervisor = run.train()
        run.wait_for_updates(2)
        steps = column(run.rows(), "step")
        assert steps == sorted(set(steps)) and steps[-1] > last
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait(STOP_S) == 128 + signal.SIGINT
        run.assert_gone()


@pytest.mark.system
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(tmp_path: Path) -> None:
    with Run(tmp_path, *SYNCHRONOUS, "learner.total_updates=12", "learner.checkpoint_every=4") as run:
        assert run.train().wait(240) == 0, run.printed()
        expected = losses(run.rows())
        (newest, before) = sorted((tmp_path / "checkpoints").glob("update-*"), reverse=True)
        assert [newest.name, before.name] == ["update-000012", "update-000008"]
        weights = newest / "policy" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"!")
        run.settings.append("learner.total_updates=14")
        shutil.copytree(before, tmp_path / "checkpoints" / "update-000013.new")
        assert run.train().wait(240) == 0, run.printed()
        said = run.log.read_text()
        assert "checkpoint update-000012: policy/model.safetensors has another checksum: it is passed over" in said
        assert "checkpoint update-000013 is half-written" in said
        assert "going on from update 8, checkpoint " in said
        again = losses(run.rows())
        assert list(again) == list(range(1, 15)) and [again[n][0] for n in range(1, 9)] == [
            expected[n][0] for n in range(1, 9)
        ]
        manifest = json.loads((tmp_path / "checkpoints" / "update-000014" / "manifest.json").read_text())
        assert manifest["update"] == 14 and manifest["version"] > 12
        run.assert_gone()
