import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_llm.pipeline.shm.journal import Journal
from impala_llm.pipeline.tickets.journal_rows import dealt, renumbered
from impala_llm.pipeline.tickets.ledger import Ticket, TicketLedger, Verdict
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.trajectory import unroll_id
from tests.pipeline.support import steps_of


def make_ledger(
    batch_size: int = 4,
    max_staleness: int | None = 1,
    group_size: int = 1,
    max_open: int | None = None,
    max_attempts: int = 3,
) -> TicketLedger:
    order = TaskOrder(range(100, 110), group_size, seed=3)
    return TicketLedger(order, batch_size, max_staleness, max_open=max_open, max_attempts=max_attempts)


def grant(ledger: TicketLedger) -> dict[str, list[Ticket]]:
    return dict(ledger.grantable())


def ids(tickets: list[Ticket]) -> list[int]:
    return [ticket.ticket_id for ticket in tickets]


def receive(ledger: TicketLedger, tickets: list[Ticket]) -> None:
    for ticket in tickets:
        assert ledger.received(ticket.ticket_id, f"episode of {ticket.ticket_id}") is Verdict.ACCEPTED


# --- order of tasks


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_each_epoch_holds_every_task_once_over_all_ranks(world_size: int) -> None:
    tasks = [5, 3, 9, 11, 2]
    orders = [TaskOrder(tasks, seed=1, rank=rank, world_size=world_size) for rank in range(world_size)]
    taken = {}
    for _ in range(30):
        for order in orders:
            task_id, group_id = order.next()
            assert group_id not in taken
            taken[group_id] = task_id
    epochs = [[taken[epoch * 5 + place] for place in range(5)] for epoch in range(6)]
    assert all(sorted(epoch) == sorted(tasks) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    single = TaskOrder(tasks, seed=1)
    assert [single.next()[0] for _ in range(30)] == [taken[i] for i in range(30)]


def test_the_order_goes_on_where_it_was() -> None:
    order = TaskOrder(range(7), group_size=2, seed=5)
    for _ in range(10):
        order.next()
    again = TaskOrder(range(7), group_size=2, seed=5)
    again.skip_to(order.num_taken)
    assert [again.next() for _ in range(10)] == [order.next() for _ in range(10)]


def test_bad_arguments_of_the_order_are_named() -> None:
    for arguments, expected in [
        (([],), "tasks is empty"),
        (([1, 1],), "repeats"),
        (([1], 0), "group_size is 0"),
        (([1], 1, 0, 2, 2), "rank is 2"),
    ]:
        with pytest.raises(ValueError, match=expected):
            TaskOrder(*arguments)


def test_bad_arguments_of_the_ledger_are_named() -> None:
    for arguments, expected in [
        ({"batch_size": 3, "group_size": 2}, "multiple of group_size 2"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"max_staleness": None}, "max_open is None"),
        ({"max_staleness": 0, "max_open": 3}, "max_open is 3"),
        ({"max_attempts": 0}, "max_attempts is 0"),
    ]:
        with pytest.raises(ValueError, match=expected):
            make_ledger(**arguments)  # type: ignore[arg-type]


# --- admission


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_no_more_is_granted_than_staleness_allows(max_staleness: int) -> None:
    ledger = make_ledger(4, max_staleness)
    ledger.request("a", 1000)
    tickets = grant(ledger)["a"]
    assert len(tickets) == (max_staleness + 1) * 4
    receive(ledger, tickets)
    assert grant(ledger) == {}  # received is not enough
    ledger.trained(ids(tickets[:4]))
    assert grant(ledger) == {}  # the step is under way: version 0 is all there is
    ledger.advance(1)
    assert len(grant(ledger)["a"]) == 4


def test_a_level_is_filled_and_repeating_it_changes_nothing() -> None:
    ledger = make_ledger(8)
    ledger.request("a", 3)
    ledger.request("a", 3)
    tickets = grant(ledger)["a"]
    assert len(tickets) == 3
    ledger.request("a", 3)
    assert grant(ledger) == {}
    receive(ledger, tickets[:2])
    assert len(grant(ledger)["a"]) == 2


def test_actors_share_what_is_scarce_and_groups_stay_together() -> None:
    ledger = make_ledger(6, 0 + 1, group_size=3)
    ledger.request("a", 100)
    ledger.request("b", 100)
    granted = grant(ledger)
    assert {actor: len(tickets) for actor, tickets in granted.items()} == {"a": 6, "b": 6}
    for tickets in granted.values():
        groups = [ticket.group_id for ticket in tickets]
        assert groups == sorted(groups) and set(Counter(groups).values()) == {3}
        for ticket in tickets:
            same_group = [other for other in tickets if other.group_id == ticket.group_id]
            assert {other.task_id for other in same_group} == {ticket.task_id}
            assert len({other.seed for other in same_group}) == 3


def test_a_group_is_started_only_where_all_of_it_has_room() -> None:
    ledger = make_ledger(4, 0 + 1, group_size=4, max_open=6)
    ledger.request("a", 100)
    first = grant(ledger)["a"]
    assert len(first) == 4
    receive(ledger, first[:1])
    assert grant(ledger) == {}
    receive(ledger, first[1:2])
    assert len(grant(ledger)["a"]) == 4


def test_free_running_is_bounded_by_open_tickets_only() -> None:
    ledger = make_ledger(4, None, max_open=10)
    ledger.request("a", 1000)
    for _ in range(20):
        tickets = grant(ledger)["a"]
        assert len(tickets) == 10
        assert {ticket.min_version for ticket in tickets} == {0}
        receive(ledger, tickets)


def test_the_largest_staleness_is_the_bound_and_is_reached() -> None:
    """Oldest ticket first, each played with the oldest version that it allows: the derivation's worst case."""
    for max_staleness in range(4):
        ledger = make_ledger(4, max_staleness)
        ledger.request("a", 1000)
        queue: list[Ticket] = []
        staleness = []
        for version in range(12):
            for ticket in grant(ledger).get("a", []):
                assert ticket.min_version <= version
                queue.append(ticket)
            batch, queue = queue[:4], queue[4:]
            receive(ledger, batch)
            staleness += [version - ticket.min_version for ticket in batch]
            ledger.trained(ids(batch))
            ledger.advance(version + 1)
        assert max(staleness) == max_staleness


# --- staleness 0


def test_one_actor_gets_the_whole_batch_at_once_in_order_whatever_it_asked_for() -> None:
    ledger = make_ledger(4, 0)
    ledger.request("a", 1)
    expected = list(range(4))
    for version in range(5):
        tickets = grant(ledger)["a"]
        assert ids(tickets) == expected
        assert {ticket.min_version for ticket in tickets} == {version}
        shuffled = random.Random(version).sample(tickets, 4)
        for ticket in shuffled:
            receive(ledger, [ticket])
            assert grant(ledger) == {}
        ledger.trained(ids(tickets))
        assert grant(ledger) == {}
        ledger.advance(version + 1)
        expected = [ticket_id + 4 for ticket_id in expected]


def test_several_actors_get_equal_shares_of_whole_groups() -> None:
    ledger = make_ledger(12, 0, group_size=2)
    for actor in "abc":
        ledger.request(actor, 1)
    shares = grant(ledger)
    assert {actor: len(tickets) for actor, tickets in shares.items()} == {"a": 4, "b": 4, "c": 4}
    assert all(set(Counter(t.group_id for t in tickets).values()) == {2} for tickets in shares.values())
    # Fewer groups than actors: then members are dealt one by one.
    ledger = make_ledger(4, 0, group_size=4)
    for actor in "ab":
        ledger.request(actor, 1)
    assert {actor: len(tickets) for actor, tickets in grant(ledger).items()} == {"a": 2, "b": 2}


def test_a_batch_waits_for_the_whole_one_before_it() -> None:
    ledger = make_ledger(4, 0)
    ledger.request("a", 1)
    tickets = grant(ledger)["a"]
    receive(ledger, tickets)
    ledger.trained(ids(tickets[:2]))
    ledger.advance(1)
    assert grant(ledger) == {}
    ledger.evicted(ids(tickets[2:]))
    assert len(grant(ledger)["a"]) == 4


def num_expected(ledger: TicketLedger) -> float:
    """Tickets that may still bring a trajectory."""
    return ledger.counters()["ready"] + ledger.counters()["open"]


def test_what_can_never_come_is_replaced_within_the_batch() -> None:
    ledger = make_ledger(4, 0)
    ledger.request("a", 1)
    tickets = grant(ledger)["a"]
    receive(ledger, tickets[:2])
    ledger.refused(tickets[2].ticket_id, "a")
    ledger.evicted([tickets[0].ticket_id])
    fresh = grant(ledger)["a"]
    assert ids(fresh) == [4, 5]
    assert {ticket.min_version for ticket in fresh} == {0}
    assert num_expected(ledger) == 3


# --- attempts


def test_tickets_of_a_lost_actor_are_granted_again_first_and_in_order() -> None:
    ledger = make_ledger(4, 1)
    ledger.request("a", 4)
    tickets = grant(ledger)["a"]
    receive(ledger, tickets[1:2])
    ledger.actor_lost("a")
    assert grant(ledger) == {}
    ledger.request("b", 4)
    again = grant(ledger)["b"]
    assert again[:3] == [tickets[0], tickets[2], tickets[3]]
    assert ledger.counters()["regranted"] == 3


def test_failures_are_granted_again_until_the_group_is_closed_short() -> None:
    ledger = make_ledger(4, 0, group_size=4, max_attempts=2)
    ledger.request("a", 1)
    tickets = grant(ledger)["a"]
    receive(ledger, tickets[1:])
    ledger.failed(0, "a")
    assert ledger.lost_members(0) == 0
    assert grant(ledger) == {"a": tickets[:1]}
    ledger.failed(0, "somebody else")
    assert grant(ledger) == {}
    ledger.failed(0, "a")
    assert ledger.lost_members(0) == 1
    assert num_expected(ledger) == 0
    assert grant(ledger) == {}  # the short group is the batch: its free place is no room for another group
    ledger.trained(ids(tickets[1:]))
    assert grant(ledger) == {}
    ledger.advance(1)
    assert {ticket.group_id for ticket in grant(ledger)["a"]} == {1}
    counters = ledger.counters()
    assert (counters["failed"], counters["given_up"], counters["refused"], counters["trained"]) == (2, 1, 1, 3)


def test_a_trajectory_must_be_what_its_ticket_was_granted_for() -> None:
    ledger = make_ledger()
    ledger.advance(7)
    ledger.request("a", 2)
    first, second = grant(ledger)["a"]
    task, group, oldest = first.task_id, first.group_id, first.min_version
    assert oldest > 0
    wrong = [(task + 1, group, oldest), (task, group + 1, oldest), (task, group, oldest - 1)]
    claims = [("x", 0, first.ticket_id, 0, *granted) for granted in wrong]
    assert ledger.received_all(claims) == [Verdict.NOT_AS_GRANTED] * 3
    assert ids(ledger.open_tickets("a")) == [first.ticket_id, second.ticket_id]
    # Among others, each for itself; what has ended or never was is told so, whatever it says.
    claims = [claims[0], ("x", 0, first.ticket_id, 0, task, group, oldest), claims[1], ("x", 0, 999, 0, 1, 2, 3)]
    accepted = [Verdict.NOT_AS_GRANTED, Verdict.ACCEPTED, Verdict.NOT_AS_GRANTED, Verdict.UNKNOWN_TICKET]
    assert ledger.received_all(claims) == accepted
    ledger.trained([first.ticket_id])
    assert ledger.received_all(claims[:2]) == [Verdict.DUPLICATE, Verdict.DUPLICATE]
    assert ledger.counters()["duplicates"] == 2


def test_trajectories_are_taken_once_by_episode_and_unroll() -> None:
    ledger = make_ledger()
    ledger.request("a", 2)
    first, second = grant(ledger)["a"]
    assert ledger.received(first.ticket_id, "x", 0) is Verdict.ACCEPTED
    assert ledger.received(first.ticket_id, "x", 0) is Verdict.DUPLICATE
    assert ledger.received(first.ticket_id, "x", 1) is Verdict.ACCEPTED
    assert ledger.received(first.ticket_id, "y", 0) is Verdict.SUPERSEDED
    assert ledger.received(999, "x", 0) is Verdict.UNKNOWN_TICKET
    ledger.trained([first.ticket_id, unroll_id(first.ticket_id, 1)])
    assert ledger.received(first.ticket_id, "x", 1) is Verdict.DUPLICATE
    assert ledger.received(first.ticket_id, "x", 2) is Verdict.SUPERSEDED
    ledger.trained([first.ticket_id])  # replayed data is trained on again
    with pytest.raises(KeyError, match="is open"):
        ledger.trained([second.ticket_id])
    assert ledger.counters()["trained"] == 1


def test_the_first_attempt_to_arrive_wins() -> None:
    ledger = make_ledger()
    ledger.request("a", 1)
    [ticket] = grant(ledger)["a"]
    ledger.actor_lost("a")  # it was only slow
    ledger.request("b", 1)
    assert grant(ledger) == {"b": [ticket]}
    assert ledger.received(ticket.ticket_id, "from a") is Verdict.ACCEPTED
    assert ledger.received(ticket.ticket_id, "from b") is Verdict.SUPERSEDED
    assert ledger.open_tickets("b") == []


def test_an_actor_that_comes_back_keeps_what_was_not_granted_to_others() -> None:
    ledger = make_ledger()
    ledger.request("a", 3)
    tickets = grant(ledger)["a"]
    ledger.actor_lost("a")
    ledger.request("b", 1)
    assert grant(ledger) == {"b": tickets[:1]}
    ledger.resumed("a", ids(tickets))
    assert ledger.open_tickets("a") == tickets[1:]
    assert ledger.open_tickets("b") == tickets[:1]


def test_versions_only_grow() -> None:
    ledger = make_ledger()
    ledger.advance(3)
    for version in (3, 2):
        with pytest.raises(ValueError, match="versions only grow"):
            ledger.advance(version)


# --- saving


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


@pytest.mark.parametrize(("num_before", "num_after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_another_number_of_ranks_skips_no_task_and_repeats_none(
    num_before: int, num_after: int, tmp_path: Path
) -> None:
    """Ranks that had come to different places of the order, with tickets in every state."""
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
        ledger.request("a", 2 + 4 * rank)  # the ranks come to different places
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


# --- everything at once


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), st.sampled_from([0, 1, 2, None]), st.sampled_from([1, 2]))
def test_random_walk_keeps_the_invariants(seed: int, max_staleness: int | None, group_size: int) -> None:
    """An independent account of every ticket, next to the ledger, under all events in any order."""
    rng = random.Random(seed)
    ledger = make_ledger(4, max_staleness, group_size, max_open=7 if max_staleness is None else None, max_attempts=2)
    actors = ["a", "b", "c"]
    open_at: dict[int, str] = {}
    received: dict[int, str] = {}
    lost: set[int] = set()
    ends: dict[int, str] = {}
    failures: Counter[int] = Counter()
    losses: Counter[int] = Counter()
    seen: set[int] = set()
    for step in range(250):
        event = rng.choice(
            ["request", "grant", "grant", "receive", "receive", "receive", "fail", "refuse", "lost", "learn"]
        )
        actor = rng.choice(actors)
        if event == "request":
            ledger.request(actor, rng.randint(0, 5))
        elif event == "grant":
            for to, tickets in ledger.grantable():
                for ticket in tickets:
                    ticket_id = ticket.ticket_id
                    assert ticket_id not in open_at and ticket_id not in received and ticket_id not in ends
                    assert ticket_id in lost or ticket_id not in seen, "only lost or failed tickets come twice"
                    assert ticket.min_version <= ledger.version
                    lost.discard(ticket_id)
                    open_at[ticket_id] = to
                    seen.add(ticket_id)
        elif event == "receive" and open_at:
            ticket_id = rng.choice(sorted(open_at))
            episode = f"{step}"
            assert ledger.received(ticket_id, episode) is Verdict.ACCEPTED
            assert ledger.received(ticket_id, episode) is Verdict.DUPLICATE
            del open_at[ticket_id]
            received[ticket_id] = episode
        elif event in ("fail", "refuse") and open_at:
            ticket_id = rng.choice(sorted(open_at))
            owner = open_at.pop(ticket_id)
            if event == "fail":
                ledger.failed(ticket_id, owner)
                failures[ticket_id] += 1
            else:
                ledger.refused(ticket_id, owner)
            if event == "refuse" or failures[ticket_id] == 2:
                ends[ticket_id] = "refused"
            else:
                lost.add(ticket_id)
        elif event == "lost":
            given_up = {ticket.ticket_id for ticket in ledger.actor_lost(actor)}
            mine = {ticket_id for ticket_id, owner in open_at.items() if owner == actor}
            losses.update(mine)
            assert given_up == {ticket_id for ticket_id in mine if losses[ticket_id] == 5}
            ends |= dict.fromkeys(given_up, "refused")
            lost |= mine - given_up
            open_at = {ticket_id: owner for ticket_id, owner in open_at.items() if owner != actor}
        elif event == "learn" and received:
            batch = sorted(received)[:4]
            cut = rng.randint(0, len(batch))
            ledger.evicted(batch[cut:])
            ledger.trained(batch[:cut])
            ends |= dict.fromkeys(batch[:cut], "trained") | dict.fromkeys(batch[cut:], "evicted")
            for ticket_id in batch:
                del received[ticket_id]
            if rng.random() < 0.8:
                ledger.advance(ledger.version + 1)
        counters = ledger.counters()
        assert counters["open"] == len(open_at)
        assert counters["in_buffer"] == len(received)
        # A group that was started has its members open, or ready, from the start on.
        assert counters["ready"] >= len(lost)
        for end in ("trained", "evicted", "refused"):
            assert counters[end] == list(ends.values()).count(end)
        if max_staleness is not None:
            assert len(open_at) + len(received) + len(lost) <= counters["charged"] <= (max_staleness + 1) * 4
        else:
            assert counters["open"] + counters["ready"] <= 7 + counters["regranted"]


# --- several unrolls of an episode


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


# --- many actors


@pytest.mark.parametrize("max_open", [64, 100_000])
def test_a_turn_costs_the_same_whether_ten_actors_have_nothing_to_say_or_a_thousand(max_open: int) -> None:
    def steps(num_actors: int) -> list[int]:
        made = make_ledger(max_staleness=None, max_open=max_open)
        for i in range(num_actors):
            made.request(f"actor-{i}", 8)
        [(_, [ticket, *_]), *_] = made.grantable()

        def turn() -> None:
            made.received(ticket.ticket_id, "episode")
            [(_, [_])] = made.grantable()

        return [steps_of(made.grantable), steps_of(turn), steps_of(made.grantable)]

    for few, many in zip(steps(10), steps(1000), strict=True):
        assert many <= 1.5 * few


@pytest.mark.parametrize(("max_staleness", "interval"), [(1, 2), (2, 3), (4, 5), (2, 2)])
@pytest.mark.parametrize("refused", [{9}, {5, 6, 7}, set(range(8, 40)), set(range(4, 400, 3))])
def test_a_learner_that_publishes_rarely_gets_its_batches_though_tickets_are_refused(
    max_staleness: int, interval: int, refused: set[int]
) -> None:
    ledger = TicketLedger(TaskOrder(range(1000), seed=1), batch_size=4, max_staleness=max_staleness)
    published, num_late, held, arrived = 0, 0, [], []
    for _ in range(1000):
        ledger.request("actor", 64)
        held += [ticket for _, tickets in ledger.grantable() for ticket in tickets]
        playable = [ticket for ticket in held if ticket.min_version <= published]
        held = [ticket for ticket in held if ticket not in playable]
        for ticket in playable:
            if ticket.ticket_id in refused:
                ledger.refused(ticket.ticket_id, "actor")
            else:
                ledger.received(ticket.ticket_id, f"episode {ticket.ticket_id}")
                arrived.append(ticket.ticket_id)
        if len(arrived) >= 4:
            ledger.trained(sorted(arrived)[:4])
            arrived = sorted(arrived)[4:]
            ledger.advance(ledger.version + 1)
            published = ledger.version if ledger.version % interval == 0 else published
        elif not playable and ledger.needs_newer_than(published):
            published, num_late = ledger.version, num_late + 1
        if ledger.version == 30:
            break
    assert ledger.version == 30
    assert num_late < 30 - 30 // interval or len(refused) > 4
