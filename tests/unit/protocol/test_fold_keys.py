import pytest
from logkit import (
    INC,
    INC_AGAIN,
    KEY,
    LOCK,
    SECRET,
    START_MS,
    STAYS,
    H,
    Log,
    batch,
    beat,
    claim,
    config,
    fence,
    forgetting,
    hashed,
    ident,
    imported,
    layout_done,
    layout_final,
    layout_import,
    messages,
    pause,
    release,
    resets,
    resume,
    source_log,
    target_log,
)

from kafka_marshal.protocol import judging
from kafka_marshal.protocol.fold_keys import FOLDS, FORGOTTEN_PER_ENTRY_MAX
from kafka_marshal.protocol.records import KINDS
from kafka_marshal.protocol.snapshot import digest, to_bytes
from kafka_marshal.protocol.state import Owner
from kafka_marshal.protocol.types import OFFSET_MAX, Key

FAR_MS = START_MS + 10**9


def keys(count, group="g"):
    return [Key(group, "t", number) for number in range(count)]


@pytest.fixture
def log():
    return Log()


@pytest.fixture
def owned():
    log = Log()
    assert log.claimed(resume_hash=hashed(SECRET)) == 1
    return log


def test_every_record_about_keys_has_its_fold():
    assert {kind.number for kind in KINDS if kind.record in FOLDS} == {
        1,
        2,
        3,
        4,
        6,
        18,
    }


# --- Claims ---


def test_a_claim_installs_its_owner(log):
    transition = log.one(
        claim(resume_hash=hashed(SECRET), topic_id=ident("topic")), after=5, epoch=0
    )
    assert (transition.outcome, transition.effect) == ("accepted", "claimed")
    assert (transition.key, transition.epoch) == (KEY, 1)
    known = log.key()
    assert known.owner == Owner("c1", INC)
    assert (known.epoch, known.epoch_leader_epoch) == (1, 0)
    assert known.renewed_ms == known.active_ms == START_MS + 5
    assert known.heartbeat_interval_ms == H
    assert (known.position, known.granted) == (None, None)
    assert (known.topic_id, known.resume_hash) == (ident("topic"), hashed(SECRET))
    assert log.state.groups["g"].key_count == 1


def test_a_claim_without_config_is_refused_before_all_else():
    log = Log(configured=False)
    transition = log.one(claim(generation=9))
    assert (transition.outcome, transition.reason) == ("refused", "no_config")
    assert (transition.key, transition.epoch) == (KEY, None)
    assert log.outcome_of(resume(0)) == "no_config"
    assert log.state.keys == {}


def test_the_earliest_claim_wins(log):
    log.claimed("c1")
    transition = log.one(claim("c2"), after=2 * H)
    assert (transition.reason, transition.epoch) == ("held", 1)
    assert transition.detail == {"remaining_ms": 1}
    assert log.key().owner.client_id == "c1"


def test_a_stale_owner_is_replaced(owned):
    owned.append(beat(1, 7))
    transition = owned.one(claim("c2"), after=2 * H + 1)
    assert (transition.effect, transition.epoch) == ("claimed", 3)
    known = owned.key()
    assert (known.owner.client_id, known.position) == ("c2", 7)
    assert known.resume_hash is None
    assert owned.state.epochs == {3: KEY}


def test_a_duplicate_renews_nothing(owned):
    before = owned.key().renewed_ms
    transition = owned.one(claim(seq=1), after=H)
    assert (transition.reason, transition.detail) == ("duplicate", None)
    assert owned.key().renewed_ms == owned.key().active_ms == before


def test_a_claim_clears_lock_and_handoff(owned):
    owned.append(release(1, successor="c2"))
    assert owned.key().handoff == ("c2", START_MS + H // 2)
    owned.claimed("c2")
    assert owned.key().handoff is None


def test_a_key_keeps_the_interval_of_its_claim(owned):
    owned.append(config(2, era=2, h=10))
    assert owned.key().heartbeat_interval_ms == H
    assert owned.outcome_of(claim("c2", generation=2), after=2 * H) == "held"
    assert owned.outcome_of(beat(1)) == "renewed"
    assert owned.key().heartbeat_interval_ms == 10
    assert owned.outcome_of(claim("c2", generation=2), after=21) == "claimed"


@pytest.mark.parametrize("write", [beat, lambda epoch: batch((epoch, None))])
def test_a_lower_interval_ends_no_lease_earlier(owned, write):
    owned.append(config(2, era=2, h=10))
    known = owned.key()
    assert owned.append(write(1), after=1)[0].effect == "renewed"
    assert (known.renewed_ms, known.heartbeat_interval_ms) == (START_MS, H)
    assert known.active_ms == START_MS + 1
    assert owned.append(write(1), after=2 * H - 21)[0].effect == "renewed"
    assert (known.renewed_ms, known.heartbeat_interval_ms) == (owned.now_ms, 10)


# --- Topic ids ---

FIRST, SECOND = ident("first"), ident("second")


def test_a_first_topic_id_resets_nothing(owned):
    owned.append(beat(1, 7))
    owned.append(release(1))
    owned.claimed("c1", topic_id=FIRST)
    known = owned.key()
    assert (known.topic_id, known.position) == (FIRST, 7)
    assert known.retired_topic_ids == ()


def test_an_absent_or_equal_topic_id_changes_nothing(owned):
    owned.append(release(1, 7))
    for named in (FIRST, FIRST, None):
        owned.append(release(owned.claimed("c1", topic_id=named)))
    known = owned.key()
    assert (known.topic_id, known.retired_topic_ids) == (FIRST, ())
    assert known.position == 7


def test_another_topic_of_the_same_name_has_no_position(owned):
    owned.append(release(1))
    epoch = owned.claimed("c1", topic_id=FIRST)
    owned.append(messages(epoch, 0, 9))
    owned.append(release(epoch))
    assert owned.outcome_of(claim(topic_id=SECOND)) == "cas"
    assert owned.outcome_of(claim(topic_id=SECOND, expected=epoch - 1)) == "cas"
    owned.claimed("c1", topic_id=SECOND, expected=epoch)
    known = owned.key()
    assert (known.topic_id, known.retired_topic_ids) == (SECOND, (FIRST,))
    assert (known.position, known.granted) == (None, None)


def test_the_last_four_retired_topic_ids_are_refused(log):
    epoch = log.claimed(topic_id=ident("0"))
    for number in range(1, 7):
        log.append(release(epoch))
        epoch = log.claimed(topic_id=ident(str(number)), expected=epoch)
    log.append(release(epoch))
    retired = [ident(str(number)) for number in (2, 3, 4, 5)]
    assert log.key().retired_topic_ids == tuple(retired)
    for old in retired:
        assert log.outcome_of(claim(topic_id=old, expected=epoch)) == "old_topic"
    assert log.outcome_of(claim(topic_id=ident("1"), expected=epoch)) == "claimed"


# --- Resumes ---


def test_a_resume_takes_up_the_key_at_once(owned):
    owned.append(beat(1, 7))
    again = resume(1, resume_hash=hashed(b"next"), topic_id=FIRST)
    transition = owned.one(again, after=H - 1)
    assert (transition.effect, transition.epoch) == ("resumed", 3)
    known = owned.key()
    assert known.owner == Owner("c1", INC_AGAIN)
    assert known.renewed_ms == START_MS + H - 1
    assert (known.position, known.resume_hash) == (7, hashed(b"next"))
    assert known.topic_id is None
    assert owned.state.epochs == {3: KEY}


def test_a_resume_fences_the_former_life(owned):
    owned.append(resume(1))
    transition = owned.one(beat(1))
    assert (transition.outcome, transition.reason) == ("ignored", "not_owner")


def test_a_secret_is_good_once(owned):
    epoch = owned.one(resume(1)).epoch
    third = resume(epoch, inc=ident("third"), before=INC_AGAIN)
    assert owned.outcome_of(third) == "resume_mismatch"


def test_a_refused_resume_changes_nothing(owned):
    assert owned.outcome_of(resume(1), after=H) == "resume_not_fresh"
    assert owned.outcome_of(resume(1, secret=ident("guess"))) == "resume_mismatch"
    assert owned.key().owner == Owner("c1", INC)


# --- Heartbeats ---


def test_a_beat_renews_and_moves_forward(owned):
    for position, expected in ((None, None), (0, 0), (7, 7), (5, 7), (None, 7)):
        transition = owned.one(beat(1, position), after=1)
        assert (transition.effect, transition.epoch) == ("renewed", 1)
        known = owned.key()
        assert known.position == expected
        assert known.renewed_ms == known.active_ms == owned.now_ms


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        pytest.param(3, 3, id="back"),
        pytest.param(0, 0, id="to the start"),
        pytest.param(9, 9, id="forward"),
        pytest.param(None, 7, id="nowhere"),
    ],
)
def test_a_rewind_sets_the_position_and_no_grant(owned, position, expected):
    owned.append(messages(1, 0, 6))
    owned.append(beat(1, position, rewind=True))
    known = owned.key()
    assert (known.position, known.granted) == (expected, 7)


def test_a_late_beat_still_renews(owned):
    assert owned.outcome_of(beat(1), after=5 * H) == "renewed"
    assert owned.outcome_of(claim("c2"), after=2 * H) == "held"


@pytest.mark.parametrize(
    ("foreign", "reason"),
    [
        pytest.param(beat(1, 9, client="c2"), "not_owner", id="another client"),
        pytest.param(beat(0, 9), "old_epoch", id="another claim"),
        pytest.param(beat(1, 9, inc=INC_AGAIN), "not_owner", id="another life"),
        pytest.param(release(1, 9, client="c2"), "not_owner", id="release"),
        pytest.param(release(0, 9), "old_epoch", id="old release"),
        pytest.param(messages(1, 0, 9, client="c2"), "not_owner", id="messages"),
        pytest.param(messages(0, 0, 9), "old_epoch", id="old messages"),
    ],
)
def test_a_heartbeat_of_another_client_is_ignored(owned, foreign, reason):
    before = owned.key().renewed_ms, owned.key().active_ms
    transition = owned.one(foreign, after=1)
    assert (transition.outcome, transition.reason) == ("ignored", reason)
    assert (transition.key, transition.epoch) == (KEY, 1)
    known = owned.key()
    assert (known.position, known.granted) == (None, None)
    assert (known.renewed_ms, known.active_ms) == before


def test_a_sender_that_does_not_match_is_left_to_the_judge(owned, monkeypatch):
    # The quick look at an owner's beat may only ever say yes.
    monkeypatch.setattr(judging, "mismatch", lambda state, record, *, key: None)
    transition = owned.one(beat(99, 5, client="c2"))
    assert (transition.effect, transition.key, transition.epoch) == ("renewed", KEY, 1)


def test_names_are_kept_once_however_many_keys_have_them(owned):
    other = KEY._replace(partition=1)
    owned.claimed(key=other)
    (first, one), (second, another) = owned.state.keys.items()
    assert first.group_id is second.group_id
    assert first.topic is second.topic
    assert one.owner.client_id is another.owner.client_id
    assert list(owned.state.epochs.values()) == [first, second]


def test_a_paused_group_moves_positions_and_renews_nothing(owned):
    owned.append(pause(FAR_MS))
    assert owned.outcome_of(beat(1, 7), after=H) == "position_only"
    known = owned.key()
    assert (known.position, known.renewed_ms) == (7, START_MS)
    assert known.active_ms == START_MS + H
    assert owned.append(batch((1, 8)))[0].effect == "position_only"


def test_a_pause_leaves_the_planner_alone(log):
    planner = Key("g", "/planner", 0)
    log.append(pause(FAR_MS))
    epoch = log.claimed(key=planner)
    assert log.outcome_of(beat(epoch, key=planner)) == "renewed"
    assert log.outcome_of(messages(epoch, 0, 1, key=planner)) == "granted"
    assert log.outcome_of(claim()) == "paused"


# --- Batches ---


def test_a_batch_is_that_many_beats_in_order(log):
    epochs = [log.claimed(key=key) for key in keys(3)]
    foreign = log.claimed("c2", key=Key("g", "t", 3))
    elsewhere = log.claimed(key=Key("h", "t", 0))
    beats = [(epochs[1], 5), (foreign, 9), (elsewhere, 9), (99, 9), (epochs[0], None)]
    beats.append((epochs[1], 4))
    transitions = log.append(batch(*beats), after=1)
    reported = [(one.effect or one.reason, one.key, one.epoch) for one in transitions]
    assert reported == [
        ("renewed", Key("g", "t", 1), epochs[1]),
        ("not_owner", Key("g", "t", 3), foreign),
        ("not_owner", None, None),
        ("not_owner", None, None),
        ("renewed", Key("g", "t", 0), epochs[0]),
        ("renewed", Key("g", "t", 1), epochs[1]),
    ]
    assert {one.offset for one in transitions} == {6}
    assert log.key(Key("g", "t", 1)).position == 5
    assert log.key(Key("g", "t", 2)).renewed_ms == START_MS
    assert log.state.soft.counters["not_owner"] == 3
    assert log.state.soft.counters["renewed"] == 3


def test_a_batch_of_a_former_life_or_a_released_key_counts_for_nothing(owned):
    (transition,) = owned.append(batch((1, 5), inc=INC_AGAIN))
    assert (transition.reason, transition.key) == ("not_owner", KEY)
    owned.append(release(1))
    (transition,) = owned.append(batch((1, 5)))
    assert (transition.reason, transition.key) == ("not_owner", KEY)
    assert owned.key().position is None


def test_an_epoch_that_was_replaced_names_no_key(owned):
    owned.append(resume(1))
    (transition,) = owned.append(batch((1, 5), inc=INC_AGAIN))
    assert (transition.reason, transition.key) == ("not_owner", None)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        pytest.param(3, ["renewed"] * 3, id="at the limit"),
        pytest.param(4, ["limits"], id="one more"),
    ],
)
def test_a_batch_has_a_limit(count, expected):
    log = Log(beats=3)
    epoch = log.claimed()
    transitions = log.append(batch(*[(epoch, 1)] * count))
    assert [one.effect or one.reason for one in transitions] == expected
    assert all(one.outcome != "ignored" for one in transitions)


def test_without_config_every_beat_is_nobodys():
    log = Log(configured=False)
    refusals = [(one.reason, one.key) for one in log.append(batch((0, 1), (1, 1)))]
    assert refusals == [("not_owner", None)] * 2
    for record in (beat(0), release(0), messages(0, 0, 0)):
        transition = log.one(record)
        assert (transition.reason, transition.key) == ("not_owner", KEY)


# --- Releases ---


def test_a_released_key_keeps_its_epoch_and_position(owned):
    owned.append(beat(1, 7))
    transition = owned.one(release(1, 5), after=1)
    assert (transition.effect, transition.epoch) == ("released", 1)
    known = owned.key()
    assert (known.owner, known.epoch, known.position) == (None, 1, 7)
    assert (known.handoff, known.active_ms) == (None, START_MS + 1)
    assert owned.outcome_of(claim("c2")) == "claimed"


def test_a_release_carries_the_last_position(owned):
    owned.append(release(1, 9))
    assert owned.key().position == 9


def test_a_successor_is_preferred_for_half_an_interval(owned):
    owned.append(release(1, successor="c2"))
    assert owned.outcome_of(claim("c3")) == "handoff"
    assert owned.outcome_of(claim("c3"), after=H // 2 - 1) == "handoff"
    assert owned.outcome_of(claim("c3"), after=1) == "claimed"


def test_a_successor_may_claim_at_once(owned):
    owned.append(release(1, successor="c2"))
    assert owned.outcome_of(claim("c2")) == "claimed"


def test_a_paused_group_may_release(owned):
    owned.append(pause(FAR_MS))
    assert owned.outcome_of(release(1, 5)) == "released"
    assert owned.key().position == 5


# --- Claims of messages ---


@pytest.mark.parametrize(
    ("position", "granted", "first", "start"),
    [
        pytest.param(None, None, 4, 4, id="nothing known: what it says"),
        pytest.param(0, None, 4, 0, id="position 0"),
        pytest.param(6, None, 4, 6, id="position"),
        pytest.param(6, 8, 4, 8, id="granted"),
        pytest.param(8, 6, 4, 8, id="position beyond the grants"),
    ],
)
def test_a_grant_starts_where_nobody_was_granted(
    owned, position, granted, first, start
):
    known = owned.key()
    known.position, known.granted = position, granted
    transition = owned.one(messages(1, first, 10), after=1)
    assert (transition.effect, transition.detail) == (
        "granted",
        {"first": start, "last": 10},
    )
    assert (known.position, known.granted) == (11, 11)
    assert known.renewed_ms == START_MS
    assert known.active_ms == START_MS + 1


@pytest.mark.parametrize(
    ("last", "paused", "expected"),
    [
        pytest.param(4, False, "nothing_left", id="one below"),
        pytest.param(5, False, "granted", id="a single offset"),
        pytest.param(8, False, "granted", id="a whole span"),
        pytest.param(9, False, "span", id="one more than a span"),
        pytest.param(OFFSET_MAX, False, "span", id="far too much"),
        pytest.param(4, True, "paused", id="paused before nothing left"),
        pytest.param(9, True, "paused", id="paused before span"),
        pytest.param(5, True, "paused", id="paused"),
    ],
)
def test_order_of_refusals_of_messages(last, paused, expected):
    log = Log(span=4)
    epoch = log.claimed()
    log.append(beat(epoch, 5))
    if paused:
        log.append(pause(FAR_MS))
    transition = log.one(messages(epoch, 0, last))
    assert (transition.effect or transition.reason) == expected
    accepted = expected == "granted"
    assert transition.outcome == ("accepted" if accepted else "refused")
    assert log.key().granted == (last + 1 if accepted else None)
    if not accepted:
        assert (transition.detail, log.key().position) == (None, 5)


def test_nothing_is_granted_twice(owned):
    assert owned.one(messages(1, 0, 9)).detail == {"first": 0, "last": 9}
    assert owned.outcome_of(messages(1, 0, 9)) == "nothing_left"
    assert owned.one(messages(1, 0, 10)).detail == {"first": 10, "last": 10}
    owned.append(beat(1, 3, rewind=True))
    assert owned.one(messages(1, 3, 12)).detail == {"first": 11, "last": 12}


def test_the_last_offset_of_all_can_be_granted():
    log = Log()
    epoch = log.claimed()
    assert log.outcome_of(messages(epoch, OFFSET_MAX, OFFSET_MAX)) == "granted"
    assert log.outcome_of(messages(epoch, 0, OFFSET_MAX)) == "nothing_left"


# --- Forgetting ---


def silent(count, **settings):
    """Return a log with that many released keys, one a millisecond."""
    log = Log(forget_ms=100, **settings)
    for key in keys(count):
        log.append(release(log.claimed(key=key), key=key), after=1)
    return log


def test_a_silent_key_is_forgotten():
    log = silent(1)
    log.append(b"", after=100)
    assert KEY in log.state.keys
    log.append(b"", after=1)
    assert log.state.keys == {}
    assert (log.state.epochs, log.state.groups) == ({}, {})
    assert (log.state.forgettable, log.state.awaiting) == ([], set())


def test_eight_are_forgotten_with_each_entry_the_oldest_first():
    log = silent(2 * FORGOTTEN_PER_ENTRY_MAX + 1)
    for left in (9, 1, 0):
        log.append(b"", after=H)
        assert sorted(log.state.keys) == keys(17)[17 - left :]


def test_equally_old_keys_are_forgotten_by_name():
    log = Log(forget_ms=100)
    for key in reversed(keys(9)):
        log.append(release(log.claimed(key=key), key=key))
    log.append(b"", after=101)
    assert list(log.state.keys) == [Key("g", "t", 8)]


@pytest.mark.parametrize(
    "keep",
    [
        pytest.param(lambda log: log.append(messages(1, 0, 5)), id="granted"),
        pytest.param(lambda log: setattr(log.key(), "lock", LOCK), id="locked"),
    ],
)
def test_a_key_with_a_grant_or_owner_is_kept(keep):
    log = Log(forget_ms=100)
    log.claimed()
    keep(log)
    log.append(release(1))
    log.append(b"", after=H)
    assert KEY in log.state.keys


def test_owned_keys_are_kept_and_wait_again_when_released():
    log = silent(1)
    epoch = log.claimed()
    log.append(b"", after=H)
    assert log.state.awaiting == set()
    log.append(release(epoch))
    log.append(b"", after=101)
    assert log.state.keys == {}


def test_a_key_that_was_released_again_waits_longer():
    log = silent(1)
    log.append(release(log.claimed(), 5), after=60)
    log.append(b"", after=60)
    assert KEY in log.state.keys
    log.append(b"", after=41)
    assert log.state.keys == {}


@pytest.mark.parametrize(
    "named",
    [
        pytest.param([beat(0)], id="a beat"),
        pytest.param([release(0)], id="a release"),
        pytest.param([messages(0, 0, 0)], id="messages"),
        pytest.param([claim(generation=9)], id="a refused claim"),
        pytest.param([batch((99, 1), (1, 1))], id="a batch"),
    ],
)
def test_a_key_that_the_entry_names_is_not_forgotten_by_it(named):
    log = silent(3)
    log.append(named[0], after=H)
    assert list(log.state.keys) == [KEY]
    log.append(b"")
    assert log.state.keys == {}


def test_named_keys_do_not_count_among_the_eight():
    log = silent(10)
    log.append(beat(0, key=Key("g", "t", 2)), after=H)
    assert sorted(log.state.keys) == [Key("g", "t", 2), Key("g", "t", 9)]


def test_nothing_is_remembered_of_dropped_keys():
    log = Log(forget_ms=0)
    for number in range(50):
        key = Key("g", "t", number)
        log.append(release(log.claimed(key=key), key=key), after=1)
        log.append(b"", after=1)
    assert (log.state.keys, log.state.dirty) == ({}, {})


def test_releasing_again_and_again_grows_nothing(owned):
    epoch = 1
    for _ in range(50):
        owned.append(release(epoch), after=1)
        epoch = owned.claimed()
    assert len(owned.state.forgettable) == 1


def test_a_group_outlives_its_keys_while_it_remembers():
    log = silent(1)
    log.append(pause(log.now_ms + 5))
    log.append(b"", after=H)
    assert log.state.keys == {}
    assert set(log.state.groups) == {"g"}


def test_a_refusal_in_the_quiet_time_of_a_reset_has_the_time_left():
    log = Log(level=2)
    for record in resets(to_bytes(log.state), digest(log.state)):
        log.append(record)
    refused = log.one(claim())
    assert (refused.reason, refused.detail) == ("quiet", {"remaining_ms": 2 * H + 1})


# --- a record that drops a key (4.9)


def at_level_2(**settings):
    return Log(level=2, **settings)


def test_a_key_at_most_once_is_dropped_by_a_record():
    log = at_level_2()
    epoch = log.claimed()
    log.append(messages(epoch, 0, 9))
    log.append(release(epoch))
    (transition,) = log.append(forgetting(epoch))
    assert (
        transition.outcome,
        transition.effect,
        transition.key,
        transition.epoch,
    ) == (
        *("accepted", "forgotten"),
        *(KEY, None),
    )
    assert (log.state.keys, log.state.groups) == ({}, {})
    again = log.claimed("c2")
    known = log.key()
    assert (known.epoch, known.position, known.granted) == (again, None, None)
    assert again > epoch


def test_a_stale_owner_does_not_keep_a_key():
    log = at_level_2()
    epoch = log.claimed()
    (transition,) = log.append(forgetting(epoch), after=2 * H)
    assert (transition.reason, transition.detail) == ("held", {"remaining_ms": 1})
    (transition,) = log.append(forgetting(epoch), after=1)
    assert transition.effect == "forgotten"
    (transition,) = log.append(beat(epoch))
    assert transition.reason == "not_owner"


@pytest.mark.parametrize(
    ("key", "epoch", "reason"),
    [
        pytest.param(KEY, 1, "held", id="owned"),
        pytest.param(Key("g", "t", 1), 3, "cas", id="other-epoch"),
        pytest.param(Key("g", "t", 9), 9, "cas", id="unknown"),
        pytest.param(Key("g", "/planner", 1), 1, "wrong_partition", id="elsewhere"),
    ],
)
def test_keys_that_a_record_does_not_drop(key, epoch, reason):
    log = at_level_2()
    other = Key("g", "t", 1)
    assert log.claimed() == 1
    assert log.claimed("c2", key=other) == 2
    log.append(release(2, client="c2", key=other))
    (transition,) = log.append(forgetting(epoch, key=key))
    assert (transition.outcome, transition.reason) == ("refused", reason)
    assert log.state.keys.keys() == {KEY, other}


def test_a_locked_key_is_not_dropped():
    log = at_level_2()
    epoch = log.claimed()
    log.append(release(epoch))
    log.key().lock = LOCK
    (transition,) = log.append(forgetting(epoch))
    assert transition.reason == "locked"


def test_nothing_is_forgotten_before_a_config():
    transition = Log(configured=False).one(forgetting(0))
    assert (transition.outcome, transition.reason) == ("refused", "no_config")


def test_a_key_that_waited_to_be_forgotten_may_be_dropped_and_come_back():
    log = at_level_2(forget_ms=100)
    epoch = log.claimed()
    log.append(release(epoch))
    log.append(forgetting(epoch))
    epoch = log.claimed()
    log.append(release(epoch), after=50)
    log.append(b"", after=90)
    assert KEY in log.state.keys
    log.append(b"", after=20)
    assert log.state.keys == {}
    epoch = log.claimed()
    log.append(release(epoch))
    log.append(forgetting(epoch))
    log.append(b"", after=200)
    assert log.state.forgettable == []
    assert (log.state.awaiting, log.state.stale_count) == (set(), 0)


def test_keys_that_are_claimed_and_dropped_over_and_over_leave_nothing():
    log = at_level_2(forget_ms=100_000)
    other = KEY._replace(partition=1)
    log.append(release(log.claimed(key=other), key=other))
    for _ in range(21):
        epoch = log.claimed()
        log.append(release(epoch))
        log.append(forgetting(epoch))
        assert len(log.state.forgettable) <= 2
    assert log.state.stale_count == 1
    log.append(b"", after=100_001)
    assert (log.state.keys, log.state.forgettable) == ({}, [])
    assert (log.state.awaiting, log.state.stale_count) == (set(), 0)


def test_a_fenced_owner_is_granted_nothing_and_does_not_renew():
    log = Log(level=2)
    epoch = log.claimed()
    log.append(fence())
    assert log.outcome_of(messages(epoch, 0, 5)) == "sender_fenced"
    assert log.outcome_of(beat(epoch, 5), after=1) == "position_only"
    (transition,) = log.append(batch((epoch, 6)), after=1)
    assert transition.effect == "position_only"
    assert (log.key().renewed_ms, log.key().position) == (START_MS, 6)


# --- while the partition count changes (PROTOCOL 10)


def test_a_moving_key_is_drained():
    log, epoch, _ = source_log()
    place = {"generation": 2, "partition": 1}
    assert log.one(claim("c2", generation=2)).detail == place
    assert log.outcome_of(beat(epoch, 5)) == "position_only"
    assert log.one(batch((epoch, 6))).effect == "position_only"
    assert log.outcome_of(messages(epoch, 6, 9)) == "moving"
    assert log.outcome_of(release(epoch, 7)) == "released"
    assert log.key().position == 7


def test_a_final_key_stays_as_it_is():
    log, epoch, stays = source_log()
    log.append(beat(stays, key=STAYS), after=2 * H + 1)
    assert log.outcome_of(beat(epoch, 5)) == "not_owner"
    moved, stayed = log.append(batch((epoch, 5), (stays, 5)))
    assert (moved.reason, stayed.effect) == ("not_owner", "renewed")
    assert log.key().position is None


def test_silence_drops_nothing_while_the_count_changes():
    log, _, epoch = source_log(forget_ms=H)
    log.append(release(epoch, key=STAYS))
    log.append(b"", after=9 * H)
    assert STAYS in log.state.keys


def test_an_imported_key_has_no_epoch_until_it_is_claimed():
    log = target_log()
    log.append(layout_import(imported(position=5)))
    assert log.state.epochs == {}
    assert log.one(batch((0, 9))).reason == "not_owner"
    epoch = log.claimed("c2", generation=2)
    assert log.state.epochs == {epoch: KEY}
    assert log.key().position == 5


def test_an_imported_key_is_forgotten_like_another():
    log = target_log()
    log.append(layout_import())
    log.append(layout_done(1))
    log.append(layout_final())
    assert log.outcome_of(forgetting(0)) == "forgotten"
    assert log.state.keys == {}
