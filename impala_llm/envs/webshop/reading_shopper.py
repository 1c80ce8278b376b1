"""Scripted shopper for hard catalogues: it reads prices, options and features, as an agent there has to.

It sees what an agent sees and knows the words of the shop (`shelves.py`), but no product. It searches for the product
type and the wanted options, opens the first result below the price limit that it has not seen, goes on to its features
if it has the options, and buys it if it has the attributes as well. Invariant: every action that it returns is
available on the page, and follows from the pages of its episode.
"""

import random
import re
from dataclasses import dataclass, field
from typing import Any

from impala_llm.envs.webshop.shelves import ATTRIBUTES, SYNONYMS
from impala_llm.envs.webshop.shopper import (
    NOT_OPTIONS,
    Wish,
    first_instruction,
    read_instruction,
    shown_price,
    texts_of,
)

MAX_PAGES = 3

# Chances of each slip at noise 1.
FORGET_OPTION = 0.8
OVERLOOK_PRICE = 0.5
BUY_UNREAD = 0.05

_ALL_ATTRIBUTES = tuple(dict.fromkeys(attribute for own in ATTRIBUTES.values() for attribute in own))
_QUERIES = {name: query for query, other in SYNONYMS.items() for name in (query, other)}
_NAME = re.compile(rf"\b({'|'.join(map(re.escape, sorted(_QUERIES, key=len, reverse=True)))})\b")


@dataclass
class _Episode:
    instruction: str
    wish: Wish
    attributes: tuple[str, ...]
    query: str
    steps: int = 0
    page: int = 1
    seen: dict[tuple[int, str], float] = field(default_factory=dict)
    """Result, as (page, link) -> how well it fits."""
    current: tuple[int, str] = (0, "")
    returning: bool = False
    forgotten: set[str] = field(default_factory=set)
    clicked: set[str] = field(default_factory=set)


class ReadingShopper:
    """Plays a hard catalogue by rule; for one episode.

    `noise` 0 plays well; at 1 it forgets options, overlooks the price limit and buys unread. The seed draws its slips.
    It works with every page format.

    Args:
        speaks: before what it does on a features page, it says of each wanted attribute whether it is there.
        speaks_of_prices: before it opens a result, or passes over all that are new, it says of each up to there whether
            the price is low enough. Where it overlooks the price limit it says nothing.
        max_steps: it plans to buy the best that it has seen before so many steps are over; where the way back to it is
            long, one episode in fifty is too late.

    Raises:
        ValueError: a noise outside [0, 1].
    """

    def __init__(
        self,
        noise: float = 0.0,
        seed: int = 0,
        speaks: bool = False,
        max_steps: int = 15,
        speaks_of_prices: bool = False,
    ) -> None:
        if not 0.0 <= noise <= 1.0:
            raise ValueError(f"noise is {noise}; choose between 0 (plays well) and 1 (sloppy)")
        self.noise = noise
        self._speaks = speaks
        self._speaks_of_prices = speaks_of_prices
        self._max_steps = max_steps
        self._rng = random.Random(seed)
        self._episode: _Episode | None = None

    def act(self, observation: str, info: dict[str, Any]) -> str:
        """The action for an observation; `info` must hold `available_actions`.

        Raises ValueError when the first observation shows no instruction.
        """
        available = info["available_actions"]
        if self._episode is None:
            self._episode = _begin(observation)
        episode, clickables = self._episode, available["clickables"]
        action = self._next(episode, available["has_search_bar"], clickables, observation.lower())
        episode.steps += 1
        return action

    def _next(self, episode: _Episode, on_start: bool, clickables: list[str], page: str) -> str:
        if on_start:
            return _search(episode)
        if "buy now" in clickables:
            return self._on_item_page(episode, [value for value in clickables if value not in NOT_OPTIONS])
        if "next >" in clickables:
            return self._on_results_page(episode, [v for v in clickables if v not in NOT_OPTIONS], page)
        return self._on_features_page(episode, page)

    def _slips(self, chance: float) -> bool:
        return self._rng.random() < self.noise * chance

    def _on_results_page(self, episode: _Episode, links: list[str], page: str) -> str:
        texts = texts_of(links, page)
        fresh = [link for link in links if (episode.page, link) not in episode.seen]
        said: list[str] = []
        for link in fresh:
            price = shown_price(texts.get(link, ""))
            is_low = price <= episode.wish.price_limit
            if not is_low and self._slips(OVERLOOK_PRICE):
                return _open(episode, link)
            if self._speaks_of_prices:
                said.append(f"{price:g} {_yes(is_low)}")
            if is_low:
                return " ".join([*said, _open(episode, link)])
        left = self._max_steps - episode.steps
        if links and episode.page < MAX_PAGES and left > 3 + len(episode.wish.options or ()):
            episode.page += 1
            return " ".join([*said, "click[next >]"])
        return " ".join([*said, self._settle(episode, links)])

    def _settle(self, episode: _Episode, links: list[str]) -> str:
        """The way to the best product seen: its page of results, then itself."""
        best = max(
            episode.seen, key=lambda result: episode.seen[result], default=(episode.page, links[0] if links else "")
        )
        if best[0] == episode.page and best[1] in links:
            return _open(episode, best[1])
        if best[0] < episode.page and episode.page > 1:
            episode.page -= 1
            return "click[< prev]"
        return _search(episode)

    def _on_item_page(self, episode: _Episode, values: list[str]) -> str:
        wish = episode.wish
        if episode.returning:
            episode.returning = False
            return "click[< prev]"
        wanted = sorted((value for value in values if wish.wants(value)), key=wish.text.find)
        lacking = 0 if wish.options is None else len(set(wish.options) - set(wanted))
        left = self._max_steps - episode.steps  # this one included
        if episode.current not in episode.seen:
            episode.seen[episode.current] = -float(lacking)
            episode.forgotten = {value for value in wanted if self._slips(FORGET_OPTION)}
            episode.clicked = set()
            time_to_read = left >= len(wanted) + 3
            if time_to_read and not self._slips(BUY_UNREAD):
                return "click[< prev]" if lacking else "click[features]"
        for value in wanted:
            if left > 1 and value not in episode.clicked and value not in episode.forgotten:
                episode.clicked.add(value)
                return f"click[{value}]"
        return "click[buy now]"

    def _on_features_page(self, episode: _Episode, page: str) -> str:
        features = page.replace(episode.instruction, "")
        found = [attribute for attribute in episode.attributes if attribute in features]
        action = self._after_features(episode, len(found) - len(episode.attributes))
        if not self._speaks:
            return action
        wanted = sorted(episode.attributes, key=episode.wish.text.find)
        said = [f"{attribute} {_yes(attribute in found)}" for attribute in wanted]
        return " ".join([*said, action])

    def _after_features(self, episode: _Episode, fit: int) -> str:
        """fit: number of attributes that the product has, less those that are wanted."""
        if fit == 0:
            return "click[< prev]"
        episode.seen[episode.current] += fit
        if episode.page == 1:
            return _search(episode)
        episode.returning = True
        return "click[< prev]"


def _begin(observation: str) -> _Episode:
    instruction = first_instruction(observation)
    wish = read_instruction(instruction)
    attributes = tuple(attribute for attribute in _ALL_ATTRIBUTES if attribute in wish.text)
    rest = wish.text
    for attribute in attributes:
        rest = rest.replace(attribute, "")
    name = _NAME.search(rest)
    words = [_QUERIES[name[1]]] if name else list(wish.words)
    return _Episode(instruction, wish, attributes, " ".join([*words, *(wish.options or ())]))


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


def _search(episode: _Episode) -> str:
    episode.page = 1
    return f"search[{episode.query}]"


def _open(episode: _Episode, link: str) -> str:
    episode.current = (episode.page, link)
    return f"click[{link}]"
