"""Compiled loops over the priority forest: sums, smallest and largest from leaf to root, and draws from root to leaf.

A segment is a run of `room` leaves, a power of two, followed by its inner levels: each node sums (or takes the extreme
of) 16 below it, and a level is padded to a multiple of 16, until one has at most 16 nodes; with up to 16 leaves there
is no inner level. The segments 0 and 1 hold a leaf for each slot of a signature, one segment for either class of
items; segment 2 + 2·slot + class holds the slot's items of that class.

Invariant: an inner node is recomputed from all of its children, never adjusted by a difference, and always in the same
order. So sums are those of the leaves to 2^-50, however many updates there were, whatever was zeroed and put back, and
they do not depend on `room`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from impala_llm.compiled import compiled

WIDTH = 16
NUM_CLASSES = 2
SMALLEST = 1e-200
"""A sum of masses below this may have lost digits in a leaf that matters: the draw is then made in logarithms."""
_BELOW_ONE = 1.0 - 2.0**-53
NO_ID = np.iinfo(np.int64).max
CHUNK = 64
"""Attempts of a draw that are made at once, at most."""
_DRAWN, _GONE = 1, 2
UNKNOWN = -1.0
"""In place of the largest |A| where none is known."""
LARGEST_LOG = 400.0
"""Of a mass: 10^6 items of it sum up to less than 1/SMALLEST."""


class Nodes(NamedTuple):
    """By place, the leaves and inner nodes of all segments."""

    mass: np.ndarray
    """float64: e^(log_base - reference) of an item, times n^-β for a slot; 0 where nothing is."""
    low: np.ndarray
    """float64: the smallest log priority; infinity where nothing is."""
    low_id: np.ndarray
    """int64: the first item that has it."""
    high: np.ndarray
    """float64: the largest known |A|."""
    row: np.ndarray
    """int64: the item's row, at leaves of items."""
    taken: np.ndarray
    """uint8: scratch of a draw, 0 outside of one."""


class Segments(NamedTuple):
    start: np.ndarray
    """int64: place of the first leaf."""
    room: np.ndarray
    """int64: leaves; 0 where there is no segment."""
    size: np.ndarray
    """int64: leaves in use, the first ones. Not kept for segments 0 and 1."""
    log_rarity: np.ndarray
    """float64, by slot: -β log n."""
    rarity: np.ndarray
    """float64, by slot: n^-β."""


class Rows(NamedTuple):
    """By row, the items."""

    item_id: np.ndarray
    version: np.ndarray
    advantage: np.ndarray
    """float64: |A|."""
    known: np.ndarray
    """int64, 0 or 1: whether the item has been trained on."""
    log_base: np.ndarray
    """float64: log priority without the factor of rarity."""
    segment: np.ndarray
    leaf: np.ndarray
    """int64: place in the segment."""
    member: np.ndarray
    """int64: place in `members` of its class."""
    members: np.ndarray
    """int64[2, ...], by class: the rows of its items, dense."""
    num_members: np.ndarray
    """int64[2]."""


class Search(NamedTuple):
    """Scratch of searches that go on side by side."""

    first: np.ndarray
    begin: np.ndarray
    count: np.ndarray
    shift: np.ndarray


_compiled = compiled()


@_compiled
def _sum(mass: np.ndarray, begin: int, count: int) -> float:
    """Of up to 16 masses, in an order that zeros behind them do not change."""
    if count == WIDTH:
        m = mass[begin : begin + WIDTH]  # constant places in it need no check of their sign
        a = (m[0] + m[4]) + (m[8] + m[12])
        b = (m[1] + m[5]) + (m[9] + m[13])
        c = (m[2] + m[6]) + (m[10] + m[14])
        d = (m[3] + m[7]) + (m[11] + m[15])
        return (a + b) + (c + d)
    if count == 8:
        a = mass[begin] + mass[begin + 4]
        b = mass[begin + 1] + mass[begin + 5]
        c = mass[begin + 2] + mass[begin + 6]
        d = mass[begin + 3] + mass[begin + 7]
        return (a + b) + (c + d)
    if count == 4:
        return (mass[begin] + mass[begin + 1]) + (mass[begin + 2] + mass[begin + 3])
    if count == 2:
        return mass[begin] + mass[begin + 1]
    return mass[begin]


@_compiled
def _climb(mass: np.ndarray, start: int, room: int, leaf: int) -> float:
    """Recompute the sums above a leaf; returns that of the segment."""
    begin, count, i = start, room, leaf
    while count > WIDTH:
        i >>= 4
        above = begin + count
        mass[above + i] = _sum(mass, begin + (i << 4), WIDTH)
        begin, count = above, max(WIDTH, count >> 4)
    return _sum(mass, begin, count)


@_compiled
def _climb_extremes(nodes: Nodes, start: int, room: int, leaf: int) -> tuple[bool, float, int, float]:
    """Recompute the extremes above a leaf as far as they change.

    Returns whether those of the segment may have changed, and what they are.
    """
    begin, count, i = start, room, leaf
    while True:
        i >>= 4
        first = begin + (i << 4)
        low, low_id, high = np.inf, NO_ID, UNKNOWN
        for k in range(first, first + min(count, WIDTH)):
            value = nodes.low[k]
            if value < low or (value == low and nodes.low_id[k] < low_id):
                low, low_id = value, nodes.low_id[k]
            high = max(high, nodes.high[k])
        if count <= WIDTH:
            return True, low, low_id, high
        above = begin + count
        place = above + i
        if nodes.low[place] == low and nodes.low_id[place] == low_id and nodes.high[place] == high:
            return False, 0.0, 0, 0.0
        nodes.low[place], nodes.low_id[place], nodes.high[place] = low, low_id, high
        begin, count = above, max(WIDTH, count >> 4)


@_compiled
def _climb_top(nodes: Nodes, segments: Segments, segment: int, total: float) -> None:
    """Bring the new sum of an item segment into the segment of its class."""
    top, slot = segment & 1, (segment >> 1) - 1
    start = segments.start[top]
    nodes.mass[start + slot] = total * segments.rarity[slot]
    _climb(nodes.mass, start, segments.room[top], slot)


@_compiled
def _refresh_extremes(nodes: Nodes, segments: Segments, segment: int, leaf: int) -> None:
    start, room = segments.start[segment], segments.room[segment]
    changed, low, low_id, high = _climb_extremes(nodes, start, room, leaf)
    if changed:
        top, slot = segment & 1, (segment >> 1) - 1
        place = segments.start[top] + slot
        low += segments.log_rarity[slot]
        if nodes.low[place] != low or nodes.low_id[place] != low_id or nodes.high[place] != high:
            nodes.low[place], nodes.low_id[place], nodes.high[place] = low, low_id, high
            _climb_extremes(nodes, segments.start[top], segments.room[top], slot)


@_compiled
def refresh(nodes: Nodes, segments: Segments, segment: int, leaf: int) -> None:
    """After a change of a leaf of an item segment: everything above it."""
    start, room = segments.start[segment], segments.room[segment]
    _climb_top(nodes, segments, segment, _climb(nodes.mass, start, room, leaf))
    _refresh_extremes(nodes, segments, segment, leaf)


@_compiled
def _last_level(start: int, room: int) -> tuple[int, int]:
    """Place and number of the nodes right below the root."""
    begin, count = start, room
    while count > WIDTH:
        begin, count = begin + count, max(WIDTH, count >> 4)
    return begin, count


@_compiled
def total(nodes: Nodes, segments: Segments, segment: int) -> float:
    """Sum of the masses of a segment."""
    begin, count = _last_level(segments.start[segment], segments.room[segment])
    return _sum(nodes.mass, begin, count)


@_compiled
def _climb_extremes_of(nodes: Nodes, start: int, room: int) -> tuple[bool, float, int, float]:
    """As `_climb_extremes`, of the whole segment, with nothing to recompute."""
    begin, count = _last_level(start, room)
    return _climb_extremes(nodes, begin, count, 0)


@_compiled
def _set_top_extremes(nodes: Nodes, segments: Segments, slot: int, top: int) -> None:
    segment = 2 + 2 * slot + top
    _, low, low_id, high = _climb_extremes_of(nodes, segments.start[segment], segments.room[segment])
    place = segments.start[top] + slot
    nodes.low[place] = low + segments.log_rarity[slot]
    nodes.low_id[place], nodes.high[place] = low_id, high


@_compiled
def set_rarity(nodes: Nodes, segments: Segments, slot: int, log_rarity: float) -> None:
    """Set -β log n of a slot, for the items of both classes."""
    segments.log_rarity[slot], segments.rarity[slot] = log_rarity, math.exp(log_rarity)
    for top in range(NUM_CLASSES):
        segment = 2 + 2 * slot + top
        if segments.room[segment] > 0:
            _climb_top(nodes, segments, segment, total(nodes, segments, segment))
            _set_top_extremes(nodes, segments, slot, top)
            _climb_extremes(nodes, segments.start[top], segments.room[top], slot)


@_compiled
def extremes(nodes: Nodes, segments: Segments) -> tuple[int, float]:
    """The item of the lowest priority, the first among equals, and the largest known |A|, over both classes."""
    low, low_id, high = np.inf, NO_ID, UNKNOWN
    for top in range(NUM_CLASSES):
        _, value, item_id, advantage = _climb_extremes_of(nodes, segments.start[top], segments.room[top])
        if value < low or (value == low and item_id < low_id):
            low, low_id = value, item_id
        high = max(high, advantage)
    return low_id, high


@_compiled
def write_leaf(nodes: Nodes, segments: Segments, rows: Rows, row: int, reference: float) -> None:
    """Put an item into the leaf that its row names, without what is above it."""
    place = segments.start[rows.segment[row]] + rows.leaf[row]
    nodes.mass[place] = math.exp(rows.log_base[row] - reference)
    nodes.low[place] = rows.log_base[row]
    nodes.low_id[place] = rows.item_id[row]
    nodes.high[place] = rows.advantage[row] if rows.known[row] != 0 else UNKNOWN
    nodes.row[place] = row


@_compiled
def log_base(version: int, advantage: float, recency_tau: float, exponent: float, epsilon: float) -> float:
    """Log priority without the factor of rarity, up to a constant: v/τ + α log(|A| + ε)."""
    value = version / recency_tau
    if exponent > 0.0:
        value += exponent * math.log(advantage + epsilon)
    return value


@_compiled
def _clear_place(nodes: Nodes, place: int) -> None:
    nodes.mass[place] = 0.0
    nodes.low[place] = np.inf
    nodes.low_id[place] = NO_ID
    nodes.high[place] = UNKNOWN


@_compiled
def clear(nodes: Nodes, begin: int, end: int) -> None:
    """Empty a range of places."""
    for place in range(begin, end):
        _clear_place(nodes, place)


@_compiled
def enter(nodes: Nodes, segments: Segments, rows: Rows, row: int, segment: int, reference: float) -> None:
    """Put an item into a segment that has room, behind its last leaf, and into the list of its class."""
    _take_place(nodes, segments, rows, row, segment, reference)
    refresh(nodes, segments, segment, rows.leaf[row])


@_compiled
def _take_place(nodes: Nodes, segments: Segments, rows: Rows, row: int, segment: int, reference: float) -> None:
    top = segment & 1
    rows.segment[row], rows.leaf[row] = segment, segments.size[segment]
    rows.member[row] = rows.num_members[top]
    rows.members[top, rows.num_members[top]] = row
    rows.num_members[top] += 1
    segments.size[segment] += 1
    write_leaf(nodes, segments, rows, row, reference)


@_compiled
def leave(nodes: Nodes, segments: Segments, rows: Rows, row: int) -> None:
    """Take an item out of its segment and the list of its class; the last ones move into the gaps."""
    _give_up_place(nodes, segments, rows, row)
    slot = (rows.segment[row] >> 1) - 1
    set_rarity(nodes, segments, slot, segments.log_rarity[slot])


@_compiled
def _give_up_place(nodes: Nodes, segments: Segments, rows: Rows, row: int) -> None:
    """As `leave`, without what is above the segment."""
    segment, leaf = rows.segment[row], rows.leaf[row]
    top, start = segment & 1, segments.start[segment]
    rows.num_members[top] -= 1
    moved = rows.members[top, rows.num_members[top]]
    rows.members[top, rows.member[row]] = moved
    rows.member[moved] = rows.member[row]
    segments.size[segment] -= 1
    last = segments.size[segment]
    if leaf != last:
        place = start + last
        nodes.mass[start + leaf] = nodes.mass[place]
        nodes.low[start + leaf] = nodes.low[place]
        nodes.low_id[start + leaf] = nodes.low_id[place]
        nodes.high[start + leaf] = nodes.high[place]
        nodes.row[start + leaf] = nodes.row[place]
        rows.leaf[nodes.row[place]] = leaf
    _clear_place(nodes, start + last)
    room = segments.room[segment]
    _climb(nodes.mass, start, room, last)
    _climb_extremes(nodes, start, room, last)
    if leaf >> 4 != last >> 4:
        _climb(nodes.mass, start, room, leaf)
        _climb_extremes(nodes, start, room, leaf)


@_compiled
def _move_row(nodes: Nodes, segments: Segments, rows: Rows, source: int, target: int) -> None:
    """Give an item another row; the old one's content has no meaning any more."""
    rows.item_id[target] = rows.item_id[source]
    rows.version[target] = rows.version[source]
    rows.advantage[target] = rows.advantage[source]
    rows.known[target] = rows.known[source]
    rows.log_base[target] = rows.log_base[source]
    rows.segment[target] = rows.segment[source]
    rows.leaf[target] = rows.leaf[source]
    rows.member[target] = rows.member[source]
    rows.members[rows.segment[target] & 1, rows.member[target]] = target
    nodes.row[segments.start[rows.segment[target]] + rows.leaf[target]] = target


@_compiled
def move_rows(nodes: Nodes, segments: Segments, rows: Rows, sources: np.ndarray, targets: np.ndarray) -> None:
    """Give items other rows, int64[n] each."""
    for i in range(sources.size):
        _move_row(nodes, segments, rows, sources[i], targets[i])


@_compiled
def _count_again(nodes: Nodes, segments: Segments, slot: int, rarity_exponent: float) -> None:
    """Set -β log n after items of a slot have come or gone, and all sums and extremes above it."""
    count = max(1, segments.size[2 + 2 * slot] + segments.size[3 + 2 * slot])
    set_rarity(nodes, segments, slot, -rarity_exponent * math.log(count))


@_compiled
def append(
    nodes: Nodes,
    segments: Segments,
    rows: Rows,
    num_rows: int,
    item_ids: np.ndarray,
    versions: np.ndarray,
    slots: np.ndarray,
    rarity_exponent: float,
    recency_tau: float,
    exponent: float,
    epsilon: float,
    reference: float,
) -> tuple[int, float]:
    """Add items behind the last row, int64[k] each; |A| counts as the largest known one, and as 1 where none is.

    Returns:
        How many were added, and the log_base of the last one that was looked at: fewer than k where a segment is full,
        or where a mass would be too large for the reference.
    """
    _, largest = extremes(nodes, segments)
    advantage = 1.0 if largest == UNKNOWN else largest
    base = reference
    for i in range(item_ids.size):
        slot, row = slots[i], num_rows + i
        segment = 2 + 2 * slot
        base = log_base(versions[i], advantage, recency_tau, exponent, epsilon)
        if segments.size[segment] == segments.room[segment] or base - reference > LARGEST_LOG:
            return i, base
        rows.item_id[row], rows.version[row], rows.advantage[row] = item_ids[i], versions[i], advantage
        rows.known[row], rows.log_base[row] = 0, base
        _take_place(nodes, segments, rows, row, segment, reference)
        start, room, leaf = segments.start[segment], segments.room[segment], rows.leaf[row]
        _climb(nodes.mass, start, room, leaf)
        _climb_extremes(nodes, start, room, leaf)
        _count_again(nodes, segments, slot, rarity_exponent)
    return item_ids.size, base


@_compiled
def remove(nodes: Nodes, segments: Segments, rows: Rows, gone: np.ndarray, rarity_exponent: float) -> None:
    """Take items out, whose rows are int64[k]; their rows and their segments' room stay as they are."""
    for i in range(gone.size):
        _give_up_place(nodes, segments, rows, gone[i])
        _count_again(nodes, segments, (rows.segment[gone[i]] >> 1) - 1, rarity_exponent)


@_compiled
def remove_lowest(nodes: Nodes, segments: Segments, rows: Rows, gone: np.ndarray, rarity_exponent: float) -> None:
    """Take out the item of the lowest priority, the oldest among equals, k times, and set their rows, int64[k]."""
    for i in range(gone.size):
        item_id, _ = extremes(nodes, segments)
        top = 0
        if _climb_extremes_of(nodes, segments.start[1], segments.room[1])[2] == item_id:
            top = 1
        slot = _leaf_of_lowest(nodes, segments.start[top], segments.room[top], item_id)
        segment = 2 + 2 * slot + top
        leaf = _leaf_of_lowest(nodes, segments.start[segment], segments.room[segment], item_id)
        gone[i] = nodes.row[segments.start[segment] + leaf]
        _give_up_place(nodes, segments, rows, gone[i])
        _count_again(nodes, segments, slot, rarity_exponent)


@_compiled
def _leaf_of_lowest(nodes: Nodes, start: int, room: int, item_id: int) -> int:
    """Where, in a segment, the item is that has its lowest log priority."""
    begin, count, shift = start, room, 0
    while count > WIDTH:
        begin, count, shift = begin + count, max(WIDTH, count >> 4), shift + 4
    first = 0
    while True:
        while nodes.low_id[begin + first] != item_id:
            first += 1
        if shift == 0:
            return first
        shift -= 4
        begin -= room if shift == 0 else max(WIDTH, room >> shift)
        first <<= 4


@_compiled
def sum_up(nodes: Nodes, segments: Segments, segment: int, num_leaves: int) -> None:
    """Everything above the first leaves of a segment, from the leaves."""
    start, room = segments.start[segment], segments.room[segment]
    for leaf in range(0, num_leaves, WIDTH):
        _climb(nodes.mass, start, room, leaf)
        _climb_extremes(nodes, start, room, leaf)


@_compiled
def write_all(nodes: Nodes, segments: Segments, rows: Rows, num_rows: int, num_slots: int, reference: float) -> None:
    """Fill emptied segments from the rows."""
    for row in range(num_rows):
        write_leaf(nodes, segments, rows, row, reference)
    for slot in range(num_slots):
        for top in range(NUM_CLASSES):
            segment = 2 + 2 * slot + top
            if segments.size[segment] == 0:
                continue
            sum_up(nodes, segments, segment, segments.size[segment])
            place = segments.start[top] + slot
            nodes.mass[place] = total(nodes, segments, segment) * segments.rarity[slot]
            _set_top_extremes(nodes, segments, slot, top)
    for top in range(NUM_CLASSES):
        sum_up(nodes, segments, top, num_slots)


@_compiled
def set_advantages(
    nodes: Nodes,
    segments: Segments,
    rows: Rows,
    changed: np.ndarray,
    values: np.ndarray,
    recency_tau: float,
    exponent: float,
    epsilon: float,
    reference: float,
) -> float:
    """New |A|, float64[k], of rows, int64[k]; negative rows are passed over. Returns the largest new log_base."""
    highest = -np.inf
    begins, counts, leaves = np.empty_like(changed), np.empty_like(changed), np.empty_like(changed)
    # Step by step for all, so that their cache misses overlap.
    for i in range(changed.size):
        row = changed[i]
        counts[i] = 0
        if row >= 0:
            leaves[i], counts[i] = rows.leaf[row], segments.room[rows.segment[row]]
            begins[i] = segments.start[rows.segment[row]]
            value = log_base(rows.version[row], values[i], recency_tau, exponent, epsilon)
            rows.advantage[row], rows.known[row], rows.log_base[row] = values[i], 1, value
            highest = max(highest, value)
    matters = np.empty(changed.size, np.bool_)
    for i in range(changed.size):
        matters[i] = counts[i] > 0
        if counts[i] > 0:
            value = rows.log_base[changed[i]]
            place = begins[i] + leaves[i]
            nodes.mass[place] = math.exp(value - reference)
            if counts[i] > WIDTH:
                above = begins[i] + counts[i] + (leaves[i] >> 4)
                low, high = nodes.low[above], nodes.high[above]
                matters[i] = (nodes.low[place] <= low) | (value <= low)
                matters[i] |= (nodes.high[place] >= high) | (values[i] >= high)
            nodes.low[place], nodes.high[place] = value, values[i]
    below_top = False
    while not below_top:
        below_top = True
        for i in range(changed.size):
            if counts[i] > WIDTH:
                below_top = False
                leaves[i] >>= 4
                above = begins[i] + counts[i]
                nodes.mass[above + leaves[i]] = _sum(nodes.mass, begins[i] + (leaves[i] << 4), WIDTH)
                begins[i], counts[i] = above, max(WIDTH, counts[i] >> 4)
    for i in range(changed.size):
        row = changed[i]
        if row >= 0:
            segment = rows.segment[row]
            slot = (segment >> 1) - 1
            leaf_sum = _sum(nodes.mass, begins[i], counts[i])
            nodes.mass[segments.start[segment & 1] + slot] = leaf_sum * segments.rarity[slot]
    # only where it was an extreme of its group, or is one now
    for i in np.flatnonzero(matters):
        _refresh_extremes(nodes, segments, rows.segment[changed[i]], rows.leaf[changed[i]])
    room = segments.room[0]
    many = changed.size * 4 * WIDTH >= room
    for top in range(NUM_CLASSES):
        start = segments.start[top]
        if many:
            for slot in range(0, room, WIDTH):
                _climb(nodes.mass, start, room, slot)
    if not many:
        for i in range(changed.size):
            if changed[i] >= 0:
                segment = rows.segment[changed[i]]
                _climb(nodes.mass, segments.start[segment & 1], room, (segment >> 1) - 1)
    return highest


@_compiled
def _last_with_mass(mass: np.ndarray, begin: int, count: int) -> int:
    last = 0
    for i in range(count):
        if mass[begin + i] > 0.0:
            last = i
    return last


@_compiled
def _choose(mass: np.ndarray, begin: int, count: int, x: float) -> tuple[int, float]:
    """Which of up to 16 masses the running sum passes x at, and the sum before it; one of the last where it never does.

    Without branches on the masses: they could not be predicted, and the next descent could not start meanwhile.
    """
    chosen, before = 0, 0.0
    if count == WIDTH:
        m = mass[begin : begin + WIDTH]
        a = (m[0] + m[1]) + (m[2] + m[3])
        b = a + ((m[4] + m[5]) + (m[6] + m[7]))
        c = b + ((m[8] + m[9]) + (m[10] + m[11]))
        chosen = 4 * (np.int64(a <= x) + np.int64(b <= x) + np.int64(c <= x))
        before = a if a <= x else before
        before = b if b <= x else before
        before = c if c <= x else before
        m = mass[begin + chosen : begin + chosen + 4]
        a = before + m[0]
        b = a + m[1]
        c = b + m[2]
        chosen += np.int64(a <= x) + np.int64(b <= x) + np.int64(c <= x)
        before = a if a <= x else before
        before = b if b <= x else before
        before = c if c <= x else before
        return chosen, before
    running = before
    for i in range(count - 1):
        running += mass[begin + i]
        chosen += np.int64(running <= x)
        before = running if running <= x else before
    return chosen, before


@_compiled
def _step(mass: np.ndarray, begin: int, count: int, x: float) -> tuple[int, float]:
    """The child, among up to 16, at which the running sum passes x, and what is left of x there. It has a mass."""
    chosen, before = _choose(mass, begin, min(count, WIDTH), x)
    if mass[begin + chosen] > 0.0:
        return chosen, x - before
    chosen = _last_with_mass(mass, begin, min(count, WIDTH))  # rounding led behind the last one
    return chosen, mass[begin + chosen] * _BELOW_ONE


@_compiled
def _find(nodes: Nodes, segments: Segments, top: int, x: np.ndarray, places: np.ndarray, search: Search) -> None:
    """Places of the items whose shares of the class's mass hold x, float64[n]; x is used up.

    All searches go down a level before the first goes down the next, so that their cache misses overlap.
    """
    mass, first, begins, counts, shifts = nodes.mass, search.first, search.begin, search.count, search.shift
    begin, count, shift = segments.start[top], segments.room[top], 0
    while count > WIDTH:
        begin, count, shift = begin + count, max(WIDTH, count >> 4), shift + 4
    for j in range(x.size):
        first[j] = 0
    while True:
        for j in range(x.size):
            chosen, x[j] = _step(mass, begin + first[j], count, x[j])
            first[j] += chosen
        if shift == 0:
            break
        shift -= 4
        count = segments.room[top] if shift == 0 else max(WIDTH, segments.room[top] >> shift)
        begin -= count
        for j in range(x.size):
            first[j] <<= 4
    live = 0
    for j in range(x.size):
        segment = 2 + 2 * first[j] + top
        x[j] /= segments.rarity[first[j]]
        begin, count, shift = segments.start[segment], segments.room[segment], 0
        while count > WIDTH:
            begin, count, shift = begin + count, max(WIDTH, count >> 4), shift + 4
        first[j], begins[j], counts[j], shifts[j] = 0, begin, count, shift
        places[j] = segment
        live += 1
    while live > 0:
        live = 0
        for j in range(x.size):
            if shifts[j] < 0:
                continue
            chosen, x[j] = _step(mass, begins[j] + first[j], counts[j], x[j])
            first[j] += chosen
            shifts[j] -= 4
            room = segments.room[places[j]]
            if shifts[j] < 0:
                places[j] = begins[j] + first[j]
                continue
            counts[j] = room if shifts[j] == 0 else max(WIDTH, room >> shifts[j])
            begins[j] -= counts[j]
            first[j] <<= 4
            live += 1


@_compiled
def draw(
    nodes: Nodes,
    segments: Segments,
    rows: Rows,
    top: int,
    floor: float,
    uniforms: np.ndarray,
    drawn: np.ndarray,
    log_density: np.ndarray,
) -> int:
    """Draw distinct items of a class, one after the other, each with P_i over the sum of P of those still there.

    Attempts are made some at a time: each is an item with probability P_i, and passed over if that is drawn already,
    which leaves the others in their proportions. The masses of what was passed over are then taken out for the rest of
    the draw. At most twice as many attempts are made at once as items were drawn by those before, and at least one: so
    3·k + CHUNK attempts are enough, however unequal the masses.

    Args:
        top: the class.
        floor: share of the probability that is spread evenly.
        uniforms: float64[3·k + CHUNK] in [0, 1).
        drawn, log_density: int64[k] and float64[k], set: rows, and log(N·P_i).

    Returns:
        How many were drawn: fewer than k if what is left has too little mass for its sum to be trusted, and -1 if that
        is so from the beginning.
    """
    num_wanted = drawn.size
    members = rows.members[top]
    num_alive = rows.num_members[top]
    remaining = total(nodes, segments, top)
    if remaining < SMALLEST:
        return -1
    by_mass = (1.0 - floor) / remaining
    by_count = floor / num_alive
    gone, gone_from = np.empty(num_wanted, np.int64), np.empty(num_wanted, np.int64)
    gone_mass = np.empty(num_wanted, np.float64)
    num_gone = 0
    x, places = np.empty(CHUNK, np.float64), np.empty(CHUNK, np.int64)
    by_share = np.empty(CHUNK, np.int64)
    share_places = np.empty(CHUNK, np.int64)
    search = Search(
        np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64)
    )
    num_drawn, num_used, num_attempts = 0, 0, CHUNK
    while num_drawn < num_wanted and (floor > 0.0 or remaining >= SMALLEST):
        num_attempts = min(num_attempts, num_wanted - num_drawn)
        a, b = remaining * by_mass, num_alive * by_count
        num_shares = 0
        for i in range(num_attempts):
            u = uniforms[num_used + i] * (a + b)
            if u < a or b == 0.0:
                x[num_shares] = min(u / a, _BELOW_ONE) * remaining
                by_share[num_shares] = i
                num_shares += 1
            else:
                row = members[min(int((u - a) / by_count), num_alive - 1)]
                places[i] = segments.start[rows.segment[row]] + rows.leaf[row]
        num_used += num_attempts
        _find(nodes, segments, top, x[:num_shares], share_places, search)
        for i in range(num_shares):
            places[by_share[i]] = share_places[i]
        num_before, first_gone = num_drawn, num_gone
        for i in range(num_attempts):
            place = places[i]
            if nodes.taken[place] == 0:
                nodes.taken[place] = _DRAWN
                drawn[num_drawn] = place
                num_drawn += 1
            elif nodes.taken[place] == _DRAWN:
                nodes.taken[place] = _GONE
                gone[num_gone] = place
                num_gone += 1
        for k in range(first_gone, num_gone):
            place = gone[k]
            row = nodes.row[place]
            gone_from[k], gone_mass[k] = rows.member[row], nodes.mass[place]
            _set_mass(nodes, segments, rows, row, place, 0.0)
            num_alive -= 1
            _swap_members(rows, members, gone_from[k], num_alive)
        if num_gone > first_gone:
            remaining = total(nodes, segments, top)
        num_attempts = min(CHUNK, max(1, 2 * (num_drawn - num_before)))
    for k in range(num_gone - 1, -1, -1):
        _set_mass(nodes, segments, rows, nodes.row[gone[k]], gone[k], gone_mass[k])
        _swap_members(rows, members, gone_from[k], num_alive)
        num_alive += 1
    for k in range(num_drawn):
        place = drawn[k]
        nodes.taken[place] = 0
        drawn[k] = nodes.row[place]
        log_density[k] = nodes.mass[place]
    log_whole = math.log(num_alive) + (math.log(by_mass) if by_mass > 0.0 else -np.inf)
    for k in range(num_drawn):
        slot = (rows.segment[drawn[k]] >> 1) - 1
        mass = log_density[k]
        if by_count > 0.0:
            log_density[k] = math.log(num_alive * (mass * segments.rarity[slot] * by_mass + by_count))
        else:
            # not in one product: that may be too small for a number while the weights, which are ratios, are not
            log_density[k] = math.log(mass) + segments.log_rarity[slot] + log_whole
    return num_drawn


@_compiled
def _set_mass(nodes: Nodes, segments: Segments, rows: Rows, row: int, place: int, mass: float) -> None:
    nodes.mass[place] = mass
    segment = rows.segment[row]
    leaf_sum = _climb(nodes.mass, segments.start[segment], segments.room[segment], rows.leaf[row])
    _climb_top(nodes, segments, segment, leaf_sum)


@_compiled
def _swap_members(rows: Rows, members: np.ndarray, i: int, j: int) -> None:
    members[i], members[j] = members[j], members[i]
    rows.member[members[i]], rows.member[members[j]] = i, j
