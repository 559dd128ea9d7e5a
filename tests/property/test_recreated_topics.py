"""Two members whose topic is deleted and created again at random: S3 for each topic.

The value of each record names the topic that it was written to, so that equal offsets
of several topics of one name are distinguished.
"""

import random
from collections import Counter

import pytest
from enginekit import ALO, AMO, KEY, T0, H, fold, spec, world

from kafka_marshal.errors import ClaimLost

SEEDS = range(12)
ROUNDS = 200
STEP_MS = 100


class Fleet:
    """Two members that consume one partition, and the records handed to them."""

    def __init__(self, seed, delivery):
        self.rng = random.Random(seed)
        self.cluster = world(records=[0])
        self.settings = {
            "delivery": delivery,
            "most": self.rng.choice([1, 3, 20]),
            "metadata_refresh_ms": self.rng.choice([500, 20 * H]),
        }
        self.commits = delivery is ALO
        self.life = 1
        self.written = Counter()
        self.handed = Counter()
        self.nodes = [self.start("a"), self.start("b")]

    def start(self, name):
        return self.cluster.node(name, spec=spec(**self.settings))

    def write(self, count):
        if not self.cluster.kafka.has_topic("t"):
            return
        for _ in range(count):
            value = b"%d/%d" % (self.life, self.written[self.life])
            self.cluster.kafka.produce(T0, value)
            self.written[self.life] += 1

    def recreate(self):
        """Delete the topic if it exists; mostly, create it again at once."""
        if self.cluster.kafka.has_topic("t"):
            self.cluster.kafka.delete_topic("t")
        if self.rng.random() < 0.7:
            self.create()

    def create(self):
        if not self.cluster.kafka.has_topic("t"):
            self.life += 1
            self.cluster.kafka.create_topic("t", 1)
            self.write(self.rng.choice([0, 1, 30]))

    def poll(self, node):
        try:
            found = node.consumer.poll(0)
        except ClaimLost:
            return
        for records in found.values():
            self.handed.update(record.value for record in records)
        if self.commits and self.rng.random() < 0.8:
            node.consumer.commit()

    def live(self):
        """Do one random action, then let ``STEP_MS`` pass."""
        what = self.rng.random()
        if what < 0.02:
            self.recreate()
        elif what < 0.03 and self.cluster.kafka.has_topic("t"):
            index = self.rng.randrange(2)
            self.cluster.crash(self.nodes[index])
            self.nodes[index] = self.start(self.nodes[index].owner.client_id)
        elif what < 0.3:
            self.write(self.rng.randint(1, 10))
        for node in self.nodes:
            if self.rng.random() < 0.5:
                self.poll(node)
        self.cluster.run(STEP_MS)

    def settle(self):
        """Have the last topic consumed to its end."""
        self.create()
        # No process crashes any more, so no record of this topic may be lost.
        self.recreate_for_good()
        end = self.written[self.life]

        def is_done():
            for node in self.nodes:
                self.poll(node)
            known = fold(self.cluster).keys[KEY]
            topic_id = self.cluster.kafka.topic("t").topic_id
            return known.topic_id == topic_id and known.position == end

        self.cluster.run_until(is_done, 40 * H, step_ms=STEP_MS)
        for _ in range(3):
            for node in self.nodes:
                self.poll(node)
            self.cluster.run(STEP_MS)

    def recreate_for_good(self):
        self.cluster.kafka.delete_topic("t")
        self.life += 1
        self.cluster.kafka.create_topic("t", 1)
        self.write(40)


@pytest.mark.parametrize("delivery", [ALO, AMO], ids=["alo", "amo"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_recreated_topic_is_consumed_by_its_own_offsets(seed, delivery):
    fleet = Fleet(seed, delivery)
    for _ in range(ROUNDS):
        fleet.live()
    fleet.settle()
    if delivery is AMO:
        twice = [value for value, count in fleet.handed.items() if count > 1]
        assert not twice
    last = {b"%d/%d" % (fleet.life, n) for n in range(fleet.written[fleet.life])}
    assert last <= fleet.handed.keys()
    for node in fleet.nodes:
        assert node.session.failure is None
        assert node.observer.named("position_out_of_range") == []
