from typing import Any

import pytest

from impala_llm import rollout
from impala_llm.bench.frame import BenchError, run_bench
from impala_llm.gateway.agents import AgentPlayer
from impala_llm.rollout import EpisodeSpec
from impala_llm.trajectory import Trajectory

SMALL = {"rounds": "1", "episodes": "2", "tokens": "4", "hidden": "16", "processes": "1"}


@pytest.mark.system
def test_both_ways_play_the_same_episodes_and_take_turns_in_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark itself checks that their tokens agree."""
    begins: dict[str, str] = {}  # round -> way
    play_episode, play = rollout.play_episode, AgentPlayer.play

    async def direct(spec: EpisodeSpec, *rest: Any) -> Trajectory:
        begins.setdefault(spec.episode_id.split("-")[0], "direct")
        return await play_episode(spec, *rest)

    async def gateway(player: AgentPlayer, spec: EpisodeSpec, *rest: Any, training: bool) -> Trajectory:
        begins.setdefault(spec.episode_id.split("-")[0], "gateway")
        return await play(player, spec, *rest, training=training)

    monkeypatch.setattr(rollout, "play_episode", direct)
    monkeypatch.setattr(AgentPlayer, "play", gateway)
    result = run_bench("gateway", SMALL | {"rounds": "2"})
    assert set(result["figures"]) == {"gateway_over_direct", "own_over_direct"}
    assert all(value > 0 for value in result["figures"].values())
    assert [row["way"] for row in result["rows"]] == ["direct", "gateway"]
    first, second = (begins[str(number)] for number in (1, 2))  # round 0 does not count
    assert {first, second} == {"direct", "gateway"}


@pytest.mark.parametrize("option", [{"rounds": "0"}, {"episodes": "many"}])
def test_malformed_options_are_refused(option: dict[str, str]) -> None:
    with pytest.raises(BenchError, match=f"--{next(iter(option))} is"):
        run_bench("gateway", SMALL | option)
