"""Causes of failed connections of kafka-python; calls of the admin client."""

import logging
import signal
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
from kafka import KafkaConsumer, KafkaProducer, errors
from kafka.net.sasl.oauth import AbstractTokenProvider

from kafka_marshal.errors import CoordinationError, MarshalError
from kafka_marshal.kafka_io import clients
from kafka_marshal.kafka_io.clients import AdminClient, ConnectionWatch
from kafka_marshal.kafka_io.faults import Access
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.tls_files import Stores
from kafka_marshal.kafka_io.translate import NoTokenError, translate_error

WRONG_PASSWORD = errors.SaslAuthenticationFailedError("who?")


class Network:
    """The network of a client, whose connections fail on another thread."""

    own: ConnectionWatch | None = None

    def __init__(self):
        self.is_closed = False
        self.is_over = False

    def fail(self, error, address=None):
        thread = threading.Thread(
            target=clients._note_failure, args=(self, self.own, error, address)
        )
        thread.start()
        thread.join(30)

    def stop(self):
        if self.is_over:
            raise RuntimeError("NetworkSelector closed!")
        self.is_closed = True


@pytest.fixture
def watch():
    with ConnectionWatch() as watch:
        yield watch


@pytest.fixture
def network(watch):
    network = Network()
    watch.add(network)
    return network


def test_a_client_reports_failures_to_its_own_watch_only():
    """The watch need not be entered as a context manager."""
    network, other = Network(), Network()
    own = network.own = ConnectionWatch()
    network.fail(errors.KafkaConnectionError("cut off"))
    other.fail(errors.KafkaConnectionError("certificate expired"))
    assert str(own.last) == "KafkaConnectionError: cut off"


def test_a_refusal_of_a_watched_client_is_recorded(watch, network):
    network.fail(WRONG_PASSWORD)
    assert watch.refused is WRONG_PASSWORD
    watch.stop()
    assert network.is_closed
    assert watch.is_stopped


def test_a_stopped_watch_skips_closed_clients(watch, network):
    network.is_over = True
    later = Network()
    watch.add(later)
    watch.stop()
    assert later.is_closed


def test_an_untrusted_certificate_is_a_permanent_refusal(watch, network):
    error = errors.KafkaConnectionError("handshake")
    error.__context__ = ssl.SSLCertVerificationError("self-signed")
    network.fail(error)
    assert watch.refused is error.__context__
    assert (watch.refusal, watch.last) == (None, error)


def test_a_refused_certificate_of_this_client_is_a_permanent_refusal(watch, network):
    error = errors.KafkaConnectionError("[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED]")
    network.fail(error)
    assert watch.refused is error


def test_a_connection_reset_is_not_a_refusal(watch, network):
    error = errors.KafkaConnectionError("reset")
    network.fail(error)
    assert (watch.refused, watch.refusal, watch.last) == (None, None, error)
    assert "reset" in watch.reason()


def test_a_tls_error_explains_a_failure_until_another_error_follows(watch, network):
    error = errors.KafkaConnectionError("Handshake failed: [SSL: WRONG_VERSION_NUMBER]")
    network.fail(error)
    assert (watch.refused, watch.explained()) == (None, error)
    network.fail(errors.KafkaConnectionError("reset"))
    assert watch.explained() is None


def test_an_unresolvable_advertised_address_explains_a_failure(watch, network):
    network.fail(errors.KafkaConnectionError("DNS failure"), "kafka-0.internal:9092")
    explained = watch.explained()
    assert "kafka-0.internal:9092: KafkaConnectionError: DNS" in str(explained)
    made = translate_error(
        explained, doing="Describing", access=Access.READ, addresses="here:9092"
    )
    assert "a broker at here:9092 answered" in str(made)
    assert "advertised.listeners" in str(made)


def test_a_tls_error_is_reported_before_the_advertised_address(watch, network):
    error = errors.KafkaConnectionError("Handshake failed: [SSL: WRONG_VERSION_NUMBER]")
    network.fail(error, "kafka-0.internal:9092")
    assert watch.explained() is error


def test_a_failing_token_provider_explains_a_failure(watch, network):
    class Provider:
        def token(self):
            raise OSError("503")

    with pytest.raises(NoTokenError) as raised:
        clients._Tokens(Provider()).token()
    network.fail(raised.value)
    made = translate_error(
        watch.explained(), doing="Describing", access=Access.READ, addresses="a:1"
    )
    assert "no token could be obtained" in str(made)
    assert "OSError: 503" in str(made)


def test_a_token_provider_needs_no_base_class():
    made = clients._Tokens(SimpleNamespace(token=lambda: "abc"))
    assert (made.token(), made.extensions()) == ("abc", {})
    passed = {}
    options = {"sasl_oauth_token_provider": made, "bootstrap_servers": "a:1"}
    clients.new_client(lambda **given: passed.update(given), options)
    assert isinstance(passed["sasl_oauth_token_provider"], AbstractTokenProvider)


def test_refusals_of_other_clients_are_not_recorded(watch, network):
    """One of two clusters may refuse the login while a call waits for the other."""
    Network().fail(WRONG_PASSWORD)
    assert watch.refused is None
    assert watch.refusal is WRONG_PASSWORD
    assert not network.is_closed


def test_an_ended_watch_records_no_refusal():
    network = Network()
    with ConnectionWatch() as watch:
        watch.add(network)
    network.fail(WRONG_PASSWORD)
    assert watch.refused is None


@pytest.mark.parametrize("level", [logging.WARNING, logging.CRITICAL])
def test_the_error_names_the_reason_at_any_log_level(caplog, level):
    """Applications may silence the loggers of kafka-python."""
    caplog.set_level(level, logger="kafka")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        admin = AdminClient(ConnectionConfig(f"127.0.0.1:{port}"))
        with pytest.raises(MarshalError, match="ECONNREFUSED"):
            admin.call(
                lambda client: client.describe_cluster(),
                doing="Describing the cluster",
                access=Access.READ,
                timeout_ms=1_000,
            )


@pytest.mark.parametrize("kind", [KafkaConsumer, KafkaProducer])
def test_a_client_for_a_topic_without_a_broker_times_out(kind):
    """Otherwise a writer that connects again during a close would never end."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        config = {"bootstrap_servers": address, "bootstrap_timeout_ms": 200}
        with pytest.raises(errors.KafkaTimeoutError):
            clients.new_client(kind, config, topic="orders")


def test_a_failed_connection_reads_a_renewed_keystore_again(tmp_path, monkeypatch):
    """kafka-python loads the PEM files made from a keystore for each connection."""
    store, made = tmp_path / "own.p12", []
    store.write_bytes(b"renewed")
    stores = Stores()
    monkeypatch.setattr(clients, "stores", stores)
    stores.follow(
        str(store), "ssl.keystore", version=(), make=lambda: made.append(store)
    )
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        config = {"bootstrap_servers": address, "bootstrap_timeout_ms": 200}
        with pytest.raises(errors.KafkaTimeoutError):
            clients.new_client(KafkaProducer, config)
    assert made == [store]


@pytest.fixture
def silent_broker():
    """Return a listening socket that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        yield server


@pytest.fixture
def watches(monkeypatch):
    """Return the watches of all calls; stop their networks and threads at the end."""
    made = []
    others = frozenset(threading.enumerate())

    def new_watch():
        made.append(ConnectionWatch())
        return made[-1]

    monkeypatch.setattr(clients, "ConnectionWatch", new_watch)
    yield made
    for each in made:
        each.stop()
    for thread in frozenset(threading.enumerate()) - others:
        if thread.name.startswith("kafka-io-"):
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.usefixtures("watches")
def test_close_does_not_wait_for_a_connecting_call(silent_broker):
    port = silent_broker.getsockname()[1]
    admin = AdminClient(ConnectionConfig(f"127.0.0.1:{port}"))
    ended = []

    def look():
        try:
            admin.call(
                lambda client: client.describe_cluster(),
                doing="Describing the cluster",
                access=Access.READ,
                timeout_ms=600_000,
            )
        except MarshalError as error:
            ended.append(error)

    # As after Ctrl-C: the connecting call has minutes left.
    threading.Thread(target=look, daemon=True).start()
    connection, _ = silent_broker.accept()
    with connection:
        closing = threading.Thread(
            target=admin.close, kwargs={"timeout_ms": 10}, daemon=True
        )
        closing.start()
        closing.join(60)
        assert not closing.is_alive()
        assert not ended


class FakeClient:
    """A client that counts how often it is closed."""

    def __init__(self, config):
        self.config = config
        self.closed_count = 0

    def close(self):
        self.closed_count += 1


@pytest.fixture
def made(monkeypatch):
    """Replace kafka-python's clients by fakes; return those that are made."""
    found = []

    def make(kind, config, **_):
        found.append(FakeClient(config))
        return found[-1]

    monkeypatch.setattr(clients, "new_client", make)
    return found


def test_a_call_is_repeated_if_another_call_closed_its_client(made):
    """It fails with any error of kafka-python, and must not close the new client."""
    admin = AdminClient(ConnectionConfig("127.0.0.1:1"))
    has_begun, may_fail = threading.Event(), threading.Event()

    def call(work):
        return admin.call(work, doing="Asking", access=Access.READ, timeout_ms=60_000)

    def slow(client):
        if client is made[0]:
            has_begun.set()
            assert may_fail.wait(60)
            raise RuntimeError("NetworkSelector closed!")
        return client

    def failing(client):
        if client is made[0]:
            raise errors.NodeNotReadyError("connecting")
        return client

    answers = []
    thread = threading.Thread(target=lambda: answers.append(call(slow)), daemon=True)
    thread.start()
    assert has_begun.wait(60)
    assert call(failing) is made[1]
    may_fail.set()
    thread.join(60)
    assert answers == [made[1]]
    assert [each.closed_count for each in made] == [1, 0]


def test_the_limit_of_requests_in_flight_admits_all_calls(made):
    """All clients of a sidecar may query the end of a log at the same time."""
    admin = AdminClient(ConnectionConfig("127.0.0.1:1"))
    admin.call(lambda _: None, doing="Asking", access=Access.READ, timeout_ms=60_000)
    most = made[0].config["max_in_flight_requests_per_connection"]
    assert most >= clients._CALLS_MAX


@pytest.mark.usefixtures("made")
def test_a_call_runs_on_the_thread_of_its_caller():
    """A thread per call is too slow: Spark makes more than a hundred calls a second."""
    admin = AdminClient(ConnectionConfig("127.0.0.1:1"))
    answer = admin.call(
        lambda _: threading.get_ident(),
        doing="Asking",
        access=Access.READ,
        timeout_ms=60_000,
    )
    assert answer == threading.get_ident()


@pytest.mark.usefixtures("made")
def test_a_request_without_an_answer_ends_at_the_call_deadline():
    admin = AdminClient(ConnectionConfig("127.0.0.1:1"))
    for timeout_ms in (0, 1):
        with pytest.raises(CoordinationError, match=f"no answer within {timeout_ms}"):
            admin.call(
                lambda _: admin._limits.wait(threading.Event()),
                doing="Asking",
                access=Access.READ,
                timeout_ms=timeout_ms,
            )


def test_a_call_waits_for_a_connecting_call_until_its_deadline(silent_broker, watches):
    port = silent_broker.getsockname()[1]
    admin = AdminClient(ConnectionConfig(f"127.0.0.1:{port}"))

    def call(timeout_ms):
        admin.call(
            lambda _: None, doing="Asking", access=Access.READ, timeout_ms=timeout_ms
        )

    def connect():
        with suppress(MarshalError):
            call(600_000)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    connection, _ = silent_broker.accept()
    with connection:
        with pytest.raises(CoordinationError, match="no answer within 1 ms"):
            call(1)
        for each in watches:
            each.stop()
        thread.join(60)
        assert not thread.is_alive()


def test_a_call_is_repeated_while_metadata_lists_no_controller(made):
    """The controller may have just started, or be restarting."""
    admin = AdminClient(ConnectionConfig("127.0.0.1:1"))

    def ask(client):
        if client is made[0]:
            raise errors.UnknownBrokerIdError(1)
        return client

    found = admin.call(ask, doing="Asking", access=Access.READ, timeout_ms=60_000)
    # The old client never forgets the earlier controller, so a new one asks.
    assert found is made[1]
    assert [each.closed_count for each in made] == [1, 0]


def test_a_permanent_error_of_a_call_is_raised(made):
    admin = AdminClient(ConnectionConfig("127.0.0.1:1"))

    def fail(client):
        raise RuntimeError("a bug")

    with pytest.raises(MarshalError, match="a bug"):
        admin.call(fail, doing="Asking", access=Access.READ, timeout_ms=60_000)
    assert [each.closed_count for each in made] == [0]


@pytest.mark.usefixtures("made")
def test_a_call_raises_an_exception_of_a_signal_handler_unchanged():
    admin = AdminClient(ConnectionConfig("127.0.0.1:1"))

    def end(*_):
        raise LookupError("over")

    before = signal.signal(signal.SIGUSR1, end)
    try:
        with pytest.raises(LookupError):
            admin.call(
                lambda _: signal.raise_signal(signal.SIGUSR1),
                doing="Asking",
                access=Access.READ,
                timeout_ms=60_000,
            )
    finally:
        signal.signal(signal.SIGUSR1, before)


UNDER_O = """
from kafka.admin import KafkaAdminClient
from kafka_marshal.kafka_io.clients import new_client
new_client(KafkaAdminClient, {"bootstrap_servers": "127.0.0.1:1"})
"""


def test_kafka_python_without_assertions_is_refused():
    """It decodes within an ``assert``; without, it would retry until the deadline."""
    done = subprocess.run(
        [sys.executable, "-O", "-c", UNDER_O],
        check=False,
        capture_output=True,
        text=True,
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kafka_marshal.errors.ConfigurationError: kafka-python")
