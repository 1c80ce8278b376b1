"""Restarts of a learner, and what is found after them: whole episodes, unrolls, and steps that may be lost."""

import dataclasses
from functools import partial

import pytest

from impala_llm.pipeline.shm.journal import Journal
from impala_llm.pipeline.tickets.journal_rows import renumbered
from impala_llm.pipeline.tickets.ledger import Ticket
from impala_llm.pipeline.transport import messages
from impala_llm.pipeline.transport.actor_channel import ActorChannel
from impala_llm.pipeline.transport.receiver import Receiver
from impala_llm.trajectory import Trajectory
from tests.pipeline.keeping import checksum_of, words_of
from tests.pipeline.pair import Pair, counter, drain
from tests.pipeline.support import contents, make_trajectory, turns_until


def test_a_restarted_learner_finds_what_it_acknowledged_and_gets_the_rest_again(pair: Pair) -> None:
    first = pair.receiver(batch_size=8)
    actor = pair.actor(want=4)
    tickets = pair.tickets(actor, 4)
    sent = [make_trajectory(ticket, seed=i) for i, ticket in enumerate(tickets)]
    actor.send(sent[0])
    turns_until(lambda: actor.num_unacknowledged == 0, actor)  # acknowledged, and never drained
    pair.receivers.remove(first)
    first.close()
    for trajectory in sent[1:3]:
        actor.send(trajectory)
    second = pair.receiver(batch_size=8)
    arrived = drain(second, 3, actor)
    assert [contents(t) for t in arrived] == [contents(t) for t in sent[:3]]
    actor.send(sent[3])
    assert contents(drain(second, 1, actor)[0]) == contents(sent[3])
    turns_until(lambda: actor.num_unacknowledged == 0, actor)
    assert second.counters()["recovered"] == 1
    assert second.counters()["received"] == 3


def lose_host(pair: Pair, first: Receiver, sent: list[Trajectory], actor: ActorChannel) -> None:
    """The learner of version 2 is lost with its host, and its actor sends what it has played meanwhile. A later one
    goes on from a checkpoint of version 2, under versions that the one before has not published."""
    rows = first.rows(2)
    pair.receivers.remove(first)
    first.close()
    for trajectory in sent:
        actor.send(trajectory)
    pair.run_dir.journal_path().unlink()
    Journal(pair.run_dir.journal_path()).rewrite(renumbered(rows, shift=257))


def test_an_actor_that_outlives_the_host_of_its_learner_plays_again_what_it_played_for_it(pair: Pair) -> None:
    first = pair.receiver(batch_size=2, version=2)
    actor = pair.actor(want=2)
    tickets = pair.tickets(actor, 2)
    lose_host(pair, first, [make_trajectory(ticket, version=2) for ticket in tickets], actor)
    second = pair.receiver(batch_size=2, version=259)
    turns_until(lambda: actor.num_unacknowledged == 0, actor)
    again = pair.tickets(actor, 2)
    assert sorted(t.task_id for t in again) == sorted(t.task_id for t in tickets)
    for ticket in again:
        actor.send(make_trajectory(ticket, version=259))
    drain(second, 2, actor)
    counters = second.counters()
    assert (counters["trajectories_refused"], counters["failed"], counters["refused"]) == (0, 0, 0)


def test_unrolls_of_one_old_episode_do_not_use_up_the_attempts_of_their_ticket(pair: Pair) -> None:
    first = pair.receiver(batch_size=1, version=2)
    actor = pair.actor(want=1)
    [ticket] = pair.tickets(actor, 1)
    early, *late = unrolls_of(ticket, 4, version=2)
    lose_host(pair, first, [early], actor)
    second = pair.receiver(batch_size=1, version=259)
    for unroll in late:
        turns_until(lambda: actor.num_unacknowledged == 0, actor)  # each in a message of its own
        actor.send(unroll)
    [again] = pair.tickets(actor, 1)
    assert again.task_id == ticket.task_id
    counters = second.counters()
    assert (counters["failed"], counters["refused"]) == (0, 0)


def test_a_run_that_runs_free_takes_old_episodes_after_the_loss_of_its_host_as_well(pair: Pair) -> None:
    first = pair.receiver(max_staleness=None, batch_size=2, version=2)
    actor = pair.actor(want=2)
    sent = [make_trajectory(ticket, version=2) for ticket in pair.tickets(actor, 2)]
    lose_host(pair, first, sent, actor)
    second = pair.receiver(max_staleness=None, batch_size=2, version=259)
    assert [contents(t) for t in drain(second, 2, actor)] == [contents(t) for t in sent]


def reported(receiver: Receiver, number: int) -> bool:
    return receiver.actor_stats().get("actor-0") == {"sent": number}


def test_what_was_answered_before_a_restart_is_no_gap_after_it(pair: Pair) -> None:
    first = pair.receiver(batch_size=16)
    actor = pair.actor(want=3)
    early, *others = pair.tickets(actor, 3)
    # Of a version that is announced later: those after it are acknowledged before it.
    actor.send(make_trajectory(early, version=1))
    for ticket in others:
        actor.send(make_trajectory(ticket))
    turns_until(lambda: actor.num_unacknowledged == 1, actor)
    pair.receivers.remove(first)
    first.close()
    second = pair.receiver(batch_size=16, max_remembered=8)
    second.announce(1)
    turns_until(lambda: actor.num_unacknowledged == 0, actor)
    for number in range(20):
        turns_until(lambda: len(actor.held) > 0, actor)
        actor.send(make_trajectory(actor.held[0], version=1))
        actor.report({"sent": number})
        turns_until(partial(reported, second, number), actor)  # a heartbeat has come
        second.evicted([trajectory.unroll_id for trajectory in second.drain(0.0)])
    assert second.counters()["actors_lost"] == 0


@pytest.mark.parametrize("published", [False, True])
def test_a_step_counts_once_its_version_is_published(pair: Pair, published: bool) -> None:
    first = pair.receiver(batch_size=2)
    actor = pair.actor(want=2)
    sent = [make_trajectory(ticket, seed=i) for i, ticket in enumerate(pair.tickets(actor, 2))]
    for trajectory in sent:
        actor.send(trajectory)
    drain(first, 2, actor)
    turns_until(lambda: actor.num_unacknowledged == 0, actor)
    first.trained([t.ticket_id for t in sent])  # and the learner dies before it announces version 1
    pair.receivers.remove(first)
    first.close()
    second = pair.receiver(batch_size=2, version=int(published))
    found = second.drain(0.0)
    assert [contents(t) for t in found] == ([] if published else [contents(t) for t in sent])


def unrolls_of(ticket: Ticket, count: int, version: int = 0) -> list[Trajectory]:
    shared = {"episode_id": f"episode of {ticket.ticket_id}", "version": version}
    return [make_trajectory(ticket, seed=i, unroll_index=i, continues=i < count - 1, **shared) for i in range(count)]


def test_a_ticket_is_held_until_the_last_unroll_was_acknowledged(pair: Pair) -> None:
    receiver = pair.receiver()
    actor = pair.actor(want=1)
    [ticket] = pair.tickets(actor, 1)
    actor.request(0)
    for number, unroll in enumerate(unrolls_of(ticket, 3)):
        assert actor.held == [ticket]
        actor.send(unroll)
        [arrived] = drain(receiver, 1, actor)
        turns_until(lambda: actor.num_unacknowledged == 0, actor)
        assert contents(arrived) == contents(unroll)
        assert receiver.counters()["open"] == (number < 2)
        receiver.trained([arrived.unroll_id])
        receiver.announce(number + 1)
    assert actor.held == []
    assert receiver.counters()["trained"] == 1


def test_what_was_learned_from_before_the_learner_died_stays_away_and_the_rest_is_found(pair: Pair) -> None:
    first = pair.receiver(batch_size=1)
    actor = pair.actor(want=1)
    [ticket] = pair.tickets(actor, 1)
    unrolls = unrolls_of(ticket, 3)
    for unroll in unrolls[:2]:
        actor.send(unroll)
    drain(first, 2, actor)
    turns_until(lambda: actor.num_unacknowledged == 0, actor)
    first.trained([unrolls[0].unroll_id])
    first.announce(1)
    first.trained([unrolls[1].unroll_id])  # and the learner dies before version 2 is published
    pair.receivers.remove(first)
    first.close()
    second = pair.receiver(batch_size=1, version=1)
    assert [contents(t) for t in second.drain(0.0)] == [contents(unrolls[1])]
    assert second.counters()["ready"] == 0, "the episode is not played again"
    actor.send(unrolls[2])  # it comes in time
    assert contents(drain(second, 1, actor)[0]) == contents(unrolls[2])
    second.trained([t.unroll_id for t in unrolls[1:]])
    second.announce(2)
    counters = second.counters()
    assert (counters["trained"], counters["in_buffer"]) == (1, 0)


def test_a_learner_that_publishes_nothing_never_runs_out_of_room_and_loses_nothing(pair: Pair) -> None:
    """A learner that trains on three times what its arena has room for, and dies between two versions that it keeps."""
    first = pair.receiver(max_staleness=None)
    actor = pair.actor(want=4)
    kept, since = 0, []
    for version in range(1, 52):
        for ticket in pair.tickets(actor, 4)[:4]:
            actor.send(make_trajectory(ticket))
        ids = [t.unroll_id for t in drain(first, 4, actor)[:4]]
        turns_until(lambda: actor.num_unacknowledged == 0, actor)
        first.trained(ids)
        since += ids
        is_due = first.must_keep()
        first.announce(version, published=False, kept=is_due)
        if is_due:
            kept, since = version, []
    assert 0 < kept < 51 and since, "the last step was not kept"
    assert first.counters()["arena_fill"] < 0.5
    pair.receivers.remove(first)
    first.close()
    second = pair.receiver(max_staleness=None, version=kept, published=0)
    assert sorted(t.unroll_id for t in second.drain(0.0)) == sorted(since)
    announced = [e for e in turns_until(counter(second, "actors"), actor) if isinstance(e, messages.WeightsAnnounced)]
    assert {e.version for e in announced} <= {0}, "actors stay with what was published"


def test_a_learner_knows_that_nothing_comes_until_it_publishes_and_says_so_when_it_has(pair: Pair) -> None:
    receiver = pair.receiver(batch_size=1)
    actor = pair.actor(want=2)
    first, second = pair.tickets(actor, 2)[:2]
    assert not receiver.needs_weights()
    actor.send(make_trajectory(first))
    [arrived] = drain(receiver, 1, actor)
    receiver.trained([arrived.unroll_id])
    receiver.announce(1, published=False)
    actor.fail(second.ticket_id, "no use")
    turns_until(lambda: second in actor.held, actor)
    assert not receiver.needs_weights(), "it is tried once more"
    actor.fail(second.ticket_id, "no use either")
    turns_until(lambda: bool(actor.held) and receiver.needs_weights(), actor)
    receiver.announce_late(1)
    heard: list[object] = []
    turns_until(lambda: heard.extend(actor.poll(0.01)) or messages.WeightsAnnounced(1) in heard)
    assert not receiver.needs_weights()


def test_what_a_step_has_trained_on_that_may_be_lost_survives_its_eviction_from_the_buffer(pair: Pair) -> None:
    first = pair.receiver(max_staleness=None)
    actor = pair.actor(want=1)
    [ticket] = pair.tickets(actor, 1)
    actor.send(sent := make_trajectory(ticket))
    [arrived] = drain(first, 1, actor)
    turns_until(lambda: actor.num_unacknowledged == 0, actor)
    first.trained([arrived.unroll_id])
    first.announce(1, published=False)
    first.evicted([arrived.unroll_id])  # it might have been replayed, and is too old for that now
    pair.receivers.remove(first)
    first.close()
    second = pair.receiver(max_staleness=None, version=0)
    assert [contents(t) for t in second.drain(0.0)] == [contents(sent)]


def test_an_actor_is_told_to_end_the_episode_of_a_refused_unroll(pair: Pair) -> None:
    receiver = pair.receiver()
    actor = pair.actor(want=1)
    [ticket] = pair.tickets(actor, 1)
    actor.request(0)
    good, bad, _ = unrolls_of(ticket, 3)
    actor.send(good)
    drain(receiver, 1, actor)
    actor.send(dataclasses.replace(bad, task_id=bad.task_id + 1))
    events = turns_until(lambda: actor.num_unacknowledged == 0, actor)
    assert any(isinstance(event, messages.Refused) for event in events)
    assert messages.Revoked((ticket.ticket_id,)) in events and actor.held == []
    counters = receiver.counters()
    assert (counters["open"], counters["in_buffer"], counters["cut"], counters["refused"]) == (0, 1, 1, 0)


def test_an_episode_whose_rest_the_actor_does_not_know_of_is_cut_and_not_granted_again(pair: Pair) -> None:
    receiver = pair.receiver(grant_resend_s=0.1)
    peer = pair.peer(receiver)
    peer.request(1)
    [ticket, *_] = peer.granted().tickets
    peer.request(0)
    record = words_of(unrolls_of(ticket, 2)[0])
    row = messages.Descriptor(0, ticket.ticket_id, 0, len(record), checksum_of(record))
    peer.say(messages.DescriptorBatch.of([row]), record.tobytes())
    [arrived] = drain(receiver, 1)
    heard: list[messages.Message] = []

    def is_cut() -> bool:
        peer.say(messages.Heartbeat((), {}))  # it holds nothing: the news of its failure has got lost
        heard.append(peer.hear())
        return receiver.counters()["cut"] == 1

    turns_until(is_cut)
    assert not any(isinstance(message, messages.Grant) for message in heard)
    receiver.evicted([arrived.unroll_id])
    assert receiver.counters()["evicted"] == 1
