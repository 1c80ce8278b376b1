"""While the learner does not answer, an actor repeats the names of records, ever more rarely, and no records."""

from impala_llm.pipeline.shm.record import record_bytes
from impala_llm.pipeline.transport import messages
from impala_llm.pipeline.transport.actor_channel import ActorChannel
from impala_llm.pipeline.transport.learner_connection import ChannelTimes
from tests.pipeline.pair import ARENA_BYTES, Listener, Pair, drain
from tests.pipeline.support import contents, make_trajectory, turns_until


def test_a_record_that_is_not_acknowledged_travels_once_and_again_when_it_is_asked_for(listener: Listener) -> None:
    actor = ActorChannel(listener.endpoint, "actor", None, ARENA_BYTES, times=ChannelTimes(0.02, resend_s=0.0))
    sent = [make_trajectory(seed=seed) for seed in range(3)]
    for trajectory in sent:
        actor.send(trajectory)
    turns_until(lambda: listener.has_heard(10), actor)
    assert listener.records == [record_bytes(trajectory) for trajectory in sent]
    assert {sequence for offer, _ in listener.offers[4:] for sequence in offer.array[:, 0].tolist()} == {0, 1, 2}
    listener.offers.clear()
    listener.say(messages.RecordsWanted((1, 77)))
    turns_until(lambda: listener.has_heard(0) and bool(listener.records), actor)
    turns_until(lambda: listener.has_heard(10), actor)
    assert listener.records == [record_bytes(sent[1])]
    actor.close()


def test_what_is_not_acknowledged_is_named_ever_more_rarely(listener: Listener) -> None:
    now = 1000.0
    times = ChannelTimes(heartbeat_s=1.0, resend_s=5.0, monotonic=lambda: now)
    actor = ActorChannel(listener.endpoint, "actor", None, ARENA_BYTES, times=times)
    actor.send(make_trajectory())
    turns_until(lambda: listener.has_heard(1))
    for version in range(600):
        now += 1.0
        listener.say(messages.WeightsAnnounced(version))  # a sign of life each second, and no acknowledgement
        turns_until(lambda: bool(actor.poll()))
    actor.request(7)
    turns_until(lambda: listener.has_heard(0) and messages.TicketRequest(7) in listener.others)
    # At 0 s, and 5, 10, 20, 40 and 80 s after the one before, and a turn; from then on every 80 s.
    assert len(listener.offers) == 1 + 5 + 5
    actor.close()


def test_a_later_learner_asks_for_what_it_lacks(pair: Pair) -> None:
    first = pair.receiver(endpoint="tcp://127.0.0.1:*")
    actor = pair.actor(endpoint=first.endpoint, is_shared=False, want=3)
    sent = [make_trajectory(ticket, seed=i) for i, ticket in enumerate(pair.tickets(actor, 3))]
    actor.send(sent[0])
    turns_until(lambda: actor.num_unacknowledged == 0, actor)
    pair.receivers.remove(first)
    first.close()
    for trajectory in sent[1:]:
        actor.send(trajectory)  # to nobody
    second = pair.receiver(endpoint=first.endpoint)
    assert [contents(t) for t in drain(second, 3, actor)] == [contents(t) for t in sent]
    turns_until(lambda: actor.num_unacknowledged == 0, actor)
    assert second.counters()["duplicates"] == 0
