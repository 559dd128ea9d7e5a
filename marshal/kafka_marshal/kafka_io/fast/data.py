"""Data topics over librdkafka: its readers, and kafka-python's look-ups.

Look-ups are few and small, so there is nothing to gain by a second set of them.
"""

from kafka_marshal.kafka_io.data import KafkaDataLog
from kafka_marshal.kafka_io.fast.reader import FastDataReader
from kafka_marshal.ports import READ_UNCOMMITTED, DataReader


class FastDataLog(KafkaDataLog):
    """``ports.DataLog`` whose readers fetch by librdkafka."""

    def reader(self, *, isolation_level: str = READ_UNCOMMITTED) -> DataReader:
        """Return a new reader with nothing assigned; it connects when polled."""
        return FastDataReader(
            self._settings,
            isolation_level=isolation_level,
            client_rack=self._client_rack,
        )
