"""Games of TextArena in which the other seats move again and again."""

import asyncio
from typing import Any

import pytest

from impala_llm.config import load
from impala_llm.envs import contract, make_suite
from impala_llm.envs.contract import EnvironmentFault

HANGS = ["env=textarena", "env.args.id=Briscola-v0", "env.args.num_players=3", "env.args.seat=2"]
"""No move of the random opponent is valid there, and the game asks the seat whose move is invalid again."""


def suite() -> Any:
    pytest.importorskip("textarena", reason="textarena is not installed")
    return make_suite(load(["model=scratch", *HANGS]).env)


def test_opponents_whose_moves_are_never_valid_end_the_episode() -> None:
    game = suite()
    with pytest.raises(EnvironmentFault, match=r"opponent=random has made \d+ moves and the policy none"):
        asyncio.run(contract.reset(game.session(training=True), 0, game.name))


def test_other_episodes_go_on_and_time_limits_hold_while_opponents_move() -> None:
    game = suite()

    async def begin() -> None:
        async with asyncio.timeout(0.001):
            await contract.reset(game.session(training=True), 0, game.name)

    with pytest.raises(TimeoutError):
        asyncio.run(begin())
