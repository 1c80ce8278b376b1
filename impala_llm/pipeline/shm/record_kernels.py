"""Compiled intake of records: copies with a checksum, and the checks of a trajectory's arrays.

All functions release the GIL, so that the learner's thread computes meanwhile, and touch only the arrays they are
given. Invariant: no input makes a loop read or write outside of its arrays; shared memory is not trusted.
"""

from __future__ import annotations

import numpy as np

from impala_llm.compiled import compiled
from impala_llm.pipeline.shm.copy_kernels import (
    LARGE,
    STEP,
    borrowed,
    copy_checksum,
    fence,
    lay_end_to_end,
    mixed,
    prefetch,
    stream_line,
)
from impala_llm.pipeline.shm.record_layout import (
    ALL_FLAGS,
    BOOTSTRAP,
    CHECKSUM,
    CONTINUES,
    EPISODE_BEGIN,
    EPISODE_END,
    FACTS,
    FLAGS_WORD,
    HEADER_WORDS,
    MAGIC_WORD,
    NEWEST_VERSION,
    NUM_TOKENS,
    NUM_TOKENS_WORD,
    NUM_TURNS_WORD,
    NUM_WORDS,
    OLDEST_VERSION,
    OUTCOME,
    SCORE_WORD,
    START,
    STATS,
    STATS_WORD,
    TEXTS,
    TEXTS_WORD,
    TICKET,
    TICKET_ID,
    TICKET_ID_WORD,
    UNROLL_INDEX_WORD,
)
from impala_llm.pipeline.shm.text_kernels import check_names, is_utf8
from impala_llm.trajectory import (
    ARRAY_FIELDS,
    CONTEXT_START,
    FIELD_STARTS,
    MAX_UNROLLS,
    NO_VERSION,
    TOKEN_BYTES,
    TOKEN_FIELDS,
    TURN_BYTES,
)

_MAX_LOGPROB = np.float32(1e-4)
_LARGEST = np.finfo(np.float32).max
_ZERO, _NO_VERSION, _LEAST_VERSION = np.int32(0), np.int32(NO_VERSION), np.int32(CONTEXT_START)
_NO_NUMBER = np.float32(0)
_NO_ACTION = np.uint8(0)
_NOTHING, _EIGHT = np.uint64(0), np.uint64(8)
_ALL_FLAGS, _CONTINUES, _GOES_ON = np.uint64(ALL_FLAGS), np.uint64(CONTINUES), np.uint64(BOOTSTRAP | CONTINUES)
_TAKEN_BLOCK = 256
"""Words that are checked, summed and then stored: more than where they are only copied, since each block has a higher
fixed cost."""
_BAD, _LARGEST_TOKEN, _OLDEST, _NEWEST, _FINDINGS = range(5)
_CHECKED_FIELDS = ("tokens", "behaviour_log_probs", "versions", "rewards")
"""Fields that `_check_span` checks: the first arrays of a block, with an item of 4 bytes for each token."""
_TOKENS, _LOG_PROBS, _VERSIONS, _REWARDS = map(list(ARRAY_FIELDS).index, _CHECKED_FIELDS)
_NUM_CHECKED = len(_CHECKED_FIELDS)
_CHECKED_WORDS = _NUM_CHECKED // 2
"""Words of 8 bytes that a token has in the checked fields, two items in a word."""
assert tuple(ARRAY_FIELDS)[:_NUM_CHECKED] == _CHECKED_FIELDS, "the checked fields must be the first ones of a record"
_MASK_START, _TURNS_START = FIELD_STARTS["action_mask"], FIELD_STARTS["turns"]


def _extra_fields(kind: str) -> np.ndarray:
    """Arrays of a kind of dtype that have no rule of their own: int64[n, 4], start and number of items of each, as
    multiples of T and of K."""
    rows = []
    for name, dtype in ARRAY_FIELDS.items():
        if name not in (*_CHECKED_FIELDS, "action_mask", "turns") and dtype.base.kind == kind:
            num_items = dtype.itemsize // dtype.base.itemsize
            rows.append((*FIELD_STARTS[name], *((num_items, 0) if name in TOKEN_FIELDS else (0, num_items))))
    return np.array(rows, np.int64).reshape(-1, 4)


_EXTRA_FLOATS, _EXTRA_FLAGS = _extra_fields("f"), _extra_fields("b")
COPIED, TORN, INVALID = 1, 2, 3
"""Outcomes of `take_records`. Torn: the record lies outside of the source, or its checksum disagrees. Invalid: it is
whole, but breaks a rule."""

_compiled = compiled()


@_compiled
def _begin_findings(findings: np.ndarray) -> None:
    findings[_BAD] = 0
    findings[_LARGEST_TOKEN] = 0
    findings[_OLDEST] = 0xFFFFFFFF
    findings[_NEWEST] = -1


@compiled(inline="always")
def _check_span(
    field: int,
    ids: np.ndarray,
    versions: np.ndarray,
    numbers: np.ndarray,
    begin: int,
    mask: np.ndarray,
    first: int,
    count: int,
    findings: np.ndarray,
) -> None:
    """Check items of one of _CHECKED_FIELDS by the rules of `Trajectory`.

    All integers are uint64: numba then needs no branch for negative indices, and loops without branches become vector
    code.

    Args:
        field: _TOKENS, _LOG_PROBS, _VERSIONS or _REWARDS.
        ids, versions, numbers: the same memory as uint32, int32 and float32; the items are [begin, begin + count).
        mask: uint8[T], of which mask[first] belongs to the first item.
        findings: int64[_FINDINGS], updated.
    """
    bad = False
    if field == _TOKENS:
        largest = np.uint32(0)
        for i in range(_NOTHING, count):
            largest = max(largest, ids[begin + i])
        findings[_LARGEST_TOKEN] = max(findings[_LARGEST_TOKEN], np.int64(largest))
    elif field == _LOG_PROBS:
        for i in range(_NOTHING, count):
            number = numbers[begin + i]
            finite = (number <= _MAX_LOGPROB) & (number >= -_LARGEST)
            bad |= (not finite) | ((number != _NO_NUMBER) & (mask[first + i] == _NO_ACTION))
    elif field == _VERSIONS:
        newest = _NO_VERSION
        oldest = np.uint32(0xFFFFFFFF)
        for i in range(_NOTHING, count):
            version = versions[begin + i]
            bad |= ((version >= _ZERO) == (mask[first + i] == _NO_ACTION)) | (version < _LEAST_VERSION)
            newest = max(newest, version)
            oldest = min(oldest, np.uint32(version))  # -1 and -2 become the largest numbers
        findings[_NEWEST] = max(findings[_NEWEST], np.int64(newest))
        findings[_OLDEST] = min(findings[_OLDEST], np.int64(oldest))
    else:  # _REWARDS
        for i in range(_NOTHING, count):
            number = numbers[begin + i]
            bad |= (not abs(number) <= _LARGEST) | ((number != _NO_NUMBER) & (mask[first + i] == _NO_ACTION))
    findings[_BAD] |= np.int64(bad)


@_compiled
def _take_checked(
    target: np.ndarray, source: np.ndarray, first: int, mask: np.ndarray, block: np.ndarray, findings: np.ndarray
) -> int:
    """Copy the _CHECKED_FIELDS past the caches and check them on the way.

    Others may see the target only after a `fence`.

    Args:
        target, source: uint64[2·T].
        first: index of source[0] in its record.
        mask: uint8[T], copied already.
        block: uint64[_TAKEN_BLOCK], scratch memory. Each word is fetched once from the source, which may change
            meanwhile; the checks and the checksum are of the fetched words.

    Returns:
        The checksum of these words.
    """
    num_items = np.uint64(mask.size)
    end = np.uint64(source.size)
    address = np.uint64(target.ctypes.data)  # numba has no other way to it
    lead = (_NOTHING - (address >> np.uint64(3))) & np.uint64(7)
    ids, versions, numbers = block.view(np.uint32), block.view(np.int32), block.view(np.float32)
    total = np.uint64(0)
    field = _TOKENS
    field_end = num_items
    begin = _NOTHING
    while begin < end:
        size = min(lead if begin < lead else np.uint64(_TAKEN_BLOCK), end - begin)
        key = (np.uint64(first) + begin) * STEP
        for i in range(_NOTHING, size):
            word = source[begin + i]
            block[i] = word
            total += mixed(word, key + i * STEP)
        for i in range(_NOTHING, size, _EIGHT):
            prefetch(source, begin + size + i)
        item, last = np.uint64(2) * begin, np.uint64(2) * (begin + size)
        while item < last:
            if item == field_end:
                field += 1
                field_end += num_items
            stop = min(field_end, last)
            offset = item + num_items - field_end
            _check_span(field, ids, versions, numbers, item - np.uint64(2) * begin, mask, offset, stop - item, findings)
            item = stop
        in_lines = size & ~np.uint64(7) if address & np.uint64(7) == _NOTHING else _NOTHING
        for i in range(_NOTHING, in_lines, _EIGHT):
            stream_line(target, begin + i, block, i)
        for i in range(in_lines, size):
            target[begin + i] = block[i]
        begin += size
    return total


@_compiled
def _check_turns(turns: np.ndarray, mask: np.ndarray) -> bool:
    """Return whether the spans int32[2·K] are in order, disjoint and cover exactly the actions of the mask uint8[T],
    which holds only 0 and 1, at least one action, and none at its beginning."""
    num_actions = np.int64(0)
    bytes_seen = np.uint8(0)
    for i in range(mask.size):
        bytes_seen |= mask[i]
        num_actions += np.int64(mask[i])
    if bytes_seen > 1 or num_actions == 0 or mask[0] != 0:
        return False
    num_covered = 0
    last_end = 0
    for k in range(0, turns.size, 2):
        start, end = turns[k], turns[k + 1]
        if start < last_end or end <= start or end > mask.size:
            return False
        span = mask[start:end]
        inside = np.int64(0)
        for i in range(span.size):
            inside += np.int64(span[i])
        if inside != end - start:
            return False
        num_covered += inside
        last_end = end
    return num_covered == num_actions


@_compiled
def _mask_of(block: np.ndarray, num_tokens: int, num_turns: int) -> np.ndarray:
    """action_mask, uint8[T], in a block of arrays, uint64[n]."""
    start = _MASK_START[0] * num_tokens + _MASK_START[1] * num_turns
    return block.view(np.uint8)[start : start + num_tokens]


@_compiled
def _turns_of(block: np.ndarray, num_tokens: int, num_turns: int) -> np.ndarray:
    """turns, int32[2·K], in a block of arrays, uint64[n]."""
    start = (_TURNS_START[0] * num_tokens + _TURNS_START[1] * num_turns) // 4
    return block.view(np.int32)[start : start + 2 * num_turns]


@_compiled
def _check_extra(block: np.ndarray, num_tokens: int, num_turns: int) -> bool:
    """Return whether the arrays without a rule of their own hold finite numbers, and flags that are 0 or 1."""
    for row in range(_EXTRA_FLOATS.shape[0]):
        start = (_EXTRA_FLOATS[row, 0] * num_tokens + _EXTRA_FLOATS[row, 1] * num_turns) // 4
        count = _EXTRA_FLOATS[row, 2] * num_tokens + _EXTRA_FLOATS[row, 3] * num_turns
        numbers = block.view(np.float32)[start : start + count]
        for i in range(numbers.size):
            if not abs(numbers[i]) <= _LARGEST:
                return False
    for row in range(_EXTRA_FLAGS.shape[0]):
        start = _EXTRA_FLAGS[row, 0] * num_tokens + _EXTRA_FLAGS[row, 1] * num_turns
        count = _EXTRA_FLAGS[row, 2] * num_tokens + _EXTRA_FLAGS[row, 3] * num_turns
        flags = block.view(np.uint8)[start : start + count]
        for i in range(flags.size):
            if flags[i] > 1:
                return False
    return True


@_compiled
def _find_block(record: np.ndarray, size: int, magic: int, max_tokens: int, max_stats: int, max_text: int) -> int:
    """Word at which the arrays of a record of this size begin, by its header; 0 where it is invalid."""
    num_tokens, num_turns = np.int64(record[NUM_TOKENS_WORD]), np.int64(record[NUM_TURNS_WORD])
    flags = record[FLAGS_WORD]
    if record[MAGIC_WORD] != np.uint64(magic) or flags > _ALL_FLAGS or flags & _GOES_ON == _CONTINUES:
        return 0
    if not (1 <= num_tokens <= max_tokens and 1 <= num_turns <= max_tokens):
        return 0
    num_stats = np.int64(record[STATS_WORD] & np.uint64(0xFFFFFFFF))
    num_names = np.int64(record[STATS_WORD] >> np.uint64(32))
    if num_stats > max_stats or num_names > max_text:
        return 0
    num_text = np.int64(record[TEXTS_WORD] & np.uint64(0xFFFF)) + num_names
    for shift in range(16, 64, 16):
        num_text += np.int64((record[TEXTS_WORD] >> np.uint64(shift)) & np.uint64(0xFFFF))
    start = HEADER_WORDS + num_stats + (num_text + 7) // 8
    if size != start + (TOKEN_BYTES * num_tokens + TURN_BYTES * num_turns + 7) // 8:
        return 0
    return start


@_compiled
def _check_metadata(record: np.ndarray, block_start: int) -> bool:
    """Return whether a record's header and texts keep the rules that `_find_block` does not check."""
    num_stats = np.int64(record[STATS_WORD] & np.uint64(0xFFFFFFFF))
    num_names = np.int64(record[STATS_WORD] >> np.uint64(32))
    score = record[SCORE_WORD : SCORE_WORD + 1].view(np.float64)[0]
    num_episode = np.int64(record[TEXTS_WORD] & np.uint64(0xFFFF))
    ticket_id, unroll_index = np.int64(record[TICKET_ID_WORD]), np.int64(record[UNROLL_INDEX_WORD])
    if ticket_id < 0 or not (0 <= unroll_index < MAX_UNROLLS) or not (0.0 <= score <= 1.0) or num_episode == 0:
        return False
    text = record[HEADER_WORDS + num_stats : block_start].view(np.uint8)
    # Each text by itself: a character may not begin in one text and end in the next.
    begin = 0
    good = True
    for shift in range(0, 64, 16):
        end = begin + np.int64((record[TEXTS_WORD] >> np.uint64(shift)) & np.uint64(0xFFFF))
        good = good and is_utf8(text[begin:end])
        begin = end
    names = text[begin : begin + num_names]
    return good and is_utf8(names) and check_names(names, num_stats)


@_compiled
def take_records(
    source: np.ndarray,
    rows: np.ndarray,
    target: np.ndarray,
    starts: np.ndarray,
    magic: int,
    max_tokens: int,
    max_stats: int,
    max_text: int,
    vocab_size: int,
    large: int,
    facts: np.ndarray,
) -> None:
    """Copy records and check the copies, which no other process can change. Layout and rules: record.py.

    Args:
        source, target: uint64.
        rows: int64[n, 5], a `messages.Descriptor` each: position in the source (start and length in words) and
        checksum.
        starts: int64[n], word of the target where each record goes; there is room.
        magic, max_tokens, max_stats, max_text: constants of record.py.
        vocab_size: bound that token ids must lie below.
        large: words from which on a record is written past the caches.
        facts: int64[n, FACTS], set. The first of a row is one of COPIED, TORN and INVALID; the others are valid
            where it is COPIED.
    """
    source, target = borrowed(source), borrowed(target)
    kept_space, kept_findings = np.empty(_TAKEN_BLOCK, np.uint64), np.empty(_FINDINGS, np.int64)
    space, findings = borrowed(kept_space), borrowed(kept_findings)
    for n in range(rows.shape[0]):
        start, size = rows[n, START], rows[n, NUM_WORDS]
        facts[n, OUTCOME] = TORN
        if start < 0 or size < HEADER_WORDS or size > source.size or start > source.size - size:
            continue
        record = target[starts[n] : starts[n] + size]
        taken = source[start : start + size]
        total = copy_checksum(record[:HEADER_WORDS], taken[:HEADER_WORDS])
        # From here on only the copy is read.
        begin = _find_block(record[:HEADER_WORDS], size, magic, max_tokens, max_stats, max_text)
        num_tokens, num_turns = np.int64(record[NUM_TOKENS_WORD]), np.int64(record[NUM_TURNS_WORD])
        end = begin + _CHECKED_WORDS * num_tokens
        _begin_findings(findings)
        if begin > 0 and size >= large:
            total += copy_checksum(record[HEADER_WORDS:begin], taken[HEADER_WORDS:begin], HEADER_WORDS)
            total += copy_checksum(record[end:], taken[end:], end)
            mask = _mask_of(record[begin:], num_tokens, num_turns)
            total += _take_checked(record[begin:end], taken[begin:end], begin, mask, space, findings)
        else:
            total += copy_checksum(record[HEADER_WORDS:], taken[HEADER_WORDS:], HEADER_WORDS)
        if np.int64(total) != rows[n, CHECKSUM]:
            continue
        facts[n, OUTCOME] = INVALID
        for i in range(NUM_TOKENS_WORD, HEADER_WORDS):
            facts[n, NUM_TOKENS - NUM_TOKENS_WORD + i] = np.int64(record[i])
        # Begin and end of the text of episode_id: behind the values of the stats.
        facts[n, EPISODE_BEGIN] = 8 * (HEADER_WORDS + (facts[n, STATS] & 0xFFFFFFFF))
        facts[n, EPISODE_END] = facts[n, EPISODE_BEGIN] + (facts[n, TEXTS] & 0xFFFF)
        if begin == 0 or not _check_metadata(record, begin):
            continue
        mask = _mask_of(record[begin:], num_tokens, num_turns)
        if size < large:
            block = record[begin:end]
            ids, versions, numbers = block.view(np.uint32), block.view(np.int32), block.view(np.float32)
            for field in range(_NUM_CHECKED):
                offset = np.uint64(field * num_tokens)
                _check_span(field, ids, versions, numbers, offset, mask, _NOTHING, np.uint64(num_tokens), findings)
        good = findings[_BAD] == 0 and findings[_LARGEST_TOKEN] < vocab_size
        good = good and _check_turns(_turns_of(record[begin:], num_tokens, num_turns), mask)
        if good and _check_extra(record[begin:], num_tokens, num_turns):
            facts[n, OUTCOME] = COPIED
            facts[n, OLDEST_VERSION], facts[n, NEWEST_VERSION] = findings[_OLDEST], findings[_NEWEST]
    kept_space[0] = kept_findings[0] = 0  # kept until here
    fence()


@_compiled
def count_sound(rows: np.ndarray, facts: np.ndarray, version: int) -> int:
    """Count the records that were copied, are of their row's ticket, and of no later version.

    Args:
        rows, facts: as for `take_records`.
        version: the learner's.
    """
    count = 0
    for n in range(rows.shape[0]):
        is_due = facts[n, NEWEST_VERSION] <= version
        count += facts[n, OUTCOME] == COPIED and facts[n, TICKET_ID] == rows[n, TICKET] and is_due
    return count


def compile_ingest() -> None:
    """Compile the functions that take in records, or load them from the cache: the first record shall not wait."""
    offered = np.frombuffer(bytes(8), np.uint64)  # read-only, as what actors offer
    rows, starts, facts = np.empty((0, CHECKSUM + 1), np.int64), np.empty(0, np.int64), np.empty((0, FACTS), np.int64)
    take_records(offered, rows, np.empty(1, np.uint64), starts, 0, 0, 0, 0, 0, LARGE, facts)
    count_sound(rows, facts, 0)
    lay_end_to_end(starts, 1, starts)
