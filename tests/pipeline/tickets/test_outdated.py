"""Tickets whose trajectory is of older weights than they demand: its actor has outlived the learner's host."""

from tests.pipeline.tickets.ledgers import grant, make_ledger


def test_a_ticket_whose_trajectory_is_outdated_is_granted_again_but_not_without_end() -> None:
    ledger = make_ledger(max_attempts=2)
    ledger.request("a", 1)
    [ticket] = grant(ledger)["a"]
    assert not ledger.outdated(ticket.ticket_id, "somebody else", "old") and grant(ledger) == {}
    assert [ledger.outdated(ticket.ticket_id, "a", "old") for _ in range(2)] == [False, False], "it is at nobody"
    for number in range(3):
        counters = ledger.counters()
        assert (counters["failed"], counters["refused"]) == (number, number == 2)
        assert (grant(ledger)["a"] == [ticket]) == (number < 2)
        assert ledger.outdated(ticket.ticket_id, "a", f"old {number}") == (number < 2)


def test_all_unrolls_of_the_first_outdated_episode_are_one_attempt_that_does_not_count() -> None:
    ledger = make_ledger(max_attempts=1)
    ledger.request("a", 1)
    for _ in range(4):
        [ticket] = grant(ledger)["a"]
        assert not ledger.outdated(ticket.ticket_id, "a", "old")
    counters = ledger.counters()
    assert (counters["regranted"], counters["failed"], counters["refused"]) == (4, 0, 0)


def test_an_episode_of_which_an_unroll_has_come_is_cut_where_the_next_one_is_outdated() -> None:
    ledger = make_ledger()
    ledger.request("a", 1)
    [ticket] = grant(ledger)["a"]
    ledger.received(ticket.ticket_id, "episode", 0, continues=True)
    assert ledger.outdated(ticket.ticket_id, "a", "old")
    assert (ledger.counters()["cut"], ledger.counters()["regranted"]) == (1, 0)
