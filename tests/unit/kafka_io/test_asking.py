"""Who gets which answer, where many ask at once."""

import threading

import pytest

from kafka_marshal.errors import CoordinationError
from kafka_marshal.kafka_io.asking import SharedQuestion
from kafka_marshal.testing.rig import WAIT_S, until

LONG_MS = int(WAIT_S * 1000)


class Broker:
    """Answers with the number of the question, once it is let."""

    def __init__(self):
        self.asked = 0
        self.may_answer = threading.Semaphore(0)
        self.fails = set()

    def __call__(self, timeout_ms):
        assert timeout_ms > 0
        self.asked += 1
        number = self.asked
        assert self.may_answer.acquire(timeout=WAIT_S)
        if number in self.fails:
            raise CoordinationError(f"question {number}")
        return number


class Crowd:
    """Threads that ask, each once."""

    def __init__(self):
        self.broker = Broker()
        self.question = SharedQuestion()
        self.answers = []
        self.threads = []

    def come(self):
        thread = threading.Thread(target=self._ask)
        self.threads.append(thread)
        thread.start()

    def _ask(self):
        try:
            self.answers.append(self.question.ask(self.broker, LONG_MS))
        except CoordinationError as error:
            self.answers.append(str(error))

    def all_wait(self):
        """Whether whoever came waits: the first one for the broker."""
        return len(self.question._changed._waiters) == len(self.threads) - 1

    def leave(self):
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.fixture
def crowd():
    """One has asked, and four more came before there was an answer."""
    made = Crowd()
    made.come()
    until(lambda: made.broker.asked == 1, "the first one asks")
    for _ in range(4):
        made.come()
    until(made.all_wait, "the others wait")
    yield made
    made.broker.may_answer.release(9)
    made.leave()


def test_one_at_a_time_is_asked_each_time():
    question, broker = SharedQuestion(), Broker()
    broker.may_answer.release(2)
    assert [question.ask(broker, LONG_MS) for _ in range(2)] == [1, 2]


def test_who_came_after_a_question_shares_the_next(crowd):
    """The answer to an earlier one may be older than what they know of."""
    crowd.broker.may_answer.release(9)
    crowd.leave()
    assert sorted(crowd.answers) == [1, 2, 2, 2, 2]
    assert crowd.broker.asked == 2


def test_a_question_that_failed_is_asked_again_for_the_others(crowd):
    crowd.broker.fails = {2}
    crowd.broker.may_answer.release(9)
    crowd.leave()
    assert sorted(map(str, crowd.answers)) == ["1", "3", "3", "3", "question 2"]


def test_who_has_no_time_left_is_told(crowd):
    with pytest.raises(CoordinationError, match="within 10 ms: a question before"):
        crowd.question.ask(crowd.broker, 10)
    assert crowd.answers == []
