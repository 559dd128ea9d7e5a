"""Pauses of a group, as an admin writes them (PROTOCOL 4.8)."""

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.records import ReleaseGroup
from kafka_marshal.protocol.types import Owner
from simulator.checkers import LogWatcher
from simulator.node import Cluster

ADMIN = Owner("admin", b"admin".ljust(16, b"."))
OVER_MS = 10**9


class Pauses:
    """Pauses one group, again and again, and ends the pauses that it began."""

    def __init__(self, cluster: Cluster, watcher: LogWatcher, *, group_id: str) -> None:
        """Start without pauses."""
        self._cluster = cluster
        self._watcher = watcher
        self._group_id = group_id
        self._count = 0

    def begin(self, for_ms: int) -> None:
        """Pause the group for a time."""
        self._count += 1
        self._write(for_ms, seq=1, operation=self._count)

    def end(self) -> None:
        """End every pause that was begun."""
        for operation in range(1, self._count + 1):
            self._write(-OVER_MS, seq=2, operation=operation)

    def _write(self, for_ms: int, *, seq: int, operation: int) -> None:
        op_id = b"%016d" % operation
        cluster = self._cluster
        for number, world in enumerate(self._watcher.worlds):
            wall_ms = max(cluster.clock.wall_ms(), world.append_time_ms)
            record = ReleaseGroup(
                client_id=ADMIN.client_id,
                group_id=self._group_id,
                incarnation=ADMIN.incarnation,
                seq=seq,
                op_id=op_id,
                msg_expire_time=wall_ms + for_ms,
                reason=None,
            )
            cluster.kafka.produce(cluster.place(number), encode(record))
