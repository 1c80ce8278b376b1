"""A task that ends its actors, or the learner, each time that it is tried is set aside and named after a few times."""

from collections import Counter
from pathlib import Path

import pytest

from impala_llm.pipeline.shm.journal import Journal
from impala_llm.pipeline.tickets.ledger import Ticket, TicketLedger, Verdict
from impala_llm.pipeline.tickets.task_order import TaskOrder
from tests.pipeline.pair import Pair, counter, drain
from tests.pipeline.peers import Peer
from tests.pipeline.support import make_trajectory, turns_until

POISON = TaskOrder(range(200), seed=1).task_of(5)


def make_ledger(
    path: Path | None = None, max_staleness: int | None = 2, version: int = 0, batch_size: int = 8
) -> TicketLedger:
    order = TaskOrder(range(200), seed=1)
    journal = None if path is None else Journal(path)
    return TicketLedger(order, batch_size, max_staleness, version=version, journal=journal)


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("num_actors", [1, 3])
def test_a_task_that_ends_its_actors_is_set_aside_and_what_was_with_it_is_not(
    max_staleness: int, num_actors: int
) -> None:
    """An actor plays what it was granted in an order of its own, and dies where the poison is in it."""
    ledger = make_ledger(max_staleness=max_staleness)
    actors = [f"actor-{i}" for i in range(num_actors)]
    held: dict[str, list[Ticket]] = {actor: [] for actor in actors}
    granted: Counter[int] = Counter()
    trained: set[int] = set()
    set_aside: list[Ticket] = []
    waiting: list[int] = []
    for turn in range(200):
        for actor in actors:
            ledger.request(actor, 8)
        for actor, tickets in ledger.grantable():
            held[actor] += tickets
            granted.update(ticket.ticket_id for ticket in tickets)
        for actor in actors:
            if any(ticket.task_id == POISON for ticket in held[actor]):
                set_aside += ledger.actor_lost(actor)
                held[actor] = []
            elif held[actor]:
                done = held[actor].pop(turn % len(held[actor]))
                ledger.received(done.ticket_id, f"episode {done.ticket_id}")
                waiting.append(done.ticket_id)
        if len(waiting) + len(set_aside) % 8 >= 8 or (waiting and not any(held.values())):
            step, waiting = waiting[:8], waiting[8:]
            ledger.trained(step)
            trained.update(step)
            ledger.advance(ledger.version + 1)
        if len(set_aside) and len(trained) >= 16:
            break
    assert [ticket.task_id for ticket in set_aside] == [POISON]
    assert granted[set_aside[0].ticket_id] == 5
    assert ledger.counters()["given_up"] == ledger.counters()["refused"] == 1
    assert len(trained) >= 16


def test_an_actor_that_leaves_by_itself_blames_no_ticket() -> None:
    ledger = make_ledger()
    for _ in range(20):
        ledger.request("actor", 1)
        [(_, [ticket])] = ledger.grantable()
        assert ledger.actor_lost("actor", left=True) == []
    assert ledger.lookup(ticket.ticket_id) is not None


def test_an_actor_that_was_silent_and_comes_back_was_not_lost() -> None:
    ledger = make_ledger()
    ledger.request("actor", 1)
    [(_, [ticket])] = ledger.grantable()
    for _ in range(20):
        assert ledger.actor_lost("actor") == []
        ledger.resumed("actor", [ticket.ticket_id])
    assert ledger.received(ticket.ticket_id, "its episode") is Verdict.ACCEPTED


def test_a_later_learner_counts_on(tmp_path: Path) -> None:
    lost = []
    for _ in range(5):
        ledger = make_ledger(tmp_path / "journal")
        ledger.recover([])
        ledger.request("actor", 1)
        [(_, [ticket])] = ledger.grantable()
        lost += ledger.actor_lost("actor")
    assert lost == [ticket]


@pytest.mark.system
def test_the_learner_says_which_task_it_has_set_aside(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    receiver = pair.receiver(heartbeat_timeout_s=0.1)
    for death in range(1, 6):
        peer = Peer(receiver, f"peer-{death}")
        peer.request(1)
        ticket = peer.granted().tickets[0]
        peer.close()
        turns_until(counter(receiver, "actors_lost", death))
    name = f"task {ticket.task_id} (ticket {ticket.ticket_id}, group {ticket.group_id})"
    turns_until(lambda: f"{name} is set aside" in caplog.text)
    assert receiver.counters()["given_up"] == 1


# --- data that ends the learner


def found_after(path: Path, version: int = 0) -> tuple[list[bool], TicketLedger]:
    later = make_ledger(path, version=version)
    return later.recover([(i, f"episode {i}", 0) for i in range(24)]), later


def begin(path: Path) -> TicketLedger:
    """24 trajectories have come."""
    ledger = make_ledger(path)
    ledger.recover([])
    ledger.request("actor", 24)
    ledger.grantable()
    for ticket_id in range(24):
        ledger.received(ticket_id, f"episode {ticket_id}")
    return ledger


def test_what_was_in_two_steps_that_the_learner_died_in_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = begin(path)
    first.trained(range(8))
    wanted, second = found_after(path)
    assert wanted == [True] * 24 and second.quarantined == []
    second.trained([0, 1, *range(8, 14)])
    wanted, third = found_after(path)
    assert third.quarantined == [0, 1]
    assert wanted == [False] * 2 + [True] * 22
    assert third.counters()["quarantined"] == 2
    third.trained([2, 3])
    third.advance(1)  # published
    wanted, fourth = found_after(path, version=1)
    assert fourth.quarantined == [] and [i for i, is_wanted in enumerate(wanted) if not is_wanted] == [0, 1, 2, 3]


def test_only_the_step_in_which_the_learner_died_is_blamed(tmp_path: Path) -> None:
    """Not one that was made and not published, nor one that was interrupted by order."""
    path = tmp_path / "journal"
    ledger = begin(path)
    for _ in range(3):
        ledger.trained(range(8))
        ledger.advance(1)  # not published
        _, ledger = found_after(path)
        ledger.trained(range(8))
        ledger.interrupted()
        wanted, ledger = found_after(path)
        assert wanted == [True] * 24 and ledger.quarantined == []


def test_the_word_of_an_order_to_end_is_kept_where_the_journal_is_full(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for _ in range(3):
        _, ledger = found_after(path) if path.exists() else ((), begin(path))
        ledger.trained(range(8))
        same_file = Journal(path)
        while same_file.append([(7, 0, 0, 0, 0, 0)]):
            pass
        ledger.interrupted()
    wanted, ledger = found_after(path)
    assert wanted == [True] * 24 and ledger.quarantined == []


def test_unrolls_are_blamed_each_for_itself(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    kept = [(0, "episode", unroll) for unroll in range(3)]
    ledger = make_ledger(path)
    ledger.recover([])
    ledger.request("actor", 1)
    [(_, [ticket])] = ledger.grantable()
    assert ticket.ticket_id == 0
    for _, episode, unroll in kept:
        ledger.received(0, episode, unroll, continues=unroll < 2)
    numbers = [make_trajectory(ticket, unroll_index=unroll).unroll_id for unroll in range(3)]
    wanted = []
    for _ in range(2):
        ledger.trained(numbers[1:2])
        ledger = make_ledger(path)
        wanted = ledger.recover(kept)
    assert ledger.quarantined == numbers[1:2] and wanted == [True, False, True]
    ledger.trained([numbers[0], numbers[2]])
    ledger.advance(1)
    assert ledger.counters()["trained"] == 1 and ledger.lookup(0) is None


def test_the_learner_names_what_it_has_set_aside(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    receiver, actor = pair.receiver(batch_size=2), pair.actor(want=2)
    sent = [make_trajectory(ticket) for ticket in pair.tickets(actor, 2)]
    actor.request(0)
    for trajectory in sent:
        actor.send(trajectory)
    drain(receiver, 2, actor)
    turns_until(lambda: actor.num_unacknowledged == 0, actor)
    for crashes in (1, 2):
        receiver.trained([sent[0].unroll_id])
        pair.receivers.remove(receiver)
        receiver.close()
        receiver = pair.receiver(batch_size=2)
        assert [t.ticket_id for t in receiver.drain(0.0)] == [t.ticket_id for t in sent[crashes // 2 :]]
    assert receiver.counters()["quarantined"] == 1
    assert f"{sent[0].episode_id} (task {sent[0].task_id})" in caplog.text
