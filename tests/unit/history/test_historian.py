from types import SimpleNamespace

import msgspec
import pytest
from logkit import (
    KEY,
    OP,
    SECRET,
    START_MS,
    H,
    Log,
    batch,
    beat,
    begin,
    claim,
    config,
    decide,
    forgetting,
    hashed,
    ident,
    layout_fence,
    layout_final,
    member,
    messages,
    pause,
    release,
    resets,
    resolve,
    schedule,
    stage,
    transition,
)
from logkit import resume as resume_record

from kafka_marshal.history.historian import (
    AGES_MAX,
    AGES_PER_H,
    CONTENDERS_MAX,
    GONE_KEYS_MIN,
    Historian,
    Track,
    handoff,
    move,
    note_stray,
    note_waiting,
)
from kafka_marshal.history.rows import (
    Attempt,
    GrantRow,
    Handoff,
    Interval,
    Moment,
    PauseRow,
    Planned,
    PositionRow,
    Rejected,
)
from kafka_marshal.protocol.codec import person_to_tags
from kafka_marshal.protocol.records import SECOND_LEVEL
from kafka_marshal.protocol.snapshot import digest, to_bytes
from kafka_marshal.protocol.state import why_to_tags
from kafka_marshal.protocol.types import Key, Token

OTHER = Key("g", "u", 1)


class Bench:
    """A log with a historian that watches its fold, and the historian's rows."""

    def __init__(self, **settings):
        self.log = Log(configured=False)
        self.historian = Historian(sample_ms=10 * H)
        self.rows = []
        self.append(config(**settings))

    def append(self, record, **where):
        transitions = self.log.append(record, **where)
        entry = self.log.entries[-1]
        found = self.historian.take(self.log.state, entry, transitions=transitions)
        self.rows += found
        return entry.offset

    def of(self, kind):
        return [row for row in self.rows if isinstance(row, kind)]

    def one(self, kind):
        (row,) = self.of(kind)
        return row

    @property
    def interval(self):
        return self.historian.tracks[KEY].interval


@pytest.fixture
def bench():
    return Bench()


# --- intervals and handoffs


def test_a_claim_lasts_from_the_record_that_won_to_its_release(bench):
    why = msgspec.structs.replace(claim(), tags=why_to_tags("free"))
    epoch = bench.append(why, after=5)
    bench.append(beat(epoch, 10), after=H // 4)
    bench.append(beat(epoch, 20), after=H // 2)
    assert list(bench.historian.open_rows()) == [bench.interval]
    assert bench.of(Interval) == []
    leaving = msgspec.structs.replace(release(epoch, 30), reason="closed")
    end = bench.append(leaving, after=10)
    row = bench.one(Interval)
    assert (row.key, row.client_id, row.incarnation) == (KEY, "c1", ident("c1"))
    assert (row.token, row.token.offset) == (bench.log.state.token(KEY), epoch)
    assert (row.effect, row.why) == ("claimed", "free")
    assert (row.start.offset, row.end.offset) == (epoch, end)
    assert row.end.log_ms - row.start.log_ms == H // 4 + H // 2 + 10
    assert row.end.append_ms == bench.log.now_ms
    assert (row.beats_count, row.gap_ms_max) == (2, H // 2)
    assert (row.renewed_offset, row.heartbeat_interval_ms) == (epoch + 2, H)
    assert (row.first_position, row.position) == (10, 30)
    assert (row.ending, row.ended_by, row.reason) == ("released", "c1", "closed")
    assert (row.rewinds_count, row.steps_back_count, row.stray_count) == (0, 0, 0)
    assert list(bench.historian.open_rows()) == []


def test_a_takeover_ends_a_claim_and_records_the_gap(bench):
    epoch = bench.append(claim())
    bench.append(beat(epoch, 7), after=100)
    bench.append(claim("c2"), after=2 * H)  # exactly two intervals are not stale
    bench.append(claim("c2"), after=1)
    row, handoff = bench.one(Interval), bench.one(Handoff)
    assert (row.ending, row.ended_by, row.end) == ("taken_over", "c2", handoff.at)
    assert (handoff.from_client_id, handoff.to_client_id) == ("c1", "c2")
    assert (handoff.gap_ms, handoff.heartbeat_interval_ms) == (2 * H + 1, H)
    assert (handoff.ending, handoff.late_ms, handoff.position) == ("taken_over", 0, 7)
    assert handoff.token == bench.log.state.token(KEY)
    assert [each.outcome for each in bench.of(Attempt)] == ["won", "refused", "won"]
    refused = bench.of(Attempt)[1]
    assert (refused.reason, refused.holder) == ("held", "c1")
    assert refused.remaining_ms == 1


def test_a_claim_refused_before_the_last_renewal_is_not_late(bench):
    epoch = bench.append(claim())
    bench.append(claim("c2"))
    bench.append(beat(epoch), after=100)
    bench.append(claim("c2"), after=90 * H)
    assert bench.one(Handoff).late_ms is None


def test_a_resume_ends_the_claim_of_the_earlier_process(bench):
    epoch = bench.append(claim(resume_hash=hashed(SECRET)))
    bench.append(resume_record(epoch), after=10)
    row, handoff = bench.one(Interval), bench.one(Handoff)
    assert (row.ending, bench.interval.effect) == ("resumed", "resumed")
    assert (handoff.gap_ms, handoff.late_ms) == (10, None)


def test_a_release_is_handed_off_to_the_next_owner(bench):
    epoch = bench.append(claim())
    bench.append(release(epoch, 5))
    bench.append(claim("c2"), after=40)
    handoff = bench.one(Handoff)
    assert (handoff.ending, handoff.gap_ms, handoff.late_ms) == ("released", 40, None)
    assert (handoff.reason, handoff.position) == (None, 5)


def test_a_second_claim_by_the_owner_is_refused_as_duplicate(bench):
    bench.append(claim())
    bench.append(claim(seq=1))
    assert bench.of(Attempt)[-1].reason == "duplicate"


def test_ignored_records_do_not_end_a_claim(bench):
    epoch = bench.append(claim())
    bench.append(release(epoch + 5, 1))
    bench.append(beat(epoch, client="c2"))
    bench.append(batch((epoch + 9, None)))
    assert [row.reason for row in bench.of(Rejected)] == [
        "old_epoch",
        "not_owner",
        "not_owner",
    ]
    assert bench.interval.ending == "open"


def test_batches_renew_each_of_their_keys(bench):
    one, two = bench.append(claim()), bench.append(claim(key=OTHER))
    bench.append(batch((one, 4), (two, 5)), after=H // 2)
    found = {key: track.interval for key, track in bench.historian.tracks.items()}
    assert (found[KEY].beats_count, found[OTHER].beats_count) == (1, 1)
    assert (found[KEY].position, found[OTHER].position) == (4, 5)
    assert found[OTHER].stray_count == 0


def test_a_renewal_that_would_shorten_the_lease_is_not_the_last_one(bench):
    """PROTOCOL 4.5: the interval has the renewal by which the key goes stale."""
    epoch = bench.append(claim())
    begun_ms = bench.interval.renewed_ms
    bench.append(config(2, era=2, h=H // 10))
    bench.append(beat(epoch, 3), after=H // 2)
    assert (bench.interval.renewed_ms, bench.interval.beats_count) == (begun_ms, 1)
    assert bench.interval.heartbeat_interval_ms == H
    bench.append(claim("c2", generation=2), after=2 * H)
    handoff = bench.one(Handoff)
    assert (handoff.gap_ms, handoff.heartbeat_interval_ms) == (2 * H + H // 2, H)


def test_ages_at_renewal_are_counted(bench):
    epoch = bench.append(claim())
    bench.append(beat(epoch), after=H // 2)
    bench.append(beat(epoch), after=H // 2)
    bench.append(beat(epoch), after=9 * H)
    ages = bench.historian.ages["g"]
    assert ages[AGES_PER_H // 2] == 2
    assert (ages[AGES_MAX], sum(ages)) == (1, 3)


def test_accepted_heartbeats_of_another_claim_count_as_stray(bench):
    """As if the fold accepted heartbeats of an older claim."""
    epoch = bench.append(claim())
    bench.append(beat(epoch))
    assert bench.interval.stray_count == 0
    bench.historian.tracks[KEY].epoch += 1
    bench.append(beat(epoch))
    bench.append(batch((epoch, 3)))
    assert bench.interval.stray_count == 2


# --- positions


def test_positions_are_sampled(bench):
    epoch = bench.append(claim())
    bench.append(beat(epoch))
    first = bench.append(beat(epoch, 1))
    bench.append(beat(epoch, 2), after=10 * H - 1)
    last = bench.append(beat(epoch, 3), after=1)
    rows = bench.of(PositionRow)
    assert [(row.at.offset, row.position) for row in rows] == [(first, 1), (last, 3)]
    assert (rows[0].epoch, rows[0].client_id, rows[0].granted) == (epoch, "c1", None)


def test_a_rewind_is_counted_apart_from_steps_back(bench):
    epoch = bench.append(claim())
    bench.append(beat(epoch, 9))
    bench.append(beat(epoch, 3, rewind=True))
    bench.append(beat(epoch, 8), after=10 * H)
    assert (bench.interval.rewinds_count, bench.interval.steps_back_count) == (1, 0)
    assert bench.of(PositionRow)[-1].rewinds_count == 1


# --- grants


def test_grants_are_recorded_with_their_range(bench):
    epoch = bench.append(claim(topic_id=ident("topic")))
    bench.append(messages(epoch, 0, 9), after=1)
    bench.append(messages(epoch, 0, 4))
    bench.append(messages(epoch + 7, 0, 40))
    rows = bench.of(GrantRow)
    assert [(row.outcome, row.first, row.last) for row in rows] == [
        ("granted", 0, 9),
        ("nothing_left", 0, 4),
    ]
    assert (rows[0].grantee, rows[0].epoch) == (ident("grantee"), epoch)
    assert rows[0].topic_id == ident("topic")
    assert [row.reason for row in bench.of(Rejected)] == ["nothing_left", "old_epoch"]
    assert bench.interval.position == 10
    assert [row.granted for row in bench.of(PositionRow)] == [10]


# --- pauses


def test_the_row_of_a_pause_ends_when_an_admin_ends_the_pause(bench):
    now_ms = bench.log.now_ms
    start = bench.append(
        msgspec.structs.replace(
            pause(now_ms + 500, seq=1), reason="deploy", tags=person_to_tags("ada")
        )
    )
    bench.append(pause(now_ms + 900, seq=2, client="other"))
    (row,) = bench.historian.open_rows()
    assert (row.group_id, row.client_id, row.reason) == ("g", "admin", "deploy")
    assert (row.person, row.begin_ms, row.renewed_by) == ("ada", None, "other")
    assert (row.until_ms, row.renewals_count) == (now_ms + 900, 1)
    end = bench.append(pause(0, seq=3, client="other"), after=10)
    assert bench.one(PauseRow) is row
    assert (row.start.offset, row.ending, row.end.offset) == (start, "unpaused", end)
    assert list(bench.historian.open_rows()) == []


def test_an_expired_pause_ends_with_the_next_entry(bench):
    bench.append(pause(bench.log.now_ms + 500))
    bench.append(member(), after=499)
    assert bench.of(PauseRow) == []
    end = bench.append(member(seq=1), after=1)
    row = bench.one(PauseRow)
    assert (row.ending, row.end.offset) == ("ran_out", end)


def resumed(historian):
    saved = msgspec.msgpack.encode(historian)
    return msgspec.msgpack.decode(saved, type=Historian)


def test_the_row_of_a_scheduled_pause_starts_when_the_pause_begins():
    bench = Bench(level=2)
    now_ms = bench.log.now_ms
    plan = schedule(now_ms + 100, now_ms + 300)
    plan = msgspec.structs.replace(plan, reason="rest", tags=person_to_tags("ada"))
    bench.append(plan)
    bench.append(msgspec.structs.replace(plan, tags=person_to_tags("bob")))
    assert resumed(bench.historian) == bench.historian
    assert list(bench.historian.open_rows()) == []
    start = bench.append(member(), after=100)
    bench.append(pause(now_ms + 400, seq=1))
    end = bench.append(member(seq=1), after=300)
    row = bench.one(PauseRow)
    assert (row.start.offset, row.reason, row.client_id) == (start, "rest", "admin")
    assert (row.person, row.begin_ms) == ("ada", now_ms + 100)
    assert (row.ending, row.end.offset, row.renewals_count) == ("ran_out", end, 1)
    assert bench.historian.pauses.scheduled == {}


def test_a_cancelled_scheduled_pause_has_no_row():
    bench = Bench(level=2)
    now_ms = bench.log.now_ms
    bench.append(schedule(now_ms + 100, now_ms + 300))
    bench.append(pause(0))
    bench.append(member(), after=200)
    assert (bench.of(PauseRow), bench.historian.pauses.scheduled) == ([], {})


def test_cancelling_a_scheduled_pause_does_not_renew_the_present_one():
    bench = Bench(level=2)
    now_ms = bench.log.now_ms
    bench.append(pause(now_ms + 500, op=ident("lasts")))
    bench.append(schedule(now_ms + 100, now_ms + 300))
    bench.append(pause(0))
    bench.append(member(), after=200)
    (row,) = bench.historian.open_rows()
    assert (row.op_id, row.renewals_count) == (ident("lasts"), 0)
    assert (bench.of(PauseRow), bench.historian.pauses.scheduled) == ([], {})


def test_a_scheduled_pause_begins_after_the_present_one_ends():
    bench = Bench(level=2)
    now_ms = bench.log.now_ms
    bench.append(schedule(now_ms + 100, now_ms + 300, op=ident("planned")))
    bench.append(pause(now_ms + 200))
    bench.append(member(), after=200)
    (row,) = bench.historian.open_rows()
    assert (row.op_id, bench.one(PauseRow).op_id) == (ident("planned"), OP)


def test_a_history_begins_with_the_scheduled_pauses_of_its_state():
    bench = Bench(level=2)
    now_ms = bench.log.now_ms
    bench.append(schedule(now_ms + 100, now_ms + 300))
    later = Historian()
    later.begin(bench.log.state)
    assert later.pauses.scheduled == {
        ("g", OP): Planned(begin_ms=now_ms + 100, until_ms=now_ms + 300)
    }


def test_a_claim_that_waits_for_a_pause_is_not_late(bench):
    epoch = bench.append(claim())
    other = bench.append(claim(key=Key("h", "t", 0)))
    for group in ("g", "h"):
        bench.append(claim("c2", key=Key(group, "t", 0)))
    bench.append(pause(bench.log.now_ms + 5 * H))
    bench.append(beat(epoch, 1))  # moves the position and renews nothing
    assert bench.interval.beats_count == 0
    assert bench.interval.position == 1
    for group in ("g", "h"):
        bench.append(claim("c2", key=Key(group, "t", 0)), after=6 * H)
    late = {row.key.group_id: row.late_ms for row in bench.of(Handoff)}
    assert late == {"g": None, "h": 10 * H - 1}
    assert other > epoch


# --- checkpoints, resets and refused records


def test_a_checkpoint_adds_no_row_and_a_reset_ends_claims():
    bench = Bench(level=2)
    bench.append(claim())
    value, expected_digest = to_bytes(bench.log.state), digest(bench.log.state)
    before = list(bench.rows)
    bench.append(begin())
    assert bench.rows == before
    for record in resets(value, expected_digest):
        bench.append(record)
    ended = bench.one(Interval)
    assert (ended.ending, ended.reason, ended.client_id) == ("released", "reset", "c1")
    assert list(bench.historian.open_rows()) == []
    bench.append(claim("c2"), after=1)
    assert bench.of(Rejected)[-1].reason == "quiet"
    bench.append(claim("c2"), after=2 * H + 1)
    assert bench.one(Handoff).from_client_id == "c1"


def reset_to(bench, state):
    for record in resets(*state):
        bench.append(record)


def state_of(bench):
    return to_bytes(bench.log.state), digest(bench.log.state)


def test_rows_have_the_number_of_resets_before_them():
    """A reset undoes grants and positions, so equal ones may follow."""
    bench = Bench(level=2)
    before = state_of(bench)
    for number in range(2):
        epoch = bench.append(claim(), after=2 * H + 1)
        bench.append(messages(epoch, 0, 9))
        assert bench.of(GrantRow)[-1].resets_count == number
        assert bench.interval.resets_count == number
        assert bench.of(GrantRow)[-1].outcome == "granted"
        first_part, _ = resets(*before, bytes_max=(len(before[0]) + 1) // 2)
        bench.append(first_part)
        assert bench.historian.resets_count == number
        reset_to(bench, before)
        assert bench.historian.resets_count == number + 1
        # Log time resumes with the first entry after it.
        bench.append(b"\xff")
    again = resumed(bench.historian)
    assert again.resets_count == 2


def test_a_reset_ends_pauses_that_its_state_does_not_have():
    bench = Bench(level=2)
    before = state_of(bench)
    until_ms = bench.log.state.append_time_ms + 9 * H
    for group in ("h", "g"):
        bench.append(pause(until_ms, group=group))
    reset_to(bench, before)
    reported = [(row.group_id, row.ending) for row in bench.of(PauseRow)]
    assert reported == [("g", "reset"), ("h", "reset")]
    assert list(bench.historian.open_rows()) == []


def test_a_reset_restores_the_pauses_of_its_state():
    bench = Bench(level=2)
    until_ms = bench.log.state.append_time_ms + 90 * H
    bench.append(pause(until_ms))
    paused = state_of(bench)
    bench.append(pause(until_ms + H, seq=1))
    # The same operation continues, with its earlier end.
    reset_to(bench, paused)
    (row,) = bench.historian.open_rows()
    assert (row.until_ms, row.start.offset, row.renewals_count) == (until_ms, 1, 1)
    # A pause that had ended is in force again.
    bench.append(pause(0, seq=2))
    reset_to(bench, paused)
    (row,) = bench.historian.open_rows()
    assert (row.op_id, row.client_id, row.until_ms) == (OP, "admin", until_ms)
    assert row.start.offset == bench.log.entries[-1].offset
    # The pause of another operation ends.
    bench.append(pause(0, seq=3))
    bench.append(pause(until_ms, op=ident("other")))
    reset_to(bench, paused)
    assert [row.ending for row in bench.of(PauseRow)] == ["unpaused"] * 2 + ["reset"]
    bench.append(pause(0, seq=4))
    assert bench.of(PauseRow)[-1].ending == "unpaused"


def test_an_undecodable_entry_is_recorded(bench):
    bench.append(b"\xff")
    row = bench.one(Rejected)
    assert (row.outcome, row.reason, row.record_type) == (
        "undecodable",
        "undecodable",
        None,
    )
    assert row.detail
    assert (row.client_id, row.group_id, row.key) == (None, None, None)


def test_a_refused_record_is_recorded_with_its_sender(bench):
    bench.append(config())
    bench.append(claim(generation=9))
    rows = bench.of(Rejected)
    assert [row.reason for row in rows] == ["config", "wrong_generation"]
    assert (rows[0].record_type, rows[0].client_id) == ("Config", None)
    assert (rows[1].record_type, rows[1].client_id) == ("ClaimingPartition", "c1")
    assert (rows[1].group_id, rows[1].key) == ("g", KEY)
    assert bench.one(Attempt).holder is None


# --- bounded memory, and resuming from bytes


def test_tracks_of_forgotten_keys_are_dropped():
    bench = Bench(forget_ms=10)
    for number in range(GONE_KEYS_MIN + 2):
        key = Key("g", "t", number)
        epoch = bench.append(claim(key=key))
        bench.append(release(epoch, key=key))
        bench.append(member(seq=number), after=100)
    assert len(bench.log.state.keys) <= 1
    assert len(bench.historian.tracks) <= GONE_KEYS_MIN
    assert bench.historian.tracks.keys() >= bench.log.state.keys.keys()


def scene(bench, start, stop):
    """Append some of eight records; the later ones depend on the earlier ones."""
    parts = [
        lambda: bench.append(claim(topic_id=ident("topic"))),
        lambda: bench.append(beat(1, 5), after=100),
        lambda: bench.append(messages(1, 5, 9)),
        lambda: bench.append(pause(bench.log.now_ms + 50, group="h")),
        lambda: bench.append(claim("c2")),
        lambda: bench.append(member(), after=100),
        lambda: bench.append(claim("c2", seq=1), after=3 * H),
        lambda: bench.append(batch((7, 12), client="c2"), after=10),
    ]
    for part in parts[start:stop]:
        part()


@pytest.mark.parametrize("split", range(9))
def test_a_historian_resumes_from_its_bytes(split):
    whole, parted = Bench(), Bench()
    scene(whole, 0, 8)
    scene(parted, 0, split)
    saved = msgspec.msgpack.encode(parted.historian)
    parted.historian = resumed(parted.historian)
    assert msgspec.msgpack.encode(parted.historian) == saved
    scene(parted, split, 8)
    assert parted.rows == whole.rows
    assert parted.historian == whole.historian
    assert whole.one(Handoff).late_ms is not None
    assert (whole.historian.first_offset, whole.historian.entries_count) == (0, 9)


# --- from a checkpoint on


def test_a_history_begins_with_the_claims_and_pauses_of_its_state():
    first = Bench()
    epoch = first.append(claim())
    first.append(beat(epoch, 7), after=10)
    other = first.append(claim("c2", key=OTHER))
    first.append(release(other, 3, client="c2", key=OTHER))
    first.append(pause(first.log.now_ms + 100 * H, group="x"))
    world = first.log.state
    bench = Bench()
    bench.log, bench.rows = first.log, []
    bench.historian = Historian(sample_ms=10 * H)
    bench.historian.begin(world)
    assert bench.historian.first_offset == world.next_offset
    (row, held) = bench.historian.open_rows()
    assert (row.key, row.client_id, row.effect) == (KEY, "c1", "restored")
    assert (row.start.offset, row.token.offset) == (world.next_offset - 1, epoch)
    assert (row.position, row.renewed_ms) == (7, world.keys[KEY].renewed_ms)
    assert held.group_id == "x"
    bench.append(beat(epoch, 9), after=H // 2)
    assert (row.beats_count, row.gap_ms_max, row.stray_count) == (1, H // 2, 0)
    bench.append(claim("c2", key=OTHER))
    bench.append(pause(0, group="x", seq=2))
    bench.append(release(epoch, 9))
    assert bench.one(Interval).ending == "released"
    assert bench.one(PauseRow).ending == "unpaused"
    assert not bench.of(Handoff)


def test_a_forgotten_key_ends_its_claim_and_starts_again():
    bench = Bench(level=2)
    epoch = bench.append(claim())
    bench.append(messages(epoch, 0, 9))
    bench.append(forgetting(epoch), after=2 * H + 1)
    row = bench.one(Interval)
    assert (row.ending, row.ended_by, row.reason) == ("released", "admin", "forgotten")
    assert bench.historian.tracks == {}
    epoch = bench.append(claim("c2"))
    assert bench.interval.resets_count == 1
    bench.append(release(epoch, client="c2"))
    count = len(bench.of(Interval))
    bench.append(forgetting(epoch))
    assert len(bench.of(Interval)) == count
    assert not bench.of(Handoff)


@pytest.mark.parametrize("commit", [True, False])
def test_a_set_position_ends_the_claim_of_a_stale_owner(commit):
    bench = Bench(level=SECOND_LEVEL)
    epoch = bench.append(claim())
    bench.append(messages(epoch, 0, 9))
    bench.append(pause(START_MS + 100 * H))
    bench.append(stage((0, 2)), after=2 * H + 1)
    row = bench.one(Interval)
    assert (row.ending, row.ended_by, row.reason) == (
        *("released", "admin"),
        "position_set",
    )
    bench.append(stage((0, 2)))
    if commit:
        bench.append(decide())
    bench.append(resolve(commit=commit))
    assert len(bench.of(Interval)) == 1
    assert bench.one(PauseRow).ending == "unpaused"
    bench.append(claim("c2"))
    assert bench.interval.resets_count == int(commit)
    assert bench.interval.start_position == (2 if commit else 10)
    assert bench.one(Handoff).reason == "position_set"
    assert resumed(bench.historian) == bench.historian


# --- sample intervals


EPOCH = 5
TOPIC_ID = ident("topic")


def interval(client="c1", *, log_ms=1_000, epoch=EPOCH):
    return Interval(
        key=KEY,
        client_id=client,
        incarnation=ident(client),
        token=Token(1, 0, epoch),
        effect="claimed",
        why=None,
        start=Moment(epoch, log_ms, log_ms),
        heartbeat_interval_ms=H,
        renewed_offset=epoch,
        renewed_ms=log_ms,
    )


def renewal(record, *, epoch=EPOCH):
    return transition("renewed", offset=9, epoch=epoch, record=record)


# --- strays


@pytest.mark.parametrize(
    ("record", "epoch", "count"),
    [
        pytest.param(beat(EPOCH), EPOCH, 0, id="beat"),
        pytest.param(release(EPOCH), EPOCH, 0, id="release"),
        pytest.param(messages(EPOCH, 0, 1), EPOCH, 0, id="grant"),
        pytest.param(beat(EPOCH - 1), EPOCH, 1, id="names-an-older-epoch"),
        pytest.param(messages(EPOCH - 1, 0, 1), EPOCH, 1, id="asks-under-an-older"),
        pytest.param(beat(EPOCH, inc=ident("c2")), EPOCH, 1, id="another-process"),
        pytest.param(claim(), EPOCH - 1, 1, id="the-world-has-another-epoch"),
    ],
)
def test_accepted_records_of_another_claim_or_process_count_as_stray(
    record, epoch, count
):
    found = interval()
    note_stray(found, renewal(record, epoch=epoch))
    assert found.stray_count == count


def test_a_record_accepted_after_the_end_of_a_claim_is_stray():
    found = interval()
    found.ending = "released"
    note_stray(found, renewal(beat(EPOCH)))
    assert found.stray_count == 1


# --- positions


def test_positions_move_forward_rewind_or_step_back():
    track = Track(interval=interval(), epoch=EPOCH, sample_due_ms=0)
    for position, rewinds in ((4, False), (4, False), (9, False), (2, True)):
        move(track, position, rewinds=rewinds)
    found = track.interval
    assert (found.first_position, found.position) == (4, 2)
    assert (found.rewinds_count, track.rewinds_count) == (1, 1)
    assert found.steps_back_count == 0
    move(track, 1, rewinds=False)
    move(track, None, rewinds=False)
    assert (found.steps_back_count, found.position) == (2, None)


# --- waiting processes


def test_the_last_refusal_of_a_process_counts():
    track = Track(interval=interval(), epoch=EPOCH, sample_due_ms=0)
    for log_ms, reason in ((1, "held"), (2, "handoff"), (3, "held")):
        note_waiting(track, ident("c2"), reason=reason, at=Moment(1, log_ms, 0))
    assert track.waiting == [(ident("c2"), 3)]
    note_waiting(track, ident("c2"), reason="paused", at=Moment(1, 4, 0))
    assert track.waiting == []


def test_the_number_of_remembered_contenders_is_bounded():
    track = Track(interval=interval(), epoch=EPOCH, sample_due_ms=0)
    for number in range(CONTENDERS_MAX + 3):
        name = ident(f"c{number}")
        note_waiting(track, name, reason="held", at=Moment(1, number, 0))
    assert len(track.waiting) == CONTENDERS_MAX
    assert track.waiting[-1] == (ident(f"c{CONTENDERS_MAX + 2}"), CONTENDERS_MAX + 2)


# --- handoffs


def ended(ending, *, log_ms):
    found = interval()
    found.ending, found.end = ending, Moment(20, log_ms, log_ms)
    found.reason = "closed"
    return found


def test_a_takeover_is_late_from_the_time_the_owner_is_stale():
    before = ended("taken_over", log_ms=1_000 + 2 * H + 30)
    track = Track(
        interval=before, epoch=EPOCH, sample_due_ms=0, waiting=[(ident("c2"), 1_500)]
    )
    row = handoff(before, interval("c2", log_ms=1_000 + 2 * H + 30), track=track)
    assert (row.gap_ms, row.late_ms) == (2 * H + 30, 29)
    assert row.reason is None


def test_a_later_claim_is_late_from_its_first_attempt():
    before = ended("taken_over", log_ms=9_000)
    track = Track(
        interval=before, epoch=EPOCH, sample_due_ms=0, waiting=[(ident("c2"), 8_000)]
    )
    row = handoff(before, interval("c2", log_ms=9_000), track=track)
    assert row.late_ms == 1_000


def test_a_claim_is_late_only_after_the_reservation_for_a_successor():
    before = ended("released", log_ms=2_000)
    track = Track(
        interval=before,
        epoch=EPOCH,
        sample_due_ms=0,
        kept_ms=2_500,
        waiting=[(ident("c2"), 2_100)],
    )
    row = handoff(before, interval("c2", log_ms=2_600), track=track)
    assert (row.gap_ms, row.late_ms, row.reason) == (600, 100, "closed")


def test_a_claim_without_earlier_attempts_is_not_late():
    before = ended("taken_over", log_ms=90_000)
    row = handoff(
        before,
        interval("c2", log_ms=90_000),
        track=Track(interval=before, epoch=EPOCH, sample_due_ms=0),
    )
    assert row.late_ms is None


# --- resets


@pytest.mark.parametrize(("quiet_ms", "kept_ms"), [(3_001, 3_001), (None, 1_500)])
def test_a_reset_ends_every_claim(quiet_ms, kept_ms):
    tracks = {
        name: Track(interval=interval(name), epoch=EPOCH, sample_due_ms=9_000)
        for name in ("c2", "c1", "c3")
    }
    tracks["c3"].interval.ending = "released"
    at = Moment(12, 1_500, 1_500)
    world = SimpleNamespace(quiet_until_ms=quiet_ms)
    record = SimpleNamespace(client_id="admin")
    rows = list(Historian(tracks=tracks)._reset(world, record, at=at))
    assert [row.client_id for row in rows] == ["c1", "c2"]
    for row in rows:
        reported = (row.ending, row.ended_by, row.reason, row.end)
        assert reported == ("released", "admin", "reset", at)
        assert tracks[row.client_id].kept_ms == kept_ms
    # A Reset may set log time back, so the next samples are due at once.
    assert {each.sample_due_ms for each in tracks.values()} == {1_500}


def test_a_claim_ends_when_its_key_moves_away():
    bench = Bench(level=2)
    bench.append(claim())
    bench.append(beat(1, 5))
    bench.append(layout_fence(2))
    bench.append(b"", after=2 * H + 1)
    bench.rows.clear()
    bench.append(layout_final())
    (ended,) = bench.rows
    assert (ended.ending, ended.reason, ended.ended_by) == (
        "released",
        "moved",
        "admin",
    )
    assert list(bench.historian.open_rows()) == []
    assert bench.historian.tracks == {}
