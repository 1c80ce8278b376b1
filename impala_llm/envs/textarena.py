"""Games of TextArena (extra `textarena`): the policy has one seat, scripts or frozen policies have the others.

The games draw from Python's global generator; each episode has a state of it of its own.
"""

import asyncio
import inspect
import itertools
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

from impala_llm.envs.answers import after_thoughts
from impala_llm.envs.base import Split
from impala_llm.envs.extras import needed
from impala_llm.envs.own_random import OwnRandom
from impala_llm.envs.shared_options import SplitSizes
from impala_llm.envs.single_turn import Result, check_task
from impala_llm.plugs import OPPONENTS, check_call, load
from impala_llm.settings import bounded

_SPEAKER = re.compile(r"^\[[^\[\]\n]+\] (?=\S)")
_BRACKETED = re.compile(r"\[[^\[\]\n]+\]")
_MOST_OPPONENT_MOVES = 2000
"""Moves of the other seats, without one of the policy's, after which a game is given up: some games let a seat whose
move is invalid move again and again."""


class Opponent(Protocol):
    """Plays a seat of one episode."""

    def act(self, observation: str) -> str | Awaitable[str]:
        """The move for what its seat has been told since its last move."""
        ...


class RandomPlayer:
    """Writes one of the moves in brackets, such as [3], that its latest message names."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._moves: list[str] = []

    def act(self, observation: str, _info: object = None) -> str:
        for line in observation.splitlines():
            # The latest line with moves counts.
            self._moves = _BRACKETED.findall(_SPEAKER.sub("", line)) or self._moves
        return self._random.choice(self._moves or ["[0]"])


class TextArenaSuite:
    """One game by its id. A task id is the seed of the game, and decides the seat where none is set."""

    @dataclass
    class Options(SplitSizes):
        """Settings env.args.*"""

        id: str = "TicTacToe-v0"
        """Id of the game."""
        kwargs: dict[str, Any] = field(default_factory=dict)
        """Arguments of textarena.make."""
        num_players: int = bounded(2, least=1)
        """Seats; 1 for games such as GuessTheNumber-v0."""
        seat: int | None = bounded(None, least=0)
        """Seat of the policy; null: each in turn, by the task."""
        opponent: str = "random"
        """Player of the other seats: random | policy (a frozen one) | your own, as module:Class, called for every
        episode with a seed and env.args.opponent_args; its method act(observation) returns a move."""
        opponent_args: dict[str, Any] = field(default_factory=dict)
        """Arguments of the opponent; of a frozen policy its directory, env.args.opponent_args.path."""
        max_turns: int = bounded(100, least=1)
        """Moves of the policy at most; then the episode is cut."""

    def __init__(self, options: Options) -> None:
        """Raises ValueError for a game that does not exist, or a seat or a number of players that it does not have."""
        self.library = needed("textarena", "textarena")
        if options.seat is not None and options.seat >= options.num_players:
            raise ValueError(f"env.args.seat={options.seat}: with num_players={options.num_players} seats begin at 0")
        self.name, self.system_prompt, self.options = f"textarena-{options.id}", "", options
        self._splits = options.splits()
        self.opponent = load(OPPONENTS, options.opponent)
        check_call(OPPONENTS, options.opponent, self.opponent, seed=0, **options.opponent_args)
        if options.opponent == "policy":
            _check_policy(**options.opponent_args)
        game = self.make()  # an id that does not exist is refused here
        try:
            with OwnRandom(0).drawn():
                game.reset(num_players=options.num_players, seed=0)
        except Exception as error:  # of the library, whose games check it alone
            raise ValueError(
                f"env.args.id={options.id} does not begin with env.args.num_players={options.num_players}: {error}"
            ) from error

    def tasks(self, split: Split) -> Sequence[int]:
        return self._splits[split]

    def session(self, training: bool) -> "TextArenaSession":
        return TextArenaSession(self)

    def signature(self, task_id: int) -> str:
        """The seat."""
        return f"seat {self.seat(task_id)}"

    def script(self, noise: float, seed: int) -> RandomPlayer:
        """A player of random moves, whatever the noise: of its games keep those that were won (`sft.min_score`)."""
        return RandomPlayer(seed)

    def baselines(self) -> dict[str, Callable[[], RandomPlayer]]:
        """Random moves."""
        seeds = itertools.count()
        return {"random moves": lambda: RandomPlayer(next(seeds))}

    def seat(self, task_id: int) -> int:
        """Seat of the policy in a game."""
        check_task(task_id, self._splits)
        return task_id % self.options.num_players if self.options.seat is None else self.options.seat

    def make(self) -> Any:
        """Make a game without the wrappers that repeat its history with every observation."""
        game = self.library.make(self.options.id, **self.options.kwargs)
        while isinstance(game, self.library.Wrapper):
            game = game.env
        return game


class TextArenaSession:
    """An episode of `TextArenaSuite`.

    Rewards come at the end: those of the game, from -1 to 1. The score is the reward where there is one seat, else 0
    for a loss, 1/2 for a draw and 1 for a win.
    """

    def __init__(self, suite: TextArenaSuite) -> None:
        self._suite = suite
        self._game: Any = None
        self._random = OwnRandom(0)
        self._players: dict[int, Opponent] = {}
        self._seat = self._turns = 0
        self._done = False

    async def reset(self, task_id: int) -> tuple[str, dict[str, Any]]:
        options = self._suite.options
        self._seat, self._turns, self._done = self._suite.seat(task_id), 0, False
        others = [seat for seat in range(options.num_players) if seat != self._seat]
        self._players = {
            seat: self._suite.opponent(seed=task_id * options.num_players + seat, **options.opponent_args)
            for seat in others
        }
        self._random = OwnRandom(task_id)
        with self._random.drawn():
            self._game = self._suite.make()
            self._game.reset(num_players=options.num_players, seed=task_id)
        return await self._until_own_turn(), {}

    async def step(self, action: str) -> Result:
        self._turns += 1
        self._move(after_thoughts(action))
        observation = await self._until_own_turn()
        truncated = not self._done and self._turns >= self._suite.options.max_turns
        if not (self._done or truncated):
            return observation, 0.0, False, False, {}
        rewards, facts = self._game.close() if self._done else ({}, {})
        is_alone = self._suite.options.num_players == 1
        reward = (rewards or {}).get(self._seat, 0.0)
        # Some games of the library give the reason as the reward where a move is invalid: Countdown, Cryptarithm.
        reward = float(reward) if isinstance(reward, Real) else float(is_alone) - 1.0
        score = min(max(reward if is_alone else (reward + 1) / 2, 0.0), 1.0)
        stats = {"turns": float(self._turns), "lost_by_invalid_move": float(_is_invalid(facts, self._seat))}
        info = {"score": score if self._done else 0.0, "success": self._done and score == 1.0, "stats": stats}
        return observation, reward, self._done, truncated, info

    def _move(self, action: str) -> None:
        move = action if "[" in action and "]" in action else f"[{action.strip()}]"
        with self._random.drawn():
            self._done, _ = self._game.step(action=move)

    async def _until_own_turn(self) -> str:
        """Let the others play. Returns what the policy's seat has been told. Raises ValueError where they never end."""
        for _ in range(_MOST_OPPONENT_MOVES):
            with self._random.drawn():
                seat, messages = self._game.get_observation()
            told = self._written(seat, messages)
            if seat == self._seat or self._done:
                return told
            await asyncio.sleep(0)  # other episodes, and the time limit of this one, wait for the event loop
            answer = self._players[seat].act(told)
            self._move(after_thoughts(await answer if inspect.isawaitable(answer) else answer))
        raise ValueError(
            f"env.args.opponent={self._suite.options.opponent} has made {_MOST_OPPONENT_MOVES} moves and the policy "
            "none; they may all be invalid: choose another opponent, or another game (env.args.id)"
        )

    def _written(self, seat: int, messages: Any) -> str:
        """Messages as text, without the seat's own moves, which it knows."""
        if isinstance(messages, str):
            return messages
        names, own = self._game.state.role_mapping, self._suite.library.ObservationType.PLAYER_ACTION
        return "\n".join(
            f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in messages
            if not (sender == seat and kind == own)
        )


def _check_policy(path: str, max_new_tokens: int = 32, max_length: int = 4096, **_: Any) -> None:
    """Raise ValueError for arguments of a frozen policy with which no episode would begin."""
    key = "env.args.opponent_args"
    if not (Path(path).expanduser() / "config.json").is_file():
        raise ValueError(f"{key}.path={path} has no config.json: give the directory of a policy")
    if max_length <= max_new_tokens:
        raise ValueError(f"{key}.max_length={max_length}: it must be above max_new_tokens={max_new_tokens}")


def _is_invalid(facts: Any, seat: int) -> bool:
    return bool(facts.get(seat, {}).get("invalid_move", False)) if isinstance(facts, dict) else False
