"""Members stand by for keys of other members (PROTOCOL 9.9): some of many seeds.

Full size: ``PROOF=1``, or ``python -m simulator --also standbys``.
"""

import pytest
import slices
from enginekit import H, spec, takeovers, world

from simulator.campaign import CampaignOptions, run_seeds
from simulator.coverage import STOOD_BY
from simulator.plan import MINUTE_MS, STANDBYS
from simulator.simulate import simulate

SEEDS = slices.seeds_of(quick=[0, 1, 2, 3, 5], full=1_000)
PARTITIONS, COORDINATORS = 24, 3


@pytest.mark.slow
def test_every_key_is_owned_with_any_standbys():
    options = CampaignOptions(also=(STANDBYS,), minutes=4)
    summary = run_seeds(SEEDS, options, jobs=1)
    assert summary.broken == []
    assert not {name for name in STOOD_BY if not summary.seen[name]}


def test_a_seed_repeats_byte_for_byte():
    first, second = (
        simulate(3, also=(STANDBYS,), duration_ms=2 * MINUTE_MS) for _ in range(2)
    )
    assert first == second
    assert first.seen["standby_begun"]


def load(partition, position, owner):
    """Stand in for the callback that loads or drops the state of a partition."""


def fleet(seed):
    """Return a balanced fleet: two members on each of three hosts.

    Returns:
        The cluster; nodes and hosts by name of the member.
    """
    cluster = world(partitions=COORDINATORS, records=(1,) * PARTITIONS)
    nodes, hosts = {}, {}
    for number in range(seed, seed + 6):
        name = f"m{number}"
        hosts[name] = f"h{number % 3}"
        nodes[name] = cluster.node(
            name, spec=spec(on_standby=load, standbys=1), host=hosts[name]
        )
        cluster.run(H // 5)
    cluster.run_until(
        lambda: all(len(node.held) == 4 for node in nodes.values()), 20 * H
    )
    cluster.run(2 * H)
    return cluster, nodes, hosts


def first_takeovers(cluster, since_ms):
    """Return the client that first took over each key since a time."""
    found = {}
    lines = [line for t in range(COORDINATORS) for line in takeovers(cluster, t)]
    for line in sorted(lines, key=lambda line: line.time_ms):
        if line.time_ms >= since_ms:
            found.setdefault(line.transition.key, line.record.client_id)
    return found


@pytest.mark.parametrize("victim", ["h0", "h1", "h2"])
@pytest.mark.parametrize("seed", [0, 7, 11])
def test_keys_of_a_host_that_is_killed_go_to_warm_standbys_elsewhere(victim, seed):
    cluster, nodes, hosts = fleet(seed)
    dead = {name: node for name, node in nodes.items() if hosts[name] == victim}
    keys = {key for node in dead.values() for key in node.held}
    warm = {
        key: name
        for name, node in nodes.items()
        for key in node.session._standbys.keys & keys
    }
    assert warm.keys() == keys
    assert not set(warm.values()) & dead.keys()
    began_ms = cluster.clock.now_ms()
    for name, node in dead.items():
        cluster.crash(node)
        del nodes[name]
    # Takeovers may take one more jitter than without standbys.
    cluster.run_until(
        lambda: sum(len(node.held) for node in nodes.values()) == PARTITIONS, 3 * H
    )
    assert first_takeovers(cluster, began_ms) == warm
    cluster.run_until(
        lambda: {len(node.held) for node in nodes.values()} == {6}, 20 * H
    )
