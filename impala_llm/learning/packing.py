"""Micro-batches of the learner: trajectories packed end to end without padding, up to a budget of tokens. The budget is
as configured, or found by trial, and lowered where memory runs out.

Invariants. A trajectory is never cut, and every token of every trajectory is in exactly one micro-batch; the same
trajectories in the same order give the same micro-batches. If memory runs out, the work is repeated from the beginning
in smaller micro-batches, and each trajectory counts once in its results.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from impala_llm.algorithms.interface import PackedBatch
from impala_llm.engines.out_of_memory import is_out_of_memory
from impala_llm.learning.parallel import Ranks
from impala_llm.processes.supervised import say
from impala_llm.trajectory import Trajectory

AUTO = "auto"
_LEAST, _MOST = 512, 1 << 20
"""Budgets that are tried: the powers of two from and to here, until a batch is in one micro-batch."""
_MARGIN = 1.03
"""A larger budget must be so much faster to be taken."""
_TRIAL_TOKENS = 4096
"""Tokens that a budget's speed is measured on at least, in as many micro-batches as it takes."""
_TRIAL_S = 2.0
"""A budget's speed is measured twice where that takes less."""
_SPARE_MEMORY = 0.1
"""Share of a GPU's memory that a trial step leaves over."""
WITH_RANKS = "learner.sharding=fsdp2 with more ranks (there also learner.cpu_offload=true), or model.lora.rank=16"
"""Settings with which the optimizer's step takes much less memory, where there may be several ranks."""
_Result = TypeVar("_Result")


def pack(trajectories: Sequence[Trajectory], token_budget: int) -> list[PackedBatch]:
    """Cut trajectories into micro-batches of at most `token_budget` tokens, long ones first (first-fit decreasing).

    A trajectory that is longer than the budget gets a micro-batch of its own.
    """
    order = sorted(range(len(trajectories)), key=lambda i: (-trajectories[i].num_tokens, i))
    bins: list[tuple[list[int], int]] = []
    for i in order:
        size = trajectories[i].num_tokens
        for index, (members, used) in enumerate(bins):
            if used + size <= token_budget:
                members.append(i)
                bins[index] = members, used + size
                break
        else:
            bins.append(([i], size))
    return [PackedBatch.of(trajectories, members) for members, _ in bins]


class OutOfMemory(RuntimeError):
    """Memory does not suffice for a single row, or for the optimizer's step."""


class TokenBudget:
    """Tokens of a micro-batch.

    Args:
        configured: learner.token_budget.
        ranks: of the learner, where they may share the policy.
    """

    def __init__(self, configured: int | str, ranks: Ranks | None = None) -> None:
        self._configured = configured
        self._ranks = ranks
        self.tokens = _LEAST if configured == AUTO else int(configured)
        self.is_chosen = configured != AUTO
        """Whether `tokens` is final, but for memory that runs out."""

    def run(
        self,
        trajectories: Sequence[Trajectory],
        work: Callable[[PackedBatch], _Result],
        undo: Callable[[], object] = lambda: None,
        take_part: Callable[[PackedBatch], object] | None = None,
        packing: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> list[_Result]:
        """Do the work on all micro-batches of these trajectories; where memory runs out, on all of them again at half
        of the budget, down to the longest row.

        Ranks that share the policy all call it, and none of them can begin again alone.

        Args:
            work: called with each micro-batch.
            undo: removes what work that failed has left behind, such as gradients.
            take_part: called with a micro-batch without rows, where other ranks that share the policy have one more;
                None: `work` is, and its result left out.
            packing: around the packing, for its time.

        Returns:
            The results, by micro-batch.

        Raises:
            OutOfMemory: memory does not suffice for the longest row alone, or runs out where ranks share the policy.
        """
        while True:
            with packing():
                micros = pack(trajectories, self.tokens)
            num_missing = 0 if self._ranks is None else self._ranks.num_missing(len(micros))
            try:
                results = [work(micro) for micro in micros]
                for _ in range(num_missing):
                    (take_part or work)(PackedBatch.empty())
                return results
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self._lower([t.num_tokens for t in trajectories])
            # Only here, outside of the handler, nothing holds the tensors of the work that failed any more.
            undo()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _lower(self, lengths: Sequence[int]) -> None:
        longest, used = max(lengths, default=0), min(self.tokens, sum(lengths))
        if self._ranks is not None and self._ranks.is_sharded:
            raise OutOfMemory(
                f"out of memory in micro-batches of up to {used} tokens, and where ranks share the policy none can "
                f"begin again alone: set learner.token_budget={max(2, used // 2)}, learner.activation_checkpointing=1 "
                "or learner.precision=bfloat16"
            )
        rows = f"rows of {min(lengths)} to {longest} tokens (mean {sum(lengths) / len(lengths):.0f})"
        fix = "lower engine.max_length, or set learner.activation_checkpointing=1 or learner.precision=bfloat16"
        if used <= longest:
            raise OutOfMemory(
                f"memory does not suffice for a row of {longest} tokens alone; of {rows}, with learner.token_budget="
                f"{self._configured}: {fix}"
            )
        self.tokens = max(longest, used // 2)
        say(
            f"learner: out of memory with {rows} in micro-batches of up to {used} tokens, learner.token_budget="
            f"{self._configured}: the same update is begun again with {self.tokens}; to avoid that, set "
            f"learner.token_budget={self.tokens} or lower, or learner.activation_checkpointing=1 or "
            "learner.precision=bfloat16"
        )

    def choose(
        self,
        trajectories: Sequence[Trajectory],
        trial: Callable[[PackedBatch], object],
        to_come: int,
        ranks: Ranks,
    ) -> None:
        """Choose the budget by trial, and say what was found: on a CPU the fastest, on a GPU the largest that fits.

        All ranks call it, and try and choose the same.

        Args:
            trajectories: the first batch.
            trial: computes a micro-batch forward and backward, and leaves no gradient behind, also where it fails.
            to_come: bytes that the optimizer's first step will take on this rank's device.
        """
        lengths = [t.num_tokens for t in trajectories]
        # As many tokens as a batch has, on average over ranks.
        total, longest = ranks.sum([float(sum(lengths)), float(max(lengths))])
        sizes = _sizes(int(total / ranks.world_size), int(longest / ranks.world_size))
        if ranks.device.type == "cuda":
            found = self._choose_by_memory(trajectories, trial, to_come, ranks, sizes)
        else:
            found = self._choose_by_speed(trajectories, trial, ranks, sizes)
        self.is_chosen = True
        if ranks.is_main:
            say(f"learner: learner.token_budget=auto is {self.tokens} tokens a micro-batch: {found}")

    def _choose_by_speed(
        self, trajectories: Sequence[Trajectory], trial: Callable[[PackedBatch], object], ranks: Ranks, sizes: list[int]
    ) -> str:
        # In an order of its own, so that each micro-batch has rows of all lengths.
        order = np.random.default_rng(0).permutation(len(trajectories))
        rates: dict[int, float] = {}
        _seconds(trial, [next(_micro_batches([trajectories[i] for i in order], sizes[0]))])  # it prepares much
        best, lacking = 0, list[str]()
        for size in sizes:
            number = -(-_TRIAL_TOKENS // size)
            micros = list(islice(_micro_batches([trajectories[i] for i in order], size), number))
            tokens = ranks.sum([float(sum(len(micro.tokens) for micro in micros))])[0]
            seconds = ranks.sum([_seconds(trial, micros)])[0]
            if math.isinf(seconds):
                lacking.append(f"memory does not suffice for {size:,}")
                break
            if seconds < _TRIAL_S * ranks.world_size:
                seconds = min(seconds, ranks.sum([_seconds(trial, micros)])[0])
            rates[size] = tokens / seconds
            if not best or rates[size] > _MARGIN * rates[best]:
                best = size
            elif size > 2 * best:
                break
        self.tokens = best or self.tokens  # for which memory may not suffice either: `run` says so
        speeds = ", ".join(f"{rate:,.0f} tokens/s at {size:,}" for size, rate in rates.items())
        measured = [f"forward and backward make, by processor time, {speeds}"] if rates else []
        return "; ".join(measured + lacking)

    def _choose_by_memory(
        self,
        trajectories: Sequence[Trajectory],
        trial: Callable[[PackedBatch], object],
        to_come: int,
        ranks: Ranks,
        sizes: list[int],
    ) -> str:
        cuda: Any = torch.cuda
        longest_first = sorted(trajectories, key=lambda t: -t.num_tokens)
        free, total = cuda.mem_get_info(ranks.device)
        free += cuda.memory_reserved(ranks.device)  # of this process
        limit = free - _SPARE_MEMORY * total - to_come
        peaks: list[float] = []
        for size in sizes:
            # Memory grows linearly with tokens: what is sure to fail is not tried.
            expected = 3 * peaks[-1] - 2 * peaks[-2] if len(peaks) > 1 else 0.0
            if ranks.sum([float(expected > limit)])[0]:
                break
            cuda.reset_peak_memory_stats(ranks.device)
            failed = False
            try:
                trial(next(_micro_batches(longest_first, size)))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failed = True
            peak = cuda.max_memory_allocated(ranks.device)
            if ranks.sum([float(failed or peak > limit)])[0]:
                break
            peaks.append(peak)
            self.tokens = size
        cuda.empty_cache()
        taken = f", which takes {peaks[-1] / 1e9:.1f} GB" if peaks else ""
        return (
            f"the largest that {limit / 1e9:.1f} GB hold beside the optimizer's moments{taken}; of the GPU's "
            f"{total / 1e9:.1f} GB, CUDA itself and other processes hold {(total - free) / 1e9:.1f} GB"
        )

    def state_dict(self) -> dict[str, Any]:
        """The budget that was found, for a learner that continues from a checkpoint."""
        return {"configured": self._configured, "tokens": self.tokens, "is_chosen": self.is_chosen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, unless learner.token_budget is another now."""
        if state["configured"] == self._configured:
            self.tokens, self.is_chosen = state["tokens"], state["is_chosen"]


@contextmanager
def memory_of_step(remedy: str = WITH_RANKS) -> Iterator[None]:
    """Context of the optimizer's step. Raises OutOfMemory if memory runs out: a step cannot be repeated half-way.

    Args:
        remedy: settings that the message offers.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            "memory does not suffice for the optimizer's step, which keeps two values beside each parameter that is "
            f"trained: set {remedy}; where little is missing, a lower learner.token_budget may do"
        ) from error


def _sizes(total: int, longest: int) -> list[int]:
    """Budgets to try: powers of two, the last of which holds the batch; none below the longest row but one."""
    sizes, size = [], _LEAST
    while size < _MOST:
        if 2 * size > longest:
            sizes.append(size)
        if size >= total:
            break
        size *= 2
    return sizes or [size]


def _micro_batches(trajectories: Sequence[Trajectory], token_budget: int) -> Iterator[PackedBatch]:
    """Micro-batches without end, filled with the trajectories in this order, again and again."""
    members: list[Trajectory] = []
    while True:
        for t in trajectories:
            if members and sum(m.num_tokens for m in members) + t.num_tokens > token_budget:
                yield pack(members, _MOST)[0]
                members = []
            members.append(t)


def _seconds(trial: Callable[[PackedBatch], object], micros: Sequence[PackedBatch]) -> float:
    """Processor time of this thread, infinite where memory runs out. Beside actors that are busy, that on the clock
    says little; that of the process adds up the threads that share a product, and those that have no part in it."""
    begin = time.thread_time()
    try:
        for micro in micros:
            trial(micro)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return math.inf
    return time.thread_time() - begin
