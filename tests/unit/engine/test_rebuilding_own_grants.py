"""What a process was granted, by topic and by the last set position."""

import pytest

from kafka_marshal.engine import rebuilding
from kafka_marshal.engine.rebuilding import OWN_GRANTS_MAX, OwnGrants
from kafka_marshal.protocol.items import Lock
from kafka_marshal.protocol.state import KeyState, Previous, WorldState
from kafka_marshal.protocol.types import Key

KEY, OTHER = Key("g", "t", 0), Key("g", "t", 1)


def state(granted=None, *, topic_id=b"t", op_id=None, lock=None):
    return KeyState(
        owner=None,
        epoch=1,
        epoch_leader_epoch=0,
        renewed_ms=0,
        heartbeat_interval_ms=1,
        active_ms=0,
        granted=granted,
        topic_id=topic_id,
        previous=None if op_id is None else Previous(op_id, 0, 0),
        lock=lock,
    )


@pytest.fixture
def grants():
    return OwnGrants()


def granted(grants, end, *, key=KEY, **rest):
    world = WorldState(0)
    world.keys[key] = state(end, **rest)
    grants.take(world, key)


def test_the_last_grant_per_topic_and_set_position_is_kept(grants):
    granted(grants, 5)
    granted(grants, 7)
    granted(grants, 2, op_id=b"op")
    granted(grants, 1, topic_id=b"new")
    assert grants.end(KEY, state()) == 7
    assert grants.end(KEY, state(op_id=b"op")) == 2
    assert grants.end(KEY, state(topic_id=b"new")) == 1
    assert grants.end(KEY, state(op_id=b"another")) == 0
    assert grants.end(OTHER, state()) == 0


@pytest.mark.parametrize("topic_id", [b"t", None], ids=["named", "unnamed"])
def test_end_by_lock_returns_the_grants_after_the_set_position(grants, topic_id):
    granted(grants, 4, op_id=b"op")
    lock = Lock(b"op", b"plan", 1, b"t")
    assert grants.end_by_lock(KEY, state(topic_id=topic_id, lock=lock)) == 4
    assert grants.end_by_lock(KEY, state(op_id=b"op")) == 0


def test_the_grants_of_the_oldest_set_positions_are_dropped(grants):
    for number in range(OWN_GRANTS_MAX + 1):
        granted(grants, 3, op_id=bytes([number]))
    ends = [
        grants.end(KEY, state(op_id=bytes([each]))) for each in (0, 1, OWN_GRANTS_MAX)
    ]
    assert ends == [0, 3, 3]


def test_forget_drops_the_grants_of_matching_keys(grants):
    granted(grants, 3)
    granted(grants, 4, key=OTHER)
    grants.forget(lambda key: key == KEY)
    assert (grants.end(KEY, state()), grants.end(OTHER, state())) == (0, 4)


def test_the_grants_of_the_least_recent_key_are_dropped(grants, monkeypatch):
    monkeypatch.setattr(rebuilding, "OWN_KEYS_MAX", 2)
    third = Key("g", "t", 2)
    for key in (KEY, OTHER, KEY, third):
        granted(grants, 5, key=key)
    ends = {key: grants.end(key, state()) for key in (KEY, OTHER, third)}
    assert ends == {KEY: 5, OTHER: 0, third: 5}
