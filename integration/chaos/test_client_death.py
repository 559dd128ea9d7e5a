"""Clients of sidecars die, hang, lose connections, and leave children.

Two sidecars, as of two hosts, on one broker; the heartbeat interval is a minute. After
a known death a partition moves long before that. A partition that must not move is
seen to stay while another, after a later death, moves. Judged from the log.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from domain import opened
from fleet import PROGRAM, Fleet
from prometheus_client.parser import text_string_to_metric_families
from sidecars import PlainClient, start_sidecar
from slowness import Slowness
from waiting import eventually, wall_ms

from kafka_marshal import TopicPartition
from kafka_marshal.remote import paths

H_MS = 60_000
# Long enough for any machine, far below the interval: the wait is the assertion.
SOON_MS = 40_000
# From a known death to the claim of the next owner, on a machine that is not busy.
TAKEOVER_MS = 2_000
DEATHS, LAG = "marshal_sidecar_client_deaths_total", "kafka_consumergroup_lag"
FAMILY = PROGRAM.with_name("family_program.py")


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique, h_ms=H_MS, partitions=2) as found:
        yield found


@pytest.fixture(scope="module")
def hosts(domain):
    """Two sidecars, which appear to be on two hosts."""
    with (
        start_sidecar(domain, client_id="host-a", is_ready=False) as a,
        start_sidecar(domain, client_id="host-b", is_ready=False) as b,
    ):
        for each in (a, b):
            each.wait_ready(SOON_MS)
        yield a, b


@pytest.fixture
def group(unique):
    return unique("mortal")


@pytest.fixture
def fleet(domain, group, tmp_path):
    with Fleet(domain, tmp_path, group_id=group, commit=True, handle_ms=1) as found:
        yield found


def at(host):
    return {"sidecar": host.address}


def owners(domain, group):
    """Return which host owns what of a group, by the log."""
    return {
        key.partition: None if known.owner is None else known.owner.client_id
        for key, known in domain.states(group).items()
    }


def claims_of(domain, group):
    """Return who owns each partition, under which claim."""
    return {
        key.partition: (known.owner, known.epoch)
        for key, known in domain.states(group).items()
    }


def wait_owners(domain, group, *expected):
    """Wait until these hosts own one partition each, in whatever order."""
    eventually(
        lambda: sorted(map(str, owners(domain, group).values())) == sorted(expected),
        f"owned by {expected}",
        SOON_MS,
    )


def released(domain, group, reason):
    """Return the releases that were made for a reason."""
    return [
        step
        for step in domain.history().of("released", group_id=group)
        if (step.record.reason or "").startswith(reason)
    ]


def mortal(domain, hosts, fleet):
    """A client of host-a and one of host-b that share a topic of two partitions."""
    topic = domain.data_topic(2, records_each=50)
    first = fleet.start("victim", topics=[topic], **at(hosts[0]))
    group = fleet.settings["group_id"]
    wait_owners(domain, group, "host-a", "host-a")
    second = fleet.start("successor", topics=[topic], **at(hosts[1]))
    wait_owners(domain, group, "host-a", "host-b")
    wait_both_work(domain, topic, first, second)
    return topic, first, second


def wait_both_work(domain, topic, *workers):
    """Produce records, and wait until each worker has handled its share of them."""
    counts = [len(worker.journal.handled) for worker in workers]
    domain.produce(topic, 20)

    def look():
        now = [len(worker.journal.handled) for worker in workers]
        return all(n >= count + 20 for n, count in zip(now, counts, strict=True))

    eventually(look, "both work", SOON_MS)


def test_another_host_takes_over_the_partition_of_a_dead_client(
    domain, hosts, fleet, group
):
    """The sidecar notices the death, so the takeover does not wait for an interval."""
    topic, victim, successor = mortal(domain, hosts, fleet)
    (lost,) = [p for p, owner in owners(domain, group).items() if owner == "host-a"]
    deaths = figure(hosts[0], DEATHS)
    with Slowness() as machine:
        killed_ms = wall_ms()
        victim.kill()
        domain.produce(topic, 30)
        # The client that lives handles all records.
        eventually(
            lambda: not fleet.journal.lost(domain.of(topic)), "all is handled", SOON_MS
        )
    wait_owners(domain, group, "host-b", "host-b")
    (release,) = released(domain, group, "client_died")
    assert (release.client_id, release.key.partition) == ("host-a", lost)
    claims = domain.history().of("claimed", group_id=group)
    (claim,) = [c for c in claims if c.offset > release.offset and c.t == release.t]
    assert (claim.client_id, claim.key) == ("host-b", release.key)
    assert claim.timestamp_ms - killed_ms <= TAKEOVER_MS * machine.factor
    # The successor starts at the position that the dead client had confirmed.
    place = TopicPartition(topic, lost)
    assert min(successor.journal.offsets()[place]) == release.position
    # The first host counts the death; only the second one reports the lag now.
    assert figure(hosts[0], DEATHS) == deaths + 1
    for number in range(2):
        labels = {"consumergroup": group, "topic": topic, "partition": str(number)}
        assert figure(hosts[0], LAG, **labels) is None
        eventually(
            lambda labels=labels: figure(hosts[1], LAG, **labels) is not None,
            "the lag is told by its owner",
            SOON_MS,
        )


def test_a_client_that_hangs_keeps_its_claims(domain, hosts, fleet, group, unique):
    """SIGSTOP is no death, and neither is silence before the deadline."""
    topic, victim, successor = mortal(domain, hosts, fleet)
    before = claims_of(domain, group)
    victim.signal(signal.SIGSTOP)
    wait_for_another_death(domain, hosts, unique)
    assert claims_of(domain, group) == before
    victim.signal(signal.SIGCONT)
    wait_both_work(domain, topic, victim, successor)
    assert claims_of(domain, group) == before


def test_a_client_that_loses_its_connection_keeps_its_claims(
    domain, hosts, group, unique
):
    """Its process lives, so it keeps them until its deadline."""
    topic = domain.data_topic(2)
    client = PlainClient(hosts[0], group, "loner")
    assert client.register().is_success
    client.listen()
    # Without heartbeats for a second, as on a busy machine, it would get nothing.
    client.keep_beating()
    assert client.subscribe(topic).is_success
    client.wait_has(2)
    before = claims_of(domain, group)
    client.close()
    wait_for_another_death(domain, hosts, unique)
    assert claims_of(domain, group) == before
    # It comes back as the same process, and nothing had moved.
    again = PlainClient(hosts[0], group, "loner")
    again.instance = client.instance
    again.http = hosts[0].http(headers=client.http.headers)
    try:
        assert again.register().json()["was_known"] is True
        again.listen()
        again.wait_has(2)
        epochs = {number: each["epoch"] for (_, number), each in again.has.items()}
        assert epochs == {number: epoch for number, (_, epoch) in before.items()}
    finally:
        again.leave()
        again.close()


def test_living_children_keep_the_claims_of_their_dead_parent(
    domain, hosts, group, unique
):
    topic = domain.data_topic(1)
    base = paths.CLIENT.format(group=group, client="parent")
    parent = subprocess.Popen(
        [sys.executable, FAMILY, hosts[0].path, base, topic],
        stdout=subprocess.PIPE,
        text=True,
    )
    child = int(parent.stdout.readline())
    try:
        wait_owners(domain, group, "host-a")
        parent.kill()
        parent.wait(30)
        parent.stdout.close()
        wait_for_another_death(domain, hosts, unique)
        assert owners(domain, group) == {0: "host-a"}
        assert not released(domain, group, "client_died")
    finally:
        os.kill(child, signal.SIGKILL)
    wait_owners(domain, group, "None")
    assert len(released(domain, group, "client_died")) == 1


def test_a_sidecar_that_ends_in_order_hands_its_claims_over(
    domain, hosts, fleet, group, tmp_path
):
    manager = Manager(tmp_path / "notify")
    env = {"NOTIFY_SOCKET": manager.path, "WATCHDOG_USEC": "30000000"}
    with start_sidecar(domain, client_id="host-c", env=env, is_ready=False) as leaving:
        manager.wait_for("READY=1")
        assert manager.received[0].startswith("STATUS=STARTING")
        # Between two heartbeats, a minute apart, the unit's 30 s would be over.
        manager.wait_for(f"WATCHDOG_USEC={3 * H_MS * 1000}")
        manager.wait_for("WATCHDOG=1")
        leaving.wait_ready(SOON_MS)
        topic = domain.data_topic(2, records_each=50)
        first = fleet.start("leaver", topics=[topic], **at(leaving))
        wait_owners(domain, group, "host-c", "host-c")
        second = fleet.start("successor", topics=[topic], **at(hosts[1]))
        wait_owners(domain, group, "host-b", "host-c")
        wait_both_work(domain, topic, first, second)
        assert leaving.stop() == 0
        manager.wait_for("STOPPING=1")
        domain.produce(topic, 30)
        eventually(
            lambda: not fleet.journal.lost(domain.of(topic)),
            "all is handled",
            SOON_MS,
        )
        wait_owners(domain, group, "host-b", "host-b")
        # It drains itself before it ends.
        assert "host-c" in {
            each.client_id for each in released(domain, group, "drained")
        }
        assert Path("/proc", str(first.pid)).exists(), "the client lives"


class Manager:
    """The daemon's systemd: it reads all notifications."""

    def __init__(self, path):
        self.path = str(path)
        self.received = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with self._socket:
            while not self.received or "NOT_RUNNING" not in self.received[-1]:
                self.received += self._socket.recv(4096).decode().split("\n")

    def wait_for(self, line):
        eventually(lambda: line in self.received, f"it receives {line}", SOON_MS)


def figure(host, name, **labels):
    """Return one figure of a sidecar's metrics."""
    for family in text_string_to_metric_families(host.get(paths.METRICS).text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    return None


def wait_for_another_death(domain, hosts, unique):
    """Let another process of host-a die; return when its claim is released.

    By then earlier deaths would have had their effect, too.
    """
    group, topic = unique("canary"), domain.data_topic(1)
    base = paths.CLIENT.format(group=group, client="canary")
    canary = subprocess.Popen(
        [sys.executable, FAMILY, hosts[0].path, base, topic],
        stdout=subprocess.PIPE,
        text=True,
    )
    child = int(canary.stdout.readline())
    wait_owners(domain, group, "host-a")
    os.kill(child, signal.SIGKILL)
    canary.kill()
    canary.wait(30)
    canary.stdout.close()
    wait_owners(domain, group, "None")
