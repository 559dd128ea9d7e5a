"""What is written under which token, and how far a topic partition is."""

from types import SimpleNamespace

import pytest

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.spark.sinks_table import TableSink, _write_task, write_rows

PLACE = ("g", "t", 0)


class Table:
    """The table of positions, as far as one topic partition goes."""

    def __init__(self, position=0, *, is_stale=False):
        self.position = position
        self.is_stale = is_stale
        self.written = []
        self.said = []
        self.is_committed = None
        self.is_closed = False

    # What a connection does.

    def cursor(self):
        return self

    def commit(self):
        self.is_committed = True

    def rollback(self):
        self.is_committed = False

    def close(self):
        self.is_closed = True

    # What a cursor does.

    def execute(self, text, values=()):
        self.said.append((text.split()[0], values))
        if text.split()[0] == "UPDATE":
            self.position = values[0]

    def fetchone(self):
        return None if self.is_stale else (self.position,)

    def fetchall(self):
        return [("t", 0, self.position)]


def write(cursor, rows):
    cursor.written.append([row.offset for row in rows])


def rows(*offsets, token="1.0.7", partition=0):
    return [
        SimpleNamespace(offset=n, token=token, topic="t", partition=partition)
        for n in offsets
    ]


def run(table, some, **rest):
    sink = TableSink(lambda: table, write, "g", **rest)
    return write_rows(sink, table, place=PLACE, token="1.0.7", rows=iter(some))


def test_rows_are_written_and_the_position_with_them():
    table = Table()
    assert run(table, rows(0, 1, 2)) == 3
    assert (table.written, table.position) == ([[0, 1, 2]], 3)
    assert ("INSERT", (*PLACE, 1, 0, 7)) in table.said


def test_what_was_written_is_not_written_again():
    table = Table(2)
    assert run(table, rows(0, 1, 2, 3)) == 2
    assert (table.written, table.position) == ([[2, 3]], 4)


def test_a_stale_token_writes_nothing():
    table = Table(is_stale=True)
    assert run(table, rows(0, 1)) == 0
    assert (table.written, table.position) == ([], 0)


def test_rows_come_in_pieces():
    table = Table()
    assert run(table, rows(*range(5)), rows_at_once=2) == 5
    assert table.written == [[0, 1], [2, 3], [4]]


def test_waits_of_the_database_are_bounded():
    table = Table()
    run(table, rows(0), idle_ms_max=700)
    bounds = [text for text, _ in table.said if text == "SET"]
    # Both bounds at first, and the first again after each piece.
    assert len(bounds) == 3


def test_each_topic_partition_is_one_transaction():
    tables = []

    def connect():
        tables.append(Table())
        return tables[-1]

    some = [*rows(0, 1), *rows(0, 1, partition=1), *rows(2, token="1.0.9", partition=1)]
    _write_task(TableSink(connect, write, "g"), iter(some))
    assert [table.written for table in tables] == [[[0, 1]], [[0, 1]], [[2]]]
    assert all(table.is_committed and table.is_closed for table in tables)


def test_what_fails_is_undone():
    table = Table()

    def fail(cursor, some):
        raise ValueError("no such column")

    with pytest.raises(ValueError, match="no such column"):
        _write_task(TableSink(lambda: table, fail, "g"), iter(rows(0)))
    assert table.is_committed is False
    assert table.is_closed


def test_positions_are_told():
    assert TableSink(lambda: Table(4), write, "g").positions() == {("t", 0): 4}


@pytest.mark.parametrize("name", ["", "a b", "x;drop", "a.b.c", "1a"])
def test_the_table_has_a_plain_name(name):
    with pytest.raises(ConfigurationError, match="no plain name"):
        TableSink(Table, write, "g", table=name)
