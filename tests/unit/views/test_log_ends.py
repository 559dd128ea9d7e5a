"""Log ends for display: unknown ones are absent."""

import pytest

from kafka_marshal.errors import ConfigurationError, CoordinationError
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.views import log_ends as module
from kafka_marshal.views.log_ends import LOG_ENDS_MS_MAX, LogEnds

A = TopicPartition("t", 0)


class Query:
    def __init__(self, found):
        self.found, self.timeouts, self.closed = found, [], 0

    def known_ends(self, partitions, timeout_ms):
        self.timeouts.append(timeout_ms)
        if isinstance(self.found, Exception):
            raise self.found
        return dict.fromkeys(partitions, self.found)

    def close(self, timeout_ms):
        self.closed += 1


@pytest.fixture
def over(monkeypatch):
    def make(found):
        query = Query(found)
        monkeypatch.setattr(module, "open_offsets", lambda _: query)
        return query

    return make


def test_a_query_has_a_bounded_timeout_and_is_closed_once(over):
    query = over(7)
    with LogEnds("a:1", timeout_ms=10 * LOG_ENDS_MS_MAX) as ends:
        assert ends.of([A]) == ends.of([A]) == {A: 7}
    ends.close()
    assert query.timeouts == [LOG_ENDS_MS_MAX] * 2
    assert query.closed == 1


def test_all_log_ends_are_absent_if_the_query_fails(over):
    query = over(CoordinationError("no answer"))
    with LogEnds("a:1", timeout_ms=50) as ends:
        assert ends.of([A]) == {}
    assert query.timeouts == [50]


def test_nothing_is_opened_before_a_query(monkeypatch):
    def refuse(_):
        raise ConfigurationError("no such transport", setting="transport")

    monkeypatch.setattr(module, "open_offsets", refuse)
    with LogEnds("a:1") as ends, pytest.raises(ConfigurationError):
        ends.of([A])
