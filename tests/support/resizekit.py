"""A small cluster in memory, and admins that change its partition count."""

from enginekit import fold, world, write
from logkit import claim, messages, release
from positionkit import Died, Stepping

from kafka_marshal.admin.pausing import Sender
from kafka_marshal.admin.resizing import Resizing
from kafka_marshal.engine.checkpoint_reader import LogCheckpoints
from kafka_marshal.protocol.layout import place_of
from kafka_marshal.protocol.types import Key

TIMEOUT_MS = 30_000
KEYS = 24
GRANTED = 5
__all__ = ["Died"]


class Waiting(Stepping):
    """Advances the cluster for as long as production code would wait.

    Attributes:
        on_step: Called before each step; if set, steps are short.
    """

    on_step = None

    def step(self, timeout_ms, **rest):
        if self.on_step is None:
            self.cluster.run(timeout_ms, step_ms=max(timeout_ms, 1))
        else:
            self.on_step()
            self.cluster.run(min(timeout_ms, 20))
        return super().step(0, **rest)


class Tool(Resizing):
    """An admin over the log in memory.

    Attributes:
        left: Records until the admin is killed; None for never.
        adds: Whether it may add Kafka partitions.
        on_step: Called while the admin waits.
    """

    def __init__(self, cluster, name="admin", *, left=None, adds=True, on_step=None):
        self._cluster, self._sender = cluster, Sender(name)
        self._clock, self._timeout_ms = cluster.clock.view(), TIMEOUT_MS
        self._follower = None
        self.left, self.adds, self.on_step = left, adds, on_step
        self.sent = 0

    def _follow(self):
        if self._follower is None:
            self._follower = Waiting(
                self._cluster, self._sender.client_id, sources=(LogCheckpoints(),)
            )
            self._follower.on_step = self.on_step
            plain = self._follower.append

            def append(partition, record):
                if self.left == self.sent:
                    raise Died
                self.sent += 1
                return plain(partition, record)

            self._follower.append = append
        return self._follower

    def _read(self):
        self._follow().catch_up(100)
        return self._follow()

    def _follow_again(self):
        self._cluster.clock.advance(100)
        self._follower = None
        return self._follow()

    def _add_partitions(self, count):
        if self.adds:
            topic = self._cluster.place(0).topic
            there = len(self._cluster.kafka.topic(topic).partitions)
            self._cluster.kafka.add_partitions(topic, count - there)

    def resize(self, count, **given):
        return self.resize_topic(count, execute=True, **given)


def key(number):
    return Key("g", "t", number)


def position_of(number):
    return 100 + number


def filled(partitions=4, *, keys=KEYS, **limits):
    """Return a cluster with released keys; every third one has granted offsets."""
    cluster = world(partitions, records=(1,) * keys, **limits)
    for number in range(keys):
        t = place_of(key(number), partition_count=partitions)
        epoch = hold(cluster, number, partitions)
        if number % 3 == 0:
            request = messages(epoch, 0, GRANTED, key=key(number))
            write(cluster, request, t)
            write(cluster, release(epoch, key=key(number)), t)
        else:
            done = release(epoch, position_of(number), key=key(number))
            write(cluster, done, t)
    return cluster


def hold(cluster, number, partitions, client="c1"):
    """Claim a key; return the epoch."""
    t = place_of(key(number), partition_count=partitions)
    generation = fold(cluster, t).config.generation
    return write(cluster, claim(client, key=key(number), generation=generation), t)


def require_whole(cluster, count, *, keys=KEYS):
    """Check that each key is unchanged, and only in its partition under the count."""
    topic = cluster.place(0).topic
    every = range(len(cluster.kafka.topic(topic).partitions))
    states = [fold(cluster, t) for t in every]
    for state in states:
        assert state.layout is None
        if state.partition < count:
            assert state.config.partition_count == count
        elif state.config is not None:
            assert state.config.partition_count <= state.partition
    for number in range(keys):
        place = place_of(key(number), partition_count=count)
        assert [t for t in every if key(number) in states[t].keys] == [place], number
        known = states[place].keys[key(number)]
        if number % 3 == 0:
            assert (known.position, known.granted) == (GRANTED + 1, GRANTED + 1)
        else:
            assert (known.position, known.granted) == (position_of(number), None)
