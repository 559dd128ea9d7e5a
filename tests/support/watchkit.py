"""A coordination log in memory for tests of ``watch``."""

from logkit import config

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.views.watch import WorldWatch
from simulator.clock import VirtualClock
from simulator.fakelog import FakeKafka

TOPIC = "__marshal"


class Story:
    """A log to which a test appends while a watch follows it."""

    def __init__(self, *, partitions=1, level=1):
        self.clock = VirtualClock()
        self.kafka = FakeKafka(self.clock)
        self.kafka.create_topic(TOPIC, partitions, is_log_append_time=True)
        for number in range(partitions):
            self.write(
                config(k=partitions, cluster_id=self.kafka.cluster_id, level=level),
                to=number,
            )

    def write(self, record, *, to=0, after=0):
        self.clock.advance(after)
        value = record if isinstance(record, bytes) else encode(record)
        return self.kafka.produce(TopicPartition(TOPIC, to), value)

    def watch(self, *sources):
        self.log = self.kafka.coordination_log(TOPIC)
        watch = WorldWatch(self.log, self.clock, sources=sources)
        watch.catch_up(1_000)
        return watch
