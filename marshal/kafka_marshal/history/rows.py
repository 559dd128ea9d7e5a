"""The rows of a log's history, which ``historian`` derives from the fold.

Plain data. Offsets are of the coordinating partition, except in positions and grants.
Times are log time if their name or text states that, else epoch milliseconds. The
tables of an audit have the columns of these rows, in this order; the text at a field is
the description of its column. Values that are unknown, or not known yet, are None.
"""

from typing import Annotated, NamedTuple

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


STRING = "string"
INT = "int"
LONG = "bigint"
BINARY = "binary"


class Column(NamedTuple):
    """One column: name, type in Spark SQL, and meaning."""

    name: str
    kind: str
    meaning: str


KEY = (
    Column("group_id", STRING, "group of the key"),
    Column("topic", STRING, "data topic of the key"),
    Column("partition", INT, "data partition of the key"),
)
AT = (
    Column("offset", LONG, "offset of the record in the coordinating partition"),
    Column("log_ms", LONG, "log time after it"),
    Column("append_ms", LONG, "time of the record, epoch ms"),
)
# The columns of fields whose name and type do not determine them.
_TOKEN = (
    Column("token", STRING, "fencing token, `era.leader_epoch.offset`"),
    Column("token_era", LONG, "its first part"),
    Column("token_leader_epoch", INT, "its second part"),
    Column("epoch", LONG, "its third part: offset of the winning claim"),
)
_RENEWED = (Column("renewed_log_ms", LONG, "log time of the last renewal"),)
_FIRST = (Column("first_offset", LONG, "first offset granted, or requested"),)
_LAST = (Column("last_offset", LONG, "last one, inclusive"),)
_TOPICS = "topics that it is limited to; null for the group"
_SCOPE = (Column("topics", STRING, _TOPICS),)
_SOURCE = (Column("source", INT, "coordinating partition that it came from"),)

Why = Annotated[str | None, "why it was claimed, from the claim's tags"]
Resets = Annotated[int, "Resets before it"]
TopicId = Annotated[bytes | None, "Kafka's id of the data topic, hex, if named"]


class Interval(msgspec.Struct, kw_only=True, gc=False):
    """One claim, from the record that won to the record that ended it.

    A Reset discards earlier grants (PROTOCOL 7.6): compare ``resets_count``.
    """

    key: Key
    client_id: Annotated[str, "the owner"]
    incarnation: Annotated[bytes, "its process start, hex"]
    token: Annotated[Token, _TOKEN]
    topic_id: TopicId = None
    effect: Annotated[
        str, "`claimed`, `resumed`, or `restored` from the first checkpoint"
    ]
    why: Why
    start: Annotated[Moment, "where it was won, or that checkpoint"]
    heartbeat_interval_ms: Annotated[
        int, "heartbeat interval in force at the last renewal"
    ]
    renewed_offset: Annotated[int, "offset of the last renewal"]
    renewed_ms: Annotated[int, _RENEWED]
    beats_count: Annotated[int, "renewals after the claim"] = 0
    gap_ms_max: Annotated[int, "longest log time between two renewals in a row"] = 0
    start_position: Annotated[
        int | None, "position when it was won, if one was known"
    ] = None
    first_position: Annotated[int | None, "first position known under it"] = None
    position: Annotated[int | None, "last position under it"] = None
    rewinds_count: Annotated[int, "beats that set the position back on purpose"] = 0
    steps_back_count: Annotated[int, "records that set it back without a rewind"] = 0
    stray_count: Annotated[
        int,
        "accepted records that the owner cannot have sent (a broken rule; 0 in a "
        "correct log)",
    ] = 0
    ending: Annotated[str, "`open`, `released`, `taken_over` or `resumed`"] = OPEN
    ended_by: Annotated[str | None, "client that released it or took it over"] = None
    reason: Annotated[
        str | None, "reason of the release, or `why` of the next claim"
    ] = None
    end: Annotated[Moment | None, "where it ended; null while open"] = None
    resets_count: Resets = 0


class Attempt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A claiming record and its verdict."""

    key: Key
    at: Moment
    client_id: Annotated[str, "the client that sent it"]
    incarnation: Annotated[bytes, "its process start, hex"]
    outcome: Annotated[str, "`won`, `refused` or `ignored`"]
    reason: Annotated[str | None, "why not; null if won"]
    holder: Annotated[str | None, "the owner afterwards"]
    remaining_ms: Annotated[int | None, "log time until the key can be claimed"]
    why: Why


class Handoff(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Change of a key from one owner to the next.

    The log shows that the next owner waited only if its previous attempt was refused
    because the key was held, or reserved for another client.
    """

    key: Key
    at: Moment
    from_client_id: Annotated[str, "the owner before"]
    to_client_id: Annotated[str, "the owner after"]
    token: Annotated[Token, "fencing token of the next claim"]
    ending: Annotated[str, "how the claim before ended, as in `intervals`"]
    reason: Annotated[str | None, "reason of its release"]
    why: Why
    gap_ms: Annotated[int, "log time since the release, or since the last renewal"]
    heartbeat_interval_ms: Annotated[
        int, "heartbeat interval in force at that last renewal"
    ]
    late_ms: Annotated[
        int | None,
        "log time by which the next owner got the key later than possible; null "
        "unless the log shows that it waited",
    ]
    position: Annotated[int | None, "position at which the next owner starts"]


class GrantRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request for offsets at most once.

    A Reset discards earlier grants (PROTOCOL 7.6): compare ``resets_count``.
    """

    key: Key
    at: Moment
    client_id: Annotated[str, "the client that sent it"]
    grantee: Annotated[bytes, "process that may process the offsets, hex"]
    epoch: Annotated[int, "epoch in the record"]
    topic_id: TopicId
    outcome: Annotated[str, "`granted`, `paused`, `nothing_left` or `span`"]
    first: Annotated[int, _FIRST]
    last: Annotated[int, _LAST]
    resets_count: Resets = 0


class PauseRow(msgspec.Struct, kw_only=True, gc=False):
    """A pause of a group.

    Its ending is ``reset`` if the state of a Reset does not have it.
    """

    group_id: Annotated[str, "the group"]
    op_id: Annotated[bytes, "the operation, hex"]
    client_id: Annotated[str, "the client that began or scheduled it"]
    person: Annotated[str | None, "the person for whom it did, if named"] = None
    reason: Annotated[str | None, "reason in its first record"]
    scope: Annotated[Scope | None, _SCOPE] = None
    start: Annotated[Moment, "where it began"]
    begin_ms: Annotated[
        int | None, "begin of a scheduled pause, epoch ms; else null"
    ] = None
    until_ms: Annotated[int, "its end as of the last renewal, epoch ms"]
    renewals_count: Annotated[int, "how often the pause was renewed"] = 0
    renewed_by: Annotated[str | None, "who renewed it last, if another began it"] = None
    ending: Annotated[str, "`open`, `unpaused`, `ran_out` or `reset`"] = OPEN
    end: Annotated[Moment | None, "where it ended; null while open"] = None


class Planned(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is known of a pause before it begins.

    Attributes:
        begin_ms: Begin of a scheduled pause, epoch ms; else None.
        until_ms: Its end, epoch ms.
        reason: Reason in its first record, None if unknown.
        person: Person for whom it was scheduled, None if unknown.
    """

    begin_ms: int | None = None
    until_ms: int = 0
    reason: str | None = None
    person: str | None = None


class Rejected(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A record without effect; one without a key may name a group."""

    at: Moment
    outcome: Annotated[str, "`refused`, `ignored`, `undecodable` or `halted`"]
    reason: Annotated[str, "the counter's name, as in PROTOCOL.md"]
    detail: Annotated[str | None, "why the value is undecodable"]
    record_type: Annotated[str | None, "kind of the record; null if undecodable"]
    client_id: Annotated[str | None, "the client that sent it"]
    group_id: str | None
    key: Key | None


class PositionRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A sample of a key's position, taken at a record of its owner."""

    key: Key
    at: Moment
    client_id: Annotated[str, "the owner"]
    epoch: Annotated[int, "epoch under which the record was accepted"]
    topic_id: TopicId
    position: Annotated[int | None, "next offset to process"]
    granted: Annotated[int | None, "next offset to grant, at most once"]
    rewinds_count: Annotated[int, "how often the position was set back so far"]


class ImportRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A key that came from another coordinating partition (PROTOCOL 10.4)."""

    key: Key
    at: Moment
    source: Annotated[int, _SOURCE]
    op_id: Annotated[bytes, "the change of the partition count, hex"]
    topic_id: TopicId
    era: Annotated[int, "era in force; earlier claims of the key have lower ones"]
    position: Annotated[int | None, "its position, if known"]
    granted: Annotated[int | None, "next offset to grant, at most once"]
    resets_count: Resets = 0


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
