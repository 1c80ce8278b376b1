"""Episodes as they arrive: whole, or in unrolls, of which the last one counts with what the others brought."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from impala_llm.learning.feed import Batch
from impala_llm.observability.meters import EpisodeWindow, Meters
from impala_llm.replay import OldestFirst, ReplayBuffer
from tests.pipeline.support import make_trajectory


class NoReceiver:
    def counters(self) -> dict[str, float]:
        return {}


def test_an_episode_counts_once_and_with_all_of_its_unrolls() -> None:
    meters = Meters(NoReceiver(), None)  # type: ignore[arg-type]
    whole = make_trajectory(seed=1, num_tokens=40)
    unrolls = [
        dataclasses.replace(make_trajectory(seed=2 + i, unroll_index=i, continues=i < 2), ticket_id=7) for i in range(3)
    ]
    unrolls[:2] = [dataclasses.replace(t, score=0.0, stats={}) for t in unrolls[:2]]
    never_ending = dataclasses.replace(make_trajectory(continues=True), ticket_id=8)
    for t in (unrolls[0], whole, never_ending, unrolls[1], unrolls[2]):
        meters._observe_arrival(t)
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


def test_a_figure_that_only_another_release_knows_is_counted_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Told(NoReceiver):
        def counters(self) -> dict[str, float]:
            return {**dict.fromkeys([*Meters.TOTALS, "actors", "open", "arena_fill", "staleness_in_flight"], 0.0)}

        def actor_stats(self) -> dict[str, dict[str, float]]:
            return {"actor-0": {"actor/of_tomorrow": 1.0, "actor/idle_share": 0.25, "": 1.0, "env/": 2.0}}

    meters = Meters(Told(), None)  # type: ignore[arg-type]
    feed = SimpleNamespace(received=[], evicted=[], num_yielded=0, buffer=ReplayBuffer(OldestFirst(), 1, 1))
    meters.observe(feed, Batch((), (), (), 1.0), 3)  # type: ignore[arg-type]
    found = meters.log.flush()
    assert found["actor/idle_share"] == 0.25
    assert found["pipeline/unknown_figures"] == 3
    assert "actor/of_tomorrow" in caplog.text
