"""What members remember of Plans; clause 9.2 has its tests in tests/spec."""

from logkit import MOVES, Log, ident, planned, target_log

from kafka_marshal.protocol import fold_plans
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.state import WorldState


def noted(log, group="g"):
    note = log.state.soft.plans.get(group)
    return note and [record.number for record in note.records]


def test_a_plan_of_one_slice_is_whole():
    log = Log(level=2)
    assert log.outcome_of(planned(0, ("c2", 0, (1,)))) == "planned"
    note = log.state.soft.plans["g"]
    assert (note.is_whole, note.generation, note.offset) == (True, 1, 1)
    assert note.log_time_ms == log.now_ms


def test_slices_follow_each_other():
    log = Log(level=2)
    log.append(planned(0, count=2))
    assert not log.state.soft.plans["g"].is_whole
    log.append(planned(1, count=2, number=1))
    assert log.state.soft.plans["g"].is_whole
    assert noted(log) == [0, 1]


def test_a_slice_that_does_not_follow_leaves_no_plan():
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


def test_a_slice_without_those_before_it_is_no_plan():
    log = Log(level=2)
    assert log.outcome_of(planned(0, count=2, number=1)) == "planned"
    assert noted(log) is None


def test_impossible_slices_are_no_plan():
    log = Log(level=2)
    assert log.outcome_of(planned(0, count=9)) == "planned"
    assert log.outcome_of(planned(1)) == "planned"
    assert log.outcome_of(planned(2, count=1, number=1)) == "planned"
    assert noted(log) is None
    assert log.state.plan_generation("g") == 3


def test_the_records_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr(fold_plans, "PLAN_RECORDS_MAX", 2)
    log = Log(level=2)
    for group in ("a", "b", "c"):
        log.append(planned(group=group))
    assert list(log.state.soft.plans) == ["b", "c"]
    log.append(planned(1, group="b", count=2))
    log.append(planned(2, group="b", count=2, number=1))
    assert list(log.state.soft.plans) == ["b"]


def test_a_plan_of_another_home_is_refused():
    log = Log(level=2, k=8)
    away = next(name for name in "abcdefgh" if home_partition(name, partition_count=8))
    assert log.outcome_of(planned(group=away)) == "wrong_partition"
    assert log.state.soft.plans == {}


def test_a_group_without_plans_has_generation_0():
    assert WorldState(0).plan_generation("g") == 0
    log = Log(level=2)
    log.claimed()
    assert log.state.plan_generation("g") == 0


def test_what_does_not_follow_or_has_no_room_is_refused():
    log = Log(level=2, groups=1)
    assert log.outcome_of(planned(1)) == "plan_overtaken"
    assert log.outcome_of(planned(0)) == "planned"
    assert log.outcome_of(planned(0, group="h")) == "limits"


def test_a_plan_is_refused_while_settings_may_be_elsewhere():
    assert target_log().outcome_of(planned(group=MOVES)) == "importing"
