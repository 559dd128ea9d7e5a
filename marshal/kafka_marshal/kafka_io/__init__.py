"""Where bytes meet Kafka: the only package that imports a Kafka client."""

from importlib import import_module

# Type checkers take it for typing's own, whose import takes longer than all of this.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from kafka_marshal.kafka_io.clients import AdminClient
    from kafka_marshal.kafka_io.coordination import KafkaCoordinationLog
    from kafka_marshal.kafka_io.data import KafkaDataLog
    from kafka_marshal.kafka_io.settings import ConnectionConfig
    from kafka_marshal.kafka_io.topic_rules import (
        ClusterInfo,
        Problem,
        TopicDescription,
        dangers,
        is_retention_finite,
        problems,
        set_command,
    )
    from kafka_marshal.kafka_io.topics import KafkaTopicAdmin
    from kafka_marshal.kafka_io.transport import (
        Choice,
        LogEndQuery,
        choose,
        open_coordination_log,
        open_data_log,
        open_offsets,
    )

# Names are imported when they are first used: settings can be checked, as Spark's
# planners do, without the 0.3 s of processor time that kafka-python takes to load.
_HOMES = {
    "AdminClient": "kafka_marshal.kafka_io.clients",
    "Choice": "kafka_marshal.kafka_io.transport",
    "ClusterInfo": "kafka_marshal.kafka_io.topic_rules",
    "ConnectionConfig": "kafka_marshal.kafka_io.settings",
    "KafkaCoordinationLog": "kafka_marshal.kafka_io.coordination",
    "KafkaDataLog": "kafka_marshal.kafka_io.data",
    "LogEndQuery": "kafka_marshal.kafka_io.transport",
    "KafkaTopicAdmin": "kafka_marshal.kafka_io.topics",
    "Problem": "kafka_marshal.kafka_io.topic_rules",
    "TopicDescription": "kafka_marshal.kafka_io.topic_rules",
    "choose": "kafka_marshal.kafka_io.transport",
    "dangers": "kafka_marshal.kafka_io.topic_rules",
    "is_retention_finite": "kafka_marshal.kafka_io.topic_rules",
    "open_coordination_log": "kafka_marshal.kafka_io.transport",
    "open_data_log": "kafka_marshal.kafka_io.transport",
    "open_offsets": "kafka_marshal.kafka_io.transport",
    "problems": "kafka_marshal.kafka_io.topic_rules",
    "set_command": "kafka_marshal.kafka_io.topic_rules",
}
__all__ = [
    "AdminClient",
    "Choice",
    "ClusterInfo",
    "ConnectionConfig",
    "KafkaCoordinationLog",
    "KafkaDataLog",
    "KafkaTopicAdmin",
    "LogEndQuery",
    "Problem",
    "TopicDescription",
    "choose",
    "dangers",
    "is_retention_finite",
    "open_coordination_log",
    "open_data_log",
    "open_offsets",
    "problems",
    "set_command",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
