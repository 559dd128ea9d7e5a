"""Patches of kafka-python: headers, connections, responses, leaders, topic ids."""

import asyncio
import fcntl
import gc
import inspect
import select
import socket
import ssl
import struct
import subprocess
import sys
import termios
import uuid
import weakref
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import untouched
from batchkit import BadText, new_batch
from kafka import TopicPartition as KafkaTopicPartition
from kafka.errors import (
    CorruptRecordError,
    KafkaConnectionError,
    UnknownTopicOrPartitionError,
)
from kafka.future import Future
from kafka.net.manager import KafkaConnectionManager
from kafka.net.transport import KafkaTCPTransport
from kafka.protocol.consumer import FetchRequest, FetchResponse
from kafka.protocol.metadata import MetadataRequest
from kafka.protocol.parser import KafkaProtocol
from kafka.record.default_records import DefaultRecordBatch
from slowness import until

from kafka_marshal.errors import UnknownTopicId
from kafka_marshal.kafka_io import patches as module
from kafka_marshal.kafka_io.driving import CallerSelector
from kafka_marshal.kafka_io.patches import (
    FETCH_VERSION,
    Admin,
    LenientBatch,
    Network,
    TopicIds,
    fetch_ahead,
    fetch_by_id,
    keep_last_data,
    read_in_place,
    receive,
    request_updates_once,
)
from kafka_marshal.kafka_io.responses import Buffers, ResponseReader
from kafka_marshal.kafka_io.throttling import Throttling
from kafka_marshal.protocol.types import TopicPartition

UNTOUCHED = Path(untouched.__file__)
A, B, C = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("u", 0)
OLD, NEW, OTHER = (uuid.UUID(int=number) for number in (1, 2, 3))
UNKNOWN_TOPIC_ID, INCONSISTENT_TOPIC_ID = 100, 103


def batch(*headers) -> bytes:
    builder = new_batch()
    for offset, pairs in enumerate(headers):
        builder.append(
            offset, timestamp=1, key=b"k", value=b"%d" % offset, headers=pairs
        )
    return bytes(builder.build())


def test_a_lenient_batch_replaces_invalid_bytes_of_a_header_name():
    raw = batch([("good", b"1")], [(BadText("b"), b"2")], [("last", None)])
    with pytest.raises(CorruptRecordError):
        list(DefaultRecordBatch(bytearray(raw)))
    records = list(LenientBatch(bytearray(raw)))
    assert [record.value for record in records] == [b"0", b"1", b"2"]
    assert [record.headers for record in records] == [
        [("good", b"1")],
        [("a\ufffd", b"2")],
        [("last", None)],
    ]


def test_a_lenient_batch_reads_valid_batches_like_kafka_python():
    raw = batch([], [("h", b"v")], [("\u65e5", b"")])
    ours = list(LenientBatch(bytearray(raw)))
    theirs = list(DefaultRecordBatch(bytearray(raw)))
    assert [(r.offset, r.key, r.value, r.headers) for r in ours] == [
        (r.offset, r.key, r.value, r.headers) for r in theirs
    ]


def test_data_received_with_a_close_is_returned_first():
    """A refused login and the close arrive together; the refusal must be read."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        transport = KafkaTCPTransport(None, ours, "broker")
        keep_last_data(transport)
        theirs.sendall(b"no")
        theirs.close()
        assert transport._sock_recv() == (b"no", None)
        data, error = transport._sock_recv()
        assert data == b""
        assert "disconnected" in str(error)


@pytest.fixture
def network():
    made = Network({"bootstrap_servers": "localhost:9"})
    yield made
    made.close()


def test_a_pending_metadata_request_is_not_requested_again(network):
    cluster = network.cluster
    woken = []
    cluster._wakeup = SimpleNamespace(notify=lambda: woken.append(True))
    cluster._refresh_loop_future = True  # as if its loop ran: there is no broker
    request_updates_once(SimpleNamespace(_metadata=cluster))
    first = cluster.request_update()
    assert cluster.request_update() is first
    assert len(woken) == 1
    cluster.failed_update(ValueError())
    second = cluster.request_update()
    assert second is not first
    assert not second.is_done
    assert len(woken) == 2
    # A partial answer completes a request, but an update is still needed.
    second.success(cluster)
    assert cluster.need_update
    assert cluster.request_update() is not second


@pytest.fixture
def transport(monkeypatch):
    """Return the transport of every connection attempt of kafka-python."""
    made = SimpleNamespace(_sock_recv=lambda: (b"", None))

    async def build(self, node, *, timeout_at):
        assert (node, timeout_at) == ("node", 5)
        return made

    monkeypatch.setattr(KafkaConnectionManager, "_build_transport", build)
    return made


def connect(network):
    return asyncio.run(network.manager._build_transport("node", timeout_at=5))


def test_a_new_transport_is_patched_before_its_use(network, transport):
    changed = []
    network.manager.changes.append(changed.append)
    assert connect(network) is transport
    assert changed == [transport]
    assert transport._sock_recv.func is module._received


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_sockets_of_failed_connection_attempts_are_closed_at_once(network, monkeypatch):
    """Both the socket of the last address and those of earlier ones."""
    last, earlier = [], []

    def attempt():
        sock = socket.socket()
        earlier.append(weakref.ref(sock))
        raise OSError("refused")

    async def build(self, node, *, timeout_at):
        errors = []
        try:
            attempt()
        except OSError as error:
            errors.append(error)
        sock = socket.socket()
        last.append(sock)
        errors.append(KafkaConnectionError("refused"))
        raise errors[-1]

    monkeypatch.setattr(KafkaConnectionManager, "_build_transport", build)
    gc.disable()
    try:
        with pytest.raises(KafkaConnectionError):
            connect(network)
        assert [each.fileno() for each in last] == [-1]
        assert [each() for each in earlier] == [None]
    finally:
        gc.enable()


def test_a_failed_connection_is_reported_once(network):
    failed = []
    network.manager.failed = lambda error, address: failed.append((error, address))
    connection = network.manager.get_connection("bootstrap-0")
    assert network.manager.get_connection("bootstrap-0") is connection
    error = ConnectionResetError()
    connection.connection_lost(error)
    assert failed == [(error, None)]


def test_throttling_of_responses_is_recorded(network, monkeypatch):
    monkeypatch.setattr(module, "throttling", noted := Throttling())
    sent = []
    monkeypatch.setattr(
        KafkaConnectionManager,
        "send",
        lambda *_, **__: sent.append(Future()) or sent[-1],
    )
    for response in (
        SimpleNamespace(),
        SimpleNamespace(throttle_time_ms=3_000),
        SimpleNamespace(throttle_time_ms=0),
    ):
        assert network.manager.send(None, 1) is sent[-1]
        sent[-1].success(response)
    assert noted.longest_ms == 3_000


def test_a_network_stops_on_its_own_thread(network):
    network.stop()
    assert not network.manager.closed
    network.selector.start()
    until(lambda: network.manager.closed)


# --- Leaders ---


class Brokers:
    """Fake connections of an admin client to two brokers with one topic."""

    def __init__(self):
        self.leaders = [1, 2, 1]
        self.described = 0

    async def send(self, request, node_id=None):
        if isinstance(request, MetadataRequest):
            self.described += 1
            (topic,) = request.topics
            numbered = enumerate(self.leaders)
            rows = [
                SimpleNamespace(partition_index=n, leader_id=x) for n, x in numbered
            ]
            return SimpleNamespace(
                topics=[SimpleNamespace(name=topic.name, partitions=rows)]
            )
        (topic,) = request.topics
        rows = [
            SimpleNamespace(
                partition_index=each.partition_index,
                error_code=0 if self.leaders[each.partition_index] == node_id else 6,
                offset=100 * node_id + each.partition_index,
                timestamp=-1,
                leader_epoch=0,
            )
            for each in topic.partitions
        ]
        return SimpleNamespace(
            topics=[SimpleNamespace(name=topic.name, partitions=rows)]
        )


@pytest.fixture
def offsets(monkeypatch):
    """Return a function that queries offsets of partitions, and the brokers."""
    admin = Admin.__new__(Admin)
    brokers = Brokers()

    async def sleep(_):
        await asyncio.sleep(0)

    admin.config = {"retry_backoff_ms": 1, "request_timeout_ms": 60_000}
    admin._manager, admin._net = brokers, SimpleNamespace(sleep=sleep)
    admin._client = SimpleNamespace(manager=brokers)
    monkeypatch.setattr(module, "_LEADERS_S", 3_600)

    def ask(*numbers):
        wanted = {KafkaTopicPartition("t", number): -1 for number in numbers}
        found = asyncio.run(admin._async_list_partition_offsets(wanted))
        return {place.partition: each.offset for place, each in found.items()}

    return ask, brokers


def test_a_lookup_of_leaders_is_cached(offsets):
    ask, brokers = offsets
    assert ask(0, 1, 2) == {0: 100, 1: 201, 2: 102}
    assert ask(1) == {1: 201}
    assert brokers.described == 1


def test_leaders_are_looked_up_again_after_a_change(offsets, monkeypatch):
    ask, brokers = offsets
    monkeypatch.setattr(module, "_LEADERS_S", 0.05)
    ask(0)
    brokers.leaders[0] = 2
    assert ask(0, 1) == {0: 200, 1: 201}
    assert brokers.described >= 2


def test_a_partition_missing_in_the_cache_is_looked_up(offsets):
    ask, brokers = offsets
    ask(0)
    with pytest.raises(UnknownTopicOrPartitionError, match="partition=3"):
        ask(0, 3)
    brokers.leaders.append(1)
    assert ask(3) == {3: 103}


def test_cached_leaders_expire(offsets, monkeypatch):
    ask, brokers = offsets
    monkeypatch.setattr(module, "_LEADERS_S", 0)
    ask(0)
    ask(0)
    assert brokers.described == 2


def test_keep_last_data_ignores_a_transport_without_the_internal():
    made = SimpleNamespace()
    keep_last_data(made)
    assert vars(made) == {}


def test_kafka_python_has_the_patched_internals():
    assert inspect.iscoroutinefunction(KafkaConnectionManager._build_transport)
    assert hasattr(KafkaTCPTransport, "_sock_recv")


def test_the_import_changes_nothing_in_kafka_python():
    done = subprocess.run(
        [sys.executable, UNTOUCHED], check=True, capture_output=True, text=True
    )
    assert done.stdout == ""


CONFIG = {"client_id": "one", "receive_message_max_bytes": 10_000_000}


@pytest.fixture
def line():
    """A transport of kafka-python, its connection, and the broker's socket."""
    near, far = socket.socketpair()
    near.setblocking(False)
    far.settimeout(10)
    connection = SimpleNamespace(parser=KafkaProtocol(), config=CONFIG)
    transport = KafkaTCPTransport(None, near)
    transport.set_protocol(connection)
    yield transport, connection, far
    near.close()
    far.close()


def framed(body):
    return struct.pack(">i", len(body)) + body


def not_ordinary():
    pytest.fail("the ordinary way was taken")


def test_available_bytes_are_received_into_the_response_buffer(line):
    transport, connection, far = line
    far.sendall(framed(b"abcde")[:6])
    assert receive(transport, not_ordinary) == (b"", None)
    parser = connection.parser
    assert isinstance(parser, ResponseReader)
    assert len(parser.missing()) == 3
    assert receive(transport, not_ordinary) == (b"", None)
    far.sendall(b"cde")
    assert receive(transport, not_ordinary) == (b"", None)
    assert connection.parser is parser
    assert len(parser.missing()) == 0, "nothing was requested"


@pytest.fixture
def tcp():
    """Both sockets of a connection; the second does not block."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname(), timeout=10)
        near, _ = server.accept()
    near.setblocking(False)
    with far, near:
        yield far, near


def is_readable(sock):
    return bool(select.select([sock], [], [], 0)[0])


def wakeup_bytes(sock):
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such marks")
def test_a_large_response_raises_the_wakeup_threshold(tcp):
    far, near = tcp
    size = 200_000
    connection = SimpleNamespace(parser=KafkaProtocol(), config=CONFIG)
    transport = KafkaTCPTransport(None, near)
    transport.set_protocol(connection)
    data = framed(bytes(size))
    far.sendall(data[:1_004])
    until(lambda: is_readable(near), "the beginning")
    receive(transport, not_ordinary)
    parser = connection.parser
    assert (len(parser.missing()), wakeup_bytes(near)) == (199_000, 199_000)
    far.sendall(data[1_004:-1])
    waiting = struct.pack("i", 0)
    until(
        lambda: (
            struct.unpack("i", fcntl.ioctl(near, termios.FIONREAD, waiting))[0]
            == len(parser.missing()) - 1
        ),
        "all but one byte",
    )
    assert not is_readable(near)
    far.sendall(data[-1:])
    until(lambda: is_readable(near), "the last byte")
    receive(transport, not_ordinary)
    assert wakeup_bytes(near) == 1, "the next response may be small"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such marks")
def test_the_wakeup_threshold_stays_one_byte_over_tls(tcp):
    """TLS may have read missing bytes from the socket already."""
    _, near = tcp
    reader = ResponseReader(client_id="one", bytes_max=1_000_000)
    reader.missing()[:] = struct.pack(">i", 500_000)
    reader.advance(4)
    wrapped = ssl.create_default_context().wrap_socket(
        near, server_hostname="localhost", do_handshake_on_connect=False
    )
    with wrapped:
        reader.limit_wakeups(wrapped)
        assert wakeup_bytes(wrapped) == 1


def test_a_response_that_does_not_fit_in_memory_ends_the_connection(line, monkeypatch):
    transport, _, far = line

    def take(_, size):
        assert size == 5
        raise MemoryError

    monkeypatch.setattr(Buffers, "take", take)
    far.sendall(framed(b"abcde"))
    data, error = receive(transport, not_ordinary)
    assert (data, type(error)) == (b"", MemoryError)


def test_data_received_before_a_close_is_kept(line):
    transport, connection, far = line
    far.sendall(framed(b"abcde")[:6])
    far.close()
    assert receive(transport, not_ordinary) == (b"", None)
    assert len(connection.parser.missing()) == 3
    assert receive(transport, lambda: (b"", "closed")) == (b"", "closed")


def test_a_socket_error_is_left_to_kafka_python(line):
    transport, _, far = line
    far.close()
    transport._sock.close()
    assert receive(transport, lambda: (b"", "told")) == (b"", "told")


@pytest.mark.parametrize(
    ("sock", "protocol"),
    [(object(), None), (None, SimpleNamespace(parser=KafkaProtocol()))],
    ids=["before anybody listens", "once it is closed"],
)
def test_a_transport_without_a_parser_is_left_to_kafka_python(sock, protocol):
    transport = SimpleNamespace(_sock=sock, get_protocol=lambda: protocol)
    assert receive(transport, lambda: (b"x", None)) == (b"x", None)


def test_new_connections_receive_into_response_buffers(network, transport):
    read_in_place(SimpleNamespace(_client=network))
    connect(network)
    assert transport._sock_recv.func is receive
    assert transport._sock_recv.keywords == {"selector": None}


def test_a_caller_selector_is_passed_to_new_connections(network, transport):
    selector = CallerSelector({})
    read_in_place(SimpleNamespace(_client=network), selector=selector)
    connect(network)
    selector.close()
    assert transport._sock_recv.keywords == {"selector": selector}


class Requester:
    """A fake of kafka-python's fetcher; notes the responses that it handles."""

    def __init__(self):
        self.taken = []
        self.wanted = [A, B]
        self.forgotten = []

    def _create_fetch_requests(self):
        topics = {}
        for name, number in self.wanted:
            part = FetchRequest.FetchTopic.FetchPartition(
                partition=number, fetch_offset=7, partition_max_bytes=1
            )
            topics.setdefault(name, []).append(part)
        request = FetchRequest(
            topics=[
                FetchRequest.FetchTopic(topic=name, partitions=parts)
                for name, parts in topics.items()
            ],
            forgotten_topics_data=[
                FetchRequest.ForgottenTopic(topic=name, partitions=[number])
                for name, number in self.forgotten
            ],
            min_version=4,
            max_version=12,
        )
        return {1: (request, {})}

    def _handle_fetch_response(self, node, offsets, sent, response):
        self.taken.append(response)


class Known:
    """Topic ids in the metadata of the cluster."""

    def topic_id(self, name):
        return {"u": OTHER}.get(name)


KNOWN = SimpleNamespace(cluster=Known())


class Ahead:
    """A fake consumer that fetches ahead; also its own fetcher and selector.

    Partition 0 is assigned and behind its log end.

    Attributes:
        others: Positions and known log ends of the other partitions.
        used: Partitions without records whose state was read from a response.
        calls: Calls since the last ``respond``, in order.
        waits_ms: Wait limits of the fetches that were sent.
        error: Raised when a fetch is sent.
    """

    def __init__(self, *others, is_paused=False):
        self.places = {KafkaTopicPartition("t", 0): BEHIND} | {
            KafkaTopicPartition("t", number): each
            for number, each in enumerate(others, start=1)
        }
        self.calls = []
        self.config = {"fetch_max_wait_ms": 100}
        self.waits_ms = []
        self.error = None
        self._is_paused = is_paused
        self._client = SimpleNamespace(selector=self)
        self._subscription = SimpleNamespace(
            assignment={
                each: SimpleNamespace(
                    position=None if at is None else SimpleNamespace(offset=at)
                )
                for each, (at, _) in self.places.items()
            }
        )
        self._fetcher = self
        self._completed_fetches = deque()
        self.used = []
        self._next_partition_records = None
        fetch_ahead(self)

    def highwater(self, place):
        return self.places[place][1]

    def assignment(self):
        return set(self.places)

    def paused(self):
        return set(self.places) if self._is_paused else set()

    def _handle_fetch_response(self, node, offsets, sent, response):
        for topic in response.responses:
            for each in topic.partitions:
                place = KafkaTopicPartition(topic.topic, each.partition_index)
                fetch = SimpleNamespace(topic_partition=place, partition_data=each)
                self._completed_fetches.append(fetch)

    def _parse_fetched_data(self, fetch):
        self.used.append(fetch.topic_partition.partition)

    def send_fetches(self):
        self.calls.append("send")
        self.waits_ms.append(self.config["fetch_max_wait_ms"])
        if self.error is not None:
            raise self.error

    def flush(self):
        self.calls.append("flush")

    def fetched_records(self, count, *, update_offsets):
        self.calls.append(count)
        return update_offsets

    def respond(self, *topics, empty=()):
        """Handle a response, take records, and return the calls that this made.

        The partitions ``empty`` have no records.
        """
        self.calls.clear()
        response = answer(FETCH_VERSION, *topics)
        for topic in response.responses:
            for each in topic.partitions:
                each.records = None if each.partition_index in empty else b"batches"
        self._handle_fetch_response("node", {}, 0, response)
        assert self.fetched_records(5, update_offsets="that") == "that"
        return self.calls


BEHIND, AT_END, NEW_HERE = (3, 9), (9, 9), (None, None)
ARRIVED = ("t", 0, 0)
SENT = ["send", "flush", 5]


@pytest.mark.parametrize("others", [[BEHIND], [AT_END, BEHIND], [NEW_HERE, BEHIND]])
def test_the_next_fetch_is_sent_before_records_are_returned(others):
    consumer = Ahead(*others)
    assert consumer.respond(ARRIVED) == SENT
    assert consumer.respond(ARRIVED) == [5], "two are held now"
    consumer._completed_fetches.clear()
    assert consumer.respond(ARRIVED) == SENT


@pytest.mark.parametrize("others", [[], [AT_END, AT_END], [NEW_HERE], [(3, None)]])
def test_a_fetch_is_not_sent_ahead_without_partitions_behind(others):
    assert Ahead(*others).respond(ARRIVED) == [5]


def test_a_fetch_sent_ahead_has_no_wait_time():
    """If it waited, records of held partitions could not be fetched meanwhile."""
    consumer = Ahead(BEHIND)
    consumer.respond(ARRIVED)
    assert (consumer.waits_ms, consumer.config) == ([0], {"fetch_max_wait_ms": 100})
    consumer._completed_fetches.clear()
    consumer.error = RuntimeError("closed")
    with pytest.raises(RuntimeError, match="closed"):
        consumer.respond(ARRIVED)
    assert consumer.config == {"fetch_max_wait_ms": 100}


def test_a_fetch_of_paused_partitions_is_not_sent_ahead():
    assert Ahead(BEHIND, is_paused=True).respond(ARRIVED) == [5]


def test_a_fetch_is_not_sent_ahead_while_records_are_left():
    consumer = Ahead(BEHIND)
    consumer._next_partition_records = ["rest"]
    assert consumer.respond(ARRIVED) == [5]


def test_partitions_returned_without_records_are_fetched_again():
    """A full response lists them empty; kafka-python held such partitions back."""
    consumer = Ahead(BEHIND, BEHIND)
    places = [("t", number, 0) for number in range(3)]
    assert consumer.respond(*places, empty=[1, 2]) == SENT
    held = [each.topic_partition.partition for each in consumer._completed_fetches]
    assert (held, consumer.used) == ([0], [1, 2])


def test_a_partition_with_an_error_is_kept_for_kafka_python():
    consumer = Ahead(BEHIND)
    consumer.respond(ARRIVED, ("t", 1, UNKNOWN_TOPIC_ID), empty=[1])
    assert len(consumer._completed_fetches) == 2
    assert not consumer.used


def test_a_response_without_records_sends_no_fetch_ahead():
    consumer = Ahead(BEHIND)
    assert consumer.respond(ARRIVED, empty=[0]) == [5]
    assert consumer.used == [0]


def test_a_response_without_partitions_sends_no_fetch_ahead():
    assert Ahead(BEHIND).respond() == [5]


@pytest.fixture
def ids():
    return TopicIds()


@pytest.fixture
def fetcher(ids):
    made = Requester()
    fetch_by_id(SimpleNamespace(_fetcher=made, _client=KNOWN), ids)
    return made


def asked(fetcher):
    ((request, _),) = fetcher._create_fetch_requests().values()
    return request


def named(topics):
    return [
        (topic.topic, topic.topic_id, [getattr(p, "partition", p) for p in each])
        for topic in topics
        for each in [topic.partitions]
    ]


def answer(version, *topics):
    """Return a fetch response; a topic is (name or id, partition, error code)."""
    kind = FetchResponse.FetchableTopicResponse
    found = []
    for name, number, code in topics:
        part = kind.PartitionData(partition_index=number, error_code=code)
        how = {"topic": name} if isinstance(name, str) else {"topic_id": name}
        found.append(kind(partitions=[part], **how))
    return SimpleNamespace(API_VERSION=version, responses=found)


def test_requests_without_topic_ids_are_unchanged(ids, fetcher):
    ids.set_id(A, None)
    request = asked(fetcher)
    assert request._max_version == 12
    assert named(request.topics) == [("t", None, [0, 1])]


def test_partitions_are_fetched_by_the_topic_id_of_their_claim(ids, fetcher):
    fetcher.wanted = [A, B, C]
    fetcher.forgotten = [TopicPartition("u", 4)]
    ids.set_id(A, OLD.bytes)
    ids.set_id(B, NEW.bytes)
    request = asked(fetcher)
    assert request._max_version == FETCH_VERSION
    # Other partitions get the topic id of the cluster metadata.
    assert named(request.topics) == [
        ("t", OLD, [0]),
        ("t", NEW, [1]),
        ("u", OTHER, [0]),
    ]
    assert named(request.forgotten_topics_data) == [("u", OTHER, [4])]


@pytest.mark.parametrize("forgotten", [[], [A]], ids=["nothing", "some forgotten"])
def test_later_requests_of_a_session_use_topic_ids(ids, fetcher, forgotten):
    """A broker refuses a fetch session that changes from ids to names."""
    ids.set_id(A, OLD.bytes)
    asked(fetcher)
    fetcher.wanted, fetcher.forgotten = [], forgotten
    request = asked(fetcher)
    assert request._max_version == FETCH_VERSION
    assert named(request.forgotten_topics_data) == [("t", OLD, [0])] * len(forgotten)


def test_responses_by_topic_id_get_the_requested_topic_names(ids, fetcher):
    ids.set_id(A, OLD.bytes)
    ids.set_id(B, NEW.bytes)
    asked(fetcher)
    # Later requests of a session omit unchanged partitions.
    fetcher.wanted = []
    asked(fetcher)
    response = answer(FETCH_VERSION, (OLD, 0, 0), (NEW, 1, 0), (OTHER, 9, 0))
    fetcher._handle_fetch_response(1, {}, 0, response)
    assert [topic.topic for topic in fetcher.taken[0].responses] == ["t", "t", ""]
    ids.raise_refused([A, B])


@pytest.mark.parametrize("code", [UNKNOWN_TOPIC_ID, INCONSISTENT_TOPIC_ID])
def test_an_unknown_topic_id_is_raised_once_per_response(ids, fetcher, code):
    ids.set_id(A, OLD.bytes)
    asked(fetcher)
    for _ in range(2):
        response = answer(FETCH_VERSION, (OLD, 0, code))
        fetcher._handle_fetch_response(1, {}, 0, response)
        ids.raise_refused([B])
        fetcher._handle_fetch_response(1, {}, 0, response)
        with pytest.raises(UnknownTopicId) as caught:
            ids.raise_refused([A, B])
        assert caught.value.partition == A
        assert caught.value.retriable
        ids.raise_refused([A, B])
    fetcher._handle_fetch_response(1, {}, 0, answer(FETCH_VERSION, (OLD, 0, code)))
    fetcher._handle_fetch_response(1, {}, 0, answer(FETCH_VERSION, (OLD, 0, 0)))
    ids.raise_refused([A, B])


def test_an_old_broker_that_answers_by_name_is_warned_about_once(ids, fetcher, caplog):
    ids.set_id(A, OLD.bytes)
    asked(fetcher)
    for _ in range(2):
        fetcher._handle_fetch_response(1, {}, 0, answer(12, ("t", 0, 0)))
    assert [topic.topic for topic in fetcher.taken[0].responses] == ["t"]
    (warning,) = caplog.records
    assert "older than Kafka 3.1" in warning.getMessage()


def test_an_old_broker_is_not_warned_about_without_topic_ids(fetcher, caplog):
    asked(fetcher)
    fetcher._handle_fetch_response(1, {}, 0, answer(12, ("t", 0, 0)))
    assert not caplog.records


def test_set_id_returns_whether_a_topic_id_was_replaced(ids):
    assert not ids.set_id(A, None)
    assert not ids.set_id(A, OLD.bytes)
    assert not ids.set_id(A, OLD.bytes)
    assert ids.set_id(A, NEW.bytes)
    assert ids.set_id(A, None)
    assert ids.wanted == {}
