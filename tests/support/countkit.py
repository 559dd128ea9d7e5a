"""A change of the partition count under running nodes of ``enginekit``."""

import msgspec
from enginekit import spec, world, write
from logkit import OP

from kafka_marshal.errors import ClaimLost
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.layout import place_of
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import LayoutFence
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key


def level_two(partitions, **rest):
    """Return a world whose topic can change its count."""
    cluster = world(partitions, **rest)
    assert cluster.config.feature_level >= 2
    return cluster


def fence_to(cluster, count, *, op=OP, generation=2):
    """Return the fence of a change to ``count``, and add partitions for it."""
    before = cluster.config
    there = len(cluster.kafka.topic("__marshal").partitions)
    if there < count:
        cluster.kafka.add_partitions("__marshal", count - there)
    config = msgspec.structs.replace(
        before, partition_count=count, generation=generation, era=before.era + 1
    )
    cluster.config = config
    return LayoutFence(
        client_id="admin",
        group_id="marshal",
        incarnation=b"admin".ljust(16, b"."),
        seq=1,
        op_id=op,
        from_count=before.partition_count,
        config=encode(config),
    )


def resize(cluster, count, **rest):
    """Write the fence of a change to partition 0; members do the rest."""
    write(cluster, fence_to(cluster, count, **rest), 0)


def worlds(cluster):
    """Return the state of each partition, folded from where the last call ended."""
    states = cluster.__dict__.setdefault("folded", {})
    for t in range(len(cluster.kafka.topic("__marshal").partitions)):
        log = cluster.kafka.log(cluster.place(t))
        state = states.get(t)
        if state is None or state.next_offset > log.end:
            state = states[t] = WorldState(t)
        for stored in log.read(state.next_offset, log.end):
            apply(state, stored.entry())
    return states


def is_over(cluster, generation=2):
    """Return whether the change has ended in each partition."""
    return all(
        state.config is not None
        and state.config.generation == generation
        and state.layout is None
        for state in worlds(cluster).values()
    )


def owners(cluster, topic="t", group="g"):
    """Return the owner of each partition of a topic in the log, by its number."""
    states, found = worlds(cluster), {}
    for number in range(len(cluster.kafka.topic(topic).partitions)):
        key = Key(group, topic, number)
        place = place_of(key, partition_count=cluster.config.partition_count)
        known = states[place].keys.get(key)
        owner = None if known is None else known.owner
        found[number] = None if owner is None else owner.client_id
    return found


def moving(before, after, *, topic="t", group="g", count=8):
    """Return the keys of a topic that a change moves."""
    keys = [Key(group, topic, number) for number in range(count)]
    return [
        key
        for key in keys
        if place_of(key, partition_count=before) != place_of(key, partition_count=after)
    ]


class Reading:
    """The application of a node: polls, and commits what it has read.

    Attributes:
        node: The node.
        offsets: Partition and offset of each record, as often as it was handed out.
        seen: What the consumer reported, with the partition.
        lost: Claims that were lost with uncommitted records.
        skipped: Partitions whose records it never finishes.
    """

    def __init__(self, cluster, client_id, *topics, **rest):
        self.offsets, self.seen, self.lost = [], [], []
        self.skipped = set()
        note = self.seen.append
        self.node = cluster.node(
            client_id,
            spec=spec(
                *topics,
                on_claimed=lambda place, *_: note(("claimed", place)),
                on_lost=lambda place, *_: note(("lost", place)),
                **rest,
            ),
        )

    def step(self):
        try:
            polled = self.node.consumer.poll(0)
        except ClaimLost as error:
            self.lost.append(error)
            return
        for place, records in polled.items():
            self.offsets += [(place.partition, each.offset) for each in records]
            if place.partition not in self.skipped:
                self.node.consumer.commit(records)
