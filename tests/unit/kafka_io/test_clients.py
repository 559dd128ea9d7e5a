"""Why kafka-python could not connect, from its log; the admin client's threads."""

import logging
import socket
import ssl
import threading
from types import SimpleNamespace

import pytest
from kafka import errors

from kafka_marshal.errors import MarshalError
from kafka_marshal.kafka_io.clients import AdminClient, ConnectionWatch
from kafka_marshal.kafka_io.faults import Access
from kafka_marshal.kafka_io.settings import ConnectionConfig

LOGGER = logging.getLogger("kafka.net.manager")
WRONG_PASSWORD = errors.SaslAuthenticationFailedError("who?")
LINE = "Bootstrap connection to %s failed: %s"


class Network:
    """A client's network; everything it says, it says on a thread of its own."""

    def __init__(self):
        self.manager = SimpleNamespace(thread=None)
        self.is_closed = False
        self.is_over = False

    def warn(self, *arguments):
        thread = threading.Thread(target=self._connect, args=arguments)
        thread.start()
        thread.join(30)

    def _connect(self, *arguments):
        self.manager.thread = threading.get_ident()
        LOGGER.warning(LINE, "bootstrap-0", *arguments)

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


def test_a_refusal_of_a_watched_client_is_recorded(watch, network):
    network.warn(WRONG_PASSWORD)
    assert watch.refused is WRONG_PASSWORD
    watch.stop()
    assert network.is_closed
    assert watch.is_stopped


def test_stop_ignores_closed_clients(watch, network):
    network.is_over = True
    later = Network()
    watch.add(later)
    watch.stop()
    assert later.is_closed


def test_an_untrusted_certificate_is_a_permanent_refusal(watch, network):
    error = errors.KafkaConnectionError("handshake")
    error.__context__ = ssl.SSLCertVerificationError("self-signed")
    network.warn(error)
    assert watch.refused is error.__context__
    assert (watch.refusal, watch.last) == (None, error)


def test_transient_errors_are_no_refusals(watch, network):
    error = errors.KafkaConnectionError("reset")
    network.warn(error)
    assert (watch.refused, watch.refusal, watch.last) == (None, None, error)
    assert "reset" in watch.reason()


def test_refusals_of_other_clients_are_not_recorded(watch, network):
    """Of two clusters, one may be refused to us while we wait for the other."""
    Network().warn(WRONG_PASSWORD)
    LOGGER.warning(LINE, "bootstrap-0", WRONG_PASSWORD)
    assert watch.refused is None
    assert watch.refusal is WRONG_PASSWORD
    assert network.manager.thread is None


def test_nothing_is_recorded_afterwards(network, watch):
    watch.__exit__(None, None, None)
    network.warn(WRONG_PASSWORD)
    assert watch.refused is None


@pytest.fixture
def silent_broker():
    """Return a listening socket that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        yield server


def test_close_does_not_wait_for_a_call_that_connects(silent_broker):
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

    # As after a Ctrl-C: the thread that connects has minutes left.
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
