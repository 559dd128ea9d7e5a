"""Description of the coordination topic, and log ends, over librdkafka.

Its requests return futures; nothing blocks. If no broker can be used, their only error
is a timeout, whatever the reason: refused logins and certificates are reported while
the client is polled, and librdkafka then tries again for ever.
"""

import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from typing import Any

import attrs
from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka import TopicPartition as FastPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    ConfigResource,
    OffsetSpec,
    ResourceType,
)

from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import LogUnreadable, MarshalError
from kafka_marshal.kafka_io.fast.clients import (
    LOSSES,
    Client,
    close_admin,
    new_admin,
)
from kafka_marshal.kafka_io.fast.translate import (
    Access,
    cause_of,
    is_refusal,
    translate_error,
)
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topic_rules import CONFIGS_READ, TopicDescription
from kafka_marshal.protocol.types import TopicPartition

# Longest time of one attempt.
_ATTEMPT_S = 5.0
_RETRY_S = 0.1
_CHECK_S = 0.1
# Retry refusals briefly: after a credential change some brokers still reject the new
# password.
_REFUSED_RETRY_MS = 2_000
_ID_BITS = 64
_TIMED_OUT = KafkaError._TIMED_OUT  # noqa: SLF001 - its public name


def described(found: Any, configs: Mapping[str, str]) -> TopicDescription:
    """Return a topic of confluent-kafka's ``describe_topics``.

    Args:
        found: Its ``TopicDescription``.
        configs: The settings.
    """
    partitions = found.partitions
    leaders = {p.id: -1 if p.leader is None else p.leader.id for p in partitions}
    return TopicDescription(
        name=found.name,
        exists=True,
        partition_count=len(partitions),
        replication=min((len(p.replicas) for p in partitions), default=0),
        leaderless=tuple(sorted(n for n, leader in leaders.items() if leader < 0)),
        in_sync=min((len(p.isr) for p in partitions), default=0),
        behind=tuple(sorted(p.id for p in partitions if len(p.isr) < len(p.replicas))),
        leaders=leaders,
        configs=configs,
        topic_id=_topic_id(found.topic_id),
    )


def _topic_id(raw: Any) -> bytes | None:
    """Return a topic id as 16 bytes; None if absent or all zeros."""
    if raw is None:
        return None
    halves = raw.get_most_significant_bits(), raw.get_least_significant_bits()
    # They are signed.
    value = b"".join((half % (1 << _ID_BITS)).to_bytes(8, "big") for half in halves)
    return value if any(value) else None


@attrs.frozen(eq=False)
class _Request:
    """A request under way.

    Attributes:
        future: Its result.
        doing: Name of the operation, for messages.
        needs: The right that it needs, for messages.
    """

    future: "Future[Any]"
    doing: str
    needs: str | None = None


@attrs.frozen(eq=False)
class _Requests:
    """The requests of one attempt, all sent at once."""

    cluster: _Request
    topic: _Request
    configs: _Request

    @classmethod
    def send(cls, handle: Any, topic: str, timeout_s: float) -> "_Requests":
        """Send them; each ends within ``timeout_s``."""
        resource = ConfigResource(ResourceType.TOPIC, topic)
        cluster = handle.describe_cluster(request_timeout=timeout_s)
        topics = handle.describe_topics(
            TopicCollection([topic]), request_timeout=timeout_s
        )
        configs = handle.describe_configs([resource], request_timeout=timeout_s)
        return cls(
            _Request(cluster, "Describing the cluster"),
            _Request(
                topics[topic], f"Describing topic {topic}", f"DESCRIBE on topic {topic}"
            ),
            _Request(
                configs[resource],
                f"Describing the settings of topic {topic}",
                f"DESCRIBE_CONFIGS on topic {topic}",
            ),
        )

    @property
    def futures(self) -> "tuple[Future[Any], ...]":
        """The results of all."""
        return self.cluster.future, self.topic.future, self.configs.future


class _LogQuery:
    """Describes the coordination topic once, with retries until the deadline."""

    def __init__(
        self, client: Client, settings: ConnectionConfig, *, timeout_ms: int
    ) -> None:
        self._client = client
        self._settings = settings
        self._timeout_ms = timeout_ms
        self._deadline = Deadline(timeout_ms)
        self._refusal: Exception | None = None
        self.requests: _Requests | None = None

    def run(self) -> tuple[str, TopicDescription]:
        """Retry until success, a permanent error or the deadline."""
        topic = self._settings.coordination_topic
        while True:
            left_s = min(_ATTEMPT_S, max(_RETRY_S, self._deadline.left_s))
            sent = _Requests.send(self._client.handle, topic, left_s)
            self.requests = sent
            self._wait(sent)
            try:
                return self._result(sent)
            except MarshalError as error:
                if not error.retriable or self._deadline.left_s <= _RETRY_S:
                    raise
            time.sleep(_RETRY_S)

    def _wait(self, requests: _Requests) -> None:
        """Wait until all have ended, the deadline, or some time after a refusal."""
        while True:
            left_s = self._deadline.left_s
            step_s = min(_CHECK_S, left_s)
            if not wait(requests.futures, timeout=step_s).not_done or not left_s:
                return
            self._client.handle.poll(0)
            last = self._client.last
            if self._refusal is None and last is not None and is_refusal(last):
                self._refusal = last
                self._deadline = self._deadline.within(_REFUSED_RETRY_MS)

    def _result(self, requests: _Requests) -> tuple[str, TopicDescription]:
        cluster_id = str(self._result_of(requests.cluster).cluster_id)
        name = self._settings.coordination_topic
        try:
            found = self._result_of(requests.topic)
        except MarshalError as error:
            cause = cause_of(error.__cause__)
            if cause is None or cause.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
            return cluster_id, TopicDescription(name=name, exists=False)
        try:
            rows = self._result_of(requests.configs)
        except LogUnreadable:
            rows = {}  # members need not see the settings
        configs = {each: str(rows[each].value) for each in CONFIGS_READ if each in rows}
        return cluster_id, described(found, configs)

    def _result_of(self, request: _Request) -> Any:
        """Return the result of a request, or raise its error or that of the client."""
        future = request.future
        error = future.exception(0) if future.done() else self._timeout()
        if error is None:
            return future.result(0)
        assert isinstance(error, Exception)
        cause = cause_of(error)
        if cause is not None and cause.code() == _TIMED_OUT:
            error = self._refusal or self._timeout()
        raise translate_error(
            error,
            doing=request.doing,
            access=Access.READ,
            addresses=self._settings.addresses,
            needs=request.needs,
        )

    def _timeout(self) -> Exception:
        last = cause_of(self._client.last)
        why = f"; the last attempt ended with: {last.str()}" if last is not None else ""
        text = f"no answer within {self._timeout_ms} ms{why}"
        return KafkaException(KafkaError(_TIMED_OUT, text))


def describe_log(
    settings: ConnectionConfig, *, timeout_ms: int
) -> tuple[str, TopicDescription]:
    """Return the cluster's id, and its description of the coordination topic.

    The description has no settings if this principal may not see them.

    Args:
        settings: Connection and name of the topic.
        timeout_ms: Limit for the whole call.

    Raises:
        LogUnreadable: This principal may not describe the topic.
        CoordinationError: There was no answer.
    """
    client = new_admin(settings)
    query = _LogQuery(client, settings, timeout_ms=timeout_ms)
    try:
        return query.run()
    finally:
        close_admin(client, () if query.requests is None else query.requests.futures)


class FastOffsets:
    """Queries log ends, not last stable offsets. Thread-safe, blocking.

    The first query connects.
    """

    def __init__(self, settings: ConnectionConfig) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._client: Client | None = None
        # Requests of the last query.
        self._sent: tuple[Future[Any], ...] = ()

    def known_ends(
        self, partitions: Collection[TopicPartition], timeout_ms: int
    ) -> dict[TopicPartition, int]:
        """Return the log end offset of each partition that can be queried.

        Partitions without a topic, a leader or the right to see it are absent.

        Raises:
            CoordinationError: There was no answer in time.
        """
        if not partitions:
            return {}
        deadline = Deadline(timeout_ms)
        with self._lock:
            old = self._client
            if old is None or old.is_outdated:
                self._client = new_admin(self._settings)
                if old is not None:
                    close_admin(old, self._sent)
            assert self._client is not None
            handle = self._client.handle
            topics = TopicCollection(sorted({each.topic for each in partitions}))
            described = handle.describe_topics(
                topics, request_timeout=_left_s(deadline)
            )
            led = {
                TopicPartition(topic, found.id)
                for topic, row in self._results(described, deadline)
                for found in row.partitions
                if found.leader is not None
            }
            end = OffsetSpec.latest()  # type: ignore[no-untyped-call]
            places = {FastPartition(*each): end for each in partitions if each in led}
            if not places:
                return {}
            listed = handle.list_offsets(places, request_timeout=_left_s(deadline))
            return {
                TopicPartition(place.topic, place.partition): row.offset
                for place, row in self._results(listed, deadline)
            }

    def close(self, timeout_ms: int) -> None:
        """Close the connection in the background. Idempotent."""
        del timeout_ms
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            close_admin(client, self._sent)

    def _results(
        self, futures: "Mapping[Any, Future[Any]]", deadline: Deadline
    ) -> list[tuple[Any, Any]]:
        """Wait for all requests, and return the results of those that succeeded."""
        self._sent = tuple(futures.values())
        _, late = wait(self._sent, timeout=deadline.left_s)
        if late:
            raise self._error(KafkaException(KafkaError(_TIMED_OUT)))
        found = []
        for name, future in futures.items():
            error = future.exception(0)
            if error is None:
                found.append((name, future.result(0)))
            elif cause_of(error) is None or cause_of(error).code() in LOSSES:
                raise self._error(error)
        return found

    def _error(self, error: Any) -> MarshalError:
        if self._client is not None:
            self._client.handle.poll(0)  # reports failed connections
        return translate_error(
            error,
            doing="Querying log ends",
            access=Access.READ,
            addresses=self._settings.addresses,
        )


def _left_s(deadline: Deadline) -> float:
    """Return the time until a deadline, for a request: at least a millisecond."""
    return max(0.001, deadline.left_s)
