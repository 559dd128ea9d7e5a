"""Record batches, as kafka-python writes them."""

import struct

from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from kafka_marshal.kafka_io.columns import Batch
from kafka_marshal.protocol.packed_entries import PackedEntries

HEADER_BYTES = DefaultRecordBatch.HEADER_STRUCT.size
BATCH_BYTES_MAX = 10**9


class BadText(str):
    """A header name that is no text once it is written."""

    __slots__ = ()

    def encode(self, *_):
        return b"a\xff"


def new_batch():
    """Return what a batch is built with."""
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
    """Return the batch of some records, as kafka-python writes and reads it."""
    builder = new_batch()
    for at, (time_ms, key, value, headers) in records:
        builder.append(at, timestamp=time_ms, key=key, value=value, headers=headers)
    made = bytearray(builder.build())
    struct.pack_into(">q", made, 0, base)
    return DefaultRecordBatch(made)


def taken(batch, *, append_ms=None):
    """Return a batch as a reader of columns gets it."""
    data = bytes(batch._buffer)[HEADER_BYTES:]
    return Batch(
        base=batch.base_offset,
        size=batch.records_count,
        first_ms=batch.first_timestamp,
        append_ms=append_ms,
        data=data,
    )


def packed(entries):
    """Return entries as packed ones, each in a batch of its own."""
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
