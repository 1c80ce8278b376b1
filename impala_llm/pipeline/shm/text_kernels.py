"""Compiled checks of a record's texts. They touch only the arrays that they are given."""

from __future__ import annotations

import numpy as np

from impala_llm.compiled import compiled

_compiled = compiled()


@_compiled
def is_utf8(text: np.ndarray) -> bool:
    """Return whether uint8[n] is UTF-8 by RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF."""
    i = 0
    while i < text.size:
        first = np.int64(text[i])
        if first < 0x80:
            i += 1
            continue
        if 0xC2 <= first <= 0xDF:
            more, low, high = 1, 0x80, 0xBF
        elif 0xE0 <= first <= 0xEF:
            more = 2
            low = 0xA0 if first == 0xE0 else 0x80
            high = 0x9F if first == 0xED else 0xBF
        elif 0xF0 <= first <= 0xF4:
            more = 3
            low = 0x90 if first == 0xF0 else 0x80
            high = 0x8F if first == 0xF4 else 0xBF
        else:
            return False
        if i + more >= text.size:
            return False
        for k in range(1, more + 1):
            byte = np.int64(text[i + k])
            if byte < low or byte > high:
                return False
            low, high = 0x80, 0xBF
        i += more + 1
    return True


@_compiled
def check_names(names: np.ndarray, num_stats: int) -> bool:
    """Return whether uint8[n] holds `num_stats` different, non-empty names, with a zero byte between two.

    Args:
        names: uint8[n].
        num_stats: >= 0.
    """
    if num_stats == 0:
        return names.size == 0
    starts = np.empty(num_stats + 1, np.int64)
    starts[0] = 0
    count = 1
    for i in range(names.size):
        if names[i] == 0:
            if count == num_stats:
                return False
            starts[count] = i + 1
            count += 1
    if count != num_stats:
        return False
    starts[count] = names.size + 1
    for k in range(num_stats):
        length = starts[k + 1] - starts[k]
        if length == 1:
            return False
        for other in range(k):
            if length == starts[other + 1] - starts[other]:
                same = True
                for i in range(length - 1):
                    same = same and names[starts[k] + i] == names[starts[other] + i]
                if same:
                    return False
    return True
