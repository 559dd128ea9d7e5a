"""A scan of logs in memory, as commands that read a log to its end are given it."""

from kafka_marshal.engine.kept_states import Restored
from kafka_marshal.protocol.state import WorldState


class FakeScan:
    """Stands in for ``LogScan``, over logs of ``logkit``."""

    cluster_id = "cluster"
    topic_id = bytes(range(16))

    def __init__(self, *logs):
        self.starts = {log.state.partition: 0 for log in logs}
        self.ends = {log.state.partition: len(log.entries) for log in logs}
        self._logs = logs

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def restore(self, *, is_past=None):
        """Say that every partition is there from its start on."""
        return {t: Restored(WorldState(t), None, 0) for t in self.starts}

    def __iter__(self):
        return (
            (log.state.partition, entry) for log in self._logs for entry in log.entries
        )
