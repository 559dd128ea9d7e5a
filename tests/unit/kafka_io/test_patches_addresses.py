"""Which addresses clients of kafka-python connect to, and for how long."""

from types import SimpleNamespace

import pytest
from kafka.errors import KafkaConnectionError
from kafka.future import Future
from kafka.net.manager import KafkaConnectionManager

from kafka_marshal.kafka_io import patches as module
from kafka_marshal.kafka_io.patches import Network


class Connecting:
    """A connection that is not established yet."""

    def __init__(self):
        self.init_future = Future()


@pytest.fixture
def limits_ms(monkeypatch):
    """Return the timeouts of all connection attempts, which the test ends."""
    found = []

    def connect(manager, node_id, timeout_ms=None, **settings):
        del manager, node_id, settings
        found.append(timeout_ms)
        return Connecting()

    monkeypatch.setattr(KafkaConnectionManager, "get_connection", connect)
    return found


def test_bootstrap_addresses_take_turns_with_growing_timeouts(limits_ms):
    network = Network({"bootstrap_servers": ["a:1", "b:1"]})
    drawn = []
    for _ in range(4):
        (node, *_) = network.cluster.bootstrap_brokers()
        drawn.append(node.node_id)
        made = network.manager.get_connection(node.node_id, timeout_ms=30_000)
        made.init_future.failure(KafkaConnectionError("silent"))
    network.close()
    assert set(drawn[:2]) == set(drawn[2:])
    assert len(set(drawn)) == 2
    assert limits_ms == [3_000, 3_000, 6_000, 6_000]


def test_the_connect_timeout_of_a_failing_address_is_capped(limits_ms):
    """After an outage a client connects without a timeout of its own."""
    network = Network({"bootstrap_servers": ["a:1"]})
    (node,) = network.cluster.bootstrap_brokers()
    for _ in range(20):
        made = network.manager.get_connection(node.node_id)
        made.init_future.failure(KafkaConnectionError("refused"))
    network.close()
    assert limits_ms[-1] == max(limits_ms) == 24_000


@pytest.mark.parametrize(
    ("advertised", "shown"), [("a", None), ("a.internal", "a.internal:1")]
)
def test_a_failure_reports_an_advertised_address_not_configured(
    monkeypatch, advertised, shown
):
    made = Connecting()
    monkeypatch.setattr(KafkaConnectionManager, "get_connection", lambda *_, **__: made)
    network = Network({"bootstrap_servers": "a:1"})
    node = SimpleNamespace(host=advertised, port=1)
    monkeypatch.setattr(network.cluster, "broker_metadata", lambda _: node)
    failed = []
    network.manager.failed = lambda error, address: failed.append((error, address))
    network.manager.get_connection(7)
    error = KafkaConnectionError("no such name")
    made.init_future.failure(error)
    network.close()
    assert failed == [(error, shown)]


@pytest.fixture
def lost(monkeypatch):
    """A network that knows brokers 1 and 2, none of which it has reached yet."""
    network = Network({"bootstrap_servers": "a:1"})
    made = {}

    def connect(manager, node_id, timeout_ms=None, **settings):
        del manager, timeout_ms, settings
        made[node_id] = Connecting()
        return made[node_id]

    monkeypatch.setattr(KafkaConnectionManager, "get_connection", connect)
    known = {n: SimpleNamespace(node_id=n, host="old", port=n) for n in (1, 2)}
    monkeypatch.setattr(network.cluster, "brokers", lambda: [*known.values()])
    monkeypatch.setattr(network.cluster, "broker_metadata", known.get)
    returns = []
    monkeypatch.setattr(network.manager, "bootstrap_async", returns.append)

    def fail(node_id):
        network.manager.get_connection(node_id)
        made[node_id].init_future.failure(KafkaConnectionError("refused"))
        network.manager.update_backoff(node_id)

    yield SimpleNamespace(manager=network.manager, fail=fail, returns=returns)
    network.close()


def test_a_client_returns_to_its_bootstrap_addresses_once_all_brokers_are_lost(lost):
    lost.fail(1)
    lost.fail(2)
    assert lost.returns == []  # broker 2 has failed only once
    lost.fail(1)
    assert lost.returns == [module._RETURN_MS]


def test_a_client_with_a_connected_broker_does_not_return_to_its_addresses(lost):
    lost.manager._conns[2] = SimpleNamespace(connected=True)
    for each in (1, 2, 1, 2):
        lost.fail(each)
    assert lost.returns == []
    lost.manager._conns[2].connected = False
    lost.fail(1)
    assert lost.returns == [module._RETURN_MS]
    lost.manager._conns.clear()


def test_a_closed_client_does_not_return_to_its_addresses(lost):
    lost.manager.closed = True
    for each in (1, 2, 1, 2):
        lost.fail(each)
    lost.manager.closed = False
    assert lost.returns == []
