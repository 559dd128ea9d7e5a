"""Fetched records as a record batch of Arrow, without an object for each record.

``native/arrow.c`` copies them into one block of memory, which Arrow takes over. This
module uses an internal name of Arrow, so it is not part of ``packed_records``, which
imports kafka-python and may not use internal names of any library.
"""

from functools import cache
from typing import TYPE_CHECKING

from kafka_marshal.kafka_io.packed_records import PackedPiece
from kafka_marshal.native import compiled
from kafka_marshal.ports import Records

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa


@cache
def _from_address() -> "Callable[[int], pa.RecordBatch]":
    """Return the function that takes over an exported structure."""
    import pyarrow as pa

    schema = pa.schema(
        {
            "offset": pa.int64(),
            "timestamp": pa.timestamp("ms", "UTC"),
            "key": pa.binary(),
            "value": pa.binary(),
        }
    )
    # Arrow documents it; ``pa.record_batch`` would import the schema each time.
    take_over = pa.RecordBatch._import_from_c  # noqa: SLF001
    return lambda address: take_over(address, schema)


def to_arrow(records: Records) -> "pa.RecordBatch | None":
    """Return the columns of ``Batch.to_arrow``; None if they must be made of lists.

    That is so if a parser has read some of the records, or if the records have more
    bytes than a column can have.

    Raises:
        ImportError: pyarrow is not installed.
    """
    pieces = [each for each in records.pieces if isinstance(each, PackedPiece)]
    if len(pieces) < len(records.pieces) or not pieces:
        return None
    assert compiled is not None
    found = compiled.export_records(
        *[
            (run.data, run.places, start, stop, run.fields)
            for run, start, stop in pieces
        ]
    )
    if found is None:
        return None
    # The capsule owns the exported structure until Arrow has taken it over.
    address, _capsule = found
    return _from_address()(address)
