"""Record batches, as kafka-python writes them."""

import struct

from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from kafka_marshal.kafka_io.columns import Batch

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
