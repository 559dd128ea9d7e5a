"""The tables of an audit: their columns, with types and meanings. Plain data.

Most tables take their columns from the annotations of the history's rows.
"""

from typing import Annotated, NamedTuple, get_args, get_origin, get_type_hints

from kafka_marshal.history.rows import (
    AT,
    BINARY,
    INT,
    KEY,
    LONG,
    STRING,
    Attempt,
    Column,
    GrantRow,
    Handoff,
    ImportRow,
    Interval,
    Moment,
    PauseRow,
    PositionRow,
    Rejected,
)
from kafka_marshal.protocol.types import Key

SCHEMA = 1
"""Version of the tables; it changes if a column is removed or changes its meaning."""


class Table(NamedTuple):
    """One table.

    Attributes:
        name: Name of the table, and of its view.
        meaning: What a row stands for.
        columns: The columns, in order.
        row: Type of the history's rows in the table, None for other tables.
        is_final: Whether rows describe the end of a run: the next run replaces them.
        has_open_rows: Whether it also has rows that are open at the end of a run.
    """

    name: str
    meaning: str
    columns: tuple[Column, ...]
    row: type | None = None
    is_final: bool = False
    has_open_rows: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, in order."""
        return tuple(column.name for column in self.columns)

    @property
    def ddl(self) -> str:
        """The columns as a DDL text for Spark, with meanings for ``DESCRIBE``."""
        return ", ".join(
            f'`{each.name}` {each.kind} COMMENT "{each.meaning}"'
            for each in self.columns
        )


T = Column("coordinating_partition", INT, "partition of the coordination topic")


def _history(
    name: str, meaning: str, row: type, *, has_open_rows: bool = False
) -> Table:
    """Return the table of a type of the history's rows, by the row's annotations."""
    hints = get_type_hints(row, include_extras=True).items()
    columns = (T, *(each for field, hint in hints for each in _of_field(field, hint)))
    return Table(name, meaning, columns, row=row, has_open_rows=has_open_rows)


def _of_field(name: str, hint: object) -> tuple[Column, ...]:
    if get_origin(hint) is not Annotated:
        # The group of a rejected record is a column of its key.
        return AT if hint is Moment else KEY if Key in {hint, *get_args(hint)} else ()
    kind, stated = get_args(hint)
    kinds = {kind, *get_args(kind)}
    if isinstance(stated, tuple):
        return stated
    if Moment in kinds:
        return tuple(Column(f"{name}_{each.name}", each.kind, stated) for each in AT)
    return (Column(name, LONG if int in kinds else STRING, stated),)


INTERVALS = _history(
    "intervals",
    "one claim, from the record that won it to the record that ended it",
    Interval,
    has_open_rows=True,
)
CLAIMS = _history("claims", "one claiming record with its verdict", Attempt)
HANDOFFS = _history("handoffs", "a key that went from one owner to the next", Handoff)
GRANTS = _history("grants", "one request for a grant, with delivery amo", GrantRow)
PAUSES = _history(
    "pauses",
    "a pause of a group, as one coordinating partition has it",
    PauseRow,
    has_open_rows=True,
)
REFUSED = _history(
    "refused", "a record, or one heartbeat of a record, without effect", Rejected
)
POSITIONS = _history(
    "positions",
    "progress of a key: at most one row per key and sample interval",
    PositionRow,
)
IMPORTS = _history(
    "imports", "a key that came from another coordinating partition", ImportRow
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
            "first folded entry; above 0 if the log's start was deleted",
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
        Column("resets_count", LONG, "Resets before next_offset"),
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


def staged_ddl() -> str:
    """Return the schema for rows of all tables.

    It has one struct for each table, and each row sets one of them, so that one pass
    over the log fills all tables.
    """
    structs = ", ".join(
        f"`{table.name}` struct<"
        + ", ".join(f"`{c.name}`: {c.kind}" for c in table.columns)
        + ">"
        for table in ALL
    )
    return f"`table` string, `is_open` boolean, {structs}"
