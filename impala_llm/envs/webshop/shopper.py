"""Scripted shopper: a baseline for scores in the shop, and the source of demonstrations for small policies.

It sees what an agent sees, observations and available actions, and nothing else: it reads the instruction, searches
for what it asks, opens the best result that fits the price, chooses the options named in the instruction and buys.
When a product lacks something it looks at the next result, and at last buys the best that it saw. With noise it
buys too early and forgets wishes, as people do. Invariant: every action that it returns is available on
the page.
"""

import random
import re
from dataclasses import dataclass, field
from typing import Any

from impala_llm.envs.webshop.options import NEVER_OPTIONS

MAX_VISITS = 3  # products opened in an episode before the best of them is bought; fits into 15 steps with four options

# Chances of each slip at noise 1.
FORGET_OPTION = 0.25
DROP_ATTRIBUTE = 0.45
TAKE_OTHER_PRODUCT = 0.45

_INSTRUCTION = re.compile(r"instruction:\s*(?:\[sep\]\s*)?(.+?)\s*(?:\[sep\]|\[button\]|\n|$)")
_PRICE_LIMIT = re.compile(r"(?:, and )?price lower than ([\d.]+) dollars")
_NAMED_OPTION = re.compile(r"(?: with|, and) ([\w &'-]+): (.+?)(?=, and [\w &'-]+: |$)")
_PRICE = re.compile(r"\$(\d+(?:\.\d+)?)")
NOT_OPTIONS = NEVER_OPTIONS | {"next >"}
_FILLERS = frozenset({
    "find", "show", "me", "i", "am", "im", "need", "want", "would", "like", "looking", "for", "please", "a",
    "an", "the", "some", "it", "should", "be", "that", "is", "are", "which", "to", "buy", "and", "in", "with",
    "prefer", "best",
})  # fmt: skip


@dataclass(frozen=True)
class Wish:
    """Wishes of an instruction, as far as they can be read without the page.

    words: the words to search for. price_limit: dollars, infinite where there is none. options: the values of the
    named options; None where options are not named (human instructions), `text` must be searched for values then.
    text: without the price limit.
    """

    words: tuple[str, ...]
    price_limit: float
    options: tuple[str, ...] | None
    text: str

    def wants(self, value: str) -> bool:
        if self.options is not None:
            return value in self.options
        return re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", self.text) is not None


def read_instruction(instruction: str) -> Wish:
    """Takes an instruction, of either goal set, apart."""
    text = instruction.lower().strip()
    limit = _PRICE_LIMIT.search(text)
    text = _PRICE_LIMIT.sub("", text)
    named = _NAMED_OPTION.findall(text)
    described = _NAMED_OPTION.sub("", text)
    words = tuple(word for word in re.findall(r"[\w'-]+", described) if word not in _FILLERS)
    price_limit = float(limit[1]) if limit else float("inf")
    return Wish(words, price_limit, tuple(value for _, value in named) if named else None, text)


def first_instruction(observation: str) -> str:
    """The instruction on the first page, in lower case. Raises ValueError where there is none."""
    found = _INSTRUCTION.search(observation.lower())
    if found is None:
        raise ValueError(f"the first observation shows no 'Instruction:': {observation[:80]!r}")
    return found[1]


def shown_price(text: str) -> float:
    """The price in a text, the lower one of two, in dollars; 0 where there is none."""
    price = _PRICE.search(text)
    return float(price[1]) if price else 0.0


@dataclass
class _Episode:
    wish: Wish
    query: str
    hasty: bool
    takes_other: bool
    visited: list[str] = field(default_factory=list)
    fits: dict[str, float] = field(default_factory=dict)
    current: str | None = None
    settled: bool = False
    clicked: set[str] = field(default_factory=set)
    forgotten: set[str] = field(default_factory=set)
    shown: dict[str, str] = field(default_factory=dict)


class ScriptedShopper:
    """Plays the shop by rule. `noise` 0 plays well, 1 scores about 0.6; the seed draws its slips.

    `act` is called with each observation of an episode and its info; `reset()` comes before another episode. It works
    with every page format that shows the instruction on the first page and each result's asin before its title and
    price, or after them on the same line. Raises ValueError for a noise outside [0, 1].
    """

    def __init__(self, noise: float = 0.0, seed: int = 0) -> None:
        if not 0.0 <= noise <= 1.0:
            raise ValueError(f"noise is {noise}; choose between 0 (plays well) and 1 (sloppy)")
        self.noise = noise
        self._rng = random.Random(seed)
        self._episode: _Episode | None = None

    def reset(self) -> None:
        """Forgets the episode before."""
        self._episode = None

    def act(self, observation: str, info: dict[str, Any]) -> str:
        """The action for an observation; `info` must hold `available_actions`.

        Raises ValueError when the first observation of an episode shows no instruction.
        """
        available = info["available_actions"]
        if self._episode is None:
            self._episode = self._begin(observation)
        episode, clickables = self._episode, available["clickables"]
        if available["has_search_bar"]:
            return f"search[{episode.query}]"
        if "buy now" in clickables:
            return self._on_item_page(episode, [value for value in clickables if value not in NOT_OPTIONS])
        links = [value for value in clickables if value not in NOT_OPTIONS]
        if links:
            return self._on_results_page(episode, links, observation.lower())
        return "click[< prev]" if "< prev" in clickables else "click[back to search]"

    def _slips(self, chance: float) -> bool:
        return self._rng.random() < self.noise * chance

    def _begin(self, observation: str) -> _Episode:
        wish = read_instruction(first_instruction(observation))
        words = list(wish.words)
        # Attributes, of two words each, come before the product type, which is never dropped.
        thing = 2 - len(words) % 2
        for start in range(len(words) - thing - 2, -1, -2):
            if self._slips(DROP_ATTRIBUTE):
                del words[start : start + 2]
        return _Episode(wish, " ".join(words), hasty=self._slips(1.0), takes_other=self._slips(TAKE_OTHER_PRODUCT))

    def _on_results_page(self, episode: _Episode, links: list[str], observation: str) -> str:
        episode.clicked, episode.shown = set(), texts_of(links, observation)
        fresh = [asin for asin in links if asin not in episode.visited and asin in episode.shown]
        if episode.visited and (len(episode.visited) >= MAX_VISITS or not fresh):
            episode.settled = True
            best = max(episode.visited, key=lambda asin: episode.fits[asin])
            return self._open(episode, best)
        ranked = sorted(fresh or links, key=lambda asin: self._misfit(episode, asin))
        if episode.takes_other and len(ranked) > 1:
            episode.takes_other = False
            return self._open(episode, self._rng.choice(ranked[1:5]))
        return self._open(episode, ranked[0])

    def _open(self, episode: _Episode, asin: str) -> str:
        episode.current = asin
        if asin not in episode.visited:
            episode.visited.append(asin)
        return f"click[{asin}]"

    def _misfit(self, episode: _Episode, asin: str) -> tuple[bool, bool]:
        """Sort key that keeps the search engine's order, but puts what is too dear or another kind of thing last."""
        text = episode.shown.get(asin, "")
        too_dear = shown_price(text) > episode.wish.price_limit
        return too_dear, bool(episode.wish.words) and episode.wish.words[-1] not in text

    def _on_item_page(self, episode: _Episode, values: list[str]) -> str:
        asin = episode.current or ""
        wish = episode.wish
        wanted = sorted((value for value in values if wish.wants(value)), key=wish.text.find)
        lacking = 0 if wish.options is None else len(set(wish.options) - set(wanted))
        if asin not in episode.fits:
            episode.fits[asin] = -float(lacking)
            episode.forgotten = {value for value in wanted if self._slips(FORGET_OPTION)}
        if lacking and not episode.hasty and not episode.settled:
            return "click[< prev]"
        for value in wanted:
            if value not in episode.clicked and value not in episode.forgotten:
                episode.clicked.add(value)
                return f"click[{value}]"
        return "click[buy now]"


def texts_of(links: list[str], observation: str) -> dict[str, str]:
    """Text of a results page about each asin, or row number; those that the page does not show are left out.

    That is the rest of its line where it has one, as on compact pages, else what follows it up to the next asin.
    """
    lines = {last.strip("[]"): rest for rest, _, last in (line.rpartition(" ") for line in observation.splitlines())}
    if any(asin in lines for asin in links):
        return {asin: lines[asin] for asin in links if asin in lines}
    offsets = sorted((observation.find(asin), asin) for asin in links if asin in observation)
    ends = [offset for offset, _ in offsets[1:]] + [len(observation)]
    return {asin: observation[offset + len(asin) : end] for (offset, asin), end in zip(offsets, ends, strict=True)}
