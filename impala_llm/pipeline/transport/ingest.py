"""Ingest: copies records that actors offer into the trajectory store, as trajectories. For one thread at a time.

Life of an offered record: queued → copied and checked → kept (committed, queued for the learner, acknowledged), or
refused, or a duplicate that is acknowledged again. While the store is full it stays queued. A record of the version
that the learner is about to announce waits for the announcement: the first servers have it before the slowest one.

Invariants. A record is acknowledged only once it is committed, and each (ticket, episode, unroll) is kept once. No
contents of a record or descriptor raise an error here. If our own code fails before the ledger was asked, nothing has
changed and the error ends the peer's session; afterwards it is an IngestBroken.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from impala_llm.pipeline.shm import copy_kernels, record_kernels
from impala_llm.pipeline.shm.record import (
    MAGIC,
    MAX_STATS,
    MAX_TEXT_BYTES,
    MAX_TOKENS,
    Facts,
    RecordError,
    decode_record,
)
from impala_llm.pipeline.shm.record_layout import (
    CHECKSUM,
    EPISODE_BEGIN,
    EPISODE_END,
    FACTS,
    FLAGS,
    GROUP_ID,
    HEADER_WORDS,
    NEWEST_VERSION,
    NUM_TOKENS,
    NUM_WORDS,
    OLDEST_VERSION,
    OUTCOME,
    SEQUENCE,
    START,
    TASK_ID,
    TICKET,
    TICKET_ID,
    UNROLL_INDEX,
)
from impala_llm.pipeline.shm.ring import ArenaError
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.pipeline.tickets.ledger import TicketLedger, Verdict
from impala_llm.pipeline.transport.offers import Chunk, Offers
from impala_llm.trajectory import Trajectory, TrajectoryError

_CLAIMED = np.array(
    [EPISODE_BEGIN, EPISODE_END, FLAGS, TICKET_ID, UNROLL_INDEX, TASK_ID, GROUP_ID, OLDEST_VERSION], np.intp
)
"""Facts of which a `ledger.Claim` consists."""


def too_long(num_tokens: int, max_tokens: int) -> str:
    """Reason for the refusal of a record that is too long.

    Args:
        num_tokens: of the record.
        max_tokens: the learner's `engine.max_length`.
    """
    return f"it has {num_tokens} tokens, the learner's engine.max_length is {max_tokens}: give its actor the same"


class ReceiverError(RuntimeError):
    """The receiver has died. Its `__cause__` is the reason."""


class Inbox:
    """Queue of trajectories from the receiving thread to the training thread, which calls `Receiver.drain`.

    Each is taken out once, in the order of arrival. After the receiver has died, `drain` raises.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trajectories: list[Trajectory] = []
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._trajectories)

    def put(self, trajectories: Sequence[Trajectory]) -> None:
        """Append trajectories."""
        with self._lock:
            self._trajectories.extend(trajectories)

    def fail(self, error: BaseException) -> None:
        """Make `drain` raise from now on."""
        self._error = error

    def is_ready(self) -> bool:
        """Return whether `drain` would return something, or raise."""
        return bool(self._trajectories) or self._error is not None

    def drain(self) -> list[Trajectory]:
        """Take everything out, oldest first.

        Raises:
            ReceiverError: the receiver has died.
        """
        if self._error is not None:
            raise ReceiverError(f"the receiver has died: {self._error}") from self._error
        with self._lock:
            trajectories, self._trajectories = self._trajectories, []
        return trajectories


class IngestBroken(RuntimeError):
    """The ledger and the trajectory store may disagree: only a process that recovers from both can continue."""


@dataclass(slots=True)
class Settled:
    """Answers for an actor."""

    acks: list[int] = field(default_factory=list)
    """Sequences to acknowledge."""
    refusals: list[tuple[int, str]] = field(default_factory=list)
    """Sequences to refuse, each with the reason."""
    tickets: list[int] = field(default_factory=list)
    """Ids of the tickets whose records were kept."""


class Ingest:
    """Copies records into the trajectory store, checks them, and passes those on that the ledger accepts.

    Args:
        store: keeps them.
        ledger: says which of them are wanted.
        inbox: where the learner's thread finds the trajectories that were kept.
        vocab_size: bound that token ids must lie below.
        max_tokens: of a record (engine.max_length).
    """

    def __init__(
        self,
        store: TrajectoryStore,
        ledger: TicketLedger,
        inbox: Inbox,
        vocab_size: int,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self._store, self._ledger, self._inbox = store, ledger, inbox
        self._vocab_size = vocab_size
        self._max_tokens = min(max_tokens, MAX_TOKENS)
        self.totals: Counter[str] = Counter()
        """Counters: received_bytes, trajectories_refused, trajectories_unwanted."""

    def take(self, offers: Offers, actor_id: str) -> Settled:
        """Settle the chunk that an actor has offered first, as far as there is room for it.

        Args:
            offers: of the actor; records that find no room go back to the front of their queue.
            actor_id: of the actor, whose tickets the ledger refuses with their records.

        Returns:
            Answers; none where there is no room.

        Raises:
            IngestBroken: our own code failed after the ledger was asked.
        """
        settled = Settled()
        chunk = self._possible(offers.next_chunk(), actor_id, settled)
        starts = self._store.reserve(chunk.rows[:, NUM_WORDS])
        if len(starts) < len(chunk.rows):
            chunk, rest = chunk.split(len(starts))
            offers.queue.appendleft(rest)
        if not len(starts):
            return settled
        try:
            facts = self._copy(offers, chunk, starts)
        except Exception as error:
            for row, start in zip(chunk.rows.tolist(), starts.tolist(), strict=True):
                self._store.cancel(start, row[NUM_WORDS])
                if isinstance(error, ArenaError):
                    self._refuse(row, actor_id, str(error), settled)
            if isinstance(error, ArenaError):
                return settled
            raise
        version = self._ledger.version
        try:
            if early := self._keep_or_refuse(chunk, starts, facts, version, actor_id, settled):
                offers.early.append((version + 1, chunk.only(early)))
        except Exception as error:
            raise IngestBroken(f"the records of {actor_id} could not be validated: {error!r}") from error
        return settled

    def _possible(self, chunk: Chunk, actor_id: str, settled: Settled) -> Chunk:
        """Refuse records of impossible sizes. Returns the chunk without them."""
        sizes = chunk.rows[:, NUM_WORDS]
        largest = self._store.capacity // 8
        if not chunk.frames and sizes.min() >= HEADER_WORDS and sizes.max() <= largest:
            return chunk
        good = []
        for index, row in enumerate(chunk.rows.tolist()):
            size = row[NUM_WORDS]
            if size < HEADER_WORDS:
                reason = f"a record of {8 * size} bytes is shorter than its header"
            elif size > largest:
                reason = (
                    f"a record of {8 * size} bytes does not fit into the trajectory store of {8 * largest}: "
                    "raise replay.capacity_mb"
                )
            elif chunk.frames and len(chunk.frames[index]) != 8 * size:
                reason = f"a record of {8 * size} bytes came as a frame of {len(chunk.frames[index])}"
            else:
                good.append(index)
                continue
            self._refuse(row, actor_id, reason, settled)
        return chunk.only(good)

    def _copy(self, offers: Offers, chunk: Chunk, starts: np.ndarray) -> np.ndarray:
        """Copy and check records.

        Returns:
            int64[n, FACTS], see `record_kernels.take_records`.

        Raises:
            ArenaError: the actor's arena was truncated.
        """
        rows = chunk.rows
        facts = np.empty((len(rows), FACTS), np.int64)
        rules = (MAGIC, self._max_tokens, MAX_STATS, MAX_TEXT_BYTES, self._vocab_size, copy_kernels.LARGE)
        if offers.reader is not None:
            offers.reader.check_size()
            record_kernels.take_records(offers.reader.words, rows, self._store.words, starts, *rules, facts)
            return facts
        rows = rows.copy()
        rows[:, START] = 0
        for i, frame in enumerate(chunk.frames):
            words = np.frombuffer(frame, np.uint64)
            part = slice(i, i + 1)
            record_kernels.take_records(words, rows[part], self._store.words, starts[part], *rules, facts[part])
        return facts

    def _keep_or_refuse(
        self, chunk: Chunk, starts: np.ndarray, facts: np.ndarray, version: int, actor_id: str, settled: Settled
    ) -> list[int]:
        """Keep or refuse each record that was copied.

        Args:
            version: the learner's.

        Returns:
            Indices of records that must wait for the next version.
        """
        rows = chunk.rows
        early: list[int] = []
        if record_kernels.count_sound(rows, facts, version) < len(rows):
            sound = facts[:, OUTCOME] == record_kernels.COPIED
            sound &= (facts[:, TICKET_ID] == rows[:, TICKET]) & (facts[:, NEWEST_VERSION] <= version)
            indices = np.flatnonzero(~sound).tolist()
            early = self._sort_out(chunk, starts, facts, indices, version, actor_id, settled)
            rows, starts, facts = rows[sound], starts[sound], facts[sound]
        begins, ends, *claims = facts[:, _CLAIMED].T.tolist()
        episodes = list(map(self._store.text, starts.tolist(), begins, ends))
        answers = self._ledger.received_all(zip(episodes, *claims, strict=True))
        if answers.count(Verdict.ACCEPTED) < len(answers):
            each = zip(answers, rows.tolist(), starts.tolist(), facts.tolist(), episodes, strict=True)
            for answer, row, start, known, episode_id in each:
                if answer is not Verdict.ACCEPTED:
                    self._store.cancel(start, row[NUM_WORDS])
                    self._turn_away(answer, row, known, actor_id, episode_id, settled)
            kept = [answer is Verdict.ACCEPTED for answer in answers]
            rows, starts, facts = rows[kept], starts[kept], facts[kept]
        settled.acks += rows[:, SEQUENCE].tolist()
        settled.tickets += rows[:, TICKET].tolist()
        self.totals["received_bytes"] += 8 * int(rows[:, NUM_WORDS].sum())
        self._inbox.put(self._store.commit(starts, rows[:, NUM_WORDS], rows[:, CHECKSUM], facts))
        return early

    def _sort_out(
        self,
        chunk: Chunk,
        starts: np.ndarray,
        facts: np.ndarray,
        indices: list[int],
        version: int,
        actor_id: str,
        settled: Settled,
    ) -> list[int]:
        """Refuse invalid records, with a reason.

        Args:
            indices: of records that are invalid or of a later version than the learner's.

        Returns:
            Indices of those that must wait for the next version.
        """
        early = []
        for index in indices:
            row, start, known = chunk.rows[index].tolist(), int(starts[index]), facts[index].tolist()
            reason = self._explain(row, start, known)
            self._store.cancel(start, row[NUM_WORDS])
            # One version is made at a time: no actor can have a later one.
            if reason is None and known[NEWEST_VERSION] == version + 1:
                early.append(index)
            else:
                unknown = f"versions reaches {known[NEWEST_VERSION]}, the learner has {version}"
                self._refuse(row, actor_id, reason or unknown, settled)
        return early

    def _turn_away(
        self, answer: Verdict, row: list[int], facts: Facts, actor_id: str, episode_id: str, settled: Settled
    ) -> None:
        """Answer a record that the ledger did not accept."""
        if answer is Verdict.DUPLICATE:
            settled.acks.append(row[SEQUENCE])
        elif answer is Verdict.NOT_AS_GRANTED:
            self._refuse(row, actor_id, self._explain_claim(row[TICKET], facts), settled)
        elif answer is Verdict.OUTDATED:
            settled.refusals.append((row[SEQUENCE], self._explain_claim(row[TICKET], facts)))
            has_failed = self._ledger.outdated(row[TICKET], actor_id, episode_id)
            self.totals["trajectories_refused" if has_failed else "trajectories_unwanted"] += 1
        else:
            what = "is unknown" if answer is Verdict.UNKNOWN_TICKET else "has its episode already or has ended"
            self.totals["trajectories_unwanted"] += 1
            settled.refusals.append((row[SEQUENCE], f"ticket {row[TICKET]} {what}"))

    def _explain(self, row: list[int], start: int, facts: Facts) -> str | None:
        """Reason why a record that was copied cannot be kept; None where it only came too early."""
        if facts[OUTCOME] == record_kernels.TORN:
            return "it has another checksum than its descriptor says, or lies outside of its arena: bytes were changed"
        if facts[OUTCOME] != record_kernels.COPIED:
            if self._max_tokens < facts[NUM_TOKENS] <= MAX_TOKENS:
                return too_long(facts[NUM_TOKENS], self._max_tokens)
            # The slow checks tell which rule it breaks.
            try:
                decode_record(self._store.record(start, row[NUM_WORDS])).validate_vocabulary(self._vocab_size)
            except (RecordError, TrajectoryError) as error:
                return str(error)
            except Exception as error:
                return f"it cannot be decoded ({error!r}): a defect, please report it"
            return "it breaks a rule of the compiled checks and none of Trajectory's: a defect, please report it"
        if facts[TICKET_ID] != row[TICKET]:
            return f"ticket_id is {facts[TICKET_ID]}, and {row[TICKET]} in its descriptor"
        return None

    def _explain_claim(self, ticket_id: int, facts: Facts) -> str:
        """Reason why a record does not match its ticket."""
        task_id, group_id, oldest = facts[TASK_ID], facts[GROUP_ID], facts[OLDEST_VERSION]
        ticket = self._ledger.lookup(ticket_id)
        if ticket is None:  # the learner's thread has ended it meanwhile
            return f"task_id {task_id}, group_id {group_id} or version {oldest} is not what ticket {ticket_id} was for"
        if (task_id, group_id) != (ticket.task_id, ticket.group_id):
            return (
                f"task_id and group_id are {task_id} and {group_id}, ticket {ticket_id} is for {ticket.task_id} and "
                f"{ticket.group_id}"
            )
        if oldest < ticket.min_version:
            return f"versions goes down to {oldest}, ticket {ticket_id} demands {ticket.min_version}"
        return (
            f"it is unroll {facts[UNROLL_INDEX]} of an episode, and ticket {ticket_id} is of a group, for a whole one: "
            "give its actor the learner's actor.unroll_turns and actor.unroll_tokens"
        )

    def _refuse(self, row: list[int], actor_id: str, reason: str, settled: Settled) -> None:
        self.totals["trajectories_refused"] += 1
        self._ledger.refused(row[TICKET], actor_id)
        settled.refusals.append((row[SEQUENCE], reason))
