"""Where bytes meet Kafka: the only package that imports a Kafka client."""

from kafka_marshal.kafka_io.coordination import KafkaCoordinationLog
from kafka_marshal.kafka_io.data import KafkaDataLog
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.topics import (
    ClusterInfo,
    KafkaTopicAdmin,
    Problem,
    TopicDescription,
    dangers,
    is_retention_finite,
    problems,
    set_command,
)
from kafka_marshal.kafka_io.transport import (
    Choice,
    choose,
    open_coordination_log,
    open_data_log,
)

__all__ = [
    "Choice",
    "ClusterInfo",
    "ConnectionSettings",
    "KafkaCoordinationLog",
    "KafkaDataLog",
    "KafkaTopicAdmin",
    "Problem",
    "TopicDescription",
    "choose",
    "dangers",
    "is_retention_finite",
    "open_coordination_log",
    "open_data_log",
    "problems",
    "set_command",
]
