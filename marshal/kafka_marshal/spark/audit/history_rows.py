"""The rows of a log's history: what was, as ``history`` reads it off the fold.

Plain data. Offsets are of the coordinating partition unless a field is about a
position; times are log time where their name says so, else epoch milliseconds.
"""

from typing import NamedTuple

import msgspec

from kafka_marshal.protocol.types import Key, Token

OPEN = "open"
RELEASED = "released"
RESTORED = "restored"
RESUMED = "resumed"
TAKEN_OVER = "taken_over"
UNPAUSED = "unpaused"
RAN_OUT = "ran_out"
RESET = "reset"
WON = "won"
GRANTED = "granted"
FORGOTTEN = "forgotten"


class Moment(NamedTuple):
    """Where and when something happened in one coordinating partition.

    Attributes:
        offset: Offset of the entry.
        log_ms: Log time C after it.
        append_ms: The entry's own timestamp, epoch ms.
    """

    offset: int
    log_ms: int
    append_ms: int


class Interval(msgspec.Struct, kw_only=True, gc=False):
    """One claim, from the record that won to the record that ended it.

    Attributes:
        key: What was owned.
        client_id: Who owned it.
        incarnation: Which process start of it.
        token: Fencing token; its offset is the epoch.
        effect: ``claimed``, ``resumed``, or ``restored`` where the claim stood in
            the checkpoint that the history begins at.
        why: Why it was claimed, where the tags tell.
        start: Where it was won, or that checkpoint's Begin.
        heartbeat_interval_ms: H in force at the last renewal.
        renewed_offset: Offset of the last renewal.
        renewed_ms: Log time of it.
        topic_id: Kafka's id of the data topic, where a claim named it.
        start_position: Position that it began with, None where none was known.
        beats_count: Renewals after the claim.
        gap_ms_max: Longest log time between two renewals in a row.
        first_position: First position known under it.
        position: Last position under it.
        rewinds_count: Beats under it that set the position back on purpose.
        steps_back_count: Records under it that set it back without saying so.
        stray_count: Accepted records that named another epoch or process.
        ending: ``open``, ``released``, ``taken_over`` or ``resumed``.
        ended_by: Who released it or took it over.
        reason: What the release says, or why the next owner claimed.
        end: Where it ended, None while it is open.
        resets_count: Resets before it (PROTOCOL 7.6): they take back what was.
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
        key: What was asked for.
        client_id: Who asked.
        incarnation: Which process start of it.
        at: Where.
        outcome: ``won``, ``refused`` or ``ignored``.
        reason: Why not, None where it was won.
        holder: client_id of the owner afterwards.
        remaining_ms: Log time that the holder had left, where that was the reason.
        why: Why it was claimed, where the tags tell.
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
    """From one owner to the next.

    Attributes:
        key: What changed hands.
        from_client_id: The owner before.
        to_client_id: The owner after.
        token: Token of the next claim.
        ending: How the earlier claim ended.
        reason: What its release says, None elsewhere.
        why: Why the next owner claimed, where the tags tell.
        at: Where the next claim was won.
        gap_ms: Log time in which nobody's claim was renewed: since the release, or
            since the last renewal.
        heartbeat_interval_ms: H in force at that last renewal.
        late_ms: Log time between the moment at which the next owner could have had
            the key and the claim that won it. None unless its last attempt before
            was refused because the key was still held or kept for another: only
            then does the log tell that it was waiting.
        position: Position handed on.
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
    """Offsets asked for at most once, both ends inclusive.

    Attributes:
        outcome: ``granted``, or why not.
        first: First offset granted; asked for where it was refused.
        last: Last offset, the same way.
        resets_count: Resets before it (PROTOCOL 7.6): they take back what was.
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
    """A group that an admin held.

    Attributes:
        until_ms: Log time M until which it was held, as of the last renewal.
        renewals_count: How often the admin put the end off.
        ending: ``open``, ``unpaused``, ``ran_out``, or ``reset`` where the state
            that replaced this one does not have it.
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


class Rejected(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A record that took no effect.

    Attributes:
        at: Where.
        outcome: ``refused``, ``ignored``, ``undecodable`` or ``halted``.
        reason: Name of the counter.
        detail: What the codec says of bytes that are no record.
        record_type: Name of the record kind, None where it is none.
        client_id: Who sent it, None where that is unknown.
        group_id: Group that it names, None where it names none.
        key: What it is about, None where nothing is known of that.
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
    """How far a key was: a sample, taken where a record moved its claim.

    Attributes:
        epoch: Epoch under which the record was accepted.
        rewinds_count: How often the position had been set back on purpose.
    """

    key: Key
    client_id: str
    epoch: int
    topic_id: bytes | None
    at: Moment
    position: int | None
    granted: int | None
    rewinds_count: int


Row = Interval | Attempt | Handoff | GrantRow | PauseRow | Rejected | PositionRow
