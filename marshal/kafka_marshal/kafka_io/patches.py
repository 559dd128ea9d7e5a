"""Patches of kafka-python 3.0: the only module that uses its internals.

A test counts the accesses. Patches replace methods or attributes of one client, for
faults that no setting avoids. Classes and modules of kafka-python stay as they are,
because the application may use them as well.

* Header names that are not UTF-8. Brokers accept them; kafka-python 3.0 raises, and its
  reader never gets past the record. One such record in the coordination topic would
  stop every reader for good (PROTOCOL 1.5).
* The last data before a close. kafka-python drops it if data and close arrive together,
  so a wrong password looks like a network that is down.
* Responses. kafka-python reads 4 KiB at a time and copies a response several times,
  which takes longer than all else. ``ResponseReader`` replaces its parser.
* Fetches by topic id. A broker answers a fetch by name from whichever topic has the
  name. From Fetch version 13 on (Kafka 3.1) a request names topics by id, and a broker
  that has no topic of that id refuses it.
* The description of the cluster. kafka-python's fails at brokers before Kafka 3.7,
  whose response has no type of endpoint.
* Delays by quotas. kafka-python only logs them, in its own words.
* Bootstrap addresses that do not answer. kafka-python may spend the whole time for
  connecting on the first address that it draws.
* Leaders of partitions. For each request about offsets kafka-python describes all their
  topics, rights included, and copies that into dictionaries and JSON: a tenth of a
  second for a topic of 15,000 partitions. Here requests that come together share one
  look-up.
* Attempts to connect. kafka-python leaves the sockets of failed ones to the garbage
  collector, which runs late: while brokers are down, open files add up.
* Positions and leaders. Each poll compares the leader epoch of each partition with that
  of its position. With 15,000 partitions this takes half a processor, although only a
  change of the metadata, of a position or of the assignment can make a difference.
* Producers without a leader. While a partition that a producer has written to has no
  leader, or no longer exists, its thread requests the metadata and wakes itself up each
  round, so that it uses a whole processor.
"""

import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from socket import socket
from traceback import clear_frames, walk_tb
from types import MappingProxyType
from typing import Any, SupportsIndex, overload
from weakref import WeakSet

import attrs
from kafka import TopicPartition as KafkaPlace
from kafka.admin import KafkaAdminClient
from kafka.errors import (
    InconsistentTopicIdError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from kafka.net.compat import KafkaNetClient
from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector
from kafka.protocol.consumer import FetchRequest
from kafka.protocol.metadata import MetadataRequest
from kafka.record.default_records import DefaultRecordBatch

from kafka_marshal.kafka_io.driving import CallerSelector
from kafka_marshal.kafka_io.positions import unknown_topic_error
from kafka_marshal.kafka_io.responses import ResponseReader
from kafka_marshal.kafka_io.throttling import throttling
from kafka_marshal.protocol.types import TopicPartition

_LOGGER = logging.getLogger(__name__)
FETCH_VERSION = 13
# How long the first attempt at a bootstrap address may take. Each later one may take
# twice as long, up to 24 s: kafka-python's own limit is 30 s.
_ADDRESS_TIMEOUT_MS = 3_000
_DOUBLED_MAX = 3
# kafka-python's fetcher reads it for each request.
_WAIT = "fetch_max_wait_ms"
_NONE = uuid.UUID(int=0)
# How long known leaders of partitions are used, for requests that come together. If a
# leader has changed, requests are repeated for up to this time before it is looked up.
_LEADERS_S = 0.5
_UNKNOWN = frozenset({UnknownTopicIdError.errno, InconsistentTopicIdError.errno})


# How long one return to the bootstrap addresses may take.
_RETURN_MS = 10_000


class _Manager(KafkaConnectionManager):  # type: ignore[misc] # untyped library
    """Connections of one client; their transports are patched before use.

    An attempt at a bootstrap address ends soon, and the next one is at another address.
    If no broker that it knows can be reached, as after all addresses have changed, it
    returns to the bootstrap addresses; kafka-python never does.

    Attributes:
        changes: Called with each transport once it is connected, before anything is
            read.
        failed: Called on the thread that connects, for each connection that was not
            established, with its error, and the address if only the cluster names it.
        request_timeout_ms: Limit of each later request; None for the configured one,
            which each connection copies.
    """

    request_timeout_ms: int | None = None

    def __init__(self, net: NetworkSelector, **options: object) -> None:
        super().__init__(net, **options)
        self.changes: list[Callable[[Any], None]] = [keep_last_data]
        self.failed: Callable[[Exception, str | None], None] = lambda _, __: None
        self._begun: WeakSet[Any] = WeakSet()
        # Failed attempts, by the id of a bootstrap address.
        self._attempts: Counter[str] = Counter()
        self._addresses = self.cluster.bootstrap_brokers
        self.cluster.bootstrap_brokers = self._least_failed

    def _least_failed(self) -> list[Any]:
        """Return the bootstrap addresses with the fewest failed attempts."""
        found = self._addresses()
        least = min(self._attempts[each.node_id] for each in found)
        return [each for each in found if self._attempts[each.node_id] == least]

    def get_connection(
        self, node_id: Any, timeout_ms: float | None = None, **settings: object
    ) -> Any:
        """Return the connection to a node: a new one, or one that exists."""
        if self.cluster.is_bootstrap(node_id):
            limit_ms = _ADDRESS_TIMEOUT_MS << min(self._attempts[node_id], _DOUBLED_MAX)
            timeout_ms = min(timeout_ms or limit_ms, limit_ms)
        connection = super().get_connection(node_id, timeout_ms, **settings)
        if connection not in self._begun:
            self._begun.add(connection)
            connection.init_future.add_errback(partial(self._report, node_id))
        return connection

    def send(
        self, request: Any, node_id: Any = None, request_timeout_ms: Any = None
    ) -> Any:
        """Send a request; return the future of its response, whose delay is noted."""
        limit_ms = request_timeout_ms or self.request_timeout_ms
        sent = super().send(request, node_id, request_timeout_ms=limit_ms)
        return sent.add_callback(partial(_note_delay, node_id))

    def _report(self, node_id: Any, error: Exception) -> None:
        address = None
        node = self.cluster.broker_metadata(node_id)
        if self.cluster.is_bootstrap(node_id):
            self._attempts[node_id] += 1
        elif node is not None:
            given = {(each.host, each.port) for each in self._addresses()}
            if (node.host, node.port) not in given:
                address = f"{node.host}:{node.port}"
            if self._are_all_lost() and not self.closed:
                self.bootstrap_async(_RETURN_MS)
        self.failed(error, address)

    def _are_all_lost(self) -> bool:
        """Return whether connections to all known brokers have failed repeatedly."""
        known = [broker.node_id for broker in self.cluster.brokers()]
        return all(each in self._backoff for each in known) and not any(
            each in self._conns and self._conns[each].connected for each in known
        )

    async def _build_transport(self, *args: object, **settings: object) -> Any:
        try:
            transport = await super()._build_transport(*args, **settings)
        except Exception as error:
            _close_sockets(error)
            raise
        for change in self.changes:
            change(transport)
        return transport


def _close_sockets(error: Exception) -> None:
    """Close sockets that a failed attempt left open, in the frames of its error.

    The first frame is skipped: it is the caller's, which still runs.
    """
    assert error.__traceback__ is not None
    traces = [error.__traceback__.tb_next]
    if error.__context__ is not None:
        traces.append(error.__context__.__traceback__)
    for trace in traces:
        for frame, _ in walk_tb(trace):
            found = frame.f_locals
            for value in found.values():
                if isinstance(value, socket):
                    value.close()
            if isinstance(found, dict):
                found.clear()  # a copy that the frame keeps, before Python 3.13
        # Frames of attempts at other addresses and the error refer to each other.
        clear_frames(trace)


def _note_delay(node_id: object, response: Any) -> None:
    where = "a broker" if node_id is None else f"broker {node_id}"
    throttling.note(where, getattr(response, "throttle_time_ms", None) or 0)


class Network(KafkaNetClient):  # type: ignore[misc] # untyped library
    """The network of one client of kafka-python.

    Attributes:
        selector: Runs the connections, by default on a thread of its own.
        manager: Its connections.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        selector: NetworkSelector | None = None,
    ) -> None:
        self.selector = selector or NetworkSelector(**options)
        self.manager = _Manager(self.selector, **options)
        super().__init__(self.selector, self.manager, **options)

    def stop(self) -> None:
        """Close all connections, on the network's thread; return at once.

        Raises:
            RuntimeError: It is closed.
        """
        self.selector.call_soon_threadsafe(self.manager.close)


def network_of(client: Any) -> Any:
    """Return the network of a consumer or an admin client."""
    return client._client  # noqa: SLF001 - there is no other way in


def fetcher_of(consumer: Any) -> Any:
    """Return the fetcher of a consumer."""
    return consumer._fetcher  # noqa: SLF001 - there is no other way in


def position_of(consumer: Any, place: Any) -> int | None:
    """Return the next offset of an assigned partition, None if it has none.

    The public method sends a request.
    """
    states = consumer._subscription.assignment  # noqa: SLF001
    position = states[place].position if place in states else None
    return None if position is None else int(position.offset)


def unblock_resumed(consumer: Any) -> None:
    """Make kafka-python continue with records fetched before a pause.

    It keeps the buffered rest of a paused partition, and fetches no more of that
    partition until the rest is consumed. But it returns to the rest only while no
    partition is in progress, and counts an exhausted one as in progress, so a resumed
    partition would starve for ever. All other code treats an exhausted one as none.
    """
    fetcher = fetcher_of(consumer)
    if not _in_progress(fetcher):
        fetcher._next_partition_records = None  # noqa: SLF001


def has_fetched(consumer: Any) -> bool:
    """Return whether a consumer holds fetched records that no poll has returned."""
    fetcher = fetcher_of(consumer)
    return bool(_held(fetcher)) or _in_progress(fetcher)


def validate_after_changes(consumer: Any) -> None:
    """Compare positions with leader epochs only after one of the two has changed."""
    fetcher, cluster = fetcher_of(consumer), network_of(consumer).cluster
    validate = fetcher.maybe_validate_positions
    has_changed = [True]

    def validate_if_changed() -> None:
        if has_changed[0]:
            has_changed[0] = False  # first: metadata may change during the call
            validate()

    def noting(change: Callable[..., Any]) -> Callable[..., Any]:
        def change_and_note(*args: object, **options: object) -> Any:
            try:
                return change(*args, **options)
            finally:
                has_changed[0] = True

        return change_and_note

    fetcher.maybe_validate_positions = validate_if_changed
    cluster.update_metadata = noting(cluster.update_metadata)
    # Called for a hint in a response about one partition's leader.
    cluster.update_partition_leader = noting(cluster.update_partition_leader)
    consumer.assign, consumer.seek = noting(consumer.assign), noting(consumer.seek)


def set_fetch_wait(consumer: Any, wait_ms: int) -> None:
    """Set how long a broker waits for records before it answers the next fetches."""
    fetcher_of(consumer).config[_WAIT] = wait_ms


def fetch_ahead(consumer: Any) -> None:
    """Make a consumer send the next fetch as soon as it has received a response.

    kafka-python sends it once all received records are taken: until then the broker
    would have nothing to do. At most one response of a broker is under way, besides
    those with records that no poll has returned. Such an early fetch does not wait for
    new records: until its response, the broker gets no fetch of the held partitions.
    """
    fetcher = fetcher_of(consumer)
    take = fetcher.fetched_records
    # Partitions with records of a response that arrived while no other was held.
    arrived: set[Any] = set()

    def handle_and_note(handle: Callable[[], None], response: Any) -> None:
        del response
        had_fetched = has_fetched(consumer)
        handle()
        _use_empty(fetcher)
        if not had_fetched:
            arrived.update(each.topic_partition for each in _held(fetcher))

    def is_behind(place: Any) -> bool:
        position, end = position_of(consumer, place), consumer.highwater(place)
        return position is not None and end is not None and position < end

    def send_and_take(*args: object, **options: object) -> Any:
        if arrived:
            others = consumer.assignment() - consumer.paused() - arrived
            arrived.clear()
            if any(map(is_behind, others)):
                wait_ms, fetcher.config[_WAIT] = fetcher.config[_WAIT], 0
                try:
                    fetcher.send_fetches()
                finally:
                    fetcher.config[_WAIT] = wait_ms
                # Now: indexing the received records may take long.
                network_of(consumer).selector.flush()
        return take(*args, **options)

    _wrap_handler(fetcher, handle_and_note)
    fetcher.fetched_records = send_and_take


def _wrap_handler(
    fetcher: Any, wrapper: Callable[[Callable[[], None], Any], None]
) -> None:
    """Replace the handler of responses by a wrapper: it gets handler and response."""
    handle = fetcher._handle_fetch_response  # noqa: SLF001

    def wrapped(node: Any, offsets: Any, sent: Any, response: Any) -> None:
        wrapper(partial(handle, node, offsets, sent, response), response)

    fetcher._handle_fetch_response = wrapped  # noqa: SLF001


def _held(fetcher: Any) -> Any:
    """Return the deque of received fetches, one for each partition of a response."""
    return fetcher._completed_fetches  # noqa: SLF001


def _use_empty(fetcher: Any) -> None:
    """Make a fetcher handle at once the partitions for which a response has no records.

    A response of limited size has no records of its last partitions, which must then be
    in the next request. kafka-python would leave them out until all held records are
    taken.
    """
    held = _held(fetcher)
    for _ in range(len(held)):
        each = held.popleft()
        if each.partition_data.error_code or each.partition_data.records:
            held.append(each)
        else:
            fetcher._parse_fetched_data(each)  # noqa: SLF001


def _in_progress(fetcher: Any) -> bool:
    return bool(fetcher._next_partition_records)  # noqa: SLF001


def request_updates_once(producer: Any) -> None:
    """Make a producer request metadata only if it does not wait for some already."""
    cluster = producer._metadata  # noqa: SLF001 - no public attribute
    request = cluster.request_update
    requested: Any = None

    def request_once() -> Any:
        nonlocal requested
        is_awaited = cluster.need_update and requested and not requested.is_done
        if not is_awaited:
            requested = request()
        return requested

    cluster.request_update = request_once


class Admin(KafkaAdminClient):  # type: ignore[misc] # untyped library
    """kafka-python's admin client, with cheaper look-ups of partition leaders.

    The look-ups run on its network's thread.
    """

    # Leaders found by the last look-up, and the time until which they are used.
    _leaders: Mapping[KafkaPlace, int] = MappingProxyType({})
    _leaders_until_s = 0.0

    async def _async_get_leader_for_partitions(
        self, partitions: Collection[KafkaPlace]
    ) -> Mapping[int, set[KafkaPlace]]:
        """Return the partitions that each broker leads.

        Raises:
            UnknownTopicOrPartitionError: A partition is in no description of its topic.
        """
        wanted = set(partitions)
        is_late = time.monotonic() >= self._leaders_until_s
        if is_late or not self._leaders.keys() >= wanted:
            self._leaders = await self._leaders_of({place.topic for place in wanted})
            self._leaders_until_s = time.monotonic() + _LEADERS_S
        missing = wanted - self._leaders.keys()
        if missing:
            raise UnknownTopicOrPartitionError(f"not described: {sorted(missing)}")
        found: dict[int, set[KafkaPlace]] = {}
        for place in wanted:
            found.setdefault(self._leaders[place], set()).add(place)
        return found

    async def _leaders_of(self, topics: Collection[str]) -> Mapping[KafkaPlace, int]:
        request = MetadataRequest(
            topics=[MetadataRequest.MetadataRequestTopic(name=name) for name in topics],
            allow_auto_topic_creation=False,
        )
        answer = await network_of(self).manager.send(request)
        return {
            KafkaPlace(topic.name, each.partition_index): each.leader_id
            for topic in answer.topics
            for each in topic.partitions
        }


def describe_cluster(admin: Any) -> Mapping[str, Any]:
    """Return a cluster's id, controller and live brokers as any broker describes them.

    By the request that kafka-python sends to brokers that do not describe clusters. The
    result also has ``has_fetch_by_id``: whether topics can be fetched by their ids.
    """
    manager = network_of(admin).manager

    async def request() -> Mapping[str, Any]:
        wanted = MetadataRequest(topics=[], allow_auto_topic_creation=False)
        found: Mapping[str, Any] = (await manager.send(wanted)).to_dict()
        return found

    answer: Mapping[str, Any] = manager.run(request)
    version = manager.broker_version_data.api_version(FetchRequest)
    return {**answer, "has_fetch_by_id": version >= FETCH_VERSION}


def force_close(producer: Any) -> None:
    """Make a producer drop its batches; its ``close`` then does not wait for them."""
    producer._sender.force_close()  # noqa: SLF001 - no public method


def raw_bytes(records: Any) -> Any:
    """Return the bytes of a record batch, or of several, without a copy."""
    return records._buffer  # noqa: SLF001 - there is no other way in


class _Text(bytes):
    """A slice that decodes any bytes to text."""

    __slots__ = ()

    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        """Return text, with U+FFFD for invalid bytes."""
        return super().decode(encoding, errors)


class _Buffer(bytes):
    """Bytes whose slices decode leniently; single bytes stay integers."""

    __slots__ = ()

    @overload
    def __getitem__(self, at: SupportsIndex) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> bytes: ...

    def __getitem__(self, at: SupportsIndex | slice) -> int | bytes:
        item = super().__getitem__(at)
        return item if isinstance(item, int) else _Text(item)


class LenientBatch(DefaultRecordBatch):  # type: ignore[misc] # untyped library
    """A batch that replaces invalid bytes of header names by U+FFFD."""

    def _read_msg(self) -> Any:
        at: int = self._pos  # type: ignore[has-type] # untyped library
        read = super()._read_msg
        try:
            return read()
        except UnicodeDecodeError:
            # Parse the rest of the batch leniently too, so that one copy is enough.
            self._buffer = _Buffer(self._buffer)  # type: ignore[has-type]
            self._pos = at
            return read()


def keep_last_data(transport: Any) -> None:
    """Make a transport return received data before an error.

    The socket reports the error again at the next read.
    """
    _receive_by(transport, _received)


def _receive_by(transport: Any, receive: Callable[..., tuple[bytes, Any]]) -> None:
    """Make a transport receive by a function; it gets the original one as argument.

    Does nothing in a release of kafka-python without the patched attribute.
    """
    ordinary = getattr(transport, "_sock_recv", None)
    if ordinary is not None:
        transport._sock_recv = partial(receive, ordinary)  # noqa: SLF001


def _received(
    original: Callable[[], tuple[bytes, Exception | None]],
) -> tuple[bytes, Exception | None]:
    data, error = original()
    return data, None if data else error


def read_in_place(consumer: Any, *, selector: CallerSelector | None = None) -> None:
    """Make new connections of a consumer read responses into their buffers.

    Args:
        consumer: A consumer of kafka-python.
        selector: Its event loop; with it large responses are received in the
            background.
    """
    network_of(consumer).manager.changes.append(
        partial(_read_transport_in_place, selector=selector)
    )


def _read_transport_in_place(
    transport: Any, *, selector: CallerSelector | None
) -> None:
    _receive_by(transport, partial(receive, transport, selector=selector))


def receive(
    transport: Any,
    ordinary: Callable[[], tuple[bytes, Exception | None]],
    *,
    selector: CallerSelector | None = None,
) -> tuple[bytes, Exception | None]:
    """Receive available bytes of a socket into the buffers of responses.

    Errors are left to ``ordinary``, after the bytes received before them.

    Args:
        transport: kafka-python's transport of the socket.
        ordinary: kafka-python's function to receive.
        selector: Event loop that waits for the socket; with it large responses are
            received in the background.

    Returns:
        Data for kafka-python to parse, mostly none, and an error.
    """
    sock = transport._sock  # noqa: SLF001 - there is no other way in
    connection = transport.get_protocol()
    parser = getattr(connection, "parser", None)
    if sock is None or parser is None:
        return ordinary()
    if not isinstance(parser, ResponseReader):
        parser = ResponseReader.replace(parser, connection.config)
        connection.parser = parser
    try:
        has_received = parser.receive_from(sock, selector)
    except MemoryError as error:
        # If raised, it would end the task that reads, but not the connection.
        return b"", error
    return (b"", None) if has_received else ordinary()


@attrs.define(eq=False)
class TopicIds:
    """Topic ids by which the partitions of a reader are fetched.

    The reader's thread changes ``wanted``; kafka-python's thread makes requests and
    handles responses.

    Attributes:
        wanted: Topic id by partition. Fixed for the life of a consumer, because its
            fetch session identifies partitions by name.
        refused: Partitions whose last fetch found no topic of their id.
    """

    wanted: dict[TopicPartition, uuid.UUID] = attrs.field(factory=dict)
    refused: set[TopicPartition] = attrs.field(factory=set)
    _has_warned: bool = False

    def set_id(self, partition: TopicPartition, topic_id: bytes | None) -> bool:
        """Set the id of a partition; return whether it replaces another one."""
        before = self.wanted.get(partition)
        wanted = None if topic_id is None else uuid.UUID(bytes=topic_id)
        if wanted is None:
            self.wanted.pop(partition, None)
        else:
            self.wanted[partition] = wanted
        self.refused.discard(partition)
        return before is not None and before != wanted

    def raise_refused(self, partitions: Collection[TopicPartition]) -> None:
        """Raise for one partition whose last fetch found no topic of its id.

        Raises:
            UnknownTopicId: There is such a partition.
        """
        for partition in list(self.refused):
            self.refused.discard(partition)
            if partition in partitions:
                raise unknown_topic_error(partition)

    def _split(self, topics: Sequence[Any], known: Any) -> list[Any]:
        """Return the entries of a request, one for each topic id."""
        found: dict[tuple[str, uuid.UUID], Any] = {}
        for topic in topics:
            other = known.topic_id(topic.topic) or _NONE
            for each in topic.partitions:
                # Forgotten partitions are plain numbers.
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

    def apply_to_request(self, request: Any, known: Any) -> dict[uuid.UUID, str]:
        """Make a fetch request use topic ids, if there are any.

        Then every request uses them, even if it has no partition: a broker refuses a
        fetch session with requests by id and by name.

        Args:
            request: kafka-python's request.
            known: kafka-python's metadata, for partitions without an id here.

        Returns:
            Topic names by id; empty if the request uses names.
        """
        if not self.wanted:
            return {}
        request.topics = self._split(request.topics, known)
        if request.forgotten_topics_data:
            request.forgotten_topics_data = self._split(
                request.forgotten_topics_data, known
            )
        request._max_version = FETCH_VERSION  # noqa: SLF001 - there is no other way in
        return {topic.topic_id: topic.topic for topic in request.topics}

    def restore_names(self, response: Any, names: Mapping[uuid.UUID, str]) -> None:
        """Replace topic ids in a response by names, which kafka-python expects.

        Args:
            response: kafka-python's response.
            names: Topic names by id.
        """
        is_by_id = response.API_VERSION >= FETCH_VERSION
        if self.wanted and not is_by_id and not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "A broker is older than Kafka 3.1 and cannot be asked for a topic by "
                "its id: where %s is deleted and created again, its records may be "
                "taken for those of the earlier one. Upgrade the brokers, or use "
                "transport fast (pip install 'kafka-marshal[fast]').",
                ", ".join(sorted({each.topic for each in self.wanted})),
            )
        for topic in response.responses:
            if is_by_id:
                topic.topic = names.get(topic.topic_id, "")
            for each in topic.partitions:
                partition = TopicPartition(topic.topic, each.partition_index)
                if each.error_code in _UNKNOWN:
                    self.refused.add(partition)
                else:
                    self.refused.discard(partition)


def fetch_by_id(consumer: Any, ids: TopicIds) -> None:
    """Make a consumer fetch by these topic ids."""
    fetcher = fetcher_of(consumer)
    make = fetcher._create_fetch_requests  # noqa: SLF001
    # Kept between requests: in a fetch session, they leave out unchanged partitions.
    names: dict[uuid.UUID, str] = {}

    def make_by_id() -> Any:
        requests = make()
        for request, _ in requests.values():
            known = network_of(consumer).cluster
            names.update(ids.apply_to_request(request, known))
        return requests

    def handle_by_id(handle: Callable[[], None], response: Any) -> None:
        ids.restore_names(response, names)
        handle()

    fetcher._create_fetch_requests = make_by_id  # noqa: SLF001
    _wrap_handler(fetcher, handle_by_id)
