"""Following the world: transitions of entries, changes, outages, deadlines."""

import msgspec
import pytest
from changekit import Change
from keptkit import Shelf, kept
from logkit import (
    INC,
    INC_AGAIN,
    KEY,
    OP,
    H,
    beat,
    claim,
    fold,
    hashed,
    ident,
    layout_import,
    offer,
    pause,
    ready,
    release,
    resets,
    resume,
    schedule,
    stage,
)
from logkit import SECRET as A_SECRET
from watchkit import TOPIC, Story

from kafka_marshal.errors import DeadlineExceeded, LogTruncated
from kafka_marshal.ports import LogRange
from kafka_marshal.protocol.codec import person_to_tags
from kafka_marshal.protocol.records import ReleasingPartition
from kafka_marshal.protocol.snapshot import digest, to_bytes
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.views.watch import (
    PROBE_EVERY_MS,
    Changes,
    EarlyStates,
    Folded,
    WorldWatch,
)
from kafka_marshal_cli.commands.claims_watch import change_text


@pytest.fixture
def story():
    return Story()


def changes_of(watch):
    return [(c.what, c.client_id) for c in watch.changes(0)]


def test_a_claim_and_its_release_are_reported(story):
    watch = story.watch()
    epoch = story.write(claim("c1"))
    (claimed,) = watch.changes(0)
    assert (claimed.what, claimed.client_id, claimed.key) == ("claimed", "c1", KEY)
    assert (claimed.partition, claimed.offset) == (0, epoch)
    assert claimed.time_ms == watch.world().partitions[0].append_time_ms
    assert claimed.token == watch.world().partitions[0].token(KEY)
    story.write(beat(epoch, 4))
    assert watch.changes(0) == []
    record = ReleasingPartition(
        client_id="c1",
        group_id="g",
        incarnation=INC,
        seq=0,
        topic="t",
        partition=0,
        epoch=epoch,
        position=9,
        successor=None,
        reason="closed",
    )
    story.write(record)
    (released,) = watch.changes(0)
    assert (released.what, released.position) == ("released", 9)
    assert (released.reason, released.incarnation) == ("closed", INC)


def test_a_handoff_is_reported_once_per_step():
    story = Story(level=2)
    epoch = story.write(claim("c1"))
    watch = story.watch()

    def changes():
        return [(c.what, c.client_id, c.successor) for c in watch.changes(0)]

    for record in (offer(epoch), offer(epoch), ready(epoch), ready(epoch)):
        story.write(record)
    assert changes() == [("offered", "c1", "c2"), ("ready", "c2", "c2")]
    story.write(offer(epoch, None))
    story.write(offer(epoch, None))
    assert changes() == [("withdrawn", "c1", "c2")]
    story.write(offer(epoch))
    again = story.watch()
    story.write(offer(epoch))
    assert again.changes(0) == [], "it was open when the watch began"
    story.write(msgspec.structs.replace(release(epoch), successor="c2"))
    (released,) = again.changes(0)
    assert released.successor == "c2"


def test_claims_before_the_start_are_known_but_not_reported(story):
    story.write(claim("c1"))
    watch = story.watch()
    assert changes_of(watch) == []
    story.write(claim("c2"), after=2 * H + 1)
    lost, claimed = watch.changes(0)
    assert (lost.what, lost.client_id, lost.by) == ("lost", "c1", "c2")
    assert (claimed.what, claimed.client_id) == ("claimed", "c2")
    assert lost.offset == claimed.offset


def test_a_set_position_ends_the_claim_of_a_dead_owner():
    story = Story(level=2)
    story.write(claim("c1"))
    watch = story.watch()
    end_ms = watch.world().partitions[0].append_time_ms + 9 * H
    story.write(pause(end_ms), after=2 * H + 1)
    story.write(stage((KEY.partition, 4)))
    paused, lost = watch.changes(0)
    assert (paused.what, lost.what) == ("paused", "lost")
    assert (lost.client_id, lost.by, lost.key) == ("c1", "admin", KEY)


def test_a_reset_of_the_state_ends_every_claim(story):
    story.write(claim("c1"))
    watch = story.watch()
    state = watch.world().partitions[0]
    for record in resets(to_bytes(state), digest(state)):
        story.write(record)
    (lost,) = watch.changes(0)
    assert (lost.what, lost.client_id, lost.by) == ("lost", "c1", "admin")
    story.write(claim("c2"))  # from here on log time advances
    story.write(claim("c2"), after=2 * H + 2)
    assert changes_of(watch) == [("claimed", "c2")]


def test_a_claim_after_a_release_reports_no_loss(story):
    watch = story.watch()
    story.write(release(story.write(claim("c1"))))
    story.write(claim("c2"))
    assert changes_of(watch) == [
        ("claimed", "c1"),
        ("released", "c1"),
        ("claimed", "c2"),
    ]


def test_a_resumed_claim_is_reported_with_its_incarnation(story):
    watch = story.watch()
    epoch = story.write(claim("c1", resume_hash=hashed(A_SECRET)))
    story.write(resume(epoch))
    _, resumed = watch.changes(0)
    assert (resumed.what, resumed.incarnation) == ("resumed", INC_AGAIN)


def test_refused_records_are_not_reported(story):
    watch = story.watch()
    epoch = story.write(claim("c1"))
    story.write(claim("c2"))
    story.write(release(epoch + 7))
    story.write(b"garbage")
    assert changes_of(watch) == [("claimed", "c1")]


def test_a_pause_in_several_partitions_is_reported_once():
    story = Story(partitions=2)
    watch = story.watch()
    until_ms = story.clock.wall_ms() + 5_000
    for number in (0, 1):
        story.write(pause(until_ms), to=number)
    story.write(pause(until_ms + 1_000, seq=1))
    (paused,) = watch.changes(0)
    assert (paused.what, paused.group_id, paused.client_id) == ("paused", "g", "admin")
    assert (paused.until_ms, paused.key) == (until_ms, None)
    assert paused.person is None
    story.write(pause(0, seq=2))
    assert changes_of(watch) == []
    story.write(pause(0, seq=2), to=1)
    assert changes_of(watch) == [("unpaused", None)]
    story.write(pause(until_ms, op=ident("other")))
    assert changes_of(watch) == [("paused", "admin")]


def test_an_expired_pause_ends_with_the_next_entry(story):
    watch = story.watch()
    story.write(pause(story.clock.wall_ms() + 1_000, op=OP))
    assert changes_of(watch) == [("paused", "admin")]
    story.write(b"", after=1_000)
    assert changes_of(watch) == [("unpaused", None)]


def test_a_pause_is_reported_with_its_person(story):
    watch = story.watch()
    rest = pause(story.clock.wall_ms() + 1_000)
    story.write(msgspec.structs.replace(rest, tags=person_to_tags("ada")))
    (paused,) = watch.changes(0)
    assert paused.person == "ada"
    assert [n.person for n in watch.world().notes.values()] == ["ada"]


def test_a_pause_that_another_person_renews_is_reported_once():
    story = Story(partitions=2)
    watch = story.watch()
    until_ms = story.clock.wall_ms() + 5_000
    first = msgspec.structs.replace(pause(until_ms), tags=person_to_tags("ada"))
    other = pause(until_ms + 1_000, client="other")
    other = msgspec.structs.replace(other, tags=person_to_tags("bob"))
    for number in (0, 1):
        story.write(first, to=number)
    for number in (0, 1):
        story.write(other, to=number)
        story.write(msgspec.structs.replace(other, seq=1), to=number)
    paused, renewed = watch.changes(0)
    assert (paused.what, paused.person) == ("paused", "ada")
    assert (renewed.what, renewed.person) == ("renewed", "bob")
    assert renewed.until_ms == until_ms + 1_000
    (row,) = watch.world().pauses()
    assert (row["person"], row["renewed_by"]) == ("ada", "bob")


def test_a_scheduled_pause_is_reported_with_its_begin():
    story = Story(level=2)
    watch = story.watch()
    now_ms = story.clock.wall_ms()
    plan = schedule(now_ms + 100, now_ms + 300)
    plan = msgspec.structs.replace(plan, reason="rest", tags=person_to_tags("ada"))
    story.write(plan)
    story.write(plan)
    (planned,) = watch.changes(0)
    assert (planned.what, planned.begin_ms, planned.until_ms) == (
        *("scheduled", now_ms + 100),
        now_ms + 300,
    )
    assert (planned.reason, planned.person) == ("rest", "ada")
    story.write(b"", after=100)
    (begun,) = watch.changes(0)
    assert (begun.what, begun.client_id, begun.reason) == ("paused", "admin", "rest")
    assert (begun.person, begun.until_ms) == ("ada", now_ms + 300)
    story.write(b"", after=200)
    assert changes_of(watch) == [("unpaused", None)]


def test_a_cancelled_scheduled_pause_is_reported_as_unscheduled():
    story = Story(level=2)
    now_ms = story.clock.wall_ms()
    story.write(schedule(now_ms + 100, now_ms + 300))
    story.write(pause(now_ms + 400, op=ident("other")))
    watch = story.watch()
    story.write(pause(0))
    assert changes_of(watch) == [("unscheduled", None)]
    story.write(pause(0, op=ident("other"), seq=1))
    assert changes_of(watch) == [("unpaused", None)]


def test_a_scheduled_pause_is_cancelled_once_no_partition_has_it():
    story = Story(partitions=2, level=2)
    now_ms = story.clock.wall_ms()
    for number in (0, 1):
        story.write(schedule(now_ms + 100, now_ms + 300), to=number)
        story.write(pause(now_ms + 400, op=ident("other")), to=number)
    watch = story.watch()
    story.write(pause(0))
    assert changes_of(watch) == []
    story.write(pause(0), to=1)
    assert changes_of(watch) == [("unscheduled", None)]


def test_a_scheduled_pause_known_only_from_a_state_has_no_reason():
    story = Story(level=2)
    now_ms = story.clock.wall_ms()
    story.write(schedule(now_ms + 100, now_ms + 300))
    changes = Changes(story.watch().world().partitions)
    watch = story.watch()
    story.write(b"", after=100)
    (folded,) = watch.read(0)
    (begun,) = changes.apply(folded, worlds=watch.world().partitions)
    assert (begun.what, begun.reason, begun.client_id) == ("paused", None, "admin")


def test_a_scheduled_pause_can_be_begun_early_by_an_admin():
    story = Story(level=2)
    watch = story.watch()
    now_ms = story.clock.wall_ms()
    story.write(schedule(now_ms + 100, now_ms + 300))
    story.write(pause(now_ms + 300))
    assert changes_of(watch) == [("scheduled", "admin"), ("paused", "admin")]


def test_every_entry_has_its_transitions(story):
    watch = story.watch()
    epoch = story.write(claim("c1"))
    story.write(claim("c2"))
    story.write(b"garbage")
    folded = watch.read(0)
    assert [f.entry.offset for f in folded] == [epoch, epoch + 1, epoch + 2]
    assert [[t.effect or t.reason for t in f.transitions] for f in folded] == [
        ["claimed"],
        ["held"],
        ["undecodable"],
    ]


def test_the_world_advances_only_with_reads(story):
    watch = story.watch()
    epoch = story.write(claim("c1"))
    story.write(beat(epoch, 3))
    assert watch.world().claims() == []
    watch.read(0)
    world = watch.world()
    ((_, known),) = world.claims()
    assert known.position == 3
    story.clock.advance(700)
    assert watch.world().estimated_age_ms(world.partitions[0], known) == 700


def test_an_outage_is_reported_until_the_broker_answers(story):
    watch = story.watch()
    story.log.cut = True
    watch.read(0)
    assert watch.outage is None
    story.clock.advance(PROBE_EVERY_MS)
    watch.read(0)
    assert watch.outage is not None
    story.log.cut = False
    story.clock.advance(PROBE_EVERY_MS)
    watch.read(0)
    assert watch.outage is None
    story.log.cut = True
    story.clock.advance(PROBE_EVERY_MS)
    watch.read(0)
    story.log.cut = False
    story.write(claim("c1"))
    assert changes_of(watch) == [("claimed", "c1")]
    assert watch.outage is None


def test_a_truncated_log_ends_the_watch(story):
    story.write(claim("c1"))
    watch = story.watch()
    story.kafka.truncate(TopicPartition(TOPIC, 0), end=1, leader=1)
    story.write(claim("c2"))
    with pytest.raises(LogTruncated):
        watch.changes(0)


def test_a_watch_that_cannot_catch_up_in_time_fails(story):
    log = story.kafka.coordination_log(TOPIC)
    watch = WorldWatch(log, story.clock)
    log.cut = True
    with pytest.raises(DeadlineExceeded, match="marshal doctor"):
        watch.catch_up(0)


def test_a_watch_can_be_closed_again_after_its_block(story):
    with story.watch() as watch:
        assert watch.is_caught_up
    watch.close()


def shelf(story):
    """Return a source with the present state of the log."""
    return Shelf(kept(story.watch().world().partitions[0]))


def test_a_watch_resumes_from_a_kept_state_with_its_owners(story):
    story.write(claim("c1"))
    source = shelf(story)
    story.write(beat(1, 4))
    watch = story.watch(source)
    assert source.asked == [[0]]
    assert changes_of(watch) == []
    story.write(claim("c2"), after=2 * H + 1)
    assert changes_of(watch) == [("lost", "c1"), ("claimed", "c2")]


def test_the_reason_of_a_pause_in_a_kept_state_is_read(story):
    story.write(claim("c1"))
    rest = pause(story.clock.wall_ms() + 5_000)
    story.write(msgspec.structs.replace(rest, reason="a rest"))
    watch = story.watch(shelf(story))
    assert [n.reason for n in watch.world().notes.values()] == ["a rest"]
    story.write(beat(1), after=6_000)
    assert [c.what for c in watch.changes(0)] == ["unpaused"]


def test_a_watch_starts_once_the_log_can_be_reached(story):
    story.write(claim("c1"))
    log = story.kafka.coordination_log(TOPIC)
    watch = WorldWatch(log, story.clock, sources=(shelf(story),))
    log.cut = True
    assert watch.changes(0) == []
    assert watch.outage is not None
    log.cut = False
    watch.catch_up(1_000)
    assert watch.world().partitions[0].keys[KEY].owner.client_id == "c1"


@pytest.mark.parametrize(("first", "asked"), [(0, 1), (2, 2), (9, 3)])
def test_a_kept_state_after_the_first_wanted_offset_is_not_used(first, asked):
    """The source is queried only up to that offset, and within the log."""
    spans = []

    class Source(Shelf):
        def find(self, wanted, *, log, timeout_ms):
            spans.append(wanted[0])
            return super().find(wanted, log=log, timeout_ms=timeout_ms)

    source = Source(kept(fold([]), offset=2))
    early = EarlyStates(source, lambda span: first)
    found = early.find({0: LogRange(1, 3)}, log=None, timeout_ms=0)
    assert spans == [LogRange(1, asked)]
    assert (0 in found) == (asked >= 2)
    early.discard(kept(fold([])))
    assert source.discarded == [0]


def test_a_watch_that_begins_while_a_key_moves_knows_its_owner():
    """The source partition still has the dead owner; the target has the next one."""
    change = Change(4, 2)
    (key,) = change.moving()
    change.claimed(key)
    change.fence()
    change.tick(3 * H)
    change.imported(key)
    change.reclaimed(key, client="c2")
    changes, target = Changes(change.states), change.target(key)

    def found(record, **where):
        transitions = target.append(record, **where)
        folded = Folded(target.state.partition, target.entries[-1], transitions)
        return [
            (each.what, each.client_id)
            for each in changes.apply(folded, worlds=change.states)
        ]

    later = claim("c3", key=key, generation=2)
    assert found(later, after=3 * H) == [("lost", "c2"), ("claimed", "c3")]
    gone = release(target.key(key).epoch, client="c3", key=key)
    assert found(gone) == [("released", "c3")]


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_moved_key_is_reported_as_a_change(is_dead):
    change = Change(2, 4)
    (key,) = change.moving()
    change.claimed(key)
    change.fence()
    changes = Changes(change.states)
    if is_dead:
        change.tick(3 * H)
    else:
        change.released(key, position=7)
        changes = Changes(change.states)
    target = change.target(key)
    record = layout_import(change.items(key), source=change.place(key).state.partition)
    transitions = target.append(record)
    folded = Folded(target.state.partition, target.entries[-1], transitions)
    found = changes.apply(folded, worlds=change.states)
    what = [(each.what, each.client_id, each.position) for each in found]
    lost = [("lost", "c1", None)] if is_dead else []
    assert what == [*lost, ("moved", None, None if is_dead else 7)]
    assert {each.partition for each in found} == {target.state.partition}
    assert key.topic_partition.topic in change_text(found[-1])
    later = claim("c2", key=key, generation=2)
    transitions = target.append(later, after=3 * H)
    folded = Folded(target.state.partition, target.entries[-1], transitions)
    found = changes.apply(folded, worlds=change.states)
    assert [each.what for each in found] == ["claimed"]
