"""Episodes as they arrive: whole, or in unrolls, of which the last one counts with what the others brought."""

import dataclasses

import numpy as np

from impala_llm.observability.meters import EpisodeWindow, Meters
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
