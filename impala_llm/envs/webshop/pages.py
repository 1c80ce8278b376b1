"""The text of every page of the shop.

A page is a sequence of pieces: texts, buttons, links and option labels. In the mode `text` the stripped pieces are
joined by " [SEP] " and nothing marks a button; in `text_rich` each piece is one line, buttons are marked, and so is
what was clicked.
Invariant: a page is a function of the goal's instruction and the state of the episode; no counter, time or chance.
"""

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from impala_llm.envs.webshop.options import option_groups
from impala_llm.envs.webshop.product import Product

ObservationMode = Literal["text", "text_rich"]
OBSERVATION_MODES: tuple[ObservationMode, ...] = ("text", "text_rich")
SUB_PAGES = ("description", "features", "reviews", "attributes")

_CACHED_PRODUCTS = 1 << 14
_SEPARATOR = " [SEP] "
_HTML_SPACE = " \t\n\f\r"
_HTML_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "'": "\\u0027"})


@dataclass(frozen=True, slots=True)
class ItemPage:
    """Parts of a product's page that never change.

    body: everything below the head while no option shows as clicked. clickables: in page order. groups: the groups of
    each option value.
    """

    body: str
    clickables: tuple[str, ...]
    clickable_set: frozenset[str]
    groups: dict[str, tuple[str, ...]]


class Pages:
    """Renders pages in one observation mode; keeps the parts that depend on the product alone.

    show_attributes: whether product pages have an "Attributes" button.
    """

    def __init__(self, mode: ObservationMode, show_attributes: bool) -> None:
        self._rich = mode == "text_rich"
        self._buttons = ("Description", "Features", "Reviews", *(("Attributes",) if show_attributes else ()), "Buy Now")
        cached = functools.lru_cache(_CACHED_PRODUCTS)
        self._done_parts = self._done_pieces()
        self.item_page = cached(self._item_page)
        self._row = cached(self._row_pieces)

    def index(self, instruction: str) -> str:
        """The start page."""
        pieces = self._text("WebShop") + self._text("Instruction: ") + self._text(instruction) + self._button("Search")
        return self._page(pieces)

    def head(self, instruction: str) -> str:
        """The first pieces of every page but the start and the last one."""
        return self._page(self._text("Instruction:") + self._text(instruction) + self._button("Back to Search"))

    def results(self, head: str, page: int, total: int, shown: Iterable[Product], visited: set[str]) -> str:
        """A page of search results. visited: asins of products that were looked at since the start page."""
        parts = [head, self._text(f"Page {page} (Total results: {total})")]
        if page > 1:
            parts.append(self._button("< Prev"))
        parts.append(self._button("Next >"))
        parts.extend(self._row(product, self._rich and product.asin in visited) for product in shown)
        return "".join(parts)

    def item(self, head: str, product: Product, query: str, options: dict[str, str]) -> str:
        """The page of a product. query, options: of the episode so far; they decide which options show as clicked."""
        page = self.item_page(product)
        if not self._rich or not (options or '"' in query):
            return head + page.body
        # An option shows as clicked where its quoted value occurs in the page's address: among the query's words or
        # the chosen options, which are JSON there. So a value chosen in one group shows in all groups.
        address = f"{query.replace(' ', '+')}/{json.dumps(options)}"
        clicked = [v for values in product.options.values() for v in values if v and f'"{v}"' in address]
        notes = "".join(f"You have clicked {value}.\n" for value in reversed(clicked))
        return notes + head + self._item_body(product, frozenset(clicked))

    def sub_page(self, head: str, product: Product, name: str) -> str:
        """One of `SUB_PAGES` of a product."""
        texts: Sequence[str] = ()
        if name == "description":
            texts = (product.description,)
        elif name == "features":
            texts = [f" {bullet}" for bullet in product.bullets]
        elif name == "attributes":
            texts = [f" {attribute}" for attribute in product.attributes]
            texts += [product.category, product.query, product.product_category]
        return head + self._button("< Prev") + "".join(map(self._text, texts))

    def done(self, asin: str, options: dict[str, str], reward: float) -> str:
        """The page after a purchase. What the shop does not know here it shows as "None", as the original does."""
        before, between, after = self._done_parts
        chosen = self._text(json.dumps(options, sort_keys=True).translate(_HTML_ESCAPES))
        return before + self._text(asin) + self._text("options") + chosen + between + self._text(str(reward)) + after

    def _done_pieces(self) -> tuple[str, str, str]:
        texts = (
            ("Thank you for shopping with us!", "Your code: ", "None", " (Paste it in your MTurk interface.)",
             "Purchased", "asin"),
            ("attrs", "None", "category", "None", "query", "None", "product category", "None",
             "Target", "asin", "options", "attrs", "price upper", "instuction text", "category", "product category",
             "query", "Goal ", "None", "Reward", "Your score (min 0.0, max 1.0)"),
            ("Reward Details ", "None"),
        )  # fmt: skip
        before, between, after = ("".join(map(self._text, part)) for part in texts)
        return self._page(before), between, after

    def _item_page(self, product: Product) -> ItemPage:
        groups = option_groups(product)
        buttons = ("Back to Search", "< Prev", *self._buttons)
        # Buttons first, then options; an option named like a button keeps the button's place.
        clickables = tuple(dict.fromkeys([*(button.lower() for button in buttons), *groups]))
        return ItemPage(self._item_body(product, frozenset()), clickables, frozenset(clickables), groups)

    def _item_body(self, product: Product, clicked: frozenset[str]) -> str:
        parts = [self._button("< Prev")]
        for name, values in product.options.items():
            parts.append(self._text(name))
            parts.extend(self._option(value, value in clicked) for value in values)
        parts += [self._text(product.title), self._text(f"Price: {product.price_tag}"), self._text("Rating: N.A.")]
        parts.extend(map(self._button, self._buttons))
        return "".join(parts)

    def _row_pieces(self, product: Product, visited: bool) -> str:
        return self._link(product.asin, visited) + self._text(product.title) + self._text(product.price_tag)

    def _page(self, pieces: str) -> str:
        # In the mode `text` each piece brings its separator along; the first one has none.
        return pieces if self._rich else pieces.removeprefix(_SEPARATOR)

    def _text(self, text: str) -> str:
        return self._piece(text, "", "")

    def _button(self, text: str) -> str:
        return self._piece(text, "[button] ", " [button_]")

    def _option(self, text: str, clicked: bool) -> str:
        word = "clicked button" if clicked else "button"
        return self._piece(text, f"  [{word}] ", f" [{word}_]")

    def _link(self, text: str, visited: bool) -> str:
        word = "clicked button" if visited else "button"
        return self._piece(text, f"\n[{word}] ", f" [{word}_]")

    def _piece(self, text: str, before: str, after: str) -> str:
        if not text.strip(_HTML_SPACE):
            if not text or "\n" in text:
                return ""
            text = " "
        return f"{before}{text}{after}\n" if self._rich else _SEPARATOR + text.strip()
