"""Records of an actor that the learner has not answered: their order, and what an error leaves of them."""

import time

import pytest

from impala_llm.pipeline.shm.record import EncodedTrajectory, encode_record
from impala_llm.pipeline.shm.ring import ArenaWriter
from impala_llm.pipeline.transport.messages import DESCRIPTOR
from impala_llm.pipeline.transport.records_in_flight import Offer, RecordsInFlight
from tests.pipeline.support import make_trajectory


def record(num_tokens: int) -> EncodedTrajectory:
    return encode_record(make_trajectory(num_tokens=num_tokens))


def in_flight(arena: ArenaWriter) -> RecordsInFlight:
    return RecordsInFlight(arena, is_shared=True, resend_s=5.0, monotonic=time.monotonic)


def tickets(offers: list[Offer]) -> list[int]:
    """Tickets of the records that are offered, in order."""
    return [row[1] for batch, _ in offers for row in DESCRIPTOR.iter_unpack(batch.rows)]


def test_a_small_record_waits_behind_a_large_one_that_has_no_room() -> None:
    large, small = record(1000), record(10)
    records = in_flight(ArenaWriter(None, 8 * large.num_words + 1024))
    assert records.add(1, True, large)
    assert not records.add(2, True, large)
    assert not records.add(3, False, small)  # for which there is room
    assert tickets(records.unsent()) == [1]
    records.use_room()
    assert tickets(records.unsent()) == []
    assert records.settle([0]) == [(1, True)]
    records.use_room()
    assert tickets(records.unsent()) == [2, 3]
    assert records.settle([2, 1, 1]) == [(3, False), (2, True)]
    assert records.num_unanswered == 0


def test_an_error_amid_the_records_that_wait_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = ArenaWriter(None, 4096)
    records = in_flight(arena)
    num_laid = 0
    while records.add(num_laid, False, record(10)):
        num_laid += 1
    for ticket in range(num_laid + 1, num_laid + 4):
        records.add(ticket, False, record(10))
    records.settle(range(num_laid))
    write, num_calls = arena.write, 0

    def fails_once(encoded: EncodedTrajectory) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise MemoryError
        return write(encoded)

    monkeypatch.setattr(arena, "write", fails_once)
    with pytest.raises(MemoryError):
        records.use_room()
    assert records.num_unanswered == 4
    records.use_room()
    assert tickets(records.unsent()) == list(range(num_laid, num_laid + 4))


def test_few_large_records_are_offered_before_the_next_poll() -> None:
    """From 8 MB on; a record of 17 bytes a token."""
    records = in_flight(ArenaWriter(None, 64 << 20))
    records.add(0, False, record(10))
    records.unsent()
    large = record(250_000)
    is_due = []
    for ticket in range(1, 4):
        records.add(ticket, False, large)
        is_due.append(records.is_offer_due)
    assert is_due == [False, True, True]
