"""Text to index terms, as the search engine of the original does it (Lucene's English analysis).

Word tokens (Unicode annex 29) -> possessive off -> lower case -> stop words out -> Porter stem.
Invariant: the same function makes the terms of documents and of queries.
"""

import functools
import re

import regex

from impala_llm.envs.webshop.stemmer import stem

_STOP_WORDS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())
_APOSTROPHES = "'\u2019\uff07"
_CACHED_TOKENS = 1 << 17

# The pictographic characters of Unicode 11, which Lucene knows; later versions of Unicode took some back (U+2605 ★ is
# one).
_PICTOGRAPHIC = (
    "\\u00a9\\u00ae\\u203c\\u2049\\u2122\\u2139\\u2194-\\u2199\\u21a9-\\u21aa\\u231a-\\u231b\\u2328\\u2388\\u23cf"
    "\\u23e9-\\u23f3\\u23f8-\\u23fa\\u24c2\\u25aa-\\u25ab\\u25b6\\u25c0\\u25fb-\\u25fe\\u2600-\\u2605\\u2607-\\u2612"
    "\\u2614-\\u2685\\u2690-\\u2705\\u2708-\\u2712\\u2714\\u2716\\u271d\\u2721\\u2728\\u2733-\\u2734\\u2744\\u2747"
    "\\u274c\\u274e\\u2753-\\u2755\\u2757\\u2763-\\u2767\\u2795-\\u2797\\u27a1\\u27b0\\u27bf\\u2934-\\u2935"
    "\\u2b05-\\u2b07\\u2b1b-\\u2b1c\\u2b50\\u2b55\\u3030\\u303d\\u3297\\u3299\\U0001f000-\\U0001f0ff"
    "\\U0001f10d-\\U0001f10f\\U0001f12f\\U0001f16c-\\U0001f171\\U0001f17e-\\U0001f17f\\U0001f18e"
    "\\U0001f191-\\U0001f19a\\U0001f1ad-\\U0001f1e5\\U0001f201-\\U0001f20f\\U0001f21a\\U0001f22f"
    "\\U0001f232-\\U0001f23a\\U0001f23c-\\U0001f23f\\U0001f249-\\U0001f3fa\\U0001f400-\\U0001f53d"
    "\\U0001f546-\\U0001f64f\\U0001f680-\\U0001f6ff\\U0001f774-\\U0001f77f\\U0001f7d5-\\U0001f7ff"
    "\\U0001f80c-\\U0001f80f\\U0001f848-\\U0001f84f\\U0001f85a-\\U0001f85f\\U0001f888-\\U0001f88f"
    "\\U0001f8ae-\\U0001f8ff\\U0001f90c-\\U0001f93a\\U0001f93c-\\U0001f945\\U0001f947-\\U0001fffd"
)
_SKIN_TONE = "\\U0001f3fb-\\U0001f3ff"


def _token_pattern() -> "regex.Pattern[str]":
    # Marks and format characters attach to the character before them (annex 29, rule WB4); a skin tone does so only
    # after a pictograph, and a presentation selector ends a pictograph.
    mark = rf"[\p{{WB=Extend}}\p{{WB=Format}}\p{{WB=ZWJ}}]--[{_SKIN_TONE}]"
    marks, pictograph_marks = rf"[{mark}]*+", rf"[{mark}--[\ufe0e\ufe0f]]*+"

    def one(characters: str) -> str:
        return rf"(?:[{characters}]{marks})"

    letter = one(r"\p{WB=ALetter}\p{WB=Hebrew_Letter}")
    digit = one(r"\p{WB=Numeric}")
    katakana = one(r"\p{WB=Katakana}")
    joiner = one(r"\p{WB=ExtendNumLet}")
    between_letters = one(r"\p{WB=MidLetter}\p{WB=MidNumLet}\p{WB=Single_Quote}")
    between_digits = one(r"\p{WB=MidNum}\p{WB=MidNumLet}\p{WB=Single_Quote}")
    # A double quote between Hebrew letters and a single one after them are part of the word.
    after_hebrew, hebrew_next = r"(?<=\p{WB=Hebrew_Letter})", r"(?=\p{WB=Hebrew_Letter})"
    double_quote = after_hebrew + one(r"\p{WB=Double_Quote}") + hebrew_next
    single_quote = after_hebrew + one(r"\p{WB=Single_Quote}")
    letters = rf"{letter}+(?:(?:{between_letters}|{double_quote}){letter}+)*(?:{single_quote})?"
    run = rf"(?:{katakana}+|(?:{digit}+(?:{between_digits}{digit}+)*|{letters})+)"
    word = rf"{joiner}*{run}(?:{joiner}+{run})*{joiner}*"
    toned = rf"[{_PICTOGRAPHIC}]{pictograph_marks}[{_SKIN_TONE}]{pictograph_marks}"
    pictograph = rf"(?:{toned}|[{_PICTOGRAPHIC}]{pictograph_marks}\ufe0f?|[{_SKIN_TONE}]{pictograph_marks})"
    # The marks after a pictograph take the joiner U+200D of a sequence too; then it stands just behind.
    emoji = (
        rf"{pictograph}(?:(?:(?<=\u200d)|\u200d){pictograph})*"
        rf"|[#*]{pictograph_marks}\ufe0f?\u20e3{pictograph_marks}"
        rf"|(?:\p{{WB=Regional_Indicator}}{marks}){{2}}"
    )
    south_east_asian = one(r"\p{LB=SA}") + "+"
    one_by_one = one(r"\p{Script=Han}\p{Script=Hiragana}")
    return regex.compile(rf"{word}|{emoji}|{south_east_asian}|{one_by_one}", regex.VERSION1)


_TOKEN = _token_pattern()
# The same rules for text of ASCII characters only, which most text is; the standard library's engine is faster at it.
# No token contains white space, so only the words with other characters go to the full pattern.
_ASCII_RUN = r"(?:[0-9]+(?:[,;.'][0-9]+)*|[A-Za-z]+(?:[:.'][A-Za-z]+)*)+"
_ASCII_TOKEN = re.compile(rf"_*{_ASCII_RUN}(?:_+{_ASCII_RUN})*_*")

_NOT_ASCII_WORD = re.compile(r"(?<!\S)[^\s\u0080-\U0010ffff]*+[^\x00-\x7f]\S*", re.ASCII)


def tokens(text: str) -> list[str]:
    """The word tokens of a text as they stand in it."""
    if text.isascii():
        return _ASCII_TOKEN.findall(text)
    found: list[str] = []
    end = 0
    for word in _NOT_ASCII_WORD.finditer(text):
        found += _ASCII_TOKEN.findall(text, end, word.start())
        found += _TOKEN.findall(word[0])
        end = word.end()
    return found + _ASCII_TOKEN.findall(text, end)


@functools.lru_cache(_CACHED_TOKENS)
def term(token: str) -> str | None:
    """The index term of one token; None for a stop word."""
    if len(token) >= 2 and token[-1] in "sS" and token[-2] in _APOSTROPHES:
        token = token[:-2]
    word = token.lower() if token.isascii() else "".join(map(_lower, token))
    return None if word in STOP_WORDS else stem(word)


def analyze(text: str) -> list[str]:
    """The index terms of a text, in order, repeated ones too."""
    return [found for token in tokens(text) if (found := term(token)) is not None]


def _lower(character: str) -> str:
    # One character stays one character: the special cases of whole words (final sigma, dotted I) are not for the
    # index.
    lowered = character.lower()
    return lowered if len(lowered) == 1 else lowered[0]
