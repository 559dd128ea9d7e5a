"""What the cluster is asked before a run."""

import pytest

from kafka_marshal.errors import DeadlineExceeded
from kafka_marshal.spark.audit import Source, looking
from kafka_marshal.spark.audit.looking import Log


class FakeLog:
    cluster_id = "c"
    topic_id = b"\xab\xcd"

    def __init__(self, ends):
        self._ends = ends
        self.is_closed = False

    def end_offsets(self, timeout_ms):
        assert timeout_ms == 7_000
        if self._ends is None:
            raise DeadlineExceeded("no answer")
        return self._ends

    def close(self, timeout_ms):
        self.is_closed = True


def looked(monkeypatch, log):
    def opened(settings, **rest):
        assert settings.coordination_topic == "m"
        assert rest == {"heartbeat_interval_ms": None, "timeout_ms": 7_000}
        return log

    monkeypatch.setattr(looking, "open_coordination_log", opened)
    return looking.look(Source("b:1", "m", timeout_ms=7_000))


@pytest.mark.parametrize(
    ("topic_id", "told"), [(b"\xab\xcd", "abcd"), (None, None)], ids=["id", "none"]
)
def test_it_tells_which_log_and_where_it_ends(monkeypatch, topic_id, told):
    log = FakeLog({0: 5})
    log.topic_id = topic_id
    assert looked(monkeypatch, log) == Log("c", told, {0: 5})
    assert log.is_closed


def test_it_leaves_nothing_open_where_nobody_answers(monkeypatch):
    log = FakeLog(None)
    with pytest.raises(DeadlineExceeded):
        looked(monkeypatch, log)
    assert log.is_closed
