"""Brokers of a cluster fail under working consumers; judged from log and journals.

Of two workers in each group one is on each transport; one group is of either
guarantee. Timings are figures for the report: no assertion is about them.
"""

from contextlib import ExitStack

import pytest
from embedded_cluster import EmbeddedCluster
from ordeal import Ordeal
from waiting import eventually, wall_ms

from simulator.slowlink import SlowLink

# About three times the session of a broker with the controller.
ROOMY_MS = 10_000
# The default heartbeat interval.
USUAL_MS = 60_000
KILLS_MS_MAX = 20 * 60_000
PREFERRED = 0


@pytest.fixture
def ordeal(cluster, unique, tmp_path):
    """Make an ordeal on the shared cluster, which is whole again afterwards."""
    made = []

    def make(finding, **settings):
        made.append(
            Ordeal(finding, cluster.bootstrap_servers, unique, tmp_path, **settings)
        )
        return made[-1]

    yield make
    for each in made:
        each.__exit__()
    down = [n for n, node in cluster.nodes.items() if not node.is_running]
    cluster.restart(*down)
    for each in made:
        cluster.wait_in_sync(each.domain.topic)


def all_topics(ordeal):
    return [ordeal.domain.topic, *{place.topic for place in ordeal.domain.produced}]


def spread_leaders(cluster, it):
    """Have every node lead some of each topic, the bare clients' as well.

    Kafka does so by itself in time. Otherwise only one of the compared clients might
    have to wait for an election.
    """
    topics = all_topics(it)
    cluster.wait_in_sync(*topics)
    for topic in topics:
        numbers = sorted(cluster.leaders(topic))
        it.domain.kafka.elect_leaders(PREFERRED, {topic: numbers}, raise_errors=False)
    eventually(
        lambda: all(
            set(cluster.leaders(topic).values()) == set(cluster.nodes)
            for topic in topics
        ),
        "all lead some",
        60_000,
    )
    it.wait_flowing()
    cluster.wait_in_sync(*topics)


@pytest.mark.proof
def test_leader_kill(cluster, ordeal, record, times):
    """SIGKILL of the broker that leads T0."""
    found = record("leader_kill", "the leader of T0 is killed (SIGKILL)", USUAL_MS)
    kills(cluster, ordeal, found, count=times(60))


def test_leader_kill_short(cluster, ordeal, record, times):
    """The same with an interval hardly longer than an election."""
    title = "the same, where sending is given up (H/2) when a leader is elected"
    found = record("leader_kill_short", title, ROOMY_MS)
    kills(cluster, ordeal, found, count=times(5))


def kills(cluster, ordeal, found, *, count):
    """Kill the leader of T0 so often, or as often as there is time for."""
    deadline_ms = wall_ms() + KILLS_MS_MAX
    found.runs = 0
    with ordeal(found) as it:
        it.start()
        while found.runs < count and wall_ms() < deadline_ms:
            spread_leaders(cluster, it)
            before = it.claims()
            victim = cluster.leader(it.domain.topic, 0)
            it.failover.watch(victim)
            killed_ms = wall_ms()
            cluster.kill(victim)
            it.wait_flowing()
            it.note_own(killed_ms)
            it.note_gaps(killed_ms)
            it.note_kept(before)
            found.runs += 1
            cluster.restart(victim)
        it.settle()
        it.judge()


@pytest.mark.proof
def test_leader_stop_short(cluster, ordeal, record):
    """SIGSTOP of the leader of T0, shorter than its session with the controller."""
    title = "the leader of T0 stands still for 1.5 s (SIGSTOP), its session lasts 3 s"
    found = record("leader_stop_short", title, ROOMY_MS)
    with ordeal(found) as it:
        it.start()
        stop_leader(cluster, it, stopped_ms=1_500)
        it.settle()
        it.judge()


@pytest.mark.proof
def test_leader_stop_long(cluster, ordeal, record):
    """SIGSTOP of the leader of T0, longer than its session with the controller."""
    title = "the leader of T0 stands still for 8 s (SIGSTOP), its session lasts 3 s"
    found = record("leader_stop_long", title, ROOMY_MS)
    with ordeal(found) as it:
        it.start()
        victim = stop_leader(cluster, it, stopped_ms=8_000)
        assert cluster.leader(it.domain.topic, 0) != victim
        it.settle()
        it.judge()


def stop_leader(cluster, it, *, stopped_ms):
    """Stop the leader of T0 for some time; return which node it was."""
    cluster.wait_in_sync(*all_topics(it))
    before = it.claims()
    victim = cluster.leader(it.domain.topic, 0)
    since_ms = wall_ms()
    cluster.pause(victim)
    wait_until(since_ms + stopped_ms)
    cluster.resume(victim)
    it.wait_flowing()
    cluster.wait_in_sync(*all_topics(it))
    it.wait_flowing()
    it.note_gaps(since_ms)
    it.note_kept(before)
    return victim


def wait_until(moment_ms):
    span_ms = moment_ms - wall_ms() + 20_000
    eventually(lambda: wall_ms() >= moment_ms, "the time has come", span_ms)


@pytest.mark.proof
def test_rolling_restart(cluster, ordeal, record):
    """Every broker is restarted in order, one after the other."""
    title = "each broker ends in order and starts again, one after the other"
    found = record("rolling_restart", title, ROOMY_MS)
    with ordeal(found) as it:
        it.start()
        before = it.claims()
        for node in cluster.nodes:
            cluster.wait_in_sync(*all_topics(it))
            since_ms = wall_ms()
            cluster.restart(node)
            it.wait_flowing()
            it.note_gaps(since_ms)
        found.runs = len(cluster.nodes)
        it.note_kept(before)
        found.kept *= found.runs
        it.settle()
        it.judge()


# --- nothing can be written


@pytest.mark.proof
def test_min_isr_lost(cluster, ordeal, record):
    """Too few replicas in sync: no worker may hand out records after its lease."""
    title = "one broker is dead and __marshal wants three copies in sync, for 3 H"
    found = record("min_isr_lost", title)
    with ordeal(found) as it:
        it.start()
        cluster.wait_in_sync(*all_topics(it))
        it.domain.alter_coordination_topic("min.insync.replicas", "3")
        it.wait_flowing()
        victim = cluster.leader(it.domain.topic, 0)
        since_ms = wall_ms()
        cluster.kill(victim)
        others = set(cluster.nodes) - {victim}
        cluster.wait_in_sync(it.domain.topic, nodes=others)
        # Data still flows and the log has leaders: only the leases have ended.
        stalled_ms = wall_ms()
        wait_until(stalled_ms + 3 * found.h_ms)
        it.judge_silence(stalled_ms, wall_ms())
        cluster.restart(victim)
        it.wait_flowing()
        it.note_gaps(since_ms)
        it.settle()
        it.judge()


@pytest.mark.proof
def test_quorum_lost(cluster, ordeal, record):
    """Two of three nodes die: no controller, no leader is replaced, no copies."""
    found = record("quorum_lost", "two of three nodes are dead for 4 H: no quorum")
    with ordeal(found) as it:
        it.start()
        cluster.wait_in_sync(*all_topics(it))
        controller = cluster.controller()
        victims = [controller, controller % len(cluster.nodes) + 1]
        since_ms = wall_ms()
        cluster.kill(*victims)
        wait_until(since_ms + 4 * found.h_ms)
        it.judge_silence(since_ms, wall_ms())
        cluster.restart(*victims)
        it.wait_flowing()
        it.note_gaps(since_ms)
        it.settle()
        it.judge()


# --- links


@pytest.mark.proof
def test_slow_link(unique, tmp_path, record):
    """Every broker is far away: what it answers takes 150 ms, to everybody."""
    found = record("slow_link", "all that comes from brokers takes 150 ms, for 6 H")
    with ExitStack() as stack:
        links = {n: stack.enter_context(SlowLink(delay_ms=150)) for n in (1, 2, 3)}
        addresses = {node: link.address for node, link in links.items()}
        far = stack.enter_context(EmbeddedCluster(advertised=addresses))
        for node, link in links.items():
            link.lead_to(far.nodes[node].bootstrap_servers)
        servers = ",".join(addresses.values())
        it = stack.enter_context(Ordeal(found, servers, unique, tmp_path))
        it.start()
        before = it.claims()
        since_ms = wall_ms()
        wait_until(since_ms + 6 * found.h_ms)
        it.wait_flowing()
        it.note_gaps(since_ms)
        it.note_kept(before)
        it.settle()
        it.judge()
