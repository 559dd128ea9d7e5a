"""Fences of one coordinating partition (PROTOCOL 4.13)."""

from logkit import (
    INC,
    SECRET,
    Log,
    claim,
    fence,
    hashed,
    resets,
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


def test_all_records_of_this_module_belong_to_level_2():
    levels = {kind.record: kind.level for kind in KINDS}
    assert {levels[record] for record in FOLDS} == {SECOND_LEVEL}


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


def test_a_fence_in_a_retired_partition_is_refused():
    assert Log(1, level=2).outcome_of(fence()) == "retired"
