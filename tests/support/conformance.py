"""Checks for every implementation of the logs in ``ports``.

They ensure that the cluster in memory behaves as a real one: only then do results of
the simulator apply to a real cluster. Each check takes a ``Rig`` with new topics.

::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_conformance(rig, check):
        check(rig)
"""

import threading
import time
from contextlib import suppress

from conformance_reader import READER_CHECKS
from conformancekit import (
    LATE_S,
    POLL_MS,
    TIMEOUT_MS,
    WAIT_S,
    Check,
    Entries,
    Rig,
    filled,
    read_entries,
    read_records,
    until,
    values_of,
)

from kafka_marshal.errors import CoordinationError, InvalidTransition, LogTruncated
from kafka_marshal.ports import LogRange
from kafka_marshal.protocol.types import TimestampType, TopicPartition

__all__ = ["CHECKS", "Check", "Rig"]

RECORD_BYTES_MAX = 48 * 1024
HOSTILE = (b"", b"\x00", b"\xff" * 100, b"{", b"\x93\x01", bytes(range(256)))

# --- The coordination log ------------------------------------------------------------


def appends_are_read_back_in_order(rig: Rig) -> None:
    """Each partition has its own appends, in order, at the reported offsets."""
    log = rig.coordination_log()
    wanted = [b"%03d" % number for number in range(60)]
    appends = [log.append(n % 3, value) for n, value in enumerate(wanted)]
    entries = read_entries(log, len(wanted))
    for partition in range(3):
        assert values_of(entries, partition) == wanted[partition::3]
        offsets = [entry.offset for number, entry in entries if number == partition]
        assert offsets == sorted(set(offsets))
    until(lambda: all(append.is_done() for append in appends), "all acknowledged")
    assert all(append.error() is None for append in appends)
    where = {entry.value: entry.offset for _, entry in entries}
    reported = [append.offset() for append in appends]
    assert reported == [where[value] for value in wanted]
    log.close(TIMEOUT_MS)


def entries_are_stamped_by_the_leader(rig: Rig) -> None:
    """Each entry has LogAppendTime and a leader epoch (PROTOCOL 2.1)."""
    log = rig.coordination_log()
    log.append(1, b"x")
    ((partition, entry),) = read_entries(log, 1)
    assert partition == 1
    assert entry.timestamp_type == TimestampType.LOG_APPEND_TIME
    assert entry.timestamp_ms > 0
    assert entry.leader_epoch is not None
    assert entry.leader_epoch >= 0
    log.close(TIMEOUT_MS)


def readers_agree(rig: Rig) -> None:
    """An early and a late reader read the same entries of each partition."""
    early = rig.coordination_log()
    for number in range(30):
        early.append(number % 3, b"%d" % number)
    seen = read_entries(early, 30)
    late = rig.coordination_log()
    again = read_entries(late, 30)
    for partition in range(3):
        assert [e for n, e in seen if n == partition] == [
            e for n, e in again if n == partition
        ]
    early.close(TIMEOUT_MS)
    late.close(TIMEOUT_MS)


def poll_honours_its_timeout(rig: Rig) -> None:
    """An empty poll waits for about its timeout, and not longer."""
    log = rig.coordination_log()
    for timeout_ms in (0, 300):
        start = time.monotonic()
        assert list(log.poll(timeout_ms)) == []
        took_s = time.monotonic() - start
        assert took_s < timeout_ms / 1000 + LATE_S
        if rig.waits:
            assert took_s >= timeout_ms / 1000 - 0.02
    log.close(TIMEOUT_MS)


def end_offsets_are_a_barrier(rig: Rig) -> None:
    """Acknowledged records lie below the end; a reader that reaches it has them."""
    writer, reader = rig.coordination_log(), rig.coordination_log()
    assert reader.end_offsets(TIMEOUT_MS) == {0: 0, 1: 0, 2: 0}
    append = writer.append(2, b"x")
    until(append.is_done, "acknowledged")
    ends = reader.end_offsets(TIMEOUT_MS)
    offset = append.offset()
    assert offset is not None
    assert ends[2] == offset + 1
    assert reader.end_offsets(TIMEOUT_MS, [2])[2] == offset + 1
    entries: Entries = []

    def is_there() -> bool:
        entries.extend(reader.poll(POLL_MS))
        places = reader.positions()
        return all(places[number] >= end for number, end in ends.items())

    until(is_there, "the barrier reached")
    assert values_of(entries, 2) == [b"x"]
    writer.close(TIMEOUT_MS)
    reader.close(TIMEOUT_MS)


def times_are_looked_up(rig: Rig) -> None:
    """A look-up returns each partition's first entry at a time or later, if any."""
    log = rig.coordination_log()
    for number in range(12):
        append = log.append(number % 2, b"%d" % number)
        until(append.is_done, "acknowledged")
    entries = read_entries(log, 12)
    for wanted in {entry.timestamp_ms for _, entry in entries}:
        expected: dict[int, int] = {}
        for number, entry in entries:
            if entry.timestamp_ms >= wanted:
                expected.setdefault(number, entry.offset)
        assert log.offsets_for_times(wanted, TIMEOUT_MS) == expected
    last = max(entry.timestamp_ms for _, entry in entries)
    assert log.offsets_for_times(last + 1, TIMEOUT_MS) == {}
    # For Kafka, -1 is the end of a log and -2 its start; it refuses other negatives.
    for early in (0, -1, -2, -3, -(10**15)):
        assert log.offsets_for_times(early, TIMEOUT_MS) == {0: 0, 1: 0}
    log.close(TIMEOUT_MS)


def a_search_finds_what_it_seeks(rig: Rig) -> None:
    """Entries with a head are returned in order, and positions pass all others."""
    log = rig.coordination_log()
    wanted = {0: [b"x1", b"x2", b"x3"], 1: [b"x4"], 2: []}
    for partition, values in wanted.items():
        for value in (b"a", *values[:1], b"", b"b", *values[1:], b"c"):
            until(log.append(partition, value).is_done, "acknowledged")
    reader = rig.coordination_log()
    ends = reader.end_offsets(TIMEOUT_MS)
    entries: Entries = []

    def is_there() -> bool:
        entries.extend(reader.skim(POLL_MS, head=b"x"))
        places = reader.positions()
        return all(places[number] >= end for number, end in ends.items())

    until(is_there, "the end reached")
    for partition, values in wanted.items():
        found = values_of(entries, partition)
        assert [value for value in found if value and value[:1] == b"x"] == values
    log.close(TIMEOUT_MS)
    reader.close(TIMEOUT_MS)


def appends_come_from_any_thread(rig: Rig) -> None:
    """Several threads append at once; nothing is lost, each keeps its order."""
    log = rig.coordination_log()

    def run(name: int) -> None:
        for number in range(25):
            log.append(0, b"%d:%02d" % (name, number))

    threads = [threading.Thread(target=run, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=WAIT_S)
    values = values_of(read_entries(log, 100), 0)
    for name in range(4):
        prefix = b"%d:" % name
        own = [value for value in values if value and value.startswith(prefix)]
        assert own == [b"%d:%02d" % (name, number) for number in range(25)]
    log.close(TIMEOUT_MS)


def end_offsets_work_from_any_thread(rig: Rig) -> None:
    """Several threads look up the ends while one polls, and one closes at the end."""
    log = rig.coordination_log()
    is_over = threading.Event()
    entries: Entries = []
    ends: list[list[int]] = [[], [], []]
    refused: list[Exception] = []

    def read() -> None:
        while not is_over.is_set():
            entries.extend(log.poll(POLL_MS))

    def ask(mine: list[int]) -> None:
        try:
            while True:
                mine.append(log.end_offsets(TIMEOUT_MS)[0])
        except (InvalidTransition, CoordinationError) as error:
            refused.append(error)  # the log is closed

    reading = threading.Thread(target=read)
    queries = [threading.Thread(target=ask, args=(mine,)) for mine in ends]
    for thread in (reading, *queries):
        thread.start()
    for number in range(30):
        log.append(0, b"%d" % number)
    until(lambda: len(entries) == 30, "all are read")
    until(
        lambda: bool(refused) or all(mine and mine[-1] == 30 for mine in ends),
        "all know the end",
    )
    is_over.set()
    reading.join(WAIT_S)
    assert not refused
    log.close(TIMEOUT_MS)
    for thread in queries:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    for mine in ends:
        assert mine == sorted(mine)


def large_values_come_through(rig: Rig) -> None:
    """Values up to the largest record of the protocol are unchanged."""
    log = rig.coordination_log()
    wanted = [bytes([n]) * size for n, size in enumerate((1, 16_384, RECORD_BYTES_MAX))]
    for value in wanted:
        log.append(0, value)
    assert values_of(read_entries(log, len(wanted)), 0) == wanted
    log.close(TIMEOUT_MS)


def foreign_records_come_through(rig: Rig) -> None:
    """Unexpected keys, tombstones, hostile bytes and odd times reach the fold."""
    log = rig.coordination_log()
    place = TopicPartition(rig.coordination_topic, 1)
    for value in HOSTILE:
        rig.write(place, value, key=b"key", headers=(("h", b"\xff"),), timestamp_ms=1)
    rig.write(place, None, key=b"key")
    entries = read_entries(log, len(HOSTILE) + 1)
    assert values_of(entries, 1) == [*HOSTILE, None]
    for _, entry in entries:
        # The leader's clock replaces the writer's timestamp.
        assert entry.timestamp_type == TimestampType.LOG_APPEND_TIME
        assert entry.timestamp_ms > 1
    log.append(1, b"ours")
    assert values_of(read_entries(log, 1), 1) == [b"ours"]
    log.close(TIMEOUT_MS)


def a_session_starts_at_the_log_start(rig: Rig) -> None:
    """Deleted records are skipped; the start offset is reported."""
    place = TopicPartition(rig.coordination_topic, 0)
    for number in range(5):
        rig.write(place, b"%d" % number)
    rig.delete_records(place, before=3)
    log = rig.coordination_log()
    assert log.start_offsets(TIMEOUT_MS) == {0: 3, 1: 0, 2: 0}
    assert values_of(read_entries(log, 2), 0) == [b"3", b"4"]
    log.close(TIMEOUT_MS)


def a_reader_below_the_log_start_fails(rig: Rig) -> None:
    """A reader below the new start raises LogTruncated at every poll."""
    log = rig.coordination_log()
    place = TopicPartition(rig.coordination_topic, 0)
    rig.write(place, b"seen")
    assert values_of(read_entries(log, 1), 0) == [b"seen"]
    other = rig.coordination_log()
    assert values_of(read_entries(other, 1), 0) == [b"seen"]
    other.close(TIMEOUT_MS)
    # kafka-python returns the records that it has fetched ahead first.
    for number in range(50):
        rig.write(place, b"%d" % number)
    rig.delete_records(place, before=51)
    rig.write(place, b"after")
    values: list[bytes | None] = []
    caught: list[LogTruncated] = []

    def is_reported() -> bool:
        try:
            values.extend(values_of(list(log.poll(POLL_MS)), 0))
        except LogTruncated as error:
            caught.append(error)
        return bool(caught) or b"after" in values

    until(is_reported, "the gap reported, or nothing missed")
    if caught:
        with suppress(LogTruncated):
            log.poll(0)
            raise AssertionError("a second poll did not raise")
        assert not caught[0].retriable
    else:
        assert values == [*(b"%d" % number for number in range(50)), b"after"]
    log.close(TIMEOUT_MS)


def a_log_is_read_on_from_elsewhere(rig: Rig) -> None:
    """``read_from`` moves the named partitions back or ahead; others miss nothing."""
    log = rig.coordination_log()
    wanted = [b"%d" % number for number in range(30)]
    for number, value in enumerate(wanted):
        rig.write(TopicPartition(rig.coordination_topic, number % 2), value)
    read_entries(log, 30)
    rig.write(TopicPartition(rig.coordination_topic, 1), b"new")
    log.read_from({0: 12})
    entries = read_entries(log, 4)
    assert values_of(entries, 0) == wanted[24::2]
    assert values_of(entries, 1) == [b"new"]
    log.read_from({0: 0, 1: 16})
    assert values_of(read_entries(log, 15), 0) == wanted[::2]
    log.read_from({0: 15})
    rig.write(TopicPartition(rig.coordination_topic, 0), b"last")
    assert values_of(read_entries(log, 1), 0) == [b"last"]
    until(lambda: log.positions() == {0: 16, 1: 16, 2: 0}, "all passed")
    log.close(TIMEOUT_MS)


def a_place_that_is_gone_is_named(rig: Rig) -> None:
    """LogTruncated names the partition; after ``read_from`` reading continues."""
    place = TopicPartition(rig.coordination_topic, 0)
    for number in range(6):
        rig.write(place, b"%d" % number)
    rig.write(TopicPartition(rig.coordination_topic, 1), b"other")
    rig.delete_records(place, before=4)
    log = rig.coordination_log()
    read_entries(log, 3)
    log.read_from({0: 1})
    caught: list[LogTruncated] = []

    def is_reported() -> bool:
        try:
            assert list(log.poll(POLL_MS)) == []
        except LogTruncated as error:
            caught.append(error)
        return bool(caught)

    until(is_reported, "the gap reported")
    assert caught[0].partition == 0
    log.read_from({0: 4})
    assert values_of(read_entries(log, 2), 0) == [b"4", b"5"]
    rig.write(TopicPartition(rig.coordination_topic, 1), b"more")
    assert values_of(read_entries(log, 1), 1) == [b"more"]
    log.close(TIMEOUT_MS)


def a_bad_partition_is_reported_by_the_append(rig: Rig) -> None:
    """An append that cannot be sent does not raise; its outcome has the error."""
    log = rig.coordination_log()
    append = log.append(99, b"x")
    until(append.is_done, "reported")
    assert append.error() is not None
    assert append.offset() is None
    log.close(TIMEOUT_MS)


def a_closed_log_stays_closed(rig: Rig) -> None:
    """Close flushes and is idempotent; afterwards calls fail and do not hang."""
    log = rig.coordination_log()
    log.append(0, b"last words")
    log.close(TIMEOUT_MS)
    log.close(TIMEOUT_MS)
    append = log.append(0, b"x")
    assert append.is_done()
    assert append.error() is not None
    for call in (log.poll, log.end_offsets, log.start_offsets):
        with suppress(InvalidTransition):
            call(TIMEOUT_MS)
            raise AssertionError(f"{call} works on a closed log")
    other = rig.coordination_log()
    assert values_of(read_entries(other, 1), 0) == [b"last words"]
    other.close(TIMEOUT_MS)


# --- Look-ups ------------------------------------------------------------------------


def topics_are_described(rig: Rig) -> None:
    """A topic has its count and a lasting id; one that does not exist is absent."""
    data = rig.data_log()
    one, two = rig.new_data_topic(2), rig.new_data_topic(1)
    found = data.describe([one, "no-such-topic", two], TIMEOUT_MS)
    assert set(found) == {one, two}
    assert [found[one].partition_count, found[two].partition_count] == [2, 1]
    first, second = found[one].topic_id, found[two].topic_id
    assert first is not None
    assert len(first) == 16
    assert first != second
    assert data.describe([one], TIMEOUT_MS)[one].topic_id == first
    assert data.describe([], TIMEOUT_MS) == {}
    data.close(TIMEOUT_MS)


def added_partitions_are_seen(rig: Rig) -> None:
    """A topic that grows is described again, and its new partitions are read."""
    data = rig.data_log()
    topic = rig.new_data_topic(1)
    reader = data.reader()
    old, new = TopicPartition(topic, 0), TopicPartition(topic, 1)
    rig.write(old, b"old")
    reader.assign([old])
    reader.seek(old, 0)
    assert [record.value for record in read_records(reader, 1)] == [b"old"]
    rig.add_partitions(topic, 1)

    def is_seen() -> bool:
        return data.describe([topic], TIMEOUT_MS)[topic].partition_count == 2

    until(is_seen, "two partitions described")
    reader.assign([old, new])
    reader.seek(new, 0)
    rig.write(new, b"new")
    assert [record.value for record in read_records(reader, 1)] == [b"new"]
    reader.close(TIMEOUT_MS)
    data.close(TIMEOUT_MS)


def added_coordinating_partitions_are_read(rig: Rig) -> None:
    """An open session reads partitions that are added, and appends to them."""
    log, other = rig.coordination_log(), rig.coordination_log()
    log.append(0, b"before")
    assert values_of(read_entries(log, 1), 0) == [b"before"]

    def is_read(timeout_ms: int = TIMEOUT_MS) -> bool:
        try:
            log.read_added(5, timeout_ms=timeout_ms)
        except CoordinationError:
            return False
        return True

    assert not is_read(2 * POLL_MS)
    assert log.partition_count == 3
    rig.add_partitions(rig.coordination_topic, 2)
    until(is_read, "the added partitions")
    log.read_added(5, timeout_ms=TIMEOUT_MS)
    log.append(4, b"added")
    log.append(1, b"old")
    entries = read_entries(log, 2)
    assert values_of(entries, 4) == [b"added"]
    assert values_of(entries, 1) == [b"old"]
    assert log.partition_count == 5
    assert log.end_offsets(TIMEOUT_MS) == {0: 1, 1: 1, 2: 0, 3: 0, 4: 1}
    assert other.partition_count == 3
    assert values_of(read_entries(other, 2), 1) == [b"old"]
    log.close(TIMEOUT_MS)
    other.close(TIMEOUT_MS)


def ranges_follow_the_log(rig: Rig) -> None:
    """Each partition has a start and an end, before and after a deletion."""
    data = rig.data_log()
    places = filled(rig, [5, 0])
    found = data.ranges(places, TIMEOUT_MS)
    assert found == {places[0]: LogRange(0, 5), places[1]: LogRange(0, 0)}
    rig.delete_records(places[0], before=2)
    assert data.ranges(places[:1], TIMEOUT_MS) == {places[0]: LogRange(2, 5)}
    assert data.ranges([], TIMEOUT_MS) == {}
    assert data.ends(places, TIMEOUT_MS) == {places[0]: 5, places[1]: 0}
    assert data.ends([], TIMEOUT_MS) == {}
    data.close(TIMEOUT_MS)


def unknown_partitions_have_no_range(rig: Rig) -> None:
    """The answer has only partitions that exist."""
    data = rig.data_log()
    (place,) = filled(rig, [3])
    missing = [TopicPartition("no-such-topic", 0), TopicPartition(place.topic, 7)]
    found = data.ranges([missing[0], place, missing[1]], TIMEOUT_MS)
    assert found == {place: LogRange(0, 3)}
    assert data.ranges(missing[:1], TIMEOUT_MS) == {}
    assert data.ends([missing[0], place, missing[1]], TIMEOUT_MS) == {place: 3}
    assert data.ends(missing[:1], TIMEOUT_MS) == {}
    data.close(TIMEOUT_MS)


def commits_are_found_again(rig: Rig) -> None:
    """Committed offsets are stored per group; without a commit they are None."""
    data = rig.data_log()
    places = filled(rig, [3, 3])
    group, other = rig.new_group(), rig.new_group()
    nothing: dict[TopicPartition, int | None] = dict.fromkeys(places)
    assert data.committed(group, places, timeout_ms=TIMEOUT_MS) == nothing
    data.commit(group, {places[0]: 2}, timeout_ms=TIMEOUT_MS)
    data.commit(group, {places[0]: 1, places[1]: 3}, timeout_ms=TIMEOUT_MS)
    data.commit(group, {}, timeout_ms=TIMEOUT_MS)
    found = data.committed(group, places, timeout_ms=TIMEOUT_MS)
    assert found == {places[0]: 1, places[1]: 3}
    assert data.committed(other, places, timeout_ms=TIMEOUT_MS) == nothing
    assert data.committed(group, [], timeout_ms=TIMEOUT_MS) == {}
    data.close(TIMEOUT_MS)


def commits_of_missing_partitions_fail_and_others_are_made(rig: Rig) -> None:
    """A topic may be deleted before its last position is committed."""
    data = rig.data_log()
    (place,) = filled(rig, [3])
    group, missing = rig.new_group(), TopicPartition("no-such-topic", 0)
    with suppress(CoordinationError):
        data.commit(group, {missing: 1, place: 2}, timeout_ms=TIMEOUT_MS)
        raise AssertionError("a partition that does not exist has a commit")
    found = data.committed(group, [missing, place], timeout_ms=TIMEOUT_MS)
    assert found == {missing: None, place: 2}
    data.close(TIMEOUT_MS)


def a_closed_data_log_stays_closed(rig: Rig) -> None:
    """Close is idempotent, and ends look-ups."""
    data = rig.data_log()
    topic = rig.new_data_topic(1)
    assert topic in data.describe([topic], TIMEOUT_MS)
    data.close(TIMEOUT_MS)
    data.close(TIMEOUT_MS)
    with suppress(InvalidTransition):
        data.describe([topic], TIMEOUT_MS)
        raise AssertionError("a closed session answers")


CHECKS: tuple[Check, ...] = (
    appends_are_read_back_in_order,
    entries_are_stamped_by_the_leader,
    readers_agree,
    poll_honours_its_timeout,
    end_offsets_are_a_barrier,
    times_are_looked_up,
    a_search_finds_what_it_seeks,
    appends_come_from_any_thread,
    end_offsets_work_from_any_thread,
    large_values_come_through,
    foreign_records_come_through,
    a_session_starts_at_the_log_start,
    a_reader_below_the_log_start_fails,
    a_log_is_read_on_from_elsewhere,
    a_place_that_is_gone_is_named,
    a_bad_partition_is_reported_by_the_append,
    a_closed_log_stays_closed,
    topics_are_described,
    added_partitions_are_seen,
    added_coordinating_partitions_are_read,
    ranges_follow_the_log,
    unknown_partitions_have_no_range,
    commits_are_found_again,
    commits_of_missing_partitions_fail_and_others_are_made,
    a_closed_data_log_stays_closed,
    *READER_CHECKS,
)
