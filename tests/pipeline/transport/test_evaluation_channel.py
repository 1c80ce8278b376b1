"""Evaluation tasks between actors' channels and a receiver, beside tickets and in spite of them."""

from collections.abc import Callable

import pytest

from impala_llm.pipeline.transport import messages
from impala_llm.pipeline.transport.actor_channel import ActorChannel
from impala_llm.pipeline.transport.evaluation_tasks import Evaluation
from impala_llm.pipeline.transport.messages import EvaluationFailed, EvaluationGrant, EvaluationResult
from impala_llm.pipeline.transport.receiver import Receiver
from tests.pipeline.pair import Pair, counter
from tests.pipeline.peers import Peer
from tests.pipeline.support import turns_until


class Player:
    """An actor that notes the evaluation tasks it has, and plays none until it is told to."""

    def __init__(self, channel: ActorChannel, want: int = 2) -> None:
        self.channel = channel
        self.grant = EvaluationGrant(0, 0, 0.0, ())
        channel.request_evaluation(want)

    def listen(self) -> EvaluationGrant:
        for event in self.channel.poll():
            if isinstance(event, EvaluationGrant):
                self.grant = event
        return self.grant

    def answer(self, task_id: int, score: float = 1.0, version: int | None = None) -> EvaluationResult:
        first = self.grant.min_version if version is None else version
        result = EvaluationResult(self.grant.evaluation_id, task_id, score, score == 1.0, 20, 2, first, first + 1)
        self.channel.evaluated(result)
        return result


def has(player: Player, count: int) -> Callable[[], bool]:
    return lambda: len(player.listen().task_ids) == count


def outcome(receiver: Receiver, *players: Player) -> Evaluation:
    ended: list[Evaluation] = []

    def has_ended() -> bool:
        for player in players:
            player.listen()
        ended.extend(filter(None, [receiver.evaluation()]))
        return bool(ended)

    turns_until(has_ended)
    return ended[0]


def test_an_evaluation_is_played_beside_tickets_and_touches_none(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    receiver = pair.receiver(version=4)
    player = Player(pair.actor(want=3))
    tickets = pair.tickets(player.channel, 3)
    before = receiver.counters()
    assert receiver.begin_evaluation([10, 11, 12], 0.0, 60.0) == 4 and receiver.is_evaluating
    turns_until(has(player, 2))
    assert (player.grant.min_version, player.grant.temperature, player.grant.task_ids) == (4, 0.0, (10, 11))
    results = [player.answer(10), player.answer(11, 0.0)]
    turns_until(lambda: player.listen().task_ids == (12,))
    player.channel.evaluation_failed(player.grant.evaluation_id, 12, "a lone surrogate \udcff" + "x" * 5000)
    turns_until(lambda: "a lone surrogate" in caplog.text)
    results.append(player.answer(12))
    ended = outcome(receiver, player)
    assert (ended.version, ended.num_tasks, ended.results) == (4, 3, tuple(results))
    assert not receiver.is_evaluating and receiver.evaluation() is None
    assert player.channel.held == tickets
    assert receiver.counters() == before, "neither tickets nor trajectories know of it"


def test_an_actor_that_asks_for_none_is_dealt_none(pair: Pair) -> None:
    """As one of a release that knows no evaluation."""
    receiver = pair.receiver()
    other = pair.actor("other")
    player = Player(pair.actor("player"), want=8)
    receiver.begin_evaluation([1, 2, 3], 0.0, 60.0)
    turns_until(has(player, 3))
    assert not any(isinstance(event, EvaluationGrant) for event in other.poll(0.05))


def test_the_tasks_of_an_actor_that_is_gone_are_played_by_another(pair: Pair) -> None:
    receiver = pair.receiver()
    first = Player(pair.actor("first"))
    receiver.begin_evaluation([1, 2], 0.0, 60.0)
    turns_until(has(first, 2))
    kept = first.answer(1)
    turns_until(has(first, 1))
    pair.actors.remove(first.channel)
    first.channel.close()
    second = Player(pair.actor("second"))
    turns_until(has(second, 1))
    played = second.answer(2, 0.5)
    assert outcome(receiver, second).results == (kept, played)


def test_what_comes_too_late_is_not_waited_for(pair: Pair) -> None:
    receiver = pair.receiver()
    player = Player(pair.actor())
    receiver.begin_evaluation([1, 2], 0.0, 0.2)
    turns_until(has(player, 2))
    result = player.answer(1)
    ended = outcome(receiver, player)
    assert (ended.num_tasks, ended.results) == (2, (result,))
    turns_until(has(player, 0))
    player.answer(2)
    turns_until(counter(receiver, "evaluation_unwanted"))
    receiver.begin_evaluation([1, 2], 0.0, 60.0)
    turns_until(has(player, 2))


def test_a_restarted_learner_has_its_own_evaluation_dealt_to_those_who_asked_the_one_before(pair: Pair) -> None:
    first = pair.receiver()
    player = Player(pair.actor())
    first.begin_evaluation([1, 2], 0.0, 60.0)
    turns_until(has(player, 2))
    stale = player.grant
    pair.receivers.remove(first)
    first.close()
    second = pair.receiver()
    second.begin_evaluation([3], 0.0, 60.0)
    turns_until(has(player, 1))
    assert player.grant.task_ids == (3,) and player.grant.evaluation_id != stale.evaluation_id
    player.channel.evaluated(EvaluationResult(stale.evaluation_id, 1, 1.0, True, 20, 2, 0, 0))
    turns_until(counter(second, "evaluation_unwanted"))
    result = player.answer(3)
    assert outcome(second, player).results == (result,)


def test_hostile_answers_are_counted_and_change_nothing(pair: Pair) -> None:
    receiver = pair.receiver(version=5)
    peer, player = Peer(receiver), Player(pair.actor(), want=1)
    receiver.begin_evaluation([1], 0.0, 60.0)
    turns_until(has(player, 1))
    known = player.grant.evaluation_id
    answers = [
        EvaluationResult(known, 1, 1.0, True, 1, 1, 5, 5),  # another actor's task
        EvaluationResult(known, -7, 1.0, True, 1, 1, 5, 5),  # no task
        EvaluationResult(known ^ 1, 1, 1.0, True, 1, 1, 5, 5),  # no evaluation
        EvaluationFailed(known, 1, ""),
    ]
    for answer in answers:
        peer.say(answer)
    turns_until(counter(receiver, "evaluation_unwanted", len(answers)))
    body = messages.encode(EvaluationResult(known, 1, 0.5, True, 1, 1, 5, 5))
    for spoiled in (float("nan"), 2.0):
        object.__setattr__(result := EvaluationResult(known, 1, 0.5, True, 1, 1, 5, 5), "score", spoiled)
        assert (frame := messages.encode(result)) != body
        peer.socket.send(frame)
    peer.say(EvaluationGrant(known, 0, 0.0, (1,)))  # only a learner says it
    turns_until(counter(receiver, "messages_malformed", 3))
    player.answer(1, version=4)  # older than asked for: played again
    turns_until(counter(receiver, "evaluation_unwanted", len(answers) + 1))
    twice = player.answer(1, 0.25)
    player.answer(1, 1.0)
    turns_until(counter(receiver, "evaluation_unwanted", len(answers) + 2))
    assert outcome(receiver, player).results == (twice,)
    peer.close()
