"""The batches of a fetch over kafka-python: the part that all readers share.

Consumers make records of batches, readers of exact ranges make columns, and readers of
the coordination log make entries. This module handles what comes before: batches that
are cut off, checksums, aborted transactions, control batches, and offsets without a
record.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from kafka.errors import CorruptRecordError

from kafka_marshal.kafka_io.patches import fetcher_of, raw_bytes
from kafka_marshal.kafka_io.record_batches import (
    Header,
    has_checksum,
    header_of,
    is_abort,
    python_records,
    whole_batches,
)

_NO_EPOCH = -1
_NO_PRODUCER = -1


@attrs.frozen(kw_only=True)
class FetchData:
    """What a fetch has returned for one partition.

    Attributes:
        place: The partition, by kafka-python's type.
        offset: Offset that was requested; a batch may begin before it.
        data: The batches.
        aborted: Aborted transactions, which the broker reports with ``read_committed``.
        is_checked: Whether to compare checksums.
        on_drain: Called once with the reader of the fetch, after its last record.
    """

    place: Any
    offset: int = 0
    data: memoryview
    aborted: Sequence[Any] = ()
    is_checked: bool = True
    on_drain: Callable[[Any], None] = lambda _: None


class FetchedBatches:
    """Reader of one fetch, whose content a subclass returns by ``take``.

    Replaces kafka-python's ``Fetcher.PartitionRecords``. It has the same public
    attributes and methods, which kafka-python's fetcher reads between polls.

    Attributes:
        topic_partition: The partition, by kafka-python's type.
        next_fetch_offset: Offset behind what was taken.
        leader_epoch: Leader epoch of the batch that was taken last; -1 if unknown.
        bytes_read: Size of the fetch once something of it was read.
    """

    def __init__(self, fetch: FetchData) -> None:
        """Read nothing yet."""
        self.topic_partition = fetch.place
        self.next_fetch_offset = fetch.offset
        self.leader_epoch = _NO_EPOCH
        self.bytes_read = 0
        self._fetch = fetch
        # Where the first batch begins that was not read yet.
        self._at = 0
        self._is_drained = False
        # The error that ended the reading; each later call raises it.
        self._error: Exception | None = None
        self._aborted = deque(sorted(fetch.aborted, key=lambda each: each.first_offset))
        self._aborting: set[int] = set()

    def __bool__(self) -> bool:
        return not self._is_drained

    def drain(self) -> None:
        """End the reading. Idempotent."""
        if not self._is_drained:
            self._is_drained = True
            self._fetch.on_drain(self)

    def next_batch(self) -> tuple[memoryview, Header | None] | None:
        """Return the next batch with records for the application; None behind the last.

        The header is None in formats before 2. This moves the position over batches
        without such records; the caller moves it over returned batches.

        Raises:
            CorruptRecordError: The next batch is damaged.
        """
        if self._error is not None:
            raise self._error
        for batch in whole_batches(self._fetch.data[self._at :]):
            self._at += len(batch)
            header = header_of(batch)
            self.bytes_read = len(self._fetch.data)
            if header is None:
                return batch, None
            if self._fetch.is_checked and not has_checksum(batch, header):
                raise CorruptRecordError(
                    f"the batch at offset {header.base_offset} of "
                    f"{self.topic_partition} has a wrong checksum"
                )
            self.leader_epoch = header.leader_epoch
            if self._is_visible(batch, header):
                if header.records_count > 0:
                    return batch, header
                # Compaction removed its records. Let the parser check its end.
                next(python_records(batch), None)
            self._move_to(header.next_offset)
        return None

    def _is_visible(self, batch: memoryview, header: Header) -> bool:
        """Return whether a batch has records for the application.

        Without ``read_committed`` no transaction is reported as aborted.
        """
        producer_id = header.producer_id
        if producer_id > _NO_PRODUCER:
            last = header.next_offset - 1
            while self._aborted and self._aborted[0].first_offset <= last:
                self._aborting.add(self._aborted.popleft().producer_id)
            if producer_id in self._aborting:
                if header.is_control:
                    if is_abort(batch):
                        self._aborting.discard(producer_id)
                elif header.is_transactional:
                    return False
        return not header.is_control

    def _skip_to(self, at: int, leader_epoch: int) -> None:
        """Skip batches that were read in another way.

        Args:
            at: Where they end, in bytes.
            leader_epoch: Leader epoch of the last one.
        """
        self._at, self.leader_epoch = at, leader_epoch
        self.bytes_read = len(self._fetch.data)

    def _move_to(self, offset: int) -> None:
        self.next_fetch_offset = max(self.next_fetch_offset, offset)


def read_fetches(consumer: Any, read: Callable[[FetchData], FetchedBatches]) -> None:
    """Make a consumer read its fetches by ``read`` instead of kafka-python's class."""

    def fetched(
        offset: int,
        place: Any,
        records: Any,
        *,
        check_crcs: bool = True,
        aborted_transactions: Sequence[Any] | None = None,
        on_drain: Callable[[Any], None] = lambda _: None,
        **_: object,
    ) -> FetchedBatches:
        # Other arguments are deserializers and metrics, which readers do not set.
        return read(
            FetchData(
                place=place,
                offset=offset,
                data=memoryview(raw_bytes(records)),
                aborted=aborted_transactions or (),
                is_checked=check_crcs,
                on_drain=on_drain,
            )
        )

    fetcher_of(consumer).PartitionRecords = fetched
