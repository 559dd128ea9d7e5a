"""Record batches, as kafka-python writes them."""

from kafka.record.default_records import DefaultRecordBatchBuilder

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
