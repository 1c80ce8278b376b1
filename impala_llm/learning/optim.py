"""AdamW, the learning-rate schedule and the gradient clip: one optimizer step.

Invariant: a gradient that is not finite changes nothing, neither weights nor moments; the step is reported as skipped.
The policy's rate rises when the policy begins to learn, after the updates in which only the value head does.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from impala_llm.config import ConfigError
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import local, reshard
from impala_llm.settings import LearnerConfig

_BASE_WIDTH = 64
"""Inputs of a value-head matrix that `value_learning_rate` is for."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
MOST_LEFT_OUT = 50
"""Steps left out in a row after which a run ends."""


class NothingLearned(ConfigError):
    """So many steps in a row were left out that the next ones will not be better: the settings do not go together."""


@dataclass(frozen=True)
class StepResult:
    gradient_norm: float
    """L2, before clipping, of the policy's gradient (the value head's has its own clip)."""
    clipped: bool
    skipped: bool
    """Whether the step was skipped because a value was not finite."""
    learning_rate: float
    """Learning rate of the policy; 0 while only the value head learns."""


def schedule(config: LearnerConfig, update: int, progress: float) -> float:
    """Factor of the learning rate, in [0, 1].

    Args:
        update: counted from 0, of what the rate is for; the first `warmup_updates` rise linearly.
        progress: share of the run that is over, in [0, 1]: of updates or of time, whichever is further.
    """
    warmup = min(1.0, (update + 1) / config.warmup_updates) if config.warmup_updates else 1.0
    final = config.final_learning_rate_fraction
    shape = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}[
        config.decay
    ]
    return warmup * (final + (1.0 - final) * shape)


class Optimizer:
    """AdamW with a group for the policy's matrices, one for its vectors (never decayed) and one for each tensor of the
    value head, whose rate falls in inverse proportion to its inputs (µP, arXiv 2203.03466, table 3).

    Of a sharded policy each rank steps its shares, and norms are those of all shares together.

    Args:
        model: as it lies when steps are taken: placed on its device, or sharded.
        rate_key: setting that the learning rate comes from, for messages.
    """

    def __init__(self, model: PolicyModel, config: LearnerConfig, rate_key: str = "learner.learning_rate") -> None:
        reshard(model)
        self._rate_key = rate_key
        self._config = config
        self._names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._policy = [p for p in model.lm.parameters() if p.requires_grad]
        self._value = list(model.value_head.parameters())
        groups: list[dict[str, Any]] = []
        for part in _by_kind(self._policy):
            groups.append({"params": [p for p in part if p.ndim >= 2], "weight_decay": config.weight_decay})
            groups.append({"params": [p for p in part if p.ndim < 2], "weight_decay": 0.0})
        self._num_policy_groups = len(groups)
        groups += ({"params": [p], "weight_decay": 0.0} for p in self._value)
        # A bias has one input.
        widths = [p.shape[1] if p.ndim == 2 else 1 for p in self._value]
        rates = [config.value_learning_rate * min(1.0, _BASE_WIDTH / width) for width in widths]
        self._rates = [config.learning_rate] * self._num_policy_groups + rates
        # The overhead of an operation on a DTensor exceeds its arithmetic: use one for all tensors of a group.
        foreach = True if any(isinstance(p, DTensor) for p in self._policy) else None
        self._num_left_out = 0
        self._adam = torch.optim.AdamW(groups, lr=0.0, betas=(config.adam_beta1, config.adam_beta2), foreach=foreach)

    def step(self, update: int, progress: float, skip: bool = False) -> StepResult:
        """Clip, step and clear the gradients. In the first `value_warmup_updates` only the value head learns.

        Args:
            update: number of the run's update, from 0; after a start without its optimizer state, from that start.
            progress: see `schedule`.
            skip: change nothing.

        Raises:
            NothingLearned: `MOST_LEFT_OUT` steps in a row were left out, this one included.
        """
        limit = self._config.max_grad_norm
        norm, value_norm = _clip(self._policy, limit), _clip(self._value, limit)
        value_factor = schedule(self._config, update, progress)
        since_warmup = update - self._config.value_warmup_updates
        factor = schedule(self._config, since_warmup, progress) if since_warmup >= 0 else 0.0
        skip = skip or not (math.isfinite(norm) and math.isfinite(value_norm))
        if not skip:
            if since_warmup < 0:
                for p in self._policy:
                    p.grad = None  # AdamW passes over it, its moments included
            for index, (group, rate) in enumerate(zip(self._adam.param_groups, self._rates, strict=True)):
                group["lr"] = rate * (factor if index < self._num_policy_groups else value_factor)
            self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self._num_left_out = self._num_left_out + 1 if skip else 0
        if self._num_left_out >= MOST_LEFT_OUT:
            rate = self._config.learning_rate
            raise NothingLearned(
                f"{self._num_left_out} optimizer steps in a row were left out, since an advantage, loss or gradient "
                "was not finite: nothing is learned any more. The warning A STEP IS LEFT OUT in the log says when it "
                f"began, and what to check; {self._rate_key}={rate:g} may be too high"
            )
        return StepResult(norm, norm > limit, skip, self._config.learning_rate * factor)

    def bytes_to_come(self, device_type: str) -> int:
        """Return how many bytes of moments the next step will make on a device of a type, of this rank's shares."""
        without = [local(p) for p in self._names if p not in self._adam.state]
        return len(_MOMENTS) * sum(p.nbytes for p in without if p.device.type == device_type)

    def state_dict(self) -> dict[str, Tensor]:
        """Moments and number of steps of every parameter, as `<parameter>.<moment>`; zeros before its first step.

        Those of shares are DTensors; checkpoints/writer.py writes each rank's, and any number of ranks reads them.
        """
        found: dict[str, Tensor] = {}
        for p, name in self._names.items():
            state = self._adam.state.get(p, {})
            for moment in _MOMENTS:
                found[f"{name}.{moment}"] = state[moment] if state else torch.zeros_like(p)
            found[f"{name}.step"] = state["step"] if state else torch.zeros(())
        return found

    def load(self, read: Callable[[str, Tensor], object]) -> None:
        """Take over a saved state, of any number of ranks: tensor by tensor, so that none lies in memory twice.

        Args:
            read: fills a tensor by its name in `state_dict`: a whole one, or a share as it lies here.
        """
        for p, name in self._names.items():
            read(f"{name}.step", step := torch.zeros(()))
            if step.item() == 0:
                self._adam.state.pop(p, None)
                continue
            moments = {}
            for moment in _MOMENTS:
                moments[moment] = torch.zeros_like(p)
                read(f"{name}.{moment}", moments[moment])
            self._adam.state[p] = {"step": step, **moments}


def _by_kind(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parameters that are whole, and those that are shared, which no operation takes together; none of them empty."""
    whole = [p for p in parameters if not isinstance(p, DTensor)]
    shared: list[Tensor] = [p for p in parameters if isinstance(p, DTensor)]
    return [part for part in (whole, shared) if part]


def _clip(parameters: Sequence[Tensor], limit: float) -> float:
    """Scale gradients down to this norm. Returns what it was, over all shares."""
    parts = _by_kind(parameters)
    norms = []
    for part in parts:
        norm = torch.nn.utils.get_total_norm([p.grad for p in part if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for part in parts:
        torch.nn.utils.clip_grads_with_norm_(part, limit, norm)
    return norm.item()
