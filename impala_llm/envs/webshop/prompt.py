"""Prompt formats: pure functions from the shop's pages to an agent's observations, and from its answers to actions.

An agent's conversation already holds the pages before, so a page need not repeat them. Each function takes a page as
`WebShopEnv` renders it. Invariant: nothing that differs between two products or two states is dropped, but for the
clicks of which a conversation has already told.
"""

import re
from collections.abc import Sequence
from typing import Literal

from impala_llm.envs.webshop.pages import ObservationMode

PromptMode = Literal["text", "text_rich", "compact"]
PROMPT_MODES: tuple[PromptMode, ...] = ("text", "text_rich", "compact")

NOTHING_HAPPENED = "Nothing happened."
NOTHING_HERE = "Nothing here."

SYSTEM_PROMPT = """You are shopping in a web shop. Find the product that the instruction asks for, choose its \
options and buy it.
Answer each page with one action:
search[words] looks for products; it works on every page.
click[name] clicks on something that the page shows: a product's number, an option, or one of the buttons \
"back to search", "< prev", "next >", "description", "features", "reviews", "buy now".
Only what you have bought with "click[buy now]" counts."""

_ACTION_START = re.compile(r"\b(?:search|click)\[")
_ROW_CLICK = re.compile(r"click\[\s*(\d{1,3})\s*\]")
_WHOLE_ACTION = re.compile(r"(?:search|click)\[.+\]")
_CLICKED_NOTES = re.compile(r"\A(?:You have clicked .*\.\n)+")
_LABEL = re.compile(r"(\s*)\[(clicked )?button\] (.*) \[(?:clicked )?button_\]")
_RATING = "Rating: N.A."  # of every product: the shop has no reviews
_STANDING_BUTTONS = frozenset(
    {"Search", "Back to Search", "< Prev", "Next >", "Description", "Features", "Reviews", "Attributes", "Buy Now"}
)


def parse_action(answer: str) -> str:
    """The last `search[...]` or `click[...]` of an answer, so that a model may think before it acts.

    Brackets inside must balance. An answer that is one action already, or holds none, is returned unchanged; the shop
    takes the latter as an action without meaning.
    """
    starts = [match.start() for match in _ACTION_START.finditer(answer)]
    if not starts or (len(starts) == 1 and _WHOLE_ACTION.fullmatch(answer)):
        return answer
    for start in reversed(starts):
        depth = 0
        for end in range(answer.index("[", start), len(answer)):
            depth += {"[": 1, "]": -1}.get(answer[end], 0)
            if depth == 0:
                return answer[start : end + 1]
    return answer


def clicked_row(action: str, results: Sequence[str]) -> str:
    """The action with the asin in place of a result's number on the page: `click[3]` clicks the third result.

    results: asins of the page, in its order. An action that names no number of a result is returned unchanged.
    """
    match = _ROW_CLICK.fullmatch(action)
    row = int(match[1]) if match else 0
    return f"click[{results[row - 1]}]" if 1 <= row <= len(results) else action


def env_mode(mode: PromptMode) -> ObservationMode:
    """The observation mode in which the shop must render for a prompt mode."""
    return "text" if mode == "text" else "text_rich"


def without_instruction(page: str, instruction: str) -> str:
    """A page of the mode `text` or `text_rich` less its heading "Instruction:" and the instruction below it.

    A page that shows no such heading, like the last one, is returned unchanged.
    """
    for heading in (f"Instruction:\n{instruction}\n", f"Instruction: \n{instruction}\n"):
        if heading in page:
            return page.replace(heading, "", 1)
    return page.replace(f"Instruction: [SEP] {instruction.strip()} [SEP] ", "", 1)


def delta(page_before: str, page: str, action: str, invalid: bool) -> str | None:
    """One line for an action after which nothing but the marks of clicked options changed; None where the whole page
    is needed.

    page_before, page: in the mode `text` or `text_rich`. action: as the shop played it. invalid: whether it had no
    meaning there.
    """
    if invalid:
        return NOTHING_HAPPENED
    if not action.startswith("click[") or _without_marks(page_before) != _without_marks(page):
        return None
    return f"You have clicked {action[len('click[') : action.rindex(']')].lower().strip()}."


def compact(page: str, row_numbers: bool = False) -> str:
    """The shortest form of a page of the mode `text_rich`: one line a product or option group, no standing buttons.

    A result is `title price ASIN`: what can be clicked comes after what it is, so that a causal model knows it when
    it reads it; an option group is `name: value, value`, chosen values in brackets. The notes on
    what was clicked are dropped, as the brackets say the same. Buttons that every page of a kind has are left out;
    they can be clicked all the same.

    row_numbers: a result ends in its number on the page instead, in brackets where it was opened before.
    """
    lines: list[str] = []
    row = 0
    last = ""  # what the line before was: "link", "title", "option" or "text"
    for line in _CLICKED_NOTES.sub("", page).split("\n"):
        label = _LABEL.fullmatch(line)
        if label is not None:
            indent, clicked, name = label.groups()
            if indent:
                value = f"[{name}]" if clicked else name
                if lines:
                    lines[-1] += f", {value}" if last == "option" else f": {value}"
                else:
                    lines.append(value)
                last = "option"
            elif name not in _STANDING_BUTTONS:
                row += 1
                number = f"[{row}]" if clicked else str(row)
                lines.append(number if row_numbers else name)
                last = "link"
        elif line.strip() and line != _RATING:
            if last in ("link", "title"):
                before, _, asin = lines[-1].rpartition(" ")
                lines[-1] = " ".join(part for part in (before, line, asin) if part)
                last = "title" if last == "link" else "text"
            elif lines and lines[-1].strip() == "Instruction:":
                lines[-1] = f"Instruction: {line}"
            else:
                lines.append(line)
                last = "text"
    return "\n".join(lines) or NOTHING_HERE


def _without_marks(page: str) -> str:
    return (
        _CLICKED_NOTES.sub("", page).replace("[clicked button]", "[button]").replace("[clicked button_]", "[button_]")
    )
