from sys import getrefcount

import pytest
from logkit import (
    INC_AGAIN,
    KEY,
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
    messages,
    pause,
    release,
    resume,
    source_log,
)

from kafka_marshal.protocol import judging
from kafka_marshal.protocol.fold_keys import FOLDS
from kafka_marshal.protocol.records import KINDS
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


def test_this_module_folds_all_records_about_keys():
    assert {kind.number for kind in KINDS if kind.record in FOLDS} == {
        1,
        2,
        3,
        4,
        6,
        18,
    }


# --- Claims ---


def test_a_claim_without_a_config_is_refused_before_any_other_check():
    log = Log(configured=False)
    transition = log.one(claim(generation=9))
    assert (transition.outcome, transition.reason) == ("refused", "no_config")
    assert (transition.key, transition.epoch) == (KEY, None)
    assert log.outcome_of(resume(0)) == "no_config"
    assert log.state.keys == {}


@pytest.mark.parametrize("write", [beat, lambda epoch: batch((epoch, None))])
def test_a_beat_under_a_lower_interval_ends_no_lease_earlier(owned, write):
    owned.append(config(2, era=2, h=10))
    known = owned.key()
    assert owned.append(write(1), after=1)[0].effect == "renewed"
    assert (known.renewed_ms, known.heartbeat_interval_ms) == (START_MS, H)
    assert known.active_ms == START_MS + 1
    assert owned.append(write(1), after=2 * H - 21)[0].effect == "renewed"
    assert (known.renewed_ms, known.heartbeat_interval_ms) == (owned.now_ms, 10)


# --- Topic ids ---

FIRST, SECOND = ident("first"), ident("second")


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


# --- Heartbeats ---


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
def test_a_record_that_does_not_match_owner_and_epoch_is_ignored(
    owned, foreign, reason
):
    before = owned.key().renewed_ms, owned.key().active_ms
    transition = owned.one(foreign, after=1)
    assert (transition.outcome, transition.reason) == ("ignored", reason)
    assert (transition.key, transition.epoch) == (KEY, 1)
    known = owned.key()
    assert (known.position, known.granted) == (None, None)
    assert (known.renewed_ms, known.active_ms) == before


def test_a_beat_that_fails_the_fast_check_is_judged_in_full(owned, monkeypatch):
    # The fast check only accepts; ``mismatch`` decides about all other beats.
    monkeypatch.setattr(judging, "mismatch", lambda state, record, *, key: None)
    transition = owned.one(beat(99, 5, client="c2"))
    assert (transition.effect, transition.key, transition.epoch) == ("renewed", KEY, 1)


def test_equal_names_of_several_keys_share_one_string(owned):
    other = KEY._replace(partition=1)
    owned.claimed(key=other)
    (first, one), (second, another) = owned.state.keys.items()
    assert first.group_id is second.group_id
    assert first.topic is second.topic
    assert one.owner.client_id is another.owner.client_id
    assert list(owned.state.epochs.values()) == [first, second]


def test_the_names_that_a_log_has_are_freed(log):
    """Python 3.12 frees no text that ``sys.intern`` returned."""
    key, client = Key("a-group", "a-topic", 0), "a-client"
    log.claimed(client, key=key)
    log.append(batch((1, None), client=client, group=key.group_id))
    (known,) = log.state.keys
    for name in (known.group_id, known.topic, log.state.keys[known].owner.client_id):
        assert getrefcount(name) < 1_000


# --- Batches ---


def test_a_batch_counts_as_its_beats_in_order(log):
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


def test_a_beat_of_a_batch_with_a_replaced_epoch_names_no_key(owned):
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
def test_a_batch_with_too_many_beats_is_refused(count, expected):
    log = Log(beats=3)
    epoch = log.claimed()
    transitions = log.append(batch(*[(epoch, 1)] * count))
    assert [one.effect or one.reason for one in transitions] == expected
    assert all(one.outcome != "ignored" for one in transitions)


def test_without_a_config_records_of_owners_are_ignored():
    log = Log(configured=False)
    refusals = [(one.reason, one.key) for one in log.append(batch((0, 1), (1, 1)))]
    assert refusals == [("not_owner", None)] * 2
    for record in (beat(0), release(0), messages(0, 0, 0)):
        transition = log.one(record)
        assert (transition.reason, transition.key) == ("not_owner", KEY)


# --- Releases ---


def test_a_successor_may_claim_at_once(owned):
    owned.append(release(1, successor="c2"))
    assert owned.outcome_of(claim("c2")) == "claimed"


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
def test_a_grant_starts_at_the_larger_of_position_and_granted(
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
def test_a_claim_of_messages_gets_the_first_reason_that_applies(last, paused, expected):
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


def test_no_offset_is_granted_twice(owned):
    assert owned.one(messages(1, 0, 9)).detail == {"first": 0, "last": 9}
    assert owned.outcome_of(messages(1, 0, 9)) == "nothing_left"
    assert owned.one(messages(1, 0, 10)).detail == {"first": 10, "last": 10}
    owned.append(beat(1, 3, rewind=True))
    assert owned.one(messages(1, 3, 12)).detail == {"first": 11, "last": 12}


# --- Forgetting ---


def silent(count, **settings):
    """Return a log with that many released keys, each a millisecond after the last."""
    log = Log(forget_ms=100, **settings)
    for key in keys(count):
        log.append(release(log.claimed(key=key), key=key), after=1)
    return log


def test_an_owned_key_is_kept_and_dropped_after_its_release():
    log = silent(1)
    epoch = log.claimed()
    log.append(b"", after=H)
    assert log.state.awaiting == set()
    log.append(release(epoch))
    log.append(b"", after=101)
    assert log.state.keys == {}


def test_a_later_release_delays_the_drop_of_a_key():
    log = silent(1)
    log.append(release(log.claimed(), 5), after=60)
    log.append(b"", after=60)
    assert KEY in log.state.keys
    log.append(b"", after=41)
    assert log.state.keys == {}


def test_a_key_that_the_entry_names_is_not_among_the_eight_dropped():
    log = silent(10)
    log.append(beat(0, key=Key("g", "t", 2)), after=H)
    assert sorted(log.state.keys) == [Key("g", "t", 2), Key("g", "t", 9)]


def test_dropped_keys_leave_nothing_in_the_state():
    log = Log(forget_ms=0)
    for number in range(50):
        key = Key("g", "t", number)
        log.append(release(log.claimed(key=key), key=key), after=1)
        log.append(b"", after=1)
    assert (log.state.keys, log.state.dirty) == ({}, {})


def test_repeated_releases_of_a_key_do_not_grow_the_state(owned):
    epoch = 1
    for _ in range(50):
        owned.append(release(epoch), after=1)
        epoch = owned.claimed()
    assert len(owned.state.forgettable) == 1


# --- a record that drops a key (4.9)


def at_level_2(**settings):
    return Log(level=2, **settings)


def test_a_forgetting_record_drops_the_key_of_a_stale_owner():
    log = at_level_2()
    epoch = log.claimed()
    (transition,) = log.append(forgetting(epoch), after=2 * H)
    assert (transition.reason, transition.detail) == ("held", {"remaining_ms": 1})
    (transition,) = log.append(forgetting(epoch), after=1)
    assert transition.effect == "forgotten"
    (transition,) = log.append(beat(epoch))
    assert transition.reason == "not_owner"


def test_keys_claimed_and_dropped_repeatedly_leave_nothing():
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


def test_beats_of_a_final_key_are_ignored():
    log, epoch, stays = source_log()
    log.append(beat(stays, key=STAYS), after=2 * H + 1)
    assert log.outcome_of(beat(epoch, 5)) == "not_owner"
    moved, stayed = log.append(batch((epoch, 5), (stays, 5)))
    assert (moved.reason, stayed.effect) == ("not_owner", "renewed")
    assert log.key().position is None


def test_no_silent_key_is_dropped_while_the_partition_count_changes():
    log, _, epoch = source_log(forget_ms=H)
    log.append(release(epoch, key=STAYS))
    log.append(b"", after=9 * H)
    assert STAYS in log.state.keys
