"""Free space of the trajectory store: the extents that no record takes up."""

from heapq import heappop, heappush


class FreeSpace:
    """Extents [start, end) of free space. Invariant: no two of them touch.

    Records are taken from the front of one extent until it is used up; the next one is then the largest. Records that
    end in the order of their arrival thus make a ring; extents of others are joined where they touch.
    """

    def __init__(self) -> None:
        self._front = self._back = 0
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        """Heap of (-size, start) of all extents except the one in use, and of some that no longer exist."""

    def take(self, size: int) -> int | None:
        """Take a piece of this size. Returns its start; None where no extent is large enough."""
        if self._back - self._front < size:
            start = self._largest()
            if start is None or self._by_start[start] - start < size:
                return None
            end = self._by_start.pop(start)
            del self._by_end[end]
            front, back = self._front, self._back
            self._front, self._back = start, end
            self.give(front, back)
        start = self._front
        self._front += size
        return start

    def give(self, start: int, end: int) -> None:
        """Give an extent back, joined with those that it touches.

        Args:
            start, end: the extent is [start, end).
        """
        if start == end:
            return
        if end in self._by_start:
            last = self._by_start.pop(end)
            del self._by_end[last]
            end = last
        if start in self._by_end:
            first = self._by_end.pop(start)
            del self._by_start[first]
            start = first
        if start == self._back and self._front < self._back:
            self._back = end
        elif end == self._front and self._front < self._back:
            self._front = start
        else:
            self._by_start[start] = end
            self._by_end[end] = start
            heappush(self._by_size, (start - end, start))
            if len(self._by_size) > 2 * len(self._by_start) + 64:
                self._by_size = sorted((start - end, start) for start, end in self._by_start.items())

    def _largest(self) -> int | None:
        """Start of the largest extent except the one in use; None where there is none."""
        while self._by_size:
            negative, start = self._by_size[0]
            if self._by_start.get(start) == start - negative:
                return start
            heappop(self._by_size)
        return None
