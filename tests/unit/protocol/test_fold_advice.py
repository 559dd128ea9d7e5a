"""Advice: Plans, offers of keys and directives (PROTOCOL 9.2, 9.4, 9.7).

tests/spec has the tests of clause 9.2; here are those of the Plans that readers keep.
"""

import pytest
from logkit import (
    INC,
    INC_AGAIN,
    KEY,
    MOVES,
    SECRET,
    START_MS,
    H,
    Log,
    beat,
    direct,
    fence,
    hashed,
    ident,
    member,
    offer,
    pause,
    planned,
    ready,
    target_log,
)

from kafka_marshal.protocol import fold_advice
from kafka_marshal.protocol.fold_advice import FOLDS
from kafka_marshal.protocol.items import Offer
from kafka_marshal.protocol.records import KINDS, SECOND_LEVEL
from kafka_marshal.protocol.snapshot import bytes_max, from_bytes, to_bytes
from kafka_marshal.protocol.state import DIRECTIVES_MAX
from kafka_marshal.protocol.types import Key

SOON = START_MS + 100


def a_log(**settings):
    return Log(level=SECOND_LEVEL, **settings)


def in_force(log, group="g"):
    found = log.state.groups.get(group)
    return () if found is None else found.directives


def test_all_records_of_this_module_belong_to_level_2():
    levels = {kind.record: kind.level for kind in KINDS}
    assert {levels[record] for record in FOLDS} == {SECOND_LEVEL}


def test_records_of_one_operation_change_and_end_its_directive():
    log = a_log()
    log.append(direct(until=SOON))
    assert log.outcome_of(direct(until=SOON + 7, seq=1)) == "directed"
    assert in_force(log)[0].until_ms == SOON + 7
    other = ident("again")
    assert log.outcome_of(direct(until=SOON, inc=other)) == "directed"
    assert in_force(log)[0].until_ms == SOON
    # The record that ends a directive may name another host.
    ends = direct(host="elsewhere", until=0, inc=other, seq=1)
    assert log.outcome_of(ends) == "directive_ended"
    assert not in_force(log)
    assert log.outcome_of(direct(until=0, inc=other, seq=2)) == "op_over"


def test_the_directives_of_a_group_are_limited():
    log = a_log()
    for number in range(DIRECTIVES_MAX):
        assert log.outcome_of(direct(op=bytes(15) + bytes([number]))) == "directed"
    assert log.outcome_of(direct(op=b"\xff" * 16)) == "limits"
    assert log.outcome_of(direct(op=bytes(16), seq=1)) == "directed"
    assert log.outcome_of(direct(op=b"\xff" * 16, group="h")) == "directed"


def test_a_group_is_dropped_with_its_last_remembered_operation():
    log = a_log(operations=1)
    log.append(direct(until=SOON))
    log.append(direct(op=ident("b"), group="h", until=SOON), at=SOON)
    assert "g" in log.state.groups
    log.append(direct(op=ident("c"), group="h", until=SOON + 9))
    log.append(member("c9"), at=SOON + 9)
    assert "g" not in log.state.groups, "the younger operation took its place"


def test_the_largest_directives_fit_into_the_most_bytes_of_a_state():
    log = a_log(operations=8)
    for number in range(8):
        op = bytes([number]) * 16
        host = "\U0001f431" * 255
        assert (
            log.outcome_of(direct(host=host, op=op, admin="a" * 200, inc=INC))
            == "directed"
        )
    row = (len(to_bytes(log.state)) - len(to_bytes(a_log(operations=8).state))) / 8
    config = log.state.config
    assert row < bytes_max(config) / config.limit("operations")
    assert row < 1_400


# --- offers

C2 = ident("c2")


def held(**settings):
    """Return a log in which c1 holds a key, and that key's epoch."""
    log = Log(level=SECOND_LEVEL, **settings)
    return log, log.claimed(resume_hash=hashed(SECRET))


def offered(**options):
    log, epoch = held()
    assert log.outcome_of(offer(epoch, **options)) == "offered"
    return log, epoch


def test_an_offer_changes_only_the_offer_and_the_last_activity():
    log, epoch = held()
    log.append(beat(epoch, 5))
    before = log.key().renewed_ms
    transition = log.one(offer(epoch, within_ms=700), after=10)
    assert (transition.outcome, transition.effect) == ("accepted", "offered")
    assert (transition.key, transition.epoch, transition.detail) == (KEY, epoch, None)
    known = log.key()
    until_ms = START_MS + 10 + 700
    assert known.offer == Offer("c2", until_ms, transition.offset, None)
    assert (known.renewed_ms, known.position) == (before, 5)
    assert known.active_ms == START_MS + 10


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"client": "c3"}, "not_owner"),
        ({"inc": INC_AGAIN}, "not_owner"),
        ({"key": Key("g", "t", 1)}, "not_owner"),
        ({"epoch": 0}, "old_epoch"),
    ],
)
def test_an_offer_not_by_the_owner_is_ignored(wrong, reason):
    log, epoch = held()
    transition = log.one(offer(**({"epoch": epoch} | wrong)))
    assert (transition.outcome, transition.reason) == ("ignored", reason)
    assert log.key().offer is None


def test_an_offer_is_refused_in_a_pause_and_from_a_fenced_owner():
    log, epoch = held()
    log.append(pause(START_MS + 9 * H))
    assert log.outcome_of(offer(epoch)) == "paused"
    log.append(fence())
    assert log.outcome_of(offer(epoch)) == "sender_fenced"
    assert log.key().offer is None


def test_a_ready_notes_the_incarnation_of_the_successor_and_renews_nothing():
    log, epoch = offered()
    transition = log.one(ready(epoch), after=3)
    assert (transition.outcome, transition.effect) == ("accepted", "ready")
    known = log.key()
    assert known.offer.ready == C2
    assert (known.owner.client_id, known.epoch) == ("c1", epoch)
    assert (known.renewed_ms, known.active_ms) == (START_MS, START_MS + 3)
    assert log.outcome_of(ready(epoch, inc=INC_AGAIN)) == "ready"
    assert log.key().offer.ready == INC_AGAIN


def test_a_ready_without_an_offer_is_refused():
    log, epoch = held()
    assert log.outcome_of(ready(epoch)) == "no_offer"


def test_a_withdrawn_offer_leaves_the_key_as_it_was_before():
    log, epoch = held()
    before = to_bytes(log.state)
    log.append(offer(epoch))
    log.append(offer(epoch, None))
    back = from_bytes(before)
    assert back.keys == log.state.keys


# --- Plans


def noted(log, group="g"):
    note = log.state.soft.plans.get(group)
    return note and [record.number for record in note.records]


def test_a_plan_of_one_slice_is_whole():
    log = Log(level=2)
    assert log.outcome_of(planned(0, ("c2", 0, (1,)))) == "planned"
    note = log.state.soft.plans["g"]
    assert (note.is_whole, note.generation, note.offset) == (True, 1, 1)
    assert note.log_time_ms == log.now_ms


def test_a_slice_that_does_not_follow_the_last_one_discards_the_plan():
    for other in (
        planned(1, count=2, number=0, client="c2"),
        planned(1, count=3, number=1),
        planned(1, count=2, number=1, client="c2"),
        planned(1, count=2, number=1, digest=ident("other")),
        planned(1, count=2, number=1, vector=((1, 0),)),
        planned(1, count=2, number=1, version=2),
        planned(1, count=3, number=2),
    ):
        log = Log(level=2)
        log.append(planned(0, count=2))
        assert log.outcome_of(other) == "planned"
        assert noted(log) == (None if other.number else [0])


def test_a_slice_without_the_slices_before_it_gives_no_plan():
    log = Log(level=2)
    assert log.outcome_of(planned(0, count=2, number=1)) == "planned"
    assert noted(log) is None


def test_slices_with_impossible_counts_or_numbers_give_no_plan():
    log = Log(level=2)
    assert log.outcome_of(planned(0, count=9)) == "planned"
    assert log.outcome_of(planned(1)) == "planned"
    assert log.outcome_of(planned(2, count=1, number=1)) == "planned"
    assert noted(log) is None
    assert log.state.plan_generation("g") == 3


def test_the_slices_kept_of_all_groups_are_limited(monkeypatch):
    monkeypatch.setattr(fold_advice, "PLAN_RECORDS_MAX", 2)
    log = Log(level=2)
    for group in ("a", "b", "c"):
        log.append(planned(group=group))
    assert list(log.state.soft.plans) == ["b", "c"]
    log.append(planned(1, group="b", count=2))
    log.append(planned(2, group="b", count=2, number=1))
    assert list(log.state.soft.plans) == ["b"]


def test_a_plan_is_refused_while_its_new_home_is_importing():
    assert target_log().outcome_of(planned(group=MOVES)) == "importing"
