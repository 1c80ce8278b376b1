"""Rows of a journal: what restores a ledger elsewhere, at another version, or as another number of ranks."""

from pathlib import Path

import pytest

from impala_llm.pipeline.shm.journal import Journal
from impala_llm.pipeline.tickets.journal_rows import dealt, renumbered
from impala_llm.pipeline.tickets.ledger import Ticket, TicketLedger
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.trajectory import unroll_id
from tests.pipeline.tickets.ledgers import grant, ids, make_ledger, receive


def restore(path: Path, rows: list[tuple[int, ...]], version: int) -> TicketLedger:
    """A ledger as that of `make_ledger(4, 1)`, with these rows in its journal."""
    Journal(path).rewrite(rows)
    return TicketLedger(TaskOrder(range(100, 110), seed=3), 4, 1, version=version, journal=Journal(path))


def test_rows_of_a_ledger_restore_it_at_the_version_that_they_are_of(tmp_path: Path) -> None:
    """As a checkpoint keeps them: taken before the step under way is over, for the version that it makes, or for the
    one that it began with."""
    ledger = make_ledger(4, 1)
    ledger.request("a", 6)
    tickets = grant(ledger)["a"]
    receive(ledger, tickets[:5])
    ledger.trained(ids(tickets[:4]))
    arrived = [(t.ticket_id, f"episode of {t.ticket_id}", 0) for t in tickets[:5]]
    for version, num_settled in ((1, 4), (0, 0)):
        restored = restore(tmp_path / str(version), ledger.rows(version), version)
        assert restored.recover(arrived) == [False] * num_settled + [True] * (5 - num_settled)
        restored.request("b", 100)
        assert ids(grant(restored)["b"])[0] == tickets[5].ticket_id


def test_renumbered_rows_are_those_of_a_ledger_with_later_versions(tmp_path: Path) -> None:
    ledger = make_ledger(4, 1)
    ledger.request("a", 8)
    playing = grant(ledger)["a"]
    for version in range(1, 4):
        receive(ledger, playing[:4])
        ledger.trained(ids(playing[:4]))
        ledger.advance(version)
        playing = playing[4:] + grant(ledger)["a"]
    restored = restore(tmp_path / "journal", renumbered(ledger.rows(3), 100), 103)
    assert restored.recover([]) == []
    restored.request("b", 100)
    again = {t.ticket_id: t for t in grant(restored)["b"]}
    assert {t.min_version for t in playing} == {2, 3}
    assert {t.ticket_id: t.min_version + 100 for t in playing} == {i: again[i].min_version for i in ids(playing)}
    assert all(t.min_version <= 103 for t in again.values())


def test_tickets_that_demand_the_first_version_are_renumbered_too(tmp_path: Path) -> None:
    ledger = make_ledger(4, 1)
    ledger.request("a", 8)
    assert {ticket.min_version for ticket in grant(ledger)["a"]} == {0}
    restored = restore(tmp_path / "journal", renumbered(ledger.rows(0), 100), 100)
    restored.recover([])
    restored.request("b", 8)
    assert {ticket.min_version for ticket in grant(restored)["b"]} == {100}


@pytest.mark.parametrize("how", ["restarted", "from a checkpoint", "as two ranks"])
def test_the_forecast_of_unrolls_outlives_the_process(how: str, tmp_path: Path) -> None:
    """Batches of 6, and room for 12: without it 12 episodes would be granted, of which each has 3 unrolls."""
    order = TaskOrder(range(100, 110), seed=3)
    ledger = TicketLedger(order, 6, 1, version=0, journal=Journal(tmp_path / "journal"))
    ledger.request("a", 2)
    tickets = grant(ledger)["a"]
    for ticket in tickets:
        for index in range(3):
            ledger.received(ticket.ticket_id, "x", index, index < 2)
    ledger.trained([unroll_id(ticket.ticket_id, index) for ticket in tickets for index in range(3)])
    ledger.advance(1)
    if how == "from a checkpoint":
        Journal(tmp_path / "journal").rewrite(renumbered(ledger.rows(1), 0))
    elif how == "as two ranks":
        order = TaskOrder(range(100, 110), seed=3, rank=1, world_size=2)
        Journal(tmp_path / "journal").rewrite(dealt([ledger.rows(1)], 1, 2))
    else:
        order = TaskOrder(range(100, 110), seed=3)
    later = TicketLedger(order, 6, 1, version=1, journal=Journal(tmp_path / "journal"))
    later.recover([])
    later.request("a", 100)
    assert len(grant(later)["a"]) == 4


def test_a_run_that_goes_on_without_unrolls_soon_has_nearly_as_many_episodes_as_one_without(tmp_path: Path) -> None:
    """Batches of 16, and room for 32: as many episodes are open at once where there never were unrolls."""
    order, journal = TaskOrder(range(100, 110), seed=3), Journal(tmp_path / "journal")
    ledger = TicketLedger(order, 16, 1, version=0, journal=journal)
    ledger.request("a", 100_000)
    playing = grant(ledger)["a"]
    for version in range(1, 33):  # 64 episodes of 8 unrolls
        ended, playing = playing[:2], playing[2:]
        for ticket in ended:
            for index in range(8):
                ledger.received(ticket.ticket_id, "x", index, index < 7)
        ledger.trained([unroll_id(ticket.ticket_id, index) for ticket in ended for index in range(8)])
        ledger.advance(version)
        playing += grant(ledger).get("a", [])
    later = TicketLedger(TaskOrder(range(100, 110), seed=3), 16, 1, version=32, journal=Journal(tmp_path / "journal"))
    later.recover([])
    later.request("a", 100_000)
    playing = grant(later)["a"]
    for version in range(33, 41):  # 128 episodes of one
        ended = []
        while len(ended) < 16:
            playing += grant(later).get("a", [])
            ended.append(playing.pop(0))
            receive(later, ended[-1:])
        later.trained(ids(ended))
        later.advance(version)
    playing += grant(later).get("a", [])
    assert len(playing) >= 20


@pytest.mark.parametrize(("num_before", "num_after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_another_number_of_ranks_skips_no_task_and_repeats_none(
    num_before: int, num_after: int, tmp_path: Path
) -> None:
    """Ranks that had come to different positions of the order, with tickets in every state."""
    tasks, group_size, batch_size = range(100, 150), 2, 4

    def make(rank: int, num_ranks: int, version: int, path: Path | None = None) -> TicketLedger:
        order = TaskOrder(tasks, group_size, 3, rank, num_ranks)
        journal = None if path is None else Journal(path)
        return TicketLedger(order, batch_size, 1, version=version, journal=journal)

    trained: list[int] = []
    rows, received = [], []
    for rank in range(num_before):
        ledger = make(rank, num_before, version=0)
        ledger.request("a", 4)
        playing: list[Ticket] = []
        for version in (1, 2):
            playing += grant(ledger).get("a", [])
            step, playing = playing[:4], playing[4:]
            receive(ledger, step)
            ledger.trained(ids(step))
            trained += ids(step)
            ledger.advance(version)
        ledger.request("a", 2 + 4 * rank)  # the ranks come to different positions
        playing += grant(ledger).get("a", [])
        receive(ledger, playing[:1])
        received.append((playing[0].ticket_id, f"episode of {playing[0].ticket_id}", 0))
        rows.append(ledger.rows(2))
    played = []
    for rank in range(num_after):
        path = tmp_path / str(rank)
        Journal(path).rewrite(dealt(rows, rank, num_after))
        ledger = make(rank, num_after, 2, path)
        mine = [claim for claim in received if claim[0] // group_size % num_after == rank]
        assert ledger.recover(mine) == [True] * len(mine)
        played += [claim[0] for claim in mine]
        ledger.request("b", 1000)
        for version in range(3, 9):
            tickets = grant(ledger).get("b", [])
            assert all(t.task_id == TaskOrder(tasks, group_size, 3).task_of(t.group_id) for t in tickets)
            played += ids(tickets)
            receive(ledger, tickets)
            ledger.evicted([*ids(tickets), *(claim[0] for claim in mine)])
            mine = []
            ledger.advance(version)
    assert len(played) == len(set(played)) and not set(played) & set(trained)
    everything = sorted([*played, *trained])
    assert everything[: len(trained) + 12] == list(range(len(trained) + 12))
