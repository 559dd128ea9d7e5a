"""The soft state of a T as bytes, for whoever goes on from a file (PROTOCOL 7.1).

It informs and decides nothing: without it, a reader knows members and why keys
moved only from what it reads itself. Whatever is wrong with it, it is left out.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from kafka_marshal.protocol.codec import decode, encode
from kafka_marshal.protocol.records import Member
from kafka_marshal.protocol.state import (
    RING_ENTRIES_MAX,
    KeyNote,
    MemberState,
    SoftState,
    UndecodableEntry,
)
from kafka_marshal.protocol.types import Key

FORMAT_VERSION = 1

_encode = msgspec.msgpack.Encoder().encode


class _Soft(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: int
    counters: dict[str, int]
    undecodable: list[tuple[int, str, bytes]]
    members: list[tuple[bytes, int, int, int]]
    notes: list[
        tuple[
            tuple[str, str, int],
            tuple[
                str,
                int,
                str | None,
                str | None,
                tuple[int, int] | None,
                int | None,
            ],
        ]
    ]


_decode = msgspec.msgpack.Decoder(_Soft).decode


def soft_to_bytes(soft: SoftState) -> bytes:
    """Return the soft state as bytes."""
    return freeze_soft(soft)()


def freeze_soft(soft: SoftState) -> Callable[[], bytes]:
    """Take the soft state as it is now; return what makes bytes of it, anywhere."""
    members: list[Any] = [
        (encode(each.record), each.since_offset, each.offset, each.seen_ms)
        for each in soft.members.values()
    ]
    notes: list[Any] = [(key, note) for key, note in soft.notes.items()]
    ring = [(each.offset, each.reason, each.head) for each in soft.undecodable]
    taken = _Soft(FORMAT_VERSION, dict(soft.counters), ring, members, notes)
    return lambda: _encode(taken)


def soft_from_bytes(value: bytes) -> SoftState:
    """Return the soft state that ``soft_to_bytes`` wrote; empty if it is none."""
    soft = SoftState()
    try:
        read = _decode(value)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return soft
    if read.version != FORMAT_VERSION:
        return soft
    for raw, since_offset, offset, seen_ms in read.members:
        record = decode(raw)
        if isinstance(record, Member):
            name = (record.group_id, record.client_id, record.incarnation)
            soft.members[name] = MemberState(record, since_offset, offset, seen_ms)
    soft.counters.update(read.counters)
    soft.notes.update({Key(*key): KeyNote(*note) for key, note in read.notes})
    ring = read.undecodable[-RING_ENTRIES_MAX:]
    soft.undecodable.extend(UndecodableEntry(*each) for each in ring)
    return soft
