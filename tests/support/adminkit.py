"""Admins of a cluster in memory."""

from positionkit import NEW, TIMEOUT_MS, Stepping

from kafka_marshal.admin.group_reset import PositionSpec
from kafka_marshal.admin.group_settings import Tuning
from kafka_marshal.admin.pausing import Sender
from kafka_marshal.admin.resetting import Resetting


class InMemory:
    """Connects a part of ``Admin`` to a cluster in memory; the first of the bases."""

    def __init__(self, cluster, name="admin", *, person=None):
        self._cluster, self._clock = cluster, cluster.clock.view()
        self._sender, self._timeout_ms = Sender(name, person), TIMEOUT_MS
        self._state_home = None
        self.follower = Stepping(cluster, name)

    def _read(self):
        self.follower.catch_up(self._timeout_ms)
        return self.follower

    def _settled(self):
        self._read()
        return self._cluster.config

    def _follow(self):
        return self.follower


class TuningAdmin(InMemory, Tuning):
    """An admin that changes the settings of groups."""

    def set(self, group="g", **changes):
        return self.set_group(group, changes, reason="slow", execute=True)


class Times:
    """Returns the same offset for every time."""

    def __init__(self, offset=None):
        self.offset = offset

    def at_times(self, times_ms, timeout_ms):
        return dict.fromkeys(times_ms, self.offset)


class ResettingAdmin(InMemory, Resetting):
    """An admin that resets groups."""

    def __init__(self, cluster, name="admin", *, offset=7):
        super().__init__(cluster, name)
        self._data, self._offsets = cluster.kafka.data_log(), Times(offset)


def planned(cluster, spec=None, **options):
    """Return the plan of a reset of group g, by default to ``NEW``."""
    spec = spec or PositionSpec.to_offset(NEW)
    return ResettingAdmin(cluster, "planner").plan_reset("g", spec, **options)
