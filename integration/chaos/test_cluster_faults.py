"""Brokers of a cluster fail under working consumers; judged from log and journals.

Of two workers in each group one is on each transport; one group is of either
guarantee. Timings are figures for the report: no assertion is about them.
"""

import pytest
from ordeal import Ordeal
from waiting import wall_ms

pytestmark = pytest.mark.timeout(900)
# Three times what the controller waits for a broker, as with the usual H of a minute.
ROOMY_MS = 10_000


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


def test_leader_kill(cluster, ordeal, record, times):
    """SIGKILL of the broker that leads T0."""
    found = record("leader_kill", "the leader of T0 is killed (SIGKILL)", ROOMY_MS)
    found.runs = times(20)
    with ordeal(found) as it:
        it.start()
        for _ in range(found.runs):
            cluster.wait_in_sync(*all_topics(it))
            before = it.claims()
            victim = cluster.leader(it.domain.topic, 0)
            killed_ms = wall_ms()
            cluster.kill(victim)
            it.wait_flowing()
            it.note_gaps(killed_ms)
            it.note_kept(before)
            cluster.restart(victim)
        it.settle()
        it.judge()
