"""Makes a consumer's subscription from its settings."""

from collections.abc import Mapping

from kafka_marshal.config import TOPICS_MAX, ConsumerConfig
from kafka_marshal.engine import Subscription
from kafka_marshal.engine.topics import matching_topics
from kafka_marshal.errors import ConfigurationError, LogUnreadable
from kafka_marshal.policies import find_policy
from kafka_marshal.ports import DataLog, TopicInfo


def new_subscription(
    config: ConsumerConfig,
    data: DataLog,
    *,
    group_id: str,
    coordination_topic: str,
    timeout_ms: int,
) -> Subscription:
    """Look up the topics, and return the subscription.

    Raises:
        ConfigurationError: The policy cannot be used, or a topic is the coordination
            topic.
        LogUnreadable: A named topic does not exist.
    """
    policy = find_policy(config.policy)
    if coordination_topic in config.topics:
        raise ConfigurationError(
            f"{coordination_topic!r} is the coordination topic, not a data topic; "
            "to read it, run: marshal log tail",
            setting="topics",
        )
    matches = config.matches(coordination_topic)
    if matches is None:
        found = data.describe(config.topics, timeout_ms)
        topics = {topic: _existing(topic, found) for topic in config.topics}
    else:
        matching = matching_topics(data, matches, timeout_ms=timeout_ms)
        topics = dict(list(matching.items())[:TOPICS_MAX])
    return Subscription(
        group_id=group_id,
        topics=topics,
        policy=policy,
        config=config,
        matches=matches,
    )


def _existing(topic: str, found: Mapping[str, TopicInfo]) -> TopicInfo:
    info = found.get(topic)
    if info is None or info.partition_count < 1:
        raise LogUnreadable(
            f"topic {topic!r} does not exist, or has no partitions, on this cluster; "
            "check its name, or create it first"
        )
    return info
