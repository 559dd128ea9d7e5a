"""The checks of data readers; ``conformance`` runs them with all others."""

import pickle
import time
from collections.abc import Sequence
from contextlib import suppress
from copy import copy

from conformancekit import (
    LATE_S,
    POLL_MS,
    TIMEOUT_MS,
    Check,
    Rig,
    filled,
    read_records,
    until,
)

from kafka_marshal.errors import InvalidTransition, PositionError, UnknownTopicId
from kafka_marshal.ports import DataReader, LogRange, Record
from kafka_marshal.protocol.types import TimestampType, Token, TopicPartition


def records_come_whole_and_in_order(rig: Rig) -> None:
    """Key, value, headers and time of each record arrive, in offset order."""
    topic = rig.new_data_topic(1)
    place = TopicPartition(topic, 0)
    headers = (("a", b"1"), ("a", b"\xff"), ("ü", b""))
    rig.write(place, b"v", key=b"k", headers=headers, timestamp_ms=1_600_000_000_123)
    rig.write(place, None, key=b"k")
    rig.write(place, b"")
    reader = rig.data_log().reader()
    reader.assign([place])
    reader.seek(place, 0)
    first, second, third = read_records(reader, 3)
    assert (first.topic, first.partition, first.offset) == (topic, 0, 0)
    assert (first.key, first.value, first.headers) == (b"k", b"v", headers)
    assert first.timestamp_ms == 1_600_000_000_123
    assert first.timestamp_type == TimestampType.CREATE_TIME
    assert first.leader_epoch is not None
    assert first.token is None
    assert (second.key, second.value, second.headers) == (b"k", None, ())
    assert (third.key, third.value, third.offset) == (None, b"", 2)
    reader.close(TIMEOUT_MS)


def _polled(reader: DataReader, count: int) -> list[Sequence[Record]]:
    """Poll until ``count`` records were returned; return the sequences of all polls."""
    found: list[Sequence[Record]] = []

    def has_all() -> bool:
        found.extend(reader.poll(POLL_MS, count).values())
        return sum(map(len, found)) == count

    until(has_all, f"{count} records read")
    return found


def records_are_values(rig: Rig) -> None:
    """Sequences can be sliced and iterated again; records cannot be changed."""
    (place,) = filled(rig, [5])
    reader = rig.data_log().reader()
    reader.assign([place])
    reader.seek(place, 0)
    found = _polled(reader, 5)
    for records in found:
        every = list(records)
        assert len(every) == len(records) == len(list(records))
        assert (records[0], records[-1]) == (every[0], every[-1])
        assert list(records[1:]) == every[1:]
        assert list(records[:-1]) == every[:-1]
        assert not records[len(every) :]
        for record in every:
            assert pickle.loads(pickle.dumps(record)) == record
            assert len({record, copy(record)}) == 1
            with suppress(AttributeError):
                setattr(record, "offset", 7)  # noqa: B010 - mypy knows it is refused
                raise AssertionError("a record was changed")
    offsets = [record.offset for records in found for record in records]
    assert offsets == list(range(5))
    reader.close(TIMEOUT_MS)


def records_carry_the_token_of_their_seek(rig: Rig) -> None:
    """A seek sets the token of later records, not of earlier ones."""
    (place,) = filled(rig, [4])
    reader = rig.data_log().reader()
    reader.assign([place])
    earlier, later = Token(1, 0, 5), Token(1, 0, 9)
    reader.seek(place, 0, token=earlier)
    first = read_records(reader, 2, at_once=2)
    reader.seek(place, 2, token=later)
    second = read_records(reader, 2)
    assert [record.token for record in first] == [earlier] * 2
    assert [record.token for record in second] == [later] * 2
    reader.assign([])
    reader.assign([place])
    reader.seek(place, 3)
    assert [record.token for record in read_records(reader, 1)] == [None]
    reader.close(TIMEOUT_MS)


def ends_come_with_fetches(rig: Rig) -> None:
    """The reader knows the ends of the logs that it fetches from, and of no others."""
    a, b = filled(rig, [5, 3])
    reader = rig.data_log().reader()
    reader.assign([a, b])
    reader.seek(a, 0)
    reader.seek(b, 0)
    assert reader.ends() == {}
    read_records(reader, 8)

    def end_are(wanted: dict[TopicPartition, int]) -> bool:
        reader.poll(POLL_MS, 10)
        return reader.ends() == wanted

    until(lambda: end_are({a: 5, b: 3}), "both ends known")
    rig.write(a, b"new")
    until(lambda: end_are({a: 6, b: 3}), "the new end known")
    reader.assign([b])
    assert reader.ends() == {b: 3}
    reader.close(TIMEOUT_MS)


def _passes(reader: DataReader, place: TopicPartition, wanted: int) -> bool:
    """Poll once without records; return whether the position is ``wanted``."""
    assert not reader.poll(POLL_MS, 10)
    return reader.positions() == {place: wanted}


def control_records_are_passed(rig: Rig) -> None:
    """The position passes the end of a transaction once its records are read."""
    (place,) = filled(rig, [1])
    reader = rig.data_log().reader()
    reader.assign([place])
    assert reader.positions() == {}
    reader.seek(place, 0)
    assert reader.positions() == {place: 0}
    assert len(read_records(reader, 1)) == 1
    assert reader.positions() == {place: 1}
    rig.begin_transaction(place, [b"a", b"b"])(is_committed=True)
    (first,) = read_records(reader, 1, at_once=1)
    assert (first.value, reader.positions()) == (b"a", {place: 2})
    reader.pause([place])
    assert not reader.poll(POLL_MS, 10)
    assert reader.positions() == {place: 2}, "what is held back is not passed"
    reader.resume([place])
    assert [record.value for record in read_records(reader, 1)] == [b"b"]
    until(lambda: _passes(reader, place, 4), "the end of the transaction passed")
    reader.seek(place, 1)
    assert reader.positions() == {place: 1}
    assert [record.offset for record in read_records(reader, 2)] == [1, 2]
    reader.close(TIMEOUT_MS)


def aborted_records_are_hidden_from_who_reads_committed(rig: Rig) -> None:
    """Aborted records are skipped; an open transaction delays reader and log end."""
    (place,) = filled(rig, [1])
    rig.begin_transaction(place, [b"aborted"] * 3)(is_committed=False)
    end = rig.begin_transaction(place, [b"open", b"open"])
    data = rig.data_log()
    levels = {"read_uncommitted": 7, "read_committed": 5}
    for level, log_end in levels.items():
        found = data.ranges([place], TIMEOUT_MS, isolation_level=level)
        assert found == {place: LogRange(0, log_end)}
        assert data.ends([place], TIMEOUT_MS, isolation_level=level) == {place: log_end}
    readers = {level: data.reader(isolation_level=level) for level in levels}
    for reader in readers.values():
        reader.assign([place])
        reader.seek(place, 0)
    all_values = [b"0", *[b"aborted"] * 3, b"open", b"open"]
    found_all = read_records(readers["read_uncommitted"], 6)
    assert [record.value for record in found_all] == all_values
    committed = readers["read_committed"]
    assert [record.value for record in read_records(committed, 1)] == [b"0"]
    until(lambda: _passes(committed, place, 5), "what was aborted passed")
    end(is_committed=True)
    assert [record.offset for record in read_records(committed, 2)] == [5, 6]
    until(lambda: _passes(committed, place, 8), "the end of the transaction passed")
    for reader in readers.values():
        reader.close(TIMEOUT_MS)
    data.close(TIMEOUT_MS)


def polls_are_bounded(rig: Rig) -> None:
    """A poll returns at most ``max_records``, and ends by its timeout."""
    places = filled(rig, [20, 20])
    reader = rig.data_log().reader()
    reader.assign(places)
    for place in places:
        reader.seek(place, 0)
    found: list[Record] = []

    def has_all() -> bool:
        batch = reader.poll(POLL_MS, 7)
        assert sum(map(len, batch.values())) <= 7
        for place, records in batch.items():
            assert all(r.topic == place.topic for r in records)
            found.extend(records)
        return len(found) >= 40

    until(has_all, "40 records read")
    for place in places:
        offsets = [r.offset for r in found if r.partition == place.partition]
        assert offsets == list(range(20))
    start = time.monotonic()
    assert not reader.poll(300, 7)
    took_s = time.monotonic() - start
    assert took_s < 0.3 + LATE_S
    if rig.waits:
        assert took_s >= 0.28
    reader.close(TIMEOUT_MS)


def assignment_is_exact(rig: Rig) -> None:
    """Partitions that stay keep their positions; removed ones are dropped."""
    a, b, c = filled(rig, [30, 30, 30])
    reader = rig.data_log().reader()
    reader.assign([a, b])
    reader.seek(a, 0)
    reader.seek(b, 0)
    taken = read_records(reader, 20, at_once=10)
    nexts = dict.fromkeys((a, b), 0)
    for record in taken:
        nexts[TopicPartition(record.topic, record.partition)] = record.offset + 1
    reader.assign([b, c])
    with suppress(InvalidTransition):
        reader.poll(0, 1)
        raise AssertionError("a new partition was read without a seek")
    reader.seek(c, 25)
    rest = read_records(reader, 30 - nexts[b] + 5)
    assert {record.partition for record in rest} <= {b.partition, c.partition}
    found = [r.offset for r in rest if r.partition == b.partition]
    assert found == list(range(nexts[b], 30))
    # A partition that is assigned again starts at its seek, not at its old position.
    reader.assign([a])
    reader.seek(a, 28)
    assert [record.offset for record in read_records(reader, 2)] == [28, 29]
    reader.assign([])
    assert not reader.poll(50, 10)
    reader.close(TIMEOUT_MS)


def a_seek_drops_what_was_buffered(rig: Rig) -> None:
    """After a seek, ahead or back, the next record is at the position of the seek."""
    (place,) = filled(rig, [50])
    reader = rig.data_log().reader()
    reader.assign([place])
    for offset in (10, 40, 5, 5, 49):
        reader.seek(place, offset)
        (record,) = read_records(reader, 1, at_once=1)
        assert record.offset == offset
    reader.seek(place, 50)
    assert not reader.poll(POLL_MS, 10)
    rig.write(place, b"new")
    assert [record.value for record in read_records(reader, 1)] == [b"new"]
    with suppress(InvalidTransition):
        reader.seek(TopicPartition(place.topic, 77), 0)
        raise AssertionError("a seek in a partition that is not assigned")
    reader.close(TIMEOUT_MS)


def paused_partitions_rest(rig: Rig) -> None:
    """A paused partition returns no records, and continues there after a resume."""
    a, b = filled(rig, [10, 10])
    reader = rig.data_log().reader()
    reader.assign([a, b])
    reader.seek(a, 0)
    reader.seek(b, 0)
    reader.pause([a, TopicPartition(a.topic, 77)])
    assert {record.partition for record in read_records(reader, 10)} == {b.partition}
    assert not reader.poll(POLL_MS, 10)
    reader.resume([a, b, TopicPartition(a.topic, 77)])
    first = read_records(reader, 3, at_once=3)
    reader.pause([a])
    assert not reader.poll(POLL_MS, 10)
    reader.resume([a])
    rest = read_records(reader, 7)
    assert [record.offset for record in [*first, *rest]] == list(range(10))
    reader.close(TIMEOUT_MS)


def _position_error(
    reader: DataReader, sound: TopicPartition, seen: list[int]
) -> PositionError:
    """Poll until a position is refused; collect the records of the valid partition."""
    caught: list[PositionError] = []

    def is_reported() -> bool:
        try:
            for place, records in reader.poll(POLL_MS, 100).items():
                assert place == sound
                seen.extend(record.offset for record in records)
        except PositionError as error:
            caught.append(error)
        return bool(caught)

    until(is_reported, "a position outside the log reported")
    return caught[0]


def positions_outside_the_log_are_errors(rig: Rig) -> None:
    """A position above the end or below the start raises until the next seek.

    Other partitions are not affected.
    """
    bad, good = filled(rig, [10, 10])
    rig.delete_records(bad, before=4)
    reader = rig.data_log().reader()
    reader.assign([bad, good])
    reader.seek(good, 0)
    seen: list[int] = []
    for requested in (3, 1_000):
        reader.seek(bad, requested)
        error = _position_error(reader, good, seen)
        assert error.partition == bad
        assert error.requested == requested
        assert (error.log_start, error.log_end) == (4, 10)
    reader.seek(bad, 4)
    rest = read_records(reader, 6 + 10 - len(seen))
    assert [r.offset for r in rest if r.partition == bad.partition] == [*range(4, 10)]
    seen.extend(r.offset for r in rest if r.partition == good.partition)
    assert seen == list(range(10))
    reader.close(TIMEOUT_MS)


def a_recreated_topic_is_not_read_as_the_old_one(rig: Rig) -> None:
    """Records of a topic with another id are never returned, at any position."""
    (old,), (other,) = filled(rig, [20]), filled(rig, [1])
    data = rig.data_log()

    def id_of(place: TopicPartition) -> bytes | None:
        return data.describe([place.topic], TIMEOUT_MS)[place.topic].topic_id

    before = id_of(old)
    reader = data.reader()
    reader.assign([old, other])
    reader.seek(old, 0, topic_id=before)
    reader.seek(other, 0, topic_id=id_of(other))
    read_records(reader, 21)
    # The new topic is longer than the old one when the reader polls again.
    rig.recreate_topic(old.topic, 1)
    for number in range(60):
        rig.write(old, b"new %d" % number)
    refused: list[UnknownTopicId] = []
    seen: list[Record] = []

    def is_refused() -> bool:
        try:
            for records in reader.poll(POLL_MS, 100).values():
                seen.extend(records)
        except UnknownTopicId as error:
            refused.append(error)
        return len(refused) >= 3

    until(is_refused, "the old topic refused three times")
    assert not seen
    assert {error.partition for error in refused} == {old}
    rig.write(other, b"still read")

    def is_read() -> bool:
        is_refused()
        return bool(seen)

    until(is_read, "the other topic read")
    assert [record.value for record in seen] == [b"still read"]

    def has_new_id() -> bool:
        return id_of(old) not in (None, before)

    until(has_new_id, "the new topic's id described")
    reader.assign([other])
    reader.assign([old, other])
    reader.seek(old, 0, topic_id=id_of(old))
    found = _read_through(reader, 60)
    assert [record.value for record in found] == [b"new %d" % n for n in range(60)]
    reader.close(TIMEOUT_MS)
    data.close(TIMEOUT_MS)


def _read_through(reader: DataReader, count: int) -> list[Record]:
    """Read ``count`` records; brokers may not know the topic at first."""
    found: list[Record] = []

    def has_all() -> bool:
        with suppress(UnknownTopicId):
            for records in reader.poll(POLL_MS, 100).values():
                found.extend(records)
        return len(found) >= count

    until(has_all, f"{count} records read")
    return found


def a_closed_reader_stays_closed(rig: Rig) -> None:
    """Close is idempotent, also before the first poll."""
    (place,) = filled(rig, [1])
    fresh, used = rig.data_log().reader(), rig.data_log().reader()
    used.assign([place])
    used.seek(place, 0)
    read_records(used, 1)
    for reader in (fresh, used):
        reader.close(TIMEOUT_MS)
        reader.close(TIMEOUT_MS)
        with suppress(InvalidTransition):
            reader.poll(0, 1)
            raise AssertionError("a closed reader reads")


READER_CHECKS: tuple[Check, ...] = (
    records_come_whole_and_in_order,
    records_are_values,
    records_carry_the_token_of_their_seek,
    ends_come_with_fetches,
    control_records_are_passed,
    aborted_records_are_hidden_from_who_reads_committed,
    polls_are_bounded,
    assignment_is_exact,
    a_seek_drops_what_was_buffered,
    paused_partitions_rest,
    positions_outside_the_log_are_errors,
    a_recreated_topic_is_not_read_as_the_old_one,
    a_closed_reader_stays_closed,
)
