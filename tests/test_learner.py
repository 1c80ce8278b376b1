"""A learner that is started again knows of its run."""

import json
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from impala_llm import learner as learner_module
from impala_llm.config import ConfigError, load
from impala_llm.learner import Learner, learn, main
from impala_llm.learning.checkpoints.files import VersionMark, read_manifest
from impala_llm.learning.checkpoints.folder_owner import FolderTaken
from impala_llm.learning.checkpoints.resume import Start, check_folder
from impala_llm.learning.origin import start_model
from impala_llm.learning.publishing import VersionPublisher
from impala_llm.learning.ranks.parallel import Ranks, check_ranks
from impala_llm.learning.training_time import share_done
from impala_llm.pipeline.learner_endpoint import newest_board
from impala_llm.pipeline.shm.run_directory import RunDirectory, find_run, remove_run_dir
from impala_llm.pipeline.weights.board import WeightPublisher
from impala_llm.settings import Config, LearnerConfig
from tests.learning.builders import save_lm


def test_the_time_of_a_run_goes_on_over_restarts() -> None:
    with tempfile.TemporaryDirectory() as base, RunDirectory.create("t", Path(base)) as run:
        began_at = run.began_at()
        assert RunDirectory.attach("t", Path(base)).began_at() == run.began_at() == began_at


def test_the_time_between_two_owners_of_a_run_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with tempfile.TemporaryDirectory() as base:
        with RunDirectory.create("t", Path(base)) as run:
            assert run.began_at() == 1000.0
            run.note_used(90.0)
            run.keep()  # as a killed owner leaves it
        now += 36000.0
        with RunDirectory.create("t", Path(base), take_over=True) as again:
            assert again.used_s == 90.0 and again.began_at() == now - 90.0


def test_a_run_is_over_by_updates_or_by_time() -> None:
    config = LearnerConfig(total_updates=200, max_minutes=5.0)
    assert share_done(config, 0, 0.0) == 0.0
    assert share_done(config, 100, 60.0) == 0.5
    assert share_done(config, 100, 240.0) == pytest.approx(0.8)
    assert share_done(config, 3, 1e6) == 1.0
    assert share_done(LearnerConfig(total_updates=200), 3, 1e6) == 3 / 200


@pytest.mark.parametrize(("used_s", "share"), [(90.0, 0.5), (200.0, 1.0)])
def test_the_first_update_after_a_restart_has_the_progress_that_the_time_of_the_run_says(
    tmp_path: Path, used_s: float, share: float
) -> None:
    name = f"test-{uuid.uuid4().hex[:12]}"
    settings = ["run.terminal=false", "learner.total_updates=1000000", "learner.max_minutes=3"]
    config = load(["experiment=toy", f"run.name={name}", f"run.dir={tmp_path}", *settings])
    try:
        with RunDirectory.create(name) as run:
            run.note_used(used_s)
            run.keep()  # as a killed owner leaves it
        with ExitStack() as stack:
            assert Learner(config, Ranks("cpu"), stack, Start(take_over=True), Mock(number=0)).progress == share
    finally:
        remove_run_dir(name)


def test_versions_are_reserved_also_where_checkpoints_are_switched_off_amid_a_run(tmp_path: Path) -> None:
    """A host is lost after update 4; the next learner writes no checkpoint, and may be lost as well."""
    settings = ["experiment=toy", f"run.name=test-{uuid.uuid4().hex[:12]}", f"run.dir={tmp_path}", "run.terminal=false"]
    stops = Mock(number=0)
    with ExitStack() as stack:
        learner = Learner(load(settings), Ranks("cpu"), stack, Start(), stops)
        learner.update = learner.version = 4
    VersionMark(tmp_path / "checkpoints").reserve(5, ahead=0)  # as it was when the host was lost
    run_id = read_manifest(tmp_path / "checkpoints" / "update-000004").run_id
    with ExitStack() as stack:
        learner = Learner(
            load([*settings, "learner.checkpoints_kept=0"]), Ranks("cpu"), stack, Start(run_id=run_id), stops
        )
        found = VersionMark(tmp_path / "checkpoints")
        assert (learner.update, found.ahead) == (4, learner.version - 4), "by which a later learner counts updates"
        assert found.unused(4) > learner.version > 5


@pytest.mark.parametrize("last", [3, 4])
def test_a_learner_says_where_the_metrics_of_an_update_were_lost_with_the_one_before_it(
    tmp_path: Path, last: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed after it had published the version, or begun a checkpoint of it; or its disk was full."""
    config = load(["experiment=toy", f"run.name=test-{uuid.uuid4().hex[:12]}", f"run.dir={tmp_path}"])
    config.run.terminal = False
    for start in (Start(), Start(run_id=77)):
        with ExitStack() as stack:
            learner = Learner(config, Ranks("cpu"), stack, start, Mock(number=0))
            learner.update = learner.version = 4
        rows = [json.dumps({"step": step, "learner/version": step}) for step in range(1, last + 1)]
        (tmp_path / "tensorboard" / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))
    said = capsys.readouterr().out
    note = "the updates after 3, up to 4, were not logged (their learner died, or its disk was full): curves leave them"
    assert (note in said) == (last == 3)


def test_work_since_the_last_checkpoint_stays_in_memory_where_checkpoints_are_switched_off(tmp_path: Path) -> None:
    """Else the same command would go on from the checkpoint, and the work would be lost."""
    settings = ["experiment=toy", f"run.name=test-{uuid.uuid4().hex[:12]}", f"run.dir={tmp_path}", "run.terminal=false"]
    without = load([*settings, "learner.checkpoints_kept=0"])
    stops = Mock(number=0)
    with ExitStack() as stack:
        learner = Learner(load(settings), Ranks("cpu"), stack, Start(), stops)
        learner.update = learner.version = 4
    run_id = read_manifest(tmp_path / "checkpoints" / "update-000004").run_id
    for update in (4, 6):
        with ExitStack() as stack:
            learner = Learner(without, Ranks("cpu"), stack, Start(run_id=run_id), stops)
            learner.saving.end_update()
            learner.update = update
        left = find_run(without.run.name)
        assert (left is not None) == (update == 6)
    remove_run_dir(without.run.name)


def test_settings_of_a_run_that_goes_on_are_kept_once_its_learner_accepts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["experiment=toy", f"run.name=test-{uuid.uuid4().hex[:12]}", f"run.dir={tmp_path}", "run.terminal=false"]
    settings.append("learner.total_updates=50")
    stops = Mock(number=signal.SIGTERM)
    with ExitStack() as stack:
        learner = Learner(load(settings), Ranks("cpu"), stack, check_folder(load(settings)), stops)
        learner.update = learner.version = 4
    before = (tmp_path / "config.yaml").read_text()
    other = load([*settings, "learner.learning_rate=0.5"])
    start = check_folder(other)
    with monkeypatch.context() as patch, pytest.raises(ConfigError):
        patch.setattr("impala_llm.learner.make_model", Mock(side_effect=ConfigError("other weights")))
        learn(other, Ranks("cpu"), start, stops)
    assert (tmp_path / "config.yaml").read_text() == before
    learn(other, Ranks("cpu"), start, stops)
    assert load([f"experiment={tmp_path}/config.yaml"]).learner.learning_rate == 0.5


@pytest.mark.parametrize("end", [None, SystemExit(143)])
def test_a_learner_whose_run_another_has_gone_on_with_saves_nothing_at_its_end(
    tmp_path: Path, end: SystemExit | None
) -> None:
    """As one does that was cut off for some time, and is then told to stop."""
    config = load(["experiment=toy", f"run.name=test-{uuid.uuid4().hex[:12]}", f"run.dir={tmp_path}"])
    config.run.terminal = False
    other = {"id": "other", "host": "node-7", "space": "another boot", "pid": 12, "started": 1.0, "beats": 0}
    with pytest.raises(FolderTaken, match="process 12 on node-7 has gone on with the run"), ExitStack() as stack:
        learner = Learner(config, Ranks("cpu"), stack, Start(), Mock(number=0))
        learner.update = learner.version = 4
        learner.saving.end_update()
        (tmp_path / "owner.json").write_text(json.dumps(other))
        if end is not None:
            raise end
    assert not (tmp_path / "policy").exists() and not list((tmp_path / "checkpoints").glob("update-*"))
    assert json.loads((tmp_path / "owner.json").read_text())["id"] == "other"
    assert find_run(config.run.name) is None, "what lies in shared memory is stale"


@pytest.mark.parametrize("amid", ["make_model", "suite_of"])
def test_a_learner_that_finds_another_s_name_as_it_begins_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amid: str
) -> None:
    """The other one began in the same moment and wrote its name last."""
    config = load(["experiment=toy", f"run.name=test-{uuid.uuid4().hex[:12]}", f"run.dir={tmp_path}"])
    config.run.terminal = False
    with ExitStack() as stack:
        learner = Learner(config, Ranks("cpu"), stack, Start(), Mock(number=0))
        learner.update = learner.version = 4
    metrics = tmp_path / "tensorboard" / "metrics.jsonl"
    metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 12)))  # of the other one, which is faster
    kept = {path: path.read_bytes() for path in (metrics, tmp_path / "checkpoints" / "versions.json")}
    run_id = read_manifest(tmp_path / "checkpoints" / "update-000004").run_id
    other = {"id": "other", "host": "node-7", "space": "another boot", "pid": 12, "started": 1.0, "beats": 0}

    def taken(do: Callable[..., object], *words: object) -> object:
        (tmp_path / "owner.json").write_text(json.dumps(other))
        return do(*words)

    monkeypatch.setattr(learner_module, amid, partial(taken, getattr(learner_module, amid)))
    with pytest.raises(FolderTaken, match="process 12 on node-7 has gone on with the run"), ExitStack() as stack:
        Learner(config, Ranks("cpu"), stack, Start(run_id=run_id), Mock(number=0))
    changed = [path.name for path, content in kept.items() if path.read_bytes() != content]
    assert changed == ([] if amid == "make_model" else ["versions.json"])


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("last", ["published", "kept"])
def test_a_learner_goes_on_from_the_newest_version_with_its_value_head(
    tmp_path: Path, last: str, lora_rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config()
    config.model.lora.rank = lora_rank
    config.model.path = str(save_lm(tmp_path / "policy"))
    with tempfile.TemporaryDirectory() as base, RunDirectory.create("t", Path(base)) as run:
        model = start_model(config, newest_board(run))
        files = {path.name: path.read_bytes() for path in (tmp_path / "policy").glob("*.json")}
        boards = [WeightPublisher(path, 2, files) for path in (run.weights_path, run.kept_path)]
        publisher = VersionPublisher(Ranks("cpu"), model, *boards, 1 if last == "published" else 3, None)
        publisher.begin(0)
        receiver = Mock(**{"must_keep.return_value": last == "kept"})
        for number in (1, 2):
            for p in model.parameters():
                if p.requires_grad:
                    p.data.add_(0.125 * number)
            publisher.publish(number, receiver)
        resumed = start_model(config, newest_board(run), 2)
        start_model(config, newest_board(run), 2, is_main=False)
    assert capsys.readouterr().out.count("going on from update 2, in shared memory") == 1, "one rank says so for all"
    assert {n: p.tolist() for n, p in resumed.named_parameters()} == {
        n: p.tolist() for n, p in model.named_parameters()
    }


def test_a_learner_that_goes_on_from_rounded_weights_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config()
    config.model.path = str(save_lm(tmp_path / "policy"))
    model = start_model(config, None)
    with tempfile.TemporaryDirectory() as base, RunDirectory.create("t", Path(base)) as run:
        files = {path.name: path.read_bytes() for path in (tmp_path / "policy").glob("*.json")}
        boards = [WeightPublisher(path, 2, files) for path in (run.weights_path, run.kept_path)]
        VersionPublisher(Ranks("cpu"), model, *boards, 1, None, dtype=torch.bfloat16).begin(3)
        resumed = start_model(config, newest_board(run), 3)
    assert "update 3 lies on the board in bfloat16" in capsys.readouterr().out
    for mine, theirs in zip(resumed.lm.parameters(), model.lm.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(torch.bfloat16).float())


def test_a_learner_by_hand_takes_no_folder_that_holds_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert main(["experiment=toy", f"run.name=test-{uuid.uuid4().hex[:12]}", f"run.dir={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert f"run.dir={tmp_path} holds a run" in said and "without a checkpoint" in said


def test_what_a_killed_learner_left_is_not_removed_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"test-{uuid.uuid4().hex[:12]}"
    imports = "import os; from impala_llm.pipeline.shm.run_directory import RunDirectory as R"
    make = f"from pathlib import Path; {imports}; R.create({name!r}, output=Path({str(tmp_path)!r})); os._exit(0)"
    subprocess.run([sys.executable, "-c", make], check=True)
    try:
        settings = ["experiment=toy", f"run.name={name}", f"run.dir={tmp_path}"]
        assert check_folder(load([*settings, "run.resume=true"])).take_over
        assert capsys.readouterr().out == ""
        check_folder(load(settings))
        assert "run.resume=true would have gone on with it" in capsys.readouterr().out
    finally:
        remove_run_dir(name)


def test_a_learner_that_is_refused_leaves_the_settings_of_the_living_one(tmp_path: Path) -> None:
    name = f"t-{uuid.uuid4().hex[:8]}"
    (tmp_path / "config.yaml").write_text("of the living one")
    with RunDirectory.create(name):
        assert main([f"run.name={name}", f"run.dir={tmp_path}", "run.resume=true"]) == 2
    assert (tmp_path / "config.yaml").read_text() == "of the living one"


def test_a_variable_of_torchruns_that_is_empty_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    check_ranks(load(["experiment=toy", "learner.num_ranks=2"]))
    monkeypatch.setenv("WORLD_SIZE", "")
    check_ranks(load(["experiment=toy", "learner.num_ranks=1"]))
    ranks = Ranks("cpu", environment={"WORLD_SIZE": "", "RANK": "", "LOCAL_RANK": ""})
    assert (ranks.num_processes, ranks.process) == (1, 0)
