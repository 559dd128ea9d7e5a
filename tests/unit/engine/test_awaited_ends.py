"""Log ends that must be folded first, and that may never be reached."""

import pytest

from kafka_marshal.engine.awaited_ends import RETRY_MS, AwaitedEnds
from kafka_marshal.engine.context import Ports
from kafka_marshal.errors import CoordinationError
from simulator.clock import InlineBackground, SeededEntropy, VirtualClock
from simulator.node import Recorder


class Log:
    """A log whose ends the test sets."""

    def __init__(self):
        self.ends, self.requests = {0: 10, 1: 10}, []

    def end_offsets(self, _timeout_ms, partitions):
        self.requests.append(list(partitions))
        if not self.ends:
            raise CoordinationError("no answer")
        return self.ends


@pytest.fixture(name="ports")
def _ports():
    background = InlineBackground()
    return Ports(
        log=Log(),
        data=None,
        clock=VirtualClock(now_ms=1_000),
        entropy=SeededEntropy(0),
        background=background,
        policies=background,
        observer=Recorder(),
    )


@pytest.fixture(name="ends")
def _ends(ports):
    return AwaitedEnds(ports)


def test_known_ends_are_judged_for_each_partition_without_a_request(ports, ends):
    assert not ends
    ends.add({0: 5, 1: 7})
    assert ends
    assert ends.reached({0: 5}) == [0]
    assert ends.is_reached(0, {0: 5})
    assert not ends.is_reached(1, {0: 5})
    ends.discard(1)
    ends.discard(1)
    assert ends.is_reached(1, {})
    assert ends.are_reached({0: 6})
    assert ports.log.requests == []


def test_unknown_ends_are_requested_at_once(ports, ends):
    ends.add_unknown([0, 1])
    assert not ends.are_reached({0: 10, 1: 9})
    assert ports.log.requests == [[0, 1]]
    assert ends.are_reached({0: 10, 1: 10})


def test_a_later_request_lowers_an_end_and_never_raises_it(ports, ends):
    ends.add({0: 20, 1: 5})
    ports.clock.advance(RETRY_MS - 1)
    assert not ends.reached({0: 3, 1: 3})
    assert ports.log.requests == []
    ports.clock.advance(1)
    assert not ends.reached({0: 3, 1: 3})
    assert ports.log.requests == [[0, 1]]
    assert ends.reached({0: 10, 1: 5}) == [0, 1]


def test_an_end_below_the_folded_offset_does_not_count(ports, ends):
    ends.add({0: 20})
    ports.clock.advance(RETRY_MS)
    assert not ends.are_reached({0: 11})
    assert ports.log.requests == [[0]]
    ports.log.ends = {0: 12}
    ports.clock.advance(RETRY_MS)
    assert not ends.are_reached({0: 11})
    assert ends.are_reached({0: 12})


def test_a_request_that_fails_is_repeated(ports, ends):
    ports.log.ends = {}
    ends.add_unknown([0])
    assert not ends.are_reached({})
    assert not ends.are_reached({})
    assert ports.log.requests == [[0]]
    ports.log.ends = {0: 0}
    ports.clock.advance(RETRY_MS)
    assert ends.are_reached({})


def test_an_answer_to_a_request_before_an_end_was_added_is_ignored(ports, ends):
    ports.background.is_held = True
    ends.add_unknown([0])
    assert not ends.are_reached({})
    ports.log.ends = {0: 3, 1: 3}
    ends.add({0: 5})
    ports.background.run_waiting()
    assert not ends.are_reached({0: 4})
    assert ends.are_reached({0: 5})
