"""Episodes as they arrive: whole, or in unrolls, of which the last one counts with what the others brought."""

import dataclasses
import uuid
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from impala_llm.config import load
from impala_llm.learner import Learner
from impala_llm.learning.batch_source import Batch, Intake
from impala_llm.learning.checkpoints.resume import Start
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.observability.meters import EpisodeWindow, Meters
from impala_llm.replay import OldestFirst, ReplayBuffer
from impala_llm.trajectory import Trajectory
from tests.pipeline.support import make_trajectory


class QuietReceiver:
    num_received = num_failed = 0.0

    def __init__(self, counted: Collection[int] = ()) -> None:
        self.counted = counted
        self.noted: list[int] = []

    def note_counted(self, unroll_ids: Iterable[int]) -> None:
        self.noted += unroll_ids

    @property
    def counters_at_start(self) -> dict[str, float]:
        return {**self.counters(), "received": 0.0}

    def counters(self) -> dict[str, float]:
        counters = dict.fromkeys([*Meters.TOTALS, "actors", "open", "arena_fill", "staleness_in_flight"], 0.0)
        return {**counters, "received": self.num_received, "failed": self.num_failed}

    def actor_stats(self) -> dict[str, dict[str, float]]:
        return {}

    def mean_actor_stats(self) -> dict[str, dict[str, float]]:
        return {}


def intake(received: Sequence[Trajectory] = (), evicted: Sequence[Trajectory] = ()) -> Intake:
    return Intake(tuple(received), tuple(evicted), 0, 0, None, ReplayBuffer(OldestFirst(), 1, 1).stats())


def test_an_episode_that_an_earlier_learner_has_counted_counts_no_more() -> None:
    old, new = (dataclasses.replace(make_trajectory(), ticket_id=ticket) for ticket in (3, 4))
    meters = Meters(receiver := QuietReceiver(counted={3}), None)  # type: ignore[arg-type]
    meters.observe(intake(received=[old, new]), Batch((), (), (), 1.0), version=3)
    assert meters.log.flush()["rollout/episodes"] == 1
    assert receiver.noted == [3, 4], "for the learner after this one"


def test_an_episode_counts_once_and_with_all_of_its_unrolls() -> None:
    meters = Meters(QuietReceiver(), None)  # type: ignore[arg-type]
    whole = make_trajectory(seed=1, num_tokens=40)
    unrolls = [
        dataclasses.replace(make_trajectory(seed=2 + i, unroll_index=i, continues=i < 2), ticket_id=7) for i in range(3)
    ]
    unrolls[:2] = [dataclasses.replace(t, score=0.0, stats={}) for t in unrolls[:2]]
    never_ending = dataclasses.replace(make_trajectory(continues=True), ticket_id=8)
    for t in (unrolls[0], whole, never_ending, unrolls[1], unrolls[2]):
        meters.observe(intake(received=[t]), Batch((), (), (), 1.0), version=3)
    found = meters.log.flush()
    assert found["rollout/episodes"] == 2
    assert found["rollout/score"] == 0.5
    assert found["rollout/turns"] == (2 + 3 * 2) / 2
    assert found["rollout/action_tokens"] == (whole.num_action_tokens + sum(t.num_action_tokens for t in unrolls)) / 2
    reward = float(whole.rewards.sum()) + sum(float(t.rewards.sum()) for t in unrolls)
    assert np.isclose(found["rollout/reward"], reward / 2)


def test_the_score_of_a_window_covers_the_latest_steps_that_hold_enough_episodes() -> None:
    window = EpisodeWindow(size=10)
    assert window.add({}) == {}
    steps = [(1, 1.0), (4, 0.5), (8, 0.25), (3, 0.0)]
    for count, score in steps:
        found = window.add({"rollout/episodes": count, "rollout/score": score, "rollout/success_rate": score / 2})
    # 8 + 3 are enough: of the first two steps nothing is left.
    assert found == {
        "rollout/window_score": 8 * 0.25 / 11,
        "rollout/window_success_rate": 8 * 0.125 / 11,
        "rollout/window_episodes": 11,
    }
    assert window.add({}) == found


def test_what_is_too_old_or_dropped_is_counted_by_length() -> None:
    def old_in(t: Trajectory, num_old: int) -> Trajectory:
        """A trajectory whose first so many action tokens are of version 1, the others of version 3."""
        versions = np.where(t.action_mask, 3, t.versions).astype(np.int32)
        versions[np.flatnonzero(t.action_mask)[:num_old]] = 1
        return dataclasses.replace(t, versions=versions)

    short, long = make_trajectory(num_tokens=40, version=3), make_trajectory(num_tokens=300)
    batch = Batch((short, old_in(long, 3)), (1.0, 1.0), (0, 1), 1.0)
    dropped = intake(evicted=[old_in(long, 0)])  # for want of room
    meters = Meters(QuietReceiver(), None, max_staleness=2)  # type: ignore[arg-type]
    meters.observe(dropped, batch, version=5)  # the batch was trained on from version 4
    found = meters.log.flush()
    assert found["buffer/lost_tokens_below_256"] == 0.0
    num_long = long.num_action_tokens
    assert found["buffer/lost_tokens_below_1k"] == pytest.approx((3 + num_long) / (2 * num_long))
    assert found["buffer/lost_tokens_share"] == pytest.approx((3 + num_long) / (2 * num_long + short.num_action_tokens))
    assert "buffer/lost_tokens_below_4k" not in found


@pytest.mark.parametrize(("algorithm", "share"), [("dpo", 0.0), ("group_relative", 1.0)])
def test_old_tokens_are_lost_where_they_do_not_teach(tmp_path: Path, algorithm: str, share: float) -> None:
    words = ["experiment=toy", f"algorithm={algorithm}", "algorithm.max_staleness=2", f"run.dir={tmp_path}"]
    config = load([*words, f"run.name=test-{uuid.uuid4().hex[:12]}", "run.terminal=false"])
    with ExitStack() as stack:
        meters = Learner(config, Ranks("cpu"), stack, Start(), Mock(number=0)).meters
        batch = Batch((make_trajectory(version=1),), (1.0,), (0,), 1.0)
        meters.observe(intake(), batch, version=5)  # the batch was trained on from version 4
        assert meters.log.flush()["buffer/lost_tokens_share"] == share


def test_what_actors_bring_while_the_learner_starts_is_counted_in_its_first_step() -> None:
    receiver = QuietReceiver()
    receiver.num_received = 5.0
    meters = Meters(receiver, Ranks("cpu"))  # type: ignore[arg-type]
    receiver.num_received = 32.0
    meters.observe(intake(), Batch((), (), (), 1.0), 1)
    assert meters.gather()["pipeline/received"] == 32
    receiver.num_received = 40.0
    meters.observe(intake(), Batch((), (), (), 1.0), 2)
    assert meters.gather()["pipeline/received"] == 8


def test_a_metric_that_only_another_release_knows_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Told(QuietReceiver):
        def actor_stats(self) -> dict[str, dict[str, float]]:
            strange = {"actor/of_tomorrow": 1.0, "": 1.0, "env/": 2.0, "rollout/episodes": 5.0, "learner/version": 1e9}
            return {"actor-0": strange | {"actor/idle_share": 0.25}}

    meters = Meters(Told(), Ranks("cpu"))  # type: ignore[arg-type]
    meters.observe(intake(), Batch((), (), (), 1.0), 3)
    found = meters.gather()
    assert found["actor/idle_share"] == 0.25 and found["learner/version"] == 3
    assert "actor/of_tomorrow" in caplog.text


def test_an_engine_that_was_idle_when_the_step_ended_counts_over_the_whole_step() -> None:
    class Idle(QuietReceiver):
        def actor_stats(self) -> dict[str, dict[str, float]]:
            return {"actor-0": {"actor/idle_share": 1.0, "actor/generated_tokens_per_s": 0.0, "weights/pause_s": 0.5}}

        def mean_actor_stats(self) -> dict[str, dict[str, float]]:
            return {"actor-0": {"actor/idle_share": 0.25, "actor/generated_tokens_per_s": 90.0, "weights/pause_s": 9.0}}

    meters = Meters(Idle(), Ranks("cpu"))  # type: ignore[arg-type]
    meters.observe(intake(), Batch((), (), (), 1.0), 3)
    found = meters.gather()
    assert found["actor/idle_share"] == 0.25 and found["actor/generated_tokens_per_s"] == 90.0
    assert found["weights/pause_s"] == 0.5  # of the last change of weights


def test_tokens_and_episodes_of_the_whole_run_go_on_where_an_earlier_learner_was() -> None:
    meters = Meters(QuietReceiver(), Ranks("cpu"))  # type: ignore[arg-type]
    meters.go_on_from({"progress/tokens": 1000.0, "progress/episodes": 10.0, "loss/policy": 3.0})
    for step in (1, 2):
        meters.observe(intake(received=[make_trajectory(), make_trajectory()]), Batch((), (), (), 1.0), step)
        meters.finish_step({"time/step_s": 2.0}, num_tokens=300)
        found = meters.gather()
        assert (found["learner/trained_tokens"], found["learner/trained_tokens_per_s"]) == (300.0, 150.0)
        assert (found["progress/tokens"], found["progress/episodes"]) == (1000.0 + 300 * step, 10.0 + 2 * step)


@pytest.mark.parametrize(
    ("failed", "finished", "said"),
    [
        ([7, 0, 0], 2, ""),  # few
        ([1] * 9, 2, "8 of 24 in the last 8 updates (33%), from which nothing is learned"),
        ([0] * 40 + [50], 2, "50 of 90 in the last 20 updates (56%)"),
        ([3] + [0] * 19 + [6], 2, ""),  # the first three are too long ago
        ([0] * 19 + [10], 25, ""),  # 10 of 510: less than 2 %
        ([0] * 19 + [11], 25, "11 of 511 in the last 20 updates (2%)"),
    ],
)
def test_many_episodes_that_fail_are_told(
    failed: list[int], finished: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = QuietReceiver()
    meters = Meters(receiver, Ranks("cpu"))  # type: ignore[arg-type]
    for step, number in enumerate(failed, 1):
        receiver.num_failed += number
        meters.observe(intake(received=[make_trajectory()] * finished), Batch((), (), (), 1.0), step)
        meters.finish_step({"time/step_s": 2.0}, num_tokens=300)
        meters.gather()
    assert said in caplog.text and caplog.text.count("MANY EPISODES FAIL") == bool(said)


@pytest.mark.parametrize(
    ("in_file", "expected"), [({}, (300.0, 1.0)), ({"progress/tokens": 900.0, "progress/episodes": 7.0}, (900.0, 7.0))]
)
def test_tokens_and_episodes_of_the_whole_run_are_in_a_checkpoint(
    in_file: dict[str, float], expected: tuple[float, float]
) -> None:
    """The file of metrics may be lost, or lack updates; where it is of a later update it counts."""
    before, meters = (Meters(QuietReceiver(), Ranks("cpu")) for _ in range(2))  # type: ignore[arg-type]
    before.observe(intake(received=[make_trajectory()]), Batch((), (), (), 1.0), 1)
    before.finish_step({"time/step_s": 2.0}, num_tokens=300)
    before.gather()
    state = before.state_dict()
    meters.go_on_from(in_file)
    meters.load_state_dict(state)
    found = meters.gather()
    assert (found["progress/tokens"], found["progress/episodes"]) == expected
    meters.load_state_dict({name: value for name, value in state.items() if name != "progress"})


def test_the_speed_of_several_ranks_is_that_of_all_together() -> None:
    class TwoRanks:
        """The second one to gather gets the states of both."""

        world_size, is_main = 2, True

        def __init__(self) -> None:
            self.states: list[dict[str, list[float]]] = []

        def gather(self, state: dict[str, list[float]]) -> list[dict[str, list[float]]]:
            self.states.append(state)
            return self.states

    ranks: Any = TwoRanks()
    for num_tokens in (300, 500):
        meters = Meters(QuietReceiver(), ranks)  # type: ignore[arg-type]
        meters.finish_step({"time/step_s": 2.0}, num_tokens)
        found = meters.gather()
    assert (found["learner/trained_tokens"], found["learner/trained_tokens_per_s"]) == (800.0, 400.0)
