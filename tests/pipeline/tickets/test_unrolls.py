"""Tickets whose episodes come in several unrolls."""

import pytest

from impala_llm.pipeline.tickets.ledger import Ticket, Verdict
from impala_llm.trajectory import unroll_id
from tests.pipeline.tickets.ledgers import grant, ids, make_ledger


def unrolls_of(ticket: Ticket, *indices: int) -> list[int]:
    return [unroll_id(ticket.ticket_id, index) for index in indices]


def test_a_ticket_is_open_until_all_unrolls_are_there_and_ends_with_the_last_of_them() -> None:
    ledger = make_ledger()
    ledger.request("a", 1)
    [ticket] = grant(ledger)["a"]
    # In any order: the last one says how many there are.
    for index, continues, is_open in ((0, True, True), (2, False, True), (1, True, False)):
        assert ledger.received(ticket.ticket_id, "x", index, continues) is Verdict.ACCEPTED
        assert ledger.received(ticket.ticket_id, "x", index, continues) is Verdict.DUPLICATE
        assert ledger.received(ticket.ticket_id, "y", 0) is Verdict.SUPERSEDED
        assert bool(ledger.open_tickets("a")) == is_open
    for index in (2, 0):
        ledger.trained(unrolls_of(ticket, index))
        ledger.advance(ledger.version + 1)
        assert ledger.counters()["trained"] == 0 and ledger.counters()["charged"] == 1
    ledger.trained(unrolls_of(ticket, 0, 1))
    assert ledger.counters()["trained"] == 1 and ledger.counters()["charged"] == 1
    ledger.advance(3)
    assert ledger.counters()["charged"] == 0
    ledger.trained(unrolls_of(ticket, 0, 1, 2))  # replayed data
    assert ledger.received(ticket.ticket_id, "x", 1, True) is Verdict.DUPLICATE


def test_what_was_trained_on_before_the_episode_ended_does_not_end_its_ticket() -> None:
    ledger = make_ledger()
    ledger.request("a", 1)
    [ticket] = grant(ledger)["a"]
    ledger.received(ticket.ticket_id, "x", 0, True)
    ledger.trained(unrolls_of(ticket, 0))
    ledger.advance(1)
    assert ledger.open_tickets("a") == [ticket]
    with pytest.raises(KeyError, match="unroll 1 of ticket 0 has not come"):
        ledger.trained(unrolls_of(ticket, 1))
    ledger.received(ticket.ticket_id, "x", 1)
    ledger.evicted(unrolls_of(ticket, 1))
    counters = ledger.counters()
    assert (counters["trained"], counters["evicted"], counters["charged"]) == (1, 0, 0), "some of it was trained on"


@pytest.mark.parametrize("how", ["failed", "refused", "actor_lost", "lost_by"])
@pytest.mark.parametrize("is_trained", [False, True])
def test_an_episode_of_which_an_unroll_is_here_is_cut_and_not_played_again(how: str, is_trained: bool) -> None:
    ledger = make_ledger()
    ledger.request("a", 2)
    begun, other = grant(ledger)["a"]
    ledger.received(begun.ticket_id, "x", 0, True)
    if is_trained:
        ledger.trained(unrolls_of(begun, 0))
    match how:
        case "failed":
            ledger.failed(begun.ticket_id, "a")
        case "refused":
            ledger.refused(begun.ticket_id, "a")
        case "actor_lost":
            ledger.actor_lost("a")
        case "lost_by":
            assert ledger.lost_by("a", ids([begun, other])) == [other], "to be granted once more"
    counters = ledger.counters()
    assert (counters["cut"], counters["refused"], counters["trained"]) == (1, 0, float(is_trained))
    assert begun.ticket_id not in ids(ledger.open_tickets("a"))
    ledger.request("b", 100)
    assert begun.ticket_id not in ids(grant(ledger).get("b", []))
    late = ledger.received(begun.ticket_id, "x", 1)
    assert late is (Verdict.SUPERSEDED if is_trained else Verdict.ACCEPTED)
    if not is_trained:
        ledger.trained(unrolls_of(begun, 0))
        assert ledger.counters()["trained"] == 0
        ledger.trained(unrolls_of(begun, 1))
        assert ledger.counters()["trained"] == 1


def test_admission_forecasts_the_unrolls_to_come() -> None:
    """A batch of 6 unrolls, and room for 12: episodes of 3 unrolls are admitted 4 at a time, and no batch starves."""
    ledger = make_ledger(6, 1)
    ledger.request("a", 100)
    waiting: list[int] = []
    sizes = []
    for _ in range(5):
        tickets = grant(ledger)["a"]
        sizes.append(len(tickets))
        for ticket in tickets:
            assert ticket.min_version <= ledger.version
            for index in range(3):
                ledger.received(ticket.ticket_id, "x", index, index < 2)
            waiting += unrolls_of(ticket, 0, 1, 2)
        while len(waiting) >= 6:
            ledger.trained(waiting[:6])
            ledger.advance(ledger.version + 1)
            del waiting[:6]
    assert sizes == [12, 4, 4, 4, 4], "at first nothing is known of the unrolls"
