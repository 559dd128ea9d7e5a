"""Fetches by topic id, for kafka-python, which fetches by topic name.

A broker answers a fetch by name from whichever topic has the name. From Fetch
version 13 on (Kafka 3.1) a request names topics by id, and a broker that has no
topic of that id refuses it.
"""

import uuid
from collections.abc import Collection, Mapping, Sequence

import attrs
from kafka.errors import InconsistentTopicIdError, UnknownTopicIdError

from kafka_marshal.errors import ConfigurationError, UnknownTopicId
from kafka_marshal.kafka_io.untyped import Untyped
from kafka_marshal.protocol.types import TopicPartition

FETCH_VERSION = 13
_NONE = uuid.UUID(int=0)
_UNKNOWN = frozenset({UnknownTopicIdError.errno, InconsistentTopicIdError.errno})


@attrs.define(eq=False)
class TopicIds:
    """The topic ids that a reader's partitions are fetched by.

    The reader's thread changes ``wanted``; requests are made, and answers taken, on
    kafka-python's thread.

    Attributes:
        wanted: Id of the topic to fetch of each partition. That of a partition stays
            for the life of a consumer, because fetch sessions know it by its name.
        refused: Partitions whose last fetch found no topic of their id.
    """

    wanted: dict[TopicPartition, uuid.UUID] = attrs.field(factory=dict)
    refused: set[TopicPartition] = attrs.field(factory=set)

    def want(self, partition: TopicPartition, topic_id: bytes | None) -> bool:
        """Set the id of a partition; return whether it had another one before."""
        before = self.wanted.get(partition)
        wanted = None if topic_id is None else uuid.UUID(bytes=topic_id)
        if wanted is None:
            self.wanted.pop(partition, None)
        else:
            self.wanted[partition] = wanted
        self.refused.discard(partition)
        return before is not None and before != wanted

    def raise_refused(self, partitions: Collection[TopicPartition]) -> None:
        """Report one partition whose last fetch found no topic of its id.

        Raises:
            UnknownTopicId: There is one.
        """
        for partition in list(self.refused):
            self.refused.discard(partition)
            if partition in partitions:
                raise unknown_topic_id(partition)

    def _split(self, topics: Sequence[Untyped], known: Untyped) -> list[Untyped]:
        """Return one entry of a request for each topic id."""
        found: dict[tuple[str, uuid.UUID], Untyped] = {}
        for topic in topics:
            other = known.topic_id(topic.topic) or _NONE
            for each in topic.partitions:
                # Of what is to be forgotten there is the bare number.
                number = getattr(each, "partition", each)
                partition = TopicPartition(topic.topic, number)
                topic_id = self.wanted.get(partition, other)
                named = (topic.topic, topic_id)
                if named not in found:
                    found[named] = type(topic)(
                        topic=topic.topic, topic_id=topic_id, partitions=[]
                    )
                found[named].partitions.append(each)
        return list(found.values())

    def request(self, request: Untyped, known: Untyped) -> dict[uuid.UUID, str]:
        """Have a fetch request name its topics by id if any of them has one.

        Args:
            request: kafka-python's request.
            known: kafka-python's metadata, for partitions without an id of their own.

        Returns:
            The name of each topic in it, by id; empty where it names them itself.
        """
        names = {each.topic for each in self.wanted}
        if not any(topic.topic in names for topic in request.topics):
            return {}
        request.topics = self._split(request.topics, known)
        if request.forgotten_topics_data:
            request.forgotten_topics_data = self._split(
                request.forgotten_topics_data, known
            )
        request._max_version = FETCH_VERSION  # noqa: SLF001 - there is no other way in
        return {topic.topic_id: topic.topic for topic in request.topics}

    def answer(self, response: Untyped, names: Mapping[uuid.UUID, str]) -> None:
        """Give the topics of an answer the names that kafka-python knows them by.

        Args:
            response: kafka-python's response.
            names: Name of each topic that was asked for, by id.
        """
        for topic in response.responses:
            if response.API_VERSION >= FETCH_VERSION:
                topic.topic = names.get(topic.topic_id, "")
            for each in topic.partitions:
                partition = TopicPartition(topic.topic, each.partition_index)
                if each.error_code in _UNKNOWN:
                    self.refused.add(partition)
                else:
                    self.refused.discard(partition)


def fetch_by_id(consumer: Untyped, ids: TopicIds) -> None:
    """Have one consumer fetch the topics of these ids.

    Raises:
        ConfigurationError: This release of kafka-python makes its requests in
            another way.
    """
    fetcher = consumer._fetcher  # noqa: SLF001 - there is no other way in
    try:
        make = fetcher._create_fetch_requests  # noqa: SLF001
        take = fetcher._handle_fetch_response  # noqa: SLF001
    except AttributeError as error:
        raise ConfigurationError(
            "This release of kafka-python cannot be made to fetch by topic id; "
            "install one that kafka-marshal is tested with: kafka-python 3.0.",
            setting="transport",
        ) from error
    # Requests of a fetch session leave out what has not changed.
    names: dict[uuid.UUID, str] = {}

    def make_by_id() -> Untyped:
        requests = make()
        for request, _ in requests.values():
            names.update(ids.request(request, consumer._cluster))  # noqa: SLF001
        return requests

    def take_by_id(
        node: Untyped, offsets: Untyped, sent: Untyped, response: Untyped
    ) -> Untyped:
        ids.answer(response, names)
        return take(node, offsets, sent, response)

    fetcher._create_fetch_requests = make_by_id  # noqa: SLF001
    fetcher._handle_fetch_response = take_by_id  # noqa: SLF001


def unknown_topic_id(partition: TopicPartition) -> UnknownTopicId:
    """Return the error for a partition whose topic id no broker has."""
    return UnknownTopicId(
        f"{partition} was not read: its brokers have no topic of the id that it is "
        "claimed under. The topic was deleted, or deleted and created again, or a "
        "broker has yet to learn of it.",
        partition=partition,
    )
