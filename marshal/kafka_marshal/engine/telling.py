"""Tells an application which whole topics it has, once for each change."""

from collections.abc import Callable, Iterable

from kafka_marshal.protocol.topic_policy import LEAD
from kafka_marshal.protocol.types import TopicPartition

OnTopics = Callable[[frozenset[str]], None]


class TopicTeller:
    """Calls ``on_topics`` on the consumer's thread; never twice with the same set.

    A topic counts from when its partition 0 is held, which is its key; the rest
    of it follows as it becomes free.
    """

    __slots__ = ("_call", "_told")

    def __init__(self, call: OnTopics) -> None:
        self._call = call
        self._told: frozenset[str] = frozenset()

    def follow(self, partitions: Iterable[TopicPartition]) -> None:
        """Tell what is held now, if that is not what was told last."""
        topics = frozenset(topic for topic, number in partitions if number == LEAD)
        if topics != self._told:
            self._told = topics
            self._call(topics)
