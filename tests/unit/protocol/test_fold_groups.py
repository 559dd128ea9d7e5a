import logkit
import pytest
from logkit import (
    MOVES,
    OP,
    START_MS,
    H,
    Log,
    config,
    direct,
    fence,
    ident,
    member,
    pause,
    schedule,
    settings,
    source_log,
    target_log,
)

from kafka_marshal.protocol.fold_groups import (
    FOLDS,
    GONE_MEMBERS_PER_ENTRY_MAX,
    OPS_REMEMBERED_MAX,
    end_operation,
)
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.records import KINDS
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.types import Key

UNTIL = START_MS + 5_000


@pytest.fixture
def log():
    return Log()


def ops(log, group="g"):
    return [op_id for _, op_id in log.state.groups[group].over]


def test_this_module_folds_all_records_about_groups():
    assert {kind.number for kind in KINDS if kind.record in FOLDS} == {
        5,
        10,
        13,
        23,
        128,
    }


# --- Pauses ---


def test_a_pause_without_config_is_refused():
    log = Log(configured=False)
    transition = log.one(pause(UNTIL))
    assert (transition.outcome, transition.reason) == ("refused", "no_config")
    assert log.state.groups == {}


def test_sixty_four_operations_of_a_group_are_remembered(log):
    for number in range(OPS_REMEMBERED_MAX + 1):
        op = ident(str(number))
        log.append(pause(UNTIL, op=op))
        log.append(pause(0, op=op, seq=1))
    assert OPS_REMEMBERED_MAX == 64
    assert ops(log) == [ident(str(number)) for number in range(1, 65)]
    assert len(log.state.over) == 64
    assert log.outcome_of(pause(UNTIL, op=ident("1"))) == "op_over"
    assert log.outcome_of(pause(UNTIL, op=ident("0"))) == "paused"


def test_the_remembered_operations_of_all_groups_are_limited():
    log = Log(operations=2)
    log.claimed(key=Key("b", "t", 0))
    for group in "abc":
        log.append(pause(UNTIL, group=group))
        log.append(pause(0, group=group, seq=1))
    # "a" has nothing left, "b" still has its key.
    assert set(log.state.groups) == {"b", "c"}
    log.append(pause(UNTIL, group="d"))
    log.append(pause(0, group="d", seq=1))
    assert {name: ops(log, name) for name in log.state.groups} == {
        "b": [],
        "c": [OP],
        "d": [OP],
    }


# --- Scheduled pauses ---

BEGIN, AFTER = START_MS + 100, START_MS + 300
ONE, TWO, THREE = ident("one"), ident("two"), ident("three")


@pytest.fixture
def planned():
    log = Log(level=2)
    assert log.outcome_of(schedule(BEGIN, AFTER, op=ONE, seq=3)) == "scheduled"
    return log


def test_a_repeated_schedule_changes_nothing_and_another_time_is_busy(planned):
    before = planned.state.groups["g"].scheduled
    assert planned.outcome_of(schedule(BEGIN, AFTER, op=ONE, seq=9)) == "scheduled"
    assert planned.outcome_of(schedule(BEGIN, AFTER + 1, op=ONE)) == "busy"
    assert planned.outcome_of(schedule(BEGIN + 1, AFTER, op=ONE)) == "busy"
    assert planned.state.groups["g"].scheduled == before
    planned.append(b"", at=BEGIN)
    assert planned.outcome_of(schedule(BEGIN + 1, AFTER, op=ONE)) == "busy"
    assert planned.outcome_of(schedule(BEGIN, AFTER, op=ONE, seq=3)) == "old_seq"


def test_the_earliest_of_several_scheduled_pauses_begins_first(planned):
    assert planned.outcome_of(schedule(BEGIN - 50, BEGIN + 50, op=TWO)) == "scheduled"
    assert planned.outcome_of(schedule(BEGIN - 10, BEGIN, op=THREE)) == "scheduled"
    for at, op in ((BEGIN - 50, TWO), (BEGIN, TWO), (BEGIN + 50, ONE)):
        planned.append(b"", at=at)
        assert planned.state.active_pause("g").op_id == op
    # THREE was over before it could begin.
    assert ops(planned) == [TWO, THREE]


# --- Pauses with a scope (PROTOCOL 4.15) ---

T_0, T_ALL = {"t": (0,)}, {"t": ()}


def lasting(log):
    return [(each.op_id, each.until_ms) for each in log.state.groups["g"].pauses]


def scoped_ops(log):
    return sorted(op_id for _, op_id in log.state.scopes)


@pytest.fixture
def scoped():
    log = Log(level=2)
    assert log.outcome_of(schedule(0, BEGIN, op=TWO, scope=T_0)) == "paused"
    assert log.outcome_of(schedule(0, AFTER, op=ONE, scope=T_ALL)) == "paused"
    return log


def test_a_renewal_replaces_only_the_pause_of_its_operation(scoped):
    renewal = schedule(0, BEGIN + 5, op=TWO, seq=1, scope=T_0)
    assert scoped.outcome_of(renewal) == "paused"
    assert lasting(scoped) == [(ONE, AFTER), (TWO, BEGIN + 5)]
    assert scoped.outcome_of(pause(0, op=TWO, seq=2)) == "unpaused"
    assert (lasting(scoped), scoped_ops(scoped)) == ([(ONE, AFTER)], [ONE])


def test_a_scheduled_pause_with_a_scope_begins_beside_other_pauses(scoped):
    later = schedule(BEGIN - 5, AFTER, op=THREE, scope=T_0)
    assert scoped.outcome_of(later) == "scheduled"
    assert scoped_ops(scoped) == [ONE, THREE, TWO]
    scoped.append(pause(AFTER))
    scoped.append(b"", at=BEGIN - 5)
    assert [op for op, _ in lasting(scoped)] == [OP, ONE, THREE, TWO]
    assert scoped.state.groups["g"].scheduled == ()


# --- Config ---

LATEST = START_MS // 1_000 + 24 * 3_600


@pytest.mark.parametrize(
    ("change", "accepted"),
    [
        pytest.param({}, True, id="the next generation"),
        pytest.param({"h": 7, "span": 9}, True, id="other settings"),
        pytest.param({"era": 9}, True, id="a much higher era"),
        pytest.param({"generation": 1}, False, id="the same generation"),
        pytest.param({"generation": 3}, False, id="a generation too far"),
        pytest.param({"cluster_id": "other"}, False, id="another cluster"),
        pytest.param({"format_id": ident("other")}, False, id="another format"),
        pytest.param({"k": 2}, False, id="another K"),
        pytest.param({"era": 1}, False, id="the same era"),
        pytest.param({"era": 0}, False, id="a lower era"),
        pytest.param({"level": 3, "era": 1}, False, id="refused before its level"),
        pytest.param({"era": LATEST}, True, id="an era a day ahead"),
        pytest.param({"era": LATEST + 1}, False, id="an era further ahead"),
        pytest.param({"era": LATEST + 1, "level": 3}, False, id="ahead, and above us"),
    ],
)
def test_a_config_that_does_not_follow_the_one_in_force_is_refused(
    log, change, accepted
):
    record = config(**{"generation": 2, "era": 2} | change)
    transition = log.one(record)
    if accepted:
        assert (transition.outcome, transition.effect) == ("accepted", "configured")
        assert log.state.config == record
    else:
        assert (transition.outcome, transition.reason) == ("refused", "config")
        assert log.state.config == config()
    assert log.state.halted is None


def test_partitions_other_than_0_accept_any_higher_generation():
    log = Log(partition=1, k=2)
    assert log.outcome_of(config(4, k=2, era=2)) == "configured"
    for generation in (3, 4):
        assert log.outcome_of(config(generation, k=2, era=3)) == "config"


def test_a_first_config_above_the_known_level_halts_the_partition():
    log = Log(configured=False)
    assert log.outcome_of(config(level=3)) == "halted"
    assert log.state.config is None


# --- Members ---


def members(log):
    return {
        (name[1], one.since_offset, one.offset)
        for name, one in log.state.soft.members.items()
    }


def test_a_member_is_kept_by_incarnation_with_its_last_announcement(log):
    transition = log.one(member())
    assert (transition.outcome, transition.effect) == ("accepted", "member")
    assert members(log) == {("c1", 1, 1)}
    log.append(member(seq=1))
    assert members(log) == {("c1", 1, 2)}
    for seq in (0, 1):
        transition = log.one(member(seq=seq))
        assert (transition.outcome, transition.reason) == ("ignored", "old_seq")
    log.append(member(inc=ident("another life")))
    assert members(log) == {("c1", 1, 2), ("c1", 5, 5)}


def test_a_member_without_config_is_ignored():
    log = Log(configured=False)
    assert log.one(member()).reason == "no_config"
    assert members(log) == set()


def test_a_member_is_accepted_only_at_the_home_of_its_group():
    home = home_partition("g", partition_count=2)
    for place, expected in ((home, "member"), (1 - home, "wrong_partition")):
        assert Log(place, k=2).outcome_of(member()) == expected


def test_members_are_limited():
    log = Log(keys=2)
    log.append(member("c1"))
    log.append(member("c2"))
    transition = log.one(member("c3"))
    assert (transition.outcome, transition.reason) == ("refused", "limits")
    assert log.outcome_of(member("c1", seq=1)) == "member"


def test_each_announcement_drops_up_to_eight_gone_members(log):
    for number in range(GONE_MEMBERS_PER_ENTRY_MAX + 1):
        log.append(member(f"c{number}"))
    log.append(member("late"), after=2 * H)
    assert len(members(log)) == 10
    log.append(member("later"), after=1)
    assert {name for name, *_ in members(log)} == {"c8", "late", "later"}
    log.append(member("later", seq=1))
    assert {name for name, *_ in members(log)} == {"late", "later"}


def test_an_announcement_keeps_a_member(log):
    log.append(member("c1"))
    log.append(member("c2"))
    log.append(member("c1", seq=1), after=H)
    log.append(member("c3"), after=H + 1)
    assert {name for name, *_ in members(log)} == {"c1", "c3"}


def test_ending_another_operation_leaves_the_pause_in_force():
    log = Log()
    log.append(pause(START_MS + H))
    end_operation(log.state, "g", op_id=ident("other"), offset=7)
    assert log.state.active_pause("g").op_id == OP
    assert log.state.groups["g"].over == ((7, ident("other")),)


def test_a_fenced_client_cannot_announce_itself():
    log = Log(level=2)
    log.append(fence())
    transition = log.one(member())
    assert (transition.outcome, transition.reason) == ("refused", "sender_fenced")
    assert log.outcome_of(member("c2")) == "member"
    assert list(log.state.soft.members) == [("g", "c2", ident("c2"))]


def test_a_directive_ends_at_its_time_and_is_remembered():
    log = Log(level=2)
    log.append(direct(until=UNTIL))
    log.append(direct(op=ident("longer"), until=UNTIL + 1))
    log.append(member(), at=UNTIL)
    group = log.state.groups["g"]
    assert [each.op_id for each in group.directives] == [ident("longer")]
    assert [op for _, op in group.over] == [OP]
    assert list(log.state.directed) == [("g", ident("longer"))]


# --- Settings ---


def test_settings_are_refused_while_their_new_home_is_importing():
    assert target_log().outcome_of(settings(group=MOVES)) == "importing"


def test_a_group_with_nothing_but_an_old_plan_is_dropped():
    log = Log(level=2, forget_ms=100)
    log.append(logkit.planned())
    log.append(logkit.planned(group="h"))
    log.append(settings(group="h"))
    log.append(logkit.planned(group="i"), after=50)
    log.append(b"", after=51)
    assert sorted(log.state.groups) == ["h", "i"]
    assert sorted(log.state.soft.plans) == ["h", "i"]
    assert log.state.plans_ms == log.now_ms - 51
    before = digest(log.state)
    assert digest(from_bytes(to_bytes(log.state))) == before
    log.append(b"", after=50)
    assert sorted(log.state.groups) == ["h"]
    assert log.state.plans_ms is None


def test_a_group_that_loses_its_last_fence_keeps_its_plan():
    log = Log(level=2, operations=1, forget_ms=10**9)
    log.append(fence())
    log.append(logkit.planned())
    log.append(fence("c2", group="h"))
    # The fence of the first group is forgotten, its plan is not.
    assert log.state.groups["g"].fences == ()
    assert log.state.plan_generation("g") == 1


def test_partition_0_refuses_a_config_while_the_partition_count_changes():
    log, *_ = source_log()
    assert log.outcome_of(config(3, era=3, k=2, level=2)) == "busy"
    log = target_log()
    assert log.outcome_of(config(3, era=3, k=2, level=2)) == "configured"
