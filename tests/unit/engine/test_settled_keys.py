"""When a planner need not read the keys of its group again."""

import pytest
import rowkit
from enginekit import H, spec, world, write
from logkit import KEY, Log, beat, claim, offer, pause, release, schedule
from logkit import H as INTERVAL_MS
from logkit import settings as group_settings

from kafka_marshal.engine.replica import Replica
from kafka_marshal.engine.settled_keys import SettledKeys
from kafka_marshal.protocol.settings import NO_SETTINGS, Settings

STALE_MS = 2 * INTERVAL_MS + 1


class Reader:
    """One partition, and how far a planner has read it."""

    def __init__(self):
        self.log = Log(level=2)
        self.replica = Replica(0, now_ms=0)
        self.replica.begin(self.log.state, 0)
        self.keys = SettledKeys("g")
        self.settings = NO_SETTINGS

    def append(self, record, *, after=0):
        """Append a record that is folded at once."""
        (first, *_) = self.log.append(record, after=after)
        assert first.outcome == "accepted", first
        self.replica._note_changes((first,))
        return first.epoch

    def have_changed(self, elapsed_ms=0):
        return self.keys.have_changed(
            {0: self.replica}, self.settings, now_ms=elapsed_ms
        )


@pytest.fixture
def reader():
    return Reader()


def test_the_first_round_reads_and_the_next_ones_do_not(reader):
    reader.append(claim())
    assert reader.have_changed()
    assert reader.keys.are_settled
    assert not reader.have_changed()
    assert not reader.have_changed(STALE_MS - 1)


def test_an_owner_that_becomes_stale_is_a_change_in_each_round(reader):
    reader.append(claim())
    reader.have_changed()
    for _ in range(2):
        assert reader.have_changed(STALE_MS)
        assert not reader.keys.are_settled
    assert reader.have_changed(), "log time went back"
    assert not reader.have_changed()


def test_renewals_are_no_changes(reader):
    epoch = reader.append(claim())
    reader.have_changed()
    reader.append(beat(epoch), after=INTERVAL_MS)
    assert not reader.have_changed(STALE_MS - 1)


def test_a_record_that_names_a_key_is_a_change(reader):
    epoch = reader.append(claim())
    reader.have_changed()
    reader.append(release(epoch))
    assert reader.have_changed()
    assert not reader.have_changed(10 * STALE_MS), "it is free for good"


def test_keys_of_other_groups_do_not_matter(reader):
    reader.append(claim(key=KEY._replace(group_id="other")))
    reader.have_changed()
    assert not reader.have_changed(STALE_MS)


def test_a_key_that_is_handed_over_waits_for_its_successor(reader):
    reader.append(release(reader.append(claim()), successor="c2"))
    for _ in range(2):
        assert reader.have_changed(INTERVAL_MS // 2 - 1)
    assert reader.have_changed(INTERVAL_MS // 2), "the wait has ended"
    assert not reader.have_changed(INTERVAL_MS // 2)
    assert reader.have_changed(INTERVAL_MS // 2 - 1), "log time went back"


def test_a_key_waits_for_a_restart(reader):
    reader.settings = Settings(generation=1, grace_ms=INTERVAL_MS)
    reader.append(release(reader.append(claim()), reason="restart"))
    for _ in range(2):
        assert reader.have_changed(INTERVAL_MS - 1)
    assert reader.have_changed(INTERVAL_MS)
    assert not reader.have_changed(INTERVAL_MS)
    reader.settings = Settings(generation=2, grace_ms=2 * INTERVAL_MS)
    for _ in range(2):
        assert reader.have_changed(INTERVAL_MS)


def test_an_offer_is_remembered_after_its_end(reader):
    reader.settings = Settings(generation=1, handoff_ms=INTERVAL_MS)
    epoch = reader.append(claim())
    reader.append(offer(epoch, within_ms=400))
    end_ms = 400 + INTERVAL_MS
    for elapsed_ms in (0, 0, 400, end_ms - 1):
        assert reader.have_changed(elapsed_ms)
    assert reader.have_changed(end_ms)
    assert not reader.have_changed(end_ms)


@pytest.mark.parametrize("is_later", [False, True])
def test_keys_are_not_settled_while_a_pause_lasts_or_is_scheduled(reader, is_later):
    reader.append(claim())
    now_ms = reader.log.now_ms
    record = schedule(now_ms + 50, now_ms + 99) if is_later else pause(now_ms + 50)
    reader.append(record)
    for _ in range(2):
        assert reader.have_changed()
        assert not reader.keys.are_settled


def test_another_partition_is_a_change(reader):
    reader.append(claim())
    reader.have_changed()
    both = {0: reader.replica, 1: Replica(1, now_ms=0)}
    assert reader.keys.have_changed(both, NO_SETTINGS, now_ms=0)
    assert not reader.keys.have_changed(both, NO_SETTINGS, now_ms=0)


def test_planners_read_keys_only_after_changes(monkeypatch):
    seen = rowkit.check_planners(monkeypatch)
    cluster = world(2, records=(1,) * 8)
    for t in range(2):
        write(cluster, group_settings(policy="planner"), t)
    nodes = [cluster.node(name, spec=spec()) for name in "abc"]
    cluster.run_until(lambda: sum(len(node.held) for node in nodes) == 8, 4 * H)
    cluster.run(2 * H)
    before, turns = seen.computed, seen.wanted
    cluster.run(8 * H)
    assert seen.wanted - turns > 100
    assert seen.computed == before, "nothing has changed"
    cluster.crash(nodes[0])
    cluster.run_until(lambda: sum(len(node.held) for node in nodes[1:]) == 8, 5 * H)
    assert seen.computed > before
    assert not seen.wrong
