"""Converts rows of the history into rows of the audit's tables, in Arrow batches."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from kafka_marshal.history.historian import Historian
from kafka_marshal.history.rows import BINARY, INT, LONG, STRING, Moment, Row
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.text import scope_texts
from kafka_marshal.protocol.types import OFFSET_MAX, Key, Token
from kafka_marshal.spark.audit import schema
from kafka_marshal.spark.audit.schema import Table

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 2_000
Values = dict[str, Any]


class Staged(NamedTuple):
    """A row on its way to its table.

    Attributes:
        table: The table.
        values: Column to value.
        is_open: Whether the row may still change, such as a claim that has not ended.
    """

    table: Table
    values: Values
    is_open: bool = False


def staged(partition: int, row: Row, *, is_open: bool = False) -> Staged:
    """Convert a row of the history; its fields have the names of the columns."""
    table = _TABLES[type(row)]
    found: Values = {schema.T.name: partition}
    for name in row.__struct_fields__:
        value = getattr(row, name)
        if type(value) is str:
            found[name] = value  # most are
        elif value is not None:
            found |= _columns(name, value)
    return Staged(table, {name: found.get(name) for name in table.names}, is_open)


def state_row(world: WorldState, historian: Historian) -> Staged:
    """Return the end state of a coordinating partition."""
    config, halted = world.config, world.halted
    values = {
        schema.T.name: world.partition,
        "first_offset": historian.first_offset,
        "next_offset": world.next_offset,
        "leader_epoch": world.leader_epoch,
        "log_ms": world.log_time_ms,
        "append_ms": world.append_time_ms,
        "digest": digest(world),
        "entries_count": historian.entries_count,
        "generation": None if config is None else config.generation,
        "heartbeat_interval_ms": config and config.heartbeat_interval_ms,
        "keys_count": len(world.keys),
        "owned_count": sum(known.owner is not None for known in world.keys.values()),
        "resets_count": historian.resets_count,
        "halted_offset": None if halted is None else halted.offset,
        "halted_level": None if halted is None else halted.feature_level,
    }
    return Staged(schema.PARTITIONS, values)


def age_rows(partition: int, ages: Mapping[str, list[int]]) -> Iterator[Staged]:
    """Yield the ages of claims at renewal, by group."""
    for group_id, counts in sorted(ages.items()):
        for twentieths, count in enumerate(counts):
            if count:
                values = (partition, group_id, twentieths, count)
                names = schema.AGES.names
                yield Staged(schema.AGES, dict(zip(names, values, strict=True)))


def batches(rows: Iterable[Staged]) -> Iterator["pa.RecordBatch"]:
    """Yield rows in small Arrow batches of the staged schema."""
    source = iter(rows)
    while chunk := list(islice(source, BATCH_ROWS)):
        yield _batch(chunk)


def _batch(rows: list[Staged]) -> "pa.RecordBatch":
    import pyarrow as pa

    form = arrow_schema()
    columns = [
        pa.array([row.table.name for row in rows], form.field(0).type),
        pa.array([row.is_open for row in rows], form.field(1).type),
    ]
    for at, table in enumerate(schema.ALL, 2):
        values = [row.values if row.table is table else None for row in rows]
        columns.append(pa.array(values, form.field(at).type))
    return pa.RecordBatch.from_arrays(columns, schema=form)


@cache
def arrow_schema() -> "pa.Schema":
    """Return ``schema.staged_ddl`` as an Arrow schema."""
    import pyarrow as pa

    kinds = {
        STRING: pa.string(),
        INT: pa.int32(),
        LONG: pa.int64(),
        BINARY: pa.binary(),
    }
    structs = [
        pa.field(t.name, pa.struct([(c.name, kinds[c.kind]) for c in t.columns]))
        for t in schema.ALL
    ]
    return pa.schema(
        [pa.field("table", pa.string()), pa.field("is_open", pa.bool_()), *structs]
    )


_TABLES = {table.row: table for table in schema.TABLES if table.row is not None}
# Columns have the names of fields, except these.
_COLUMNS = {
    "renewed_ms": "renewed_log_ms",
    "first": "first_offset",
    "last": "last_offset",
}


def _columns(name: str, value: object) -> Values:
    """Return the columns of one field; a composed value has several."""
    match value:
        case int():
            # The position after the largest offset does not fit into a bigint.
            return {_COLUMNS.get(name, name): min(value, OFFSET_MAX)}
        case bytes():
            return {name: value.hex()}
        case Moment(offset, log_ms, append_ms):
            prefix = "" if name == "at" else f"{name}_"
            return {
                f"{prefix}offset": offset,
                f"{prefix}log_ms": log_ms,
                f"{prefix}append_ms": append_ms,
            }
        case Key(group_id, topic, partition):
            return {"group_id": group_id, "topic": topic, "partition": partition}
        case Token(era, leader_epoch, epoch):
            return {
                "token": str(value),
                "token_era": era,
                "token_leader_epoch": leader_epoch,
                "epoch": epoch,
            }
        case tuple():
            return {"topics": " ".join(scope_texts(value))}
    raise AssertionError(f"no column has a field like {name}")
