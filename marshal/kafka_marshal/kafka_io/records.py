"""Records as readers hand them out: made from the client's own, when looked at.

Making a record with all its fields costs half of what fetching it by librdkafka
does, so nothing of it is done before it is needed: a poll gives a sequence over what
the client returned, and a record of it looks up there what is rarely asked for.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, overload

import msgspec

from kafka_marshal.ports import Record
from kafka_marshal.protocol.types import Token

Make = Callable[[Sequence[Any], Token | None], Iterator[Record]]

_offset = attrgetter("offset")
_value = attrgetter("value")


class Records(Sequence[Record]):
    """Records of one partition, in offset order; each is made when looked at.

    So two looks at one place give two objects, which are equal. A slice shares
    what it is cut from; a record keeps nothing alive but itself.
    """

    __slots__ = ("_make", "_sources", "_token")

    def __init__(
        self, sources: Sequence[Any], *, token: Token | None, make: Make
    ) -> None:
        """Hold what a client returned.

        Args:
            sources: The client's own records.
            token: What the records carry.
            make: Makes records of ours from some of these.
        """
        self._sources = sources
        self._token = token
        self._make = make

    @property
    def sources(self) -> Sequence[Any]:
        """What the client returned, for whoever takes columns of it."""
        return self._sources

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[Record]:
        return self._make(self._sources, self._token)

    @overload
    def __getitem__(self, at: int) -> Record: ...

    @overload
    def __getitem__(self, at: slice) -> "Records": ...

    def __getitem__(self, at: int | slice) -> "Record | Records":
        if isinstance(at, slice):
            return Records(self._sources[at], token=self._token, make=self._make)
        return next(self._make((self._sources[at],), self._token))

    def __repr__(self) -> str:
        return f"Records({list(self)!r})"


class KafkaRecord(Record, msgspec.Struct, frozen=True, gc=False):
    """A record that kafka-python fetched."""

    offset: int
    value: bytes | None
    token: Token | None
    _source: Any

    @property
    def topic(self) -> str:
        """Data topic."""
        name: str = self._source.topic
        return name

    @property
    def partition(self) -> int:
        """Data partition."""
        number: int = self._source.partition
        return number

    @property
    def timestamp_ms(self) -> int:
        """Timestamp in epoch milliseconds."""
        time_ms: int = self._source.timestamp
        return time_ms

    @property
    def timestamp_type(self) -> int:
        """A ``TimestampType`` value."""
        kind: int = self._source.timestamp_type
        return kind

    @property
    def key(self) -> bytes | None:
        """Key bytes or None."""
        key: bytes | None = self._source.key
        return key

    @property
    def headers(self) -> tuple[tuple[str, bytes], ...]:
        """Pairs of name and value."""
        return tuple(self._source.headers or ())

    @property
    def leader_epoch(self) -> int | None:
        """Leader epoch of the batch, or None."""
        epoch: int = self._source.leader_epoch
        return epoch if epoch >= 0 else None


def kafka_records(sources: Sequence[Any], token: Token | None) -> Iterator[Record]:
    """Make records from those of kafka-python."""
    # No Python frame per record: all that is called here is in C.
    return map(
        KafkaRecord,
        map(_offset, sources),
        map(_value, sources),
        repeat(token),
        sources,
    )
