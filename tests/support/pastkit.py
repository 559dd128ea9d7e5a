"""A log whose start retention has deleted, as views and commands open it."""

import pytest
from enginekit import checkpointed, owning, world, write

from kafka_marshal import views
from kafka_marshal.protocol.codec import header_of
from kafka_marshal.protocol.records import CheckpointBegin, CheckpointEnd


class Past:
    """One owned key, two checkpoints, and records before, between and behind them.

    Attributes:
        cluster: The cluster in memory; its owner is named ``a``.
        begins: Offsets of the checkpoints' Begins.
        ends: Offsets of their Ends.
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

    def delete(self, before):
        """Delete what lies before an offset, as retention does."""
        self.cluster.kafka.delete_records(self.cluster.place(0), before=before)

    def open(self, *_, **__):
        log = self.cluster.kafka.coordination_log()
        log.cluster_id = self.node.engine.context.settled.cluster_id
        return log


@pytest.fixture
def past(monkeypatch):
    past = Past()
    monkeypatch.setattr(views, "open_coordination_log", past.open)
    return past
