"""Offsets granted at most once and never processed, found in the log (PROTOCOL 6.2).

The log has the grants, but not how far the owner processed them, because nothing is
committed afterwards. So owners put a mark into the tags of their records: everything
granted below it is processed. Tags inform and decide nothing (PROTOCOL 3.2): without
a mark everything granted counts as unconfirmed.
"""

from collections.abc import Container, Iterable, Sequence
from typing import Any

import attrs
import msgspec
from msgspec import UNSET, UnsetType

from kafka_marshal.protocol.codec import decode_tags
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.records import (
    BatchHeartbeat,
    ClaimingMessages,
    ClaimingPartition,
    ForgettingPartition,
    Heartbeat,
    Record,
    ReleasingPartition,
    Reset,
    StagePosition,
)
from kafka_marshal.protocol.state import (
    ACCEPTED,
    REFUSED,
    Transition,
    Transitions,
    WorldState,
)
from kafka_marshal.protocol.types import OFFSET_MAX, Key, LogEntry, OffsetRange, Owner

MARK = "done"
GRANTEE = "of"
# A pair of index and offset takes at most 12 bytes: 1 KiB of tags holds this many.
MARKS_PER_BATCH_MAX = 84
# With a pair of index and grantee it takes 33 bytes.
DELEGATED_MARKS_MAX = 30

LIVE = "live"
STALE = "stale"
RELEASED = "released"
FORGOTTEN = "forgotten"
RESET = "reset"
POSITION_SET = "position_set"
MOVED = "moved"
RESUMED = "resumed"
TAKEN_OVER = "taken_over"

# Effects that drop keys which have moved to another coordinating partition.
_LAYOUT_EFFECTS = frozenset({"layout_fenced", "layout_final"})

_ENCODER = msgspec.msgpack.Encoder()


# --- marks, as owners write them


BatchMark = tuple[int, int, bytes | None]
"""Index of a heartbeat in its record, its mark, the grantee if not the sender."""


def mark_to_tags(
    mark: int | None, *, grantee: bytes | None = None
) -> bytes | UnsetType:
    """Return tags with a mark: everything granted below it is processed.

    Args:
        mark: The mark, None without one.
        grantee: The process to which it was granted, None for the sender.
    """
    if mark is None:
        return UNSET
    return _ENCODER.encode(
        {MARK: mark} if not grantee else {MARK: mark, GRANTEE: grantee}
    )


def fitting(marks: Sequence[BatchMark]) -> Sequence[BatchMark]:
    """Return the first marks of a batch of heartbeats, as many as its tags hold."""
    is_delegated = any(grantee for _, _, grantee in marks)
    return marks[: DELEGATED_MARKS_MAX if is_delegated else MARKS_PER_BATCH_MAX]


def marks_to_tags(marks: Sequence[BatchMark]) -> bytes | UnsetType:
    """Return the tags of a batch of heartbeats; see ``fitting``."""
    if not marks:
        return UNSET
    fields: dict[str, list[int | bytes]] = {
        MARK: [number for index, mark, _ in marks for number in (index, mark)]
    }
    if grantees := [(index, grantee) for index, _, grantee in marks if grantee]:
        fields[GRANTEE] = [each for pair in grantees for each in pair]
    return _ENCODER.encode(fields)


def marks_of(record: Record) -> dict[int, int]:
    """Return the marks of a record, by index in a batch, else at index 0.

    Never raises: an unreadable mark counts as absent.
    """
    return {i: mark for i, mark in _tagged(record, MARK) if _is_mark(mark)}


def grantees_of(record: Record) -> dict[int, bytes]:
    """Return the grantees of marks that are not about the sender, as ``marks_of``."""
    found = _tagged(record, GRANTEE)
    return {i: grantee for i, grantee in found if type(grantee) is bytes}


def _tagged(record: Record, name: str) -> list[tuple[int, Any]]:
    """Return the values of a tag, each with the index of its heartbeat."""
    tags = record.tags
    found = None if isinstance(tags, UnsetType) else decode_tags(tags)
    value = (found or {}).get(name)
    if isinstance(record, BatchHeartbeat):
        flat: Sequence[Any] = value if isinstance(value, list) else ()
        pairs = zip(flat[::2], flat[1::2], strict=False)
        return [(i, each) for i, each in pairs if type(i) is int]
    return [(0, value)]


def _is_mark(value: object) -> bool:
    return type(value) is int and 0 <= value <= OFFSET_MAX + 1


# --- losses, as readers find them


@attrs.frozen(kw_only=True)
class Loss:
    """Offsets granted under one claim that its owner did not confirm as processed.

    After a crash they include the uncommitted batch, and what was processed after the
    owner's last record. Only the application knows how much of it was processed.

    Attributes:
        key: Group, topic and partition.
        owner: The owner of the claim.
        epoch: Epoch of the claim.
        ranges: Offsets, ascending; offsets without a record are included.
        mark: The owner processed everything below it; None if it never sent one.
        ending: ``taken_over``, ``resumed``, ``released``, ``stale`` (silent for more
            than two heartbeat intervals and not taken over yet) or ``live`` (at risk
            only).
        reason: Reason in the release; ``reset``, ``forgotten`` or ``position_set`` if
            an admin replaced the state, dropped the key or set its position, so that
            the offsets may be granted again; ``moved`` if the key of a stale owner went
            to another coordinating partition; None in all other cases.
        winner: client_id of the next owner, None if there is none.
        partition: Coordinating partition.
        at_offset: Offset in that partition: of the record that ended the claim, or of
            the last grant if the claim has not ended.
        at_ms: Time of that record, epoch ms.
    """

    key: Key
    owner: Owner
    epoch: int
    ranges: tuple[OffsetRange, ...]
    mark: int | None
    ending: str
    reason: str | None
    winner: str | None
    partition: int
    at_offset: int
    at_ms: int

    @property
    def count(self) -> int:
        """Number of offsets."""
        return sum(each.count for each in self.ranges)


@attrs.define(kw_only=True)
class _Tenure:
    """One claim so far: grants and marks of each grantee."""

    owner: Owner
    epoch: int
    granted: dict[bytes, list[OffsetRange]] = attrs.field(factory=dict)
    marks: dict[bytes, int] = attrs.field(factory=dict)
    at: tuple[int, int] = (0, 0)

    def grant(self, grantee: bytes, offsets: OffsetRange) -> None:
        ranges = self.granted.setdefault(grantee, [])
        if ranges and ranges[-1].end == offsets.first:
            offsets = OffsetRange(ranges.pop().first, offsets.end)
        ranges.append(offsets)

    def mark(self, grantee: bytes, mark: int | None) -> None:
        if mark is None:
            return
        self.marks[grantee] = max(mark, self.marks.get(grantee, 0))
        self.granted[grantee] = list(
            above(self.granted.get(grantee, ()), self.marks[grantee])
        )

    def report(
        self, record: Heartbeat | BatchHeartbeat | ReleasingPartition, index: int
    ) -> None:
        """Apply the mark of the owner, or of the grantee that it names."""
        mark = marks_of(record).get(index)
        if mark is not None:
            self.mark(grantees_of(record).get(index, record.incarnation), mark)

    @property
    def latest_mark(self) -> int | None:
        """The mark of the only grantee; of the owner, if there are several."""
        who = [each for each in self.granted if self.granted[each]]
        return self.marks.get(who[0] if len(who) == 1 else self.owner.incarnation)


def above(ranges: Iterable[OffsetRange], mark: int) -> Iterable[OffsetRange]:
    """Yield the parts of ranges at or above a mark."""
    for each in ranges:
        if each.end > mark:
            yield OffsetRange(max(each.first, mark), each.end)


class LossBook:
    """Follows the fold of one coordinating partition, and finds losses.

    Pass it every entry of the partition with its transitions, from the first entry or
    a checkpoint on.
    """

    def __init__(
        self,
        partition: int,
        *,
        group_id: str | None = None,
        topic: str | None = None,
        begun: WorldState | None = None,
    ) -> None:
        """Start from the log's beginning, or from a state.

        Args:
            partition: The coordinating partition.
            group_id: Follow only this group, None for all.
            topic: Follow only this data topic, None for all.
            begun: State before the first entry. Earlier grants of its owners are
                unknown and not listed.
        """
        self._partition = partition
        self._group_id = group_id
        self._topic = topic
        keys = {} if begun is None else begun.keys
        self._tenures = {
            key: _Tenure(owner=known.owner, epoch=known.epoch)
            for key, known in keys.items()
            if known.owner is not None and self._wants(key)
        }

    def take(
        self, entry: LogEntry, transitions: Transitions, *, keys: Container[Key]
    ) -> list[Loss]:
        """Apply one entry; return the losses of the claims that it ended.

        Args:
            entry: The entry.
            transitions: Its transitions.
            keys: The keys that the partition has after the entry.
        """
        losses: list[Loss] = []
        for index, transition in enumerate(transitions):
            if isinstance(transition.record, Reset) and transition.effect == RESET:
                losses += self._end_all(entry, sorted(self._tenures), reason=RESET)
            elif transition.effect in _LAYOUT_EFFECTS:
                gone = [key for key in sorted(self._tenures) if key not in keys]
                losses += self._end_all(entry, gone, reason=MOVED)
            elif transition.outcome in {ACCEPTED, REFUSED} and self._wants(
                transition.key
            ):
                losses += self._take(entry, index, transition)
        return losses

    def open_ones(self, world: WorldState, *, elapsed_ms: int = 0) -> list[Loss]:
        """Return unconfirmed offsets of claims that have not ended, sorted by key.

        Args:
            world: The fold of the same entries.
            elapsed_ms: Time since the last entry (PROTOCOL 4.11).
        """
        losses = []
        for key, tenure in sorted(self._tenures.items()):
            freshness = world.keys[key].freshness(world.now_ms + elapsed_ms)
            ending = STALE if freshness is Freshness.STALE else LIVE
            losses += self._loss(key, tenure, ending=ending, at=tenure.at)
        return losses

    def _end_all(
        self, entry: LogEntry, keys: Iterable[Key], *, reason: str
    ) -> list[Loss]:
        """Return the losses of claims that one record ends (PROTOCOL 7.6, 10)."""
        at = (entry.offset, entry.timestamp_ms)
        return [
            loss
            for key in keys
            for loss in self._loss(
                key, self._tenures.pop(key), ending=RELEASED, at=at, reason=reason
            )
        ]

    def _wants(self, key: Key | None) -> bool:
        return (
            key is not None
            and self._group_id in {None, key.group_id}
            and self._topic in {None, key.topic}
        )

    def _take(self, entry: LogEntry, index: int, transition: Transition) -> list[Loss]:
        key, record = transition.key, transition.record
        assert key is not None
        tenure = self._tenures.get(key)
        at = (entry.offset, entry.timestamp_ms)
        if isinstance(record, ClaimingPartition):
            if transition.outcome != ACCEPTED:
                return []
            owner = Owner(record.client_id, record.incarnation)
            self._tenures[key] = _Tenure(owner=owner, epoch=entry.offset)
            ending = TAKEN_OVER if record.resume is None else RESUMED
            return self._loss(key, tenure, ending=ending, at=at, winner=owner.client_id)
        if tenure is None:
            return []
        if isinstance(record, ClaimingMessages):
            detail = transition.detail
            if detail is not None:
                granted = OffsetRange.through(detail["first"], detail["last"])
                tenure.grant(record.grantee, granted)
                tenure.at = at
            tenure.mark(record.grantee, marks_of(record).get(0))
        elif isinstance(record, Heartbeat | BatchHeartbeat):
            tenure.report(record, index if isinstance(record, BatchHeartbeat) else 0)
        elif isinstance(record, ForgettingPartition):
            if transition.outcome != ACCEPTED:
                return []
            del self._tenures[key]
            return self._loss(key, tenure, ending=RELEASED, at=at, reason=FORGOTTEN)
        elif isinstance(record, StagePosition):
            if transition.outcome != ACCEPTED:
                return []
            del self._tenures[key]
            return self._loss(key, tenure, ending=RELEASED, at=at, reason=POSITION_SET)
        elif isinstance(record, ReleasingPartition):
            tenure.report(record, 0)
            del self._tenures[key]
            reason = record.reason
            return self._loss(key, tenure, ending=RELEASED, at=at, reason=reason)
        return []

    def _loss(
        self,
        key: Key,
        tenure: _Tenure | None,
        *,
        ending: str,
        at: tuple[int, int],
        reason: str | None = None,
        winner: str | None = None,
    ) -> list[Loss]:
        if tenure is None:
            return []
        ranges = sorted(each for found in tenure.granted.values() for each in found)
        if not ranges:
            return []
        return [
            Loss(
                key=key,
                owner=tenure.owner,
                epoch=tenure.epoch,
                ranges=tuple(ranges),
                mark=tenure.latest_mark,
                ending=ending,
                reason=reason,
                winner=winner,
                partition=self._partition,
                at_offset=at[0],
                at_ms=at[1],
            )
        ]
