"""PackedEntries hold the same entries as a list of LogEntry."""

import msgspec
import pytest
from batchkit import packed
from logkit import CREATE_TIME, Log, beat

from kafka_marshal.native import compiled
from kafka_marshal.protocol import packed_entries as module
from kafka_marshal.protocol.packed_entries import PackedEntries
from kafka_marshal.protocol.types import OFFSET_MAX

pytestmark = pytest.mark.skipif(compiled is None, reason="nothing was compiled here")


def written(count):
    """Return the entries of a log: a Config, a claim, then heartbeats."""
    log = Log()
    epoch = log.claimed()
    for position in range(count - 2):
        log.one(beat(epoch, position), after=1)
    return log.entries


def test_packed_entries_are_a_sequence_of_log_entries():
    entries = written(9)
    found = packed(entries)
    assert len(found) == 9
    assert list(found) == entries
    assert [found[at] for at in range(9)] == entries
    assert (found[-1], found[-9], found[4]) == (entries[-1], entries[0], entries[4])
    for at in (9, -10):
        with pytest.raises(IndexError):
            found[at]


def test_a_slice_of_packed_entries_is_packed():
    entries = written(9)
    part = packed(entries)[2:7]
    assert isinstance(part, PackedEntries)
    assert list(part) == entries[2:7]
    assert not packed(entries)[5:5]
    assert list(part[:2]) == entries[2:4]


def test_entries_that_are_read_in_order_are_decoded_several_at_once(monkeypatch):
    monkeypatch.setattr(module, "ENTRIES_AT_ONCE", 4)
    entries = written(12)
    found = packed(entries)
    made = []
    read = found._read

    def counted(start, stop):
        made.append((start, stop))
        return read(start, stop)

    monkeypatch.setattr(PackedEntries, "_read", lambda _, *span: counted(*span))
    assert [found[at] for at in range(6)] == entries[:6]
    assert made == [(0, 4), (4, 8)]
    assert [found[at] for at in (11, 9, 10)] == [entries[at] for at in (11, 9, 10)]
    assert made[2:] == [(11, 12), (9, 10), (10, 12)]
    assert list(found) == entries
    assert made[5:] == [(0, 4), (4, 8), (8, 12)]


def test_entries_are_found_by_the_first_bytes_of_their_values():
    entries = written(5)
    head = entries[2].value[:3]
    assert packed(entries).with_head(head) == entries[2:]
    assert packed(entries).with_head(b"none") == []


def test_the_first_entry_after_an_append_time_is_found():
    """Entries with CreateTime do not count: a client may have set any time."""
    entries = written(6)
    times = [each.timestamp_ms for each in entries]
    assert times == sorted(times)
    found = packed(entries)
    assert found.first_later(times[0] - 1) == 0
    assert found.first_later(times[3]) == 4
    assert found.first_later(times[-1]) == 6
    assert found.first_later(OFFSET_MAX) == found.first_later(2**80) == 6
    entries[4] = msgspec.structs.replace(entries[4], timestamp_type=CREATE_TIME)
    assert packed(entries).first_later(times[3]) == 5
