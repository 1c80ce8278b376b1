"""A run begins, goes on or is refused, by the contents of its folders."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from impala_llm.cli import main
from impala_llm.commands.preflight import check_training
from impala_llm.config import ConfigError, load, to_yaml
from impala_llm.learning.checkpoints.files import CheckpointManifest, VersionMark, manifest_bytes, name_of
from impala_llm.learning.checkpoints.folder_owner import FolderOwner
from impala_llm.learning.checkpoints.kept_settings import keep_settings
from impala_llm.learning.checkpoints.resume import Start, can_go_on, check_folder, how_to_start
from impala_llm.learning.policy.model_files import model_checksum
from impala_llm.pipeline.shm.run_directory import RunDirectory, RunDirectoryError, find_run, remove_run_dir
from impala_llm.pipeline.shm.store_header import sizes
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.settings import ReplayConfig
from tests.learning.builders import save_lm


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[list[str]]:
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield ["experiment=toy", f"run.name={name}", f"run.dir={tmp_path}/run", "learner.total_updates=50"]
    remove_run_dir(name)


def make_run(
    settings: list[str],
    update: int | None,
    *others: str,
    minutes_used: float = 0.0,
    patience: int = 0,
    start: int | None = None,
) -> Path:
    """The folder that a run has left on the disk, with a checkpoint or without; returns its path."""
    config = load([*settings, *others])
    folder = Path(config.run.dir)
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "tensorboard" / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "config.yaml").write_text(to_yaml(config))
    if update is not None:
        checkpoint = folder / "checkpoints" / name_of(update)
        checkpoint.mkdir(parents=True)
        manifest = CheckpointManifest(checkpoint, update, update, 77, 1, minutes_used, {}, {}, patience, start)
        (checkpoint / "manifest.json").write_bytes(manifest_bytes(manifest))
    return folder


def name_of_run(settings: list[str]) -> str:
    return settings[1].partition("=")[2]


def leave_in_memory(
    settings: list[str],
    output: Path,
    life: int | None = None,
    num_ranks: int = 1,
    run_id: int = 77,
    replay: ReplayConfig | None = None,
) -> None:
    """Leave in shared memory what a dead learner leaves. life: None: it noted none. replay: None: no store."""
    with RunDirectory.create(name_of_run(settings), run_id=run_id, output=output.resolve()) as run:
        if life is not None:
            run.note_learner(life, num_ranks)
        if replay is not None:
            TrajectoryStore(run.replay_path(), *sizes(replay))
        run.keep()
    assert find_run(name_of_run(settings)).run.run_id == run.run_id


def refusal(settings: list[str], *others: str) -> str:
    with pytest.raises(ConfigError) as error:
        how_to_start(load([*settings, *others]))
    return str(error.value)


@pytest.mark.parametrize("resume", ["auto", "false"])
def test_an_empty_folder_begins_a_run(resume: str, settings: list[str]) -> None:
    assert how_to_start(load([*settings, f"run.resume={resume}"])) == Start()


def test_the_same_command_goes_on_from_the_checkpoint(settings: list[str]) -> None:
    make_run(settings, 20)
    assert how_to_start(load(settings)) == Start(take_over=False, run_id=77)
    others = ("learner.total_updates=90", "actor.num_actors=3", "learner.learning_rate=0.1", "run.resume=true")
    assert how_to_start(load([*settings, *others])).run_id == 77


def test_a_dry_run_says_whether_a_run_would_begin_or_go_on_and_what_has_changed(
    settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--dry-run", *settings]) == 0
    assert "impala-llm: with these settings a run would begin; nothing" in capsys.readouterr().err
    folder = make_run(settings, 20)
    assert main(["train", "--dry-run", *settings, "learner.learning_rate=0.1"]) == 0
    said = capsys.readouterr().err
    assert "impala-llm: going on with learner.learning_rate=0.1, before 0.001" in said
    assert f"impala-llm: with these settings the run in {folder} would go on; nothing was started" in said
    with FolderOwner(folder, is_main=True):
        assert main(["train", "--dry-run", *settings]) == 2
    assert f"{folder} is in use" in capsys.readouterr().err


@pytest.mark.parametrize("resume", ["auto", "true"])
def test_a_packaged_part_by_another_name_is_the_same_part(resume: str, settings: list[str]) -> None:
    settings = [*settings, "algorithm.credit.normalize_std=false", f"run.resume={resume}"]
    file = make_run(settings, 20) / "config.yaml"
    path = "impala_llm.algorithms.advantages:GroupRelative"
    assert f"name: {path}" not in file.read_text()
    same = ([*settings, f"algorithm.credit={path}"], [f"experiment={file}", f"algorithm.credit={path}"])
    assert [how_to_start(load(words)) for words in same] == [Start(run_id=77)] * 2
    file.write_text(file.read_text().replace("name: group_relative\n", f"name: {path}\n"))  # of an earlier release
    assert path in file.read_text() and how_to_start(load(settings)) == Start(run_id=77)


def test_what_a_process_that_died_left_in_memory_is_taken_over(settings: list[str]) -> None:
    folder = make_run(settings, 20)
    code = (
        "import os; from pathlib import Path; from impala_llm.pipeline.shm.run_directory import RunDirectory as R;"
        f"R.create({name_of_run(settings)!r}, run_id=77, output=Path({str(folder.resolve())!r})); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert how_to_start(load(settings)) == Start(take_over=True, run_id=77)


def test_what_is_left_in_memory_since_before_the_run_went_on_elsewhere_is_discarded(settings: list[str]) -> None:
    folder = make_run(settings, 20)
    leave_in_memory(settings, folder, life=0)
    assert how_to_start(load(settings)).take_over, "versions.json is lost: nothing speaks against it"
    VersionMark(folder / "checkpoints").reserve(100, ahead=0)
    assert how_to_start(load(settings)).take_over
    elsewhere = VersionMark(folder / "checkpoints")
    elsewhere.begin_life()
    elsewhere.reserve(elsewhere.unused(20), ahead=elsewhere.unused(20) - 20)
    start = how_to_start(load(settings))
    assert (start.take_over, start.run_id) == (False, 77)
    assert len(start.notes) == 1 and "has gone on elsewhere" in start.notes[0]
    assert start.notes[0].endswith("that is discarded, and the run goes on from checkpoint update-000020")
    (folder / "checkpoints" / name_of(20) / "manifest.json").write_text("{")
    assert "has gone on elsewhere" in (said := refusal(settings)) and "no checkpoint is whole; set another" in said


def test_another_number_of_ranks_goes_on_from_the_checkpoint_and_not_from_memory(settings: list[str]) -> None:
    folder = make_run(settings, 20)
    VersionMark(folder / "checkpoints").reserve(20, ahead=0)
    leave_in_memory(settings, folder, life=0, num_ranks=2)
    assert how_to_start(load([*settings, "learner.num_ranks=2"])).take_over
    start = how_to_start(load(settings))
    assert (start.take_over, start.run_id) == (False, 77)
    assert len(start.notes) == 1 and "is of learner.num_ranks=2, and not 1: that is discarded" in start.notes[0]
    shutil.rmtree(folder / "checkpoints" / name_of(20))
    said = refusal(settings)
    assert "is of learner.num_ranks=2, and not 1, and no checkpoint is whole" in said
    shutil.rmtree(folder)
    said = refusal(settings, "run.resume=true")
    assert "is of learner.num_ranks=2, and not 1, and " in said and "put learner.num_ranks back" in said


def test_what_a_run_with_another_folder_left_in_memory_is_not(settings: list[str], tmp_path: Path) -> None:
    other = f"it is of run.dir={tmp_path.resolve()}/other"
    leave_in_memory(settings, tmp_path / "other")
    assert f"is of run.dir={tmp_path.resolve()}/other, and not {tmp_path}/run: set" in refusal(
        settings, "run.resume=true"
    )
    [removed] = how_to_start(load(settings)).notes
    assert f"is removed, and its actors are told to end: {other}" in removed
    make_run(settings, 20)
    start = how_to_start(load(settings))
    assert (start.take_over, start.run_id) == (False, 77)
    [removed] = start.notes
    assert f"is removed, and its actors are told to end: {other}" in removed


@pytest.mark.parametrize("holds_run", [False, True])
def test_work_of_another_run_that_memory_alone_holds_is_not_removed(
    holds_run: bool, settings: list[str], tmp_path: Path
) -> None:
    """As after a disk that had no room for its policy. Without unsaved work, or where its folder is gone, it is."""
    other = tmp_path.resolve() / "other"
    other.mkdir()
    leave_in_memory(settings, other)
    if holds_run:
        make_run(settings, 20)
    name = name_of_run(settings)
    left = f"/dev/shm/impala_llm-{os.getuid()}-{name}"
    said = refusal(settings)
    assert (
        said.startswith(f"run.name={name}: {left} ") and f"run.dir={other}" in said and "set another run.name" in said
    )
    assert find_run(name) is not None
    other.rmdir()
    assert "is removed, and its actors are told to end" in how_to_start(load(settings)).notes[0]
    other.mkdir()
    find_run(name).run.release()
    assert "is removed, and its actors are told to end" in how_to_start(load(settings)).notes[0]


def test_work_of_another_run_that_has_gone_on_elsewhere_is_removed(settings: list[str], tmp_path: Path) -> None:
    """Its folder knows another run than what is left here: nobody can go on from that."""
    other = tmp_path / "other"
    make_run([*settings, f"run.dir={other}"], 20)
    leave_in_memory(settings, other, run_id=78)
    assert "is removed, and its actors are told to end" in how_to_start(load(settings)).notes[0]


def test_what_actors_of_another_host_left_in_memory_is_not(settings: list[str]) -> None:
    """Their supervisor has a folder of the run's name as well, for the weights; it is of no folder on the disk."""
    empty = [*settings, f"run.dir={load(settings).run.dir}-new"]
    code = "import os; from impala_llm.pipeline.shm.run_directory import RunDirectory as R;"
    subprocess.run([sys.executable, "-c", f"{code} R.create({name_of_run(settings)!r}); os._exit(0)"], check=True)
    make_run(settings, 20)
    assert how_to_start(load(settings)) == Start(take_over=False, run_id=77)
    assert how_to_start(load(empty)) == Start()
    assert "run.resume=true: nothing of run " in refusal(empty, "run.resume=true")


def test_what_another_run_of_the_folder_left_in_memory_is_discarded(settings: list[str]) -> None:
    leave_in_memory(settings, make_run(settings, 20), run_id=78)
    start = how_to_start(load(settings))
    assert (start.take_over, start.run_id) == (False, 77)
    assert "is of another run: that is discarded, and the run goes on from checkpoint update" in start.notes[0]


def test_what_is_left_in_memory_is_not_removed_in_silence(settings: list[str]) -> None:
    """Without a run in its folder on the disk the command begins a new one."""
    leave_in_memory(settings, Path(load(settings).run.dir))
    assert how_to_start(load([*settings, "run.resume=true"])) == Start(take_over=True)
    start = how_to_start(load(settings))
    assert not start.take_over and "is removed, " in start.notes[0] and "run.resume=true would" in start.notes[0]


def test_a_folder_without_checkpoint_is_refused(settings: list[str]) -> None:
    make_run(settings, None)
    assert "holds a run already, without a checkpoint to go on from: set another run.name" in refusal(settings)
    assert "nor a checkpoint in" in refusal(settings, "run.resume=true")


@pytest.mark.parametrize("resume", ["auto", "true"])
def test_a_checkpoint_of_another_release_is_refused_with_what_to_do(settings: list[str], resume: str) -> None:
    manifest = make_run(settings, 20) / "checkpoints" / name_of(20) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 1}))
    said = refusal(settings, f"run.resume={resume}")
    assert "has format 1, of another release, " in said and "go on with that release, or begin a new run" in said


def lose_at_start(settings: list[str], last: int = 5) -> Path:
    """Leave the folder of a run that was lost with its host after a few updates, before its first checkpoint."""
    folder = make_run(settings, None)
    versions = VersionMark(folder / "checkpoints")
    versions.run_id = 77
    for version in range(last + 1):
        versions.reserve(version, ahead=0)
    (folder / "checkpoints" / "update-000001.new").mkdir()
    for name in ("policy-candidate", "policy-20.new-4711", "policy-best"):
        (folder / name).mkdir()
    (folder / "policy-best" / "evaluation.json").write_text('{"evaluation/update": 0, "evaluation/score": 0.1}')
    return folder


def test_a_run_that_was_lost_before_its_first_checkpoint_begins_again(settings: list[str]) -> None:
    """Under its number, so that actors on other hosts come back, as after a later loss."""
    folder = lose_at_start(settings)
    note = f"the run in {folder} was lost before its first checkpoint, and begins again"
    assert how_to_start(load(settings)) == Start(run_id=77, notes=(note,))
    [first, second] = how_to_start(load([*settings, "actor.num_actors=3"])).notes
    assert first == note and "going on with actor.num_actors=3" in second
    assert "with algorithm.loss.cap=" in refusal(settings, "algorithm.loss.cap=3")
    assert "and two would be mixed" in refusal(settings, "run.resume=false")
    assert "nor a checkpoint in" in refusal(settings, "run.resume=true")
    leave_in_memory(settings, folder, life=0)
    assert how_to_start(load(settings)).take_over


def test_what_a_lost_host_has_in_memory_of_a_run_that_began_again_elsewhere_is_discarded(settings: list[str]) -> None:
    folder = lose_at_start(settings)
    leave_in_memory(settings, folder, life=0)
    VersionMark(folder / "checkpoints").begin_life()
    start = how_to_start(load(settings))
    assert (start.take_over, start.run_id) == (False, 77)
    assert "that is discarded" in start.notes[0] and "begins again" in start.notes[1]
    assert not can_go_on(load(settings)), "nothing was learned"


def test_a_run_that_ended_in_order_does_not_begin_again_without_its_checkpoints(settings: list[str]) -> None:
    """Its user has moved the large files away; its metrics would go."""
    folder = lose_at_start(settings)
    VersionMark(folder / "checkpoints").end(200)
    assert "without a checkpoint to go on from" in refusal(settings)


@pytest.mark.parametrize(
    "left",
    ["policy", "policy-20", "policy.replaced", "policy-best/x", "checkpoints/update-000020.damaged", "many updates"],
)
def test_a_run_does_not_begin_again_where_something_would_be_lost(settings: list[str], left: str) -> None:
    folder = lose_at_start(settings, last=600 if left == "many updates" else 5)
    (folder / left).mkdir(exist_ok=True)
    if left == "policy-best/x":
        (folder / "policy-best" / "evaluation.json").write_text('{"evaluation/update": 20, "evaluation/score": 0.1}')
    assert "holds a run already, without a checkpoint to go on from: set another run.name" in refusal(settings)


def test_a_run_that_was_lost_before_its_first_update_keeps_its_number(settings: list[str]) -> None:
    folder = lose_at_start(settings)
    shutil.rmtree(folder / "tensorboard")
    (folder / "checkpoints" / "update-000001.new").rmdir()
    assert how_to_start(load(settings)) == Start(run_id=77)
    assert how_to_start(load([*settings, "run.resume=false"])) == Start()
    assert how_to_start(load([*settings, "algorithm.loss.cap=3"])) == Start()


@pytest.fixture
def forbidden(tmp_path: Path) -> Iterator[Path]:
    """A folder that this user may not enter."""
    folder = tmp_path / "private"
    folder.mkdir()
    folder.chmod(0)
    if is_root := os.geteuid() == 0:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o700)


def test_a_folder_that_this_user_may_not_enter_is_named(forbidden: Path) -> None:
    config = load(["experiment=toy", f"run.name=test-{uuid.uuid4().hex[:12]}", f"run.dir={forbidden}/run"])
    for look in (how_to_start, check_training):
        with pytest.raises(ConfigError, match=f"run.dir={forbidden}/run cannot be .*Permission denied.*name another"):
            look(config)


def test_two_runs_are_never_mixed(settings: list[str]) -> None:
    make_run(settings, 20)
    assert "holds a run already, and two would be mixed" in refusal(settings, "run.resume=false")


def test_a_learner_that_torchrun_has_started_again_goes_on_with_the_run_that_it_began(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the same parent, torchrun, as the learner before it; that of an earlier run had another one."""
    folder = make_run(settings, 4)
    config = load([*settings, "run.resume=false"])

    def check(count: str) -> int | None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        return check_folder(config).run_id

    for count in ("", "0", "1"):  # nobody has noted who began it
        with pytest.raises(ConfigError, match="two would be mixed"):
            check(count)
    with FolderOwner(folder):
        pass
    with pytest.raises(ConfigError, match="two would be mixed"):
        check("0")
    assert check("1") == 77
    owner = folder / "owner.json"
    owner.write_text(json.dumps({**json.loads(owner.read_text()), "launcher": [1, 5]}))
    with pytest.raises(ConfigError, match="two would be mixed"):
        check("1")


def test_a_finished_run_goes_on_only_where_its_end_is_moved(settings: list[str]) -> None:
    make_run(settings, 50, minutes_used=30.0)
    said = refusal(settings)
    assert "which has finished at update 50: raise learner.total_updates=50" in said
    more = "learner.total_updates=60"
    assert how_to_start(load([*settings, more])).run_id == 77
    assert "raise learner.max_minutes=20" in refusal(settings, more, "learner.max_minutes=20")
    assert how_to_start(load([*settings, more, "learner.max_minutes=31"])).run_id == 77


def test_whether_the_same_command_goes_on_is_known_when_a_run_is_stopped(settings: list[str]) -> None:
    """One that is stopped after its last update has finished."""
    assert not can_go_on(load(settings))
    make_run(settings, 50)
    assert not can_go_on(load(settings))
    assert can_go_on(load([*settings, "learner.total_updates=60"]))


def test_the_settings_that_a_run_keeps_begin_another_by_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = load(["experiment=toy", "run.name=first", "run.resume=true", "sft.dir=elsewhere"])
    keep_settings(first)
    kept = "experiment=outputs/first/config.yaml"
    again, second = load([kept]), load([kept, "run.name=second"])
    assert (again.run.dir, again.demonstrations.dir, again.sft.dir) == (
        "outputs/first",
        "outputs/first-demonstrations",
        "elsewhere",
    )
    assert (second.run.dir, second.demonstrations.dir, second.sft.dir) == (
        "outputs/second",
        "outputs/second-demonstrations",
        "elsewhere",
    )
    assert again.run.resume == "auto", "run.resume=true was the answer to one question"


@pytest.mark.parametrize("resume", ["auto", "true"])
def test_settings_without_effect_keep_no_run_from_going_on(resume: str, settings: list[str], tmp_path: Path) -> None:
    """A dry run does not print them, so a file of what it has printed gives them other values."""
    make_run(settings, 20)
    first = load(settings)
    printed = tmp_path / "printed.yaml"
    printed.write_text(to_yaml(first, only_in_force=True))
    again = load([f"experiment={printed}", f"run.resume={resume}"])
    assert again.env.webshop != first.env.webshop
    start = how_to_start(again)
    assert start.run_id == 77
    assert not any(word in note for note in start.notes for word in ("webshop", "sft.", "demonstrations."))
    with pytest.raises(ConfigError, match=r"with env\.name=parrot and not corridor"):
        how_to_start(load([f"experiment={printed}", "env=corridor", f"run.resume={resume}"]))


def test_kept_settings_are_compared_with_the_folders_that_they_mean(settings: list[str], tmp_path: Path) -> None:
    folder = make_run(settings, 20)
    keep_settings(load(settings))
    assert "${run.name}" in (folder / "config.yaml").read_text()
    assert how_to_start(load(settings)).notes == ()


def test_a_run_that_evaluations_have_ended_goes_on_only_with_more_patience(settings: list[str]) -> None:
    evaluated = ["evaluation.every_updates=5", "evaluation.patience=3"]
    make_run(settings, 20, *evaluated, patience=3)
    assert "which has finished at update 20: raise evaluation.patience=3, evaluate it: " in refusal(
        [*settings, *evaluated]
    )
    assert how_to_start(load([*settings, evaluated[0], "evaluation.patience=4"])).run_id == 77
    assert how_to_start(load([*settings, evaluated[0]])).run_id == 77


def test_another_experiment_is_not_taken_for_the_same_run(settings: list[str]) -> None:
    make_run(settings, 20)
    said = refusal(settings, "algorithm.loss.cap=3")
    assert "holds a run already, with algorithm.loss.cap=" in said and " and not 3.0: set" in said
    assert "or set run.resume=true to go on so" in said
    assert how_to_start(load([*settings, "algorithm.loss.cap=3", "run.resume=true"])).run_id == 77
    assert "with run.seed=0 and not 5" in refusal(settings, "run.seed=5", "run.resume=true"), "another order of tasks"
    said = refusal(settings, "model.scratch.hidden_size=32", "run.resume=true")
    assert "with model.scratch.hidden_size=128 and not 32" in said and "to go on so" not in said
    said = refusal(settings, "algorithm.loss.cap=3", "engine.temperature=0.5", "run.seed=5")
    for named in ("algorithm.loss.cap=", "engine.temperature=1.0 and not 0.5", "run.seed=0 and not 5", "put them back"):
        assert named in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("engine.temperature=0.7", "with engine.temperature=1.0 and not 0.7"),
        ("engine.max_length=100", "with engine.max_length="),
        ("model.value_trunk_gradient=false", "with model.value_trunk_gradient=true and not false"),
    ],
)
def test_another_distribution_of_tokens_is_not_gone_on_with_in_silence(
    change: str, said: str, settings: list[str]
) -> None:
    settings = [*settings, "algorithm=ppo"]  # whose value head has a gradient
    make_run(settings, 20)
    assert said in refusal(settings, change)
    start = how_to_start(load([*settings, change, "run.resume=true"]))
    assert start.run_id == 77 and f"going on with {change.partition('=')[0]}=" in start.notes[0]


@pytest.mark.parametrize("resume", ["auto", "true"])
def test_another_path_of_the_same_model_keeps_no_run_from_going_on(
    resume: str, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spelt otherwise it is the same setting; in another directory it is the same by its files, and said."""
    monkeypatch.chdir(tmp_path)
    former = save_lm(tmp_path / "models" / "policy")
    settings = [*settings, "engine.max_length=64", f"run.resume={resume}"]
    make_run([*settings, f"model.path={former}"], 20, start=model_checksum(former))
    for same in (f"{former}/", "models/policy", f"{tmp_path}/models/../models/policy"):
        assert how_to_start(load([*settings, f"model.path={same}"])) == Start(run_id=77)
    former.rename(tmp_path / "moved")
    start = how_to_start(load([*settings, "model.path=moved"]))
    assert (start.run_id, start.notes) == (77, (f"going on with model.path=moved, before {former}",))
    (tmp_path / "moved" / "tokenizer.json").write_text("{}")
    assert "and not moved, which has other weights or another tokenizer: set" in refusal(settings, "model.path=moved")


def test_a_model_at_another_path_is_refused_where_nothing_says_that_it_is_the_same(
    settings: list[str], tmp_path: Path
) -> None:
    """As with a checkpoint of an earlier release; the message says what helps."""
    former = save_lm(tmp_path / "policy")
    settings = [*settings, "engine.max_length=64", "run.resume=true"]
    make_run([*settings, f"model.path={former}"], 20)
    former.rename(tmp_path / "moved")
    said = refusal(settings, f"model.path={tmp_path}/moved")
    assert "make a link to it at the former path" in said
    former.symlink_to(tmp_path / "moved")
    assert how_to_start(load([*settings, f"model.path={tmp_path}/moved"])).run_id == 77
    assert "and not scratch: set another" in refusal(settings, "model.path=scratch")


def test_other_settings_may_change_and_are_named(settings: list[str], tmp_path: Path) -> None:
    folder = make_run(settings, 20, "learner.learning_rate=3e-4", "actor.num_actors=1")
    assert how_to_start(load([*settings, "learner.learning_rate=3e-4", "actor.num_actors=1"])).notes == ()
    folder.rename(tmp_path / "moved")
    others = [f"run.dir={tmp_path}/moved", "learner.learning_rate=1e-5", "actor.num_actors=2"]
    assert how_to_start(load([*settings, *others])).notes == (
        "going on with actor.num_actors=2, before 1; learner.learning_rate=1e-05, before 0.0003",
    )


@pytest.mark.parametrize("key", ["replay.capacity", "replay.capacity_mb"])
def test_sizes_of_what_is_left_in_memory_change_only_with_what_is_on_the_disk(key: str, settings: list[str]) -> None:
    """Shared memory that holds trajectories cannot grow, and newer work is given up only where the user asks for it."""
    folder = make_run(settings, 20, f"{key}=100")
    assert how_to_start(load([*settings, f"{key}=200"])) == Start(
        take_over=False, run_id=77, notes=(f"going on with {key}=200, before 100",)
    )
    leave_in_memory(settings, folder, replay=load([*settings, f"{key}=100"]).replay)
    (folder / "config.yaml").unlink()
    assert how_to_start(load([*settings, f"{key}=100", "run.resume=true"])).take_over
    said = refusal(settings, f"{key}=200", "run.resume=true")
    left = f"/dev/shm/impala_llm-{os.getuid()}-{name_of_run(settings)}"
    assert said.startswith(f"{key}=200: ") and f"{left}, which was left with {key}=100: put this value back, " in said
    assert said.endswith("or remove that folder to go on from update-000020")
    shutil.rmtree(folder)
    said = refusal(settings, f"{key}=200", "run.resume=true")
    assert said.endswith(f"which was left with {key}=100: put this value back")
    shutil.rmtree(left)
    make_run(settings, 20, f"{key}=100")
    assert how_to_start(load([*settings, f"{key}=200"])).run_id == 77


@pytest.mark.parametrize(
    ("part", "options"),
    [("env=typed_options:Suite", "env.args"), ("algorithm.loss=typed_options:Loss", "algorithm.loss")],
)
def test_options_of_own_parts_that_yaml_has_as_text_are_the_same(
    part: str, options: str, settings: list[str], user_folder: Path
) -> None:
    (user_folder / "typed_options.py").write_text(
        "import enum\n"
        "from dataclasses import dataclass\n"
        "from pathlib import Path\n"
        "from impala_llm.algorithms.losses import Reinforce\n"
        "class Mode(enum.Enum):\n"
        "    EASY = 1\n"
        "    HARD = 2\n"
        "from impala_llm.envs.toy import ParrotSuite\n"
        "class Suite(ParrotSuite):\n"
        "    Options = None\n"
        "    def __init__(self, mode: Mode = Mode.EASY, data: Path = Path('tasks.json')):\n"
        "        pass\n"
        "@dataclass\n"
        "class Loss(Reinforce):\n"
        "    mode: Mode = Mode.EASY\n"
        "    data: Path = Path('tasks.json')\n"
    )
    make_run([*settings, part], 20)
    assert how_to_start(load([*settings, part])).run_id == 77
    for change in ("mode=HARD", "data=other.json"):
        assert f"with {options}" in (said := refusal([*settings, part], f"{options}.{change}"))
        assert change.partition("=")[2] in said


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_run_whose_settings_cannot_be_read_is_gone_on_with_only_where_that_is_said(
    content: str | None, settings: list[str]
) -> None:
    file = make_run(settings, 20) / "config.yaml"
    file.unlink() if content is None else file.write_text(content)
    assert f"{file} cannot be read, with which the settings are compared: restore it" in refusal(settings)
    assert how_to_start(load([*settings, "run.resume=true"])).run_id == 77


def test_a_living_run_of_the_name_is_refused(settings: list[str]) -> None:
    make_run(settings, 20)
    with RunDirectory.create(name_of_run(settings)), pytest.raises(RunDirectoryError, match="is in use"):
        how_to_start(load(settings))


def test_the_run_of_a_checkpoint_keeps_its_number(tmp_path: Path) -> None:
    """Actors on other hosts know their run by it, and come back by themselves."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    with RunDirectory.create(name, tmp_path, run_id=77, output=tmp_path) as run:
        assert run.run_id == RunDirectory.attach(name, tmp_path).run_id == 77
        began_at = run.began_at(used_s=60.0)
        assert run.began_at() == began_at
