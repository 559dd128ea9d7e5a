"""What is remembered of a key beside its state: why it moved last, and from whom.

Soft, like members (PROTOCOL 3.2): it informs people and plans, is outside digest
and canonical bytes, and is gone with the process. One note a key.
"""

from sys import intern

import msgspec
from msgspec import UnsetType

from kafka_marshal.protocol.codec import decode_tags
from kafka_marshal.protocol.records import ClaimingPartition, ReleasingPartition
from kafka_marshal.protocol.state import KeyNote, KeyState, WorldState
from kafka_marshal.protocol.types import Key, Owner

WEDGED = "wedged"
WHY = "why"
WHY_CHARS_MAX = 200

_ENCODER = msgspec.msgpack.Encoder()


def why_to_tags(why: str) -> bytes:
    """Return the tags of a claim that tell why it is made."""
    return _ENCODER.encode({WHY: why[:WHY_CHARS_MAX]})


def why_of(record: ClaimingPartition) -> str | None:
    """Return why a claim was made, where its tags tell. Total, and bounded."""
    tags = record.tags
    found = None if isinstance(tags, UnsetType) else decode_tags(tags)
    why = (found or {}).get(WHY)
    # Interned, because a client claims many keys for the same reason.
    return intern(why[:WHY_CHARS_MAX]) if isinstance(why, str) else None


def note_claim(
    state: WorldState,
    key: Key,
    *,
    record: ClaimingPartition,
    before: Owner | None,
    follows: int | None,
) -> None:
    """Note an accepted claim or resume.

    Args:
        state: World of the key.
        key: What was claimed.
        record: The claim.
        before: Who owned the key until now.
        follows: Epoch of the claim before this one.
    """
    notes = state.soft.notes
    known = state.keys[key]
    owner = known.owner
    assert owner is not None
    old = notes.get(key)
    last = None if before is None else before.client_id
    stuck: tuple[int, int] | None = None
    if old is not None:
        last = last or old.client_id
        if last == owner.client_id:
            last = old.before
        stuck = old.stuck
    reason = why_of(record)
    notes[key] = KeyNote(owner.client_id, known.epoch, reason, last, stuck, follows)


def note_release(
    state: WorldState, key: Key, *, record: ReleasingPartition, offset: int
) -> None:
    """Note an accepted release."""
    notes = state.soft.notes
    old = notes.get(key)
    before = None if old is None else old.before
    stuck = None if old is None else old.stuck
    if record.reason is not None and record.reason.startswith(WEDGED):
        at = state.keys[key].next_unclaimed() or 0
        times = stuck[1] if stuck is not None and stuck[0] == at else 0
        stuck = (at, times + 1)
    notes[key] = KeyNote(record.client_id, offset, record.reason, before, stuck)


def stuck_count(note: KeyNote | None, known: KeyState) -> int:
    """Return how many owners in a row were wedged at the present position."""
    if note is None or note.stuck is None:
        return 0
    at, times = note.stuck
    return times if at == (known.next_unclaimed() or 0) else 0
