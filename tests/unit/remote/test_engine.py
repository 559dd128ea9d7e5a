"""What stands in for an engine: nothing is known that nobody told."""

from enginekit import AMO
from remotekit import RemoteRig, granted, key

from kafka_marshal.engine.replica import Glance


def test_a_key_that_is_not_held_is_unknown():
    rig = RemoteRig()
    assert rig.context.glance(key()) is None
    assert rig.context.member_count("g") is None
    assert rig.context.replicas == {}
    assert rig.engine.failure is None


def test_a_glance_tells_position_or_head():
    rig = RemoteRig()
    consumer = rig.consumer(delivery=AMO, most=4)
    rig.say(rig.assigned(position=2))
    assert rig.context.glance(key()) == Glance("host-a", "fresh", None, 2)
    consumer.poll()
    rig.answer(granted(2, 5, head=6))
    assert rig.context.glance(key()).position == 6


def test_observing_counts():
    rig = RemoteRig()
    rig.context.observe("ready", {"a": 1})
    assert rig.context.meters.events() == {"ready": 1}
    assert rig.events("ready") == [{"a": 1}]
