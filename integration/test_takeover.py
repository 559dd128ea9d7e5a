"""Owners while processes join, leave, restart and share a name."""

import signal
from itertools import pairwise

import pytest
from domain import opened
from fleet import Fleet
from slowness import Slowness, factor_now
from waiting import eventually, wall_ms

# Jitter, a few round trips, and the scheduling delays of a busy machine.
SLACK_MS = 10_000
# Jitter and a few round trips, on a machine that is not busy.
TAKEOVER_SLACK_MS = 1_500


@pytest.fixture(scope="module")
def domain(broker, unique, transport):
    with opened(broker, unique, transport=transport) as domain:
        yield domain


@pytest.fixture(scope="module")
def slow(broker, unique, transport):
    """A domain with an interval longer than the start of a process takes."""
    with opened(broker, unique, h_ms=60_000, transport=transport) as domain:
        yield domain


# --- restarts


def test_a_restart_within_an_interval_resumes_its_claims(slow, unique, tmp_path):
    """Same client_id and state directory; no takeover in the log."""
    topic = slow.data_topic(4, records_each=400)
    group = unique("restart")
    with Fleet(slow, tmp_path, group_id=group, topics=[topic]) as fleet:
        first = fleet.start("w1")
        eventually(lambda: len(first.journal.handled) > 100, "w1 works")
        first.kill()
        killed_ms = wall_ms()
        second = fleet.start("w1")
        second.wait_for("handled")
        eventually(lambda: not fleet.journal.lost(slow.of(topic)), "all is handled")
        second.ask_to_end()
    tenures = slow.history().tenures(group)
    assert len(tenures) == 4
    for one, two in tenures.values():
        assert (one.effect, two.effect) == ("claimed", "resumed")
        assert two.begun_ms - killed_ms < slow.h_ms
        assert two.start == one.position


def test_kept_claims_are_resumed(slow, unique, tmp_path):
    """``close(release=False)`` sends a last heartbeat; a restart continues at once."""
    topic = slow.data_topic(2, records_each=10)
    group = unique("kept")
    found = []
    for count in (8, 20):
        marshal = slow.marshal(group, "w1", state_dir=tmp_path)
        try:
            consumer = marshal.consumer(topic)
            eventually(lambda c=consumer: len(c.assignment()) == 2, "both are held")
            while len(found) < count:
                for records in consumer.poll(100, max_records=4).values():
                    found += [record.offset for record in records]
                    consumer.commit(records)
        finally:
            marshal.close(release=False)
    assert sorted(found) == sorted(2 * list(range(10)))
    effects = [[t.effect for t in ts] for ts in slow.history().tenures(group).values()]
    assert effects == [["claimed", "resumed"]] * 2
    assert set(slow.owners(group).values()) == {"w1"}


def test_kept_claims_are_taken_over_only_when_stale(domain, unique, tmp_path):
    """That is after two intervals; a released claim is taken over within seconds."""
    topic = domain.data_topic(2)
    group = unique("kept")
    with domain.marshal(group, "w2") as other:
        leaving = domain.marshal(group, "w1", state_dir=tmp_path)
        leaving.consumer(topic)
        domain.wait_owned(group, topic, by={"w1"})
        consumer = other.consumer(topic)
        leaving.close(release=False)
        eventually(lambda: len(consumer.assignment()) == 2, "w2 takes over")
    for one, two in domain.history().tenures(group).values():
        assert one.ended_by == "claimed"
        assert two.begun_ms - one.renewed_ms > 2 * domain.h_ms


def test_a_release_is_taken_over_at_once(slow, unique, tmp_path):
    """After SIGTERM the next owner starts exactly at the last position."""
    topic = slow.data_topic(3, records_each=3_000)
    group = unique("sigterm")
    with Fleet(slow, tmp_path, group_id=group, topics=[topic]) as fleet:
        first = fleet.start("w1", handle_ms=1)
        eventually(lambda: len(first.journal.handled) > 100, "w1 works")
        second = fleet.start("w2", policy="greedy", handle_ms=0)
        second.wait_for("ready")
        first.ask_to_end()
        eventually(lambda: len(second.journal.of("claimed")) == 3, "w2 takes over")
        second.ask_to_end()
        first_journal = first.journal
    assert first_journal.of("ended")
    for key, tenures in slow.history().tenures(group).items():
        one, two = tenures[-2:]
        assert one.ended_by == "released"
        assert two.begun_ms - one.ended_ms < slow.h_ms
        mine = [
            h.offset for h in first_journal.handled if h.place == key.topic_partition
        ]
        assert two.start == one.position
        assert one.position == (max(mine) + 1 if mine else 0)
    assert fleet.journal.duplicated() == {}


# --- two processes of one name


def test_a_second_process_with_the_same_name_on_another_host_fails(
    domain, unique, tmp_path
):
    """The later process fails, the earlier one continues."""
    topic = domain.data_topic(2, records_each=2_000)
    group = unique("twins")
    other = tmp_path / "other"
    other.mkdir()
    with Fleet(domain, tmp_path, group_id=group, topics=[topic]) as fleet:
        # So slow that it has records left when the other has failed.
        first = fleet.start("w1", handle_ms=20)
        domain.wait_owned(group, topic, by={"w1"})
        second = fleet.start("w1", state_dir=str(other))
        assert second.wait() == 3
        (failed,) = second.journal.of("failed")
        assert failed["kind"] == "IdentityConflict"
        assert "w1" in failed["says"]
        assert "host" in failed["says"]
        assert second.journal.handled == []
        count = len(first.journal.handled)
        eventually(lambda: len(first.journal.handled) > count, "the first goes on")
        first.ask_to_end()
    assert all(len(ts) == 1 for ts in domain.history().tenures(group).values())


def test_a_resumed_process_ends_if_another_has_its_name(domain, unique, tmp_path):
    """Meanwhile a process with its name was started elsewhere, which continues."""
    topic = domain.data_topic(2, records_each=2_000)
    group = unique("zombie")
    other = tmp_path / "other"
    other.mkdir()
    with Fleet(domain, tmp_path, group_id=group, topics=[topic]) as fleet:
        old = fleet.start("w1")
        domain.wait_owned(group, topic, by={"w1"})
        eventually(lambda: old.journal.handled, "it works")
        old.signal(signal.SIGSTOP)
        # So slow that it has records left when the old one has failed.
        new = fleet.start("w1", state_dir=str(other), handle_ms=20)
        eventually(lambda: len(new.journal.of("claimed")) == 2, "it is replaced")
        woken_ms = wall_ms()
        old.signal(signal.SIGCONT)
        assert old.wait() == 3
        assert old.journal.of("failed")[0]["kind"] == "IdentityConflict"
        late = [h for h in old.journal.handled if h.at_ms >= woken_ms]
        assert len(late) <= 1  # the one that it was stopped in
        count = len(new.journal.handled)
        eventually(lambda: len(new.journal.handled) > count + 50, "the new one goes on")
        new.ask_to_end()
    assert all(len(ts) == 2 for ts in domain.history().tenures(group).values())


# --- policies


def test_fair_shares_follow_the_members_and_other_partitions_do_not_move(
    domain, unique, tmp_path
):
    """1, then 3, then 1 member; partitions that do not move are not interrupted."""
    topic = domain.data_topic(12, records_each=500)
    group = unique("fair")
    settings = {"group_id": group, "topics": [topic], "handle_ms": 1}
    with Fleet(domain, tmp_path, **settings) as fleet:
        first = fleet.start("w1")
        domain.wait_owned(group, topic, by={"w1"})
        joining_ms = wall_ms()
        others = [fleet.start("w2"), fleet.start("w3")]

        def is_shared():
            domain.produce(topic, 1)  # there is always something to do
            owners = list(domain.owners(group).values())
            return sorted(map(owners.count, ("w1", "w2", "w3"))) == [4, 4, 4]

        eventually(is_shared, "everybody has four")
        shared_ms = wall_ms()
        for worker in others:
            worker.ask_to_end()
        domain.wait_owned(group, topic, by={"w1"})
        eventually(lambda: not fleet.journal.lost(domain.of(topic)), "all is done")
        first.ask_to_end()
        journal, tenures = fleet.journal, domain.history().tenures(group)
    owners = [[t.client_id for t in ts] for ts in tenures.values()]
    assert owners.count(["w1"]) == 4  # these never moved
    assert all(names[-1] == "w1" for names in owners)
    at_work = [h.at_ms for h in journal.handled if h.client_id == "w1"]
    during = [t for t in at_work if joining_ms <= t <= shared_ms]
    gaps = [two - one for one, two in pairwise([joining_ms, *during, shared_ms])]
    assert max(gaps) < SLACK_MS * factor_now(), "w1 went on while others joined"
    assert journal.duplicated() == {}


def test_an_idle_member_takes_over_from_a_killed_owner(domain, unique, tmp_path):
    """The second member has no partition until the owner of the only one is killed."""
    topic = domain.data_topic(1, records_each=1_000)
    group = unique("standby")
    with Fleet(domain, tmp_path, group_id=group, topics=[topic]) as fleet:
        # So slow that there is work left, however long the other takes to start.
        active = fleet.start("w1", handle_ms=100)
        eventually(lambda: active.journal.handled, "w1 works")
        standby = fleet.start("w2")
        standby.wait_for("ready")
        assert standby.journal.handled == []
        with Slowness() as machine:
            active.kill()
            eventually(lambda: standby.journal.handled, "the standby works")
        standby.ask_to_end()
    ((one, two),) = domain.history().tenures(group).values()
    delay_ms = two.begun_ms - one.renewed_ms
    late_ms = delay_ms - 2 * domain.h_ms
    assert 0 < late_ms <= TAKEOVER_SLACK_MS * machine.factor
