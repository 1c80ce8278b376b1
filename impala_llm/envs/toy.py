"""Toy suites whose optimal and chance scores are known, for tests of learning that must end in minutes.

Both are answered with single letters, so that a byte-level tokenizer and a two-layer model learn them from nothing.
Of an action only the first character after leading blanks counts: an untrained policy then hits the right letter
about once in (size of its vocabulary) tries and not once in its square. Invariant: a task id alone fixes the whole
episode.
"""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from impala_llm.envs.base import Split
from impala_llm.settings import bounded

MAX_WORDS = len(string.ascii_lowercase)


class ParrotSuite:
    """One turn: the observation is `say b`, the right answer `b`.

    The best score is 1.0; a policy that draws one of the words evenly scores 1 / num_words.
    Tasks are interchangeable, so every split asks for every word.
    """

    @dataclass
    class Options:
        """Settings env.args.*"""

        num_words: int = bounded(4, least=2, most=MAX_WORDS)
        """Number of words, which are single letters."""
        num_tasks: int = bounded(1000, least=5)
        """Number of tasks; the last two fifths are validation and test."""

    def __init__(self, options: Options | None = None) -> None:
        """options: None: the defaults."""
        options = options or ParrotSuite.Options()
        self.name = "parrot"
        self.system_prompt = ""
        self.words = string.ascii_lowercase[: options.num_words]
        self._splits = _fifths(options.num_tasks)

    def tasks(self, split: Split) -> Sequence[int]:
        return self._splits[split]

    def session(self, training: bool) -> "ParrotSession":
        return ParrotSession(self)

    def signature(self, task_id: int) -> str:
        return self.answer(task_id)

    def script(self, noise: float, seed: int) -> "ToyScript":
        return ToyScript(self.words, noise, seed)

    def answer(self, task_id: int) -> str:
        """The letter that the task asks for; ValueError if there is no such task."""
        _check_task(task_id, self._splits)
        return self.words[task_id % len(self.words)]


class ParrotSession:
    """An episode of `ParrotSuite`."""

    def __init__(self, suite: ParrotSuite) -> None:
        self._suite = suite
        self._answer: str | None = None

    def reset(self, task_id: int) -> tuple[str, dict[str, Any]]:
        self._answer = self._suite.answer(task_id)
        return f"say {self._answer}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._answer is None:
            raise RuntimeError("no episode is under way: call reset(task_id) before step")
        score = float(spoken(action) == self._answer)
        info = {"score": score, "success": score == 1.0, "stats": {"right_turns": score}}
        self._answer = None
        return "", score, True, False, info


class CorridorSuite:
    """Several turns: each door shows a letter, and the way on is this letter or the one of the door before.

    The observation of turn t is `+b` (answer with this letter, `b`) or `-b` (answer with the letter that the PREVIOUS
    observation showed). The first is always `+`. The corridor goes on whether an answer was right or not and says
    nothing about it; the reward, the share of right answers, comes at the end.

    The best score is 1.0 and needs memory; a policy that draws one of the words evenly scores 1 / num_words. Half of
    the doors but the first are `-`, where the best policy without memory of earlier turns has to guess: with the
    defaults it scores 0.75. Tasks are drawn from random.Random(task_id).
    """

    @dataclass
    class Options:
        """Settings env.args.*"""

        num_words: int = bounded(4, least=2, most=MAX_WORDS)
        """Number of words, which are single letters."""
        num_turns: int = bounded(3, least=2)
        """Number of doors."""
        num_tasks: int = bounded(1000, least=5)
        """Number of tasks; the last two fifths are validation and test."""

    def __init__(self, options: Options | None = None) -> None:
        """options: None: the defaults."""
        options = options or CorridorSuite.Options()
        self.name = "corridor"
        self.system_prompt = ""
        self.words = string.ascii_lowercase[: options.num_words]
        self.num_turns = options.num_turns
        self._splits = _fifths(options.num_tasks)

    def tasks(self, split: Split) -> Sequence[int]:
        return self._splits[split]

    def session(self, training: bool) -> "CorridorSession":
        return CorridorSession(self)

    def signature(self, task_id: int) -> str:
        """The signs of the doors, such as `+-+`."""
        return "".join(sign for sign, _ in self.doors(task_id))

    def script(self, noise: float, seed: int) -> "ToyScript":
        return ToyScript(self.words, noise, seed)

    def doors(self, task_id: int) -> list[tuple[str, str]]:
        """(sign, letter) of each turn; ValueError if there is no such task."""
        _check_task(task_id, self._splits)
        rng = random.Random(task_id)
        letters = [rng.choice(self.words) for _ in range(self.num_turns)]
        signs = ["+", *(rng.choice("+-") for _ in range(self.num_turns - 1))]
        return list(zip(signs, letters, strict=True))

    def answers(self, task_id: int) -> list[str]:
        """The right letter of each turn."""
        doors = self.doors(task_id)
        return [letter if sign == "+" else doors[turn - 1][1] for turn, (sign, letter) in enumerate(doors)]


class CorridorSession:
    """An episode of `CorridorSuite`."""

    def __init__(self, suite: CorridorSuite) -> None:
        self._suite = suite
        self._doors: list[str] = []
        self._answers: list[str] = []
        self._turn = 0
        self._right = 0

    def reset(self, task_id: int) -> tuple[str, dict[str, Any]]:
        self._doors = [sign + letter for sign, letter in self._suite.doors(task_id)]
        self._answers = self._suite.answers(task_id)
        self._turn, self._right = 0, 0
        return self._doors[0], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._turn >= len(self._answers):
            raise RuntimeError("no episode is under way: call reset(task_id) before step")
        self._right += spoken(action) == self._answers[self._turn]
        self._turn += 1
        if self._turn < len(self._doors):
            return self._doors[self._turn], 0.0, False, False, {}
        score = self._right / len(self._answers)
        info = {
            "score": score,
            "success": self._right == len(self._answers),
            "stats": {"right_turns": float(self._right)},
        }
        return "", score, True, False, info


class ToyScript:
    """Right answers for both suites; with noise, so large a share of them is one of the words instead."""

    def __init__(self, words: str, noise: float, seed: int) -> None:
        self._words, self._noise = words, noise
        self._rng = random.Random(seed)
        self._shown = ""

    def act(self, observation: str, info: dict[str, Any]) -> str:
        last, self._shown = self._shown, observation[-1]
        if self._rng.random() < self._noise:
            return self._rng.choice(self._words)
        return last if observation.startswith("-") else self._shown


def spoken(action: str) -> str:
    """Letter of an action: its first character after leading blanks, or "" if there is none."""
    return action.lstrip()[:1]


def _fifths(num_tasks: int) -> dict[Split, range]:
    fifth = num_tasks // 5
    return {
        "train": range(0, num_tasks - 2 * fifth),
        "validation": range(num_tasks - 2 * fifth, num_tasks - fifth),
        "test": range(num_tasks - fifth, num_tasks),
    }


def _check_task(task_id: int, splits: dict[Split, range]) -> None:
    if not any(task_id in tasks for tasks in splits.values()):
        raise ValueError(f"task_id is {task_id}; this suite has the tasks 0 to {splits['test'][-1]}")
