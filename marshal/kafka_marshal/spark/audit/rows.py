"""Rows of the history as rows of tables, in Arrow batches."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from kafka_marshal.history.historian import Historian
from kafka_marshal.history.rows import (
    Attempt,
    GrantRow,
    Handoff,
    ImportRow,
    Interval,
    Moment,
    PauseRow,
    PositionRow,
    Rejected,
    Row,
)
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.text import scope_texts
from kafka_marshal.protocol.types import OFFSET_MAX, Key
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
        is_open: Whether it may still change, as a claim that has not ended.
    """

    table: Table
    values: Values
    is_open: bool = False


def staged(partition: int, row: Row, *, is_open: bool = False) -> Staged:
    """Return a row of the history as one of its table."""
    table, make = _MAKERS[type(row)]
    return Staged(table, {schema.T.name: partition, **make(row)}, is_open)


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
        schema.STRING: pa.string(),
        schema.INT: pa.int32(),
        schema.LONG: pa.int64(),
        schema.BINARY: pa.binary(),
    }
    structs = [
        pa.field(t.name, pa.struct([(c.name, kinds[c.kind]) for c in t.columns]))
        for t in schema.ALL
    ]
    return pa.schema(
        [pa.field("table", pa.string()), pa.field("is_open", pa.bool_()), *structs]
    )


def _key(key: Key | None) -> Values:
    return dict(zip(Key._fields, key or (None, None, None), strict=True))


def _at(at: Moment | None, prefix: str = "") -> Values:
    values = at or (None, None, None)
    names = (f"{prefix}{name}" for name in Moment._fields)
    return dict(zip(names, values, strict=True))


def _hex(value: bytes | None) -> str | None:
    return None if value is None else value.hex()


def _position_of(value: int | None) -> int | None:
    # The position behind the largest offset does not fit.
    return None if value is None else min(value, OFFSET_MAX)


def _interval(row: Interval) -> Values:
    return {
        **_key(row.key),
        "client_id": row.client_id,
        "incarnation": row.incarnation.hex(),
        "token": str(row.token),
        "token_era": row.token.era,
        "token_leader_epoch": row.token.leader_epoch,
        "epoch": row.token.offset,
        "topic_id": _hex(row.topic_id),
        "effect": row.effect,
        "why": row.why,
        **_at(row.start, "start_"),
        "heartbeat_interval_ms": row.heartbeat_interval_ms,
        "renewed_offset": row.renewed_offset,
        "renewed_log_ms": row.renewed_ms,
        "beats_count": row.beats_count,
        "gap_ms_max": row.gap_ms_max,
        "start_position": _position_of(row.start_position),
        "first_position": _position_of(row.first_position),
        "position": _position_of(row.position),
        "rewinds_count": row.rewinds_count,
        "steps_back_count": row.steps_back_count,
        "stray_count": row.stray_count,
        "ending": row.ending,
        "ended_by": row.ended_by,
        "reason": row.reason,
        **_at(row.end, "end_"),
        "resets_count": row.resets_count,
    }


def _claim(row: Attempt) -> Values:
    return {
        **_key(row.key),
        **_at(row.at),
        "client_id": row.client_id,
        "incarnation": row.incarnation.hex(),
        "outcome": row.outcome,
        "reason": row.reason,
        "holder": row.holder,
        "remaining_ms": row.remaining_ms,
        "why": row.why,
    }


def _handoff(row: Handoff) -> Values:
    return {
        **_key(row.key),
        **_at(row.at),
        "from_client_id": row.from_client_id,
        "to_client_id": row.to_client_id,
        "token": str(row.token),
        "ending": row.ending,
        "reason": row.reason,
        "why": row.why,
        "gap_ms": row.gap_ms,
        "heartbeat_interval_ms": row.heartbeat_interval_ms,
        "late_ms": row.late_ms,
        "position": _position_of(row.position),
    }


def _grant(row: GrantRow) -> Values:
    return {
        **_key(row.key),
        **_at(row.at),
        "client_id": row.client_id,
        "grantee": row.grantee.hex(),
        "epoch": row.epoch,
        "topic_id": _hex(row.topic_id),
        "outcome": row.outcome,
        "first_offset": row.first,
        "last_offset": row.last,
        "resets_count": row.resets_count,
    }


def _pause(row: PauseRow) -> Values:
    return {
        "group_id": row.group_id,
        "op_id": row.op_id.hex(),
        "client_id": row.client_id,
        "person": row.person,
        "reason": row.reason,
        "topics": " ".join(scope_texts(row.scope)) or None,
        **_at(row.start, "start_"),
        "begin_ms": row.begin_ms,
        "until_ms": row.until_ms,
        "renewals_count": row.renewals_count,
        "renewed_by": row.renewed_by,
        "ending": row.ending,
        **_at(row.end, "end_"),
    }


def _refused(row: Rejected) -> Values:
    return {
        **_at(row.at),
        "outcome": row.outcome,
        "reason": row.reason,
        "detail": row.detail,
        "record_type": row.record_type,
        "client_id": row.client_id,
        **_key(row.key),
        "group_id": row.group_id if row.key is None else row.key.group_id,
    }


def _position(row: PositionRow) -> Values:
    return {
        **_key(row.key),
        **_at(row.at),
        "client_id": row.client_id,
        "epoch": row.epoch,
        "topic_id": _hex(row.topic_id),
        "position": _position_of(row.position),
        "granted": _position_of(row.granted),
        "rewinds_count": row.rewinds_count,
    }


def _import(row: ImportRow) -> Values:
    return {
        **_key(row.key),
        **_at(row.at),
        "source": row.source,
        "op_id": row.op_id.hex(),
        "topic_id": _hex(row.topic_id),
        "era": row.era,
        "position": _position_of(row.position),
        "granted": _position_of(row.granted),
        "resets_count": row.resets_count,
    }


_MAKERS: dict[type, tuple[Table, Callable[[Any], Values]]] = {
    Interval: (schema.INTERVALS, _interval),
    Attempt: (schema.CLAIMS, _claim),
    Handoff: (schema.HANDOFFS, _handoff),
    GrantRow: (schema.GRANTS, _grant),
    PauseRow: (schema.PAUSES, _pause),
    Rejected: (schema.REFUSED, _refused),
    PositionRow: (schema.POSITIONS, _position),
    ImportRow: (schema.IMPORTS, _import),
}
