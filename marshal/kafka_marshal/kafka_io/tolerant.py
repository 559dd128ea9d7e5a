"""Two faults of kafka-python that no setting avoids, mended in our own clients.

Brokers accept records whose header names are not UTF-8; kafka-python 3.0 raises on
them, and its reader then never gets past the place. Whoever may write one record to
the coordination topic could so stop every reader for good (PROTOCOL 1.5 forbids
that). A consumer that reads for us parses batches by a class that differs only where
the original raises.

And what a broker says right before it closes a connection is dropped, if both are
there at the first look: a wrong password looks like a network that is down.

Both are set on the objects of one client. Classes and modules of kafka-python, which
the application may use as well, stay as they are.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import SupportsIndex, overload

from kafka.consumer.fetcher import Fetcher
from kafka.record.default_records import DefaultRecordBatch
from kafka.record.memory_records import MemoryRecords

from kafka_marshal.kafka_io.untyped import Untyped

# The number of the current format; what is older has no headers.
_MAGIC = 2


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


class TolerantBatches(MemoryRecords):  # type: ignore[misc] # untyped library
    """Batches of one fetch, whose current format is parsed by ``TolerantBatch``."""

    __slots__ = ()

    def next_batch(self) -> Untyped:
        """Return the next batch, None after the last one."""
        found = self._next_slice
        is_whole = found is not None and len(found) >= self.MIN_SLICE
        if not is_whole or found[self.MAGIC_OFFSET] < _MAGIC:
            return super().next_batch()
        self._cache_next()
        return TolerantBatch(found)


class TolerantRecords(Fetcher.PartitionRecords):  # type: ignore[misc] # untyped
    """Records of one fetch of a partition, from ``TolerantBatches``."""

    def _unpack_records(
        self, place: object, records: Untyped, *rest: object
    ) -> Iterator[Untyped]:
        batches = TolerantBatches(records._buffer)  # noqa: SLF001 - no other way in
        found: Iterator[Untyped] = super()._unpack_records(place, batches, *rest)
        return found


def read_any_header(consumer: Untyped) -> None:
    """Have a consumer read records whose header names are not UTF-8."""
    fetcher = consumer._fetcher  # noqa: SLF001 - there is no other way in
    fetcher.PartitionRecords = TolerantRecords


def change_transports(network: Untyped, change: Callable[[Untyped], None]) -> None:
    """Have a function called with each transport that a client opens from now on.

    Without the inner parts of kafka-python that this counts on, nothing changes.

    Args:
        network: The client's network, of kafka-python.
        change: Called once a transport is connected, before anything is read.
    """
    manager = getattr(network, "_manager", None)
    build = getattr(manager, "_build_transport", None)
    if manager is None or build is None:
        return

    async def built(*args: object, **settings: object) -> Untyped:
        transport = await build(*args, **settings)
        if hasattr(transport, "_sock_recv"):
            change(transport)
        return transport

    manager._build_transport = built  # noqa: SLF001 - there is no other way in


def hear_last_words(transport: Untyped) -> None:
    """Have a transport return what came, and an error where nothing did.

    Where both are there, the error comes again with the next look.
    """
    received = transport._sock_recv  # noqa: SLF001 - there is no other way in
    transport._sock_recv = partial(_received, received)  # noqa: SLF001


def _received(
    original: Callable[[], tuple[bytes, Exception | None]],
) -> tuple[bytes, Exception | None]:
    data, error = original()
    return data, None if data else error
