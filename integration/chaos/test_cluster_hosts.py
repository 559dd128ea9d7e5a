"""Brokers and clients on hosts of their own: networks, clocks and disks that fail.

Hosts are network namespaces, clocks a class of Kafka's that is replaced, the disk a
small tmpfs. What this machine does not allow is skipped, and the report says why.
"""

import subprocess
from contextlib import ExitStack
from pathlib import Path

import attrs
import pytest
from embedded_cluster import EmbeddedCluster
from netns import Network, why_not
from ordeal import TEAM, Ordeal
from waiting import eventually, wall_ms
from wrongclock import Clocks, compiler

from kafka_marshal.errors import MarshalError

pytestmark = pytest.mark.proof
BROKERS = ("b1", "b2", "b3")
CLIENTS = {"w1": "c1", "w2": "c2"}
ROOMY_MS = 10_000
HOUR_MS = 3_600_000
DISK_MIB = 128
DISK_NODE = 2


@attrs.define
class Hosts:
    """A cluster with all parts that this machine allows to break.

    Attributes:
        cluster: Its brokers.
        network: The network of brokers and clients.
        clocks: Their clocks, None without a Java compiler.
        disk: Where node ``DISK_NODE`` keeps its data, None where none is mounted.
    """

    cluster: EmbeddedCluster
    network: Network
    clocks: Clocks | None = None
    disk: Path | None = None

    def launchers(self) -> dict[str, list[str]]:
        return {name: self.network.launcher(host) for name, host in CLIENTS.items()}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if why := why_not():
        pytest.skip(why)
    home = tmp_path_factory.mktemp("hosts")
    with ExitStack() as stack:
        network = stack.enter_context(Network(*BROKERS, *CLIENTS.values()))
        clocks = Clocks(home, len(BROKERS)) if compiler() else None
        disk = mounted(home / "disk", stack)
        nodes = dict(enumerate(BROKERS, 1))
        cluster = EmbeddedCluster(
            hosts={node: network.addresses[name] for node, name in nodes.items()},
            launchers={node: network.launcher(name) for node, name in nodes.items()},
            class_path=clocks.class_path if clocks else (),
            java_options=clocks.java_options if clocks else None,
            data_dirs={DISK_NODE: disk} if disk else None,
        )
        yield Hosts(
            cluster=stack.enter_context(cluster),
            network=network,
            clocks=clocks,
            disk=disk,
        )


def mounted(place, stack):
    """Mount a small disk; return where, or None where that is not allowed."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(place)]
    done = subprocess.run(mount, check=False, capture_output=True, timeout=10)
    if done.returncode != 0:
        return None
    unmount = ["umount", "-l", str(place)]
    stack.callback(subprocess.run, unmount, check=False, timeout=10)
    return place / "broker"


@pytest.fixture
def ordeal(hosts, unique, tmp_path):
    """Make an ordeal; all hosts are well again afterwards."""
    made = []

    def make(finding, **settings):
        servers = hosts.cluster.bootstrap_servers
        made.append(Ordeal(finding, servers, unique, tmp_path, **settings))
        made[-1].start(hosts.launchers())
        return made[-1]

    yield make
    hosts.network.heal()
    if hosts.clocks:
        hosts.clocks.set_right()
    for each in made:
        each.__exit__()
    nodes = hosts.cluster.nodes
    try:
        hosts.cluster.restart(*(n for n, node in nodes.items() if not node.is_running))
        for each in made:
            hosts.cluster.wait_in_sync(each.domain.topic)
    except MarshalError:
        restart_all(hosts)


def restart_all(hosts):
    """Start all brokers again, whatever their state."""
    hosts.cluster.kill(*hosts.cluster.nodes)
    hosts.cluster.restart(*hosts.cluster.nodes)


def wait_until(moment_ms):
    span_ms = moment_ms - wall_ms() + 20_000
    eventually(lambda: wall_ms() >= moment_ms, "the time has come", span_ms)


# --- the network


def cut_off(ordeal, found, *, cut, heal):
    """Cut w2 off for four intervals: w1 takes over, and w2 returns."""
    with ordeal(found) as it:
        before = it.claims()
        since_ms = wall_ms()
        cut()
        wait_until(since_ms + 4 * found.h_ms)
        it.wait_flowing()
        it.note_gaps(since_ms)
        it.note_takeover(since_ms, {"w2"}, before)
        heal()
        it.wait_all_work(set(TEAM))
        it.settle()
        it.judge()


def test_client_cut(hosts, ordeal, record):
    """Nothing passes between a client and the brokers."""
    found = record("client_cut", "a client is cut off both ways for 4 H")
    network = hosts.network
    cut_off(
        ordeal, found, cut=lambda: network.split(["c2"], BROKERS), heal=network.heal
    )


def test_client_cut_outward(hosts, ordeal, record):
    """What a client sends is lost; what brokers send arrives."""
    found = record("client_cut_outward", "what a client sends is lost for 4 H")
    network = hosts.network
    cut_off(ordeal, found, cut=lambda: network.cut(["c2"], BROKERS), heal=network.heal)


def test_client_cut_inward(hosts, ordeal, record):
    """What brokers send to a client is lost; what it sends arrives."""
    title = "what brokers send to a client is lost for 4 H; its own records may land"
    found = record("client_cut_inward", title)
    network = hosts.network
    cut_off(ordeal, found, cut=lambda: network.cut(BROKERS, ["c2"]), heal=network.heal)


def test_network_split(hosts, ordeal, record):
    """The leader of T0 and one client are split from all others."""
    title = "the leader of T0 and one client are split from the other brokers, for 6 H"
    found = record("network_split", title)
    network = hosts.network
    with ordeal(found) as it:
        before = it.claims()
        minority = f"b{hosts.cluster.leader(it.domain.topic, 0)}"
        majority = [name for name in BROKERS if name != minority]
        since_ms = wall_ms()
        network.split([minority, "c2"], [*majority, "c1"])
        it.wait_flowing()
        it.note_gaps(since_ms)
        wait_until(since_ms + 6 * found.h_ms)
        # Exactly one side works: that of the majority.
        late_ms = wall_ms() - found.h_ms
        for fleet in it.fleets.values():
            late = {h.client_id for h in fleet.journal.handled if h.at_ms > late_ms}
            assert late == {"w1"}
        network.heal()
        it.wait_all_work(set(TEAM))
        # Not earlier: this process reaches both sides, and may get either leader.
        it.note_takeover(since_ms, {"w2"}, before)
        it.settle()
        it.judge()


def test_lossy_link(hosts, ordeal, record):
    """A third of what a client and a broker send is lost, in short fits."""
    title = "a client and a broker lose what they send for 80 of 250 ms, over 8 H"
    found = record("lossy_link", title)
    with ordeal(found) as it:
        before = it.claims()
        since_ms = wall_ms()
        with hosts.network.losing(["c2", "b1"], open_s=0.17, shut_s=0.08):
            wait_until(since_ms + 8 * found.h_ms)
        it.wait_flowing()
        it.note_gaps(since_ms)
        it.note_kept(before)
        it.settle()
        it.judge()


# --- clocks


@pytest.fixture
def clocks(hosts):
    if hosts.clocks is None:
        pytest.skip("no Java compiler (javac): Kafka's clock cannot be replaced")
    yield hosts.clocks
    # Brokers keep deadlines by it: one that was set back an hour waits for that hour.
    hosts.clocks.set_right()
    restart_all(hosts)


def test_clock_skew(hosts, ordeal, record, clocks):
    """Brokers an hour apart; leaders change from one to the other."""
    title = "brokers' clocks are an hour apart, and the leader of T0 is killed"
    found = record("clock_skew", title, ROOMY_MS)
    for node, ahead_ms in ((1, -HOUR_MS), (2, 0), (3, HOUR_MS)):
        clocks.set(node, ahead_ms)
    # They differ from the start: a controller whose clock goes back would wait for dead
    # brokers for another hour, and elect no leader.
    restart_all(hosts)
    cluster = hosts.cluster
    with ordeal(found, has_true_time=False) as it:
        for _ in range(2):
            cluster.wait_in_sync(it.domain.topic)
            before = it.claims()
            since_ms = wall_ms()
            victim = cluster.leader(it.domain.topic, 0)
            cluster.kill(victim)
            it.wait_flowing()
            it.note_gaps(since_ms)
            it.note_kept(before)
            cluster.restart(victim)
        found.runs = 2
        it.settle()
        it.judge()


def test_clock_back(hosts, ordeal, record, clocks):
    """The leader's clock goes back by an hour."""
    found = record("clock_back", "the clock of T0's leader goes back by an hour")
    with ordeal(found, has_true_time=False) as it:
        before = it.claims()
        since_ms = wall_ms()
        clocks.set(hosts.cluster.leader(it.domain.topic, 0), -HOUR_MS)
        wait_until(since_ms + 5 * found.h_ms)
        it.wait_flowing()
        it.note_gaps(since_ms)
        it.note_kept(before)
        it.settle()
        it.judge()


def test_clock_forward(hosts, ordeal, record, clocks):
    """The leader's clock leaps ahead: outside of what leases assume; it is reported."""
    title = "the clock of T0's leader leaps ahead by 3 H: what S4 excludes"
    found = record("clock_forward", title)
    with ordeal(found, has_true_time=False, is_exclusive=False) as it:
        since_ms = wall_ms()
        clocks.set(hosts.cluster.leader(it.domain.topic, 0), 3 * found.h_ms)
        wait_until(since_ms + 3 * found.h_ms)
        it.wait_flowing()
        it.note_gaps(since_ms)
        it.settle()
        it.judge()
        steps_noticed = sorted(it.noticed("clock_step"))
        found.notes.append(f"the leap was reported by {steps_noticed}")


# --- disks


def test_disk_full(hosts, ordeal, record):
    """A broker's disk is full; it is emptied, and the broker started again."""
    if hosts.disk is None:
        pytest.skip("no tmpfs may be mounted here")
    title = f"the disk of node {DISK_NODE} is full; its broker ends and comes back"
    found = record("disk_full", title, ROOMY_MS)
    cluster = hosts.cluster
    with ordeal(found) as it:
        before = it.claims()
        ballast = hosts.disk.parent / "ballast"
        since_ms = wall_ms()
        fill(ballast)
        # Appends fail at once; the broker may or may not end by itself.
        wait_until(since_ms + 15_000)
        is_down = not cluster.nodes[DISK_NODE].is_running
        found.notes.append(f"the broker ended by itself: {is_down}")
        ballast.unlink()
        cluster.restart(DISK_NODE)
        it.wait_flowing()
        cluster.wait_in_sync(it.domain.topic)
        it.note_gaps(since_ms)
        it.note_kept(before)
        it.settle()
        it.judge()


def fill(path):
    """Write until nothing more fits."""
    with path.open("wb", buffering=0) as file:
        block = bytes(1 << 16)
        try:
            while True:
                file.write(block)
        except OSError:
            assert path.stat().st_size > 0
