"""Journals of workers: lines are read once, an incomplete line is ignored."""

import pytest

from kafka_marshal_cli.demo.journal import (
    BadJournal,
    JournalReader,
    JournalWriter,
    Line,
)


def test_a_reader_returns_only_the_new_lines_of_a_journal(tmp_path):
    path = tmp_path / "w.journal"
    reader = JournalReader(path)
    assert reader.read() == []
    writer = JournalWriter(path)
    writer.write(Line(kind="ready"))
    assert [line.kind for line in reader.read()] == ["ready"]
    writer.write(Line(kind="batch", partition=2, offset=5, last=9, token="1.0.3"))
    line = Line(kind="record", partition=2, offset=5, token="1.0.3", note="41")
    writer.write(line)
    batch, record = reader.read()
    assert (batch.partition, batch.offset, batch.last) == (2, 5, 9)
    assert (record.kind, record.token, record.note) == ("record", "1.0.3", "41")
    assert record.at >= batch.at
    assert reader.read() == []
    assert len(reader.lines) == 3


def test_a_line_is_read_only_once_it_is_whole(tmp_path):
    path = tmp_path / "w.journal"
    JournalWriter(path).write(Line(kind="record", partition=0, offset=1))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-1])
    reader = JournalReader(path)
    assert len(reader.read()) == 1
    # The line is read once it is complete.
    path.write_bytes(whole + whole)
    assert len(reader.read()) == 1


def test_a_damaged_journal_is_refused(tmp_path):
    path = tmp_path / "w.journal"
    path.write_bytes(b"{}\n")
    with pytest.raises(BadJournal, match="is damaged"):
        JournalReader(path).read()
