"""The loss and the credits of docs/algorithms.md, "One of your own", learn as they are pasted."""

import re
from pathlib import Path

import pytest
import torch

from impala_llm.config import load
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.trainer import Trainer
from tests.learning.builders import save_lm, varied

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"


def trained(folder: Path, *words: str) -> dict[str, float]:
    """Metrics of an update in which the example's loss is used."""
    words = ("model=scratch", "learner.batch_size=6", "algorithm.max_staleness=null", "engine.max_length=256", *words)
    config = load([*words, "algorithm.loss=my_parts:MyLoss"])
    model = PolicyModel.from_pretrained(save_lm(folder / "lm"))
    for parameter in model.value_head.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(config, Ranks("cpu"), model)
    trainer.update(varied(), version=3, progress=0.0)
    return trainer.log.flush()


@pytest.fixture
def pasted(user_folder: Path) -> Path:
    """The current directory, with the example in it."""
    [example] = re.findall(r"```python\n(from dataclasses.*?)```", DOCS.read_text(), re.DOTALL)
    (user_folder / "my_parts.py").write_text(example)
    return user_folder


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_credit_of_groups_compares_with_their_median(pasted: Path, epochs: int) -> None:
    words = ["algorithm=group_relative", "algorithm.credit=my_parts:MyGroupCredit", "algorithm.group_size=6"]
    found = trained(pasted, *words, f"learner.epochs={epochs}")
    returns = torch.tensor([float(t.rewards.sum()) for t in varied().trajectories])
    assert found["credit/baseline_mean"] == float(returns.median())
    tokens = torch.tensor([float(t.num_action_tokens) for t in varied().trajectories])
    assert found["advantage/mean"] == pytest.approx(float(tokens @ (returns - returns.median()) / tokens.sum()))
    assert 0.0 <= found["loss/steep_share"] < 1.0 and found["optimizer/gradient_norm"] > 0


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_credit_with_values_is_gae_with_a_lambda_of_1(pasted: Path, epochs: int) -> None:
    words = ["algorithm=ppo", "algorithm.credit.discount=0.9", f"learner.epochs={epochs}"]
    own = trained(pasted, *words, "algorithm.credit=my_parts:MyValueCredit")
    builtin = trained(pasted, *words, "algorithm.credit.lam=1")
    assert own.keys() >= {"value/explained_variance", "loss/value"}
    for name in ("value/explained_variance", "loss/value", "loss/policy", "advantage/mean", "advantage/std"):
        assert own[name] == pytest.approx(builtin[name], rel=1e-4), name


def test_the_commands_of_the_page_have_settings_that_fit() -> None:
    commands = re.findall(r"`impala-llm train (\w[^`]*=[^`]*)`", DOCS.read_text())
    assert len(commands) > 5
    for command in commands:
        load(command.split())
