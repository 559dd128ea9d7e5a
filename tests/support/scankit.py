"""A scan of logs in memory, for commands that read a log to its end."""

from opening import Opened

from kafka_marshal.clock import SystemClock
from kafka_marshal.engine.kept_states import Restored
from kafka_marshal.ports import runs_of
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.views.past import Prefix


class FakeScan(Opened):
    """Stands in for ``LogScan``, over logs of ``logkit``."""

    cluster_id = "cluster"
    topic_id = bytes(range(16))

    def __init__(self, *logs):
        self.starts = {log.state.partition: 0 for log in logs}
        self.ends = {log.state.partition: len(log.entries) for log in logs}
        self._logs = logs
        self._first, self._last = 0, None
        self.prefix = Prefix(None, None)
        self.read_at_ms = SystemClock().wall_ms()

    def until(self, *, offset=None, time_ms=None):
        """End the scan at a moment."""
        self.prefix = Prefix(offset, time_ms)

    def select(self, partition=None, *, first=0, last=None):
        """Read only these entries."""
        self._logs = [
            each for each in self._logs if partition in {None, each.state.partition}
        ]
        self._first, self._last = first, last

    def restore(self, *, first=None, since=None):
        """Return that every partition begins at its log start: without checkpoints."""
        return {t: Restored(WorldState(t), None, 0) for t in self.starts}

    def __iter__(self):
        return (
            (log.state.partition, entry)
            for log in self._logs
            for entry in log.entries
            if self._first <= entry.offset
            if self._last is None or entry.offset <= self._last
            if self.prefix.accept(log.state.partition, entry)
        )

    def runs(self):
        """Yield the entries in runs of one partition."""
        return runs_of(self)
