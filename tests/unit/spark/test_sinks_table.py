"""Which rows TableSink writes under which token, and the position that it stores."""

import sqlite3
from types import SimpleNamespace

import pytest
from sinkkit import Frame

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.spark.sinks_table import (
    _CREATE,
    TableSink,
    write_rows,
)

PLACE = ("g", "t", 0)
FIRST, SECOND = "1" * 32, "2" * 32


class Table:
    """A database with the table of positions, with a row of one topic partition.

    The statements of the sink run on SQLite, whose upserts have PostgreSQL's syntax.
    Only ``SET LOCAL``, which SQLite does not have, is recorded instead.
    """

    def __init__(self, position=0, *, token=(0, 0, 0), topic_id=""):
        self.sql = sqlite3.connect(":memory:", isolation_level=None)
        self.sql.execute(_CREATE.format(table="marshal_fence"))
        self.written = []
        self.bounds = []
        self.is_committed = None
        self.is_closed = False
        self.found = self.sql.cursor()
        values = (*PLACE, *token, position, topic_id)
        self.sql.execute("INSERT INTO marshal_fence VALUES (?,?,?,?,?,?,?,?)", values)
        self.sql.execute("BEGIN")

    @property
    def row(self):
        """Return the token that was written last, and the position."""
        columns = "era, leader_epoch, epoch, next_offset"
        (row,) = self.sql.execute(
            f"SELECT {columns} FROM marshal_fence"
            " WHERE (group_id, topic, part) = (?, ?, ?)",
            PLACE,
        )
        return row[:3], row[3]

    # Methods of a connection.

    def cursor(self):
        return self

    def commit(self):
        self.is_committed = True
        self.sql.execute("COMMIT")

    def rollback(self):
        self.is_committed = False
        self.sql.execute("ROLLBACK")

    def close(self):
        self.is_closed = True

    # Methods of a cursor.

    def execute(self, text, values=()):
        if text.startswith("SET LOCAL"):
            self.bounds.append(text)
        else:
            self.found = self.sql.execute(text.replace("%s", "?"), values)

    def fetchone(self):
        return self.found.fetchone()

    def fetchall(self):
        return self.found.fetchall()


def write(cursor, rows):
    cursor.written.append([row.offset for row in rows])


def rows(*offsets, token="1.0.7", partition=0, topic_id=FIRST):
    return [
        SimpleNamespace(
            offset=n, token=token, topic="t", partition=partition, topicId=topic_id
        )
        for n in offsets
    ]


def run(table, some, *, topic_id=FIRST, **rest):
    sink = TableSink(lambda: table, write, "g", **rest)
    written = {"token": "1.0.7", "rows": iter(some), "topic_id": topic_id}
    return write_rows(sink, table, place=PLACE, **written)


def test_rows_are_written_and_the_position_with_them():
    table = Table()
    assert run(table, rows(0, 1, 2)) == 3
    assert table.written == [[0, 1, 2]]
    assert table.row == ((1, 0, 7), 3)


def test_the_first_rows_of_a_topic_partition_are_written():
    table = Table()
    table.sql.execute("DELETE FROM marshal_fence")
    assert run(table, rows(0, 1)) == 2
    assert table.row == ((1, 0, 7), 2)


def test_written_rows_are_not_written_again():
    table = Table(2)
    assert run(table, rows(0, 1, 2, 3)) == 2
    assert (table.written, table.row[1]) == ([[2, 3]], 4)


def test_a_batch_of_written_rows_is_logged(caplog):
    """So is the second of two sinks with one table in one batch, which writes none."""
    table = Table()
    for _ in range(2):
        run(table, rows(0, 1))
    assert table.written == [[0, 1]]
    assert "rows_already_written t-0: all rows" in caplog.text
    assert "position 2" in caplog.text
    caplog.clear()
    run(table, [])
    run(table, rows(1, 2))
    assert not caplog.text


@pytest.mark.parametrize("known", [(1, 0, 8), (1, 1, 0), (2, 0, 0), (1, 2, 3)])
def test_a_stale_token_writes_nothing(known):
    table = Table(token=known)
    assert run(table, rows(0, 1)) == 0
    assert table.written == []
    assert table.row == (known, 0)


@pytest.mark.parametrize("known", [(1, 0, 7), (1, 0, 6), (0, 9, 9), (0, 0, 9)])
def test_an_equal_or_a_later_token_writes(known):
    table = Table(token=known)
    assert run(table, rows(0, 1)) == 2
    assert table.row == ((1, 0, 7), 2)


def test_rows_of_a_topic_that_was_created_again_are_written():
    table = Table(100, topic_id=FIRST)
    assert run(table, rows(0, 1), topic_id=SECOND) == 2
    assert table.row == ((1, 0, 7), 2)
    assert run(table, rows(0, 1, 2), topic_id=SECOND) == 1
    assert table.row[1] == 3


@pytest.mark.parametrize(
    ("known", "topic_id"), [("", FIRST), (FIRST, ""), (FIRST, FIRST), ("", "")]
)
def test_an_unknown_topic_id_changes_no_position(known, topic_id):
    """Rows of earlier versions have none."""
    table = Table(1, topic_id=known)
    assert run(table, rows(0, 1), topic_id=topic_id) == 1
    assert run(table, rows(0), topic_id=SECOND) == (1 if known or topic_id else 0)


def test_a_stale_row_of_the_earlier_topic_is_refused():
    table = Table(5, token=(1, 0, 8), topic_id=SECOND)
    assert run(table, rows(100), topic_id=FIRST) == 0
    assert table.row == ((1, 0, 8), 5)


def test_the_topic_id_of_the_last_written_rows_is_stored():
    table = Table()
    some = [*rows(7), *rows(8, token="1.0.9", topic_id=SECOND)]
    TableSink(lambda: table, write, "g")(Frame(some[:1]), 0)
    table.sql.execute("BEGIN")
    TableSink(lambda: table, write, "g")(Frame(some[1:]), 1)
    (found,) = table.sql.execute("SELECT topic_id FROM marshal_fence")
    assert found == (SECOND,)


def test_rows_of_another_partition_do_not_change_the_position():
    table = Table()
    sink = TableSink(lambda: table, write, "g")
    place = ("g", "t", 1)
    assert write_rows(sink, table, place=place, token="9.0.7", rows=iter(rows(0))) == 1
    assert table.row == ((0, 0, 0), 0)


def test_rows_are_written_in_bounded_pieces():
    table = Table()
    assert run(table, rows(*range(5)), rows_at_once=2) == 5
    assert table.written == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("name", ["rows_at_once", "idle_ms_max"])
@pytest.mark.parametrize("value", [0, -1, "5", 1.5])
def test_a_limit_below_1_is_refused(name, value):
    """With 0 rows in a call the position moved, and no row was written."""
    with pytest.raises(ConfigurationError, match=name):
        TableSink(Table, write, "g", **{name: value})


def test_rows_of_one_offset_may_be_in_two_pieces():
    """A record may have become several rows, as by ``explode``."""
    table = Table(1)
    assert run(table, rows(0, 0, 1, 1, 1, 2, 2), rows_at_once=2) == 5
    assert table.written == [[1, 1], [1, 2], [2]]
    assert table.row[1] == 3


def test_waits_of_the_database_are_bounded():
    table = Table()
    run(table, rows(0), idle_ms_max=700)
    idle, lock, again = table.bounds
    assert idle.endswith("idle_in_transaction_session_timeout = 700")
    assert lock.endswith("lock_timeout = 1400")
    # After each piece, too.
    assert again == idle


def test_each_topic_partition_is_one_transaction():
    tables = []

    def connect():
        tables.append(Table())
        return tables[-1]

    later = rows(2, token="1.0.9", partition=1)
    some = [*later, *rows(0, 1), *rows(1, partition=1), *rows(0, partition=1)]
    TableSink(connect, write, "g")(Frame(some), 0)
    assert [table.written for table in tables] == [[[0, 1]], [[0, 1]], [[2]]]
    assert all(table.is_committed and table.is_closed for table in tables)


def test_a_failed_transaction_is_rolled_back():
    table = Table()

    def fail(cursor, some):
        raise ValueError("no such column")

    with pytest.raises(ValueError, match="no such column"):
        TableSink(lambda: table, fail, "g")(Frame(rows(0)), 0)
    assert table.is_committed is False
    assert table.is_closed
    # The token that was written is undone with the rows.
    assert table.row == ((0, 0, 0), 0)


def test_the_cause_of_a_lost_connection_is_raised():
    """A rollback by a lost connection fails, too."""
    table = Table()

    def lose(cursor, some):
        raise OSError("terminated after 60 s without a statement")

    def fail():
        raise OSError("the connection is closed")

    table.rollback = fail
    with pytest.raises(OSError, match="terminated after 60 s"):
        TableSink(lambda: table, lose, "g")(Frame(rows(0)), 0)
    assert table.is_closed


def test_positions_are_returned():
    assert TableSink(lambda: Table(4), write, "g").positions() == {("t", 0): 4}


@pytest.mark.parametrize("name", ["", "a b", "x;drop", "a.b.c", "1a"])
def test_a_table_name_that_is_not_plain_raises(name):
    with pytest.raises(ConfigurationError, match="no plain name"):
        TableSink(Table, write, "g", table=name)
