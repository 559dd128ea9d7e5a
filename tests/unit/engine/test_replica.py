import pytest
from enginekit import KEY

from kafka_marshal.engine.replica import CHANGES_KEPT_MAX, Changes, Replica


@pytest.fixture
def changes():
    return Changes()


def key(number):
    return KEY._replace(partition=number)


def test_a_reader_gets_each_change_once(changes):
    changes.note(key(1))
    changes.note(key(2))
    assert changes.since(0) == [key(1), key(2)]
    read = changes.end
    assert list(changes.since(read)) == []
    changes.note(key(3))
    assert changes.since(read) == [key(3)]
    assert changes.since(0) == [key(1), key(2), key(3)], "another reader"


def test_since_returns_none_to_a_new_reader(changes):
    assert changes.since(-1) is None
    changes.note(key(1))
    assert changes.since(-1) is None


def test_since_returns_none_after_note_all(changes):
    changes.note(key(1))
    read = changes.end
    changes.note_all()
    assert changes.since(read) is None
    changes.note(key(2))
    assert changes.since(read) is None
    assert list(changes.since(changes.end - 1)) == [key(2)]


def test_since_returns_none_to_a_reader_too_far_behind(changes):
    read = changes.end
    for number in range(CHANGES_KEPT_MAX):
        changes.note(key(number))
    assert len(changes.since(read)) == CHANGES_KEPT_MAX
    for number in range(2 * CHANGES_KEPT_MAX):
        changes.note(key(number))
    assert changes.since(read) is None
    assert len(changes.since(changes.end - CHANGES_KEPT_MAX)) == CHANGES_KEPT_MAX


def test_idle_ms_is_measured_locally_or_by_the_wall_clock():
    replica = Replica(0, now_ms=100)
    replica.world.append_time_ms = 5_000
    assert replica.idle_ms(100, wall_ms=9_000) == 4_000, "read just now"
    assert replica.idle_ms(350, wall_ms=5_100) == 250, "measured since it was read"
    assert replica.idle_ms(100, wall_ms=0) == 0, "a clock that is behind"
