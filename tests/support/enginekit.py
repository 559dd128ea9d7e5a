"""Small clusters of whole nodes for tests, with the folded log and the holders."""

import threading
from typing import NamedTuple

import attrs
import msgspec
from logkit import schedule

from kafka_marshal.conditions import Condition
from kafka_marshal.config import Callbacks, ConsumerConfig, Delivery
from kafka_marshal.engine.checkpointing import CheckpointRule
from kafka_marshal.engine.follower import Follower
from kafka_marshal.errors import LogTruncated
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import ClaimingPartition, Record, ReleaseGroup
from kafka_marshal.protocol.state import Transition, WorldState
from kafka_marshal.protocol.types import Key, TopicPartition
from simulator.fakestore import AppendFate
from simulator.node import Cluster, ConsumerSpec, Node

H = 3_000
DUE = CheckpointRule(interval_ms=H, entries=10_000)
SOFT_MS = 7 * H // 4
HARD_MS = 2 * H - 6 - 300
ALO, AMO = Delivery.AT_LEAST_ONCE, Delivery.AT_MOST_ONCE
T0 = TopicPartition("t", 0)
KEY = Key("g", "t", 0)


class Line(NamedTuple):
    """One record of the log, and its transition."""

    offset: int
    time_ms: int
    record: Record | None
    transition: Transition


class Stepping(Condition):
    """Advances the whole cluster where production code would wait."""

    def __init__(self, cluster):
        super().__init__(threading.RLock())
        self.cluster = cluster

    def wait(self, timeout=None):
        assert timeout is not None, "a wait without a deadline"
        self.cluster.run(20)
        return True


class Fates:
    """The fates of appends, which a test changes at any time."""

    def __init__(self):
        self.now = {}

    def of_append(self, writer, partition):
        return self.now.get(writer, AppendFate())


def world(partitions=1, *, records=(10,), h=H, topic="t", **limits):
    """Return a cluster with one data topic; ``cluster.fates`` has fates by writer."""
    fates = Fates()
    cluster = Cluster(
        heartbeat_interval_ms=h, partitions=partitions, policy=fates, limits=limits
    )
    cluster.fates = fates.now  # type: ignore[attr-defined]
    cluster.fill(topic, records)
    return cluster


def spec(
    *topics,
    delivery=ALO,
    most=500,
    batches=4,
    on_claimed=None,
    on_lost=None,
    on_topics=None,
    on_warm=None,
    on_standby=None,
    max_handling_ms=0,
    release_behind=False,
    **rest,
):
    """Return a subscription.

    By default, no key is released because the consumer is stuck or lags: most tests
    poll irregularly.
    """
    callbacks = Callbacks(
        on_claimed=on_claimed,
        on_lost=on_lost,
        on_topics=on_topics,
        on_warm=on_warm,
        on_standby=on_standby,
    )
    config = ConsumerConfig(
        topics=() if "pattern" in rest else topics or ("t",),
        delivery=delivery,
        max_poll_records=most,
        max_granted_batches=batches,
        max_handling_ms=max_handling_ms,
        release_behind=release_behind,
        **rest,
    )
    return ConsumerSpec(config, callbacks)


def lines(cluster, partition=0):
    """Fold one coordinating partition from its start and return all transitions."""
    state = WorldState(partition)
    return [
        Line(
            offset=stored.offset,
            time_ms=stored.timestamp_ms,
            record=transition.record,
            transition=transition,
        )
        for stored in cluster.kafka.log(cluster.place(partition)).records
        for transition in apply(state, stored.entry())
    ]


def of(cluster, client_id, kind=None, *, partition=0):
    """Return a client's lines, of one type of record or of all."""
    return [
        line
        for line in lines(cluster, partition)
        if getattr(line.record, "client_id", None) == client_id
        and (kind is None or isinstance(line.record, kind))
    ]


def takeovers(cluster, partition=0):
    """Return accepted claims of keys that had an owner before."""
    owned, found = set(), []
    for line in lines(cluster, partition):
        step = line.transition
        if step.effect == "claimed" and isinstance(line.record, ClaimingPartition):
            if step.key in owned:
                found.append(line)
            owned.add(step.key)
        elif step.effect == "released":
            owned.discard(step.key)
    return found


def fold(cluster, partition=0):
    state = WorldState(partition)
    for stored in cluster.kafka.log(cluster.place(partition)).records:
        apply(state, stored.entry())
    return state


def write(cluster, record, partition=0):
    """Append a record, as a process outside the cluster."""
    value = record if isinstance(record, bytes | None) else encode(record)
    return cluster.kafka.produce(cluster.place(partition), value)


def holders(cluster, key=KEY):
    """Return the names of the nodes that have a valid lease of a key now."""
    return [node.owner.client_id for node in cluster.nodes if key in node.held]


def held_by(node: Node, count: int):
    return lambda: len(node.held) == count


def values(polled):
    """Return the offsets of polled records, by partition."""
    return {tp.partition: [r.offset for r in rs] for tp, rs in polled.items()}


def owning(cluster, client_id="a", **rest):
    """Start a node and run until it holds the only key."""
    node = cluster.node(client_id, spec=spec(**rest))
    cluster.run_until(held_by(node, 1), 3 * H)
    cluster.run(40)
    return node


def claim_of(node, key=KEY):
    return node.session.holdings[key].claim


def pause_record(cluster, until_ms, *, seq=1, op=b"o" * 16):
    inc = b"admin".ljust(16, b".")
    return ReleaseGroup(
        client_id="admin",
        group_id="g",
        incarnation=inc,
        seq=seq,
        op_id=op,
        msg_expire_time=until_ms,
        reason=None,
    )


def pause_for(cluster, for_ms, **rest):
    until_ms = cluster.clock.wall_ms() + for_ms
    write(cluster, pause_record(cluster, until_ms, **rest))
    return until_ms


def pause_scope(cluster, for_ms, scope, *, op=b"s" * 16):
    """Pause some partitions; a scope maps topics to partitions, () for all."""
    until_ms = cluster.clock.wall_ms() + for_ms
    record = schedule(0, until_ms, op=op, scope=scope)
    write(cluster, record)
    return until_ms


def fail_engine(node):
    """Let polls raise ``LogTruncated`` without offsets: that ends an engine."""

    def poll(timeout_ms):
        raise LogTruncated("somewhere")

    node.log.poll = poll


def checkpointed(cluster, node, count=1):
    """Let a node write a checkpoint of each partition, and none afterwards."""
    node.engine.write_checkpoints("w", DUE)
    events_of = node.observer.named
    cluster.run_until(lambda: len(events_of("checkpoint_written")) >= count, 6 * H)
    node.engine.checkpointer.rule = CheckpointRule(interval_ms=0)
    cluster.run(100)
    node.observer.events.clear()


def follower(cluster):
    found = Follower(cluster.kafka.coordination_log(), cluster.clock.view())
    found.catch_up(100)
    return found


def lowered(partitions=2):
    """Return a cluster whose topic is of level 1."""
    cluster = world(partitions)
    cluster.config = msgspec.structs.replace(cluster.config, feature_level=1)
    for t in range(partitions):
        place = cluster.place(t)
        records = cluster.kafka.log(place).records
        records[0] = attrs.evolve(records[0], value=encode(cluster.config))
    return cluster


class Application:
    """An application that stands by, and the requests that it received."""

    def __init__(self, error=None):
        self.calls = []
        self.error = error

    def __call__(self, partition, position, owner):
        self.calls.append((partition.partition, position, owner))
        if self.error is not None:
            raise self.error
