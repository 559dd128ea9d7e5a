"""What a run keeps for the next one: the fold of a partition and its history.

The snapshot is the canonical one (PROTOCOL 7.1). Members are soft state and not in
it; but verdicts about their next announcements depend on them, so that they are kept
beside it, or a run that goes on would tell other rows than one over the whole log.
"""

import msgspec

from kafka_marshal.errors import LogUnreadable, MalformedRecord
from kafka_marshal.protocol.codec import decode, encode
from kafka_marshal.protocol.history import Historian
from kafka_marshal.protocol.records import Member
from kafka_marshal.protocol.snapshot import from_bytes, to_bytes
from kafka_marshal.protocol.state import MemberState, WorldState

VERSION = 1
Fields = tuple[int, bytes, bytes, list[tuple[bytes, int, int, int]]]
_DECODER = msgspec.msgpack.Decoder(Fields)


def save(world: WorldState, historian: Historian) -> bytes | None:
    """Return what ``restore`` goes on from; None where the fold has halted."""
    if world.halted is not None:
        return None
    members = [
        (encode(each.record), each.since_offset, each.offset, each.seen_ms)
        for each in world.soft.members.values()
    ]
    fields = (VERSION, to_bytes(world), historian.to_bytes(), members)
    return msgspec.msgpack.encode(fields)


def restore(value: bytes | None, *, partition: int) -> tuple[WorldState, Historian]:
    """Return the fold and the history that were saved.

    Raises:
        LogUnreadable: The fold had halted, so there is nothing to go on from.
        MalformedRecord: The bytes were not written by this release.
    """
    if value is None:
        raise LogUnreadable(
            f"coordinating partition {partition} halted in the last run: it needs a "
            "feature level that the release which ran it did not know; upgrade "
            "kafka-marshal and audit into a new directory"
        )
    try:
        version, snapshot, history, members = _DECODER.decode(value)
    except msgspec.MsgspecError as error:
        raise MalformedRecord(f"not a saved audit: {error}") from error
    if version != VERSION:
        raise MalformedRecord(
            f"the last run was saved in version {version}, and this release reads "
            f"{VERSION}; audit into a new directory"
        )
    world, historian = from_bytes(snapshot), Historian.from_bytes(history)
    for frame, *when in members:
        record = decode(frame)
        if not isinstance(record, Member):
            raise MalformedRecord("not a saved audit: a member is no Member")
        name = (record.group_id, record.client_id, record.incarnation)
        world.soft.members[name] = MemberState(record, *when)
    return world, historian
