"""Micro-batches of the learner: trajectories packed end to end without padding, up to a budget of tokens. The budget is
as configured, or found by trial, and lowered where memory runs out.

Invariants. A trajectory is never cut, and every token of every trajectory is in exactly one micro-batch; the same
trajectories in the same order give the same micro-batches. If memory runs out, the work is repeated from the beginning
in smaller micro-batches, and each trajectory counts once in its results. Where ranks share the policy, the others wait
amid a pass then: the learner ends, and the next one repeats the work.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from impala_llm.algorithms.interface import PackedBatch
from impala_llm.engines.out_of_memory import is_out_of_memory
from impala_llm.learning.kept_budget import differences, read_note, write_note
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.processes.supervised import report_progress, say
from impala_llm.trajectory import Trajectory

AUTO = "auto"
_LEAST, _MOST = 512, 1 << 20
"""Budgets that are tried: the powers of two from and to here, until a batch is in one micro-batch."""
_MARGIN = 1.03
"""A larger budget must be so much faster to be taken."""
_TRIAL_TOKENS = 4096
"""Tokens that a budget's speed is measured on at least, in as many micro-batches as it takes."""
_TRIAL_S = 2.0
"""A budget's speed is measured twice where that takes less, or where layers are compiled: anew for a larger size."""
_SPARE_MEMORY = 0.1
"""Share of a GPU's memory that a trial step leaves over."""
LESS = "take a smaller model, or a device with more free memory"
"""Fix where memory does not suffice for a model."""
_Result = TypeVar("_Result")


def without_tensor_parallel(size: int) -> str:
    """End of a fix that learner.tensor_parallel=`size` does not go with: fsdp2 and LoRA are refused where it is > 1."""
    return " and learner.tensor_parallel=1" * (size > 1)


def with_ranks(tensor_parallel: int) -> str:
    """Settings with which the optimizer's step takes much less memory, where there may be several ranks."""
    also = without_tensor_parallel(tensor_parallel)
    fsdp2 = f"learner.sharding=fsdp2{also} with more ranks (there also learner.cpu_offload=true)"
    return f"{fsdp2}, or model.lora.rank=16{also}"


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
    """Memory does not suffice for a model, for a single row, or for the optimizer's step."""


class RestartNeeded(RuntimeError):
    """This process cannot go on, and one that is started in its place can."""


class TokenBudget:
    """Tokens of a micro-batch.

    Args:
        configured: learner.token_budget.
        ranks: of the learner, where they may share the policy.
        conditions: what memory and time of a micro-batch depend on, see kept_budget.py.
        note: file by which a learner whose ranks share the policy leaves a lower budget to the next; it is taken over.
    """

    def __init__(
        self,
        configured: int | str,
        ranks: Ranks | None = None,
        conditions: Mapping[str, Any] | None = None,
        note: Path | None = None,
    ) -> None:
        self._configured = configured
        self._ranks, self._conditions, self._note = ranks, dict(conditions or {}), note
        self._is_agreed = False
        """Whether ranks have asked each other whether the budget must be found."""
        self.tokens = _LEAST if configured == AUTO else int(configured)
        self.is_chosen = configured != AUTO
        """Whether `tokens` is final, but for memory that runs out."""
        if note is not None and (state := read_note(note)) is not None:
            self._take_over(state, str(note))

    def in_micro_batches(
        self,
        trajectories: Sequence[Trajectory],
        work: Callable[[PackedBatch], _Result],
        undo: Callable[[], object] = lambda: None,
        take_part: Callable[[PackedBatch], object] | None = None,
        packing: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> list[_Result]:
        """Do the work on all micro-batches of these trajectories; where memory runs out, on all of them again at half
        of the budget, down to the longest row.

        Ranks that share the policy all call it. None of them can begin again alone: the learner ends, and the one that
        is started next has the lower budget.

        Args:
            work: called with each micro-batch.
            undo: removes what work that failed has left behind, such as gradients.
            take_part: called with a micro-batch without rows, where other ranks that share the policy have one more;
                None: `work` is, and its result left out.
            packing: around the packing, for its time.

        Returns:
            The results, by micro-batch.

        Raises:
            OutOfMemory: memory does not suffice for the longest row alone.
            RestartNeeded: memory runs out where ranks share the policy, and the lower budget is noted.
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
                self.lower([t.num_tokens for t in trajectories])
            # Only here, outside of the handler, nothing holds the tensors of the work that failed any more.
            undo()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def lower(self, lengths: Sequence[int]) -> None:
        """Lower the budget after memory has run out with rows of these lengths. Raises as `in_micro_batches` does."""
        if not lengths:
            raise OutOfMemory(
                "memory does not suffice for a pass without rows, which other ranks have one more of: set "
                f"{with_ranks(tensor_parallel=1)}"
            )
        longest, used = max(lengths), min(self.tokens, sum(lengths))
        rows = f"rows of {min(lengths)} to {longest} tokens (mean {sum(lengths) / len(lengths):.0f})"
        fix = "learner.activation_checkpointing=1 or learner.precision=bfloat16"
        if used <= longest:
            raise OutOfMemory(
                f"memory does not suffice for a row of {longest} tokens alone; of {rows}, with learner.token_budget="
                f"{self._configured}: lower engine.max_length, or set {fix}"
            )
        self.tokens = max(longest, used // 2)
        happened = (
            f"out of memory with {rows} in micro-batches of up to {used} tokens, learner.token_budget="
            f"{self._configured}"
        )
        fix = f"set learner.token_budget={self.tokens} or lower, or {fix}"
        if self._ranks is not None and self._ranks.is_sharded:
            self._end(happened, fix)
        say(f"learner: {happened}: the same update is begun again with {self.tokens}; to avoid that, {fix}")

    def _end(self, happened: str, fix: str) -> NoReturn:
        """End a learner whose ranks share the policy, and leave the budget to the one that is started next.

        Raises:
            RestartNeeded: it is noted.
            OutOfMemory: it cannot be noted.
        """
        happened += ", and where ranks share the policy none can begin again alone"
        if self._note is None:
            raise OutOfMemory(f"{happened}: {fix}")
        noted = read_note(self._note)
        is_lower = noted is None or self.tokens < noted["tokens"]
        if noted is not None and not self._reason_against(noted):  # another rank may have noted one meanwhile
            self.tokens = min(self.tokens, noted["tokens"])
        try:
            write_note(self._note, self.state_dict())
        except OSError as error:
            raise OutOfMemory(f"{happened}, nor is {self._note} written ({error.strerror}): {fix}") from error
        if is_lower:  # than any that was noted, under whatever conditions: no loop of crashes
            report_progress()
        sentence = (
            f"{happened}: the learner ends, and once it is started again it computes the same update with "
            f"{self.tokens}, by {self._note}; to avoid that, {fix}"
        )
        raise RestartNeeded(sentence)

    def must_choose(self, ranks: Ranks) -> bool:
        """Return whether the budget must be found by trial, on this rank or another one. All ranks call it."""
        if self._configured != AUTO or self._is_agreed:
            return False
        self._is_agreed = True
        return ranks.sum([float(not self.is_chosen)], of_processes=True)[0] > 0

    def choose(
        self,
        trajectories: Sequence[Trajectory],
        trial: Callable[[PackedBatch], object],
        to_come: int,
        ranks: Ranks,
    ) -> None:
        """Choose the budget by trial, and say what was found: on a CPU the fastest, on a GPU the largest that fits.

        All ranks call it, and try and choose the same. Where they share the policy, memory that runs out ends the
        learner, and the next one has the largest budget that was tried before.

        Args:
            trajectories: the first batch.
            trial: computes a micro-batch forward and backward, and leaves no gradient behind, also where it fails.
            to_come: bytes that the optimizer's first step will take on this rank's device.

        Raises:
            RestartNeeded: memory runs out where ranks share the policy.
            OutOfMemory: the same, and it cannot be noted.
        """
        self.tokens = _LEAST
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
        first = next(_micro_batches([trajectories[i] for i in order], sizes[0]))
        self._seconds(trial, [first], ranks, sizes[0] // 2)  # it prepares much
        best, lacking = 0, list[str]()
        for size in sizes:
            number = -(-_TRIAL_TOKENS // size)
            micros = list(islice(_micro_batches([trajectories[i] for i in order], size), number))
            tokens = ranks.sum([float(sum(len(micro.tokens) for micro in micros))])[0]
            seconds = ranks.sum([self._seconds(trial, micros, ranks, best or size // 2)])[0]
            if math.isinf(seconds):
                lacking.append(f"memory does not suffice for {size:,}")
                break
            if seconds < _TRIAL_S * ranks.world_size or self._conditions.get("learner.compile_layers"):
                seconds = min(seconds, ranks.sum([self._seconds(trial, micros, ranks, best or size // 2)])[0])
            rates[size] = tokens / seconds
            if not best or rates[size] > _MARGIN * rates[best]:
                best = size
            elif size > 2 * best:
                break
        self.tokens = best or self.tokens  # for which memory may not suffice either: then `in_micro_batches` says so
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
        is_full = False
        """Whether this rank's own GPU has ended the trials."""
        for size in sizes:
            # Memory grows linearly with tokens: what is sure to fail is not tried.
            expected = 3 * peaks[-1] - 2 * peaks[-2] if len(peaks) > 1 else 0.0
            is_full = expected > limit
            if ranks.sum([float(is_full)], of_processes=True)[0]:
                break
            cuda.reset_peak_memory_stats(ranks.device)
            failed = False
            try:
                trial(next(_micro_batches(longest_first, size)))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if ranks.is_sharded:
                    self._end_trial(self.tokens if peaks else size // 2)
                failed = True
            peak = cuda.max_memory_allocated(ranks.device)
            is_full = failed or peak > limit
            if ranks.sum([float(is_full)], of_processes=True)[0]:
                break
            peaks.append(peak)
            self.tokens = size
        cuda.empty_cache()
        others = f"CUDA itself and other processes hold {(total - free) / 1e9:.1f} GB of the GPU's {total / 1e9:.1f} GB"
        if peaks:
            return (
                f"the largest that {limit / 1e9:.1f} GB hold beside the optimizer's moments, which takes "
                f"{peaks[-1] / 1e9:.1f} GB; {others}"
            )
        reason = f"{others}, and the optimizer's moments take {to_come / 1e9:.1f} GB"
        if not is_full:
            reason = f"the GPU of another rank has no room for more; of this rank's, {others}"
        return (
            f"the smallest, since {reason}; memory may run out all the same: end other processes that use the GPU, "
            "choose another with CUDA_VISIBLE_DEVICES, or set model.lora.rank=16"
            f"{without_tensor_parallel(ranks.tensor_parallel)}"
        )

    def _seconds(
        self, trial: Callable[[PackedBatch], object], micros: Sequence[PackedBatch], ranks: Ranks, instead: int
    ) -> float:
        """Return the processor time of this thread, infinite where memory runs out. Beside actors that are busy, that
        on the clock says little; that of the process adds up the threads that share a product, and those that have no
        part in it.

        Args:
            instead: the budget of the next learner where memory runs out and ranks share the policy.
        """
        begin = time.thread_time()
        try:
            for micro in micros:
                trial(micro)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if ranks.is_sharded:
                self._end_trial(instead)
            return math.inf
        return time.thread_time() - begin

    def _end_trial(self, instead: int) -> NoReturn:
        """End a learner whose ranks share the policy and whose trial ran out of memory. Raises as `choose` does."""
        self.tokens, self.is_chosen = instead, True
        self._end("out of memory in a trial for learner.token_budget=auto", f"set learner.token_budget={instead}")

    def state_dict(self) -> dict[str, Any]:
        """The budget that was found, and its conditions, for a learner that continues from a checkpoint."""
        return {
            "configured": self._configured,
            "tokens": self.tokens,
            "is_chosen": self.is_chosen,
            "conditions": self._conditions,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, unless learner.token_budget or the conditions are others now."""
        self._take_over(state, "the checkpoint")

    def _take_over(self, state: Mapping[str, Any], source: str) -> None:
        """Take over the state of an earlier budget, and say so, or why not.

        Args:
            source: where it lay, for the message.
        """
        tokens = state["tokens"]
        is_known = self.is_chosen and self.tokens <= tokens  # as where none was lowered
        if state["configured"] != self._configured or not state["is_chosen"] or is_known:
            return
        reason, key = self._reason_against(state), f"learner.token_budget={self._configured}"
        if not reason:
            self.tokens, self.is_chosen = tokens, True
            found = f"of {source} is taken over, with {key}"
        else:
            anew = "it is found anew" if self._configured == AUTO else f"it begins with {self.tokens}"
            found = f"of {source} is not taken over, since {reason}: with {key} {anew}"
        if self._ranks is None or self._ranks.is_main:
            say(f"learner: the budget of {tokens} tokens a micro-batch {found}")

    def _reason_against(self, state: Mapping[str, Any]) -> str:
        """Return why the state of an earlier budget does not hold today; empty where it does."""
        if state["configured"] != self._configured:
            return f"learner.token_budget was {state['configured']}"
        return differences(state["conditions"], self._conditions)


@contextmanager
def memory_for(what: str, fix: str) -> Iterator[None]:
    """Context of work that is not repeated in smaller pieces. Raises OutOfMemory if memory runs out.

    Args:
        what: needs the memory, in words.
        fix: what to do, for the message.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"memory does not suffice for {what}: {fix}") from error


def memory_of_step(remedy: str) -> AbstractContextManager[None]:
    """Context of the optimizer's step, which cannot be repeated half-way. Raises OutOfMemory if memory runs out.

    Args:
        remedy: settings that the message offers.
    """
    return memory_for(
        "the optimizer's step, which keeps two values beside each parameter that is trained",
        f"set {remedy}; where little is missing, a lower learner.token_budget may do",
    )


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
