"""Games of TextWorld (extra `textworld`), made by its challenges: a task id is the seed of a game.

    python -m impala_llm.envs.textworld CHALLENGE SETTINGS SEED FILE

makes one. That takes seconds and draws from the library's global generator, so it is a process of its own. Games are
kept in a folder, and made once.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from impala_llm.envs.answers import first_line
from impala_llm.envs.base import Split
from impala_llm.envs.extras import needed
from impala_llm.envs.single_turn import ReferenceScript, Result, check_task, split_sizes
from impala_llm.processes.module_process import module_command, python_path
from impala_llm.settings import bounded

_DEFAULTS: dict[str, dict[str, Any]] = {
    "tw-cooking": {"recipe_seed": 0, "split": None},
    "tw-simple": {"rewards": "dense", "goal": "detailed", "test": False},
}
"""Settings without which a challenge makes no game, and which only the library's command line fills in or asks for."""


class TextWorldSuite:
    """Games of one challenge."""

    @dataclass
    class Options:
        """Settings env.args.*"""

        challenge: str = "tw-coin_collector"
        """tw-coin_collector | tw-treasure_hunter | tw-simple | tw-cooking."""
        settings: dict[str, Any] = field(default_factory=lambda: {"level": 1})
        """Settings of the challenge, such as env.args.settings.level=5. tw-cooking plays with recipe_seed=0 and
        split=null, tw-simple with rewards=dense, goal=detailed and test=false, unless they are given."""
        folder: str = "~/.cache/impala_llm/textworld"
        """Folder of the games."""
        show_actions: bool = True
        """Show the actions that are possible, at the end of each observation."""
        max_steps: int = bounded(50, least=1)
        """Actions of an episode at most; then it is cut."""
        num_train: int = bounded(50, least=1)
        """Games for training. Each takes seconds, once."""
        num_validation: int = bounded(10, least=1)
        """Games for evaluations inside of a run."""
        num_test: int = bounded(20, least=1)
        """Games for evaluation."""

    def __init__(self, options: Options) -> None:
        """Raises ValueError for a challenge that does not exist."""
        self.library = needed("textworld", "textworld")
        known = needed("textworld.challenges", "textworld").CHALLENGES
        if options.challenge not in known:
            raise ValueError(f"env.args.challenge={options.challenge} is none: choose one of {', '.join(known)}")
        self.name, self.options = f"textworld-{options.challenge}", options
        self.settings = _DEFAULTS.get(options.challenge, {}) | options.settings
        self.system_prompt = "Answer with one action, such as: go north"
        self._splits = split_sizes(options.num_train, options.num_validation, options.num_test)
        facts = ("score", "max_score", "won", "lost", "admissible_commands", "policy_commands")
        self.wanted = self.library.EnvInfos(**dict.fromkeys(facts, True))

    def tasks(self, split: Split) -> Sequence[int]:
        return self._splits[split]

    def session(self, training: bool) -> "TextWorldSession":
        return TextWorldSession(self)

    def signature(self, task_id: int) -> str:
        """The challenge."""
        return self.options.challenge

    def script(self, noise: float, seed: int) -> ReferenceScript:
        """The library's shortest way from where the game stands; with noise, any of the possible actions."""
        return ReferenceScript(noise, seed, lambda rng, info: rng.choice(info["possible"]))

    def game(self, task_id: int) -> Path:
        """Return the file of a game, made where it is missing. Takes seconds. ValueError where it cannot be made."""
        check_task(task_id, self._splits)
        settings = json.dumps(self.settings, sort_keys=True)
        words = "-".join(f"{key}_{value}" for key, value in sorted(self.settings.items()))
        path = Path(self.options.folder).expanduser() / f"{self.options.challenge}-{words}-{task_id}.z8"
        if path.is_file():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [*module_command(__name__), self.options.challenge, settings, str(task_id), str(path)]
        made = subprocess.run(command, env={**os.environ, **python_path()}, capture_output=True, text=True)
        if made.returncode != 0:
            reason = (made.stderr.strip().splitlines() or ["it was killed"])[-1]
            raise ValueError(f"env.args.settings={settings}: {self.options.challenge} cannot make a game: {reason}")
        return path


class TextWorldSession:
    """An episode of `TextWorldSuite`. The reward is the change of the game's score, divided by its largest."""

    def __init__(self, suite: TextWorldSuite) -> None:
        self._suite = suite
        self._game: Any = None
        self._steps = 0
        self._score = 0.0

    async def reset(self, task_id: int) -> tuple[str, dict[str, Any]]:
        path = await asyncio.to_thread(self._suite.game, task_id)
        self.close()
        self._game = self._suite.library.start(str(path), request_infos=self._suite.wanted)
        self._steps, self._score = 0, 0.0
        state = self._game.reset()
        return self._shown(state), _for_script(state)

    def step(self, action: str) -> Result:
        self._steps += 1
        command = first_line(action)
        state, _, ended = self._game.step(command)
        score = min(max(float(state.score) / max(float(state.max_score), 1.0), 0.0), 1.0)
        reward, self._score = score - self._score, score
        truncated = not ended and self._steps >= self._suite.options.max_steps
        if not (ended or truncated):
            return self._shown(state), reward, False, False, _for_script(state)
        stats = {"steps": float(self._steps), "lost": float(bool(state.lost))}
        info = {"score": score, "success": bool(state.won), "stats": stats}
        return self._shown(state), reward, bool(ended), truncated, info

    def close(self) -> None:
        if self._game is not None:
            self._game.close()

    def _shown(self, state: Any) -> str:
        lines = [line.rstrip() for line in state.feedback.strip().splitlines()]
        if self._suite.options.show_actions:
            lines.append(f"Actions: {', '.join(state.admissible_commands)}")
        return "\n".join(lines)


def _for_script(state: Any) -> dict[str, Any]:
    """Info for `TextWorldSuite.script`: the next action of the library's way to win, None where it knows none, and all
    that are possible."""
    return {"reference": next(iter(state.policy_commands or ()), None), "possible": state.admissible_commands}


def make_game(challenge: str, settings: dict[str, Any], seed: int, path: Path) -> None:
    """Make the game of a seed. It appears at `path` whole, or not at all."""
    textworld = needed("textworld", "textworld")
    options = textworld.GameOptions()
    options.seeds = seed
    game = needed("textworld.challenges", "textworld").CHALLENGES[challenge][1](settings, options)
    options.path = str(path.with_name(f"{os.getpid()}-{path.name}"))
    written = Path(needed("textworld.generator", "textworld").compile_game(game, options))
    written.with_suffix(".ni").unlink(missing_ok=True)
    written.with_suffix(".json").replace(path.with_suffix(".json"))
    written.replace(path)


if __name__ == "__main__":
    make_game(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
