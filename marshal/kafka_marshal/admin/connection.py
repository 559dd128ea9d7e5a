"""The connections of an admin, which reads the log without claiming."""

import time
from collections.abc import Collection
from pathlib import Path

from kafka_marshal.admin.pausing import Sender
from kafka_marshal.arguments import with_plain_arguments
from kafka_marshal.deadline import Deadline
from kafka_marshal.engine.checkpoint_reader import kept_in
from kafka_marshal.engine.config_check import agreed_config
from kafka_marshal.engine.follower import Awaited, Follower
from kafka_marshal.engine.snapshotter import StateStore
from kafka_marshal.errors import InvalidTransition, TopicMisconfigured
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topics import KafkaTopicAdmin
from kafka_marshal.kafka_io.transport import open_coordination_log
from kafka_marshal.ports import Clock
from kafka_marshal.protocol.records import Config, Record
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.snapshots import open_store, read_to_end
from kafka_marshal.views.log_ends import LogEnds

_CREATED_PAUSE_S = 0.1
"""Between attempts to open a log that was created just now."""


class AdminConnection:
    """Follows the log, and describes topics; the base of each part of ``Admin``.

    For one thread. The first use opens the log.
    """

    _settings: ConnectionConfig
    _sender: Sender
    _clock: Clock
    _topics: KafkaTopicAdmin
    _log_ends: LogEnds
    _state_home: Path | None
    _timeout_ms: int
    _follower: Follower | None = None
    _store: StateStore | None = None
    _cluster_id: str | None = None
    _is_closed: bool = False

    @with_plain_arguments
    def partition_count(self, topic: str) -> int | None:
        """Return the number of partitions of a data topic; None if it does not exist.

        Raises:
            LogUnreadable: This principal may not describe the topic.
            CoordinationError: The cluster did not answer.
        """
        found = self._topics.describe_bare(topic, timeout_ms=self._timeout_ms)
        return found.partition_count if found.exists else None

    def log_ends(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Return the log ends that are known; see ``LogEnds.of``."""
        return self._log_ends.of(partitions)

    def _follow(self) -> Follower:
        """Return the follower of the log, however far it has read.

        Raises:
            InvalidTransition: The ``Admin`` is closed.
        """
        if self._is_closed:
            raise InvalidTransition("the Admin is closed; open another one")
        if self._follower is None:
            log = open_coordination_log(self._settings, timeout_ms=self._timeout_ms)
            self._cluster_id = log.cluster_id
            topic_id = log.topic_id
            self._store = open_store(
                self._state_home, log.cluster_id, topic_id=topic_id
            )
            sources = kept_in(self._store)
            self._follower = Follower(log, self._clock, sources=sources)
        return self._follower

    def _follow_created(self) -> Follower:
        """Return the follower of a log that was created just now.

        Brokers learn of a new topic at different times, so this tries again.

        Raises:
            TopicMisconfigured: No broker that was asked knew the topic in time.
        """
        deadline = Deadline(self._timeout_ms, self._clock.now_ms)
        while True:
            try:
                return self._follow()
            except TopicMisconfigured:
                if deadline.is_over:
                    raise
            time.sleep(_CREATED_PAUSE_S)

    def _follow_again(self) -> Follower:
        """Close the follower; return one that reads all present Kafka partitions."""
        self._close_follower()
        return self._follow()

    def _read(self) -> Follower:
        """Read the log to its end; return its follower."""
        follower = self._follow()
        read_to_end(follower, self._store, timeout_ms=self._timeout_ms)
        config = follower.worlds[0].config
        if config is not None and config.partition_count > len(follower.worlds):
            # The number of partitions has grown since the log was opened.
            follower = self._follow_again()
            read_to_end(follower, self._store, timeout_ms=self._timeout_ms)
        return follower

    def _settled(self) -> Config:
        """Read to the log's end; return the agreed Config."""
        follower = self._read()
        return agreed_config(
            follower.by_partition,
            cluster_id=self._cluster_id,
            topic=self._settings.coordination_topic,
        )

    def _write(self, *records: tuple[int, Record]) -> list[Awaited]:
        """Append records to coordinating partitions, and wait for their verdicts.

        Raises:
            DeadlineExceeded: No verdict in time; records may still be appended.
        """
        follower = self._follow()
        sent = [follower.append(t, record) for t, record in records]
        follower.await_all(sent, self._timeout_ms)
        return sent

    def _close_follower(self) -> None:
        if self._follower is not None:
            self._follower.close()
            self._follower = None
