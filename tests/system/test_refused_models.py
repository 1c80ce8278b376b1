"""A model that cannot be computed ends the run in a sentence, wherever that is found."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Mamba2Config

from impala_llm.learning.policy.scratch import make_scratch_policy
from impala_llm.settings import ASSETS
from tests.system.runs import START_S, Run


def broken_template(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for message in messages %}")


def empty_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")


def other_shape(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_size": 2 * config["hidden_size"]}))


def unknown_kind(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "no-such-kind"}))


@pytest.mark.system
@pytest.mark.parametrize(
    ("command", "spoil"),
    [
        ("train", broken_template),
        ("train", other_shape),
        ("evaluate", broken_template),
        ("evaluate", empty_tokenizer),
        ("evaluate", other_shape),
        ("evaluate", unknown_kind),
    ],
)
def test_files_that_only_look_sound_end_the_run_in_a_sentence(
    command: str, spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    """Training reads tokenizer, configuration and weights by the same code: one of each kind is enough there."""
    model = Path(shutil.copytree(ASSETS / "tiny_shopper", tmp_path / "model"))
    spoil(model)
    with Run(tmp_path / "run", "experiment=quickstart", f"model.path={model}") as run:
        assert f"the model {model}" in run.refused(command)


@pytest.mark.system
def test_a_kind_that_nobody_has_tried_is_refused_when_it_starts_and_not_again_and_again(tmp_path: Path) -> None:
    model = make_scratch_policy(tmp_path / "model")
    vocabulary = len(AutoTokenizer.from_pretrained(model))
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=vocabulary, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, n_groups=1
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    with Run(tmp_path / "run", "experiment=toy", f"model.path={model}") as run:
        assert run.train().wait(120) == 2, run.printed()
        run.assert_gone()
        assert f"the model {model} (mamba2)" in run.log.read_text()
        assert "docs/engines.md" in run.log.read_text()


@pytest.mark.system
def test_an_actor_with_another_model_than_the_learners_ends_in_a_sentence(tmp_path: Path) -> None:
    """As where a command of actors on another host has settings of its own."""
    other = make_scratch_policy(tmp_path / "other", hidden_size=32)
    with Run(tmp_path / "run", "experiment=toy") as run:
        run.call("learner")
        actor = run.call("actor", "--index", "0", f"model.path={other}")
        assert actor.wait(START_S) == 2, run.printed()
        [said] = [line for line in run.log.read_text().splitlines() if line.startswith("actor 0:")]
        assert "of another shape" in said and "give the engine the model that the learner trains" in said
