"""Fleets whose coordination log is truncated at random (PROTOCOL 7.5).

Every engine must continue, each key must have one holder afterwards, and at most once
only offsets that were reported as exposed may be handed out twice.
"""

import random

import pytest
from enginekit import AMO, H, fold, lines, spec, world

from kafka_marshal.protocol.types import Key

NODES = 3
ROUNDS = 12


def poll(node, seen):
    for place, records in node.consumer.poll(0).items():
        seen.setdefault(place.partition, []).extend(r.offset for r in records)


def exposed(nodes):
    """Return the offsets that were reported as exposed, by partition."""
    found = {}
    for node in nodes:
        for event in node.observer.named("grant_exposed"):
            span = range(event.fields["first"], event.fields["last"] + 1)
            found.setdefault(event.fields["key"].partition, set()).update(span)
    return found


def is_grant(line):
    return line.transition.effect == "granted"


def drive(cluster, nodes, seen, duration_ms):
    for _ in range(duration_ms // 20):
        cluster.run(20)
        for node in nodes:
            poll(node, seen)


@pytest.mark.parametrize("seed", range(5))
def test_only_offsets_reported_as_exposed_are_handed_out_twice(seed):
    chance = random.Random(seed)
    cluster = world(records=(400,) * 4)
    nodes = [
        cluster.node(f"c{n}", spec=spec(delivery=AMO, most=5, on_lost=lambda *_: None))
        for n in range(NODES)
    ]
    seen = {}
    for leader in range(1, ROUNDS + 1):
        drive(cluster, nodes, seen, chance.randrange(200, 2 * H))
        log = cluster.kafka.log(cluster.place(0))
        # Kafka's committed offsets would replace the positions that the log loses.
        cluster.kafka.groups.clear()
        # The Config always stays: without it, no key can be claimed.
        end = max(1, log.end - int(chance.paretovariate(0.7)))
        granted = [n for n, line in enumerate(lines(cluster)) if is_grant(line)]
        if granted and chance.randrange(2):
            end = lines(cluster)[granted[-1]].offset
        cluster.kafka.truncate(cluster.place(0), end=end, leader=leader)
    drive(cluster, nodes, seen, 6 * H)
    assert [node.engine.failure for node in nodes] == [None] * NODES
    assert all(node.observer.named("log_truncated") for node in nodes)
    reported = exposed(nodes)
    for partition, offsets in seen.items():
        twice = {offset for offset in offsets if offsets.count(offset) > 1}
        assert twice <= reported.get(partition, set()), (seed, partition, sorted(twice))
    # In the end each key has one holder, which is the owner in the log.
    state = fold(cluster)
    for number in range(4):
        key = Key("g", "t", number)
        holders = [node.owner for node in nodes if key in node.held]
        assert holders == [state.keys[key].owner]
        digests = {id(node.engine.context.replicas[0].world) for node in nodes}
        assert len(digests) == NODES
