"""The rows of a log's history, which ``historian`` derives from the fold.

Plain data. Offsets are of the coordinating partition, except in positions and grants.
Times are log time if their name or text says so, else epoch milliseconds.
"""

from typing import NamedTuple

import msgspec

from kafka_marshal.protocol.records import Scope
from kafka_marshal.protocol.types import Key, Token

OPEN = "open"
RESTORED = "restored"
UNPAUSED = "unpaused"
RAN_OUT = "ran_out"
WON = "won"
GRANTED = "granted"


class Moment(NamedTuple):
    """Place and time of an event in one coordinating partition.

    Attributes:
        offset: Offset of the entry.
        log_ms: Log time after it.
        append_ms: The entry's own timestamp, epoch ms.
    """

    offset: int
    log_ms: int
    append_ms: int


class Interval(msgspec.Struct, kw_only=True, gc=False):
    """One claim, from the record that won to the record that ended it.

    Attributes:
        key: The owned key.
        client_id: The owner.
        incarnation: The owner's process start.
        token: Fencing token; its offset is the epoch.
        effect: ``claimed``, ``resumed``, or ``restored`` if the claim was in the
            checkpoint at which the history starts.
        why: Reason in the tags of the claim.
        start: Where it was won, or that checkpoint's Begin.
        heartbeat_interval_ms: Heartbeat interval in force at the last renewal.
        renewed_offset: Offset of the last renewal.
        renewed_ms: Log time of it.
        topic_id: Kafka's id of the data topic, if a claim named it.
        start_position: Position at its start, None if unknown.
        beats_count: Renewals after the claim.
        gap_ms_max: Longest log time between two renewals in a row.
        first_position: First position known under it.
        position: Last position under it.
        rewinds_count: Heartbeats under it that rewound the position.
        steps_back_count: Records under it that lowered it without ``rewind``.
        stray_count: Accepted records that named another epoch or process.
        ending: ``open``, ``released``, ``taken_over`` or ``resumed``.
        ended_by: Client that released it or took it over.
        reason: Reason in the release, or in the next owner's claim.
        end: Where it ended, None while it is open.
        resets_count: Resets before it (PROTOCOL 7.6), which discard earlier grants.
    """

    key: Key
    client_id: str
    incarnation: bytes
    token: Token
    effect: str
    why: str | None
    start: Moment
    heartbeat_interval_ms: int
    renewed_offset: int
    renewed_ms: int
    topic_id: bytes | None = None
    start_position: int | None = None
    beats_count: int = 0
    gap_ms_max: int = 0
    first_position: int | None = None
    position: int | None = None
    rewinds_count: int = 0
    steps_back_count: int = 0
    stray_count: int = 0
    ending: str = OPEN
    ended_by: str | None = None
    reason: str | None = None
    end: Moment | None = None
    resets_count: int = 0


class Attempt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A claiming record and its verdict.

    Attributes:
        key: The claimed key.
        client_id: The claimant.
        incarnation: The claimant's process start.
        at: Place and time.
        outcome: ``won``, ``refused`` or ``ignored``.
        reason: Why it was not won, else None.
        holder: client_id of the owner afterwards.
        remaining_ms: Log time that the holder had left, if that was the reason.
        why: Reason in the tags of the claim.
    """

    key: Key
    client_id: str
    incarnation: bytes
    at: Moment
    outcome: str
    reason: str | None
    holder: str | None
    remaining_ms: int | None
    why: str | None


class Handoff(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Change of a key from one owner to the next.

    Attributes:
        key: The key.
        from_client_id: The previous owner.
        to_client_id: The next owner.
        token: Token of the next claim.
        ending: How the earlier claim ended.
        reason: Reason in its release, else None.
        why: Reason in the tags of the next claim.
        at: Where the next claim was won.
        gap_ms: Log time without a renewal: since the release, or since the last
            renewal.
        heartbeat_interval_ms: Heartbeat interval in force at that last renewal.
        late_ms: Log time from the moment at which the next owner could have won the
            key to the claim that won it. None unless its previous attempt was refused
            because the key was held or reserved for another: only then does the log
            show that it was waiting.
        position: Position at the change.
    """

    key: Key
    from_client_id: str
    to_client_id: str
    token: Token
    ending: str
    reason: str | None
    why: str | None
    at: Moment
    gap_ms: int
    heartbeat_interval_ms: int
    late_ms: int | None
    position: int | None


class GrantRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request for offsets at most once, both ends inclusive.

    Attributes:
        outcome: ``granted``, or the reason of the refusal.
        first: First granted offset, or first requested one if it was refused.
        last: Last offset, likewise.
        resets_count: Resets before it (PROTOCOL 7.6), which discard earlier grants.
    """

    key: Key
    client_id: str
    grantee: bytes
    epoch: int
    topic_id: bytes | None
    at: Moment
    outcome: str
    first: int
    last: int
    resets_count: int = 0


class PauseRow(msgspec.Struct, kw_only=True, gc=False):
    """A pause of a group.

    Attributes:
        person: Person for whom it was paused, None if unknown.
        begin_ms: Begin that its record named, epoch ms; None for one that began with
            its record.
        renewed_by: Person, else client, that renewed it last; None if that is who
            began it, or none did.
        until_ms: Append time at which it ends, as of the last renewal.
        renewals_count: How often the admin extended it.
        ending: ``open``, ``unpaused``, ``ran_out``, or ``reset`` if the state of a
            Reset does not have it.
        scope: Partitions that it is limited to, None for the whole group.
    """

    group_id: str
    op_id: bytes
    client_id: str
    reason: str | None
    start: Moment
    until_ms: int
    renewals_count: int = 0
    ending: str = OPEN
    end: Moment | None = None
    scope: Scope | None = None
    person: str | None = None
    begin_ms: int | None = None
    renewed_by: str | None = None


class Planned(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A pause that has not begun.

    Attributes:
        begin_ms: Its begin, epoch ms.
        reason: Reason in its first record, None if unknown.
        person: Person for whom it was scheduled, None if unknown.
    """

    begin_ms: int
    reason: str | None = None
    person: str | None = None


class Rejected(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A record without effect.

    Attributes:
        at: Place and time.
        outcome: ``refused``, ``ignored``, ``undecodable`` or ``halted``.
        reason: Name of the counter.
        detail: Error of the codec for bytes that are no record.
        record_type: Name of the record kind, or None.
        client_id: Sender, None if unknown.
        group_id: Group that it names, or None.
        key: Key that it names, or None.
    """

    at: Moment
    outcome: str
    reason: str
    detail: str | None
    record_type: str | None
    client_id: str | None
    group_id: str | None
    key: Key | None


class PositionRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A sample of a key's position, taken at a record of its owner.

    Attributes:
        epoch: Epoch under which the record was accepted.
        rewinds_count: Number of rewinds so far.
    """

    key: Key
    client_id: str
    epoch: int
    topic_id: bytes | None
    at: Moment
    position: int | None
    granted: int | None
    rewinds_count: int


class ImportRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A key that came from another coordinating partition (PROTOCOL 10.4).

    Attributes:
        at: Place and time of the import.
        source: Coordinating partition that it came from.
        op_id: The change of the partition count.
        topic_id: Kafka's id of the data topic, if known.
        era: Era in force: claims of the key before the move have lower ones.
        position: Its position, None if unknown.
        granted: Next offset not granted yet, None without grants.
        resets_count: Resets before it (PROTOCOL 7.6).
    """

    key: Key
    at: Moment
    source: int
    op_id: bytes
    topic_id: bytes | None
    era: int
    position: int | None
    granted: int | None
    resets_count: int = 0


Row = (
    Interval
    | Attempt
    | Handoff
    | GrantRow
    | PauseRow
    | Rejected
    | PositionRow
    | ImportRow
)
