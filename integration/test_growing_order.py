"""A keyed topic grows under load: each key is handled in the order it was sent in."""

import threading
import time

import pytest
from domain import Recorder, opened
from kafka import KafkaProducer
from waiting import eventually

from kafka_marshal import TopicPartition

OLD, NEW = 4, 8
NAMES = "ab"
# Records of this old partition are handled after those of all others.
HELD = 0
KEYS, BACKLOG_EACH = 48, 20
H_MS, REFRESH_MS = 3_000, 500
# The second producer learns the new count late, as with Kafka's defaults.
METADATA_MS = (100, 2_000)
# Records of each key that are sent by the new partition count.
AFTERWARDS = 20


class Producer:
    """Sends numbered records of its own keys until it has sent enough.

    Attributes:
        sent: How many records of each key were sent.
        has_learnt: Set once all records that were sent with the old count are in the
            log, and later ones are sent with the new count.
    """

    def __init__(self, domain, topic, keys, *, metadata_ms):
        self._topic = topic
        self._kafka = KafkaProducer(
            bootstrap_servers=domain.servers,
            metadata_max_age_ms=metadata_ms,
            linger_ms=5,
        )
        self.sent = dict.fromkeys(keys, 0)
        self.has_learnt, self._may_end = threading.Event(), threading.Event()
        for _ in range(BACKLOG_EACH):
            self._send_all()
        self._kafka.flush(timeout=60)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self):
        self._thread.start()

    def _send_all(self):
        for key in self.sent:
            value = b"%d" % self.sent[key]
            self._kafka.send(self._topic, value, key=key)
            self.sent[key] += 1

    def _run(self):
        after = 0
        while after < AFTERWARDS:
            is_new = len(self._kafka.partitions_for(self._topic)) == NEW
            self._send_all()
            after += is_new
            if is_new and not self.has_learnt.is_set():
                self._kafka.flush(timeout=60)
                self.has_learnt.set()
            time.sleep(0.05)
        self._kafka.flush(timeout=60)

    def join(self):
        self._thread.join(60)
        assert not self._thread.is_alive()

    def close(self):
        self._kafka.close(timeout=5)


class Member:
    """Handles records, one at a time, until it is closed; those of ``HELD`` last.

    Args:
        handled: Each record as it is handled: its key, number and partition.
        may_handle: Set when records of ``HELD`` may be handled.
    """

    def __init__(self, domain, group, name, *, topic, handled, may_handle):
        self.seen = Recorder()
        self._marshal = domain.marshal(group, name, observer=self.seen)
        self._consumer = self._marshal.consumer(
            topic,
            on_claimed=self._hold,
            metadata_refresh_ms=REFRESH_MS,
            release_behind=False,
        )
        self._handled, self._may_handle = handled, may_handle
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _hold(self, place, _token):
        if place.partition == HELD and not self._may_handle.is_set():
            self._consumer.pause(place)

    def _run(self):
        while not self._ends.is_set():
            if self._may_handle.is_set():
                self._consumer.resume(*self._consumer.paused())
            for records in self._consumer.poll(20).values():
                for record in records:
                    row = record.key, int(record.value), record.partition
                    self._handled.append(row)
                    self._consumer.commit(record)

    def leave(self):
        """Stop and release nothing: others take over once its claims are stale."""
        self._ends.set()
        self._thread.join(60)
        self._marshal.close(release=False)

    def close(self):
        self._ends.set()
        self._thread.join(60)
        self._marshal.close()


def out_of_order(handled):
    """Return the keys of which a record was first handled before an earlier one."""
    highest, wrong, seen = {}, set(), set()
    for key, number, _ in handled:
        if (key, number) not in seen and number < highest.get(key, -1):
            wrong.add(key)
        seen.add((key, number))
        highest[key] = max(number, highest.get(key, -1))
    return wrong


def run(domain, topic, *, grow, until):
    """Handle everything while the topic grows; return what was handled, in order.

    Args:
        domain: The domain.
        topic: A topic with ``OLD`` partitions.
        grow: Called with the producers, adds the partitions.
        until: New partitions of which records are handled before those of ``HELD``,
            whose owner then leaves.
    """
    names = [b"key-%d" % number for number in range(KEYS)]
    halves = names[::2], names[1::2]
    producers = [
        Producer(domain, topic, keys, metadata_ms=age_ms)
        for keys, age_ms in zip(halves, METADATA_MS, strict=True)
    ]
    group, handled, members = domain.unique("group"), [], []
    may_handle = threading.Event()
    try:
        for each in producers:
            each.start()
        for name in NAMES:
            member = Member(
                domain,
                group,
                name,
                topic=topic,
                handled=handled,
                may_handle=may_handle,
            )
            members.append(member)
        domain.wait_owned(group, topic, by={"a", "b"})
        grow(producers)
        for each in producers:
            each.join()
        eventually(
            lambda: until <= {partition for *_, partition in [*handled]},
            f"partitions {sorted(until)} are handled",
        )
        assert HELD not in {partition for *_, partition in [*handled]}
        before = domain.states(group).keys()
        owner = domain.owners(group)[TopicPartition(topic, HELD)]
        members[NAMES.index(owner)].leave()
        may_handle.set()
        total = sum(sum(each.sent.values()) for each in producers)
        eventually(
            lambda: len({row[:2] for row in [*handled]}) == total, f"{total} records"
        )
    finally:
        for each in (*members, *producers):
            each.close()
    assert {partition for *_, partition in handled} == set(range(NEW))
    assert all(each.seen.named("engine_failed") == [] for each in members)
    return handled, {key.partition for key in before}


@pytest.fixture
def domain(broker, unique, via):
    with opened(broker, unique, h_ms=H_MS, via=via) as domain:
        yield domain


def test_each_key_is_handled_in_order_while_its_topic_grows(domain):
    topic = domain.data_topic(OLD)

    def grow(producers):
        def wait_for_producers(progress):
            # However long they take on this machine: instead of ``settle_ms``.
            if progress.step == "end":
                assert all(each.has_learnt.wait(60) for each in producers)

        with domain.admin() as admin:
            admin.grow_topic(
                topic,
                NEW,
                settle_ms=1_000,
                execute=True,
                on_progress=wait_for_producers,
            )

    others = set(range(OLD, NEW)) - {HELD + OLD}
    handled, claimed = run(domain, topic, grow=grow, until=others)
    assert claimed == set(range(NEW)) - {HELD + OLD}
    assert out_of_order(handled) == set()
    with domain.admin() as admin:
        (report,) = admin.growths(topic)
    assert [each.waiting for each in report.sources] == [()] * OLD


@pytest.mark.direct
def test_without_an_announcement_keys_are_handled_out_of_order(domain):
    """Shows that the test above can fail: members claim new partitions at once."""
    topic = domain.data_topic(OLD)

    def grow(_):
        domain.topics.add_partitions(topic, count=NEW)

    handled, claimed = run(domain, topic, grow=grow, until=set(range(OLD, NEW)))
    assert claimed == set(range(NEW))
    assert out_of_order(handled) != set()
