"""Following the whole log without taking part."""

import pytest

from kafka_marshal.engine.follower import Follower
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.records import Member, ReleaseGroup
from kafka_marshal.testing.clock import VirtualClock
from kafka_marshal.testing.fakelog import FakeKafka

INCARNATION = b"i" * 16
MEMBER = Member(
    "c", "g", INCARNATION, 1, ("t",), "host", 0, 0, {"rack": "a"}, False, 1, None
)


@pytest.fixture
def log():
    cluster = FakeKafka(VirtualClock())
    cluster.create_topic("__marshal", 1, is_log_append_time=True)
    return cluster.coordination_log("__marshal")


def test_own_record_is_found_among_those_of_members(log):
    follower = Follower(log, VirtualClock())
    log.append(0, encode(MEMBER))
    own = ReleaseGroup("admin", "g", b"a" * 16, 1, b"o" * 16, 1, None)
    awaited = follower.append(0, own)
    log.append(0, encode(MEMBER))
    follower.await_all([awaited], 1_000)
    # Without a Config every operation is refused; what counts is the verdict.
    assert awaited.transition is not None
    assert awaited.transition.reason == "no_config"
    assert awaited.transition.offset == 1
