"""The embedded broker: start, stop, kill, and the death of its parent."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from slowness import until

from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
    InvalidTransition,
)
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topics import KafkaTopicAdmin
from kafka_marshal.testing.broker import EmbeddedBroker, free_ports

PARENT = """
import sys, time
from kafka_marshal.testing.broker import EmbeddedBroker
broker = EmbeddedBroker().start()
print(broker.pid, broker.log_path, flush=True)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def answers(address: str) -> bool:
    host, _, port = address.partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError:
        return False
    return True


def test_a_broker_keeps_its_address_after_a_kill_and_stop_removes_its_data():
    broker = EmbeddedBroker()
    assert not broker.is_running
    with broker:
        address, cluster, data = (
            broker.bootstrap_servers,
            broker.cluster_id,
            broker.log_path.parent,
        )
        first = broker.pid
        assert answers(address)
        with pytest.raises(InvalidTransition, match="runs already"):
            broker.start()
        broker.kill()
        assert not broker.is_running
        assert not is_alive(first)
        assert not answers(address)
        with pytest.raises(InvalidTransition, match="does not run"):
            broker.pause()
        broker.restart()
        assert broker.pid != first
        assert (broker.bootstrap_servers, broker.cluster_id) == (address, cluster)
        assert answers(address)
        last = broker.pid
    assert not is_alive(last)
    assert not data.exists()
    broker.stop()


def test_only_the_process_that_started_a_broker_stops_it():
    with EmbeddedBroker() as broker:
        child = os.fork()
        if child == 0:
            try:
                broker.stop()
            except InvalidTransition:
                os._exit(7)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        assert broker.is_running
        stat = Path(f"/proc/{broker.pid}/stat")
        broker.pause()
        assert stat.read_text().rpartition(")")[2].split()[0] == "T"
        broker.resume()
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] != "T")
        broker.pause()
        pid = broker.pid
    assert not is_alive(pid)


def test_broker_dies_with_a_killed_parent():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout as pipe:
        pid_text, log_text = pipe.readline().split()
    pid = int(pid_text)
    assert is_alive(pid)
    parent.kill()
    parent.wait(60)
    until(lambda: not is_alive(pid))
    # Only a killed parent leaves its temporary data behind.
    data = Path(log_text).parent
    for path in sorted(data.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    data.rmdir()


def test_a_broker_may_listen_on_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with EmbeddedBroker(host="::1") as broker:
        assert broker.bootstrap_servers.startswith("[::1]:")
        with KafkaTopicAdmin(ConnectionConfig(broker.bootstrap_servers)) as admin:
            (found,) = admin.cluster(timeout_ms=60_000).brokers
        assert found.address == broker.bootstrap_servers


def test_a_data_dir_survives_a_kill_and_an_orderly_end(tmp_path):
    with EmbeddedBroker(data_dir=tmp_path) as broker:
        cluster = broker.cluster_id
        os.kill(broker.pid, signal.SIGKILL)
        until(lambda: not broker.is_running)
        broker.restart()
        assert answers(broker.bootstrap_servers)
    with EmbeddedBroker(data_dir=tmp_path) as broker:
        assert broker.cluster_id == cluster
    assert (tmp_path / "broker.log").is_file()


@pytest.mark.parametrize("name", ["Jürgen 🎛", "back\\slash"])
def test_a_data_dir_may_have_any_character_but_a_comma(tmp_path, name):
    """Java reads properties as Latin-1: it took another directory, here or nearby."""
    with EmbeddedBroker(data_dir=tmp_path / name) as broker:
        cluster = broker.cluster_id
        assert (tmp_path / name / "data" / "meta.properties").is_file()
        broker.restart()
        assert broker.cluster_id == cluster
    assert list(tmp_path.iterdir()) == [tmp_path / name]


def test_a_data_dir_with_a_comma_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="comma") as caught:
        EmbeddedBroker(data_dir=tmp_path / "a,b").start()
    assert caught.value.setting == "data_dir"
    assert list(tmp_path.iterdir()) == []


def test_a_data_dir_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="writable directory") as caught:
        EmbeddedBroker(data_dir=tmp_path / "file").start()
    assert caught.value.setting == "data_dir"


def test_refused_properties_are_in_the_error():
    broker = EmbeddedBroker(properties={"process.roles": "nonsense"})
    with pytest.raises(ConfigurationError, match="nonsense"):
        broker.start()
    assert not broker.is_running


def test_a_broker_that_starts_too_late_is_stopped_and_raises():
    broker = EmbeddedBroker(start_timeout_ms=1)
    with pytest.raises(DeadlineExceeded, match="start_timeout_ms"):
        broker.start()
    assert not broker.is_running


def test_a_taken_port_is_an_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CoordinationError, match="already in use"):
            EmbeddedBroker(port=port).start()


def test_free_ports_differ():
    assert len(set(free_ports(8))) == 8
