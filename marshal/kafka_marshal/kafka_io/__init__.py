"""Where bytes meet Kafka: the only package that imports a Kafka client."""

from kafka_marshal.kafka_io.coordination import KafkaCoordinationLog
from kafka_marshal.kafka_io.data import KafkaDataLog
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.tolerant import install
from kafka_marshal.kafka_io.topics import (
    ClusterInfo,
    KafkaTopicAdmin,
    TopicDescription,
    dangers,
    problems,
)

install()

__all__ = [
    "ClusterInfo",
    "ConnectionSettings",
    "KafkaCoordinationLog",
    "KafkaDataLog",
    "KafkaTopicAdmin",
    "TopicDescription",
    "dangers",
    "problems",
]
