"""Two faults of kafka-python that no setting avoids, mended for the whole process.

Brokers accept records whose header names are not UTF-8; kafka-python 3.0 raises on
them, and its reader then never gets past the place. Whoever may write one record to
the coordination topic could so stop every reader for good (PROTOCOL 1.5 forbids
that). The class that parses a batch is replaced by one that differs only where the
original raises.

And what a broker says right before it closes a connection is dropped, if both are
there at the first look: a wrong password looks like a network that is down.
"""

from typing import SupportsIndex, overload

from kafka.net.transport import KafkaSSLTransport, KafkaTCPTransport
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


def hearing_last_words(transport: Untyped) -> None:
    """Have a kind of transport return what came, and an error where nothing did.

    Where both are there, the error comes again with the next look.
    """
    received = transport._sock_recv  # noqa: SLF001 - there is no other place

    def receive(self: Untyped) -> tuple[bytes, Exception | None]:
        data, error = received(self)
        return data, None if data else error

    if received.__name__ != receive.__name__:
        transport._sock_recv = receive  # noqa: SLF001


def install() -> None:
    """Mend kafka-python. Doing it again changes nothing."""
    memory_records.DefaultRecordBatch = TolerantBatch
    hearing_last_words(KafkaTCPTransport)
    hearing_last_words(KafkaSSLTransport)
