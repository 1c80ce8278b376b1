"""Tasks of an evaluation inside of a run: the actor that has each task, and the results so far. No I/O, and no clock.

Invariant: each task has at most one result, and only from the actor that has the task at that time. A task ends with a
result, after `MAX_ATTEMPTS`, or with the time of the evaluation: no evaluation waits for ever. Nothing here concerns
tickets or trajectories.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from impala_llm.pipeline.transport.messages import EvaluationFailed, EvaluationGrant, EvaluationResult

Actor = TypeVar("Actor", bound=Hashable)
MAX_ATTEMPTS = 5
"""Attempts at a task that failed, or whose actors were lost, after which it is given up."""
RESEND_S = 5.0
"""Seconds after which the grant of an actor is sent again while its tasks have no result: a message may get lost."""


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that has ended.

    Attributes:
        version: policy version that it was begun with; the weights of no result are older.
        num_tasks: number of tasks that were to be played.
        results: those that arrived, in the order of the tasks.
        seconds: from the first task dealt to the end.
    """

    version: int
    num_tasks: int
    results: tuple[EvaluationResult, ...]
    seconds: float


class EvaluationTasks(Generic[Actor]):
    """Deals the tasks of one evaluation at a time. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._order: tuple[int, ...] = ()
        self._grant = EvaluationGrant(0, 0, 0.0, ())
        self._timeout_s = 0.0
        self._waiting: deque[int] = deque()
        self._at: dict[Actor, dict[int, None]] = {}
        """Tasks of each actor that has any, in the order in which they were dealt."""
        self._attempts: Counter[int] = Counter()
        self._failed_at: dict[int, set[Actor]] = {}
        """By task, actors whose attempts failed: others try next, where there are any."""
        self._results: dict[int, EvaluationResult] = {}
        self._told: dict[Actor, tuple[EvaluationGrant | None, float]] = {}
        """Last grant to each actor, with its time; actors whose last grant was empty are left out."""
        self._began_at: float | None = None
        self._is_under_way = False
        self._has_changed = False

    @property
    def is_under_way(self) -> bool:
        """Whether an evaluation was begun and not yet taken with `ended`."""
        return self._is_under_way

    @property
    def has_changed(self) -> bool:
        """Whether there may be something to tell an actor since the last call of `deal`."""
        return self._has_changed

    def begin(
        self, evaluation_id: int, version: int, task_ids: Sequence[int], temperature: float, timeout_s: float
    ) -> None:
        """Begin an evaluation.

        Args:
            evaluation_id: another one than any before, also of earlier processes.
            version: oldest policy version to play with.
            task_ids: at least one.
            temperature: of sampling; 0: greedy.
            timeout_s: seconds from the first task dealt after which it ends with the results that have arrived.

        Raises:
            ValueError: another one is under way.
        """
        with self._lock:
            if self._is_under_way:
                raise ValueError("an evaluation is under way: take it with ended() first")
            self._order = tuple(dict.fromkeys(task_ids))
            self._grant = EvaluationGrant(evaluation_id, version, temperature, ())
            self._timeout_s = timeout_s
            self._waiting = deque(self._order)
            self._attempts.clear()
            self._failed_at.clear()
            self._results = {}
            self._began_at = None
            self._is_under_way = self._has_changed = True

    def deal(self, wants: Mapping[Actor, int], now: float) -> dict[Actor, EvaluationGrant]:
        """Deal tasks that wait, evenly, to actors that want more than they have.

        Tasks of actors that are not named any more, or want none, are dealt to others.

        Args:
            wants: by actor, how many tasks it wants to have at a time.
            now: in seconds.

        Returns:
            For each actor that must be told, all tasks that it has from now on.
        """
        with self._lock:
            self._has_changed = False
            for actor in [actor for actor in self._at if wants.get(actor, 0) == 0]:
                for task_id in self._at.pop(actor):
                    self._try_again(task_id)
            below = [actor for actor, want in wants.items() if want > len(self._at.get(actor, ()))]
            kept: list[int] = []
            while self._waiting and below:
                task_id = self._waiting.popleft()
                # An actor whose attempts fail at once has the fewest tasks: it would use up the attempts of all.
                failed = self._failed_at.get(task_id, set())
                fit = [actor for actor in below if actor not in failed]
                if not fit and any(want and actor not in failed for actor, want in wants.items()):
                    kept.append(task_id)
                    continue
                actor = min(fit or below, key=lambda actor: len(self._at.get(actor, ())))
                tasks = self._at.setdefault(actor, {})
                tasks[task_id] = None
                if len(tasks) >= wants[actor]:
                    below.remove(actor)
                if self._began_at is None:
                    self._began_at = now
            self._waiting.extendleft(reversed(kept))
            return self._to_tell(wants, now)

    def answered(self, actor: Actor, result: EvaluationResult) -> bool:
        """Note a result of an evaluation task.

        Args:
            actor: that sent it.
            result: of the task.

        Returns:
            Whether it was awaited from this actor; otherwise it has no effect.
        """
        with self._lock:
            is_awaited = self._take_back(actor, result.evaluation_id, result.task_id)
            # Actors never load an older version: a result of versions before the granted one is not valid.
            if is_awaited and result.first_version < self._grant.min_version:
                self._failed(actor, result.task_id)
                return False
            if is_awaited:
                self._results[result.task_id] = result
            return is_awaited

    def failed(self, actor: Actor, failure: EvaluationFailed) -> bool:
        """Note the failure of an attempt, after which the task is dealt again.

        Args:
            actor: whose attempt failed.
            failure: its report.

        Returns:
            Whether this actor had the task; otherwise the report has no effect.
        """
        with self._lock:
            is_awaited = self._take_back(actor, failure.evaluation_id, failure.task_id)
            if is_awaited:
                self._failed(actor, failure.task_id)
            return is_awaited

    def ended(self, now: float) -> Evaluation | None:
        """Take the evaluation that has ended, once: no result is awaited any more, or its time is over."""
        with self._lock:
            seconds = 0.0 if self._began_at is None else now - self._began_at
            if not self._is_under_way or ((self._waiting or self._at) and seconds < self._timeout_s):
                return None
            self._is_under_way = False
            self._has_changed = True
            self._waiting.clear()
            self._at.clear()
            results = tuple(self._results[task_id] for task_id in self._order if task_id in self._results)
            return Evaluation(self._grant.min_version, len(self._order), results, seconds)

    def _take_back(self, actor: Actor, evaluation_id: int, task_id: int) -> bool:
        """Take a task from an actor. Returns whether it had it."""
        tasks = self._at.get(actor, {})
        if evaluation_id != self._grant.evaluation_id or task_id not in tasks:
            return False
        del tasks[task_id]
        if not tasks:
            del self._at[actor]
        self._has_changed = True
        return True

    def _failed(self, actor: Actor, task_id: int) -> None:
        """Queue a task again after an actor failed at it."""
        # If the same actor gets the task again, its grant equals the last one: forget that one, so that it is sent.
        self._told[actor] = None, self._told[actor][1]
        self._failed_at.setdefault(task_id, set()).add(actor)
        self._try_again(task_id)

    def _try_again(self, task_id: int) -> None:
        self._attempts[task_id] += 1
        if self._attempts[task_id] < MAX_ATTEMPTS:
            self._waiting.append(task_id)

    def _to_tell(self, wants: Mapping[Actor, int], now: float) -> dict[Actor, EvaluationGrant]:
        told: dict[Actor, EvaluationGrant] = {}
        for actor in [*self._at, *(actor for actor in self._told if actor not in self._at)]:
            grant = dataclasses.replace(self._grant, task_ids=tuple(self._at.get(actor, ())))
            before, told_at = self._told.get(actor, (None, now))
            if actor in wants and (grant != before or (grant.task_ids and now - told_at >= RESEND_S)):
                told[actor] = grant
                self._told[actor] = grant, now
            if not grant.task_ids:
                self._told.pop(actor, None)
        return told
