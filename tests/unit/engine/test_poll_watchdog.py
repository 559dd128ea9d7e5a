"""An application that does not poll loses its partitions to a live member."""

import pytest
from enginekit import H
from remotekit import RemoteRig

from kafka_marshal.errors import ClaimLost


@pytest.fixture
def rig():
    return RemoteRig()


@pytest.fixture
def slow(rig):
    """A consumer with four uncommitted records and a limit of half a second."""
    consumer = rig.consumer(most=4, max_handling_ms=500)
    rig.send(rig.assigned())
    consumer.poll()
    rig.session.on_deadlines(rig.beaten(takers=("t",)), reported=())
    return consumer


def pass_time(rig, ms):
    for _ in range(ms // 100):
        rig.tick(100)


def test_a_partition_whose_application_does_not_poll_is_released(rig, slow):
    pass_time(rig, 400)
    assert rig.commands.returned == []
    pass_time(rig, 200)
    (returned,) = rig.commands.returned
    assert (returned.reason, returned.position) == ("stuck", 0)
    assert "for 500 ms (limit 500 ms), 4 uncommitted" in returned.detail
    with pytest.raises(ClaimLost, match="stuck"):
        slow.poll()


def test_a_stuck_partition_without_a_taker_stays(rig, slow):
    rig.tick(1)
    rig.session.on_deadlines(rig.beaten(takers=("u",)), reported=())
    pass_time(rig, 1_000)
    assert rig.commands.returned == []
    (event,) = rig.events("stuck")
    assert (event["partitions"], event["uncommitted_count"]) == ([0], 4)
    assert event["successor"] is None
    slow.commit()
    assert slow.poll() != {}
    pass_time(rig, 700)
    assert len(rig.events("stuck")) == 2


def test_a_repeatedly_stuck_partition_gets_more_time(rig):
    consumer = rig.consumer(most=4, max_handling_ms=500)
    rig.send(rig.assigned(stuck=1))
    consumer.poll()
    rig.session.on_deadlines(rig.beaten(takers=("t",)), reported=())
    pass_time(rig, 900)
    assert rig.commands.returned == []
    pass_time(rig, 300)
    assert len(rig.commands.returned) == 1


def test_a_stopped_process_is_not_stuck(rig, slow):
    rig.tick(H // 2)
    rig.tick(10)
    assert rig.commands.returned == []
    assert slow.assignment() != set()
