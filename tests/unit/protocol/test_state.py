import msgspec
import pytest
from logkit import (
    INC,
    KEY,
    OP,
    SECRET,
    START_MS,
    H,
    Log,
    beat,
    claim,
    config,
    direct,
    growth,
    hashed,
    ident,
    layout_import,
    member,
    messages,
    pause,
    planned,
    release,
    resume,
    schedule,
    settings,
    stage,
    target_log,
)

from kafka_marshal.protocol.codec import decode, encode, person_of
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.records import SECOND_LEVEL
from kafka_marshal.protocol.settings import NO_SETTINGS
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import (
    QUIET,
    STAGING,
    WHY_CHARS_MAX,
    KeyNote,
    KeyState,
    Owner,
    Previous,
    Staging,
    Step,
    WorldState,
    count,
    stuck_count,
    why_of,
    why_to_tags,
)
from kafka_marshal.protocol.types import Key, LogEntry, Token


def key_state(**changes):
    values = {
        "owner": Owner("c1", INC),
        "epoch": 1,
        "epoch_leader_epoch": 0,
        "renewed_ms": 5_000,
        "heartbeat_interval_ms": H,
        "active_ms": 5_000,
    }
    return KeyState(**values | changes)


# --- One key ---


@pytest.mark.parametrize(
    ("position", "granted", "expected"),
    [
        pytest.param(None, None, None, id="nothing known"),
        pytest.param(7, None, 7, id="position"),
        pytest.param(0, None, 0, id="position 0 is a position"),
        pytest.param(None, 7, 7, id="granted"),
        pytest.param(None, 0, 0, id="granted 0 counts"),
        pytest.param(7, 9, 9, id="granted is further"),
        pytest.param(9, 7, 9, id="position is further"),
        pytest.param(0, 0, 0, id="both 0"),
    ],
)
def test_next_unclaimed_is_the_higher_of_position_and_granted(
    position, granted, expected
):
    known = key_state(position=position, granted=granted)
    assert known.next_unclaimed() == expected
    assert Previous(bytes(16), position, granted).next_unclaimed() == expected


@pytest.mark.parametrize(
    ("position", "granted", "expected"),
    [
        pytest.param(9, None, False, id="at least once"),
        pytest.param(None, 9, True, id="granted"),
        pytest.param(None, 8, False, id="from granted on"),
        pytest.param(9, 7, True, id="position is further"),
        pytest.param(None, 0, False, id="granted 0"),
    ],
)
def test_only_at_most_once_keys_repeat_offsets_below_next_unclaimed(
    position, granted, expected
):
    known = key_state(position=position, granted=granted)
    assert known.repeats_from(8) is expected


def test_the_position_before_an_operation_is_found_by_its_id():
    previous = Previous(b"a" * 16, 5, None)
    assert key_state(previous=previous).before(b"a" * 16) == previous
    assert key_state(previous=previous).before(b"b" * 16) is None
    assert key_state().before(b"a" * 16) is None


# --- The world ---


def test_a_new_state_has_no_entries_pauses_or_members():
    state = WorldState(3)
    assert (state.partition, state.next_offset, state.leader_epoch) == (3, 0, None)
    assert state.now_ms == 0
    assert state.feature_level == 1
    assert state.active_pause("g") is None
    assert state.token(KEY) is None
    assert state.live_members("g") == []


def test_the_next_lapse_may_be_the_begin_or_the_end_of_a_pause():
    log = Log(level=2)
    state = log.state
    log.append(schedule(START_MS + 20, START_MS + 30, op=ident("b")))
    assert state.lapses_ms == START_MS + 20
    log.append(schedule(START_MS + 10, START_MS + 15, op=ident("a")))
    assert (state.lapses_ms, state.groups["g"].lapses_ms) == (START_MS + 10,) * 2
    assert state.groups["g"].scheduled_as(ident("b")).begin_ms == START_MS + 20
    assert state.groups["g"].scheduled_as(ident("c")) is None
    log.append(pause(START_MS + 12))
    state.note_next_lapse()
    assert state.lapses_ms == START_MS + 12


def test_the_end_of_a_pause_is_estimated_by_append_time():
    log = Log(level=2)
    log.append(schedule(START_MS + 10, START_MS + 20, op=ident("a")))
    log.append(schedule(START_MS + 15, START_MS + 30, op=ident("b")))
    ends = {9: None, 10: 20, 19: 20, 20: 30, 30: None}
    for elapsed_ms, expected in ends.items():
        found = log.state.estimated_pause_end(KEY, START_MS + elapsed_ms)
        assert found == (None if expected is None else START_MS + expected)
    log.append(pause(START_MS + 18))
    assert log.state.estimated_pause_end(KEY, START_MS + 12) == START_MS + 18
    other = KEY._replace(group_id="h")
    assert log.state.estimated_pause_end(other, START_MS + 12) is None


def test_the_estimated_pause_end_of_a_key_covers_overlapping_scopes():
    log = Log(level=2)
    scope = {"t": (1, 2)}
    log.append(schedule(START_MS, START_MS + 20, op=ident("a"), scope=scope))
    log.append(schedule(START_MS + 5, START_MS + 30, op=ident("b"), scope={"t": ()}))
    keys = [KEY._replace(partition=1), KEY, KEY._replace(topic="u")]

    def ends(elapsed_ms):
        at = START_MS + elapsed_ms
        return [log.state.estimated_pause_end(key, at) for key in keys]

    assert ends(4) == [START_MS + 20, None, None]
    assert ends(5) == [START_MS + 30, START_MS + 30, None]
    assert ends(30) == [None] * 3
    log.append(pause(START_MS + 40))
    assert ends(5) == [START_MS + 40] * 3
    planner = KEY._replace(topic="/planner")
    assert log.state.estimated_pause_end(planner, START_MS) is None


def test_the_pause_of_a_key_is_the_one_that_lasts_longest():
    log = Log(level=2)
    log.append(schedule(0, START_MS + 20, op=ident("a"), scope={"t": (0, 3)}))
    log.append(schedule(0, START_MS + 10, op=ident("b"), scope={"s": (), "t": ()}))
    found = {
        (topic, number): getattr(
            log.state.pause_of(KEY._replace(topic=topic, partition=number)),
            "op_id",
            None,
        )
        for topic in "stu"
        for number in (0, 1)
    }
    a, b = ident("a"), ident("b")
    assert found == {
        ("s", 0): b,
        ("s", 1): b,
        ("t", 0): a,
        ("t", 1): b,
        ("u", 0): None,
        ("u", 1): None,
    }
    assert log.state.pause_of(KEY._replace(group_id="h")) is None
    assert list(log.state.scopes) == [("g", a), ("g", b)]
    log.state.rebuild_derived()
    assert set(log.state.scopes) == {("g", a), ("g", b)}
    assert log.state.lapses_ms == START_MS + 10


def test_an_active_pause_is_found_by_its_operation():
    log = Log(level=2)
    a, b = ident("a"), ident("b")
    log.append(pause(START_MS + 20))
    log.append(schedule(0, START_MS + 20, op=a, scope={"t": (0,)}))
    log.append(schedule(START_MS + 5, START_MS + 20, op=b, scope={"t": ()}))
    found = [log.state.lasting_pause("g", op) for op in (OP, a)]
    assert [each.op_id for each in found] == [OP, a]
    assert log.state.lasting_pause("g", b) is None, "it has not begun"
    assert log.state.lasting_pause("h", OP) is None


def test_no_key_is_paused_by_scope_while_the_whole_group_is_paused():
    log = Log(level=2)
    keys = [KEY, KEY._replace(partition=1), KEY._replace(group_id="h")]

    def aside(elapsed_ms):
        at = START_MS + elapsed_ms
        return [log.state.is_paused_by_scope(key, at) for key in keys]

    log.append(schedule(START_MS + 5, START_MS + 9, op=ident("whole")))
    assert aside(5) == [False] * 3
    log.append(schedule(0, START_MS + 20, op=ident("a"), scope={"t": (0,)}))
    log.append(schedule(START_MS + 10, START_MS + 30, op=ident("b"), scope={"t": ()}))
    assert aside(5) == [True, False, False]
    assert aside(10) == [True, True, False]
    assert aside(29) == [True, True, False]
    assert aside(30) == [False] * 3
    log.append(pause(START_MS + 40))
    assert aside(10) == [False] * 3, "the whole group is paused"


def test_a_token_keeps_the_era_of_its_epoch():
    log = Log(era=7)
    assert WorldState(0).era_at(0) is None
    epoch = log.claimed()
    log.append(config(2, era=8))
    later = log.claimed("c2", key=KEY._replace(partition=1), generation=2)
    log.append(config(3, era=20))
    assert log.state.token(KEY) == Token(7, 0, epoch)
    assert log.state.token(KEY._replace(partition=1)) == Token(8, 0, later)
    eras = [log.state.era_at(offset) for offset in range(1, 6)]
    assert eras == [7, 8, 8, 20, 20]
    assert log.state.era_at(0) == 20  # of an imported key
    before = digest(log.state)
    log.state.rebuild_derived()
    assert digest(log.state) == before


def test_a_renewal_never_ends_a_lease_earlier():
    known = KeyState(
        owner=None,
        epoch=0,
        epoch_leader_epoch=0,
        renewed_ms=100,
        heartbeat_interval_ms=50,
        active_ms=100,
    )
    known.renew(149, 25)
    assert (known.renewed_ms, known.heartbeat_interval_ms) == (100, 50)
    known.renew(150, 25)
    assert (known.renewed_ms, known.heartbeat_interval_ms) == (150, 25)
    known.renew(150, 50)
    assert (known.renewed_ms, known.heartbeat_interval_ms) == (150, 50)


@pytest.mark.parametrize(
    ("age", "left"),
    [
        pytest.param(-1, 2 * H + 2, id="negative"),
        pytest.param(0, 2 * H + 1, id="whole"),
        pytest.param(2 * H, 1, id="2H"),
        pytest.param(2 * H + 1, 0, id="2H + 1"),
        pytest.param(5 * H, 0, id="never below zero"),
    ],
)
def test_remaining_ms_is_the_time_until_the_claim_is_stale(age, left):
    known = key_state()
    now_ms = known.renewed_ms + age
    assert known.remaining_ms(now_ms) == left
    assert known.freshness(now_ms + left) is Freshness.STALE
    assert (known.freshness(now_ms) is Freshness.STALE) == (now_ms >= known.stale_at_ms)


def test_is_live_judges_a_member_at_a_given_log_time():
    log = Log()
    log.append(member("c1"))
    (one,) = log.state.live_members("g")
    assert log.state.is_live(one, one.seen_ms + 2 * H)
    assert not log.state.is_live(one, one.seen_ms + 2 * H + 1)
    assert not WorldState(0).is_live(one, one.seen_ms)


def test_members_are_live_for_two_intervals_of_log_time():
    log = Log()
    log.append(member("c2"))
    log.append(member("c1"), after=1)
    log.append(member("c1", group="other"))
    log.append(member("c1", inc=ident("another life")))

    def alive():
        return [
            (one.record.client_id, one.record.incarnation)
            for one in log.state.live_members("g")
        ]

    both = [("c1", ident("another life")), ("c1", INC)]
    log.append(b"", after=2 * H - 1)
    assert alive() == [*both, ("c2", ident("c2"))]
    log.append(b"", after=1)
    assert alive() == both
    log.append(b"", after=1)
    assert alive() == []


def test_other_live_processes_of_the_group_are_other_members():
    log = Log(configured=False)
    me = Owner("c1", INC)
    assert not log.state.has_other_member("g", me)
    log = Log()
    log.append(member("c1"))
    log.append(member("c2", group="other"))
    assert not log.state.has_other_member("g", me)
    log.append(member("c1", inc=ident("another life")))
    assert log.state.has_other_member("g", me)
    log.append(b"", after=2 * H)
    assert log.state.has_other_member("g", me)
    log.append(b"", after=1)
    assert not log.state.has_other_member("g", me)


def test_equal_states_may_differ_in_soft_and_derived_parts():
    one, other = WorldState(0), WorldState(0)
    one.soft.counters["held"] = 3
    one.dirty["g"] = None
    assert one == other
    one.next_offset = 1
    assert one != other


# --- Derived parts ---


def derived(state):
    return (
        state.epochs,
        state.over,
        state.locked,
        state.lapses_ms,
        state.awaiting,
        {name: group.key_count for name, group in state.groups.items()},
    )


def test_rebuilt_derived_parts_are_the_same():
    log = Log(level=SECOND_LEVEL)
    for partition in range(3):
        log.claimed(key=Key("g", "t", partition))
    log.claimed(key=Key("h", "t", 0))
    log.append(release(1, 5))
    log.append(messages(2, 0, 3, key=Key("g", "t", 1)))
    log.append(release(2, key=Key("g", "t", 1)))
    for op, group in (("op1", "h"), ("op2", "g")):
        log.append(pause(START_MS + 9, op=ident(op), group=group))
        log.append(pause(0, op=ident(op), group=group, seq=1))
    log.append(pause(START_MS + 9, op=ident("op3")))
    log.append(stage((1, 2), op=ident("op3")))
    state = log.state
    before = derived(state)
    assert state.awaiting == {KEY}
    assert state.locked == {("g", ident("op3")): {Key("g", "t", 1): None}}
    assert [op for _, _, op in state.over] == [ident("op1"), ident("op2")]
    assert state.lapses_ms == START_MS + 9
    state.rebuild_derived()
    assert derived(state) == before
    assert state.forgettable == [(START_MS, KEY)]
    assert set(state.dirty) == {*state.keys, *state.groups}
    assert (state.item_hashes, state.item_sum) == ({}, 0)


def test_forgettable_is_compacted_once_most_of_its_entries_are_stale():
    keys = [Key("g", "t", number) for number in range(6)]
    state = WorldState(0, keys={key: key_state(owner=None) for key in keys})
    for key, known in state.keys.items():
        state.note_forgettable(key, known)
    counts = []
    for key in keys[:4]:
        del state.keys[key]
        state.note_forgotten(key)
        counts.append((len(state.forgettable), state.stale_count))
    assert counts == [(6, 1), (6, 2), (6, 3), (2, 0)]
    assert state.awaiting == set(keys[4:])
    # A key without an entry leaves none.
    state.note_forgotten(keys[0])
    assert state.stale_count == 0


def test_a_key_removed_before_a_digest_is_not_dirty():
    state = WorldState(0, dirty={KEY: None})
    state.note_gone(KEY)
    state.note_gone("never there")
    assert state.dirty == {}
    state.item_hashes[KEY] = 5
    state.note_gone(KEY)
    assert state.dirty == {KEY: None}


def test_a_state_is_replaced_in_place():
    here, there = Log().state, Log(level=2, h=7)
    there.claimed()
    soft, offset, expected_digest = here.soft, here.next_offset, digest(there.state)
    here.become(there.state)
    assert (here.soft is soft, here.next_offset) == (True, offset)
    assert (here.config, here.keys) == (there.state.config, there.state.keys)
    here.next_offset = there.state.next_offset
    assert digest(here) == expected_digest


@pytest.mark.parametrize(
    ("quiet_ms", "staged_ms", "ends_ms", "dirty"),
    [
        (None, None, None, set()),
        (5, None, 5, {QUIET}),
        (None, 7, 7, {STAGING}),
        (9, 7, 7, {QUIET, STAGING}),
    ],
)
def test_ends_ms_is_the_earlier_end_of_quiet_time_and_staging(
    quiet_ms, staged_ms, ends_ms, dirty
):
    state = WorldState(0, quiet_until_ms=quiet_ms)
    if staged_ms is not None:
        state.staging = Staging(
            op_id=b"",
            client_id="c",
            incarnation=b"",
            part_count=1,
            size_bytes=1,
            digest=b"",
            until_ms=staged_ms,
            parts=(),
            chain=b"",
        )
    state.rebuild_derived()
    assert (state.ends_ms, set(state.dirty)) == (ends_ms, dirty)


# --- transition


ENTRY = LogEntry(offset=9, leader_epoch=0, timestamp_ms=0, timestamp_type=1, value=b"")


@pytest.fixture
def claimed_log():
    log = Log()
    log.claimed()
    return log


def fields(transition):
    return (
        transition.offset,
        transition.outcome,
        transition.effect,
        transition.reason,
        transition.key,
        transition.epoch,
        transition.detail,
        transition.record,
    )


RECORD = beat(1)
CASES = [
    pytest.param(
        lambda step: step.skipped(),
        (9, "skipped", None, None, None, None, None, RECORD),
        "skipped",
        id="skipped",
    ),
    pytest.param(
        lambda step: step.accepted("renewed", KEY),
        (9, "accepted", "renewed", None, KEY, 1, None, RECORD),
        "renewed",
        id="accepted",
    ),
    pytest.param(
        lambda step: step.accepted("granted", KEY, detail={"first": 1, "last": 2}),
        (9, "accepted", "granted", None, KEY, 1, {"first": 1, "last": 2}, RECORD),
        "granted",
        id="accepted with figures",
    ),
    pytest.param(
        lambda step: step.accepted("paused"),
        (9, "accepted", "paused", None, None, None, None, RECORD),
        "paused",
        id="accepted without key",
    ),
    pytest.param(
        lambda step: step.refused("held", KEY, detail={"remaining_ms": 5}),
        (9, "refused", None, "held", KEY, 1, {"remaining_ms": 5}, RECORD),
        "held",
        id="refused",
    ),
    pytest.param(
        lambda step: step.refused("limits", KEY._replace(partition=5)),
        (9, "refused", None, "limits", KEY._replace(partition=5), None, None, RECORD),
        "limits",
        id="a key that does not exist has no epoch",
    ),
    pytest.param(
        lambda step: step.ignored("not_owner", KEY),
        (9, "ignored", None, "not_owner", KEY, 1, None, RECORD),
        "not_owner",
        id="ignored",
    ),
    pytest.param(
        lambda step: step.undecodable(),
        (9, "undecodable", None, "undecodable", None, None, None, RECORD),
        "undecodable",
        id="undecodable",
    ),
    pytest.param(
        lambda step: step.halted(),
        (9, "halted", None, "halted", None, None, None, RECORD),
        "halted",
        id="halted",
    ),
]


@pytest.mark.parametrize(("outcome", "expected", "counter"), CASES)
def test_an_outcome_is_returned_and_counted(claimed_log, outcome, expected, counter):
    before = dict(claimed_log.state.soft.counters)
    transition = outcome(Step(claimed_log.state, ENTRY, RECORD))
    assert fields(transition) == expected
    counted = {**before, counter: before.get(counter, 0) + 1}
    assert claimed_log.state.soft.counters == counted


def test_counting_zero_times_makes_no_counter(claimed_log):
    count(claimed_log.state, "new", times=0)
    assert "new" not in claimed_log.state.soft.counters


# --- notes


@pytest.fixture
def log():
    return Log()


def note(log, key=KEY) -> KeyNote | None:
    return log.state.soft.notes.get(key)


def why(text, **claiming):
    return msgspec.structs.replace(claim(**claiming), tags=why_to_tags(text))


def gone(epoch, reason, position=None, client="c1"):
    record = release(epoch, position, client=client)
    return msgspec.structs.replace(record, reason=reason)


def test_the_note_of_a_key_has_the_reason_of_its_accepted_claim(log):
    log.append(why("fair: share 3 of 12"))
    assert note(log) == KeyNote(
        client_id="c1", offset=1, reason="fair: share 3 of 12", before=None, stuck=None
    )
    log.append(why("I want it", client="c2"))
    assert note(log).client_id == "c1", "a claim that was refused tells nothing"


def test_a_claim_without_notes_and_after_a_set_position_follows_none(log):
    """Checkpoints have no notes, and ``previous`` does not show when it was set."""
    log.append(claim())
    log.append(gone(1, "closed"))
    log.state.soft.notes.clear()
    log.append(claim())
    assert note(log).follows == 1
    known = log.state.keys[KEY]
    known.previous = Previous(b"o" * 16, 5, None)
    log.append(gone(note(log).offset, "closed"))
    log.state.soft.notes.clear()
    log.append(claim())
    assert note(log).follows is None


@pytest.mark.parametrize("text", ["ä", "€", "\N{GRINNING FACE}"])
def test_tags_of_a_claim_fit_a_reason_and_a_person_of_any_length(log, text):
    record = msgspec.structs.replace(claim(), tags=why_to_tags("free", "alice"))
    assert (why_of(record), person_of(record)) == ("free", "alice")
    long = msgspec.structs.replace(claim(), tags=why_to_tags(text * 999, text * 999))
    assert len(long.tags) <= 1024
    assert why_of(long) == text * WHY_CHARS_MAX
    assert set(person_of(long)) == {text}
    assert log.one(decode(encode(long))).effect == "claimed"


def test_the_note_of_a_key_names_the_owner_before(log):
    epoch = log.claimed("c1")
    log.append(release(epoch))
    epoch = log.claimed("c2")
    assert note(log).before == "c1"
    log.append(release(epoch, client="c2"))
    assert (note(log).client_id, note(log).before) == ("c2", "c1")
    log.claimed("c2")
    assert note(log).before == "c1", "what comes back to c2 was c1's before"
    log.one(claim("c3"), after=2 * H + 1)
    assert (note(log).client_id, note(log).before) == ("c3", "c2")


def test_a_resume_keeps_the_owner_before(log):
    epoch = log.claimed("c0")
    log.append(release(epoch, client="c0"))
    epoch = log.claimed("c1", resume_hash=hashed(SECRET))
    assert log.outcome_of(resume(epoch, before=INC)) == "resumed"
    assert (note(log).client_id, note(log).before) == ("c1", "c0")


def wedge(log, position, client):
    epoch = log.claimed(client)
    log.append(gone(epoch, "stuck: 1 uncommitted", position, client))
    return stuck_count(note(log), log.key())


def test_owners_stuck_at_the_same_position_are_counted(log):
    assert [wedge(log, 7, "c1"), wedge(log, 7, "c2"), wedge(log, 7, "c3")] == [1, 2, 3]
    epoch = log.claimed("c4")
    assert stuck_count(note(log), log.key()) == 3
    log.append(beat(epoch, 8, client="c4"))
    assert stuck_count(note(log), log.key()) == 0, "it got on"
    log.append(gone(epoch, "closed", None, "c4"))
    assert wedge(log, 8, "c5") == 1


def test_owners_stuck_at_an_unknown_position_are_counted(log):
    assert [wedge(log, None, "c1"), wedge(log, None, "c2")] == [1, 2]


def test_a_key_without_a_stuck_release_has_no_stuck_owners(log):
    log.claimed()
    assert stuck_count(None, log.key()) == 0
    assert stuck_count(note(log), log.key()) == 0


def test_a_forgotten_key_has_no_note():
    log = Log(forget_ms=5)
    epoch = log.claimed()
    log.append(release(epoch))
    assert note(log) is not None
    log.append(b"", after=10)
    assert KEY not in log.state.keys
    assert note(log) is None


def test_a_drain_of_a_client_overrides_a_cordon_of_its_host():
    log = Log(level=2)
    assert log.state.action_for(("g", "c1"), host="m1") is None
    log.append(direct(host="m1", group="marshal", action="cordon"))
    assert log.state.action_for(("g", "c1"), host="m1") == "cordon"
    assert log.state.action_for(("g", "c1"), host="m2") is None
    log.append(direct("c1", op=ident("other")))
    assert log.state.action_for(("g", "c1"), host="m1") == "drain"
    assert log.state.action_for(("h", "c1"), host="m2") is None


def test_a_group_without_settings_has_the_defaults():
    log = Log(level=2)
    log.append(settings(handoff_ms=5))
    log.append(claim(key=Key("h", "t", 0)))
    assert log.state.settings_of("g").handoff_ms == 5
    assert log.state.settings_of("h") == log.state.settings_of("nobody") == NO_SETTINGS


def test_the_plans_of_a_group_are_counted():
    log = Log(level=2)
    log.append(planned(0, count=2))
    assert not log.state.soft.plans["g"].is_whole
    log.append(planned(1, count=2, number=1), after=9)
    assert log.state.soft.plans["g"].is_whole
    assert log.state.plan_generation("g") == 2
    assert log.state.plan_generation("nobody") == 0
    # A group that has nothing but a plan has none from before this time.
    assert log.state.plans_ms == log.now_ms - 9
    log.state.note_plan(log.now_ms)
    assert log.state.plans_ms == log.now_ms - 9
    log.state.rebuild_derived()
    assert log.state.plans_ms == log.now_ms


def test_rebuilding_derived_parts_keeps_an_open_change_of_the_count():
    log = target_log()
    log.append(layout_import())
    before = digest(log.state)
    log.state.rebuild_derived()
    assert log.state.epochs == {}
    assert digest(log.state) == before


def test_rebuilding_derived_parts_keeps_growths():
    log = Log(level=2)
    log.append(growth())
    before = digest(log.state)
    log.state.rebuild_derived()
    assert digest(log.state) == before
