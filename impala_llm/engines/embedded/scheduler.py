"""Scheduler: decides which tokens the next forward computes.

Invariant: no session starves: every decoding row is in every step, and prompts follow in order of arrival as far as the
prefill budget reaches; a prompt longer than that is computed over several steps.
"""

from dataclasses import dataclass

import numpy as np

from impala_llm.engines.embedded.sessions import SessionTable

_STEP_OPERATIONS = 1e11
"""Floating-point operations for the prompts of a step on a CPU: two to five seconds of one core with AVX2."""
_LEAST_TOKENS = 64


@dataclass(frozen=True)
class Plan:
    """One step: N new tokens of M sessions end to end, first the decoding rows (one token of a session each), then
    segments (runs of several), and the sessions that are sampled."""

    slots: np.ndarray
    """int64[M]: sessions in the batch."""
    computed: np.ndarray
    """int64[M]: number of new tokens of each."""
    lengths: np.ndarray
    """int64[M]: lengths of their histories, new tokens included."""
    num_rows: int
    """Number of decoding rows among the M."""
    tokens: np.ndarray
    """int64[pad_rows(N)]: zeros at the end."""
    positions: np.ndarray
    """int64[pad_rows(N)]: index of each token in its own history."""
    token_slots: np.ndarray
    """int64[N]: the session of each token."""
    sampled: np.ndarray
    """int64[R]: sessions whose next token is drawn; the first R rows of the logits are theirs."""
    sampled_lengths: np.ndarray
    """int64[R]: lengths of their histories."""
    sample_index: np.ndarray | None
    """int64[pad_rows(R)]: the token whose output they are drawn from, zeros at the end; None where all tokens are."""

    def segments(self) -> list[tuple[int, int, int, int]]:
        """List the segments: (slot, start, end, length of the history), where [start, end) is a range of the batch."""
        ends = np.cumsum(self.computed)
        parts = (self.slots, ends - self.computed, ends, self.lengths)
        return list(zip(*(part[self.num_rows :].tolist() for part in parts), strict=True))


def prompt_tokens_of_step(most: int, num_parameters: int, is_cpu: bool) -> int:
    """Tokens of prompts that a step may compute: on a CPU no more than a slow core computes in a few seconds.

    While a step is computed its actor sends nothing, and an actor that is silent for `pipeline.actor_timeout_s`
    is given up. A token takes about two operations a parameter.

    Args:
        most: tokens, whatever the model.
    """
    return min(most, max(_LEAST_TOKENS, int(_STEP_OPERATIONS / (2 * num_parameters)))) if is_cpu else most


def plan_step(table: SessionTable, prefill_budget: int) -> Plan | None:
    """Plan the next step. Returns None where no session is running.

    Args:
        prefill_budget: tokens of prompts in one step at most (a prompt with one token left counts as a decoding row).
    """
    running = table.running.nonzero()[0]
    if len(running) == 0:
        return None
    cached = table.cached[running]
    pending = table.length[running] - cached
    if pending.max() == 1:
        return _decode_only(table, running, cached)
    decoding, prefilling = running[pending == 1], running[pending > 1]
    prefilling = prefilling[np.argsort(table.order[prefilling])]
    wanted = table.length[prefilling] - table.cached[prefilling]
    taken = np.clip(prefill_budget - (np.cumsum(wanted) - wanted), 0, wanted)
    prefilling, wanted, taken = prefilling[taken > 0], wanted[taken > 0], taken[taken > 0]

    slots = np.concatenate([decoding, prefilling])
    computed = np.concatenate([np.ones_like(decoding), taken])
    ends = np.cumsum(computed)
    lengths = table.cached[slots] + computed
    size = int(ends[-1])
    token_slots = np.repeat(slots, computed)
    positions = np.zeros(pad_rows(size), dtype=np.int64)
    positions[:size] = np.arange(size) + np.repeat(lengths - ends, computed)
    tokens = np.zeros_like(positions)
    tokens[:size] = table.tokens[token_slots, positions[:size]]
    complete = np.concatenate([np.ones(len(decoding), dtype=np.bool_), taken == wanted]).nonzero()[0]
    sample_index = np.zeros(pad_rows(len(complete)), dtype=np.int64)
    sample_index[: len(complete)] = ends[complete] - 1
    return Plan(
        slots=slots,
        computed=computed,
        lengths=lengths,
        num_rows=len(decoding),
        tokens=tokens,
        positions=positions,
        token_slots=token_slots,
        sampled=slots[complete],
        sampled_lengths=lengths[complete],
        sample_index=sample_index,
    )


def _decode_only(table: SessionTable, slots: np.ndarray, cached: np.ndarray) -> Plan:
    """Plan a step in which every session has one new token: the common case, in a third of the time."""
    size = len(slots)
    positions = np.zeros(pad_rows(size), dtype=np.int64)
    positions[:size] = cached
    tokens = np.zeros_like(positions)
    tokens[:size] = table.tokens[slots, cached]
    lengths = cached + 1
    return Plan(
        slots=slots,
        computed=np.ones_like(slots),
        lengths=lengths,
        num_rows=size,
        tokens=tokens,
        positions=positions,
        token_slots=slots,
        sampled=slots,
        sampled_lengths=lengths,
        sample_index=None,
    )


def pad_rows(rows: int) -> int:
    """Round up the number of rows of a product: oneDNN compiles kernels for every new number, and keeps them. Forward
    and backward of a 135 M model in bfloat16 take 10 MB for each: a learner would grow by gigabytes."""
    if rows <= 1:
        return rows
    step = 2 if rows <= 16 else 4 if rows <= 32 else 16 if rows <= 256 else 64
    return -(-rows // step) * step
