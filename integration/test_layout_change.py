"""The number of coordinating partitions changes under running members."""

import threading
import time
from itertools import pairwise

import pytest
from domain import Recorder, opened
from waiting import eventually

from kafka_marshal import TopicPartition
from kafka_marshal.protocol.layout import place_of
from kafka_marshal.protocol.types import Key

COUNTS = (4, 8, 16, 8)
DATA_PARTITIONS = 12
H_MS = 10_000
GAP_MS_MAX = H_MS
"""A moving key is in use again long before anybody could take it over."""


class Member:
    """A client that handles records until it is closed, at least or at most once."""

    def __init__(self, domain, group, name, *, topic, handled, delivery):
        self.seen, self.name = Recorder(), name
        self.marshal = domain.marshal(group, name, observer=self.seen)
        self.consumer = self.marshal.consumer(topic, delivery=delivery)
        self.ends = threading.Event()
        self._handled, self._commits = handled, delivery == "alo"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self.ends.is_set():
            for records in self.consumer.poll(20).values():
                for record in records:
                    self._handled.append((record.partition, record.offset))
                    if self._commits:
                        self.consumer.commit(record)

    def close(self):
        self.ends.set()
        self._thread.join(60)
        self.marshal.close()


class Producer:
    """Writes to all data partitions in turn, until it is stopped."""

    def __init__(self, domain, topic):
        self._domain, self._topic = domain, topic
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._ends.is_set():
            for number in range(DATA_PARTITIONS):
                self._domain.produce_to(TopicPartition(self._topic, number), 1)
            time.sleep(0.02)

    def stop(self):
        self._ends.set()
        self._thread.join(60)


@pytest.mark.parametrize("delivery", ["alo", "amo"])
def test_the_count_changes_under_load(broker, unique, delivery):
    with opened(broker, unique, partitions=COUNTS[0], h_ms=H_MS) as domain:
        topic, group = domain.data_topic(DATA_PARTITIONS), unique("resized")
        handled: list[tuple[int, int]] = []
        members = [
            Member(domain, group, name, topic=topic, handled=handled, delivery=delivery)
            for name in ("a", "b")
        ]
        try:
            domain.wait_owned(group, topic, by={"a", "b"})
            producer = Producer(domain, topic)
            try:
                for before, after in pairwise(COUNTS):
                    _resize(domain, group, topic, before=before, after=after)
            finally:
                producer.stop()
            eventually(
                lambda: len(set(handled)) == sum(domain.of(topic).values()),
                "all records",
            )
        finally:
            for member in members:
                member.close()
        assert len(handled) == len(set(handled)), "nothing twice"
        ended = [e for m in members for e in m.seen.named("claim_ended")]
        assert not any(each.fields["ending"].was_lost for each in ended)
        assert all(member.seen.named("engine_failed") == [] for member in members)


def _resize(domain, group, topic, *, before, after):
    owners = domain.owners(group)
    with domain.admin() as admin:
        admin.resize_topic(after, execute=True)
    domain.forget_history()  # its log has other partitions now
    moved = 0
    for number in range(DATA_PARTITIONS):
        key = Key(group, topic, number)
        place, was = (place_of(key, partition_count=n) for n in (after, before))
        moved += place != was

        def is_owned(key=key, place=place):
            known = domain.history().worlds[place].keys.get(key)
            return known is not None and known.owner is not None

        eventually(is_owned, f"{key} is owned in {place}", timeout_ms=GAP_MS_MAX)
    assert moved
    # Its last owner has half a heartbeat interval to claim each one first; on a busy
    # machine that may pass.
    assert domain.owners(group).keys() == owners.keys()
