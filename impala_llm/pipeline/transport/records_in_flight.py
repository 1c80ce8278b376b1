"""Records that an actor has handed over and that the learner has not answered.

Invariant: a record stays here, and in the arena, until it is settled. It is offered once; then the learner is reminded
of it at growing intervals. A record for which the arena has no room waits, and later ones wait behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from impala_llm.pipeline.shm.record import EncodedTrajectory
from impala_llm.pipeline.shm.ring import ArenaWriter, Span
from impala_llm.pipeline.transport.messages import DESCRIPTOR, DescriptorBatch

_MAX_RECORDS = 64
"""Maximum of records in a message, and of records that wait for the next one."""
_MAX_WAITING_WORDS = 1 << 20
"""Words of unsent records from which on they are offered without waiting for more."""
_MAX_INLINE_BYTES = 4 << 20
"""Bytes from which on no further record goes into a message, where records travel in it."""
_REMINDERS = 5
"""Number of reminders of a record whose intervals double; later ones keep the last interval."""

Offer = tuple[DescriptorBatch, list[memoryview]]
"""Message, and the records that travel with it as frames."""

_RecordInFlight = tuple[bytes, Span, int, bool]
"""(row of `DescriptorBatch`, span in the arena, ticket of its episode, whether more unrolls of it are to come). A
NamedTuple would take five times as long to make, for each record."""


class RecordsInFlight:
    """Records without an answer, and when to offer them. Methods that return offers expect that all are sent.

    Args:
        arena: for the records; closed by its maker.
        is_shared: whether the learner reads the arena; otherwise records travel as frames.
        resend_s: seconds without an answer after which the learner is reminded of a record for the first time.
        monotonic: source of time, in seconds.
    """

    def __init__(self, arena: ArenaWriter, is_shared: bool, resend_s: float, monotonic: Callable[[], float]) -> None:
        self._arena = arena
        self._is_shared = is_shared
        self._resend_s = resend_s
        self._monotonic = monotonic
        self._next_sequence = 0
        self._waiting: deque[tuple[int, bool, EncodedTrajectory]] = deque()
        """(ticket, continues, record) without room in the arena."""
        self._in_flight: dict[int, _RecordInFlight] = {}
        """By sequence."""
        self._unsent: list[int] = []
        self._unsent_words = 0
        self._offered: list[deque[tuple[float, list[int]]]] = [deque() for _ in range(_REMINDERS)]
        """(time, sequences) of offers, by the number of reminders before; each queue is in the order of time."""

    def add(self, ticket_id: int, continues: bool, encoded: EncodedTrajectory) -> bool:
        """Take over a record, which fits into an empty arena, and lay it there.

        A `messages.Descriptor` stands for it in the next offer: its place in the arena, its ticket and its checksum.

        Args:
            ticket_id: of its episode.
            continues: whether more unrolls of the episode are to come.
            encoded: the record.

        Returns:
            True if it lies in the arena; False if it waits for room.
        """
        if self._waiting or not self._lay(ticket_id, continues, encoded):
            self._waiting.append((ticket_id, continues, encoded))
            return False
        return True

    def use_room(self) -> None:
        """Write the records that wait into the arena, as far as it has room."""
        while self._waiting and self._lay(*self._waiting[0]):
            self._waiting.popleft()

    def settle(self, sequences: Iterable[int]) -> list[tuple[int, bool]]:
        """Free the records that the learner has answered.

        Returns:
            (ticket, whether more unrolls of its episode are to come) of each that was in flight.
        """
        settled: list[tuple[int, bool]] = []
        in_flight, free = self._in_flight, self._arena.free
        for sequence in sequences:
            if sequence in in_flight:
                _, span, ticket_id, continues = in_flight.pop(sequence)
                free(span.start)
                settled.append((ticket_id, continues))
        return settled

    @property
    def first_sequence(self) -> int:
        """Sequence below which all records have been answered."""
        return min(self._in_flight, default=self._next_sequence)

    @property
    def num_unanswered(self) -> int:
        """Number of records in flight or without room."""
        return len(self._in_flight) + len(self._waiting)

    # --- offers

    @property
    def has_unsent(self) -> bool:
        """Whether records were never offered."""
        return bool(self._unsent)

    @property
    def is_offer_due(self) -> bool:
        """Whether unsent records should not wait for more: the learner has nothing else of this actor, or many wait."""
        num_unsent = len(self._unsent)
        return (
            num_unsent == len(self._in_flight) or num_unsent >= _MAX_RECORDS or self._unsent_words >= _MAX_WAITING_WORDS
        )

    def unsent(self) -> list[Offer]:
        """Offer all records that were never offered."""
        unsent = self._take_unsent()
        return self._offers(unsent, 0) if unsent else []

    def reminders(self) -> list[Offer]:
        """Remind the learner of the records whose answer is overdue: descriptors without records."""
        now = self._monotonic()
        offers: list[Offer] = []
        for reminders, queue in enumerate(self._offered):
            overdue: list[int] = []
            while queue and now - queue[0][0] > self._resend_s * 2**reminders:
                overdue += queue.popleft()[1]
            offers += self._offers(overdue, min(reminders + 1, _REMINDERS - 1), with_records=False)
        return offers

    def all_reminders(self) -> list[Offer]:
        """Remind a learner of all records, some of which it may lack: descriptors without records."""
        self._take_unsent()
        for queue in self._offered:
            queue.clear()
        return self._offers(self._in_flight, 0, with_records=False)

    def wanted(self, sequences: Iterable[int]) -> list[Offer]:
        """Offer the records that the learner has asked for; they keep their next reminder."""
        return self._offers(sequences, None)

    def _take_unsent(self) -> list[int]:
        unsent, self._unsent = self._unsent, []
        self._unsent_words = 0
        return unsent

    def _lay(self, ticket_id: int, continues: bool, encoded: EncodedTrajectory) -> bool:
        """Write a record into the arena. Returns False where it has no room now."""
        span = self._arena.write(encoded)
        if span is None:
            return False
        sequence = self._next_sequence
        self._next_sequence = sequence + 1
        start, num_words, checksum = span
        descriptor = DESCRIPTOR.pack(sequence, ticket_id, start if self._is_shared else 0, num_words, checksum)
        self._in_flight[sequence] = descriptor, span, ticket_id, continues
        self._unsent.append(sequence)
        self._unsent_words += num_words
        return True

    def _offers(self, sequences: Iterable[int], reminders: int | None, with_records: bool = True) -> list[Offer]:
        """Make offers of records, without those answered meanwhile.

        Args:
            reminders: number of reminders before, after which the next one is set; None: one is set already.
        """
        offers: list[Offer] = []
        batch: list[int] = []
        num_bytes = 0
        for sequence in sequences:
            if sequence not in self._in_flight:
                continue
            _, span, _, _ = self._in_flight[sequence]
            batch.append(sequence)
            num_bytes += 8 * span.num_words
            if len(batch) == _MAX_RECORDS or (not self._is_shared and num_bytes >= _MAX_INLINE_BYTES):
                offers.append(self._offer(batch, reminders, with_records))
                batch, num_bytes = [], 0
        if batch:
            offers.append(self._offer(batch, reminders, with_records))
        return offers

    def _offer(self, sequences: list[int], reminders: int | None, with_records: bool) -> Offer:
        if reminders is not None:
            self._offered[reminders].append((self._monotonic(), sequences))
        records = [self._in_flight[sequence] for sequence in sequences]
        frames = [self._arena.view(span) for _, span, _, _ in records] if with_records and not self._is_shared else []
        return DescriptorBatch(b"".join([descriptor for descriptor, _, _, _ in records])), frames
