"""Packaged verifiers of answers: plain functions of an answer and its task, whose field `answer` is the right one."""

import math
import re
from collections.abc import Mapping
from typing import Any

from impala_llm.envs.extras import needed

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"(?=[-+]?\.?\d)[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WHOLE_NUMBER = re.compile(rf"{_NUMBER.pattern}\.?")


def after_thoughts(text: str) -> str:
    """Return what follows the last </think>, by which models end their thoughts; the whole text where there is none."""
    _, end, rest = text.rpartition("</think>")
    return rest.lstrip() if end else text


def final(text: str) -> str:
    """Return what stands between the last <answer> and </answer>, or else the whole text, without outer blanks.

    Thoughts are no part of it.
    """
    text = after_thoughts(text)
    tagged = _TAGGED.findall(text)
    return (tagged[-1] if tagged else text).strip()


def first_line(text: str) -> str:
    """Return the first line with text after the thoughts, the command of a text game; empty where there is none."""
    return next((line for line in after_thoughts(text).splitlines() if line.strip()), "").strip()


def exact(answer: str, task: Mapping[str, Any]) -> float:
    """1 for the right text, up to outer blanks; between <answer> tags where there are any."""
    return float(final(answer) == str(task["answer"]).strip())


def number(answer: str, task: Mapping[str, Any]) -> float:
    """1 where the last number of the answer is that of the task, to nine digits. Thousands may have commas."""
    found = _NUMBER.findall(_plain(final(answer)))
    wanted = _number(_plain(task["answer"]))
    return float(bool(found) and math.isclose(_number(found[-1]), wanted, rel_tol=1e-9, abs_tol=1e-12))


def is_number(answer: object) -> bool:
    """Whether the answer of a task is one that `number` can compare with: one number, as it reads those of answers."""
    text = _plain(answer)
    return bool(_WHOLE_NUMBER.fullmatch(text)) and math.isfinite(_number(text))


def _plain(text: object) -> str:
    """A text with the minus of mathematics, which many models write, as the hyphen that Python takes."""
    return str(text).strip().replace("\N{MINUS SIGN}", "-")


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def maths(answer: str, task: Mapping[str, Any]) -> float:
    """1 where Math-Verify (extra `maths`) finds the answer mathematically equal: `1/2`, `0.5` and `\\frac{1}{2}` are.

    Raises:
        ValueError: the task's own answer is no expression.
    """
    library = needed("math_verify", "maths")
    wanted = str(task["answer"])
    right = library.parse(f"${wanted}$") or library.parse(wanted)
    if not right:
        raise ValueError(f"answer {wanted!r} of the task is no mathematical expression")
    return float(library.verify(right, library.parse(final(answer))))
