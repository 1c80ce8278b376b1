"""AdamW, the learning-rate schedule and the gradient clip: one optimizer step.

Invariant: a gradient that is not finite changes nothing, neither weights nor moments; the step is reported as skipped.
The policy's rate rises when the policy begins to learn, after the updates in which only the value head does.
"""

import math
from dataclasses import dataclass

import torch

from impala_llm.learning.model import PolicyModel
from impala_llm.settings import LearnerConfig

_BASE_WIDTH = 64
"""Inputs of a value-head matrix that `value_learning_rate` is for."""
_POLICY_GROUPS = 2


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
    """

    def __init__(self, model: PolicyModel, config: LearnerConfig) -> None:
        self._config = config
        self._policy = [p for p in model.lm.parameters() if p.requires_grad]
        self._value = list(model.value_head.parameters())
        groups = [
            {"params": [p for p in self._policy if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in self._policy if p.ndim < 2], "weight_decay": 0.0},
            *({"params": [p], "weight_decay": 0.0} for p in self._value),
        ]
        # A bias has one input.
        widths = [p.shape[1] if p.ndim == 2 else 1 for p in self._value]
        rates = [config.value_learning_rate * min(1.0, _BASE_WIDTH / width) for width in widths]
        self._rates = [config.learning_rate, config.learning_rate, *rates]
        self._adam = torch.optim.AdamW(groups, lr=0.0, betas=(config.adam_beta1, config.adam_beta2))

    def step(self, update: int, progress: float, skip: bool = False) -> StepResult:
        """Clip, step and clear the gradients. In the first `value_warmup_updates` only the value head learns.

        Args:
            update: counted from 0 since the process began, whose moments begin at nothing too.
            progress: see `schedule`.
            skip: change nothing.
        """
        limit = self._config.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self._policy, limit).item()
        value_norm = torch.nn.utils.clip_grad_norm_(self._value, limit).item()
        value_factor = schedule(self._config, update, progress)
        since_warmup = update - self._config.value_warmup_updates
        factor = schedule(self._config, since_warmup, progress) if since_warmup >= 0 else 0.0
        skip = skip or not (math.isfinite(norm) and math.isfinite(value_norm))
        if not skip:
            if since_warmup < 0:
                for p in self._policy:
                    p.grad = None  # AdamW passes over it, its moments included
            for index, (group, rate) in enumerate(zip(self._adam.param_groups, self._rates, strict=True)):
                group["lr"] = rate * (factor if index < _POLICY_GROUPS else value_factor)
            self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        return StepResult(norm, norm > limit, skip, self._config.learning_rate * factor)
