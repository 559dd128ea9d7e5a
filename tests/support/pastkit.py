"""A log whose start retention has deleted, for tests of views and commands."""

from itertools import takewhile

import pytest
from enginekit import checkpointed, owning, world, write

from kafka_marshal.protocol.codec import header_of
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import CheckpointBegin, CheckpointEnd
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.views import log_scan
from kafka_marshal.views import world as world_view


class Past:
    """One owned key, two checkpoints, and records before, between and after them.

    Attributes:
        cluster: The cluster in memory; its owner is named ``a``.
        begins: Offsets of the Begin of each checkpoint.
        ends: Offsets of the End of each checkpoint.
    """

    def __init__(self):
        self.cluster = world()
        self.node = owning(self.cluster)
        for _ in range(2):
            checkpointed(self.cluster, self.node)
            self.cluster.run(500)
        self.begins = self._offsets(CheckpointBegin)
        self.ends = self._offsets(CheckpointEnd)
        write(self.cluster, b"?")
        self.end = self.cluster.kafka.log(self.cluster.place(0)).end

    def _offsets(self, kind):
        records = self.cluster.kafka.log(self.cluster.place(0)).records
        return [r.offset for r in records if r.value.startswith(header_of(kind))]

    def entries(self):
        """Return all entries that the log has now."""
        records = self.cluster.kafka.log(self.cluster.place(0)).records
        return [each.entry() for each in records]

    def whole(self, offset):
        """Fold the log up to an offset; call this before entries are deleted."""
        return self._replay(e for e in self.entries() if e.offset <= offset)

    def at_time(self, time_ms):
        """Fold all entries before the first one that was appended later."""
        return self._replay(
            takewhile(lambda e: e.timestamp_ms <= time_ms, self.entries())
        )

    @staticmethod
    def _replay(entries):
        state = WorldState(0)
        for entry in entries:
            apply(state, entry)
        return state

    def delete(self, before):
        """Delete the entries below an offset, as retention does."""
        self.cluster.kafka.delete_records(self.cluster.place(0), before=before)

    def open(self, *_, **__):
        log = self.cluster.kafka.coordination_log()
        log.cluster_id = self.node.engine.context.settled.cluster_id
        return log


def patch_open(patch, open_log):
    """Let views open this log."""
    for module in (log_scan, world_view):
        patch.setattr(module, "open_coordination_log", open_log)


@pytest.fixture
def past(monkeypatch):
    past = Past()
    patch_open(monkeypatch, past.open)
    return past
