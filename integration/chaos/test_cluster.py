"""Three real brokers as one cluster: elections, replicas, and cleanup."""

import socket
from pathlib import Path

import embedded_cluster as module
import pytest
from embedded_cluster import EmbeddedCluster
from replicas import KafkaReplicas
from waiting import eventually

from kafka_marshal.errors import ConfigurationError, DeadlineExceeded, InvalidTransition
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topics import KafkaTopicAdmin
from kafka_marshal.testing.broker import PortTaken


@pytest.fixture(scope="module")
def topics(cluster):
    with KafkaTopicAdmin(ConnectionConfig(cluster.bootstrap_servers)) as topics:
        yield topics


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_all_nodes_form_one_cluster(cluster, topics):
    # A busy machine may fence a node for a moment.
    eventually(
        lambda: [each.node_id for each in topics.cluster().brokers] == [1, 2, 3],
        "all three nodes are brokers",
    )
    found = topics.cluster()
    assert found.cluster_id == cluster.cluster_id
    addresses = [f"{broker.host}:{broker.port}" for broker in found.brokers]
    assert ",".join(addresses) == cluster.bootstrap_servers
    assert cluster.controller() in {1, 2, 3}


def test_a_killed_leader_is_replaced_and_rejoins_in_sync(cluster, topics, unique):
    topic = unique("copied")
    topics.create_data_topic(topic, partitions=3)
    cluster.wait_in_sync(topic)
    assert set(cluster.leaders(topic).values()) == {1, 2, 3}
    victim = cluster.leader(topic, 0)
    cluster.kill(victim)
    others = {1, 2, 3} - {victim}
    cluster.wait_in_sync(topic, nodes=others)
    assert set(cluster.leaders(topic).values()) <= others
    with pytest.raises(DeadlineExceeded, match="in sync"):
        cluster.wait_in_sync(topic, timeout_ms=1)
    cluster.restart(victim)
    cluster.wait_in_sync(topic)
    with KafkaReplicas(ConnectionConfig(cluster.bootstrap_servers)) as replicas:
        rows = replicas.of(topic)
        assert all(sorted(row.nodes) == [1, 2, 3] for row in rows)
        assert replicas.of(unique("none")) == ()


def test_a_paused_node_continues_after_resume(cluster):
    node = cluster.nodes[2]
    cluster.pause(2)
    eventually(lambda: state(node.pid) == "T", "it is stopped")
    cluster.resume(2)
    eventually(lambda: state(node.pid) != "T", "it runs")


def test_a_running_cluster_cannot_be_started_again(cluster):
    with pytest.raises(InvalidTransition, match="was started"):
        cluster.start()


@pytest.mark.proof
def test_a_stopped_cluster_leaves_no_process_and_no_folder(monkeypatch):
    """Also if another process took a port while the nodes started."""
    real, drawn = module.free_ports, []
    with socket.create_server(("127.0.0.1", 0)) as taken:

        def draw(count):
            drawn.append(count)
            ports = real(count)
            return [taken.getsockname()[1], *ports[1:]] if len(drawn) == 1 else ports

        monkeypatch.setattr(module, "free_ports", draw)
        with EmbeddedCluster(nodes=1) as cluster:
            assert drawn == [2, 2]
            assert cluster.controller() == 1
            pid, folder = cluster.nodes[1].pid, cluster.nodes[1].log_path.parent
            assert folder.exists()
    assert not Path(f"/proc/{pid}").exists()
    assert not folder.exists()
    assert cluster.nodes == {}
    cluster.stop()


def test_a_cluster_that_was_not_started_refuses_queries():
    cluster = EmbeddedCluster()
    with pytest.raises(InvalidTransition, match="start"):
        _ = cluster.bootstrap_servers
    with pytest.raises(InvalidTransition, match="start"):
        cluster.leader("any", 0)


def test_an_invalid_size_is_refused():
    with pytest.raises(ConfigurationError, match="1 to 9"):
        EmbeddedCluster(nodes=0)


def test_a_taken_port_is_raised_before_errors_of_other_nodes():
    cluster = EmbeddedCluster(nodes=2)
    cluster._make_nodes()

    def fail(node):
        is_first = node is cluster.nodes[1]
        raise (DeadlineExceeded("late") if is_first else PortTaken("taken"))

    with pytest.raises(PortTaken):
        cluster._on_each([1, 2], fail)
