"""The ledger of tickets: which are granted, to whom, and how each ends."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_llm.pipeline.tickets.ledger import Ticket, TicketLedger, Verdict
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.trajectory import unroll_id
from tests.examples import examples
from tests.pipeline.support import steps_of
from tests.pipeline.tickets.ledgers import grant, ids, make_ledger, receive


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


def test_a_batch_has_room_beside_what_is_left_of_the_one_before_it() -> None:
    """A run had a larger batch, or a larger max_staleness, before it was resumed: the learner decides whether what is
    left is too old. If the ledger waited for it, and the learner for a batch, neither would go on."""
    ledger = make_ledger(4, 0)
    ledger.request("a", 1)
    first = grant(ledger)["a"]
    receive(ledger, first[:3])
    ledger.trained(ids(first[:2]))
    assert grant(ledger) == {}
    ledger.advance(1)
    second = grant(ledger)["a"]
    assert len(second) == 2, "beside one that was received and one that is open"
    assert {ticket.min_version for ticket in second} == {1}
    receive(ledger, [first[3], *second])
    assert grant(ledger) == {}
    ledger.evicted([first[2].ticket_id])
    receive(ledger, grant(ledger)["a"])
    assert ledger.counters()["in_buffer"] == 4
    ledger.trained([*ids(second), first[3].ticket_id, 6])
    ledger.advance(2)
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
    assert grant(ledger) == {}  # the short group is the batch: its free slot is no room for another group
    ledger.trained(ids(tickets[1:]))
    assert grant(ledger) == {}
    ledger.advance(1)
    assert {ticket.group_id for ticket in grant(ledger)["a"]} == {1}
    counters = ledger.counters()
    assert (counters["failed"], counters["given_up"], counters["refused"], counters["trained"]) == (2, 1, 1, 3)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_what_failed_at_one_actor_is_tried_by_another(max_staleness: int) -> None:
    """The actor that fails at once has the fewest tickets: it would use up the attempts of all."""
    ledger = make_ledger(4, max_staleness, max_open=4)
    ledger.request("bad", 2)
    ledger.request("good", 3)
    granted = grant(ledger)
    for ticket in granted["bad"]:
        ledger.failed(ticket.ticket_id, "bad")
    receive(ledger, granted["good"][:1])
    again = grant(ledger)
    assert set(ids(again["good"])) <= set(ids(granted["bad"]))
    assert not set(ids(again.get("bad", []))) & set(ids(granted["bad"]))
    ledger.actor_lost("good")
    rest = grant(ledger)  # nobody else is left
    assert set(ids(granted["bad"])) & set(ids(rest["bad"]))


def test_all_that_is_tried_again_comes_to_an_actor_in_one_grant() -> None:
    ledger = make_ledger(4, 0)
    ledger.request("bad", 2)
    ledger.request("good", 4)
    failed = ids(grant(ledger)["bad"])
    for ticket_id in failed:
        ledger.failed(ticket_id, "bad")
    ((actor, tickets),) = ledger.grantable()
    assert actor == "good" and ids(tickets) == sorted(failed, reverse=True) and len(failed) == 2


def test_a_trajectory_must_be_what_its_ticket_was_granted_for() -> None:
    ledger = make_ledger()
    ledger.advance(7)
    ledger.request("a", 2)
    first, second = grant(ledger)["a"]
    task, group, oldest = first.task_id, first.group_id, first.min_version
    assert oldest > 0
    wrong = [(task + 1, group, oldest), (task, group + 1, oldest), (task, group, oldest - 1)]
    claims = [("x", 0, first.ticket_id, 0, *granted) for granted in wrong]
    assert ledger.received_all(claims) == [Verdict.NOT_AS_GRANTED, Verdict.NOT_AS_GRANTED, Verdict.OUTDATED]
    assert ids(ledger.open_tickets("a")) == [first.ticket_id, second.ticket_id]
    # Among others, each for itself; what has ended or never was is told so, whatever it says.
    claims = [claims[0], ("x", 0, first.ticket_id, 0, task, group, oldest), claims[1], ("x", 0, 999, 0, 1, 2, 3)]
    accepted = [Verdict.NOT_AS_GRANTED, Verdict.ACCEPTED, Verdict.NOT_AS_GRANTED, Verdict.UNKNOWN_TICKET]
    assert ledger.received_all(claims) == accepted
    ledger.trained([first.ticket_id])
    assert ledger.received_all(claims[:2]) == [Verdict.DUPLICATE, Verdict.DUPLICATE]
    assert ledger.counters()["duplicates"] == 2


def test_a_ticket_of_a_group_is_for_a_whole_episode() -> None:
    ledger = make_ledger(group_size=4)
    ledger.request("a", 4)
    tickets = grant(ledger)["a"]
    for index, continues in ((0, True), (1, False), (1, True)):
        assert ledger.received(tickets[0].ticket_id, "x", index, continues) is Verdict.NOT_AS_GRANTED
    assert ledger.open_tickets("a") == tickets
    receive(ledger, tickets)
    assert ledger.received(tickets[0].ticket_id, f"episode of {tickets[0].ticket_id}", 1) is Verdict.NOT_AS_GRANTED


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


# --- everything at once


@settings(deadline=None, max_examples=examples(40))
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
    outdated: set[int] = set()
    losses: Counter[int] = Counter()
    seen: set[int] = set()
    for step in range(250):
        event = rng.choice(["request", *["grant"] * 2, *["receive"] * 3, "fail", "refuse", "outdate", "lost", "learn"])
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
        elif event in ("fail", "refuse", "outdate") and open_at:
            ticket_id = rng.choice(sorted(open_at))
            owner = open_at.pop(ticket_id)
            if event == "outdate":
                has_failed = ledger.outdated(ticket_id, owner, f"old {step}")
                assert has_failed == (ticket_id in outdated)
                failures[ticket_id] += has_failed
                outdated.add(ticket_id)
            elif event == "fail":
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
