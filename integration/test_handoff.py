"""Warm handoffs and standbys on a real broker."""

import json
import threading
import time

import pytest
from clikit import Cli
from domain import Recorder, opened
from waiting import eventually

from kafka_marshal.protocol.types import TopicPartition

LOAD_S = 1.0
RECORDS = 400


@pytest.fixture(scope="module")
def domain(broker, unique):
    # One transport is enough: the tests do not depend on it.
    with opened(broker, unique) as domain:
        yield domain


class Member:
    """A client whose application handles one record after another, and commits it."""

    def __init__(self, domain, group, name, topic, handled, **settings):
        self.name, self.handled = name, handled
        self.observer = Recorder()
        self.marshal = domain.marshal(group, name, observer=self.observer)
        self.consumer = self.marshal.consumer(topic, max_poll_records=1, **settings)
        self.ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self.ends.is_set():
            for records in self.consumer.poll(50).values():
                for record in records:
                    place = (record.partition, record.offset)
                    self.handled.append((self.name, place, time.monotonic()))
                    self.consumer.commit(record)

    def close(self):
        self.ends.set()
        self._thread.join(60)
        self.marshal.close()


def test_the_owner_works_until_its_successor_has_loaded(
    domain, unique, record_property
):
    topic = domain.data_topic(2)
    group = unique("warm")
    handled, loads = [], []
    first = Member(domain, group, "w1", topic, handled)
    domain.wait_owned(group, topic, by={"w1"})
    stop = threading.Event()
    produced = [0]

    def produce():
        while not stop.wait(0.02) and produced[0] < RECORDS:
            for number in (0, 1):
                domain.produce_to(TopicPartition(topic, number), 1)
            produced[0] += 1

    producing = threading.Thread(target=produce, daemon=True)
    producing.start()

    def on_warm(partition, position, from_client):
        begun = time.monotonic()
        time.sleep(LOAD_S)
        loads.append((partition, position, from_client, begun, time.monotonic()))

    second = Member(domain, group, "w2", topic, handled, on_warm=on_warm)
    try:
        domain.wait_owned(group, topic, by={"w1", "w2"})
        eventually(
            lambda: any(who == "w2" for who, *_ in handled), "the successor works"
        )
        stop.set()
        producing.join(60)
        eventually(
            lambda: len({place for _, place, _ in handled}) == 2 * produced[0],
            "everything is handled",
        )
    finally:
        stop.set()
        second.close()
        first.close()
    ((partition, _, owner, begun, ended),) = loads
    assert owner == "w1"
    of_it = [
        (who, place[1], at)
        for who, place, at in handled
        if place[0] == partition.partition
    ]
    # The owner handled records while its successor loaded ...
    assert any(who == "w1" and begun < at < ended for who, _, at in of_it)
    # ... and nothing is lost or handled twice, or out of order.
    assert [offset for _, offset, _ in of_it] == list(range(produced[0]))
    names = [who for who, *_ in of_it]
    assert names == sorted(names)
    after = names.index("w2")
    assert of_it[after][2] > ended
    gap_ms = (of_it[after][2] - of_it[after - 1][2]) * 1000
    record_property("gap_ms", round(gap_ms))
    print(json.dumps({"gap_ms": gap_ms}))  # noqa: T201 - shown with -s
    steps = [
        step.effect
        for step in domain.history().of(
            "offered", "ready", "released", "claimed", group_id=group
        )
        if step.key.partition == partition.partition
    ]
    assert steps[:5] == ["claimed", "offered", "ready", "released", "claimed"]


class SlowReader:
    """Reads like the reader of a consumer; returns nothing once ``is_slow`` is set."""

    def __init__(self, reader):
        self._reader = reader
        self.is_slow = False

    def __getattr__(self, name):
        return getattr(self._reader, name)

    def poll(self, timeout_ms, max_records):
        if not self.is_slow:
            return self._reader.poll(timeout_ms, max_records)
        time.sleep(timeout_ms / 1000)
        return {}


@pytest.fixture(params=["fast", "kafka-python", "sidecar"])
def by_way(request, broker, unique):
    is_hosted = request.param == "sidecar"
    way = {"via": "sidecar"} if is_hosted else {"transport": request.param}
    with opened(broker, unique, **way) as domain:
        yield domain


@pytest.mark.parametrize("delivery", ["alo", "amo"])
def test_a_successor_hands_out_records_that_it_fetched_before_its_claim(
    by_way, unique, delivery
):
    topic, group = by_way.data_topic(2, 100), unique("ahead")
    owner = by_way.marshal(group, "w1")
    observer, may_end = Recorder(), threading.Event()
    successor = by_way.marshal(group, "w2", observer=observer)
    try:
        first = owner.consumer(
            topic, delivery=delivery, max_poll_records=10, max_handling_ms=0
        )
        eventually(lambda: len(first.assignment()) == 2, "it has both")
        handed = [each for each in [first.poll(1_000) for _ in range(3)] if each]
        assert handed
        first.commit()
        first.poll(0)
        first.flush()
        second = successor.consumer(
            topic,
            delivery=delivery,
            max_handling_ms=0,
            on_warm=lambda *_: may_end.wait(60),
        )
        fetcher = second._subscription.warm_fetcher
        slow = second._reader = second._dispatcher._reader = SlowReader(second._reader)
        second._dispatcher._pipeline._reader = slow
        eventually(lambda: observer.named("warming"), "it warms up")
        eventually(lambda: fetcher.held_bytes > 0, "it fetches meanwhile")
        assert not second.poll(0)
        slow.is_slow = True
        may_end.set()

        def moved():
            # At most once the next poll shows that its records are finished.
            first.commit()
            first.poll(0, max_records=1)
            first.commit()
            return second.assignment()

        eventually(moved, "the partition moves")
        (place,) = second.assignment()
        found = eventually(lambda: second.poll(100), "they are handed out")
        seen = [record.offset for record in found[place]]
        assert not found.keys() - {place}
        # Later records are fetched as usual, and none is missing.
        slow.is_slow = False
        by_way.produce(topic, 5)

        def rest():
            second.commit()
            seen.extend(record.offset for record in second.poll(100).get(place, ()))
            return seen[-1] == 104

        eventually(rest, "the rest of the partition")
        assert seen == list(range(seen[0], 105))
    finally:
        may_end.set()
        successor.close()
        owner.close()


def test_a_standby_has_loaded_the_state_before_its_owner_dies(domain, unique, tmp_path):
    """Both are on this host, so each stands by for the other."""
    topic, group = domain.data_topic(4), unique("standby")
    calls = {"w1": [], "w2": []}

    def member(name):
        def on_standby(*call):
            calls[name].append(call)

        return Member(domain, group, name, topic, [], standbys=1, on_standby=on_standby)

    def held_by(name):
        return {place for place, who in domain.owners(group).items() if who == name}

    first, second = member("w1"), member("w2")
    try:
        eventually(lambda: len(held_by("w1")) == len(held_by("w2")) == 2, "they share")
        loaded = lambda: {  # noqa: E731
            place for place, _, owner in calls["w2"] if owner == "w1"
        }
        eventually(lambda: loaded() >= held_by("w1"), "the second stands by")

        def shown():
            return Cli(domain, tmp_path).json("plan", "show", group)

        eventually(
            lambda: [row["standbys_count"] for row in shown()["members"]] == [2, 2],
            "each is shown as standby for two",
        )
        assert {len(row["standbys"]) for row in shown()["standbys"]} == {1}
        first.ends.set()
        first.marshal.close(release=False)
        domain.wait_owned(group, topic, by={"w2"})
        forgotten = [place for place, _, owner in calls["w2"] if owner is None]
        assert not set(forgotten) & held_by("w2")
    finally:
        first.close()
        second.close()
