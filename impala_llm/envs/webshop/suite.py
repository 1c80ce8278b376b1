"""The shop as a `Suite`: one catalogue for all episodes of a process, and sessions that show pages as an agent should
read them.

Invariant: playing through a session changes nothing about the shop. The same actions give the same score whatever the
page format; only what is shown, how many steps are allowed and whether the reward is sparse are the suite's choice.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from impala_llm.envs.base import SPLITS, Script, Split
from impala_llm.envs.webshop.catalogue import Catalogue, GoalSet, load_catalogue
from impala_llm.envs.webshop.env import WebShopEnv
from impala_llm.envs.webshop.hard_catalogue import hard_catalogue
from impala_llm.envs.webshop.nouns import installed_tagger
from impala_llm.envs.webshop.prompt import (
    PROMPT_MODES,
    SYSTEM_PROMPT,
    PromptMode,
    clicked_row,
    compact,
    delta,
    env_mode,
    parse_action,
    without_instruction,
)
from impala_llm.envs.webshop.reading_shopper import ReadingShopper
from impala_llm.envs.webshop.rules import FirstHit
from impala_llm.envs.webshop.shopper import ScriptedShopper
from impala_llm.envs.webshop.splits import solvable_goals, split_goals, split_goals_by_product
from impala_llm.envs.webshop.synthetic import synthetic_catalogue
from impala_llm.settings import WebShopConfig

SPARSE_REWARD = 10.0
_USUAL = WebShopConfig(max_steps=30, results_per_page=5)
"""Settings of the tasks with model=tiny_shopper, the default: their names leave these out."""
_NAMED = ("num_products", "goals", "strict_compat", "solvable_only", "max_steps", "results_per_page")


class WebShopSuite:
    """The tasks of a catalogue; a task id is the position of a goal in the canonical order.

    The splits keep their bounds when goals are left out (`solvable_only`). `info["score"]` stays the score with a
    sparse reward. `system_prompt` explains the actions; it is empty in the mode `compact`, as small models learn them
    by example.
    """

    def __init__(self, catalogue: Catalogue, config: WebShopConfig | None = None) -> None:
        """
        Args:
            config: None: the defaults. Its fields that say which catalogue to load are not read.

        Raises:
            ValueError: an unknown observation_mode, row_numbers in another one than compact, a limit below 1, or human
                goals where the catalogue has none.
        """
        config = WebShopConfig() if config is None else config
        if config.observation_mode not in PROMPT_MODES:
            raise ValueError(f"observation_mode is {config.observation_mode!r}; use one of {', '.join(PROMPT_MODES)}")
        if config.row_numbers and config.observation_mode != "compact":
            raise ValueError(
                f"env.webshop.row_numbers=true: pages of the mode {config.observation_mode} have no row numbers; use "
                "env.webshop.observation_mode=compact"
            )
        self.name = "webshop"
        self.observation_mode: PromptMode = config.observation_mode
        self.system_prompt = "" if self.observation_mode == "compact" else SYSTEM_PROMPT
        self.row_numbers = config.row_numbers
        self.catalogue = catalogue
        self.config = config
        self._goal_set: GoalSet = config.goals  # type: ignore[assignment]  # checked by the catalogue
        self.goals = catalogue.goals(self._goal_set)
        self._tasks = _tasks_by_split(catalogue, self._goal_set, config.strict_compat, config.solvable_only)
        self.session(training=True)  # a bad limit is refused here, not in the first episode

    def tasks(self, split: Split) -> Sequence[int]:
        return self._tasks[split]

    def session(self, training: bool) -> "WebShopSession":
        env = WebShopEnv(
            self.catalogue,
            goals=self._goal_set,
            observation_mode=env_mode(self.observation_mode),
            strict_compat=self.config.strict_compat,
            max_steps=self.config.max_steps,
            results_per_page=self.config.results_per_page,
            max_invalid_actions=self.config.max_invalid_actions if training else None,
        )
        return WebShopSession(self, env)

    def script(self, noise: float = 0.0, seed: int = 0) -> Script:
        """The scripted shopper that fits the catalogue."""
        if not self.catalogue.split_by_product:
            return ScriptedShopper(noise, seed)
        config = self.config
        return ReadingShopper(noise, seed, config.script_speaks, config.max_steps, config.script_speaks_of_prices)

    def baselines(self) -> dict[str, Callable[[], Script]]:
        """Scripts to compare policies with, by name; each is made anew for every episode."""
        return {
            "rule: first hit": FirstHit,
            "rule with options": functools.partial(FirstHit, with_options=True),
            "scripted shopper": self.script,
        }

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
        return self._shown(self._page), self._told(info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        played = parse_action(action)
        if self._suite.row_numbers:
            played = clicked_row(played, self._env.results)
        page, reward, terminated, truncated, info = self._env.step(played)
        change = delta(self._page, page, played, info["invalid"])
        self._page = page
        self._steps += 1
        self._invalid_actions += info["invalid"]
        self._options_clicked += change is not None and not info["invalid"]
        if terminated or truncated:
            info["stats"] = self._stats(info)
            if self._suite.config.sparse_reward:
                reward = SPARSE_REWARD if info["success"] else 0.0
            elif info["success"]:
                reward += self._suite.config.success_bonus
        info = self._told(info)
        if change is not None and self._suite.config.delta_pages:
            return change, reward, terminated, truncated, info
        observation = (
            without_instruction(page, self._env.goal.instruction_text) if self._suite.config.instruction_once else page
        )
        return self._shown(observation), reward, terminated, truncated, info

    def _shown(self, page: str) -> str:
        return compact(page, self._suite.row_numbers) if self._suite.observation_mode == "compact" else page

    def _told(self, info: dict[str, Any]) -> dict[str, Any]:
        """The info, with numbers for results where the page shows numbers."""
        results = self._env.results
        if self._suite.row_numbers and results:
            numbers = {asin: str(row) for row, asin in enumerate(results, 1)}
            available = info["available_actions"]
            clickables = [numbers.get(name, name) for name in available["clickables"]]
            info["available_actions"] = available | {"clickables": clickables}
        return info

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
        make = hard_catalogue if config.catalogue == "hard" else synthetic_catalogue
        catalogue = make(config.num_products, config.catalogue_seed)
    elif config.items is None or config.attributes is None:
        missing = "items" if config.items is None else "attributes"
        raise ValueError(
            f"env.webshop.{missing} is not set: the data files items and attributes belong together, give both or none"
        )
    else:
        catalogue = load_catalogue(
            config.items, config.attributes, config.human, config.nouns, config.num_products, config.catalogue_seed
        )
    return WebShopSuite(catalogue, config)


def tasks_name(config: WebShopConfig, kind: str | None = None) -> str:
    """Return the name of the tasks: their catalogue, and the settings of goals, splits and limits that are not usual;
    of files without one of nouns also who tags these, since scores differ by it.

    Args:
        kind: of the catalogue; None: its files, or env.webshop.catalogue.
    """
    of_files = f"catalogue {config.catalogue_seed} of {config.items}"
    made = f"{kind or config.catalogue} catalogue {config.catalogue_seed}"
    others = [f"{key}={value}" for key in _NAMED if (value := getattr(config, key)) != getattr(_USUAL, key)]
    if config.items is not None and config.nouns is None:
        others.append(f"nouns={installed_tagger()}")
    return ", ".join([made if config.items is None else of_files, *others])


def _tasks_by_split(
    catalogue: Catalogue, goal_set: GoalSet, strict_compat: bool, solvable_only: bool
) -> dict[Split, Sequence[int]]:
    goals = catalogue.goals(goal_set)
    splits: dict[Split, Sequence[int]] = {
        split: split_goals_by_product(goals, split) if catalogue.split_by_product else split_goals(len(goals), split)
        for split in SPLITS
    }
    if not solvable_only:
        return splits
    solvable = set(solvable_goals(catalogue, goals, strict_compat))
    return {split: [task_id for task_id in tasks if task_id in solvable] for split, tasks in splits.items()}
