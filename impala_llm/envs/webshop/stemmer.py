"""The Porter stemmer (Porter, "An algorithm for suffix stripping", 1980) with its author's two later departures.

Those are bli -> ble and logi -> log in step 2; and words of one or two letters stay as they are.
Invariant: equals the stemmer that the original's search engine uses, for every word in lower case.
"""

_STEP_2 = (
    ("ational", "ate"), ("tional", "tion"), ("enci", "ence"), ("anci", "ance"), ("izer", "ize"), ("bli", "ble"),
    ("alli", "al"), ("entli", "ent"), ("eli", "e"), ("ousli", "ous"), ("ization", "ize"), ("ation", "ate"),
    ("ator", "ate"), ("alism", "al"), ("iveness", "ive"), ("fulness", "ful"), ("ousness", "ous"), ("aliti", "al"),
    ("iviti", "ive"), ("biliti", "ble"), ("logi", "log"),
)  # fmt: skip
_STEP_3 = (
    ("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"), ("ful", ""), ("ness", ""),
)  # fmt: skip
_STEP_4 = (
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou", "ism", "ate", "iti",
    "ous", "ive", "ize",
)  # fmt: skip


def stem(word: str) -> str:
    """The stem of a word in lower case. Characters other than a, e, i, o, u and y count as consonants."""
    if len(word) <= 2:
        return word
    word = _step_1b(_step_1a(word))
    if word.endswith("y") and "v" in _shape(word[:-1]):
        word = word[:-1] + "i"
    word = _replace(_replace(word, _STEP_2), _STEP_3)
    return _step_5(_step_4(word))


def _shape(word: str) -> str:
    """One letter a character: "v" for vowels, "c" for consonants; y is a vowel after a consonant."""
    shape: list[str] = []
    for letter in word:
        vowel = letter in "aeiou" or (letter == "y" and bool(shape) and shape[-1] == "c")
        shape.append("v" if vowel else "c")
    return "".join(shape)


def _measure(word: str) -> int:
    """m, the number of times that a consonant follows a vowel."""
    return _shape(word).count("vc")


def _double_consonant(word: str) -> bool:
    return len(word) >= 2 and word[-1] == word[-2] and _shape(word)[-1] == "c"


def _short_end(word: str) -> bool:
    """Ends in consonant, vowel, consonant, the last not w, x or y."""
    return _shape(word)[-3:] == "cvc" and word[-1] not in "wxy"


def _replace(word: str, rules: tuple[tuple[str, str], ...]) -> str:
    """Applies the first rule whose suffix fits, if what stands before it has m > 0."""
    for suffix, replacement in rules:
        if word.endswith(suffix):
            before = word[: -len(suffix)]
            return before + replacement if _measure(before) > 0 else word
    return word


def _step_1a(word: str) -> str:
    if word.endswith(("sses", "ies")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _step_1b(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    for suffix in ("ed", "ing"):
        before = word[: -len(suffix)]
        if word.endswith(suffix) and "v" in _shape(before):
            break
    else:
        return word
    if before.endswith(("at", "bl", "iz")):
        return before + "e"
    if _double_consonant(before):
        return before if before[-1] in "lsz" else before[:-1]
    return before + "e" if _measure(before) == 1 and _short_end(before) else before


def _step_4(word: str) -> str:
    for suffix in _STEP_4:
        if word.endswith(suffix):
            before = word[: -len(suffix)]
            if suffix == "ion" and not before.endswith(("s", "t")):
                continue
            return before if _measure(before) > 1 else word
    return word


def _step_5(word: str) -> str:
    if word.endswith("e"):
        measure = _measure(word)
        if measure > 1 or (measure == 1 and not _short_end(word[:-1])):
            word = word[:-1]
    return word[:-1] if word.endswith("ll") and _measure(word) > 1 else word
