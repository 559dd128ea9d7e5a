"""Record batches decoded into columns, without an object for each record.

One loop follows the lengths of records to find where each starts. Everything else is
arithmetic on whole arrays, and Arrow copies keys and values once. The format is message
format 2, the only one that brokers still write.

``native/columns.c`` does the same, if it was compiled. This module is the rule: the
native function leaves headers and everything malformed to it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
from kafka.errors import CorruptRecordError

from kafka_marshal.native import compiled
from kafka_marshal.protocol.types import OFFSET_MAX, OffsetRange

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa


Headers = Sequence[tuple[str, bytes | None]]

_VARINT_BITS_MAX = 63
# Bytes of a varint above this are followed by another.
_LAST = 127


class Slice(NamedTuple):
    """Consecutive records of one partition, column by column.

    A column is a sequence, or an array of NumPy or Arrow.

    Attributes:
        offsets: Offsets, ascending.
        times_ms: Timestamps in epoch milliseconds.
        kinds: ``TimestampType`` values.
        keys: Keys.
        values: Values.
        headers: Headers, or None if not requested.
    """

    offsets: Any
    times_ms: Any
    kinds: Any
    keys: Any
    values: Any
    headers: Sequence[Headers] | None


@attrs.frozen(kw_only=True)
class Batch:
    """One record batch with a valid checksum.

    Attributes:
        base: Base offset.
        size: Number of records.
        first_ms: Base timestamp.
        append_ms: Log append time, if the topic uses it.
        data: Its records, decompressed.
    """

    base: int
    size: int
    first_ms: int
    append_ms: int | None
    data: Any


def to_columns(
    batches: Sequence[Batch], span: OffsetRange, *, with_headers: bool
) -> Slice | None:
    """Return the records of a range as columns, or None if there are none.

    Args:
        batches: Batches, in the order of the log.
        span: Offsets to return.
        with_headers: Whether to return headers.

    Raises:
        CorruptRecordError: A record is malformed.
    """
    if compiled is not None and not with_headers and span.end <= OFFSET_MAX:
        found = compiled.to_columns(batches, span.first, span.end)
        if found is not None:
            return _to_slice(*found) if found[0] else None
    return _to_columns(batches, span, with_headers=with_headers)


def _to_slice(count: int, *buffers: Any) -> Slice:
    """Return a slice of the buffers that the native function has filled."""
    import numpy as np

    offsets, times_ms, kinds, keys, values = buffers
    return Slice(
        offsets=np.frombuffer(offsets, np.int64),
        times_ms=np.frombuffer(times_ms, np.int64),
        kinds=np.frombuffer(kinds, np.int32),
        keys=_filled_column(count, keys),
        values=_filled_column(count, values),
        headers=None,
    )


def _filled_column(count: int, parts: tuple[int, Any, Any, Any] | None) -> "pa.Array":
    """Return a column of bytes from what the native function has filled."""
    import pyarrow as pa

    if parts is None:
        return pa.nulls(count, pa.binary())
    nulls, *found = parts
    made = [None if each is None else pa.py_buffer(each) for each in found]
    return pa.Array.from_buffers(pa.binary(), count, made, nulls)


def _to_columns(
    batches: Sequence[Batch], span: OffsetRange, *, with_headers: bool
) -> Slice | None:
    """Return what ``to_columns`` returns, in Python."""
    import numpy as np

    # One buffer, so that one array of indices covers every record.
    data = b"".join(each.data for each in batches)
    counts = [each.size for each in batches]
    try:
        indices = np.array(_record_starts(batches, data), np.int64)
        read = np.frombuffer(data, np.uint8)
        _, at = _varints(read, indices)
        # Skip the attributes, one unused byte.
        times, at = _varints(read, at + 1)
        offsets, at = _varints(read, at)
        offsets += np.repeat(np.array([b.base for b in batches], np.int64), counts)
        low, high = np.searchsorted(offsets, (span.first, span.end))
        if low >= high:
            return None
        cut = slice(int(low), int(high))
        keys, at = _byte_ranges(read, at[cut])
        values, at = _byte_ranges(read, at)
        headers = (
            [_headers(data, each) for each in at.tolist()] if with_headers else (None)
        )
    except IndexError as error:
        raise CorruptRecordError(f"a record ends too early: {error}") from error
    times += np.repeat(np.array([b.first_ms for b in batches], np.int64), counts)
    kinds = np.repeat(
        np.array([b.append_ms is not None for b in batches], np.int32), counts
    )
    if kinds.any():
        appended = np.array([b.append_ms or 0 for b in batches], np.int64)
        times = np.where(kinds == 1, np.repeat(appended, counts), times)
    return Slice(
        offsets=offsets[cut],
        times_ms=times[cut],
        kinds=kinds[cut],
        keys=_binary_column(data, keys),
        values=_binary_column(data, values),
        headers=headers,
    )


def _record_starts(batches: Sequence[Batch], data: Any) -> list[int]:
    """Return the index of each record; the only loop over all of them."""
    found: list[int] = []
    add = found.append
    at = 0
    for batch in batches:
        end = at + len(batch.data)
        for _ in range(batch.size):
            add(at)
            size = data[at]
            at += 1
            if size > _LAST:
                more = data[at]
                at += 1
                size = size & 127 | (more & 127) << 7
                shift = 14
                while more > _LAST:
                    more = data[at]
                    at += 1
                    size |= (more & 127) << shift
                    shift += 7
            # Zigzag: no length is negative, so the lowest bit is zero.
            at += size >> 1
        if at != end:
            raise CorruptRecordError(
                f"the records of the batch at offset {batch.base} take {at - end} "
                "bytes more than it has"
            )
    return found


def _varints(
    read: "np.ndarray[Any, Any]", indices: "np.ndarray[Any, Any]"
) -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]":
    """Return the signed varints at these indices, and the indices behind them."""
    import numpy as np

    byte = read[indices]
    found = (byte & 127).astype(np.uint64)
    behind = indices + 1
    longer = np.flatnonzero(byte > _LAST)
    for shift in range(7, _VARINT_BITS_MAX + 1, 7):
        if not len(longer):
            break
        byte = read[behind[longer]]
        found[longer] |= (byte & 127).astype(np.uint64) << np.uint64(shift)
        behind[longer] += 1
        longer = longer[byte > _LAST]
    sign = -(found & np.uint64(1)).astype(np.int64)
    return (found >> np.uint64(1)).astype(np.int64) ^ sign, behind


_ByteRanges = tuple[
    "np.ndarray[Any, Any]", "np.ndarray[Any, Any]", "np.ndarray[Any, Any]"
]


def _byte_ranges(
    read: "np.ndarray[Any, Any]", at: "np.ndarray[Any, Any]"
) -> "tuple[_ByteRanges, np.ndarray[Any, Any]]":
    """Return (sizes, starts, ends) of the bytes at these indices; the next indices."""
    import numpy as np

    sizes, starts = _varints(read, at)
    ends = starts + np.maximum(sizes, 0)
    if int(ends.max()) > len(read):
        raise IndexError(f"it has {len(read)} bytes, of {int(ends.max())}")
    return (sizes, starts, ends), ends


def _binary_column(data: Any, indices: "_ByteRanges") -> "pa.Array":
    """Return a column of bytes.

    The buffer becomes one Arrow column whose elements are alternately a wanted part and
    the gap behind it; then only the wanted parts are taken.
    """
    import numpy as np
    import pyarrow as pa

    sizes, starts, ends = indices
    count = len(sizes)
    is_none = sizes < 0
    if is_none.all():
        return pa.nulls(count, pa.binary())
    edges = np.empty(2 * count, np.int32)
    edges[0::2] = starts
    edges[1::2] = ends
    whole = pa.Array.from_buffers(
        pa.binary(), 2 * count - 1, [None, pa.py_buffer(edges), pa.py_buffer(data)]
    )
    wanted = np.arange(0, 2 * count, 2, dtype=np.int32)
    return whole.take(pa.array(wanted, mask=is_none if is_none.any() else None))


def _headers(data: Any, at: int) -> Headers:
    count, at = _varint(data, at)
    found = []
    for _ in range(count):
        name, at = _bytes(data, at)
        value, at = _bytes(data, at)
        # Names need not be UTF-8.
        found.append(((name or b"").decode(errors="replace"), value))
    return found


def _bytes(data: Any, at: int) -> tuple[bytes | None, int]:
    size, at = _varint(data, at)
    if size < 0:
        return None, at
    if at + size > len(data):
        raise IndexError(f"it has {len(data)} bytes, of {at + size}")
    return bytes(data[at : at + size]), at + size


def _varint(data: Any, at: int) -> tuple[int, int]:
    found = shift = 0
    while True:
        byte = data[at]
        at += 1
        found |= (byte & 127) << shift
        if byte <= _LAST:
            return (found >> 1) ^ -(found & 1), at
        shift += 7
