"""An admin spreads a group over hosts, by a Plan that members follow."""

from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest
from enginekit import H, fold, spec, world, write
from logkit import layout_fence, planned, settings
from positionkit import Stepping

from kafka_marshal import World
from kafka_marshal.admin.pausing import Sender
from kafka_marshal.admin.rebalancing import ATTEMPTS_MAX, Rebalancing
from kafka_marshal.clock import SystemClock
from kafka_marshal.errors import ClaimRejected, LogUnwritable
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.views.plan import verify_plan

K = 2
HOME = home_partition("g", partition_count=K)
TIMEOUT_MS = 10 * H
HOSTS = {"a": "h1", "b": "h1", "c": "h2", "d": "h2"}
COUNTS = {"t": 4, "u": 4}


@pytest.fixture(name="cluster")
def _cluster():
    cluster = world(partitions=K, records=(1,) * 4)
    cluster.fill("u", (1,) * 4)
    for t in range(K):
        write(cluster, settings(policy="planner"), t)
    return cluster


def owners(nodes):
    return {key: name for name, node in nodes.items() for key in node.held}


def competing(cluster, *moves):
    """Write the next Plan, as a planner of the group would."""
    record = planned(
        fold(cluster, HOME).plan_generation("g"),
        *moves,
        topics=(("t", 4), ("u", 4)),
        vector=[(fold(cluster, t).next_offset, 0) for t in range(K)],
    )
    write(cluster, record, HOME)


@pytest.fixture
def nodes(cluster):
    """Four members that hold two keys each; each topic lies on one host."""
    found = {
        name: cluster.node(name, spec=spec("t", "u"), host=host)
        for name, host in HOSTS.items()
    }
    cluster.run_until(
        lambda: all(len(node.held) == 2 for node in found.values()), 20 * H
    )
    cluster.run(3 * H)
    names = [("a", 0, (0, 1)), ("b", 0, (2, 3)), ("c", 1, (0, 1)), ("d", 1, (2, 3))]
    competing(cluster, *names)
    cluster.run_until(
        lambda: (
            {(key.topic, HOSTS[name]) for key, name in owners(found).items()}
            == {("t", "h1"), ("u", "h2")}
        ),
        20 * H,
    )
    cluster.run(3 * H)
    return found


class Admin(Rebalancing):
    """An admin of this cluster."""

    def __init__(self, cluster, follower=None):
        self.cluster = cluster
        self.follower = follower or Stepping(cluster, "admin")
        self._sender = Sender("admin", "ada")
        self._timeout_ms, self._clock = TIMEOUT_MS, cluster.clock.view()

    def _follow(self):
        return self.follower

    def partition_count(self, topic):
        return COUNTS.get(topic)

    def spread(self, *, execute=True):
        return self.spread_group("g", execute=execute)


def places(nodes):
    return Counter((key.topic, HOSTS[name]) for key, name in owners(nodes).items())


SPREAD = {(topic, host): 2 for topic in "tu" for host in ("h1", "h2")}


def test_topics_are_spread_and_planners_keep_the_spread(cluster, nodes):
    admin = Admin(cluster)
    before = owners(nodes)
    found = admin.spread(execute=False)
    assert (len(found.moves), found.is_needed, found.is_written) == (4, True, False)
    generation = fold(cluster, HOME).plan_generation("g")
    assert found.follows == generation
    assert owners(nodes) == before
    found = admin.spread()
    assert found.is_written
    assert {(move.key.topic, HOSTS[move.source]) for move in found.moves} == {
        ("t", "h1"),
        ("u", "h2"),
    }
    # While members follow the Plan, no other one is needed.
    again = admin.spread()
    assert (again.is_needed, again.is_written) == (False, False)
    cluster.run_until(lambda: places(nodes) == SPREAD, 20 * H)
    cluster.run(10 * H)
    after = owners(nodes)
    assert sum(before[key] != after[key] for key in before) == 4
    assert set(Counter(after.values()).values()) == {2}
    assert fold(cluster, HOME).plan_generation("g") == generation + 1
    assert admin.spread().moves == ()


def test_the_plan_of_a_spread_can_be_verified(cluster, nodes):
    assert Admin(cluster).spread().is_written
    now = World([fold(cluster, t) for t in range(K)], {}, cluster_id="simulated")

    def past(offsets):
        states = [WorldState(t) for t in range(K)]
        for t, state in enumerate(states):
            for stored in cluster.kafka.log(cluster.place(t)).records:
                entry = stored.entry()
                if entry.offset <= offsets[t]:
                    apply(state, entry)
        return World(states, {}, cluster_id="simulated", is_past=True)

    assert verify_plan(now, "g", past=past).outcome == "same"


def test_no_plan_is_written_if_all_members_are_silent_by_the_wall_clock(cluster, nodes):
    admin = Admin(cluster)
    admin._clock = SystemClock()
    found = admin.spread()
    assert (found.moves, found.is_written) == ((), False)


class Raced(Stepping):
    """A follower whose first appends are overtaken by the Plan of a planner."""

    def __init__(self, cluster, *, times):
        super().__init__(cluster, "admin")
        self.times = times

    def append(self, partition, record):
        if self.times:
            self.times -= 1
            competing(self.cluster)
        return super().append(partition, record)


def test_a_plan_that_is_overtaken_is_made_again(cluster, nodes):
    admin = Admin(cluster, Raced(cluster, times=2))
    found = admin.spread()
    assert found.is_written
    assert found.follows == fold(cluster, HOME).plan_generation("g") - 1


def test_a_plan_that_is_overtaken_too_often_is_given_up(cluster, nodes):
    admin = Admin(cluster, Raced(cluster, times=ATTEMPTS_MAX))
    with pytest.raises(ClaimRejected, match="were overtaken") as caught:
        admin.spread()
    assert caught.value.reason == "plan_overtaken"


def test_a_group_without_policy_planner_is_refused(cluster):
    for t in range(K):
        write(cluster, settings(2), t)
    with pytest.raises(ClaimRejected, match="--policy planner") as caught:
        Admin(cluster).spread()
    assert caught.value.reason == "not_planned"


def test_a_spread_is_refused_while_the_partition_count_changes(cluster):
    config = msgspec.structs.replace(
        cluster.config, generation=2, era=2, partition_count=2 * K
    )
    fence = layout_fence(2 * K, K)
    write(cluster, msgspec.structs.replace(fence, config=encode(config)), 0)
    assert fold(cluster, 0).layout
    with pytest.raises(ClaimRejected, match="is being changed") as caught:
        Admin(cluster).spread()
    assert caught.value.reason == "busy"


def test_an_unexpected_refusal_of_a_plan_is_an_error(cluster, nodes, monkeypatch):
    class Refused(Stepping):
        def await_all(self, awaited, timeout_ms):
            super().await_all(awaited, timeout_ms)
            for each in awaited:
                each.transition = SimpleNamespace(outcome="refused", reason="limits")

    with pytest.raises(LogUnwritable, match="limits"):
        Admin(cluster, Refused(cluster, "admin")).spread()
