"""Model check: compares rows of uneven length on the real path with a plain forward of each row alone.

Not every causal LM can be packed by the learner and cached by the engine: a recurrent layer passes its state on to the
next row, some frequencies depend on the longest row of a batch, some attention has terms that ours lacks. Such a model
would give wrong results without an error. So learner and engine compare themselves with transformers before they begin.

Invariant: a model that is not refused was compared on this machine, with these weights, beyond every length up to
`engine.max_length` at which its layers change what they compute.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from impala_llm.engines.base import ModelRefused
from impala_llm.engines.out_of_memory import is_out_of_memory

TOLERANCE = 1e-3
"""Largest mean difference over a row's tokens, in nats, in float32. Correct models stay below 1e-5; the smallest error
of a wrong one was 0.02."""
COARSE_TOLERANCE = 0.3
"""The same in bfloat16 or TF32, where two correct ways to compute differ by up to 0.06."""
USUAL_LENGTH = 96
"""Tokens of the longer row: more than a block of the engine's cache."""
_BEYOND = 12
"""Tokens by which a row exceeds a turning point."""
_KEPT = 128
"""Tokens at a row's end whose logits are compared: those of all tokens of long rows would take gigabytes."""


def turning_points(config: Any, max_length: int) -> list[int]:
    """List the lengths below `max_length` beyond which a model's layers compute differently, by its configuration."""
    points = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *ropes.values()]:
        if isinstance(rope, Mapping) and rope.get("rope_type") in ("longrope", "dynamic"):
            original = getattr(config, "original_max_position_embeddings", None)
            points.append(rope.get("original_max_position_embeddings") or original or config.max_position_embeddings)
    return sorted({int(point) for point in points if point and point < max_length})


def row_pairs(config: Any, max_length: int) -> list[tuple[int, int, int | None]]:
    """List pairs of rows to compare: (length of the long one, of the short one, turning point that is crossed)."""
    points = turning_points(config, max_length)
    usual = min(max_length, USUAL_LENGTH, *points)
    pairs: list[tuple[int, int, int | None]] = [(usual, max(2, usual * 2 // 5), None)]
    return pairs + [(min(max_length, point + _BEYOND), max(2, usual * 2 // 5), point) for point in points]


def random_rows(vocab_size: int, lengths: Sequence[int], device: torch.device) -> list[Tensor]:
    """Make rows int64[length], always the same."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab_size, (length,), generator=generator).to(device) for length in lengths]


@torch.no_grad()
def plain_log_probs(lm: PreTrainedModel, rows: Sequence[Tensor]) -> list[Tensor]:
    """Compute the log-probabilities of each row's last tokens (never the first) by transformers alone.

    Args:
        rows: int64[length] each.

    Returns:
        float64[at most length - 1] each.
    """
    ours = lm.config._attn_implementation
    lm.set_attn_implementation("eager")
    try:
        found = []
        for row in rows:
            options = {"logits_to_keep": _KEPT} if len(row) > _KEPT else {}
            logits = lm(input_ids=row[None], use_cache=False, **options).logits[0].double()
            targets = row[-len(logits) :][1:, None]
            found.append(logits[:-1].log_softmax(-1).gather(-1, targets).squeeze(-1))
        return found
    finally:
        lm.set_attn_implementation(ours)


def check_agreement(
    lm: PreTrainedModel, path: str, mine: Sequence[Tensor], plain: Sequence[Tensor], point: int | None
) -> float:
    """Check two computations of the same rows. Returns the largest of the rows' mean differences, in nats.

    Args:
        path: name of the computation of `mine`, for the message.
        mine, plain: log-probabilities of each row's last tokens; where they differ in number, the last ones count.
        point: the turning point that the rows crossed.

    Raises:
        ModelRefused: it is above the tolerance, or not a number.
    """
    means = []
    for one, other in zip(mine, plain, strict=True):
        count = min(len(one), len(other))
        means.append((one[-count:].double().to(other.device) - other[-count:]).abs().mean())
    worst = torch.stack(means).max().item()  # unlike Python's max this is NaN where one of them is
    exact = lm.dtype == torch.float32 and not (lm.device.type == "cuda" and _is_tf32())
    limit = TOLERANCE if exact else COARSE_TOLERANCE
    if not worst <= limit:
        fix = "take a model of the table in docs/engines.md"
        if point is not None:
            fix = f"set engine.max_length={point}, beyond which this model computes otherwise, or {fix}"
        raise ModelRefused(
            f"{describe(lm)}: log-probabilities of {path} differ by {worst:.2g} nats on average from a plain forward "
            f"of the model, above {limit:g}, and training would be wrong: {fix}"
        )
    return worst


@contextmanager
def refusing(what: str, fix: str = "take a model of the table in docs/engines.md") -> Iterator[None]:
    """Turn errors of a model's own code, on a path that it was not written for, into ModelRefused. A lack of memory is
    none of these, and passes.

    Args:
        what: "the model ... cannot be ...", for the message.
        fix: end of the message.
    """
    try:
        yield
    except ModelRefused:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        if is_out_of_memory(error) or is_out_of_memory(cause):
            raise
        # The first sentence: what follows it is advice that does not fit here.
        reason = f"{type(cause).__name__}: {' '.join(str(cause).split()).partition('. ')[0]}"
        if "ignore_mismatched_sizes" in reason:  # transformers prints which, and raises this
            reason = "weights have other shapes than config.json says"
        raise ModelRefused(f"{what} ({reason}): {fix}") from error


def describe(lm: PreTrainedModel) -> str:
    """Directory and kind of a model."""
    return f"the model {lm.config.name_or_path or type(lm).__name__} ({lm.config.model_type})"


def _is_tf32() -> bool:
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
