"""Which parts of an arena are free."""

from __future__ import annotations

from bisect import bisect_left


class Extents:
    """Free ranges of ``size`` bytes, taken from the low end so that few pages are ever touched."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        self._starts = [0]
        self._lengths = [size]

    def take(self, length: int) -> int | None:
        """The offset of ``length`` bytes, now taken, or None if no range is that long."""
        for i, available in enumerate(self._lengths):
            if available >= length:
                return self._cut(i, length)
        return None

    def take_up_to(self, length: int, least: int) -> tuple[int, int] | None:
        """(offset, bytes) of the longest range there is, at most ``length``; None if that is less than ``least``."""
        longest = max(self._lengths, default=0)
        if longest < least:
            return None
        got = min(length, longest)
        return self._cut(next(i for i, available in enumerate(self._lengths) if available >= got), got), got

    def give_back(self, start: int, length: int) -> None:
        """Free a range that was taken, joining it to its neighbours."""
        starts, lengths = self._starts, self._lengths
        self.free += length
        i = bisect_left(starts, start)
        joins_next = i < len(starts) and start + length == starts[i]
        joins_previous = i > 0 and starts[i - 1] + lengths[i - 1] == start
        if joins_previous and joins_next:
            lengths[i - 1] += length + lengths[i]
            del starts[i], lengths[i]
        elif joins_previous:
            lengths[i - 1] += length
        elif joins_next:
            starts[i] = start
            lengths[i] += length
        else:
            starts.insert(i, start)
            lengths.insert(i, length)

    def _cut(self, i: int, length: int) -> int:
        start = self._starts[i]
        self.free -= length
        if self._lengths[i] == length:
            del self._starts[i], self._lengths[i]
        else:
            self._starts[i] += length
            self._lengths[i] -= length
        return start
