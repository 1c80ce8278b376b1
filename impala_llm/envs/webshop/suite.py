"""The shop as a `Suite`: one catalogue for all episodes of a process, and sessions that show pages as an agent should
read them.

Invariant: playing through a session changes nothing about the shop. The same actions give the same score whatever the
page format; only what is shown, how many steps are allowed and whether the reward is sparse are the suite's choice.
"""

from collections.abc import Sequence
from typing import Any

from impala_llm.envs.base import SPLITS, Split
from impala_llm.envs.webshop.catalogue import Catalogue, GoalSet, load_catalogue
from impala_llm.envs.webshop.env import WebShopEnv
from impala_llm.envs.webshop.prompt import (
    PROMPT_MODES,
    SYSTEM_PROMPT,
    PromptMode,
    compact,
    delta,
    env_mode,
    parse_action,
    without_instruction,
)
from impala_llm.envs.webshop.splits import solvable_goals, split_goals
from impala_llm.envs.webshop.synthetic import synthetic_catalogue
from impala_llm.settings import WebShopConfig

SPARSE_REWARD = 10.0


class WebShopSuite:
    """The tasks of a catalogue; a task id is the position of a goal in the canonical order.

    catalogue, goals, strict_compat, max_steps, results_per_page: as in `WebShopEnv`. observation_mode: `text` or
    `text_rich` as in the original, or `compact`, about half the tokens of `text_rich`, for small models.
    solvable_only: leave out the goals that cannot reach a score of 1.0; the splits keep their bounds.
    max_invalid_actions: ends an episode after so many actions without meaning, in training sessions only.
    instruction_once: show the instruction on the first page only. delta_pages: after a click on an option, or an
    action without meaning, show one line instead of the whole page again. sparse_reward: 10 for a score of 1.0 and 0
    otherwise, instead of the score; `info["score"]` stays the score.

    system_prompt explains the actions; it is empty in the mode `compact`, as small models learn them by example.
    Raises ValueError for an unknown observation_mode, a limit below 1, or human goals where the catalogue has none.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        goals: GoalSet = "synthetic",
        observation_mode: PromptMode = "text_rich",
        strict_compat: bool = True,
        solvable_only: bool = False,
        max_steps: int = 15,
        max_invalid_actions: int | None = None,
        results_per_page: int = 10,
        instruction_once: bool = False,
        delta_pages: bool = False,
        sparse_reward: bool = False,
    ) -> None:
        if observation_mode not in PROMPT_MODES:
            raise ValueError(f"observation_mode is {observation_mode!r}; use one of {', '.join(PROMPT_MODES)}")
        self.name = "webshop"
        self.system_prompt = "" if observation_mode == "compact" else SYSTEM_PROMPT
        self.catalogue = catalogue
        self.observation_mode = observation_mode
        self.instruction_once = instruction_once
        self.delta_pages = delta_pages
        self.sparse_reward = sparse_reward
        self.goals = catalogue.goals(goals)
        self._goal_set: GoalSet = goals
        self._strict_compat = strict_compat
        self._max_steps = max_steps
        self._max_invalid_actions = max_invalid_actions
        self._results_per_page = results_per_page
        self._tasks = _tasks_by_split(catalogue, goals, strict_compat, solvable_only)
        self.session(training=True)  # a bad limit is refused here, not in the first episode

    def tasks(self, split: Split) -> Sequence[int]:
        return self._tasks[split]

    def session(self, training: bool) -> "WebShopSession":
        env = WebShopEnv(
            self.catalogue,
            goals=self._goal_set,
            observation_mode=env_mode(self.observation_mode),
            strict_compat=self._strict_compat,
            max_steps=self._max_steps,
            results_per_page=self._results_per_page,
            max_invalid_actions=self._max_invalid_actions if training else None,
        )
        return WebShopSession(self, env)

    def signature(self, task_id: int) -> str:
        """The search term under which the wanted product was found: a few dozen to a few hundred kinds."""
        return self.goals[task_id].query


class WebShopSession:
    """One episode at a time of a `WebShopSuite`.

    Actions may have text before them, see `parse_action`. At the end `info["stats"]` holds: bought, steps,
    invalid_actions, options_clicked (counts), attributes_matched and, for goals with options, options_matched
    (shares, 0 when nothing was bought).
    """

    def __init__(self, suite: WebShopSuite, env: WebShopEnv) -> None:
        self._suite = suite
        self._env = env
        self._page = ""
        self._steps = self._invalid_actions = self._options_clicked = 0

    def reset(self, task_id: int) -> tuple[str, dict[str, Any]]:
        self._page, info = self._env.reset(task_id)
        self._steps = self._invalid_actions = self._options_clicked = 0
        return self._shown(self._page), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        played = parse_action(action)
        page, reward, terminated, truncated, info = self._env.step(played)
        change = delta(self._page, page, played, info["invalid"])
        self._page = page
        self._steps += 1
        self._invalid_actions += info["invalid"]
        self._options_clicked += change is not None and not info["invalid"]
        if terminated or truncated:
            info["stats"] = self._stats(info)
            if self._suite.sparse_reward:
                reward = SPARSE_REWARD if info["success"] else 0.0
        if change is not None and self._suite.delta_pages:
            return change, reward, terminated, truncated, info
        observation = (
            without_instruction(page, self._env.goal.instruction_text) if self._suite.instruction_once else page
        )
        return self._shown(observation), reward, terminated, truncated, info

    def _shown(self, page: str) -> str:
        return compact(page) if self._suite.observation_mode == "compact" else page

    def _stats(self, info: dict[str, Any]) -> dict[str, float]:
        parts = info.get("reward_parts")
        stats = {
            "bought": float(parts is not None),
            "steps": float(self._steps),
            "invalid_actions": float(self._invalid_actions),
            "options_clicked": float(self._options_clicked),
            "attributes_matched": 0.0 if parts is None else parts.r_att,
        }
        if self._env.goal.goal_options:
            stats["options_matched"] = 0.0 if parts is None else parts.r_option or 0.0
        return stats


def suite_from_config(config: WebShopConfig) -> WebShopSuite:
    """The suite of a configuration; loads the data files that it names, else makes the synthetic catalogue.

    Raises:
        CatalogueError: a data file that is corrupt. OSError: one that cannot be read.
        ValueError: `items` without `attributes` or the other way round, or values that `WebShopSuite` refuses.
    """
    if config.items is None and config.attributes is None:
        catalogue = synthetic_catalogue(config.num_products, config.catalogue_seed)
    elif config.items is None or config.attributes is None:
        missing = "items" if config.items is None else "attributes"
        raise ValueError(
            f"env.webshop.{missing} is not set: the data files items and attributes belong together, give both or none"
        )
    else:
        catalogue = load_catalogue(
            config.items, config.attributes, config.human, config.nouns, config.num_products, config.catalogue_seed
        )
    return WebShopSuite(
        catalogue,
        goals=config.goals,  # type: ignore[arg-type]  # checked by the catalogue
        observation_mode=config.observation_mode,  # type: ignore[arg-type]  # checked by the suite
        strict_compat=config.strict_compat,
        solvable_only=config.solvable_only,
        max_steps=config.max_steps,
        max_invalid_actions=config.max_invalid_actions,
        results_per_page=config.results_per_page,
        instruction_once=config.instruction_once,
        delta_pages=config.delta_pages,
        sparse_reward=config.sparse_reward,
    )


def _tasks_by_split(
    catalogue: Catalogue, goal_set: GoalSet, strict_compat: bool, solvable_only: bool
) -> dict[Split, Sequence[int]]:
    goals = catalogue.goals(goal_set)
    splits: dict[Split, Sequence[int]] = {split: split_goals(len(goals), split) for split in SPLITS}
    if not solvable_only:
        return splits
    solvable = set(solvable_goals(catalogue, goals, strict_compat))
    return {split: [task_id for task_id in tasks if task_id in solvable] for split, tasks in splits.items()}
