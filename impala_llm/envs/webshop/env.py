"""One episode of shopping: a small state machine over pages.

Invariant: the observation is a function of the goal and the state of the episode, and the catalogue is never changed,
so any number of environments share one.
"""

import random
import re
from collections.abc import Collection, Sequence
from typing import Any, Literal

from impala_llm.envs.webshop.catalogue import Catalogue, GoalSet
from impala_llm.envs.webshop.goals import Goal, draw_goal
from impala_llm.envs.webshop.options import choose_repaired, choose_strict
from impala_llm.envs.webshop.pages import OBSERVATION_MODES, SUB_PAGES, ObservationMode
from impala_llm.envs.webshop.reward import RewardParts, score_purchase
from impala_llm.envs.webshop.search import MAX_HITS

Page = Literal["index", "results", "item", "sub", "done"]
_ACTION = re.compile(r"(.+)\[(.+)\]")


class WebShopEnv:
    """The shop for one shopper. Actions are texts, `search[words]` and `click[what the page shows]`.

    catalogue: shared, see `load_catalogue`. goals: which goal set. observation_mode: `text` or `text_rich`.
    strict_compat: True plays as the original does, to the character; False repairs what makes goals unreachable (see
    `choose_repaired` and the option matcher), strips arguments, and takes `<q>`-like search commands as plain words.
    show_attributes: product pages get an "Attributes" button. max_steps: so many steps end an episode; None: no
    limit. results_per_page: products on a page of results. max_invalid_actions: so many actions without meaning on
    their page end an episode; None: no limit. Both limits are part of the task: an episode that reaches one scores 0.

    `info` holds after every call: "available_actions" ({"has_search_bar": bool, "clickables": list of str}),
    "invalid" (whether the action had no meaning) and "noun_source". When the episode ends also "score" (0 to 1) and
    "success" (score is 1.0), and after a purchase "reward_parts" (`RewardParts`).

    Raises:
        ValueError: an argument out of range, or an unknown mode or goal set; names it.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        goals: GoalSet = "synthetic",
        observation_mode: ObservationMode = "text",
        strict_compat: bool = True,
        show_attributes: bool = False,
        max_steps: int | None = None,
        results_per_page: int = 10,
        max_invalid_actions: int | None = None,
    ) -> None:
        if observation_mode not in OBSERVATION_MODES:
            raise ValueError(f"observation_mode is {observation_mode!r}; use one of {', '.join(OBSERVATION_MODES)}")
        limits = (
            ("max_steps", max_steps),
            ("results_per_page", results_per_page),
            ("max_invalid_actions", max_invalid_actions),
        )
        for name, limit in limits:
            if limit is not None and limit < 1:
                raise ValueError(f"{name} is {limit}; use at least 1")
        self._catalogue = catalogue
        self._goals: Sequence[Goal] = catalogue.goals(goals)
        self._pages = catalogue.pages(observation_mode, show_attributes)
        self._strict = strict_compat
        self._max_steps = max_steps
        self._results_per_page = results_per_page
        self._max_invalid_actions = max_invalid_actions
        self._rng = random.Random(0)
        self._hits: list[str] = []
        self._page: Page = "index"
        self._goal: Goal | None = None

    @property
    def goal(self) -> Goal:
        """The goal of the episode.

        Raises:
            RuntimeError: before the first reset.
        """
        if self._goal is None:
            raise RuntimeError("no episode was started; call reset(task_id=...) first")
        return self._goal

    @property
    def goals(self) -> Sequence[Goal]:
        """All goals of the set, in the canonical order."""
        return self._goals

    @property
    def page(self) -> Page:
        """The kind of page that the shopper is on."""
        return self._page

    @property
    def results(self) -> tuple[str, ...]:
        """The asins of the results that the page shows, as they are clicked; () on other pages."""
        return tuple(self._links) if self._page == "results" else ()

    @property
    def instruction_text(self) -> str:
        """The instruction as the page shows it."""
        text = self.goal.instruction_text
        return f"Instruction: {text}" if self._page == "index" else f"Instruction:{text}"

    def reset(self, task_id: int | None = None, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Starts an episode: (observation, info).

        task_id: position of the goal in the canonical order. Without it a goal is drawn by weight; seed: of this draw
        and the following ones.

        Raises:
            ValueError: there is no goal `task_id`, or no goal at all.
        """
        if seed is not None:
            self._rng.seed(seed)
        if not self._goals:
            raise ValueError("the catalogue has no goals of this set; use another catalogue or goal set")
        position = draw_goal(self._goals, self._rng) if task_id is None else task_id
        if not 0 <= position < len(self._goals):
            raise ValueError(f"task_id is {task_id}; this goal set has the tasks 0 to {len(self._goals) - 1}")
        self._goal = self._goals[position]
        self._head = self._pages.head(self._goal.instruction_text)
        self._num_steps = self._num_invalid = 0
        self._to_index()
        return self._observation, self._info(invalid=False)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays one action: (observation, reward, terminated, truncated, info).

        An action without meaning on its page changes nothing. The reward is the score of a purchase, 0 before. No end
        is an outside limit: truncated is False. As in the original, stepping may go on after the end: a search starts
        over with the same goal.

        Raises:
            RuntimeError: before the first reset.
        """
        goal = self.goal
        self._num_steps += 1
        name, argument = self._parse(action)
        parts = None
        invalid = False
        if name == "search" and argument:
            self._search(argument)
        elif name == "click" and argument in self._clickable_set and argument != "search":
            if argument == "buy now":
                parts = self._buy(goal)
            else:
                self._click(argument)
        else:
            invalid = True
            self._num_invalid += 1
        info = self._info(invalid)
        terminated = (
            parts is not None
            or (self._max_steps is not None and self._num_steps >= self._max_steps)
            or (self._max_invalid_actions is not None and self._num_invalid >= self._max_invalid_actions)
        )
        reward = 0.0
        if parts is not None:
            reward = parts.reward
            info["reward_parts"] = parts
        if terminated:
            info["score"] = reward
            info["success"] = reward == 1.0
        return self._observation, reward, terminated, False, info

    def _parse(self, action: str) -> tuple[str, str]:
        match = _ACTION.match(action)
        if match is None:
            return action, ""
        name, argument = match.groups()
        argument = argument.lower()
        return name, argument if self._strict else argument.strip()

    def _click(self, target: str) -> None:
        """A click on something that the page shows. The order decides where an option is named like a button."""
        if target == "back to search":
            self._to_index()
        elif target == "next >" and self._page == "results":
            self._to_results(self._page_number + 1)
        elif target == "< prev":
            if self._page == "results":
                self._to_results(self._page_number - 1)
            elif self._page == "sub":
                self._to_item()
            else:
                self._to_results(self._page_number)
        elif target in SUB_PAGES:
            self._to_sub_page(target)
        else:
            if self._page == "results":
                self._product = self._links[target]
                self._visited.add(self._product.asin)
            else:
                choose = choose_strict if self._strict else choose_repaired
                choose(self._groups, self._options, target)
            self._to_item()

    def _search(self, query: str) -> None:
        self._query = query
        special = self._special_hits(query) if self._strict and query[0] == "<" else None
        self._hits = self._catalogue.search(query) if special is None else special
        self._to_results(1)

    def _special_hits(self, query: str) -> list[str] | None:
        """The original's commands, which bypass the search engine; None where the query is none of them.

        `<a>` is not among them: it stops the original's text environment with an error.
        """
        command, *words = query.split(" ")
        products = self._catalogue.products
        if command == "<r>":
            # The original draws anew each time. Here the same words draw the same products: equal states, equal text.
            sample = random.Random(query).sample(products, min(MAX_HITS, len(products)))
            return [product.asin for product in sample]
        if command == "<c>":
            category = words[0].strip() if words else ""
            return [product.asin for product in products if product.category == category]
        if command == "<q>":
            wanted = " ".join(words).strip()
            return [product.asin for product in products if product.query == wanted]
        return None

    def _buy(self, goal: Goal) -> RewardParts:
        product, catalogue = self._product, self._catalogue
        parts = score_purchase(
            product,
            goal,
            self._options,
            catalogue.prices[product.asin],
            catalogue.nouns(product.asin),
            catalogue.nouns(goal.asin),
            self._strict,
        )
        self._show("done", self._pages.done(product.asin, self._options, parts.reward), (), ())
        return parts

    def _to_index(self) -> None:
        self._query = ""
        self._page_number = 0
        self._hits = []
        self._options: dict[str, str] = {}
        self._visited: set[str] = set()
        self._show("index", self._pages.index(self.goal.instruction_text), ("search",), ("search",))

    def _to_results(self, page_number: int) -> None:
        self._page_number = page_number
        self._options = {}
        first = (page_number - 1) * self._results_per_page
        shown = [self._catalogue[asin] for asin in self._hits[first : first + self._results_per_page]]
        self._links = {product.asin.lower(): product for product in shown}
        buttons = ("back to search", "< prev", "next >") if page_number > 1 else ("back to search", "next >")
        clickables = (*buttons, *self._links)
        text = self._pages.results(self._head, page_number, len(self._hits), shown, self._visited)
        self._show("results", text, clickables, clickables)

    def _to_item(self) -> None:
        page = self._pages.item_page(self._product)
        self._groups = page.groups
        text = self._pages.item(self._head, self._product, self._query, self._options)
        self._show("item", text, page.clickables, page.clickable_set)

    def _to_sub_page(self, name: str) -> None:
        text = self._pages.sub_page(self._head, self._product, name)
        self._show("sub", text, ("back to search", "< prev"), ("back to search", "< prev"))

    def _show(self, page: Page, text: str, clickables: tuple[str, ...], clickable_set: Collection[str]) -> None:
        self._page = page
        self._observation = text
        self._clickables = clickables
        self._clickable_set = clickable_set

    def _info(self, invalid: bool) -> dict[str, Any]:
        available = {"has_search_bar": self._page == "index", "clickables": list(self._clickables)}
        return {"available_actions": available, "invalid": invalid, "noun_source": self._catalogue.noun_source}
