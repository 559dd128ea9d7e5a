"""Connecting the writer of a coordination log while the log is in use."""

import os
import threading

import pytest

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.kafka_io.coordination import KafkaCoordinationLog
from kafka_marshal.kafka_io.topiclog import reader_timeout_ms


class Writer:
    def __init__(self):
        self.intervals = []
        self.is_closed = False

    def configure(self, heartbeat_interval_ms, *, timeout_ms):
        self.intervals.append(heartbeat_interval_ms)

    def close(self, timeout_ms):
        self.is_closed = True


@pytest.fixture
def limited():
    """Return all request limits that were set for the reader."""
    return []


@pytest.fixture
def log(limited):
    """A log that is open for reading, without a writer."""
    made = object.__new__(KafkaCoordinationLog)
    made.topic = made._topic = "__marshal"
    made.writer = None
    made._pid, made._lock, made._is_closed = os.getpid(), threading.Lock(), False
    made._disconnect = lambda: None
    made._limit_requests = limited.append
    return made


def connecting(log, meanwhile):
    """Call ``meanwhile`` while the first writer connects; return the writers."""
    made = []

    def connect(heartbeat_interval_ms, timeout_ms):
        writer = Writer()
        made.append(writer)
        if writer is made[0]:
            meanwhile()
        return writer

    log._new_writer = connect
    return made


def test_a_writer_that_connects_during_a_close_is_closed(log):
    """Opening a client may fail while another thread connects the writer."""
    made = connecting(log, lambda: log.close(0))
    with pytest.raises(InvalidTransition, match="Configuring __marshal failed"):
        log.configure(2_000)
    assert [each.is_closed for each in made] == [True]
    assert log.writer is None


def test_only_one_of_two_concurrent_writers_is_kept(log):
    made = connecting(log, lambda: log.configure(2_000))
    log.configure(3_000)
    late, kept = made
    assert (late.is_closed, kept.is_closed) == (True, False)
    assert log.writer is kept
    assert kept.intervals == [3_000]


@pytest.mark.parametrize(
    ("heartbeat_interval_ms", "limit_ms"),
    [(200, 2_000), (4_000, 2_000), (8_000, 4_000), (60_000, 10_000)],
)
def test_the_reader_request_limit_follows_the_heartbeat_interval(
    log, limited, heartbeat_interval_ms, limit_ms
):
    """A dead connection is replaced at this limit, before leases end."""
    assert reader_timeout_ms(heartbeat_interval_ms) == limit_ms
    connecting(log, lambda: None)
    log.configure(heartbeat_interval_ms)
    assert limited == [limit_ms]


class Offsets:
    """Answers the queries of a log; each answer by time is used once, but the last."""

    def __init__(self, log, *, starts, ends, by_time):
        self._ends, self._by_time = ends, list(by_time)
        self._starts = starts
        log._query_offsets, log._query_time = self.offsets, self.at_time

    def offsets(self, timeout_ms, *, is_end, partitions=None):
        found = self._ends if is_end else self._starts
        return {t: found[t] for t in (found if partitions is None else partitions)}

    def at_time(self, time_ms, timeout_ms):
        assert time_ms == 0
        return self._by_time.pop(0) if len(self._by_time) > 1 else self._by_time[0]


def test_a_log_begins_at_its_first_record(log):
    """Kafka's log start says nothing of records that compaction has deleted."""
    starts, ends = {0: 0, 1: 0, 2: 7, 3: 0}, {0: 30, 1: 30, 2: 9, 3: 30}
    Offsets(log, starts=starts, ends=ends, by_time=[{0: 0, 1: 20, 2: 7}])
    # In partition 3 the first segment is empty, where Kafka's search ends.
    assert log.start_offsets(100) == {0: 0, 1: 20, 2: 7, 3: 1}


def test_an_empty_log_begins_at_its_log_start(log):
    Offsets(log, starts={0: 0, 1: 5}, ends={0: 0, 1: 5}, by_time=[{}])
    assert log.start_offsets(100) == {0: 0, 1: 5}


def test_a_first_record_that_is_appended_during_the_queries_is_the_start(log):
    Offsets(log, starts={0: 0}, ends={0: 1}, by_time=[{}, {0: 0}])
    assert log.start_offsets(100) == {0: 0}
