"""Log entries that stay in fetched bytes until one of them is read.

Most entries of a long log are heartbeats, which are folded in runs as fetched
(``fold_beats``), so that no objects of them are needed. ``native/batches.c`` finds
where each entry is; without the compiled functions there are no packed entries.
"""

import operator
from collections.abc import Iterator, Sequence
from typing import SupportsIndex, overload

from kafka_marshal.native import compiled
from kafka_marshal.protocol.types import OFFSET_MAX, LogEntry

PLACE_BYTES = 8
# Number of entries that are decoded at once for a sequential reader: as many as stay in
# the processor's cache.
ENTRIES_AT_ONCE = 500


class PackedEntries(Sequence[LogEntry]):
    """Entries of one leader epoch and partition, in ascending order of offsets.

    Attributes:
        data: Record batches, which nobody changes.
        places: Where each entry is in ``data``, as ``native/batches.c`` writes it.
    """

    __slots__ = ("_made", "_made_from", "data", "places")

    def __init__(self, data: "bytes | memoryview", places: bytes) -> None:
        self.data = data
        self.places = places
        # The entries decoded last, and the number of the first of them.
        self._made: list[LogEntry] = []
        self._made_from = 0

    def __len__(self) -> int:
        return len(self.places) // PLACE_BYTES

    @overload
    def __getitem__(self, at: SupportsIndex) -> LogEntry: ...

    @overload
    def __getitem__(self, at: slice) -> "PackedEntries": ...

    def __getitem__(self, at: SupportsIndex | slice) -> "LogEntry | PackedEntries":
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            assert step == 1
            places = self.places[start * PLACE_BYTES : stop * PLACE_BYTES]
            return PackedEntries(self.data, places)
        number = operator.index(at)
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(number)
        end = self._made_from + len(self._made)
        if not self._made_from <= number < end:
            # Only the next entry in order is decoded with those after it.
            count = ENTRIES_AT_ONCE if number == end else 1
            self._made = self._read(number, min(number + count, len(self)))
            self._made_from = number
        return self._made[number - self._made_from]

    def __iter__(self) -> Iterator[LogEntry]:
        for start in range(0, len(self), ENTRIES_AT_ONCE):
            yield from self._read(start, min(start + ENTRIES_AT_ONCE, len(self)))

    def with_head(self, head: bytes) -> list[LogEntry]:
        """Return the entries whose value begins with these bytes."""
        assert compiled is not None
        found = compiled.find_entries(self.data, self.places, head)
        return [self._read(number, number + 1)[0] for number in found]

    def first_later(self, time_ms: int) -> int:
        """Return the number of the first entry that was appended after a time.

        The number of all entries if no entry is later.
        """
        assert compiled is not None
        if time_ms >= OFFSET_MAX:
            return len(self)
        found: int = compiled.find_later(self.data, self.places, time_ms)
        return found

    def _read(self, start: int, stop: int) -> list[LogEntry]:
        assert compiled is not None
        made: list[LogEntry] = compiled.read_entries(
            self.data, self.places, start, stop, LogEntry
        )
        return made
