"""Rows of the history as rows of the tables."""

from typing import get_args, get_origin, get_type_hints

import pytest
from logkit import (
    KEY,
    H,
    Log,
    beat,
    claim,
    config,
    ident,
    imported,
    layout_fence,
    layout_import,
    messages,
    pause,
    release,
)
from msgspec.structs import replace

from kafka_marshal.history.historian import Historian
from kafka_marshal.history.rows import Moment, Row
from kafka_marshal.protocol.codec import person_to_tags
from kafka_marshal.protocol.records import ScopedTopic
from kafka_marshal.protocol.types import OFFSET_MAX, Key, Token
from kafka_marshal.spark.audit import schema
from kafka_marshal.spark.audit.rows import (
    BATCH_ROWS,
    Staged,
    age_rows,
    arrow_schema,
    batches,
    staged,
    state_row,
)


def played():
    """Return a log in which every kind of row occurs, its history and rows."""
    log, historian, rows = Log(configured=False), Historian(), []

    def append(record, **where):
        transitions = log.append(record, **where)
        entry = log.entries[-1]
        rows.extend(historian.take(log.state, entry, transitions=transitions))
        return entry.offset

    append(config())
    epoch = append(claim(topic_id=ident("topic")))
    append(beat(epoch, 5), after=H // 2)
    append(messages(epoch, 0, 9))
    append(claim("c2"))
    append(b"\xff")
    append(replace(pause(log.now_ms + 50), tags=person_to_tags("ada")))
    append(release(epoch, 10), after=100)
    append(claim("c2"), after=10)
    rows.extend(moved())
    return log, historian, rows


def moved():
    """Return the rows of a key that comes from another coordinating partition."""
    log, historian, rows = Log(1, configured=False), Historian(), []
    for record in (layout_fence(2), layout_import(imported(position=7))):
        transitions = log.append(record)
        entry = log.entries[-1]
        rows += historian.take(log.state, entry, transitions=transitions)
    return rows


@pytest.fixture(scope="module")
def rows_of_story():
    return played()


def test_every_row_fills_the_columns_of_its_table(rows_of_story):
    _, historian, rows = rows_of_story
    found = [staged(3, row) for row in rows]
    found += [staged(3, row, is_open=True) for row in historian.open_rows()]
    tables = {row.table.name for row in found}
    assert tables == {t.name for t in schema.TABLES if not t.is_final}
    for row in found:
        assert set(row.values) == set(row.table.names), row.table.name
        assert row.values["coordinating_partition"] == 3
    assert [row.is_open for row in found if row.table is schema.INTERVALS] == [
        False,
        True,
    ]


FILLED = {
    Key: KEY,
    Moment: Moment(1, 2, 3),
    Token: Token(1, 2, 3),
    tuple: (ScopedTopic("t", (1, 2)),),
    bytes: b"\1",
    str: "text",
    int: 1,
}


@pytest.mark.parametrize("kind", get_args(Row), ids=lambda kind: kind.__name__)
def test_every_column_is_filled_from_a_field_of_its_row(kind):
    hints = get_type_hints(kind)
    kinds = {name: (*get_args(hint), hint)[0] for name, hint in hints.items()}
    row = kind(
        **{name: FILLED[get_origin(each) or each] for name, each in kinds.items()}
    )
    values = staged(3, row).values
    assert [name for name, value in values.items() if value is None] == []


def test_bytes_are_hex_and_tokens_are_split(rows_of_story):
    _, _, rows = rows_of_story
    ended = next(s for s in (staged(3, r) for r in rows) if s.table is schema.INTERVALS)
    values = ended.values
    assert values["incarnation"] == ident("c1").hex()
    assert values["topic_id"] == ident("topic").hex()
    parts = (values["token_era"], values["token_leader_epoch"], values["epoch"])
    assert ".".join(map(str, parts)) == values["token"]
    assert (values["group_id"], values["topic"], values["partition"]) == KEY


def test_a_pause_row_names_the_person_who_paused(rows_of_story):
    _, _, rows = rows_of_story
    found = next(s for s in (staged(3, r) for r in rows) if s.table is schema.PAUSES)
    assert (found.values["person"], found.values["client_id"]) == ("ada", "admin")
    assert found.values["begin_ms"] is None, "it began with its record"


def test_the_state_row_has_the_figures_of_the_fold(rows_of_story):
    log, historian, _ = rows_of_story
    values = state_row(log.state, historian).values
    assert set(values) == set(schema.PARTITIONS.names)
    assert (values["next_offset"], values["entries_count"]) == (9, 9)
    assert (values["keys_count"], values["owned_count"]) == (1, 1)
    assert (values["heartbeat_interval_ms"], values["halted_level"]) == (H, None)
    empty = state_row(Log(1, configured=False).state, Historian()).values
    assert (empty["generation"], empty["heartbeat_interval_ms"]) == (None, None)
    assert (empty["first_offset"], empty["leader_epoch"]) == (None, None)


def test_the_state_row_of_a_halted_fold_has_its_offset_and_level():
    log = Log(1)
    log.append(config(2, era=2, level=7))
    values = state_row(log.state, Historian()).values
    assert (values["halted_offset"], values["halted_level"]) == (1, 7)


def test_age_counts_of_zero_are_omitted():
    rows = list(age_rows(2, {"b": [0, 3, 0, 1], "a": [2, 0, 0, 0]}))
    assert [tuple(row.values.values()) for row in rows] == [
        (2, "a", 0, 2),
        (2, "b", 1, 3),
        (2, "b", 3, 1),
    ]


def test_batches_are_bounded_and_have_one_struct_in_each_row(rows_of_story):
    _, _, rows = rows_of_story
    source = (staged(3, row) for _ in range(BATCH_ROWS) for row in rows)
    read = []

    def counted():
        for row in source:
            read.append(row)
            yield row

    first = next(iter(batches(counted())))
    assert first.num_rows == BATCH_ROWS
    assert len(read) == BATCH_ROWS, "no more is taken than a batch holds"
    assert first.schema == arrow_schema()
    for row, back in zip(read[:20], first.slice(0, 20).to_pylist(), strict=True):
        assert back["table"] == row.table.name
        assert back[row.table.name] == {
            name: row.values.get(name) for name in row.table.names
        }
        others = [t.name for t in schema.ALL if t is not row.table]
        assert {back[name] for name in others} == {None}


def test_the_largest_numbers_that_a_log_can_hold_fit():
    """No writer of the log can stop an audit."""
    log, historian = Log(configured=False), Historian()
    most = OFFSET_MAX
    rows = []

    def append(record):
        transitions = log.append(record, at=most)
        taken = historian.take(log.state, log.entries[-1], transitions=transitions)
        rows.extend(staged(0, row) for row in taken)

    append(config(era=2**32 - 1))
    append(claim())
    append(beat(1, most))
    append(messages(1, most, most))
    append(pause(most))
    append(release(1, most))
    append(claim("c2"))
    assert log.key().position == most + 1
    rows += [staged(0, row, is_open=True) for row in historian.open_rows()]
    rows.append(state_row(log.state, historian))
    assert sum(batch.num_rows for batch in batches(rows)) == len(rows)
    assert {row.values["position"] for row in rows if row.table is schema.HANDOFFS} == {
        most
    }


def test_no_rows_make_no_batch():
    assert list(batches([])) == []
    (batch,) = batches([Staged(schema.AGES, {"group_id": "g"})])
    assert batch.num_rows == 1
