"""The number of coordinating partitions changes under running members."""

import threading
import time
from collections import Counter
from itertools import pairwise

import pytest
from domain import opened
from members import Member
from waiting import eventually, wall_ms

from kafka_marshal import TopicPartition
from kafka_marshal.protocol.layout import place_of
from kafka_marshal.protocol.types import Key

COUNTS = (4, 8, 16, 8)
NAMES = ("a", "b")
DATA_PARTITIONS = 12
H_MS = 10_000
# Without a handoff, a takeover of a key takes two intervals.
GAP_MS_MAX = H_MS


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
def test_the_partition_count_changes_under_load_without_lost_claims(
    broker, unique, delivery, via
):
    with opened(broker, unique, partitions=COUNTS[0], h_ms=H_MS, via=via) as domain:
        topic, group = domain.data_topic(DATA_PARTITIONS), unique("resized")
        handled: list[tuple[int, int]] = []
        members = [
            Member(domain, group, name, topic=topic, handled=handled, delivery=delivery)
            for name in NAMES
        ]
        try:
            _shared(domain, group)
            producer = Producer(domain, topic)
            try:
                for before, after in pairwise(COUNTS):
                    _resize(domain, group, topic, before=before, after=after)
            finally:
                producer.stop()
            try:
                eventually(
                    lambda: len(set(handled)) == sum(domain.of(topic).values()),
                    "all records",
                )
            except AssertionError as late:
                found = _findings(domain, Key(group, topic, 0), handled, members)
                raise AssertionError("\n".join([str(late), *found])) from late
        finally:
            for member in members:
                member.close()
        assert len(handled) == len(set(handled)), "nothing twice"
        ended = [e for m in members for e in m.seen.named("claim_ended")]
        assert not any(each.fields["ending"].was_lost for each in ended)
        assert all(member.seen.named("engine_failed") == [] for member in members)


def _findings(domain, first, handled, members):
    """Yield details about missing records: partitions, tenures and events."""
    for place, count in sorted(domain.of(first.topic).items()):
        missing = sorted({(place.partition, n) for n in range(count)} - set(handled))
        if missing:
            key = first._replace(partition=place.partition)
            yield f"{key} lacks {len(missing)} of {count}: {missing[:3]}..{missing[-1]}"
            yield from map(str, domain.history().tenures(first.group_id).get(key, ()))
            for t, world in domain.history().worlds.items():
                if key in world.keys:
                    yield f"partition {t} has {world.keys[key]}"
    for member in members:
        yield f"{member.marshal}, thread ended by {member.error!r}"
        yield from map(str, member.seen.events)


def _resize(domain, group, topic, *, before, after):
    owners, began_ms = _shared(domain, group), wall_ms()
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

    def look():
        # A sidecar claims a key before it hands it to a client.
        then = domain.owners(group)
        return then if set(NAMES).issuperset(then.values()) else None

    then = eventually(look, "each is held by a member", timeout_ms=GAP_MS_MAX)
    assert then.keys() == owners.keys()
    if not _were_late(domain, group, since_ms=began_ms):
        assert then == owners, "each keeps what it had"


def _shared(domain, group):
    """Wait until each member has its share; return the owners.

    The first one has all partitions before the other joins, and releases them one by
    one: all may be owned before the shares are even.
    """

    def look():
        owners = domain.owners(group)
        shares = dict.fromkeys(NAMES, DATA_PARTITIONS // len(NAMES))
        return owners if Counter(owners.values()) == shares else None

    return eventually(look, "each has its share")


def _were_late(domain, group, *, since_ms):
    """Return whether another member claimed a key after its last owner was late.

    The last owner may claim first for half a heartbeat interval; on a busy machine it
    may need longer. Then shares change.
    """
    return any(
        one.client_id != two.client_id
        and two.begun_ms >= since_ms
        and two.begun_ms - one.ended_ms >= H_MS // 2
        for tenures in domain.history().tenures(group).values()
        for one, two in pairwise(tenures)
    )
