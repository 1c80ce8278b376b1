"""A warm start and the settings of the one that its folder holds: what goes on, and what is refused."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from impala_llm.cli import main
from impala_llm.config import load
from impala_llm.demonstrate import record
from impala_llm.learning.checkpoints.files import newest_whole
from impala_llm.observability.writers import METRICS_FILE, MetricWriter
from impala_llm.sft import STATE
from tests.test_sft import signal_handlers_kept, warm_start, words

FEW = ("demonstrations.num_episodes=12", "sft.epochs=4")  # 12 updates


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    with signal_handlers_kept():
        yield


@pytest.fixture(scope="module")
def of_two_updates(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with demonstrations and a warm start of two updates. Read only."""
    folder = tmp_path_factory.mktemp("two")
    record(load(words(folder, tiny_model, *FEW)))
    with signal_handlers_kept():
        warm_start(folder, tiny_model, *FEW, "sft.max_updates=2")
    return folder


@pytest.fixture(autouse=True)
def begun(tmp_path: Path, of_two_updates: Path) -> Path:
    """The same, as if the test had made it. Returns sft.dir."""
    shutil.copytree(of_two_updates, tmp_path, dirs_exist_ok=True)
    return tmp_path / "sft"


def updates(folder: Path) -> int:
    manifest, _ = newest_whole(folder / STATE)
    assert manifest is not None
    return manifest.update


@pytest.mark.parametrize(
    "change", ["sft.learning_rate=0.01", "sft.warmup_updates=3", "learner.weight_decay=0.1", "learner.decay=linear"]
)
def test_a_finished_one_is_not_given_settings_that_it_was_not_learned_with(
    tmp_path: Path, tiny_model: Path, begun: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("config.yaml", "policy/model.safetensors")
    before = [(begun / name).read_bytes() for name in files]
    assert main(["sft", *words(tmp_path, tiny_model, *FEW, "sft.max_updates=2", change)]) == 2
    said = capsys.readouterr().err
    assert f"sft.dir={begun} holds a warm start that has finished" in said
    assert f"{change}, before " in said and "set another sft.dir, or remove the folder" in said
    assert [(begun / name).read_bytes() for name in files] == before


def test_a_folder_that_holds_a_run_is_refused_and_stays_as_it_is(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name is easily the same: the default run.dir of run.name=shop is outputs/shop."""
    folder = tmp_path / "a run"
    with MetricWriter(folder / "tensorboard", []) as writer:
        writer.write(1, {"learner/version": 1.0})
    before = (folder / "tensorboard" / METRICS_FILE).read_bytes()
    assert main(["sft", *words(tmp_path, tiny_model, *FEW), f"sft.dir={folder}"]) == 2
    assert "holds a run, whose policy would be replaced: set another sft.dir" in capsys.readouterr().err
    assert (folder / "tensorboard" / METRICS_FILE).read_bytes() == before
    assert [path.name for path in folder.iterdir()] == ["tensorboard"]


def test_what_has_changed_is_said_where_it_goes_on(
    tmp_path: Path, tiny_model: Path, begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warm_start(tmp_path, tiny_model, *FEW, "sft.max_updates=3", "sft.learning_rate=0.01")
    said = capsys.readouterr().out
    assert "sft: going on with sft.learning_rate=0.01, before 0.003; sft.max_updates=3, before 2\n" in said
    kept = load([f"experiment={begun / 'config.yaml'}"]).sft
    assert (kept.learning_rate, kept.max_updates) == (0.01, 3)
    warm_start(tmp_path, tiny_model, *FEW, "sft.max_updates=3", "sft.learning_rate=0.01")
    assert "going on with" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["sft.observation_weight=1"], "sft.observation_weight=0.0, and not 1.0"),
        (["sft.value_coef=0.25"], "sft.value_coef=0.5, and not 0.25"),
        (["algorithm=group_relative"], "sft.value_coef=0.5, and not 0.0 (with algorithm.credit=group_relative)"),
        (["algorithm.credit.discount=0.5"], "algorithm.credit.discount=1.0, and not 0.5"),
    ],
)
def test_two_losses_are_not_mixed(
    tmp_path: Path, tiny_model: Path, begun: Path, change: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (begun / "config.yaml").read_text()
    assert main(["sft", *words(tmp_path, tiny_model, *FEW, "sft.max_updates=3", *change)]) == 2
    assert f"holds a warm start with {named}: " in capsys.readouterr().err
    assert ((begun / "config.yaml").read_text(), updates(begun)) == (before, 2)


def test_settings_that_no_update_was_made_with_are_not_kept(
    tmp_path: Path, tiny_model: Path, begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    before = (begun / "config.yaml").read_text()
    monkeypatch.setattr(torch.optim.AdamW, "step", full)
    assert main(["sft", *words(tmp_path, tiny_model, *FEW, "sft.max_updates=3", "sft.learning_rate=0.01")]) == 2
    assert (begun / "config.yaml").read_text() == before


def test_what_does_not_act_on_the_warm_start_may_change(tmp_path: Path, tiny_model: Path, begun: Path) -> None:
    (begun / "policy" / "model.safetensors").unlink()
    before = (begun / "config.yaml").read_text()
    others = ("actor.max_episodes=3", "evaluation.num_tasks=7", "sft.held_out_every=2", "replay.capacity=3000")
    warm_start(tmp_path, tiny_model, *FEW, "sft.max_updates=2", *others)
    assert (begun / "policy" / "model.safetensors").is_file()
    assert (begun / "config.yaml").read_text() == before


@pytest.mark.parametrize("text", [None, "", "sft: [", "- sft"])
def test_settings_that_cannot_be_compared_are_refused(
    tmp_path: Path, tiny_model: Path, begun: Path, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    (begun / "config.yaml").unlink()
    if text is not None:
        (begun / "config.yaml").write_text(text)
    assert main(["sft", *words(tmp_path, tiny_model, *FEW, "sft.max_updates=3")]) == 2
    said = capsys.readouterr().err
    assert f"{begun / 'config.yaml'} cannot be read, with which the settings are compared: restore it" in said
    assert updates(begun) == 2


def test_a_setting_of_reinforcement_learning_alone_is_refused_as_a_word_of_the_command(
    begun: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["learner={learning_rate: 1e-5}", "learner.total_updates=9", "learner.max_grad_norm=0.5"]
    assert main(["sft", *words(begun.parent, tiny_model, *FEW), *given, "learner.value_warmup_updates=2"]) == 2
    said = capsys.readouterr().err
    assert "learner.learning_rate has no effect" in said and "sft.learning_rate" in said
    assert "sft.max_updates" in said and "learner.value_warmup_updates has no effect" in said
    assert "learner.max_grad_norm" not in said
