"""A change of the partition count under running nodes of ``enginekit``."""

import msgspec
from enginekit import spec, world, write
from logkit import OP, decide, ident, layout_done, layout_final, pause, resolve

from kafka_marshal.errors import ClaimLost
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.hashing import home_partition
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
    """Add partitions for a change to ``count``; return its fence."""
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
    """Write the fence of a change to partition 0; members complete the change."""
    write(cluster, fence_to(cluster, count, **rest), 0)


def worlds(cluster):
    """Return the state of each partition; each call folds only new entries."""
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
    """Return the owner in the log of each partition of a topic, by its number."""
    states, found = worlds(cluster), {}
    for number in range(len(cluster.kafka.topic(topic).partitions)):
        key = Key(group, topic, number)
        place = place_of(key, partition_count=cluster.config.partition_count)
        known = states[place].keys.get(key)
        owner = None if known is None else known.owner
        found[number] = None if owner is None else owner.client_id
    return found


def placed(cluster, topic="t"):
    """Return the state of each key of a topic, in its partition under the count."""
    count = cluster.config.partition_count
    return {
        key: known
        for t, state in worlds(cluster).items()
        for key, known in state.keys.items()
        if key.topic == topic and place_of(key, partition_count=count) == t
    }


def moving(before, after, *, topic="t", group="g", count=8):
    """Return the keys of a topic that a change moves."""
    keys = [Key(group, topic, number) for number in range(count)]
    return [
        key
        for key in keys
        if place_of(key, partition_count=before) != place_of(key, partition_count=after)
    ]


class Reading:
    """The application of a node: polls, and commits what it was handed.

    Attributes:
        node: The node.
        offsets: Partition and offset of each record handed out, repeats included.
        seen: Reports of the consumer, with the partition.
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


def end_change(cluster, partitions, op):
    """Write the records that end a change in which no key moves."""
    for t in range(partitions):
        for source in worlds(cluster)[t].layout.sources:
            write(cluster, layout_done(0, source=source.partition, op=op), t)
    for t in range(partitions):
        write(cluster, layout_final(op=op), t)


def commit_at_an_earlier_home():
    """Return a cluster after two changes, a group, and its home before them.

    The log of that home has lost the Resolve of operation ``OP``, which was committed,
    and all later entries (PROTOCOL 8.5).
    """
    group_id, home = "g0", 1
    homes = [home_partition(group_id, partition_count=count) for count in (2, 4, 8)]
    assert homes[0] == home
    assert home not in homes[1:]
    cluster = level_two(2, records=[1])
    for t in (0, home):
        write(cluster, pause(2**62, group=group_id), t)
    write(cluster, decide(1, group=group_id), home)
    write(cluster, resolve(commit=True, group=group_id), 0)
    fence = fence_to(cluster, 4, op=ident("first"))
    for t in range(4):
        write(cluster, fence, t)
    kept = cluster.kafka.log(cluster.place(home)).end
    write(cluster, resolve(commit=True, group=group_id), home)
    end_change(cluster, 4, ident("first"))
    fence = fence_to(cluster, 8, op=ident("second"), generation=3)
    for t in range(8):
        write(cluster, fence, t)
    end_change(cluster, 8, ident("second"))
    assert is_over(cluster, 3)
    cluster.kafka.truncate(cluster.place(home), end=kept, leader=9)
    worlds(cluster).pop(home)
    return cluster, group_id, home
