"""Record batches, as kafka-python writes them."""

import struct

from kafka import TopicPartition as KafkaTopicPartition
from kafka.consumer.fetcher import Fetcher
from kafka.record import MemoryRecords
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from kafka.record.util import calc_crc32c

from kafka_marshal.kafka_io.columns import Batch
from kafka_marshal.kafka_io.packed_records import PackedPiece, pack
from kafka_marshal.kafka_io.patches import LenientBatch
from kafka_marshal.kafka_io.record_batches import header_of
from kafka_marshal.ports import Records
from kafka_marshal.protocol.packed_entries import PackedEntries
from kafka_marshal.protocol.types import Token

HEADER_BYTES = DefaultRecordBatch.HEADER_STRUCT.size
BATCH_BYTES_MAX = 10**9
# The current message format; older ones have no headers.
MAGIC = 2
# The topic and partition of the records that are handed out.
PLACE = KafkaTopicPartition("t", 2)
TOKEN = Token(1, 0, 5)
# Offsets of fields in a batch header.
CRC, ATTRIBUTES = 17, 21
APPEND_TIME = 0x08
# Time, key, value and headers of typical and of odd records.
ROWS = [
    (99, b"key", b"value", [("h", b"1"), ("i", None)]),
    (0, None, b"", []),
    (2**40, b"", None, [("", b"")]),
    (5, b"k" * 200, b"v" * 70_000, []),
]


class BadText(str):
    """A header name whose written bytes are not valid UTF-8."""

    __slots__ = ()

    def encode(self, *_):
        return b"a\xff"


class LenientBatches(MemoryRecords):
    """Batches of one fetch, parsed by ``LenientBatch`` in the current format."""

    __slots__ = ()

    def next_batch(self):
        found = self._next_slice
        is_whole = found is not None and len(found) >= self.MIN_SLICE
        if not is_whole or found[self.MAGIC_OFFSET] < MAGIC:
            return super().next_batch()
        self._cache_next()
        return LenientBatch(found)


def lenient_records(start, place, records, *rest, **options):
    """Return kafka-python's records of a fetch, with any bytes as header names."""
    batches = LenientBatches(records._buffer)
    return Fetcher.PartitionRecords(start, place, batches, *rest, **options)


def new_batch():
    """Return a builder of one batch."""
    return DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=BATCH_BYTES_MAX,
    )


def built(records, *, base=0):
    """Return records as a batch that kafka-python has written and read."""
    builder = new_batch()
    for at, (time_ms, key, value, headers) in records:
        builder.append(at, timestamp=time_ms, key=key, value=value, headers=headers)
    made = bytearray(builder.build())
    struct.pack_into(">q", made, 0, base)
    return DefaultRecordBatch(made)


def batch(offset, *rows, flags=0, epoch=4):
    """Return the bytes of a batch of (time, key, value, headers)."""
    builder = new_batch()
    for at, (time_ms, key, value, headers) in enumerate(rows):
        assert builder.append(
            at, timestamp=time_ms, key=key, value=value, headers=headers
        )
    return sealed(builder.build(), offset=offset, epoch=epoch, flags=flags)


def sealed(data, *, offset=0, epoch=4, flags=0):
    """Return a batch with another offset, epoch and flags, and its checksum."""
    found = bytearray(data)
    struct.pack_into(">q", found, 0, offset)
    struct.pack_into(">i", found, 12, epoch)
    found[ATTRIBUTES + 1] |= flags
    struct.pack_into(">I", found, CRC, calc_crc32c(memoryview(found)[ATTRIBUTES:]))
    return bytes(found)


def numbered(offset, count, **settings):
    return batch(
        offset, *[(at, b"k", b"v%d" % at, []) for at in range(count)], **settings
    )


def taken(batch, *, append_ms=None):
    """Return a batch in the form that a reader of columns gets."""
    data = bytes(batch._buffer)[HEADER_BYTES:]
    return Batch(
        base=batch.base_offset,
        size=batch.records_count,
        first_ms=batch.first_timestamp,
        append_ms=append_ms,
        data=data,
    )


def run_of(raw):
    """Return the packed records of a batch; None if a parser must read the batch."""
    data = memoryview(raw)
    return pack(data, header_of(data), first=0, place=PLACE)


def piece(raw, start=0, stop=None):
    """Return some packed records of a batch."""
    found = run_of(raw)
    return PackedPiece(found, start, found.count if stop is None else stop)


def records(*pieces):
    """Return pieces as the records that are handed out."""
    return Records(pieces, token=TOKEN)


def packed(entries):
    """Return entries as packed entries, each in its own batch."""
    data, places = bytearray(), bytearray()
    for entry in entries:
        made = bytearray(built([(0, (0, None, entry.value, []))])._buffer)
        struct.pack_into(">q", made, 0, entry.offset)
        struct.pack_into(">i", made, 12, entry.leader_epoch)
        struct.pack_into(">h", made, 21, 0x08 if entry.timestamp_type == 1 else 0)
        struct.pack_into(">qq", made, 27, entry.timestamp_ms, entry.timestamp_ms)
        places += struct.pack("=ii", len(data), len(data) + HEADER_BYTES)
        data += made
    return PackedEntries(bytes(data), bytes(places))
