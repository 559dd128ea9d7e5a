"""Concurrent callers share the answers of requests."""

import threading

import pytest
from conformancekit import WAIT_S, until

from kafka_marshal.errors import CoordinationError
from kafka_marshal.kafka_io.single_flight import SingleFlight

LONG_MS = int(WAIT_S * 1000)


class Broker:
    """Answers each request with its number, once ``may_answer`` is released."""

    def __init__(self):
        self.requests = 0
        self.asked = []
        self.may_answer = threading.Semaphore(0)
        self.fails = set()

    def __call__(self, asked, timeout_ms):
        assert timeout_ms > 0
        self.asked.append(set(asked))
        self.requests += 1
        number = self.requests
        assert self.may_answer.acquire(timeout=WAIT_S)
        if number in self.fails:
            raise CoordinationError(f"request {number}")
        return number


class Callers:
    """Threads that each make one call."""

    def __init__(self):
        self.broker = Broker()
        self.flight = SingleFlight()
        self.answers = []
        self.threads = []

    def start_one(self):
        thread = threading.Thread(target=self._call, args=(len(self.threads),))
        self.threads.append(thread)
        thread.start()

    def _call(self, number):
        try:
            found = self.flight.call(self.broker, LONG_MS, wanted=[number])
            self.answers.append(found)
        except CoordinationError as error:
            self.answers.append(str(error))

    def all_wait(self):
        """Return whether all callers but the first wait for another request."""
        waiters = self.flight._changed._waiters  # type: ignore[attr-defined]
        return len(waiters) == len(self.threads) - 1

    def join(self):
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.fixture
def callers():
    """Callers of which one has a request in progress, and four more wait."""
    made = Callers()
    made.start_one()
    until(lambda: made.broker.requests == 1, "the first request starts")
    for _ in range(4):
        made.start_one()
    until(made.all_wait, "the others wait")
    yield made
    made.broker.may_answer.release(9)
    made.join()


def test_each_consecutive_call_makes_its_own_request():
    flight, broker = SingleFlight(), Broker()
    broker.may_answer.release(2)
    wanted = [{1}, {2, 3}]
    assert [flight.call(broker, LONG_MS, wanted=each) for each in wanted] == [1, 2]
    assert broker.asked == wanted


def test_callers_during_a_request_share_the_next_one(callers):
    """The answer of the request in progress may be older than their calls."""
    callers.broker.may_answer.release(9)
    callers.join()
    assert sorted(callers.answers) == [1, 2, 2, 2, 2]
    assert callers.broker.asked == [{0}, {1, 2, 3, 4}]


def test_a_failed_request_is_repeated_for_the_other_callers(callers):
    callers.broker.fails = {2}
    callers.broker.may_answer.release(9)
    callers.join()
    assert sorted(map(str, callers.answers)) == ["1", "3", "3", "3", "request 2"]
    first, failed, repeated = callers.broker.asked
    assert (first, failed) == ({0}, {1, 2, 3, 4})
    # Without the caller that got the error, if it has returned already.
    assert repeated <= failed
    assert len(repeated) >= 3


def test_a_caller_without_time_left_gets_an_error(callers):
    with pytest.raises(CoordinationError, match="within 10 ms: an earlier request"):
        callers.flight.call(callers.broker, 10, wanted=[9])
    assert callers.answers == []
    callers.broker.may_answer.release(9)
    callers.join()
    assert callers.broker.asked[-1] == {1, 2, 3, 4}, "it is not asked for any more"
