"""Environments of Gymnasium (extra `gymnasium`) that can be read and answered as text.

The observation is the environment's own where that is a text, else what it renders in the mode `ansi`. The action is
the answer where the environment takes a text; of a discrete action the answer holds the number or the name.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from impala_llm.envs.answers import after_thoughts
from impala_llm.envs.base import Split
from impala_llm.envs.extras import needed
from impala_llm.envs.own_random import OwnRandom
from impala_llm.envs.shared_options import ScoreRange, SplitSizes
from impala_llm.envs.single_turn import Result, check_task
from impala_llm.settings import bounded

_COLOURED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m")


class GymnasiumSuite:
    """One environment by its id. A task id is the seed of the reset."""

    @dataclass
    class Options(ScoreRange, SplitSizes):
        """Settings env.args.*"""

        id: str = "FrozenLake-v1"
        """Id of the environment; `my_module:MyEnv-v0` imports the module that registers it."""
        kwargs: dict[str, Any] = field(default_factory=dict)
        """Arguments of gymnasium.make, such as env.args.kwargs.is_slippery=false."""
        actions: list[str] = field(default_factory=list)
        """Names of discrete actions, in the order of their numbers, such as [left,down,right,up]."""
        instructions: str = ""
        """Text before the first observation. Empty: a line with the actions, where they are discrete."""
        max_steps: int = bounded(100, least=1)
        """An episode is cut after so many actions, those that cannot be read included."""

    def __init__(self, options: Options) -> None:
        """Raises ValueError for an environment that does not exist, or has no text."""
        options.check_range()
        self._library = needed("gymnasium", "gymnasium")
        self.name, self.system_prompt, self.options = f"gymnasium-{options.id}", "", options
        self._splits = options.splits()
        try:
            env = self._library.make(options.id, **options.kwargs)
        except self._library.error.Error as error:
            raise ValueError(f"env.args.id={options.id} cannot be made: {error}") from error
        spaces = self._library.spaces
        self._is_text = isinstance(env.observation_space, spaces.Text)
        self._is_rendered = not self._is_text and "ansi" in env.metadata.get("render_modes", ())
        self.num_actions: int | None = None
        self.first = 0
        if isinstance(env.action_space, spaces.Discrete):
            self.num_actions, self.first = int(env.action_space.n), int(env.action_space.start)
        takes_text = isinstance(env.action_space, spaces.Text)
        env.close()
        if not (self._is_text or self._is_rendered):
            raise ValueError(f"env.args.id={options.id} has no text: neither its observation nor a render mode `ansi`")
        if self.num_actions is None and not takes_text:
            raise ValueError(f"env.args.id={options.id} takes neither a discrete action nor a text: wrap it")
        if options.actions and len(options.actions) != self.num_actions:
            raise ValueError(f"env.args.actions has {len(options.actions)} names: {self.num_actions} are needed")
        names = [name.lower() for name in options.actions]  # as answers are read
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"env.args.actions has {twice[0]!r} twice: give each action a name of its own")
        numbers = {str(k): k for k in range(self.first, self.first + (self.num_actions or 0))}
        self.actions = [*options.actions] or [*numbers]
        self._choices = numbers | {name.lower(): k for k, name in enumerate(self.actions, self.first)}
        longest_first = sorted(map(re.escape, self._choices), key=len, reverse=True)
        self._choice = re.compile(rf"(?<![\w-])(?:{'|'.join(longest_first)})(?!\w)")

    def tasks(self, split: Split) -> Sequence[int]:
        return self._splits[split]

    def session(self, training: bool) -> "GymnasiumSession":
        return GymnasiumSession(self)

    def signature(self, task_id: int) -> str:
        """The id of the environment."""
        return self.options.id

    def make(self, task_id: int) -> Any:
        """Make the environment of a task."""
        check_task(task_id, self._splits)
        mode = {"render_mode": "ansi"} if self._is_rendered else {}
        return self._library.make(self.options.id, **{**self.options.kwargs, **mode})

    def shown(self, env: Any, observation: Any) -> str:
        """An observation as text. What a rendering colours, mostly the agent's place, stands in brackets."""
        return str(observation) if self._is_text else _COLOURED.sub(r"[\1]", str(env.render())).strip("\n")

    def action(self, text: str, env: Any) -> Any:
        """The action that an answer holds: None where there is none."""
        if self.num_actions is None:
            return text if env.action_space.contains(text) else None
        found = self._choice.search(text.lower())
        return self._choices[found.group()] if found else None


class GymnasiumSession:
    """An episode of `GymnasiumSuite`. `info["stats"]` counts steps, and invalid_actions, which change nothing."""

    def __init__(self, suite: GymnasiumSuite) -> None:
        self._suite = suite
        self._env: Any = None
        self._random = OwnRandom(0)
        self._steps = self._invalid = 0
        self._return = 0.0

    def reset(self, task_id: int) -> tuple[str, dict[str, Any]]:
        self._random = OwnRandom(task_id)
        self._steps, self._invalid, self._return = 0, 0, 0.0
        with self._random.drawn():
            self.close()
            self._env = self._suite.make(task_id)
            observation, _ = self._env.reset(seed=task_id)
            text = self._suite.shown(self._env, observation)
        options = self._suite.options
        names = f"Actions: {', '.join(self._suite.actions)}." if self._suite.actions else ""
        return "\n".join(filter(None, (options.instructions or names, text))), {}

    def step(self, action: str) -> Result:
        options = self._suite.options
        self._steps += 1
        chosen = self._suite.action(after_thoughts(action), self._env)
        reward, terminated, truncated = 0.0, False, False
        if chosen is None:
            self._invalid += 1
            expected = f"one of {', '.join(self._suite.actions)}" if self._suite.actions else "another text"
            text = f"This is no action: {expected} is expected."
        else:
            with self._random.drawn():
                observation, reward, terminated, truncated, _ = self._env.step(chosen)
                text = self._suite.shown(self._env, observation)
        reward = float(reward)
        self._return += reward
        truncated = bool(truncated) or self._steps >= options.max_steps
        if not (terminated or truncated):
            return text, reward, False, False, {}
        stats = {"steps": float(self._steps), "invalid_actions": float(self._invalid), "return": self._return}
        info = {**options.scored(self._return), "stats": stats}
        return text, reward, bool(terminated), truncated and not terminated, info

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
