"""Lets kafka-python read records whose header names are not UTF-8.

Brokers accept such records; kafka-python 3.0 raises on them, and its reader
then never gets past the place. Whoever may write one record to the coordination
topic could so stop every reader for good (PROTOCOL 1.5 forbids that). There is
no setting for it, so the class that parses a batch is replaced, for the whole
process, by one that differs only where the original raises.
"""

from typing import SupportsIndex, overload

from kafka.record import memory_records
from kafka.record.default_records import DefaultRecordBatch

from kafka_marshal.kafka_io.untyped import Untyped


class _Text(bytes):
    """A slice that decodes to text whatever it holds."""

    __slots__ = ()

    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        """Return text, with U+FFFD where the bytes are none."""
        return super().decode(encoding, errors)


class _Buffer(bytes):
    """Bytes whose slices decode leniently; single bytes stay integers."""

    __slots__ = ()

    @overload
    def __getitem__(self, at: SupportsIndex) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> bytes: ...

    def __getitem__(self, at: SupportsIndex | slice) -> int | bytes:
        item = super().__getitem__(at)
        return item if isinstance(item, int) else _Text(item)


class TolerantBatch(DefaultRecordBatch):  # type: ignore[misc] # untyped library
    """A batch that replaces what is not UTF-8 in a header name by U+FFFD."""

    def _read_msg(self) -> Untyped:
        at: int = self._pos  # type: ignore[has-type] # untyped library
        try:
            return super()._read_msg()
        except UnicodeDecodeError:
            # The rest of the batch is read leniently too: one copy is enough.
            self._buffer = _Buffer(self._buffer)  # type: ignore[has-type]
            self._pos = at
            return super()._read_msg()


def install() -> None:
    """Make kafka-python use ``TolerantBatch``. Doing it again changes nothing."""
    memory_records.DefaultRecordBatch = TolerantBatch
