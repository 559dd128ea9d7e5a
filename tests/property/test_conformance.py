"""The conformance checks of the cluster in memory, on virtual and on real time."""

import inspect
import itertools
from functools import partial

import conformance
import conformance_reader
import pytest
from conformance import CHECKS

from kafka_marshal.clock import SystemClock
from simulator.clock import VirtualClock
from simulator.fakelog import FakeKafka


class FakeRig:
    coordination_topic = "__marshal"

    def __init__(self, clock):
        self.waits = not isinstance(clock, VirtualClock)
        self.cluster = FakeKafka(clock)
        self.cluster.create_topic(self.coordination_topic, 3, is_log_append_time=True)
        self._numbers = itertools.count(1)

    def coordination_log(self):
        return self.cluster.coordination_log(self.coordination_topic)

    def data_log(self):
        return self.cluster.data_log()

    def new_data_topic(self, partitions):
        name = f"data-{next(self._numbers)}"
        self.cluster.create_topic(name, partitions)
        return name

    def new_group(self):
        return f"group-{next(self._numbers)}"

    def add_partitions(self, topic, count):
        self.cluster.add_partitions(topic, count)

    def recreate_topic(self, topic, partitions):
        self.cluster.recreate_topic(topic, partitions)

    def delete_records(self, place, *, before):
        self.cluster.delete_records(place, before=before)

    def write(self, place, value, *, key=None, headers=(), timestamp_ms=None):
        return self.cluster.produce(
            place, value, key=key, headers=headers, timestamp_ms=timestamp_ms
        )

    def begin_transaction(self, place, values):
        self.cluster.begin_transaction(place, values)
        return partial(self.cluster.end_transaction, place)


@pytest.fixture(params=["virtual", "real"])
def rig(request):
    return FakeRig(VirtualClock() if request.param == "virtual" else SystemClock())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_fake_cluster_passes_each_conformance_check(rig, check):
    check(rig)


def test_the_list_has_every_conformance_check():
    """So every check that is defined is also run."""
    written = {
        value
        for module in (conformance, conformance_reader)
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and not name.startswith("_")
        and value.__module__ == module.__name__
    }
    assert written == set(CHECKS)
