"""A sidecar's client stands by as events ask it to."""

import pytest
from remotekit import RemoteRig, key

from kafka_marshal.remote import api, standbys


class Application:
    """An application that stands by."""

    def __init__(self, error=None):
        self.calls = []
        self.error = error

    def __call__(self, partition, position, owner):
        self.calls.append((partition.partition, position, owner))
        if self.error is not None:
            raise self.error


@pytest.fixture
def rig():
    return RemoteRig(records=(10,) * 20)


@pytest.fixture
def application(rig):
    found = Application()
    rig.subscribe(on_standby=found, standbys=1)
    return found


def standby(partition=0, *, owner="w1", position=3, name="s"):
    return api.Standby(
        subscription=name,
        topic="t",
        partition=partition,
        owner=owner,
        position=None if owner is None else position,
    )


def load(rig):
    rig.session.tick(rig.now_ms)
    rig.standing_by.run_waiting()
    rig.session.tick(rig.now_ms)


def keys(rig):
    return {each.partition for each in rig.session._standbys.keys}


def test_the_application_is_called_with_partition_position_and_owner(rig, application):
    rig.send(standby())
    rig.send(standby())
    load(rig)
    assert application.calls == [(0, 3, "w1")]
    (begun,) = rig.events("standby_begun")
    assert (begun["key"], begun["from"]) == (key(), "w1")
    rig.send(standby(owner=None))
    rig.send(standby(owner=None))
    load(rig)
    assert application.calls[1:] == [(0, None, None)]
    assert rig.events("standby_ended") == [{"key": key(), "is_owner": False}]


def test_a_partition_that_comes_is_not_forgotten(rig, application):
    rig.send(standby())
    load(rig)
    rig.send(rig.assigned())
    load(rig)
    assert len(application.calls) == 1
    assert rig.events("standby_ended") == [{"key": key(), "is_owner": True}]


def test_a_failure_is_reported_once(rig, application):
    application.error = ValueError("no disk")
    rig.send(standby())
    load(rig)
    load(rig)
    (failed,) = rig.events("standby_failed")
    assert str(failed["error"]) == "no disk"


def test_a_snapshot_names_everything(rig, application):
    for number in (0, 1):
        rig.send(standby(number))
    load(rig)
    rig.send(rig.snapshot(standbys=(standby(1), standby(2))))
    load(rig)
    assert keys(rig) == {1, 2}
    assert application.calls[2:] == [(0, None, None), (2, 3, "w1")]


def test_few_partitions_are_loaded_at_a_time(rig, application, monkeypatch):
    monkeypatch.setattr(standbys, "LOADING_MAX", 2)
    for number in range(5):
        rig.send(standby(number))
    rig.session.tick(rig.now_ms)
    rig.session.tick(rig.now_ms)
    assert rig.standing_by.waiting_count == 2
    # One that has not begun is forgotten without a call.
    rig.send(standby(4, owner=None))
    for _ in range(3):
        load(rig)
    assert [call[0] for call in application.calls] == [0, 1, 2, 3]


def test_a_bounded_number_is_kept(rig, application, monkeypatch):
    monkeypatch.setattr(standbys, "STANDBYS_MAX", 1)
    rig.send(standby(0))
    rig.send(standby(1))
    assert keys(rig) == {0}


def test_nobody_is_called_for_a_subscription_that_ended_or_does_not_stand_by(rig):
    rig.send(standby(name="gone"))
    rig.subscribe()
    rig.send(standby())
    load(rig)
    assert not keys(rig)
