"""The rows of keys that members cache equal rows that are computed again.

Hypothesis drives a fleet: members start, crash, are cut off and release keys; admins
pause, lock, drain and fence; unknown processes claim keys; leaders change and logs are
truncated. Every round of every member compares all rows that a policy gets.
"""

import pytest
import rowkit
import slices
from countkit import resize
from enginekit import AMO, H, pause_for, pause_scope, spec, world, write
from hypothesis import HealthCheck, given, note
from hypothesis import settings as effort
from hypothesis import strategies as st
from logkit import OP, claim, direct, fence, growth, schedule, settings, stage

from kafka_marshal.engine.holding import Drain
from kafka_marshal.policies import greedy
from kafka_marshal.policies import topic as whole_topics
from kafka_marshal.protocol.types import Key

PARTITIONS = 2
KEYS = tuple(Key("g", topic, number) for topic in ("t", "u") for number in range(3))
MEMBERS_MAX = 4

numbers = st.integers(0, 5)
waits = st.sampled_from([20, 100, H // 3, H // 2, H, 2 * H, 3 * H])
kinds = st.sampled_from(
    [
        *("start", "crash", "leave", "release", "drain", "lose", "beat"),
        *("pause", "scope", "later", "lock", "direct", "fence", "claim"),
        *("cut", "lead", "truncate", "resize", "plan", "grow"),
    ]
)
actions = st.lists(st.tuples(kinds, numbers, waits), min_size=8, max_size=24)
SPECS = (
    {},
    {"claims_max": 2},
    {"policy": whole_topics},
    {"policy": greedy, "delivery": AMO, "on_lost": lambda *_: None},
)


class Fleet:
    """Members of one cluster; the methods are the actions of the test."""

    def __init__(self):
        self.cluster = world(PARTITIONS, records=(1, 1, 1))
        self.cluster.fill("u", (1, 1, 1))
        self.started = self.generation = 0
        self.has_grown = False
        self.start(0)

    def act(self, kind, number):
        getattr(self, kind)(number)

    def member(self, number):
        nodes = self.cluster.nodes
        return nodes[number % len(nodes)] if nodes else None

    def holding(self, number):
        node = self.member(number)
        owned = [
            each
            for each in (node.session.holdings.values() if node else ())
            if each.claim.is_owned
        ]
        return (node, owned[number % len(owned)]) if owned else (None, None)

    def write_all(self, record):
        for t in range(self.cluster.config.partition_count):
            write(self.cluster, record, t)

    # --- members

    def start(self, number):
        nodes, self.started = self.cluster.nodes, self.started + 1
        if len(nodes) < MEMBERS_MAX:
            name = f"c{self.started % (MEMBERS_MAX + 1)}"
            if name not in {node.owner.client_id for node in nodes}:
                rest = {"metadata_refresh_ms": H // 4, **SPECS[number % 4]}
                self.cluster.node(name, spec=spec("t", "u", **rest))

    def crash(self, number):
        if self.cluster.nodes:
            self.cluster.crash(self.member(number))

    def leave(self, number):
        node = self.member(number)
        if node is not None:
            node.leave()
            self.cluster.run(100)
            self.cluster.crash(node)

    def cut(self, number):
        node = self.member(number)
        if node is not None:
            node.cut(is_cut=not node.log.cut)

    def release(self, number):
        node, holding = self.holding(number)
        if holding is not None:
            successor = self.member(number + 1).owner.client_id
            node.session.release(holding, reason="surplus", successor=successor)

    def drain(self, number):
        node, holding = self.holding(number)
        if holding is not None and holding.drain is None:
            holding.is_subleased = bool(number % 2)
            node.session._drain(holding, Drain("lagging", None, None))

    def lose(self, number):
        node, holding = self.holding(number)
        if holding is not None:
            node.session.abandon(holding, reason="lease_expired")

    def beat(self, number):
        node = self.member(number)
        if node is not None:
            node.session.beat_now()

    # --- admins and unknown processes

    def pause(self, number):
        for t in range(self.cluster.config.partition_count):
            pause_for(self.cluster, number * H // 2, seq=t)

    def scope(self, number):
        pause_scope(self.cluster, 2 * H, {"t": (number,), "u": ()})

    def later(self, number):
        begin_ms = self.cluster.clock.wall_ms() + number * H // 2
        self.write_all(schedule(begin_ms, begin_ms + H, op=b"l" * 16))

    def lock(self, number):
        self.pause(5)
        self.cluster.run(H // 2)
        self.write_all(stage((number % 3, 1), op=OP))

    def direct(self, number):
        self.write_all(direct(f"c{number}", until=self.cluster.clock.wall_ms() + H))

    def fence(self, number):
        node = self.member(number)
        if node is not None:
            owner = node.owner
            self.write_all(fence(owner.client_id, inc=owner.incarnation))

    def claim(self, number):
        self.write_all(claim("x", key=KEYS[number]))

    def plan(self, number):
        self.generation += 1
        policy = "planner" if number % 2 else None
        self.write_all(settings(self.generation, policy=policy, grace_ms=number * H))

    def resize(self, number):
        config = self.cluster.config
        if config.generation == 1:
            resize(self.cluster, 3 if number % 2 else 4, generation=2)

    def grow(self, number):
        if not self.has_grown:
            write(self.cluster, growth(6, 3), 0)
            self.cluster.kafka.add_partitions("t", 3)
        if self.has_grown or number % 2:
            write(self.cluster, growth(6, 3, ends=(1, number % 2, 0)), 0)
        self.has_grown = True

    # --- Kafka

    def lead(self, number):
        self.cluster.kafka.set_skew(1, (number - 2) * H // 2)
        place = self.cluster.place(number % PARTITIONS)
        self.cluster.kafka.fail_over(place, leader=1)

    def truncate(self, number):
        place = self.cluster.place(number % PARTITIONS)
        log = self.cluster.kafka.log(place)
        self.cluster.kafka.groups.clear()
        end = max(1, log.end - number)
        self.cluster.kafka.truncate(place, end=end, leader=1)


@pytest.fixture(scope="module", autouse=True)
def seen():
    with pytest.MonkeyPatch.context() as patch:
        found = rowkit.check_rows(patch)
        found.wrong = rowkit.check_planners(patch).wrong
        yield found
    # How many are kept depends on the examples, so on the name of the test.
    assert found.computed < found.wanted / 2, "rows are kept"


@effort(
    max_examples=slices.slice_of(quick=30, full=3_000),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(plan=actions)
def test_kept_rows_equal_computed_ones(seen, plan):
    seen.wrong.clear()
    fleet = Fleet()
    fleet.cluster.run(H, step_ms=50)
    for kind, number, wait_ms in plan:
        note(f"{kind} {number}, then {wait_ms} ms")
        fleet.act(kind, number)
        fleet.cluster.run(wait_ms, step_ms=50)
        assert not seen.wrong
