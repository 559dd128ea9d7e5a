"""Batches of records, commit tokens, and the ranges of offsets to commit."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import attrs
import msgspec

from kafka_marshal.errors import ConfigurationError, InvalidTransition
from kafka_marshal.ports import Record, Records, column_of, offset_at
from kafka_marshal.protocol.types import Token, TopicPartition, seek_count_of

if TYPE_CHECKING:
    import pyarrow as pa


class CommitRange(Protocol):
    """Commits a range of records of a partition, both ends inclusive."""

    def __call__(
        self, partition: tuple[str, int], token: Token | None, *, first: int, last: int
    ) -> None:
        """Commit the range; raises as ``Consumer.commit`` does."""
        ...


@attrs.frozen
class Batch:
    """Records of one partition, handed out together under one claim.

    ``records`` makes ``Record`` objects. The columns ``offsets``, ``timestamps_ms``,
    ``keys`` and ``values``, and ``to_arrow``, do not, and take less than half the time.

    A batch can be pickled and processed in another process, but not committed there.
    In the process that holds the claim, ``Consumer.commit`` accepts the batch itself,
    or the copy that the other process has returned.

    Attributes:
        partition: Data partition.
        token: Fencing token of the claim.
    """

    partition: TopicPartition
    _records: Sequence[Record]
    token: Token
    _commit: CommitRange

    def __repr__(self) -> str:
        """Return a description with partition, offsets and token, but no records."""
        return (
            f"<Batch {self.partition} offsets {self.first_offset} to "
            f"{self.last_offset} token={self.token}>"
        )

    def __reduce__(self) -> tuple[Callable[..., "Batch"], tuple[object, ...]]:
        """Pickle the records, and not the consumer."""
        return _elsewhere, (self.partition, self.records, self.token)

    def __copy__(self) -> Self:
        """Return the batch itself, which is immutable."""
        return self

    def __len__(self) -> int:
        """Return the number of records, at least 1."""
        return len(self._records)

    @cached_property
    def records(self) -> tuple[Record, ...]:
        """The records, in offset order."""
        return tuple(self._records)

    @property
    def first_offset(self) -> int:
        """Offset of the first record."""
        return offset_at(self._records, 0)

    @property
    def last_offset(self) -> int:
        """Offset of the last record."""
        return offset_at(self._records, -1)

    @property
    def offsets(self) -> Sequence[int]:
        """Offset of each record; a range if none is missing between them."""
        first, last = self.first_offset, self.last_offset
        if last - first == len(self) - 1:
            # Offsets ascend, so none between these two is missing.
            return range(first, last + 1)
        return column_of(self._records, "offset")

    @property
    def timestamps_ms(self) -> list[int]:
        """Timestamp of each record, in epoch milliseconds."""
        return column_of(self._records, "timestamp_ms")

    @property
    def keys(self) -> list[bytes | None]:
        """Key of each record."""
        return column_of(self._records, "key")

    @property
    def values(self) -> list[bytes | None]:
        """Value of each record."""
        return column_of(self._records, "value")

    def to_arrow(self) -> "pa.RecordBatch":
        """Return columns ``offset``, ``timestamp``, ``key`` and ``value`` of Arrow.

        Keeping a column or a slice keeps the memory of all columns.

        Raises:
            ConfigurationError: pyarrow is not installed.
        """
        pa, of_fetched = _arrow()
        if isinstance(self._records, Records):
            found = of_fetched(self._records)
            if found is not None:
                return found
        return pa.record_batch(
            {
                "offset": pa.array(self.offsets, pa.int64()),
                "timestamp": pa.array(self.timestamps_ms, pa.timestamp("ms", "UTC")),
                "key": pa.array(self.keys, pa.binary()),
                "value": pa.array(self.values, pa.binary()),
            }
        )

    def commit(self) -> None:
        """Commit every record of the batch; see ``Consumer.commit``."""
        self._commit(
            self.partition, self.token, first=self.first_offset, last=self.last_offset
        )


def _elsewhere(
    partition: TopicPartition, records: Sequence[Record], token: Token
) -> Batch:
    """Return an unpickled batch, which has no consumer and cannot be committed."""

    def commit(
        partition: tuple[str, int], token: Token | None, *, first: int, last: int
    ) -> None:
        del token
        raise InvalidTransition(
            f"offsets {first} to {last} of {TopicPartition(*partition)} were pickled, "
            "and cannot be committed here; return the batch to the process that holds "
            "the claim, and call commit(batch) of its consumer there"
        )

    return Batch(partition=partition, records=records, token=token, commit=commit)


@cache
def _arrow() -> "tuple[Any, Callable[[Records], pa.RecordBatch | None]]":
    """Return pyarrow, and the function that makes record batches of fetched bytes.

    Raises:
        ConfigurationError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise ConfigurationError(
            "Columns of Arrow need pyarrow: pip install pyarrow", setting="pyarrow"
        ) from error
    from kafka_marshal.kafka_io.arrow import to_arrow

    return pa, to_arrow


class CommitToken(msgspec.Struct, frozen=True, gc=False):
    """Identifies a record to commit, without its content; see ``Consumer.commit``.

    It has a few dozen bytes and can be pickled: another process that does the work can
    return it to the process that holds the claim.

    Attributes:
        topic: Data topic.
        partition: Data partition.
        offset: Offset of the record.
        token: Fencing token of the claim under which it was handed out.
    """

    topic: str
    partition: int
    offset: int
    token: Token | None

    @classmethod
    def of(cls, record: Record) -> Self:
        """Return the token of a record that was handed out.

        Raises:
            TypeError: The argument is not a record.
        """
        if not isinstance(record, Record | cls):
            raise TypeError(
                "a commit token is of one record that was handed out, not of "
                f"{type(record).__name__}"
            )
        return cls(record.topic, record.partition, record.offset, record.token)


Committable = Record | CommitToken
Processed = (
    Committable
    | Batch
    | Iterable[Committable | Batch]
    | Mapping[TopicPartition, Iterable[Committable]]
)
"""The arguments that ``commit`` accepts."""


def _is_same(one: Token | None, other: Token | None) -> bool:
    """Return whether two tokens are of the same claim and the same seek."""
    if one is other:
        return True
    return one == other and seek_count_of(one) == seek_count_of(other)


class Run(NamedTuple):
    """Consecutive offsets of one partition, claim and seek, both ends inclusive."""

    partition: tuple[str, int]
    token: Token | None
    first: int
    last: int


def runs_of(records: object) -> Iterator[Run]:
    """Yield the runs of consecutive offsets that have exactly these records.

    There are as few runs as possible if each partition's records are in order.

    Args:
        records: Records and batches, or lists of records by partition, as ``poll``
            returns them.

    Raises:
        TypeError: The argument is something else, such as offsets.
    """
    if isinstance(records, Batch):
        yield _run_of(records)
    elif isinstance(records, Mapping):
        for each in records.values():
            yield from runs_of(each)
    elif isinstance(records, Iterable) and not isinstance(records, str | bytes):
        yield from _runs_of_several(records)
    else:
        raise _not_committable(records)


def _run_of(batch: Batch) -> Run:
    return Run(
        partition=batch.partition,
        token=batch.token,
        first=batch.first_offset,
        last=batch.last_offset,
    )


def _runs_of_several(records: Iterable[Any]) -> Iterator[Run]:
    topic, number, first, last = "", -1, -1, -1
    token: Token | None = None
    for record in records:
        try:
            offset = record.offset
        except AttributeError:
            if not isinstance(record, Batch):
                raise _not_committable(record) from None
            yield _run_of(record)
            continue
        if (
            offset == last + 1
            and record.partition == number
            and record.topic == topic
            and _is_same(record.token, token)
        ):
            last = offset
            continue
        if number >= 0:
            yield Run(partition=(topic, number), token=token, first=first, last=last)
        try:
            topic, number, token = record.topic, record.partition, record.token
        except AttributeError:  # a record of another client library
            raise _not_committable(record) from None
        first = last = offset
    if number >= 0:
        yield Run(partition=(topic, number), token=token, first=first, last=last)


def _not_committable(given: object) -> TypeError:
    return TypeError(
        "commit takes records that were handed out, one or several, batches, or what "
        f"poll returned, not {type(given).__name__}; without an argument it commits "
        "all; to move a position call seek"
    )
