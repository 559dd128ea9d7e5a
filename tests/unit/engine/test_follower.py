"""Following the whole log without claiming."""

import pytest
from logkit import beat, claim, config

from kafka_marshal.engine.follower import Follower
from kafka_marshal.errors import CoordinationError, DeadlineExceeded, LogUnwritable
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.records import Member, ReleaseGroup
from simulator.clock import VirtualClock
from simulator.fakelog import FakeKafka

INCARNATION = b"i" * 16
MEMBER = Member(
    client_id="c",
    group_id="g",
    incarnation=INCARNATION,
    seq=1,
    topics=("t",),
    host="host",
    capacity=0,
    load=0,
    labels={"rack": "a"},
    draining=False,
    feature_level_max=1,
    plan_generation=None,
)


@pytest.fixture
def log():
    cluster = FakeKafka(VirtualClock())
    cluster.create_topic("__marshal", 1, is_log_append_time=True)
    return cluster.coordination_log("__marshal")


def test_an_appended_record_gets_its_own_verdict_among_others(log):
    follower = Follower(log, VirtualClock())
    log.append(0, encode(MEMBER))
    own = ReleaseGroup(
        client_id="admin",
        group_id="g",
        incarnation=b"a" * 16,
        seq=1,
        op_id=b"o" * 16,
        msg_expire_time=1,
        reason=None,
    )
    awaited = follower.append(0, own)
    log.append(0, encode(MEMBER))
    follower.await_all([awaited], 1_000)
    # Without a Config every operation is refused; what counts is the verdict.
    assert awaited.transition is not None
    assert awaited.transition.reason == "no_config"
    assert awaited.transition.offset == 1


def test_each_of_many_heartbeats_gets_its_verdict(log):
    follower = Follower(log, VirtualClock())
    for record in (config(), claim()):
        log.append(0, encode(record))
    beats = [beat(1, position, seq=position) for position in range(20)]
    awaited = [follower.append(0, record) for record in beats]
    follower.await_all(awaited, 1_000)
    assert [each.transition.effect for each in awaited] == ["renewed"] * 20


class FailedAppend:
    """An append that has failed."""

    def __init__(self, error):
        self._error = error

    def is_done(self):
        return True

    def offset(self):
        return None

    def error(self):
        return self._error


@pytest.mark.parametrize(
    ("refusal", "raised"),
    [
        (LogUnwritable("not allowed to"), LogUnwritable),
        # Transient errors, and appends that may have succeeded, are awaited.
        (CoordinationError("no broker answered"), DeadlineExceeded),
    ],
)
def test_only_an_append_refused_for_good_ends_the_wait(
    log, monkeypatch, refusal, raised
):
    clock = VirtualClock()
    follower = Follower(log, clock)
    plain = log.poll

    def poll(timeout_ms):
        clock.advance(timeout_ms)
        return plain(timeout_ms)

    monkeypatch.setattr(log, "poll", poll)
    monkeypatch.setattr(log, "append", lambda *_: FailedAppend(refusal))
    awaited = follower.append(0, MEMBER)
    with pytest.raises(raised, match=str(refusal)):
        follower.await_all([awaited], 1_000)
    assert (clock.now_ms() > 900) == (raised is DeadlineExceeded)


@pytest.mark.parametrize(
    ("reached", "message"),
    [
        pytest.param(0, "did not answer in time; check the brokers", id="nothing"),
        pytest.param(2, "3 of 5 records are left; allow more with --timeout", id="2"),
    ],
)
def test_the_timeout_error_states_whether_the_log_answered(
    log, monkeypatch, reached, message
):
    clock, read = VirtualClock(), []
    follower = Follower(log, clock)
    for _ in range(5):
        log.append(0, encode(MEMBER))

    def poll(timeout_ms):
        clock.advance(timeout_ms)
        read.append(timeout_ms)
        return []

    monkeypatch.setattr(log, "poll", poll)
    monkeypatch.setattr(log, "positions", lambda: {0: reached if read else 0})
    with pytest.raises(DeadlineExceeded, match=message):
        follower.catch_up(1_000)
