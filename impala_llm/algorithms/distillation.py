"""On-policy distillation: the student samples, and a teacher says of every token how likely it would have been.

The signal takes the place of the advantage in any loss of `losses`, under the same importance weights. In context
distillation the teacher is the policy itself, which reads more (a hint, a reflection) before the same tokens:
`insert_context` lays out what it reads, and says where the student's tokens went.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from impala_llm.algorithms.checks import require_same_floats
from impala_llm.algorithms.importance import LOG_RATIO_LIMIT
from impala_llm.algorithms.interface import Credit, PackedBatch, Scored, Worth, credit
from impala_llm.settings import AlgorithmConfig


class ContextRows(NamedTuple):
    """Rows laid end to end, with their contexts in them."""

    tokens: Tensor
    """[N + num_context]: of the dtype of the tokens that went in."""
    lengths: Tensor
    """int64[num_segments]: of the rows."""
    positions: Tensor
    """int64[N]: where each token that went in now lies: `tokens[positions]` are those that went in."""


def reverse_kl_signal(teacher_log_probs: Tensor, student_log_probs: Tensor) -> Tensor:
    """log π_teacher - log π_student of the tokens that the student sampled.

    Its mean over samples of the student is -KL(student‖teacher), and as the advantage in a policy gradient it descends
    that divergence (on-policy distillation, arXiv 2306.13649).

    Args:
        teacher_log_probs, student_log_probs: float[N], at the same temperature.

    Returns:
        float[N] in nats, clamped to ±20, without gradient.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    require_same_floats(("teacher_log_probs", teacher_log_probs), ("student_log_probs", student_log_probs), ndim=1)
    return (teacher_log_probs - student_log_probs).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@credit("distillation")
@dataclass
class Distillation(Credit):
    """Log-ratio of teacher to student for each sampled token; see `reverse_kl_signal`."""

    needs_teacher: ClassVar[bool] = True
    learns_from_rewards: ClassVar[bool] = False
    teacher: str | None = None
    """The teacher, as model.path; None: the policy itself, which reads `teacher_context` as well."""
    teacher_context: str = ""
    """Text that the teacher reads before the episode, such as a hint."""

    def __call__(self, scored: Scored, batch: PackedBatch, prepared: Tensor | None) -> Worth:
        assert scored.teacher_log_probs is not None
        return Worth(reverse_kl_signal(scored.teacher_log_probs, scored.log_probs.detach()))

    def problems(self, algorithm: AlgorithmConfig) -> list[str]:
        if self.teacher is not None or self.teacher_context:
            return []
        return [
            f"algorithm.credit={self.name} has neither algorithm.credit.teacher nor algorithm.credit.teacher_context: "
            "the policy would be its own teacher; set one of them"
        ]


def insert_context(
    tokens: Tensor,
    lengths: Tensor,
    context: Tensor,
    context_lengths: Tensor,
    offsets: Tensor,
) -> ContextRows:
    """Rows with a context of their own in each: its first `offsets` tokens, the context, the rest.

    With p = action positions of the student's rows, the teacher's are `positions[p]`, in the same order, so their
    log-probabilities compare one to one. A context has to stand before the first action: tokens behind an action do
    not change its probability.

    Args:
        tokens: int[N], rows laid end to end.
        lengths: int64[num_segments], >= 0, their sum is N.
        context: int[num_context], the contexts laid end to end, of the dtype of `tokens`.
        context_lengths: int64[num_segments], >= 0, their sum is num_context; 0 leaves a row as it is.
        offsets: int64[num_segments], in [0, length of the row].

    Raises:
        TypeError, ValueError: wrong dtype, lengths that do not add up, an offset outside of its row.
    """
    if context.dtype != tokens.dtype:
        raise TypeError(f"context has dtype {context.dtype}, tokens has {tokens.dtype}: they must be equal")
    num_segments = lengths.shape[0]
    for name, counts in (("lengths", lengths), ("context_lengths", context_lengths), ("offsets", offsets)):
        if counts.dtype != torch.int64:
            raise TypeError(f"{name} has dtype {counts.dtype}: int64 expected")
        if counts.shape != (num_segments,):
            raise ValueError(f"{name} has shape {list(counts.shape)}: [{num_segments}] expected, one for each row")
        if bool((counts < 0).any()):
            raise ValueError(f"{name} holds {int(counts.min())}: it must not be negative")
    for name, counts, laid in (("lengths", lengths, tokens), ("context_lengths", context_lengths, context)):
        if laid.ndim != 1 or int(counts.sum()) != laid.shape[0]:
            raise ValueError(f"{name} add up to {int(counts.sum())}, but there are {list(laid.shape)} tokens")
    if bool((offsets > lengths).any()):
        row = int((offsets > lengths).nonzero()[0])
        raise ValueError(f"offsets holds {int(offsets[row])} for row {row}, which has {int(lengths[row])} tokens")

    segment_ids = torch.repeat_interleave(torch.arange(num_segments, device=tokens.device), lengths)
    offset_in_row = torch.arange(tokens.shape[0], device=tokens.device) - (lengths.cumsum(0) - lengths)[segment_ids]
    inserted_before = context_lengths.cumsum(0) - context_lengths
    inserted_inside = torch.where(offset_in_row >= offsets[segment_ids], context_lengths[segment_ids], 0)
    positions = torch.arange(tokens.shape[0], device=tokens.device) + inserted_before[segment_ids] + inserted_inside
    total = tokens.shape[0] + context.shape[0]
    is_context = torch.ones(total, dtype=torch.bool, device=tokens.device)
    is_context[positions] = False
    together = tokens.new_empty(total)
    together[positions] = tokens
    together[is_context] = context
    return ContextRows(together, lengths + context_lengths, positions)
