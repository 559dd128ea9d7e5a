"""A small cluster in memory, and admins that set positions in it."""

from enginekit import H, fold, world

from kafka_marshal.admin.pausing import Sender
from kafka_marshal.admin.set_position import PositionPlan, SetPosition, Target
from kafka_marshal.engine.follower import Follower
from kafka_marshal.protocol.hashing import coordinating_partition, home_partition
from kafka_marshal.protocol.records import (
    ClaimingMessages,
    ClaimingPartition,
    ReleasingPartition,
)
from kafka_marshal.protocol.types import Key

K = 4
KEYS = 6
HOME = home_partition("g", partition_count=K)
TIMEOUT_MS = 30_000
FOR_MS = 2 * H
OP = "0f" * 16
OLD, NEW = 9, 2


class Died(Exception):
    """The admin was killed."""


class Stepping(Follower):
    """Advances the cluster where production code would wait for the log."""

    def __init__(self, cluster, name, *, sources=()):
        self.cluster = cluster
        self.own_log = cluster.kafka.coordination_log(name=name)
        self.left = None
        super().__init__(self.own_log, cluster.clock.view(), sources=sources)

    def step(self, timeout_ms, **rest):
        if timeout_ms:
            self.cluster.run(20)
        return super().step(0, **rest)

    def append(self, partition, record):
        if self.left is not None:
            if self.left == 0:
                raise Died
            self.left -= 1
        return super().append(partition, record)


def following(cluster, name, *, sources=()):
    """Return a follower that has read the log to its end."""
    follower = Stepping(cluster, name, sources=sources)
    follower.catch_up(100)
    return follower


def plan(position=NEW, *, op=OP, count=KEYS, topic_id=None):
    targets = tuple(
        Target(topic="t", topic_id=topic_id, partition=p, position=position)
        for p in range(count)
    )
    return PositionPlan(op_id=op, group_id="g", targets=targets)


def operation(cluster, name="admin", *, wanted=None, **changes):
    return SetPosition(
        following(cluster, name),
        cluster.clock.view(),
        Sender(name),
        plan=wanted or plan(),
        config=changes.pop("config", cluster.config),
        for_ms=FOR_MS,
        **changes,
    )


def die_at(cluster, kind, *, at=None, drain_ms=TIMEOUT_MS):
    """Set positions; the admin is killed before its first record of a kind.

    Args:
        cluster: The cluster.
        kind: The type of that record.
        at: Count only records to this coordinating partition.
        drain_ms: The longest time until the group is drained.
    """
    one = operation(cluster)
    plain = one._follower.append

    def append(t, record):
        if isinstance(record, kind) and at in {None, t}:
            raise Died
        return plain(t, record)

    one._follower.append = append
    try:
        one.run(TIMEOUT_MS, drain_ms=drain_ms)
    except Died:
        return
    raise AssertionError("the admin lives")


def key(partition):
    return Key("g", "t", partition)


def place_of(partition):
    return coordinating_partition("t", partition, partition_count=K)


def write_key(cluster, partition, *, granted_to=None):
    """Let a client claim a key, and release it at position ``OLD``.

    Args:
        granted_to: The last offset granted at most once; None for no grants.
    """
    follower = following(cluster, "old")
    t, sender = place_of(partition), Sender("old")
    place = {"topic": "t", "partition": partition}

    def append(kind, **fields):
        sent = follower.append(t, kind(**sender.fields("g"), **place, **fields))
        follower.await_all([sent], TIMEOUT_MS)
        return sent.transition.epoch

    epoch = append(
        ClaimingPartition,
        generation=cluster.config.generation,
        topic_id=None,
        resume_hash=None,
        expected_epoch=None,
        resume=None,
    )
    if granted_to is not None:
        append(
            ClaimingMessages,
            epoch=epoch,
            grantee=bytes(16),
            first=0,
            proposed_last_offset=granted_to,
        )
    position = OLD if granted_to is None else None
    append(
        ReleasingPartition,
        epoch=epoch,
        position=position,
        successor=None,
        reason=None,
    )


def written(*, first=0, granted_to=None):
    """Return a cluster whose group has positions in partitions from ``first`` on."""
    cluster = world(partitions=K, records=(20,) * KEYS)
    for partition in range(first, KEYS):
        write_key(cluster, partition, granted_to=granted_to)
    return cluster


def positions(cluster):
    return [fold(cluster, place_of(p)).keys[key(p)].position for p in range(KEYS)]


def locks(cluster):
    return [k for t in range(K) for ks in fold(cluster, t).locked.values() for k in ks]


def is_paused(cluster):
    return any(fold(cluster, t).active_pause("g") for t in range(K))


def run_plan(cluster, wanted, name="admin"):
    """Run an operation to its end."""
    one = operation(cluster, name, wanted=wanted)
    return one.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)


def set_all(cluster, position=NEW, *, op=OP, count=KEYS):
    """Set the first partitions to one position."""
    wanted = plan(position, op=op, count=count)
    return run_plan(cluster, wanted, f"admin-{op[:4]}")
