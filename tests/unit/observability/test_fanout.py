"""Several observers of one engine."""

from kafka_marshal.observability import FanOut
from kafka_marshal.ports import Event
from kafka_marshal.testing.node import Recorder

EVENT = Event("ready", {"partition_count": 8})


class Broken:
    def __init__(self):
        self.count = 0

    def observe(self, event):
        self.count += 1
        raise OSError("full")


def test_everybody_is_told_in_order():
    first, second, third = Recorder(), Recorder(), Recorder()
    fan = FanOut(first, second)
    fan.add(third)
    fan.observe(EVENT)
    assert first.events == second.events == third.events == [EVENT]
    fan.remove(second)
    fan.remove(second)
    fan.observe(EVENT)
    assert [len(each.events) for each in (first, second, third)] == [2, 1, 2]


def test_one_that_raises_is_told_no_more():
    broken, sound = Broken(), Recorder()
    fan = FanOut(broken, sound)
    fan.observe(EVENT)
    fan.observe(EVENT)
    assert broken.count == 1
    assert sound.events == [EVENT, EVENT]
