"""Reading the coordination log to its ends."""

from itertools import count

import pytest

from kafka_marshal.errors import CoordinationError, DeadlineExceeded, LogUnreadable
from kafka_marshal.protocol.types import LogEntry, TimestampType
from kafka_marshal.views.log_scan import runs_to
from simulator.clock import VirtualClock


def entry(offset):
    return LogEntry(
        offset=offset,
        leader_epoch=0,
        timestamp_ms=0,
        timestamp_type=TimestampType.LOG_APPEND_TIME,
        value=b"",
    )


class Log:
    """A log with given results of polls; each poll takes a second."""

    def __init__(self, clock, *polls):
        self.clock, self.polls, self.at = clock, list(polls), {0: 0, 1: 0}

    def positions(self):
        return self.at

    def poll_runs(self, timeout_ms):
        del timeout_ms
        self.clock.advance(1_000)
        found = self.polls.pop(0) if self.polls else ()
        if isinstance(found, Exception):
            raise found
        for partition, run in found:
            self.at[partition] = run[-1].offset + 1
        return found


def run(partition, first, end):
    return partition, [entry(offset) for offset in range(first, end)]


@pytest.fixture(name="clock")
def _clock():
    return VirtualClock()


def read(log, ends, **rest):
    return [
        (partition, each.offset)
        for partition, found in runs_to(
            log, ends, clock=log.clock, timeout_ms=3_000, **rest
        )
        for each in found
    ]


def test_entries_below_the_ends_are_yielded(clock):
    log = Log(clock, [run(0, 0, 3), run(1, 0, 5)], [run(0, 3, 4)])
    assert read(log, {0: 4, 1: 2}) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (0, 3)]
    assert not log.polls


def test_entries_of_partitions_without_an_end_are_omitted(clock):
    assert read(Log(clock, [run(1, 0, 5)], [run(0, 0, 1)]), {0: 1}) == [(0, 0)]


def test_a_temporary_coordination_error_is_retried(clock):
    log = Log(clock, CoordinationError("no answer"), (), [run(0, 0, 1)])
    assert read(log, {0: 1}) == [(0, 0)]


def test_an_unreadable_log_is_an_error(clock):
    with pytest.raises(LogUnreadable, match="above"):
        read(Log(clock, LogUnreadable("above offset 0")), {0: 1})


def test_the_timeout_restarts_with_each_entry(clock):
    log = Log(clock, (), (), [run(0, 0, 1)], (), (), ())
    with pytest.raises(DeadlineExceeded, match=r"partitions \[0\] sent nothing for"):
        read(log, {0: 2})
    assert clock.now_ms() == 7_000


def test_a_partition_can_end_before_its_given_end(clock):
    calls = count()
    log = Log(clock, [run(0, 0, 2)])
    assert read(log, {0: 9}, has_ended=lambda _: next(calls) > 0) == [(0, 0), (0, 1)]
