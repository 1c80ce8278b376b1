"""Mistakes of an own loss or credit are named, with its setting and what is expected."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from impala_llm.algorithms.interface import (
    BatchLoss,
    Credit,
    Episodes,
    Loss,
    LossOutput,
    PackedBatch,
    Prepared,
    Scored,
    Worth,
)
from impala_llm.algorithms.losses import PPOClip
from impala_llm.learning.own_parts import (
    PartFault,
    call_batch_limit,
    call_credit,
    call_loss,
    call_measure,
    call_prepare,
)
from impala_llm.learning.ranks.parallel import Ranks
from tests.learning.builders import make_trajectory

N = 3
BATCH = PackedBatch.of([make_trajectory(5, [(1, 1 + N)])], [0])
"""One row of the tokens that `scored` gives."""


class OwnLoss(Loss):
    """A user's loss that does what it is told."""

    metrics = {"x_share": "declared"}

    def __init__(self, act: Callable[[Scored, torch.Tensor], Any]) -> None:
        super().__init__(name="mine:OwnLoss")
        self.act = act

    def __call__(self, scored: Scored, advantages: torch.Tensor) -> Any:
        return self.act(scored, advantages)


@dataclass
class OwnCredit(Credit):
    uses_values: ClassVar[bool] = True
    metrics = {"m": "declared", "explained_variance": "declared"}
    worth: Worth | None = None

    def __call__(self, scored: Scored, batch: Any, prepared: Any) -> Any:
        return self.worth


def scored() -> Scored:
    log_probs = torch.full((N,), -1.0, requires_grad=True)
    ids = torch.zeros(N, dtype=torch.int64)
    return Scored(log_probs, torch.ones(N), torch.full((N,), -1.0), ids, ids, 0, lambda indices: indices)


ONES = torch.ones(N)
LEARNED = torch.ones(N, requires_grad=True)
FITTED = Worth(ONES, LEARNED, ONES, torch.zeros(N, dtype=torch.int64), value_coef=0.5)


@pytest.mark.parametrize(
    "act, said",
    [
        (
            lambda s, a: LossOutput((-a * s.log_probs).sum(), {}, ONES),
            r"per_token = a tensor of shape \[\].*shape \[3\]",
        ),
        (lambda s, a: LossOutput(-a * s.log_probs, {}, ONES.long()), "weights = a tensor of shape .*dtype int64"),
        (lambda s, a: LossOutput(-a * s.log_probs, {}, None), "weights = a NoneType"),
        (lambda s, a: LossOutput(-a * s.log_probs, {}, -ONES), "a weight of -1: .* finite and at least 0"),
        (lambda s, a: LossOutput(-a * s.log_probs, {}, ONES / 0), "a weight of inf: .* finite and at least 0"),
        (lambda s, a: LossOutput((-a * s.log_probs).double(), {}, ONES), "per_token = .* dtype float64: .* float32 is"),
        (lambda s, a: LossOutput(-a * s.log_ratio, {}, ONES), "without a gradient.*compute it from scored.log_probs"),
        (lambda s, a: LossOutput(-a * s.log_probs, {}, s.log_probs.exp()), "weights with a gradient.*: detach them"),
        (lambda s, a: LossOutput(-a * s.log_probs, None, ONES), "metrics = a NoneType: a mapping .*expected"),  # type: ignore[arg-type]
        (
            lambda s, a: LossOutput(-a * s.log_probs, {"x_share": ONES}, ONES),
            r"metric x_share = a tensor .*\[3\]",
        ),
        (lambda s, a: LossOutput(-a * s.log_probs, {"x_share": 0.5}, ONES), "metric x_share = a float"),
        (lambda s, a: LossOutput(-a * s.log_probs, {"loss/y": a[0]}, ONES), "metric loss/y, which its class does not"),
        (
            lambda s, a: LossOutput(-a * s.log_probs, {"x_share": torch.tensor(1j)}, ONES),
            "metric x_share = a tensor .* dtype complex64: a scalar",
        ),
        (lambda s, a: LossOutput(-a * s.log_probs, {3: ONES[0]}, ONES), "a metric named 3: a text is expected"),  # type: ignore[dict-item]
        (lambda s, a: -a * s.log_probs, "returned a tensor of shape .*a LossOutput is expected"),
        (lambda s, a: s.logprobs, "raised AttributeError: .*logprobs.*test_own_parts.py:[0-9]+"),
    ],
)
def test_a_loss_s_mistake_is_named(act: Callable[..., Any], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PartFault, match=f"algorithm.loss=mine:OwnLoss .*{said}"):
        call_loss(OwnLoss(act), scored(), ONES)
    assert ("Traceback" in capsys.readouterr().err) == ("raised" in said), "of the user's own lines"


def test_a_loss_may_return_the_metrics_of_a_packaged_one_that_it_calls() -> None:
    assert "clip_share" in call_loss(OwnLoss(lambda s, a: PPOClip()(s, a)), scored(), ONES).metrics


@pytest.mark.parametrize(
    ("worth", "said"),
    [
        (Worth(torch.zeros(2)), r"advantages = .*\[2\].*\[3\]"),
        (Worth(torch.zeros(N, dtype=torch.float64)), "advantages = .*dtype float64: .*dtype float32 is expected"),
        (Worth(ONES, ONES, ONES, value_coef=0.5), "values = a .*, value_rows = a NoneType: tensors of one length"),
        (Worth(ONES, value_rows=ONES.long()), "values = a NoneType, .*: tensors of one length .* or None for all"),
        (Worth(ONES, ONES, ONES[:2], ONES.long()), r"values = .*, targets = .* \[2\] .*: tensors of one length"),
        (Worth(ONES, ONES, ONES.double(), ONES.long()), "values = .* dtype float64, .*: .* float32, float32 and int64"),
        (Worth(ONES, ONES, ONES, ONES), "values = .*, value_rows = .* dtype float32: .*, float32, float32 and int64"),
        (Worth(LEARNED), "advantages with a gradient.*: detach them"),
        (replace(FITTED, targets=LEARNED), "targets with a gradient.*: detach them"),
        (replace(FITTED, values=ONES), "values without a gradient.*: take them from scored.values, not detached"),
        (replace(FITTED, value_rows=ONES.long()), "value_rows from 1 to 1: 0 to 0 is expected"),
        (replace(FITTED, value_rows=-ONES.long()), "value_rows from -1 to -1: 0 to 0 is expected"),
        (replace(FITTED, num_values="turn"), "num_values = 'turn': tokens or turns is expected"),  # type: ignore[arg-type]
        (replace(FITTED, value_coef=None), "value_coef = None: a finite number is expected"),  # type: ignore[arg-type]
        (Worth(ONES, value_coef=10**400), "value_coef = 10+: a finite number is expected"),
        (Worth(ONES, value_coef=float("nan")), "value_coef = nan: a finite number is expected"),
        (Worth(ONES, metrics=[("m", "x", 1.0)]), "metric m = a str with weight a float: real numbers in"),  # type: ignore[list-item]
        (Worth(ONES, metrics=[("m", torch.tensor(1j), 1.0)]), "metric m = a tensor .* dtype complex64 with"),  # type: ignore[list-item]
        (Worth(ONES, metrics=[("m", (1.0, None), 1.0)]), "metric m = a tuple with weight a float"),  # type: ignore[list-item]
        (Worth(ONES, metrics=[("m", 1.0, None)]), "metric m = a float with weight a NoneType"),  # type: ignore[list-item]
        (Worth(ONES, metrics=[("m", ONES, 1.0)]), r"metric m = a tensor of shape \[3\]"),  # type: ignore[list-item]
        (Worth(ONES, metrics=[("m", np.ones(3), 1.0)]), "metric m = a ndarray with"),  # type: ignore[list-item]
        (Worth(ONES, metrics=[("m", np.array(1j), 1.0)]), "metric m = a ndarray with"),  # type: ignore[list-item]
        (Worth(ONES, metrics=[("m", (1.0, 2.0), 1.0)]), "metric m of 2 numbers: one number is expected"),
        (
            Worth(ONES, metrics=[("explained_variance", 1.0, 1.0)]),
            "metric explained_variance of 1 numbers: a tuple of four numbers is expected",
        ),
        (
            Worth(ONES, metrics=[("explained_variance", [1.0, 2.0, 3.0, 4.0], 1.0)]),
            "metric explained_variance = a list .* are expected, the metric as a tuple of four",
        ),
        (Worth(ONES, metrics=[("m", 1.0, float("nan"))]), "metric m with weight nan: the number of items"),
        (Worth(ONES, metrics=[("m", 1.0, float("inf"))]), "metric m with weight inf: the number of items"),
        (Worth(ONES, metrics=[("m", 1.0, torch.tensor(-1.0))]), "metric m with weight -1.0: the number of items"),  # type: ignore[list-item]
        (Worth(ONES, metrics=[("m", 10**400, 1.0)]), "metric m = a int with .*: real numbers in the range of a float"),
        (Worth(ONES, metrics=[("m", 1.0, 10**400)]), "metric m = a float with weight a int: real numbers in the range"),
        (
            Worth(ONES, metrics=[("m", 1.0, 1.0), ("m", 2.0)]),  # type: ignore[list-item]
            r"\('m', 2.0\) among its metrics: \(name, value, weight\) is expected",
        ),
        (Worth(ONES, metrics=3.0), "metrics = a float: a sequence of"),  # type: ignore[arg-type]
        (
            Worth(ONES, metrics=[("n", 1.0, 1.0)]),
            'the metric n, which its class does not declare: add "n": "what it means" to its `metrics`',
        ),
        (Worth(ONES, metrics=[(3, 1.0, 1.0)]), "a metric named 3: a text is expected"),  # type: ignore[list-item]
    ],
)
def test_a_credit_s_mistake_is_named(worth: Worth, said: str) -> None:
    with pytest.raises(PartFault, match=f"algorithm.credit=mine:OwnCredit returned {said}"):
        call_credit(OwnCredit(name="mine:OwnCredit", worth=worth), scored(), BATCH, None)


def test_a_class_that_declares_no_metric_is_shown_the_whole_line() -> None:
    class Silent(OwnLoss):
        metrics: ClassVar[dict[str, str]] = {}

    said = 'the metric n, which its class does not declare: add `metrics = {"n": "what it means"}`'
    with pytest.raises(PartFault, match=f"algorithm.loss=mine:OwnLoss returned {said}"):
        call_loss(Silent(lambda s, a: LossOutput(-a * s.log_probs, {"n": torch.tensor(1.0)}, ONES)), scored(), ONES)


def test_values_need_no_gradient_where_nothing_is_fitted_to_them() -> None:
    nothing = torch.zeros(0)
    for worth in (
        replace(FITTED, values=ONES, value_coef=0.0),
        Worth(ONES, nothing, nothing, nothing.long(), value_coef=0.5),
    ):
        assert call_credit(OwnCredit(name="mine:OwnCredit", worth=worth), scored(), BATCH, None) is worth
    with torch.no_grad():
        worth = replace(FITTED, values=ONES)
        assert call_credit(OwnCredit(name="mine:OwnCredit", worth=worth), scored(), BATCH, None) is worth


@dataclass
class OwnCreditOfEpisodes(OwnCredit):
    of_episodes: ClassVar[bool] = True


def test_a_credit_of_episodes_returns_what_it_has_prepared() -> None:
    """The batch is whitened by what was prepared, and an episode with 0 is not computed."""
    for number in (2.0, torch.inf, torch.nan):
        prepared = torch.tensor([number])
        right = Worth(torch.full((N,), number), metrics=[("m", 1.0, 3.0)])
        mine = OwnCreditOfEpisodes(name="mine:OwnCredit", worth=right)
        assert call_credit(mine, scored(), BATCH, prepared) is right
        for worth in (Worth(ONES), Worth(torch.tensor([number, number, 3.0]))):
            mine.worth = worth
            with pytest.raises(
                PartFault, match="OwnCredit returned other advantages than prepared.*of_episodes = True"
            ):
                call_credit(mine, scored(), BATCH, prepared)


def test_a_credit_of_episodes_fits_no_values() -> None:
    """Those of an episode that is not computed would not be fitted."""
    mine = OwnCreditOfEpisodes(name="mine:OwnCredit", worth=FITTED)
    with pytest.raises(PartFault, match="OwnCredit returned values.*of_episodes = True"):
        call_credit(mine, scored(), BATCH, torch.ones(1))


def test_a_credit_of_episodes_has_to_prepare_them() -> None:
    """Nothing would say that all tokens of an episode have one advantage."""
    mine = OwnCreditOfEpisodes(name="mine:OwnCredit")
    with pytest.raises(PartFault, match="OwnCredit: prepare returned None, and its class says of_episodes = True"):
        call_prepare(mine, episodes())


@dataclass
class OwnCreditOfNoValues(OwnCredit):
    uses_values: ClassVar[bool] = False


def test_a_credit_with_values_has_to_say_so() -> None:
    """Settings of the value head would be called idle, and act."""
    with pytest.raises(PartFault, match=r"mine:OwnCredit returned values, and its class .*: write uses_values = True"):
        call_credit(OwnCreditOfNoValues(name="mine:OwnCredit", worth=FITTED), scored(), BATCH, None)


class OwnBatchLoss(OwnLoss, BatchLoss):
    """A user's loss of the whole batch, each part of which does what it is told."""

    def measure(self, scored: Scored, advantages: torch.Tensor) -> Any:
        return self.act(scored, advantages)

    def batch_limit(self, measured: torch.Tensor, sum_over_ranks: Any) -> Any:
        return self.act(measured, sum_over_ranks)  # type: ignore[arg-type]


class OwnEpisodeCredit(OwnCredit):
    result: ClassVar[Callable[[Episodes], Any]]

    def prepare(self, episodes: Episodes) -> Any:
        return type(self).result(episodes)


def dead(*_: object) -> Any:
    raise RuntimeError("Connection closed by peer")


def episodes(sum_over_ranks: Callable[..., Any] = list) -> Episodes:
    return Episodes([], ONES, ONES.long(), dead, sum_over_ranks)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda e: e.scores, "raised AttributeError: .*scores.*test_own_parts.py:[0-9]+"),
        (lambda e: e.returns, "returned a tensor of .*a Prepared is expected"),
        (lambda e: Prepared(e.returns[:2]), r"returned advantages = a tensor .*\[2\].*\[3\].* for each episode"),
        (lambda e: Prepared(e.returns.double()), "returned advantages = .* dtype float64: .* dtype float32 is "),
        (lambda e: Prepared(e.returns, None), "returned metrics = a NoneType: a sequence"),
        (lambda e: Prepared(LEARNED), "returned advantages with a gradient.*: detach them"),
        (lambda e: Prepared(e.returns, [("m", "x", 1.0)]), "returned metric m = a str"),
        (lambda e: Prepared(e.returns, [("m", (1.0, 2.0), 1.0)]), "returned metric m of 2 numbers: one number is exp"),
    ],
)
def test_a_mistake_in_a_credit_s_prepare_is_named(result: Callable[[Episodes], Any], said: str) -> None:
    OwnEpisodeCredit.result = staticmethod(result)
    with pytest.raises(PartFault, match=f"algorithm.credit=mine:OwnEpisodeCredit: prepare {said}"):
        call_prepare(OwnEpisodeCredit(name="mine:OwnEpisodeCredit"), episodes())


def test_what_a_credit_may_prepare_comes_back_as_it_is() -> None:
    for right in (None, Prepared(ONES), Prepared(ONES, [("m", 1.0, 3.0)])):
        OwnEpisodeCredit.result = staticmethod(lambda e, right=right: right)
        assert call_prepare(OwnEpisodeCredit(name="mine:OwnEpisodeCredit"), episodes()) is right


def test_a_rank_that_has_died_is_no_mistake_of_the_part_that_meets_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The learner is started again after it, which a mistake would not be."""
    ranks = Ranks("cpu")
    OwnEpisodeCredit.result = staticmethod(lambda e: e.sum_over_ranks([1.0]))
    with monkeypatch.context() as several:
        several.setattr(ranks, "num_processes", 2)
        several.setattr(torch.distributed, "all_reduce", dead)
        with pytest.raises(RuntimeError, match="^Connection closed by peer"):
            call_prepare(OwnEpisodeCredit(name="mine:OwnEpisodeCredit"), episodes(ranks.sum))
    OwnEpisodeCredit.result = staticmethod(lambda e: e.sum_over_ranks(1.0))
    with pytest.raises(PartFault, match="prepare raised TypeError"):
        call_prepare(OwnEpisodeCredit(name="mine:OwnEpisodeCredit"), episodes(ranks.sum))


def test_a_mistake_in_a_loss_of_the_whole_batch_is_named() -> None:
    name = "algorithm.loss=mine:OwnLoss"
    for act, said in (
        (lambda s, a: s.logprobs, "raised AttributeError: .*logprobs.*test_own_parts.py:[0-9]+"),
        (lambda s, a: s.log_probs.sum(), r"returned a tensor of shape \[\].*float tensor of shape \[n\]"),
        (lambda s, a: 1.0, "returned a float"),
    ):
        with pytest.raises(PartFault, match=f"{name}: measure {said}"):
            call_measure(OwnBatchLoss(act), scored(), ONES)
    for act, said in (
        (lambda m, total: m.nothing, "raised AttributeError: .*nothing.*test_own_parts.py:[0-9]+"),
        (lambda m, total: None, "returned a NoneType: a number is expected"),
        (lambda m, total: m, r"returned a tensor of shape \[3\].*a number is expected"),
    ):
        with pytest.raises(PartFault, match=f"{name}: batch_limit {said}"):
            call_batch_limit(OwnBatchLoss(act), ONES, list)
    assert call_measure(OwnBatchLoss(lambda s, a: ONES[:2]), scored(), ONES).tolist() == [1.0, 1.0]
    assert call_batch_limit(OwnBatchLoss(lambda m, total: total([3.0])[0]), ONES, list) == 3.0


def test_what_is_right_comes_back_as_it_is() -> None:
    tokens = scored()
    output = LossOutput(-tokens.log_probs, {"x_share": torch.tensor(0.5)}, ONES)
    assert call_loss(OwnLoss(lambda s, a: output), tokens, ONES) is output
    numbers = [
        (1, True),
        (np.float32(2.0), ONES[:1]),
        (np.bool_(True), 2),
        ((ONES[0],), np.array(1.0)),
        (np.array(3), 0),
    ]
    measured = [("m", *each) for each in numbers] + [("explained_variance", (1.0, 2.0, 3.0, np.array(4.0)), 1.0)]
    of_two = Worth(ONES, LEARNED[:2], ONES[:2], torch.zeros(2, dtype=torch.int64), value_coef=0.5)
    for worth in (Worth(ONES), Worth(ONES, metrics=measured), FITTED, of_two):  # type: ignore[arg-type]
        assert call_credit(OwnCredit(name="mine:OwnCredit", worth=worth), tokens, BATCH, None) is worth
    diverged = LossOutput(math.nan * tokens.log_probs, {}, math.nan * ONES)
    assert call_loss(OwnLoss(lambda s, a: diverged), tokens, ONES) is diverged, "the trainer leaves its step out"


def test_a_loss_is_not_called_without_tokens() -> None:
    """Of a micro-batch whose tokens are all rejected: the largest of no ratios would raise."""
    nothing = scored().select(torch.zeros(N, dtype=torch.bool))
    output = call_loss(OwnLoss(lambda s, a: LossOutput(s.log_probs, {"x_max": a.max()}, a)), nothing, ONES[:0])
    assert output.per_token.shape == output.weights.shape == (0,) and not output.metrics
    output.per_token.sum().backward()  # type: ignore[no-untyped-call]


def test_a_lack_of_memory_is_left_to_whoever_lowers_the_budget() -> None:
    def act(scored: Scored, advantages: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        call_loss(OwnLoss(act), scored(), ONES)


@dataclass
class Sparing(Loss):
    """Returns one of its metrics with some steps alone, and another one never."""

    metrics = {"steep_share": "s", "loss/now_and_then": "n", "forgotten_mean": "f"}
    name: str = "mine:Sparing"

    def __call__(self, scored: Scored, advantages: torch.Tensor) -> LossOutput:
        found = {"steep_share": ONES[0]}
        if scored.version == 3 and scored.proximal_log_probs is not None:
            found["now_and_then"] = ONES[0]
        return LossOutput(-advantages * scored.log_probs, found, torch.ones_like(advantages))


@dataclass
class SparingCredit(Credit):
    metrics = {"of_batch_mean": "b", "of_episodes_mean": "e", "forgotten_mean": "f"}
    name: str = "mine:SparingCredit"

    def prepare(self, episodes: Episodes) -> Prepared:
        return Prepared(episodes.returns, [("credit/of_episodes_mean", 0.0, 1.0)])

    def __call__(self, scored: Scored, batch: Any, prepared: Any) -> Worth:
        return Worth(torch.ones_like(scored.log_probs), metrics=[("of_batch_mean", 0.0, 1.0)])


def test_a_metric_that_is_declared_and_never_returned_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    ids = torch.zeros(0, dtype=torch.int64)
    episodes = Episodes([], torch.ones(2), torch.zeros(2, dtype=torch.int64), NotImplemented, list)
    for version in range(9):
        tokens = replace(scored(), version=version)
        call_prepare(SparingCredit(), episodes)
        for each in (tokens, replace(tokens, proximal_log_probs=torch.zeros(N)), tokens.select(torch.zeros(N) > 0)):
            call_loss(Sparing(), each, ONES[: len(each.log_probs)])
            call_credit(SparingCredit(), each, BATCH, ids)
        if version == 4:
            assert not capsys.readouterr().out, "the fifth update may still have steps to come"
    said = capsys.readouterr().out.splitlines()
    reason = "declares metrics that it has not returned in 5 updates, forgotten_mean: return them, or take"
    assert [line.partition(" them out")[0] for line in said] == [
        f"learner: algorithm.{part} {reason}" for part in ("loss=mine:Sparing", "credit=mine:SparingCredit")
    ]
