"""The data log of the transport over librdkafka."""

from kafka_marshal.kafka_io.data import KafkaDataLog
from kafka_marshal.kafka_io.fast.reader import FastDataReader
from kafka_marshal.kafka_io.fast.switching import SwitchingReader, can_switch
from kafka_marshal.ports import READ_UNCOMMITTED, DataReader


class FastDataLog(KafkaDataLog):
    """``ports.DataLog`` with readers over librdkafka, and kafka-python's queries.

    Queries are few and small, so librdkafka would gain nothing.
    """

    def reader(self, *, isolation_level: str = READ_UNCOMMITTED) -> DataReader:
        """Return a new reader with nothing assigned; it connects when polled."""
        kind = SwitchingReader if can_switch(self._settings) else FastDataReader
        return kind(
            self._settings,
            isolation_level=isolation_level,
            client_rack=self._client_rack,
        )
