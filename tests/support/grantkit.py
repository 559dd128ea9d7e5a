"""A grant client over the cluster in memory; its reads advance time."""

from enginekit import KEY, claim_of

from kafka_marshal.grants import ClaimRef
from kafka_marshal.grants.log import LogGrantClient
from kafka_marshal.ports import runs_of


class Log:
    """A session with the coordination topic whose polls advance time."""

    cluster_id = "simulated"

    def __init__(self, cluster, name, only):
        self._cluster = cluster
        self._log = cluster.kafka.coordination_log(name=name)
        self.read = set(only(self._log.partition_count))
        self._unread = []
        self.h_ms = None
        self.is_closed = False

    def __getattr__(self, name):
        return getattr(self._log, name)

    def poll(self, timeout_ms):
        self._cluster.run(20)
        every = [*self._unread, *self._log.poll(0)]
        self._unread = [each for each in every if each[0] not in self.read]
        return [each for each in every if each[0] in self.read]

    def poll_runs(self, timeout_ms):
        return list(runs_of(self.poll(timeout_ms)))

    def positions(self):
        at = dict(self._log.positions())
        return at | {t: 0 for t, _ in self._unread}

    def end_offsets(self, timeout_ms, partitions=None):
        ends = self._log.end_offsets(timeout_ms, partitions)
        return {t: end for t, end in ends.items() if t in self.read}

    def start_offsets(self, timeout_ms):
        starts = self._log.start_offsets(timeout_ms)
        return {t: start for t, start in starts.items() if t in self.read}

    def read_also(self, partition, *, timeout_ms):
        self.read.add(partition)

    def read_from(self, offsets):
        self._unread = [each for each in self._unread if each[0] not in offsets]
        self._log.read_from(offsets)

    def configure(self, heartbeat_interval_ms, *, timeout_ms):
        self.h_ms = heartbeat_interval_ms
        self._log.configure(heartbeat_interval_ms)

    def close(self, timeout_ms):
        self.is_closed = True


class MemoryGrantClient(LogGrantClient):
    """A grant client over the cluster in memory; ``logs`` has its opened sessions."""

    def __init__(self, cluster, name="task"):
        self.logs = []
        self.before_request = lambda: None
        self._cluster = cluster

        def open_log(only, timeout_ms):
            self.logs.append(Log(cluster, name, only))
            return self.logs[-1]

        super().__init__(open_log, clock=cluster.clock)

    def _append(self, *given, **named):
        self.before_request()
        self.before_request = lambda: None
        return super()._append(*given, **named)

    def _rest(self, rest_ms):
        self._cluster.run(rest_ms)


def ref_of(node, key=KEY, **changes):
    claim = claim_of(node, key)
    fields = {
        "group_id": key.group_id,
        "client_id": node.owner.client_id,
        "incarnation": node.owner.incarnation,
        "topic": key.topic,
        "partition": key.partition,
        "epoch": claim.epoch,
        "token": str(claim.token),
        "secret": claim.secret.hex(),
    }
    return ClaimRef(**fields | changes)
