"""Items by priority: a tree of sums for each signature, under a tree over the signatures.

    p_i = e^(-age_i/τ) · (|A_i| + ε)^α · n(signature_i)^-β        P_i = (1 - u) p_i / Σp + u/N

An item is added, removed, changed or drawn in O(log N), in the worst case too, but for arrays that double:
- the age enters as e^(version_i/τ), the same up to a factor that is common to all, so nothing is rewritten when the
  learner's version advances. The factor is e^(-reference), which moves once in hundreds of τ versions;
- n^-β is a factor of a signature's whole tree, so nothing is rewritten when an item of it comes or goes.

Invariant: a draw is by the definition, to rounding. Where the sums cannot hold it (what is left differs from the rest
by a factor of 10^200, say, or an exponent is huge), it is made in logarithms over all items, in O(N).
"""

import math

import numpy as np

from impala_llm.replay import kernels
from impala_llm.replay.columns import moves
from impala_llm.replay.order import Draw
from impala_llm.replay.state import State

# What belongs to one item or node lies together, so that it comes into the cache at once: a row has one line of it.
_ROW = np.dtype(
    [
        ("item_id", np.int64),
        ("version", np.int64),
        ("advantage", np.float64),
        ("log_base", np.float64),
        ("segment", np.int64),
        ("leaf", np.int64),
        ("member", np.int64),
        ("known", np.int64),
    ]
)
_MARK = np.dtype([("low", np.float64), ("low_id", np.int64), ("high", np.float64)])


def _rows_of(table: np.ndarray, members: np.ndarray, num_members: np.ndarray) -> kernels.Rows:
    fields = {name: table[name] for name in _ROW.names or ()}
    return kernels.Rows(**fields, members=members, num_members=num_members)


def _nodes_of(mass: np.ndarray, marks: np.ndarray, row: np.ndarray, taken: np.ndarray) -> kernels.Nodes:
    return kernels.Nodes(mass=mass, **{name: marks[name] for name in _MARK.names or ()}, row=row, taken=taken)


class PriorityForest:
    """An `Order`. See `PrioritySampler` for the settings.

    Args:
        separate: fresh and replayed items are two classes, and each draw is from one of them; N, P and the sums are
            those of the class, n is of both.
    """

    _table: np.ndarray
    _marks: np.ndarray
    _rows: kernels.Rows
    _nodes: kernels.Nodes
    _segments: kernels.Segments
    _reference: float

    def __init__(
        self,
        recency_tau: float,
        advantage_exponent: float,
        advantage_epsilon: float,
        rarity_exponent: float,
        uniform_floor: float,
        separate: bool,
    ) -> None:
        self._base_settings = (float(recency_tau), float(advantage_exponent), float(advantage_epsilon))
        self._rarity_exponent = rarity_exponent
        self._floor = float(uniform_floor)
        self._separate = separate
        self._clear(1, 1)

    def append(self, item_ids: np.ndarray, versions: np.ndarray, slots: np.ndarray) -> None:
        """As `Order.append`. |A| counts as the largest known one, and as 1 where none is."""
        while self._num_rows + len(item_ids) > len(self._rows.item_id):
            self._table = _grown(self._table)
            self._rows = _rows_of(self._table, _grown(self._rows.members), self._rows.num_members)
        if self._rarity_exponent == 0.0:
            slots = np.zeros_like(slots)
        elif slots.max() >= self._segments.room[0]:
            self._add_slots(int(slots.max()) + 1)
        num_added = 0
        while num_added < len(item_ids):
            # It stops where there is something to be done for the next item.
            num_new, log_base = kernels.append(
                self._nodes,
                self._segments,
                self._rows,
                self._num_rows,
                item_ids[num_added:],
                versions[num_added:],
                slots[num_added:],
                self._rarity_exponent,
                *self._base_settings,
                self._reference,
            )
            num_added += num_new
            self._num_rows += num_new
            if num_added == len(item_ids):
                break
            if self._num_rows == 0:
                self._reference = log_base
            elif log_base - self._reference > kernels.LARGEST_LOG:
                self._rebase(log_base)
            segment = 2 + 2 * int(slots[num_added])
            if self._segments.size[segment] == self._segments.room[segment]:
                self._allocate(segment, max(1, 2 * int(self._segments.room[segment])))

    def remove(self, rows: np.ndarray) -> None:
        kernels.remove(self._nodes, self._segments, self._rows, rows, self._rarity_exponent)
        self._close_up(rows)

    def remove_lowest(self, num_items: int) -> np.ndarray:
        gone = np.empty(num_items, np.int64)
        kernels.remove_lowest(self._nodes, self._segments, self._rows, gone, self._rarity_exponent)
        self._close_up(gone)
        return gone

    def set_advantages(self, rows: np.ndarray, abs_advantages: np.ndarray) -> None:
        highest = kernels.set_advantages(
            self._nodes, self._segments, self._rows, rows, abs_advantages, *self._base_settings, self._reference
        )
        if highest - self._reference > kernels.LARGEST_LOG:
            self._rebase(highest)

    def set_replayed(self, rows: np.ndarray) -> None:
        for row in rows.tolist():
            segment = int(self._rows.segment[row])
            kernels.leave(self._nodes, self._segments, self._rows, row)
            self._fit(segment)
            self._enter(row, segment | 1)

    def draw(self, num_items: int, rng: np.random.Generator, replayed: bool = False) -> Draw:
        top = int(replayed)
        drawn, log_density = np.empty(num_items, np.int64), np.empty(num_items)
        uniforms = rng.random(3 * num_items + kernels.CHUNK)
        for attempt in range(2):
            num_drawn = kernels.draw(
                self._nodes, self._segments, self._rows, top, self._floor, uniforms, drawn, log_density
            )
            if num_drawn >= 0:
                break
            if attempt == 0:
                self._rebase(self._largest_log_base())
        if num_drawn < num_items:
            return self._draw_in_logarithms(top, drawn[: max(0, num_drawn)], num_items, rng)
        return Draw(drawn, log_density)

    def state_dict(self) -> State:
        rows = self._rows
        arrays = {
            "abs_advantages": rows.advantage,
            "advantage_known": rows.known.astype(np.bool_),
            "leaves": rows.leaf,
            "members": rows.member,
        }
        return {"reference": self._reference} | {k: v[: self._num_rows].copy() for k, v in arrays.items()}

    def load_state_dict(
        self,
        state: State,
        item_ids: np.ndarray,
        versions: np.ndarray,
        slots: np.ndarray,
        replayed: np.ndarray,
    ) -> None:
        num_rows = len(item_ids)
        if self._rarity_exponent == 0.0:
            slots = np.zeros_like(slots)
        counts = np.bincount(slots, minlength=1)
        self._clear(num_rows, len(counts))
        self._num_rows = num_rows
        rows, segments = self._rows, self._segments
        rows.item_id[:num_rows], rows.version[:num_rows] = item_ids, versions
        rows.advantage[:num_rows], rows.known[:num_rows] = state["abs_advantages"], state["advantage_known"]
        rows.leaf[:num_rows], rows.member[:num_rows] = state["leaves"], state["members"]
        classes = replayed.astype(np.int64) if self._separate else np.zeros(num_rows, np.int64)
        rows.segment[:num_rows] = 2 + 2 * slots + classes
        for row in range(num_rows):
            rows.log_base[row] = kernels.log_base(int(versions[row]), float(rows.advantage[row]), *self._base_settings)
        for top in range(kernels.NUM_CLASSES):
            of_class = np.flatnonzero(classes == top)
            rows.num_members[top] = len(of_class)
            rows.members[top, rows.member[of_class]] = of_class
        sizes = np.bincount(rows.segment[:num_rows], minlength=len(segments.size))
        segments.size[:] = sizes
        for segment in np.flatnonzero(sizes).tolist():
            self._allocate(segment, 1 << (int(sizes[segment]) - 1).bit_length())
        used = np.flatnonzero(counts)
        for slot, count in zip(used.tolist(), counts[used].tolist(), strict=True):
            segments.log_rarity[slot] = -self._rarity_exponent * math.log(count)
            segments.rarity[slot] = math.exp(segments.log_rarity[slot])
        self._reference = state["reference"]
        if (
            num_rows and self._largest_log_base() - self._reference > kernels.LARGEST_LOG
        ):  # other settings than when saved
            self._reference = self._largest_log_base()
        self._rebase(self._reference)

    def _clear(self, num_rows: int, num_slots: int) -> None:
        self._num_rows = 0
        self._reference = 0.0
        room = 1 << max(6, (num_rows - 1).bit_length())
        self._table = _aligned((room,), _ROW)
        self._rows = _rows_of(
            self._table, np.zeros((kernels.NUM_CLASSES, room), np.int64), np.zeros(kernels.NUM_CLASSES, np.int64)
        )
        self._marks = np.zeros(256, _MARK)
        self._nodes = _nodes_of(np.zeros(256), self._marks, np.zeros(256, np.int64), np.zeros(256, np.uint8))
        self._num_places = 0
        self._free: dict[int, list[int]] = {}
        """Starts of the runs that no segment has, by their room."""
        self._segments = kernels.Segments(*(np.zeros(0, t) for t in (np.int64, np.int64, np.int64, float, float)))
        self._add_slots(num_slots)

    def _add_slots(self, num_slots: int) -> None:
        """Make room for at least so many."""
        room = 1 << (num_slots - 1).bit_length()
        by_segment, by_slot = self._segments[:3], self._segments[3:]
        self._segments = kernels.Segments(
            *(_lengthened(array, 2 + 2 * room) for array in by_segment),
            *(_lengthened(array, room) for array in by_slot),
        )
        for top in range(kernels.NUM_CLASSES):
            self._allocate(top, room)

    def _enter(self, row: int, segment: int) -> None:
        if self._segments.size[segment] == self._segments.room[segment]:
            self._allocate(segment, max(1, 2 * int(self._segments.room[segment])))
        kernels.enter(self._nodes, self._segments, self._rows, row, segment, self._reference)

    def _fit(self, segment: int) -> None:
        """Give back what a segment needs no longer."""
        size, room = int(self._segments.size[segment]), int(self._segments.room[segment])
        needed = room
        while needed and size <= needed // 4:
            needed = needed // 2 if size else 0
        if needed < room:
            self._allocate(segment, needed)

    def _close_up(self, gone: np.ndarray) -> None:
        """After items have left: give back their room, and move rows into their gaps."""
        segments = self._rows.segment[gone]
        for segment in segments[self._segments.size[segments] <= self._segments.room[segments] // 4].tolist():
            self._fit(segment)
        kernels.move_rows(self._nodes, self._segments, self._rows, *moves(gone, self._num_rows))
        self._num_rows -= len(gone)

    def _allocate(self, segment: int, room: int) -> None:
        """Move a segment to where it has this room; 0 gives up its place."""
        start, old_room = int(self._segments.start[segment]), int(self._segments.room[segment])
        new_start = 0
        if room:
            free = self._free.setdefault(room, [])
            if free:
                new_start = free.pop()
            else:
                new_start = self._num_places
                self._num_places += _num_nodes(room)
                while self._num_places > len(self._nodes.mass):
                    self._marks = _grown(self._marks)
                    self._nodes = _nodes_of(
                        _grown(self._nodes.mass), self._marks, _grown(self._nodes.row), _grown(self._nodes.taken)
                    )
            kernels.clear(self._nodes, new_start, new_start + _num_nodes(room))
            num_moved = min(room, old_room)
            for array in self._nodes:
                array[new_start : new_start + num_moved] = array[start : start + num_moved]
        if old_room:
            self._free.setdefault(old_room, []).append(start)
        self._segments.start[segment], self._segments.room[segment] = new_start, room
        if room and old_room:
            kernels.sum_up(self._nodes, self._segments, segment, num_moved)

    def _rebase(self, reference: float) -> None:
        """Write all masses with another common factor."""
        self._reference = reference
        kernels.clear(self._nodes, 0, self._num_places)
        num_slots = len(self._segments.log_rarity)
        kernels.write_all(self._nodes, self._segments, self._rows, self._num_rows, num_slots, reference)

    def _largest_log_base(self) -> float:
        return float(self._rows.log_base[: self._num_rows].max())

    def _members(self, top: int) -> np.ndarray:
        return self._rows.members[top, : self._rows.num_members[top]]

    def _draw_in_logarithms(self, top: int, drawn: np.ndarray, num_items: int, rng: np.random.Generator) -> Draw:
        """Draw what is still missing. The smallest E_i/P_i with E_i exponential are a sequential draw without
        replacement (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006)."""
        members = self._members(top)
        count = len(members)
        slots = (self._rows.segment[members] >> 1) - 1
        log_p = self._rows.log_base[members] + self._segments.log_rarity[slots]
        log_p = log_p - log_p.max()
        log_p -= np.log(np.exp(log_p).sum())
        if self._floor == 1.0:
            log_p = np.full(count, -math.log(count))
        elif self._floor > 0.0:
            log_p = np.logaddexp(math.log1p(-self._floor) + log_p, math.log(self._floor / count))
        keys = np.log(rng.standard_exponential(count)) - log_p
        already = self._rows.member[drawn]
        keys[already] = -np.inf
        chosen = np.argpartition(keys, num_items - 1)[:num_items]
        chosen = chosen[np.argsort(keys[chosen])]
        chosen[: len(drawn)] = already
        return Draw(members[chosen], log_p[chosen] + math.log(count))


def _num_nodes(room: int) -> int:
    """Places of a segment, inner levels included."""
    total = room
    while room > kernels.WIDTH:
        room = max(kernels.WIDTH, room // kernels.WIDTH)
        total += room
    return total


def _grown(array: np.ndarray) -> np.ndarray:
    """Twice as long, in the last dimension."""
    grown = _aligned((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    grown[..., : array.shape[-1]] = array
    return grown


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros that begin with a cache line, so that a group of 16 numbers has two and not three."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + num_bytes].view(dtype).reshape(shape)


def _lengthened(array: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([array, np.zeros(length - len(array), array.dtype)])
