"""The tables of an audit: their columns, with types and meanings. Plain data."""

from collections.abc import Iterable
from typing import NamedTuple

SCHEMA = 1
"""Version of the tables; it changes when a column goes or means something else."""

STRING = "string"
INT = "int"
LONG = "bigint"
BINARY = "binary"


class Column(NamedTuple):
    """One column: name, type in Spark SQL, and meaning."""

    name: str
    kind: str
    meaning: str


class Table(NamedTuple):
    """One table.

    Attributes:
        name: Its name, which is also the view's.
        meaning: What a row is.
        columns: In order.
        is_final: Whether its rows describe the end, and the next run replaces them.
        has_open_rows: Whether it also has rows that are open at the end.
    """

    name: str
    meaning: str
    columns: tuple[Column, ...]
    is_final: bool = False
    has_open_rows: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, in order."""
        return tuple(column.name for column in self.columns)

    @property
    def ddl(self) -> str:
        """The columns as Spark's SQL declares them, with meanings for ``DESCRIBE``."""
        return ", ".join(
            f'`{each.name}` {each.kind} COMMENT "{each.meaning}"'
            for each in self.columns
        )


T = Column("coordinating_partition", INT, "partition of the coordination topic")
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
RESETS = Column("resets_count", LONG, "Resets before it")
WHY = Column("why", STRING, "why it was claimed, from the claim's tags")


def _moment(name: str, what: str) -> tuple[Column, ...]:
    return tuple(Column(f"{name}_{each.name}", each.kind, what) for each in AT)


INTERVALS = Table(
    "intervals",
    "one claim, from the record that won to the record that ended it",
    (
        T,
        *KEY,
        Column("client_id", STRING, "the owner"),
        Column("incarnation", STRING, "its process start, hex"),
        Column("token", STRING, "fencing token, `era.leader_epoch.offset`"),
        Column("token_era", LONG, "its first part"),
        Column("token_leader_epoch", INT, "its second part"),
        Column("epoch", LONG, "its third part: offset of the winning claim"),
        Column("topic_id", STRING, "Kafka's id of the data topic, hex, if named"),
        Column(
            "effect",
            STRING,
            "`claimed`, `resumed`, or `restored` from the first checkpoint",
        ),
        WHY,
        *_moment("start", "where it was won, or that checkpoint"),
        Column(
            "heartbeat_interval_ms",
            LONG,
            "heartbeat interval in force at the last renewal",
        ),
        Column("renewed_offset", LONG, "offset of the last renewal"),
        Column("renewed_log_ms", LONG, "log time of the last renewal"),
        Column("beats_count", LONG, "renewals after the claim"),
        Column("gap_ms_max", LONG, "longest log time between two renewals in a row"),
        Column("start_position", LONG, "position when it was won, if one was known"),
        Column("first_position", LONG, "first position known under it"),
        Column("position", LONG, "last position under it"),
        Column("rewinds_count", LONG, "beats that set the position back on purpose"),
        Column("steps_back_count", LONG, "records that set it back without a rewind"),
        Column("stray_count", LONG, "accepted records that the owner cannot have sent"),
        Column("ending", STRING, "`open`, `released`, `taken_over` or `resumed`"),
        Column("ended_by", STRING, "client that released it or took it over"),
        Column("reason", STRING, "reason of the release, or `why` of the next claim"),
        *_moment("end", "where it ended; null while open"),
        RESETS,
    ),
    has_open_rows=True,
)
CLAIMS = Table(
    "claims",
    "one claiming record with its verdict",
    (
        T,
        *KEY,
        *AT,
        Column("client_id", STRING, "the client that sent it"),
        Column("incarnation", STRING, "its process start, hex"),
        Column("outcome", STRING, "`won`, `refused` or `ignored`"),
        Column("reason", STRING, "why not; null if won"),
        Column("holder", STRING, "the owner afterwards"),
        Column("remaining_ms", LONG, "log time until the key can be claimed"),
        WHY,
    ),
)
HANDOFFS = Table(
    "handoffs",
    "a key that went from one owner to the next",
    (
        T,
        *KEY,
        *AT,
        Column("from_client_id", STRING, "the owner before"),
        Column("to_client_id", STRING, "the owner after"),
        Column("token", STRING, "fencing token of the next claim"),
        Column("ending", STRING, "how the claim before ended, as in `intervals`"),
        Column("reason", STRING, "reason of its release"),
        WHY,
        Column("gap_ms", LONG, "log time since the release, or since the last renewal"),
        Column(
            "heartbeat_interval_ms",
            LONG,
            "heartbeat interval in force at that last renewal",
        ),
        Column(
            "late_ms",
            LONG,
            "log time by which the next owner got the key later than possible; null "
            "unless the log shows that it waited",
        ),
        Column("position", LONG, "position at which the next owner starts"),
    ),
)
GRANTS = Table(
    "grants",
    "one request for a grant, at most once",
    (
        T,
        *KEY,
        *AT,
        Column("client_id", STRING, "the client that sent it"),
        Column("grantee", STRING, "process that may process the offsets, hex"),
        Column("epoch", LONG, "epoch in the record"),
        Column("topic_id", STRING, "Kafka's id of the data topic, hex, if named"),
        Column("outcome", STRING, "`granted`, `paused`, `nothing_left` or `span`"),
        Column("first_offset", LONG, "first offset granted, or requested"),
        Column("last_offset", LONG, "last one, inclusive"),
        RESETS,
    ),
)
PAUSES = Table(
    "pauses",
    "a pause of a group, as one coordinating partition has it",
    (
        T,
        Column("group_id", STRING, "the group"),
        Column("op_id", STRING, "the operation, hex"),
        Column("client_id", STRING, "the client that began or scheduled it"),
        Column("person", STRING, "the person for whom it did, if named"),
        Column("reason", STRING, "reason in its first record"),
        Column("topics", STRING, "topics that it is limited to; null for the group"),
        *_moment("start", "where it began"),
        Column("begin_ms", LONG, "begin of a scheduled pause, epoch ms; else null"),
        Column("until_ms", LONG, "its end as of the last renewal, epoch ms"),
        Column("renewals_count", LONG, "how often the pause was renewed"),
        Column("renewed_by", STRING, "who renewed it last, if another began it"),
        Column("ending", STRING, "`open`, `unpaused`, `ran_out` or `reset`"),
        *_moment("end", "where it ended; null while open"),
    ),
    has_open_rows=True,
)
REFUSED = Table(
    "refused",
    "a record without effect, or one beat of it",
    (
        T,
        *AT,
        Column("outcome", STRING, "`refused`, `ignored`, `undecodable` or `halted`"),
        Column("reason", STRING, "the counter's name, as in PROTOCOL.md"),
        Column("detail", STRING, "why the value is undecodable"),
        Column("record_type", STRING, "kind of the record; null if undecodable"),
        Column("client_id", STRING, "the client that sent it"),
        *KEY,
    ),
)
POSITIONS = Table(
    "positions",
    "progress of a key: at most one row per key and sample interval",
    (
        T,
        *KEY,
        *AT,
        Column("client_id", STRING, "the owner"),
        Column("epoch", LONG, "epoch under which the record was accepted"),
        Column("topic_id", STRING, "Kafka's id of the data topic, hex, if named"),
        Column("position", LONG, "next offset to process"),
        Column("granted", LONG, "next offset to grant, at most once"),
        Column("rewinds_count", LONG, "how often the position was set back so far"),
    ),
)
IMPORTS = Table(
    "imports",
    "a key that came from another coordinating partition",
    (
        T,
        *KEY,
        *AT,
        Column("source", INT, "coordinating partition that it came from"),
        Column("op_id", STRING, "the change of the partition count, hex"),
        Column("topic_id", STRING, "Kafka's id of the data topic, hex, if named"),
        Column("era", LONG, "era in force; earlier claims of the key have lower ones"),
        Column("position", LONG, "its position, if known"),
        Column("granted", LONG, "next offset to grant, at most once"),
        RESETS,
    ),
)
AGES = Table(
    "ages",
    "age of a group's claims when they were renewed",
    (
        T,
        Column("group_id", STRING, "the group"),
        Column(
            "twentieths_of_h",
            INT,
            "age in twentieths of a heartbeat interval; 80 = 80 or more",
        ),
        Column("beats_count", LONG, "renewals at that age"),
    ),
    is_final=True,
)
PARTITIONS = Table(
    "partitions",
    "the end state of one coordinating partition",
    (
        T,
        Column(
            "first_offset",
            LONG,
            "first folded entry; above 0 if the start of the log is gone",
        ),
        Column("next_offset", LONG, "offset after the last one"),
        Column("leader_epoch", INT, "leader epoch of the last one"),
        Column("log_ms", LONG, "log time"),
        Column("append_ms", LONG, "largest time of an entry, epoch ms"),
        Column("digest", STRING, "digest of the state"),
        Column("entries_count", LONG, "entries folded"),
        Column("generation", INT, "generation of the Config in force"),
        Column("heartbeat_interval_ms", LONG, "heartbeat interval of that Config"),
        Column("keys_count", LONG, "known keys"),
        Column("owned_count", LONG, "keys with an owner"),
        RESETS,
        Column("halted_offset", LONG, "offset of a Config that needs a newer release"),
        Column("halted_level", INT, "the feature level that it needs"),
    ),
    is_final=True,
)
STATE = Table(
    "state",
    "where the next run starts; private",
    (
        T,
        Column("next_offset", LONG, "next offset to read"),
        Column("saved", BINARY, "snapshot and history, as `folding.py` writes them"),
    ),
    is_final=True,
)

TABLES = (
    INTERVALS,
    CLAIMS,
    HANDOFFS,
    GRANTS,
    PAUSES,
    REFUSED,
    POSITIONS,
    IMPORTS,
    AGES,
    PARTITIONS,
)
"""The history tables, in the order of the documents."""

ALL = (*TABLES, STATE)


def staged_ddl(tables: Iterable[Table] = ALL) -> str:
    """Return the schema for rows of all tables.

    It has one struct for each table, and each row sets one of them, so that one pass
    over the log fills all tables.
    """
    structs = ", ".join(
        f"`{table.name}` struct<"
        + ", ".join(f"`{c.name}`: {c.kind}" for c in table.columns)
        + ">"
        for table in tables
    )
    return f"`table` string, `is_open` boolean, {structs}"
