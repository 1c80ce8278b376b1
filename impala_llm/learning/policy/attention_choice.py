"""Choice of the attention on packed rows (`learner.attention`): the best that is installed and right on this device.

Invariant: an attention other than our segments was compared with them, forward and backward, on this device and in the
precision of the run, beyond every length at which a layer changes what it computes. All ranks choose the same.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.utils.import_utils import is_flash_attn_3_available

from impala_llm.engines.base import ModelRefused
from impala_llm.engines.embedded.model_check import (
    COARSE_TOLERANCE,
    TOLERANCE,
    describe,
    random_rows,
    refusing,
    row_pairs,
)
from impala_llm.engines.out_of_memory import is_out_of_memory
from impala_llm.learning.packing import OutOfMemory
from impala_llm.learning.policy.attention import FLASH_2, FLEX, SEGMENTS
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks, reshard
from impala_llm.processes.supervised import say
from impala_llm.settings import LearnerConfig

FLASH_3 = "flash_attention_3"
_WORDS = {SEGMENTS: "segments", FLEX: "flex attention", FLASH_2: "flash attention 2", FLASH_3: "flash attention 3"}
_GRADIENT_TOLERANCE, _COARSE_GRADIENT_TOLERANCE = 0.01, 0.5
"""Largest difference of the gradients of matrices of one name in all layers, as a share of their norm: in float32, and
in bfloat16 or TF32. A gradient that is missing differs by 1."""
_ROUNDING = 1e-5
"""Norm that a gradient of 0 may have by rounding, as a share of the largest one's."""


@dataclass(frozen=True)
class Options:
    """Attentions that can be tried, best first, by transformers' names; and sentences on those that cannot."""

    implementations: Sequence[str]
    against: Sequence[str]


def options(wanted: str, device_type: str, precision: str) -> Options:
    """List what a device and what is installed allow.

    Args:
        wanted: learner.attention.
        precision: learner.precision.
    """
    if wanted == "segments" or (wanted == "auto" and device_type == "cpu"):
        return Options((SEGMENTS,), ())
    if device_type == "cpu":
        return Options((), (f"{wanted} attention trains on GPUs alone",))
    found: list[str] = []
    against: list[str] = []
    if wanted in ("auto", "flash"):
        if precision != "bfloat16":
            against.append("flash attention needs learner.precision=bfloat16")
        else:
            found += [FLASH_3, FLASH_2] if is_flash_attn_3_available() else [FLASH_2]
    if wanted == "flex":
        found.append(FLEX)
    return Options([*found, SEGMENTS] if wanted == "auto" else found, against)


def choose_attention(model: PolicyModel, learner: LearnerConfig, max_length: int, ranks: Ranks) -> None:
    """Set the attention of a policy that lies where it computes; where there was a choice, say which and why.

    The policy was checked with our segments before. All ranks call it.

    Args:
        max_length: engine.max_length.

    Raises:
        ModelRefused: the attention that learner.attention names cannot be used here, or would compute wrongly.
        OutOfMemory: memory does not suffice for the comparison, from where ranks that share the policy cannot go on.
    """
    offered = options(learner.attention, ranks.device.type, learner.precision)
    model.compute_in(learner.precision)
    against = list(offered.against)
    for implementation in offered.implementations:
        reason = ""
        if implementation != SEGMENTS:
            reason = reason_against(model, implementation, max_length, ranks.device, ranks.is_sharded)
        if not ranks.sum([float(bool(reason))], of_processes=True)[0]:
            model.attend_by(implementation)
            if ranks.is_main and (len(offered.implementations) > 1 or against):
                why = f": {'; '.join(against)}" if against else ""
                say(f"learner: packed rows are computed by {_word(implementation)}{why}")
            return
        against.append(reason or f"{_word(implementation)} failed on another rank")
    raise ModelRefused(
        f"learner.attention={learner.attention} cannot be used on {ranks.device}: {'; '.join(against)}; set "
        "learner.attention=auto"
    )


def reason_against(
    model: PolicyModel, implementation: str, max_length: int, device: torch.device, is_shared: bool = False
) -> str:
    """Return why an attention cannot be used with a policy, by `compare`; empty where it can.

    Args:
        implementation: transformers' name of it.
        max_length: tokens of a row at most.
        device: on which the policy computes.
        is_shared: whether ranks share the policy.

    Raises:
        OutOfMemory: memory does not suffice for the comparison, from where ranks that share the policy cannot go on.
    """
    word = _word(implementation)
    try:
        compare(model, implementation, max_length, device)
        return ""
    except ModelRefused as error:
        return str(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if is_shared:  # the others may wait amid the same pass
            raise OutOfMemory(
                f"memory does not suffice for the comparison of {word} with segments, and where ranks share the policy "
                "none can try the next attention alone: set learner.attention=segments"
            ) from error
    if torch.cuda.is_available():  # only here, outside of the handlers, nothing holds the tensors any more
        torch.cuda.empty_cache()
    return f"{word} is left out, since memory does not suffice for its comparison with segments"


def compare(model: PolicyModel, implementation: str, max_length: int, device: torch.device) -> float:
    """Compare packed rows by an attention with the same by our segments: log-probabilities, and gradients of their sum.

    The policy is left with our segments, and without a gradient. Ranks that share it all call it.

    Args:
        implementation: transformers' name of it.
        max_length: tokens of a row at most.
        device: on which the policy computes.

    Returns:
        The largest mean difference of a row's log-probabilities, in nats.

    Raises:
        ModelRefused: it cannot be used with this model or on this host, or differs by more than rounding.
    """
    word, worst = _word(implementation), 0.0
    config = model.lm.config.get_text_config()
    learns = any(p.requires_grad for p in model.lm.parameters())
    try:
        for long, short, _ in row_pairs(config, max_length):
            rows = random_rows(model.vocab_size, [long, short], device)
            model.attend_by(SEGMENTS)
            expected, gradients = _log_probs(model, rows, learns)
            with refusing(f"{describe(model.lm)} cannot be computed by {word}"):
                model.attend_by(implementation)
                found, found_gradients = _log_probs(model, rows, learns)
            means = [(a.double() - b.double()).abs().mean() for a, b in zip(found, expected, strict=True)]
            worst = max(worst, torch.stack(means).max().item())
            limit = TOLERANCE if model.is_exact else COARSE_TOLERANCE
            if not worst <= limit:
                raise ModelRefused(
                    f"log-probabilities by {word} differ by {worst:.2g} nats on average from those by segments, above "
                    f"{limit:g}"
                )
            _check_gradients(found_gradients, gradients, word, model.is_exact)
            del gradients, found_gradients  # before the next pair has its own
    finally:
        model.attend_by(SEGMENTS)
        model.zero_grad(set_to_none=True)
        reshard(model)
    return worst


def _word(implementation: str) -> str:
    return _WORDS.get(implementation, implementation)


def _log_probs(model: PolicyModel, rows: Sequence[Tensor], learns: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probabilities of each row's tokens but the first, computed on packed rows.

    Args:
        learns: whether gradients are wanted.

    Returns:
        The log-probabilities, and the gradients of their sum by name of the parameter; the parameters are without.
    """
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(n, device=rows[0].device) for n in lengths])
    with torch.set_grad_enabled(learns):
        hidden = model.hidden(torch.cat(list(rows)), positions, torch.tensor(lengths)).split(lengths)
        found = [model.action_log_probs(h[:-1], row[1:], 1.0)[0] for h, row in zip(hidden, rows, strict=True)]
    if learns:
        torch.cat(found).sum().backward()
    reshard(model)
    gradients = {name: p.grad for name, p in model.lm.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return [each.detach() for each in found], gradients


@torch.no_grad()
def _check_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], word: str, is_exact: bool) -> None:
    """Raise ModelRefused where gradients are not finite, or those of matrices are others than by segments.

    Those of vectors are not compared: some are 0 but for rounding, such as that of keys' biases. A wrong attention
    gives wrong gradients of matrices too. Those of one name in all layers and experts are compared together, since in
    bfloat16 a token may go to another expert.

    Args:
        found, expected: by name of the parameter; shares of a sharded policy.
        word: for the attention of `found`.
        is_exact: whether products of matrices are computed in float32.
    """
    squares: dict[str, Tensor] = {}
    for name, theirs in expected.items():
        mine = found.get(name)
        mine = torch.zeros_like(theirs) if mine is None else mine
        pair = torch.stack(list(_squares(mine - theirs, theirs)))
        kind = re.sub(r"\.\d+(?=\.)", ".*", name)
        if not bool(pair.isfinite().all()):
            raise ModelRefused(f"gradients by {word} are not finite: that of {name}")
        if theirs.ndim > 1:
            squares[kind] = squares[kind] + pair if kind in squares else pair
    largest = max((float(pair[1].sqrt()) for pair in squares.values()), default=0.0)
    limit = _GRADIENT_TOLERANCE if is_exact else _COARSE_GRADIENT_TOLERANCE
    apart = {kind: pair.sqrt().tolist() for kind, pair in squares.items()}
    shares = {
        kind: difference / (norm + _ROUNDING * largest) for kind, (difference, norm) in apart.items() if difference
    }
    kind = max(shares, key=lambda kind: shares[kind], default="")
    if kind and shares[kind] > limit:
        raise ModelRefused(
            f"the gradient of {kind} by {word} differs from that by segments by {shares[kind]:.2g} of its norm, above "
            f"{limit:g}"
        )


def _squares(*tensors: Tensor) -> Iterator[Tensor]:
    """Sums of squares; of shares over all ranks."""
    for tensor in tensors:
        norm = torch.linalg.vector_norm(tensor)
        yield (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
