"""Fences of one coordinating partition (PROTOCOL 4.13)."""

import pytest
from logkit import (
    INC,
    INC_AGAIN,
    SECRET,
    START_MS,
    H,
    Log,
    batch,
    beat,
    claim,
    config,
    fence,
    hashed,
    ident,
    member,
    messages,
    pause,
    release,
    resets,
    resume,
)

from kafka_marshal.protocol.fold_fences import FOLDS
from kafka_marshal.protocol.items import Fence
from kafka_marshal.protocol.records import KINDS, SECOND_LEVEL
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import FENCES_MAX
from kafka_marshal.protocol.types import Key

SECOND = Key("g", "t", 1)


def held(**settings):
    """Return a log in which c1 holds a key, and that key's epoch."""
    log = Log(level=SECOND_LEVEL, **settings)
    return log, log.claimed(resume_hash=hashed(SECRET))


def fenced(**settings):
    log, epoch = held(**settings)
    assert log.outcome_of(fence()) == "fenced"
    return log, epoch


def test_all_kinds_of_the_module_have_its_level():
    levels = {kind.record: kind.level for kind in KINDS}
    assert {levels[record] for record in FOLDS} == {SECOND_LEVEL}


def test_a_fence_is_remembered_and_changes_no_key():
    log, _ = held()
    before = from_bytes(to_bytes(log.state)).keys
    transition = log.one(fence())
    assert (transition.outcome, transition.effect) == ("accepted", "fenced")
    assert (transition.key, transition.detail) == (None, None)
    assert log.state.groups["g"].fences == (Fence(2, "c1", INC),)
    assert log.state.keys == before


def test_below_the_level_a_fence_is_ignored():
    log = Log(level=1)
    epoch = log.claimed()
    assert log.outcome_of(fence()) == "level"
    assert log.outcome_of(beat(epoch)) == "renewed"


def test_a_beat_of_a_fenced_client_moves_the_position_and_does_not_renew():
    log, epoch = fenced()
    assert log.outcome_of(beat(epoch, 5), after=H) == "position_only"
    assert log.key().position == 5
    assert log.key().renewed_ms == START_MS
    (transition,) = log.append(batch((epoch, 7)), after=1)
    assert transition.effect == "position_only"
    assert log.key().position == 7
    assert log.key().renewed_ms == START_MS
    assert log.state.soft.counters["position_only"] == 2


def test_a_batch_of_another_client_still_renews():
    log, _ = fenced()
    epoch = log.claimed("c2", key=SECOND)
    (transition,) = log.append(batch((epoch, None), client="c2"), after=1)
    assert transition.effect == "renewed"
    assert log.key(SECOND).renewed_ms == START_MS + 1


def test_its_key_is_stale_2h_after_the_last_renewal():
    log, epoch = fenced()
    log.append(beat(epoch), after=2 * H)
    assert log.outcome_of(claim("c2")) == "held"
    assert log.outcome_of(claim("c2"), after=1) == "claimed"


def test_its_release_counts():
    log, epoch = fenced()
    assert log.outcome_of(release(epoch, 9)) == "released"
    assert log.outcome_of(claim("c2")) == "claimed"
    assert log.key().position == 9


def test_it_cannot_claim():
    log, _ = fenced()
    transition = log.one(claim(key=SECOND))
    assert (transition.outcome, transition.reason) == ("refused", "sender_fenced")
    assert SECOND not in log.state.keys


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda log: log.append(pause(START_MS + 9 * H)), id="paused"),
        pytest.param(lambda log: log.append(config(2, era=2, keys=1)), id="full"),
    ],
)
def test_a_fence_is_judged_before_limits_and_pauses(change):
    log, _ = fenced()
    change(log)
    generation = log.state.config.generation
    assert log.outcome_of(claim(key=SECOND, generation=generation)) == "sender_fenced"


def test_it_cannot_resume_an_earlier_process():
    log, epoch = held()
    log.append(fence(inc=INC_AGAIN))
    assert log.outcome_of(resume(epoch)) == "sender_fenced"


def test_a_new_process_resumes_a_fenced_one():
    log, epoch = fenced()
    assert log.outcome_of(resume(epoch), after=H - 1) == "resumed"
    epoch = log.state.next_offset - 1
    assert log.outcome_of(beat(epoch, inc=INC_AGAIN), after=1) == "renewed"


def test_it_is_granted_nothing():
    log, epoch = fenced()
    assert log.outcome_of(messages(epoch, 0, 9)) == "sender_fenced"
    assert log.key().granted is None


def test_it_cannot_announce_itself():
    log, _ = held()
    log.append(member())
    log.append(member("c2"))
    log.append(fence())
    assert list(log.state.soft.members) == [("g", "c2", ident("c2"))]
    transition = log.one(member(seq=1))
    assert (transition.outcome, transition.reason) == ("refused", "sender_fenced")
    assert list(log.state.soft.members) == [("g", "c2", ident("c2"))]


def test_it_is_fenced_in_its_group_alone():
    log, _ = fenced()
    assert log.outcome_of(claim(key=Key("h", "t", 0))) == "claimed"


def test_another_process_of_the_client_claims_as_usual():
    log, epoch = fenced()
    log.append(release(epoch))
    assert log.outcome_of(claim(inc=INC_AGAIN)) == "claimed"
    # A second fence of the first process does not reach it.
    assert log.outcome_of(fence()) == "fenced"
    epoch = log.key().epoch
    assert log.outcome_of(beat(epoch, inc=INC_AGAIN), after=1) == "renewed"


def test_a_second_fence_changes_nothing():
    log, _ = fenced()
    log.append(b"")
    fences = log.state.groups["g"].fences
    assert log.outcome_of(fence(admin="another")) == "fenced"
    assert log.state.groups["g"].fences == fences


def test_a_fence_keeps_its_group_without_keys():
    log = Log(level=SECOND_LEVEL, groups=1)
    assert log.outcome_of(fence()) == "fenced"
    assert log.state.groups["g"].key_count == 0
    assert log.outcome_of(fence(group="h")) == "limits"
    assert log.outcome_of(claim()) == "sender_fenced"


def test_a_group_remembers_its_last_fences():
    log = Log(level=SECOND_LEVEL)
    for number in range(FENCES_MAX + 1):
        log.append(fence(f"c{number}"))
    fences = log.state.groups["g"].fences
    assert [each.client_id for each in fences] == [
        f"c{number}" for number in range(1, FENCES_MAX + 1)
    ]
    assert len(log.state.fences) == FENCES_MAX
    assert log.outcome_of(claim("c0")) == "claimed"
    assert log.outcome_of(claim("c1", key=SECOND)) == "sender_fenced"


def test_a_partition_remembers_its_last_fences_over_all_groups():
    log = Log(level=SECOND_LEVEL, operations=2)
    for group in "abc":
        log.append(fence(group=group))
    # The group had nothing else, so it is gone with its fence.
    assert list(log.state.groups) == ["b", "c"]
    assert len(log.state.fences) == 2


def test_state_read_back_knows_its_fences():
    log, epoch = fenced()
    log.append(fence("c2", group="h"))
    back = from_bytes(to_bytes(log.state))
    assert back == log.state
    assert back.fences == log.state.fences
    assert digest(back) == digest(log.state)
    log.state = back
    assert log.outcome_of(beat(epoch), after=1) == "position_only"


def test_a_reset_takes_fences_back():
    log, _ = held()
    value, before = to_bytes(log.state), digest(log.state)
    log.append(fence())
    (record,) = resets(value, before, bytes_max=10_000)
    assert log.outcome_of(record) == "reset"
    assert log.state.fences == {}
    log.append(b"")
    assert log.outcome_of(claim(), after=2 * H + 1) == "claimed"


def test_a_reset_to_more_fences_than_the_limit_is_refused():
    log = Log(level=SECOND_LEVEL, operations=1)
    log.append(fence())
    value = to_bytes(log.state)
    other = from_bytes(value)
    extra = Fence(0, "c0", INC)
    other.groups["g"].fences = (extra, *other.groups["g"].fences)
    other.rebuild_derived()
    (record,) = resets(to_bytes(other), digest(other), bytes_max=10_000)
    assert log.outcome_of(record) == "limits"


def test_a_partition_that_is_not_in_use_fences_nobody():
    assert Log(1, level=2).outcome_of(fence()) == "retired"
