"""The two parts of an algorithm: a credit says what each action is worth, a loss what is done about it.

A step of the learner calls them in this order, the first once for a batch and the others for each micro-batch:

    prepared = credit.prepare(episodes)              # advantages of whole episodes, or None
    scored = score(model, micro)                     # one forward: log π, entropies, values
    worth = credit(scored, micro, prepared)          # advantages, and targets of values or None
    output = loss(scored, worth.advantages)          # a loss for each token, and every metric that it names

A loss whose mask or weight depends on the whole batch (a `BatchLoss`) is asked for it before the gradient pass:

    measured = loss.measure(scored, worth.advantages)          # for each micro-batch, in a forward pass of its own
    limit = loss.batch_limit(all_measured, sum_over_ranks)     # it comes back to the loss as `Scored.batch_limit`

A part is a dataclass: its fields are its options, `algorithm.credit.*` and `algorithm.loss.*`. The built-in ones are
registered under a short name; one of your own is named by its import path, `algorithm.loss=my_module:MyLoss`:

    @dataclass
    class MyLoss(Loss):
        vanishes_with_advantage = True
        metrics = {"steep_share": "share of the tokens with A > 0 and a ratio above `limit`: no gradient"}
        limit: float = bounded(2.0, least=1)

        def __call__(self, scored, advantages):
            ratio = ratios(scored.log_probs - scored.behaviour_log_probs)  # scored.log_ratio has no gradient
            steep = (advantages > 0) & (ratio > self.limit)
            per_token = -torch.where(steep, self.limit, ratio) * advantages
            weights = torch.where(steep, 0.0, ratio.detach())
            return LossOutput(per_token, {"steep_share": steep.float().mean()}, weights)

A credit beside it, and what both must keep to: docs/algorithms.md, "One of your own".

Invariant: only log π, entropies and values carry a gradient. A loss sees the tokens that teach and no others.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from impala_llm.settings import AlgorithmConfig, CreditSettings, LossSettings
from impala_llm.trajectory import Trajectory

MetricValue = tuple[str, float | tuple[float, ...], float]
"""A measurement: metric, value, and its weight, the number of items that the value is a mean of. A metric of a whole
batch that is not a mean of the metrics of its parts, such as a standard deviation, is given by the means from which it
is computed; see `moments`."""


def moments(values: Tensor) -> tuple[float, float]:
    """Mean, and mean of the squares, of float[n] in double precision; not a number where n is 0."""
    values = values.detach().double()
    return float(values.mean()), float(values.square().mean())


@dataclass(frozen=True)
class PackedBatch:
    """S rows of M tokens in all, with N action tokens in K turns, end to end. Integer tensors are int64."""

    members: tuple[int, ...]
    """Index of each row's trajectory in what was packed."""
    tokens: Tensor
    """[M]."""
    position_ids: Tensor
    """[M], from 0 in each context."""
    lengths: Tensor
    """[S]: of the rows."""
    context_lengths: Tensor
    """[C], C >= S: of the contexts, end to end; a row is one or several of them, and none sees another."""
    action_positions: Tensor
    """[N]: flat indices of the action tokens; the one before predicts each."""
    behaviour_log_probs: Tensor
    """float32[N]."""
    versions: Tensor
    """[N]."""
    segment_ids: Tensor
    """[N]: row of each action token."""
    turn_ids: Tensor
    """[N]: turn of each action token, counted through all rows."""
    turn_segment_ids: Tensor
    """[K]: row of each turn."""
    turn_rewards: Tensor
    """float32[K]: sum of the rewards inside of the turn."""
    turn_value_positions: Tensor
    """[K]: flat index of the last token before the turn: the state in which it was decided."""
    last_positions: Tensor
    """[S]: flat index of each row's last token: the state to bootstrap from."""
    bootstrap: Tensor
    """bool[S]."""

    @staticmethod
    def of(trajectories: Sequence[Trajectory], members: Sequence[int]) -> "PackedBatch":
        """Pack trajectories end to end, without padding.

        Args:
            trajectories: of a batch.
            members: indices in it of those to pack, in this order.
        """
        rows = [trajectories[i] for i in members]
        lengths = np.array([row.num_tokens for row in rows])
        starts = np.cumsum(lengths) - lengths
        context_lengths = np.concatenate([row.context_lengths for row in rows])
        masks = np.concatenate([row.action_mask for row in rows])
        positions = np.flatnonzero(masks)
        turns = np.concatenate([row.turns + start for row, start in zip(rows, starts, strict=True)]).astype(np.int64)
        rewards = np.concatenate([row.rewards for row in rows])
        # sums over spans as differences of a running sum would round: reduceat adds each span by itself
        turn_rewards = np.add.reduceat(np.append(rewards, 0.0), turns.reshape(-1))[::2] if len(turns) else np.zeros(0)

        def flat(name: str) -> np.ndarray:
            return np.concatenate([getattr(row, name) for row in rows])[positions]

        def tensor(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.as_tensor(np.ascontiguousarray(array), dtype=dtype)

        return PackedBatch(
            members=tuple(members),
            tokens=tensor(np.concatenate([row.tokens for row in rows])),
            position_ids=tensor(np.concatenate([np.arange(n) for n in context_lengths])),
            lengths=tensor(lengths),
            context_lengths=tensor(context_lengths),
            action_positions=tensor(positions),
            behaviour_log_probs=tensor(flat("behaviour_log_probs"), torch.float32),
            versions=tensor(flat("versions")),
            segment_ids=tensor(np.repeat(np.arange(len(rows)), [row.num_action_tokens for row in rows])),
            turn_ids=tensor(np.repeat(np.arange(len(turns)), turns[:, 1] - turns[:, 0])),
            turn_segment_ids=tensor(np.repeat(np.arange(len(rows)), [len(row.turns) for row in rows])),
            turn_rewards=tensor(turn_rewards, torch.float32),
            turn_value_positions=tensor(turns[:, 0] - 1),
            last_positions=tensor(starts + lengths - 1),
            bootstrap=tensor(np.array([row.bootstrap for row in rows]), torch.bool),
        )

    @staticmethod
    def empty() -> "PackedBatch":
        """Make a micro-batch of one token of no trajectory, for a rank without data in a collective forward."""
        none, first = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        return PackedBatch(
            members=(),
            tokens=first,
            position_ids=first,
            lengths=torch.ones(1, dtype=torch.int64),
            context_lengths=torch.ones(1, dtype=torch.int64),
            action_positions=none,
            behaviour_log_probs=torch.zeros(0),
            versions=none,
            segment_ids=none,
            turn_ids=none,
            turn_segment_ids=none,
            turn_rewards=torch.zeros(0),
            turn_value_positions=none,
            last_positions=first,
            bootstrap=torch.zeros(1, dtype=torch.bool),
        )

    def to(self, device: torch.device) -> "PackedBatch":
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return PackedBatch(members=self.members, **moved)


@dataclass(frozen=True)
class Scored:
    """Action tokens as the learner scores them in one forward: [N] each, in the order of the micro-batch."""

    log_probs: Tensor
    """float32: log π, differentiable."""
    entropy: Tensor
    """float32: of π in nats, differentiable."""
    behaviour_log_probs: Tensor
    """float32: log μ as it enters the ratios."""
    segment_ids: Tensor
    """int64, non-decreasing: row of each token."""
    versions: Tensor
    """int64: policy version that sampled each token."""
    version: int
    """Version of the learner's weights, >= that of every token."""
    values: Callable[[Tensor], Tensor]
    """Value head at flat indices of the micro-batch: int64[K] to float32[K], differentiable."""
    proximal_log_probs: Tensor | None = None
    """float32: log π when the update began; None where it has one optimizer step, in which they are `log_probs`."""
    reference_log_probs: Tensor | None = None
    """float32, by the reference policy; None where nothing asks for it."""
    teacher_log_probs: Tensor | None = None
    """float32, by the teacher; None where nothing asks for it."""
    batch_limit: float | None = None
    """Limit that the loss has found over the batch of the optimizer step, see `BatchLoss.batch_limit`; None: none."""

    @property
    def log_ratio(self) -> Tensor:
        """float32: l = log π - log μ in nats, without gradient."""
        return (self.log_probs - self.behaviour_log_probs).detach()

    def select(self, mask: Tensor) -> "Scored":
        """The tokens where bool[N] `mask` is true. Values keep their indices in the whole micro-batch."""
        taken: dict[str, Any] = {name: value[mask] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **taken)


@dataclass(frozen=True)
class Episodes:
    """A rank's batch before it is packed: [M] each."""

    trajectories: Sequence[Trajectory]
    returns: Tensor
    """float32: sum of an episode's rewards, discounted by turns, divided by the scale of rewards. In a group where
    they are equal but for rounding they are all the same, see advantages.py."""
    group_ids: Tensor
    """int64."""
    log_probs: Callable[[], tuple[Tensor, Tensor]]
    """Computes, by a forward each, float32[M] twice: log π and log π_ref of all action tokens of an episode together.
    For credits with `needs_reference`."""
    sum_over_ranks: Callable[[Sequence[float]], list[float]]
    """Collective: all ranks call it together."""


class Prepared(NamedTuple):
    """Result of a credit for whole episodes, before they are packed."""

    advantages: Tensor
    """float32[M]; an episode with exactly 0 is left out of the forward where no other part of the loss needs it."""
    metrics: Sequence[MetricValue] = ()


@dataclass(frozen=True)
class Worth:
    """Result of a credit for a micro-batch: advantages of its action tokens, and values with their targets."""

    advantages: Tensor
    """float32[N], without gradient."""
    values: Tensor | None = None
    """float32[K], differentiable: fitted to `targets`. None where no values are fitted, as are targets and rows."""
    targets: Tensor | None = None
    """float32[K], without gradient."""
    value_rows: Tensor | None = None
    """int64[K]: row of each value."""
    num_values: Literal["tokens", "turns"] = "turns"
    """Unit of the values: one for each action token, or one for each turn."""
    value_coef: float = 0.0
    """Weight of ½ (value - target)² in the loss."""
    metrics: Sequence[MetricValue] = ()


class LossOutput(NamedTuple):
    """A policy loss, not yet averaged; [N] are the tokens that went in."""

    per_token: Tensor
    """float[N], as the advantages: loss of each token; see `losses.aggregate`."""
    metrics: Mapping[str, Tensor]
    """Scalars without gradient. Names in `_mean` and `_share` are means over the N tokens (0 when N is 0), so
    micro-batches combine weighted by N; names in `_max` combine by maximum, in `_min` by minimum. A `clip_share` is the
    share of the tokens where a bound has an effect."""
    weights: Tensor
    """float[N], without gradient: factor of -A grad log π of each token: its importance weight, 0 where it is clipped.
    Their effective sample size controls the share of replayed data."""


@dataclass
class Credit(CreditSettings, ABC):
    """Credit assignment: an advantage for each action token. Subclasses are dataclasses; see the module."""

    of_episodes: ClassVar[bool] = False
    """Whether all tokens of an episode have one advantage, which `prepare` returns. `__call__` then has to return that
    and no values, as `Worth(prepared[scored.segment_ids])`. For an episode whose prepared advantage is 0 it may not be
    called at all, since nothing is learned from it; and whitening takes mean and deviation of the prepared advantages.
    """
    needs_teacher: ClassVar[bool] = False
    """Whether `Scored.teacher_log_probs` is read; such a credit has the options `teacher` and `teacher_context`."""

    def prepare(self, episodes: Episodes) -> Prepared | None:
        """Called once for each batch, before it is packed; None where nothing needs to be known of whole episodes."""
        return None

    @abstractmethod
    def __call__(self, scored: Scored, batch: PackedBatch, prepared: Tensor | None) -> Worth:
        """Advantages of a micro-batch's N action tokens.

        Args:
            scored: its action tokens.
            batch: the micro-batch, on the same device.
            prepared: float32[S], the prepared advantage of each row; None where `prepare` gave None.
        """


@dataclass
class Loss(LossSettings, ABC):
    """Policy loss of log-ratios and advantages. Subclasses are dataclasses; see the module."""

    vanishes_with_advantage: ClassVar[bool] = False
    """Whether the loss of a row has no gradient where the advantages of all its tokens are 0: then such rows are not
    computed, unless something else needs them. It is not inherited: what a class adds to its base may not vanish."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.vanishes_with_advantage = vars(cls).get("vanishes_with_advantage", False)

    @abstractmethod
    def __call__(self, scored: Scored, advantages: Tensor) -> LossOutput:
        """Loss of each of N action tokens.

        Args:
            scored: the tokens that teach.
            advantages: float32[N], constant.
        """

    def problems_of_class(self) -> list[str]:
        is_of_batch = getattr(self, "of_batch", False) or callable(getattr(self, "batch_limit", None))
        if not is_of_batch or isinstance(self, BatchLoss):
            return []
        return [
            f"algorithm.loss={self.name} cannot be used: its class {type(self).__name__} needs the whole batch, but "
            f"only a BatchLoss is asked for its batch_limit: derive it from {BatchLoss.__module__}.BatchLoss"
        ]


class BatchLoss(Loss):
    """Loss of a token that depends on the others of the batch.

    It is asked for what it needs of them before each optimizer step, at the cost of one more forward pass.
    """

    @abstractmethod
    def measure(self, scored: Scored, advantages: Tensor) -> Tensor:
        """float32[n], any n: the input of `batch_limit` from one micro-batch.

        Args:
            scored, advantages: as in `__call__`, without gradient.
        """

    @abstractmethod
    def batch_limit(self, measured: Tensor, sum_over_ranks: Callable[[Sequence[float]], list[float]]) -> float:
        """Return the number that `__call__` finds in `Scored.batch_limit`, the same on all ranks.

        Args:
            measured: float32, results of `measure` for all micro-batches of this rank.
            sum_over_ranks: collective: all ranks call it together, and equally often.
        """


CREDITS: dict[str, type[Credit]] = {}
"""Short name -> built-in credit; complete once `registry` is imported."""
LOSSES: dict[str, type[Loss]] = {}
"""Short name -> built-in loss; complete once `registry` is imported."""

_Part = TypeVar("_Part", bound=type)
_CreditType = TypeVar("_CreditType", bound=type[Credit])
_LossType = TypeVar("_LossType", bound=type[Loss])


def credit(name: str) -> Callable[[_CreditType], _CreditType]:
    """Class decorator: registers a credit under a short name. Raises ValueError where another class has it."""
    return lambda part: _register(CREDITS, "algorithm.credit", name, part)


def loss(name: str) -> Callable[[_LossType], _LossType]:
    """Class decorator: registers a loss under a short name. Raises ValueError where another class has it."""
    return lambda part: _register(LOSSES, "algorithm.loss", name, part)


def _register(parts: dict[str, Any], key: str, name: str, part: _Part) -> _Part:
    taken = parts.get(name, part)
    # One that is loaded anew, as in a notebook, takes its own place.
    if (taken.__module__, taken.__qualname__) != (part.__module__, part.__qualname__):
        raise ValueError(
            f"{key}={name} is {taken.__module__}.{taken.__qualname__} already: give {part.__qualname__} another name"
        )
    parts[name] = part
    return part


def parts_of(algorithm: AlgorithmConfig) -> tuple[Credit, Loss]:
    """Return the credit and the loss of settings that `config.load` has composed."""
    credit, loss = algorithm.credit, algorithm.loss
    assert isinstance(credit, Credit) and isinstance(loss, Loss), "config.load makes them"
    return credit, loss
