"""The step of one rank, as its buffer and its log see it."""

from pathlib import Path

import pytest

from impala_llm.learning.feed import Batch
from impala_llm.learning.model import PolicyModel
from impala_llm.learning.parallel import Ranks
from impala_llm.observability.metrics import MetricLog
from impala_llm.settings import Config
from impala_llm.trainer import Trainer
from tests.learning.builders import NoPriorities, make_batch, save_lm


def make_trainer(directory: Path) -> Trainer:
    config = Config()
    config.algorithm.entropy_coef = 0.01
    model = PolicyModel.from_pretrained(save_lm(directory))
    return Trainer(config, Ranks("cpu"), model, NoPriorities(), MetricLog())  # type: ignore[arg-type]


def batch_of(weights: tuple[float, ...]) -> Batch:
    return Batch(tuple(make_batch()), weights, tuple(range(6)), 1.0)


def test_weights_of_the_draw_have_mean_1(tmp_path: Path) -> None:
    found = make_trainer(tmp_path).draw_weights(batch_of((1.0, 0.1, 0.1, 0.2, 0.1, 0.0)))
    assert found.tolist() == pytest.approx([4.0, 0.4, 0.4, 0.8, 0.4, 0.0])


def test_one_old_item_in_the_draw_does_not_shrink_the_policy_gradient(tmp_path: Path) -> None:
    norms = []
    for weight in (1.0, 0.02):
        trainer = make_trainer(tmp_path)
        trainer.update(batch_of((weight,) * 6), version=3, progress=0.0)
        norms.append(trainer.log.flush()["optimizer/gradient_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
