"""A cluster with a keyed data topic, and admins that grow it."""

from types import SimpleNamespace

from enginekit import fold, world, write
from logkit import release
from opening import Opened
from resizekit import TIMEOUT_MS, Died, Waiting, hold, key

from kafka_marshal.admin.growing import Growing
from kafka_marshal.admin.pausing import Sender
from kafka_marshal.protocol.codec import decode
from kafka_marshal.protocol.layout import place_of
from kafka_marshal.protocol.records import DataGrowth
from kafka_marshal.protocol.types import TopicPartition

__all__ = ["Died"]
RECORDS = (5, 0, 7, 9)
SHORT_MS = 20_000


class Tool(Growing, Opened):
    """An admin over the log in memory.

    Attributes:
        left: Changing requests until the admin is killed; None for never.
        done: Its changes in order: ``log`` or ``topic``.
        refusal: The error raised instead of adding partitions.
        objection: The error raised instead of checking whether they may be added.
    """

    def __init__(
        self, cluster, name="admin", *, left=None, refusal=None, objection=None
    ):
        self._cluster, self._sender = cluster, Sender(name)
        self._clock, self._timeout_ms = cluster.clock.view(), TIMEOUT_MS
        self._settings = SimpleNamespace(coordination_topic="__marshal")
        self._data, self._topics = cluster.kafka.data_log(), self
        self._follower = None
        self.left, self.refusal, self.done = left, refusal, []
        self.objection = objection

    def partition_count(self, topic):
        found = self._describe(topic)
        return None if found is None else found.partition_count

    def _change(self, what):
        if self.left == len(self.done):
            raise Died
        self.done.append(what)

    def _follow(self):
        if self._follower is None:
            self._follower = Waiting(self._cluster, self._sender.client_id)
            plain = self._follower.append

            def append(partition, record):
                self._change("log")
                return plain(partition, record)

            self._follower.append = append
        return self._follower

    def _settled(self):
        self._follow().catch_up(100)
        return self._follow().worlds[0].config

    def log_ends(self, partitions):
        return self._data.ends(partitions, TIMEOUT_MS)

    def add_partitions(self, topic, *, count, timeout_ms, validate_only=False):
        if validate_only:
            if self.objection is not None:
                raise self.objection
            return
        self._change("topic")
        if self.refusal is not None:
            raise self.refusal
        there = len(self._cluster.kafka.topic(topic).partitions)
        self._cluster.kafka.add_partitions(topic, count - there)

    def grow(self, count=8, topic="t", **given):
        settle_ms = given.pop("settle_ms", SHORT_MS)
        return self.grow_topic(topic, count, settle_ms=settle_ms, execute=True, **given)


def keyed(partitions=2):
    """Return a cluster with a topic of four partitions."""
    return world(partitions, records=RECORDS)


def produce(cluster, number):
    cluster.kafka.produce(TopicPartition("t", number), b"late")


def records(cluster):
    """Return the growths in the log, as records."""
    stored = cluster.kafka.log(cluster.place(0)).records
    found = [decode(each.value) for each in stored]
    return [each for each in found if isinstance(each, DataGrowth)]


def growths(cluster):
    return fold(cluster).growths


def partitions(cluster, topic="t"):
    return len(cluster.kafka.topic(topic).partitions)


def at(cluster, number, position):
    """Let group g claim a partition, and release it at a position; None keeps it."""
    t = place_of(key(number), partition_count=cluster.config.partition_count)
    epoch = hold(cluster, number, cluster.config.partition_count)
    if position is not None:
        write(cluster, release(epoch, position, key=key(number)), t)


def require_grown(cluster, ends=RECORDS):
    (found,) = growths(cluster)
    assert (found.old_count, found.new_count, found.ends) == (4, 8, tuple(ends))
    assert found.topic_id == cluster.kafka.topic("t").topic_id
    assert partitions(cluster) == 8
