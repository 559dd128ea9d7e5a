"""Records that librdkafka fetched."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from operator import methodcaller
from typing import Any

import msgspec
from confluent_kafka import Message

from kafka_marshal.kafka_io.untyped import Untyped
from kafka_marshal.ports import Record
from kafka_marshal.protocol.types import Token

# It may be None for messages that are no records.
_offset: Callable[[Any], int] = Message.offset  # type: ignore[assignment]
# Not called as a method: once a call of one is hot, Python looks no longer for an
# exception beside a result, which is how this one fails.
_headers = methodcaller("headers")
_NO_TEXT = "\ufffd"


class FastRecord(Record, msgspec.Struct, frozen=True, gc=False):
    """A record that librdkafka fetched."""

    offset: int
    value: bytes | None
    token: Token | None
    _source: Any

    @property
    def topic(self) -> str:
        """Data topic."""
        name: str = self._source.topic()
        return name

    @property
    def partition(self) -> int:
        """Data partition."""
        number: int = self._source.partition()
        return number

    @property
    def timestamp_ms(self) -> int:
        """Timestamp in epoch milliseconds."""
        time_ms: int = self._source.timestamp()[1]
        return time_ms

    @property
    def timestamp_type(self) -> int:
        """A ``TimestampType`` value."""
        # PROTOCOL 2.1: librdkafka's numbers are the wire's and one.
        kind: int = self._source.timestamp()[0] - 1
        return kind

    @property
    def key(self) -> bytes | None:
        """Key bytes or None."""
        key: bytes | None = self._source.key()
        return key

    @property
    def headers(self) -> tuple[tuple[str, bytes], ...]:
        """Pairs of name and value."""
        return headers_of(self._source)

    @property
    def leader_epoch(self) -> int | None:
        """Leader epoch of the batch, or None."""
        epoch: int | None = self._source.leader_epoch()
        return epoch


def headers_of(message: Untyped) -> tuple[tuple[str, bytes], ...]:
    """Return a message's headers, whatever bytes their names are.

    confluent-kafka fails where a name is not UTF-8, the first time only. After
    that it returns pairs with nothing in the place of such a name: these may be
    printed, and their second half taken, but the first must not be touched. So
    they are replaced in the message itself, before anybody else asks.
    """
    try:
        return tuple(_headers(message) or ())
    except (SystemError, UnicodeDecodeError):
        pairs = _headers(message) or ()
    sound = [
        (_NO_TEXT, pair[1]) if repr(pair).startswith("(<NULL>") else pair
        for pair in pairs
    ]
    message.set_headers(sound)
    return tuple(sound)


def fast_records(messages: Sequence[Any], token: Token | None) -> Iterator[Record]:
    """Make records from messages of one partition."""
    if not messages:
        return iter(())
    first, last = messages[0].offset(), messages[-1].offset()
    is_whole = last - first == len(messages) - 1
    offsets: Iterable[int] = (
        # Offsets of one partition grow, so none between these two is missing.
        range(first, last + 1) if is_whole else map(_offset, messages)
    )
    # No Python frame per record: all that is called here is in C.
    return map(
        FastRecord, offsets, map(Message.value, messages), repeat(token), messages
    )
