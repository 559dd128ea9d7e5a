"""Deletes data topics of a real broker, and creates them again."""

from kafka.errors import KafkaError
from waiting import eventually

from kafka_marshal.errors import CoordinationError


def recreate_topic(topics, admin, topic, partitions):
    """Delete a topic and create it again as soon as the broker allows it.

    Args:
        topics: A KafkaTopicAdmin.
        admin: A KafkaAdminClient.
        topic: Its name.
        partitions: Number of partitions.
    """
    before = topics.describe_bare(topic).topic_id
    admin.delete_topics([topic])

    def is_created():
        try:
            topics.create_data_topic(topic, partitions=partitions)
        except (CoordinationError, KafkaError):
            return False
        return True

    eventually(is_created, f"{topic} is created again")

    def is_known():
        return topics.describe_bare(topic).topic_id not in (None, before)

    eventually(is_known, f"the new {topic} is known")
