"""How far a member has applied the log, in the tags of its Member records (3.10).

It helps people to find a member that lags; no decision depends on it. The functions
that read tags accept any bytes.
"""

from collections.abc import Mapping

import attrs
import msgspec
from msgspec import UNSET, UnsetType

from kafka_marshal.protocol.codec import decode_tags
from kafka_marshal.protocol.records import Record

APPLIED = "applied"
BEGAN = "began"
_BYTES_MAX = 1_024  # of the tags of a record
_ENTRY_BYTES_MAX = 9  # of an offset in MessagePack
_OFFSET_MAX = 2**63 - 1
_encode = msgspec.msgpack.Encoder().encode


@attrs.frozen(kw_only=True)
class Applied:
    """The offsets that a member announced; it does not know partitions left out.

    Attributes:
        applied: By coordinating partition, the next offset to apply.
        began: By coordinating partition, the next offset of the state that the member
            started from: 0 is the start of the log.
    """

    applied: Mapping[int, int] = attrs.field(factory=dict)
    began: Mapping[int, int] = attrs.field(factory=dict)


def applied_to_tags(announced: Applied) -> bytes | UnsetType:
    """Return the tags of a Member record: lists by partition, nil for an unknown one.

    If both lists do not fit, ``began`` is left out, then the last partitions.
    """
    applied, began = _listed(announced.applied), _listed(announced.began)
    if not applied:
        return UNSET
    tags = _encode({APPLIED: applied, BEGAN: began})
    if len(tags) > _BYTES_MAX:
        tags = _encode({APPLIED: applied})
    if len(tags) > _BYTES_MAX:
        count = (_BYTES_MAX - len(_encode({APPLIED: []})) - 4) // _ENTRY_BYTES_MAX
        tags = _encode({APPLIED: applied[:count]})
    return tags


def applied_of(record: Record) -> Applied:
    """Return what the tags of a Member record state. Bounded; never raises."""
    tags = record.tags
    found = None if isinstance(tags, UnsetType) else decode_tags(tags)
    found = found or {}
    return Applied(
        applied=_by_partition(found.get(APPLIED)), began=_by_partition(found.get(BEGAN))
    )


def _listed(offsets: Mapping[int, int]) -> list[int | None]:
    return [offsets.get(partition) for partition in range(max(offsets, default=-1) + 1)]


def _by_partition(listed: object) -> dict[int, int]:
    if not isinstance(listed, list):
        return {}
    return {
        partition: offset
        for partition, offset in enumerate(listed)
        if type(offset) is int and 0 <= offset <= _OFFSET_MAX
    }
