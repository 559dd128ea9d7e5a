"""One key's claims as they go on: what is remembered, and what a record changes.

Part of the historian (``history``), which alone calls these.
"""

from collections.abc import Iterator, Mapping

import msgspec

from kafka_marshal.protocol.history_rows import (
    OPEN,
    RELEASED,
    RESET,
    Handoff,
    Interval,
    Moment,
)
from kafka_marshal.protocol.records import (
    ClaimingMessages,
    Heartbeat,
    ReleasingPartition,
)
from kafka_marshal.protocol.transition import Transition
from kafka_marshal.protocol.types import Key

CONTENDERS_MAX = 8
# Who is refused for these waits for the key; other reasons say nothing of that.
_WAITING = ("held", "handoff")


class Track(msgspec.Struct, gc=False):
    """What is remembered of a key: its last claim, and who waits for the next.

    Attributes:
        interval: The claim that stands, or the last one that did.
        epoch: Its epoch.
        sample_due_ms: Log time from which the next position is told.
        rewinds_count: Rewinds under all claims of the key.
        kept_ms: Log time until which a release keeps it for its successor.
        waiting: Processes refused since the last renewal, and when, oldest first.
    """

    interval: Interval
    epoch: int
    sample_due_ms: int
    rewinds_count: int = 0
    kept_ms: int = 0
    waiting: list[tuple[bytes, int]] = []


def note_stray(interval: Interval, transition: Transition) -> None:
    """Count an accepted record that the claim's owner cannot have sent."""
    record, epoch = transition.record, transition.epoch
    # Which of its beats it was, the transition of a batch does not say.
    if isinstance(record, Heartbeat | ReleasingPartition | ClaimingMessages):
        epoch = record.epoch
    who = getattr(record, "incarnation", None)
    is_owner = epoch == interval.token.offset and who == interval.incarnation
    if not is_owner or interval.ending != OPEN:
        interval.stray_count += 1


def move(track: Track, position: int | None, *, rewinds: bool) -> None:
    """Note where an accepted record left the position."""
    interval = track.interval
    before = interval.position
    if before == position:
        return
    if before is not None and (position is None or position < before):
        if rewinds:
            interval.rewinds_count += 1
            track.rewinds_count += 1
        else:
            interval.steps_back_count += 1
    interval.position = position
    if interval.first_position is None:
        interval.first_position = position


def note_waiting(
    track: Track, incarnation: bytes, *, reason: str | None, at: Moment
) -> None:
    """Note that a process was refused, where that says that it waits for the key."""
    waiting = [each for each in track.waiting if each[0] != incarnation]
    if reason in _WAITING:
        waiting.append((incarnation, at.log_ms))
    track.waiting = waiting[-CONTENDERS_MAX:]


def taken_away(
    tracks: Mapping[Key, Track], client_id: str, *, at: Moment, until_ms: int | None
) -> Iterator[Interval]:
    """Yield the claims that a Reset ended: all that there were (PROTOCOL 7.6).

    Args:
        tracks: Every key.
        client_id: Who reset.
        at: Where.
        until_ms: Log time until which nothing can be claimed, None for none.
    """
    for _, track in sorted(tracks.items()):
        # C is that of the carried state, which may be long ago.
        track.sample_due_ms = min(track.sample_due_ms, at.log_ms)
        interval = track.interval
        if interval.ending == OPEN:
            interval.ending, interval.ended_by = RELEASED, client_id
            interval.reason, interval.end = RESET, at
            track.kept_ms = at.log_ms if until_ms is None else until_ms
            track.waiting = []
            yield interval


def handoff(before: Interval, after: Interval, *, track: Track) -> Handoff:
    """Return how a key went from one claim to the next."""
    assert before.end is not None
    h_ms, at = before.heartbeat_interval_ms, after.start
    is_released = before.ending == RELEASED
    since_ms = before.end.log_ms if is_released else before.renewed_ms
    # PROTOCOL 4.2: stale is more than 2H.
    free_ms = track.kept_ms if is_released else since_ms + 2 * h_ms + 1
    refused_ms = dict(track.waiting).get(after.incarnation)
    late_ms = None
    if refused_ms is not None:
        late_ms = max(0, at.log_ms - max(free_ms, refused_ms))
    return Handoff(
        after.key,
        before.client_id,
        after.client_id,
        after.token,
        before.ending,
        before.reason if is_released else None,
        after.why,
        at,
        at.log_ms - since_ms,
        h_ms,
        late_ms,
        after.position,
    )
