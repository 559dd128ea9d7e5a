import logkit
import pytest
from logkit import (
    CREATE_TIME,
    MOVES,
    OP,
    START_MS,
    H,
    Log,
    beat,
    claim,
    config,
    direct,
    fence,
    ident,
    member,
    pause,
    release,
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
from kafka_marshal.protocol.items import Halt
from kafka_marshal.protocol.records import KINDS
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import SCHEDULED_MAX
from kafka_marshal.protocol.types import Key

UNTIL = START_MS + 5_000
DAY_MS = 86_400_000


@pytest.fixture
def log():
    return Log()


def ops(log, group="g"):
    return [op_id for _, op_id in log.state.groups[group].over]


def test_every_record_about_groups_has_its_fold():
    assert {kind.number for kind in KINDS if kind.record in FOLDS} == {
        5,
        10,
        13,
        23,
        128,
    }


# --- Pauses ---


def test_a_pause_holds_a_group(log):
    transition = log.one(pause(UNTIL, seq=3))
    assert (transition.outcome, transition.effect) == ("accepted", "paused")
    assert (transition.key, transition.epoch) == (None, None)
    held = log.state.active_pause("g")
    assert (held.op_id, held.client_id, held.seq) == (OP, "admin", 3)
    assert (held.until_ms, held.incarnations) == (UNTIL, (ident("admin"),))
    assert log.outcome_of(claim()) == "paused"
    assert log.outcome_of(claim(key=Key("h", "t", 0))) == "claimed"


def test_a_pause_without_config_is_refused():
    log = Log(configured=False)
    transition = log.one(pause(UNTIL))
    assert (transition.outcome, transition.reason) == ("refused", "no_config")
    assert log.state.groups == {}


def test_a_refused_pause_leaves_no_group(log):
    transition = log.one(pause(START_MS))
    assert (transition.outcome, transition.reason) == ("refused", "expired")
    assert log.state.groups == {}


@pytest.mark.parametrize(
    ("asked", "until"),
    [
        pytest.param(START_MS + 1, START_MS + 1, id="shortest"),
        pytest.param(START_MS + DAY_MS, START_MS + DAY_MS, id="longest"),
        pytest.param(START_MS + DAY_MS + 1, START_MS + DAY_MS, id="cut"),
        pytest.param(2**63 - 1, START_MS + DAY_MS, id="for ever"),
    ],
)
def test_a_pause_is_bounded(log, asked, until):
    log.append(pause(asked))
    assert log.state.active_pause("g").until_ms == until


def test_the_bound_is_in_the_config():
    log = Log(max_pause_ms=10)
    log.append(pause(UNTIL))
    assert log.state.active_pause("g").until_ms == START_MS + 10


@pytest.mark.parametrize(
    ("after", "is_over"),
    [pytest.param(4_999, False, id="before"), pytest.param(5_000, True, id="at M")],
)
def test_a_pause_ends_by_itself_for_good(log, after, is_over):
    log.append(pause(UNTIL))
    log.append(b"", after=after)
    assert (log.state.active_pause("g") is None) is is_over
    assert ops(log) == [OP] * is_over
    expected = "op_over" if is_over else "paused"
    assert log.outcome_of(pause(UNTIL + 9, seq=1)) == expected


def test_a_pause_ends_before_the_record_of_that_moment_is_judged(log):
    log.append(pause(UNTIL))
    assert log.outcome_of(claim(), at=UNTIL) == "claimed"


def test_a_pause_ends_by_m_and_not_by_log_time(log):
    log.append(pause(UNTIL))
    # A new leader's clock is ahead: log time stands still, append time advances.
    assert log.outcome_of(claim(), at=UNTIL, epoch=1) == "claimed"
    assert log.state.now_ms == START_MS


def test_a_pause_is_renewed_and_shortened_by_its_op(log):
    log.append(pause(UNTIL))
    for seq, until in ((1, UNTIL + 100), (2, UNTIL - 100)):
        assert log.outcome_of(pause(until, seq=seq)) == "paused"
        assert log.state.active_pause("g").until_ms == until
    assert log.outcome_of(claim(), at=UNTIL - 100) == "claimed"


def test_another_admin_may_continue_the_operation(log):
    log.append(pause(UNTIL))
    assert log.outcome_of(pause(UNTIL, client="ops", seq=0)) == "paused"
    held = log.state.active_pause("g")
    assert (held.client_id, held.incarnation) == ("ops", ident("ops"))
    assert held.incarnations == (ident("admin"), ident("ops"))
    assert log.outcome_of(pause(UNTIL, seq=9)) == "old_seq"
    assert log.outcome_of(pause(UNTIL, client="ops", seq=1)) == "paused"


def test_sixteen_lives_of_an_op(log):
    for number in range(16):
        assert log.outcome_of(pause(UNTIL, inc=ident(str(number)))) == "paused"
    assert log.outcome_of(pause(UNTIL, inc=ident("16"))) == "limits"
    assert log.outcome_of(pause(0, inc=ident("15"), seq=1)) == "unpaused"


def test_a_second_operation_is_busy(log):
    log.append(pause(UNTIL))
    transition = log.one(pause(UNTIL, op=ident("other")))
    assert (transition.outcome, transition.reason) == ("refused", "busy")
    assert log.state.active_pause("g").op_id == OP


@pytest.mark.parametrize(
    "until", [pytest.param(0, id="long ago"), pytest.param(START_MS, id="at M")]
)
def test_an_admin_ends_a_pause(log, until):
    log.append(pause(UNTIL))
    transition = log.one(pause(until, seq=1))
    assert (transition.outcome, transition.effect) == ("accepted", "unpaused")
    assert log.state.active_pause("g") is None
    assert log.outcome_of(pause(UNTIL, seq=2)) == "op_over"
    assert log.outcome_of(pause(UNTIL, op=ident("other"))) == "paused"


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


def test_operations_of_all_groups_are_bounded():
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


def test_lapsed_pauses_count_among_the_remembered():
    log = Log(operations=1, groups=2)
    log.append(pause(UNTIL, group="b"))
    log.append(pause(UNTIL, group="a"))
    assert log.outcome_of(claim(key=Key("c", "t", 0))) == "limits"
    log.append(b"", at=UNTIL)
    # Equally late ones go by name.
    assert {name: ops(log, name) for name in log.state.groups} == {"b": [OP]}
    assert log.outcome_of(claim(key=Key("c", "t", 0))) == "claimed"


def test_a_lapse_and_an_end_in_one_entry_are_remembered_by_name():
    log = Log(operations=1)
    log.append(pause(UNTIL, group="z"))
    log.append(pause(UNTIL + H, group="a"))
    assert log.outcome_of(pause(0, group="a", seq=1), at=UNTIL) == "unpaused"
    assert set(log.state.groups) == {"z"}


def test_a_pause_that_was_ended_does_not_lapse_again(log):
    log.append(pause(UNTIL))
    log.append(pause(0, seq=1))
    log.append(pause(UNTIL + H, op=ident("other")))
    log.append(b"", at=UNTIL)
    assert ops(log) == [OP]
    assert log.state.active_pause("g").op_id == ident("other")
    assert log.state.lapses_ms == UNTIL + H


# --- Scheduled pauses ---

BEGIN, AFTER = START_MS + 100, START_MS + 300
ONE, TWO, THREE = ident("one"), ident("two"), ident("three")


@pytest.fixture
def planned():
    log = Log(level=2)
    assert log.outcome_of(schedule(BEGIN, AFTER, op=ONE, seq=3)) == "scheduled"
    return log


def test_a_scheduled_pause_begins_before_the_record_of_that_moment_is_judged(planned):
    assert planned.outcome_of(claim(), at=BEGIN - 1) == "claimed"
    assert planned.state.active_pause("g") is None
    assert planned.outcome_of(beat(2, 5), at=BEGIN) == "position_only"
    held = planned.state.active_pause("g")
    assert (held.op_id, held.client_id, held.incarnation) == (
        ONE,
        "admin",
        ident("admin"),
    )
    assert (held.seq, held.incarnations, held.until_ms) == (3, (ident("admin"),), AFTER)
    assert planned.state.groups["g"].scheduled == ()
    assert planned.outcome_of(beat(2, 6), at=AFTER) == "renewed"
    assert ops(planned) == [ONE]


def test_a_scheduled_pause_of_the_past_is_over_without_a_begin(planned):
    assert planned.outcome_of(claim(), at=AFTER) == "claimed"
    assert (planned.state.active_pause("g"), ops(planned)) == (None, [ONE])
    assert planned.outcome_of(schedule(AFTER + 9, AFTER + 10, op=ONE)) == "op_over"


def test_one_that_begins_now_is_a_pause_at_once():
    log = Log(level=2)
    assert log.outcome_of(schedule(START_MS, AFTER)) == "paused"
    assert log.outcome_of(schedule(START_MS, AFTER)) == "old_seq"
    assert log.outcome_of(schedule(START_MS, 0, seq=1)) == "unpaused"
    assert log.outcome_of(schedule(0, START_MS, op=TWO)) == "expired"


def test_a_repeat_changes_nothing_and_another_time_is_busy(planned):
    before = planned.state.groups["g"].scheduled
    assert planned.outcome_of(schedule(BEGIN, AFTER, op=ONE, seq=9)) == "scheduled"
    assert planned.outcome_of(schedule(BEGIN, AFTER + 1, op=ONE)) == "busy"
    assert planned.outcome_of(schedule(BEGIN + 1, AFTER, op=ONE)) == "busy"
    assert planned.state.groups["g"].scheduled == before
    planned.append(b"", at=BEGIN)
    assert planned.outcome_of(schedule(BEGIN + 1, AFTER, op=ONE)) == "busy"
    assert planned.outcome_of(schedule(BEGIN, AFTER, op=ONE, seq=3)) == "old_seq"


def test_any_admin_cancels_a_scheduled_pause_also_while_another_lasts(planned):
    planned.append(pause(AFTER, op=TWO))
    cancel = pause(0, op=ONE, client="other")
    assert planned.outcome_of(cancel) == "unpaused"
    assert planned.state.active_pause("g").op_id == TWO
    assert planned.outcome_of(cancel) == "op_over"
    assert planned.outcome_of(schedule(BEGIN, AFTER, op=ONE)) == "op_over"


def test_a_scheduled_pause_begins_at_once_by_a_release_group(planned):
    assert planned.outcome_of(pause(AFTER + 5, op=ONE)) == "paused"
    group = planned.state.groups["g"]
    assert (group.pause.until_ms, group.scheduled) == (AFTER + 5, ())


def test_one_that_is_due_waits_for_the_end_of_another_operation(planned):
    planned.append(pause(AFTER - 100, op=TWO))
    planned.append(b"", at=BEGIN + 5)
    assert planned.state.active_pause("g").op_id == TWO
    planned.append(b"", at=AFTER - 100)
    held = planned.state.active_pause("g")
    assert (held.op_id, held.until_ms) == (ONE, AFTER)
    assert ops(planned) == [TWO]


def test_one_that_is_due_begins_behind_the_record_that_ends_another(planned):
    planned.append(pause(AFTER, op=TWO))
    planned.append(b"", at=BEGIN + 5)
    assert planned.outcome_of(pause(0, op=TWO, seq=1)) == "unpaused"
    assert planned.state.active_pause("g") is None
    assert planned.outcome_of(claim()) == "paused"
    assert planned.state.active_pause("g").op_id == ONE


def test_the_earliest_of_several_begins_and_the_next_follows(planned):
    assert planned.outcome_of(schedule(BEGIN - 50, BEGIN + 50, op=TWO)) == "scheduled"
    assert planned.outcome_of(schedule(BEGIN - 10, BEGIN, op=THREE)) == "scheduled"
    for at, op in ((BEGIN - 50, TWO), (BEGIN, TWO), (BEGIN + 50, ONE)):
        planned.append(b"", at=at)
        assert planned.state.active_pause("g").op_id == op
    # The one between them was over before it could begin.
    assert ops(planned) == [TWO, THREE]


def test_a_group_has_so_many_scheduled_pauses_and_no_more():
    log = Log(level=2)
    for number in range(SCHEDULED_MAX):
        record = schedule(BEGIN, AFTER, op=ident(str(number)))
        assert log.outcome_of(record) == "scheduled"
    assert log.outcome_of(schedule(BEGIN, AFTER, op=ident("more"))) == "limits"
    assert log.outcome_of(schedule(BEGIN, AFTER, group="h")) == "scheduled"


def test_the_bound_of_a_scheduled_pause_counts_from_its_begin():
    log = Log(level=2, max_pause_ms=10)
    log.append(schedule(BEGIN, AFTER))
    (planned,) = log.state.groups["g"].scheduled
    assert planned.until_ms == BEGIN + 10


def test_a_scheduled_pause_keeps_its_group(planned):
    assert planned.state.groups["g"].key_count == 0
    planned.append(b"", at=BEGIN - 1)
    assert "g" in planned.state.groups


def test_pauses_are_of_level_2():
    log = Log()
    assert log.outcome_of(schedule(BEGIN, AFTER)) == "level"
    assert Log(configured=False).outcome_of(schedule(BEGIN, AFTER)) == "level"
    assert log.state.groups == {}


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


def test_several_last_beside_that_of_the_group(scoped):
    assert scoped.outcome_of(pause(AFTER)) == "paused"
    assert lasting(scoped) == [(OP, AFTER), (ONE, AFTER), (TWO, BEGIN)]
    assert scoped_ops(scoped) == [ONE, TWO]


def test_each_ends_by_itself_the_groups_own_first(scoped):
    scoped.append(pause(AFTER))
    scoped.append(b"", at=BEGIN)
    assert (lasting(scoped), ops(scoped)) == ([(OP, AFTER), (ONE, AFTER)], [TWO])
    scoped.append(schedule(AFTER - 2, AFTER - 1, op=THREE, scope=T_0))
    assert scoped_ops(scoped) == [ONE, THREE]
    scoped.append(b"", at=AFTER)
    assert (lasting(scoped), ops(scoped)) == ([], [TWO, OP, ONE, THREE])
    assert scoped_ops(scoped) == []


def test_a_renewal_replaces_its_own_pause_alone(scoped):
    renewal = schedule(0, BEGIN + 5, op=TWO, seq=1, scope=T_0)
    assert scoped.outcome_of(renewal) == "paused"
    assert lasting(scoped) == [(ONE, AFTER), (TWO, BEGIN + 5)]
    assert scoped.outcome_of(pause(0, op=TWO, seq=2)) == "unpaused"
    assert (lasting(scoped), scoped_ops(scoped)) == ([(ONE, AFTER)], [ONE])


def test_a_scheduled_one_counts_at_once_and_begins_beside_the_others(scoped):
    later = schedule(BEGIN - 5, AFTER, op=THREE, scope=T_0)
    assert scoped.outcome_of(later) == "scheduled"
    assert scoped_ops(scoped) == [ONE, THREE, TWO]
    scoped.append(pause(AFTER))
    scoped.append(b"", at=BEGIN - 5)
    assert [op for op, _ in lasting(scoped)] == [OP, ONE, THREE, TWO]
    assert scoped.state.groups["g"].scheduled == ()


def test_a_scheduled_one_that_is_cancelled_does_not_count(scoped):
    scoped.append(schedule(BEGIN, AFTER, op=THREE, scope=T_0))
    assert scoped.outcome_of(pause(0, op=THREE)) == "unpaused"
    assert (ops(scoped), scoped_ops(scoped)) == ([THREE], [ONE, TWO])


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
def test_which_configs_may_follow_a_config(log, change, accepted):
    record = config(**{"generation": 2, "era": 2} | change)
    transition = log.one(record)
    if accepted:
        assert (transition.outcome, transition.effect) == ("accepted", "configured")
        assert log.state.config == record
    else:
        assert (transition.outcome, transition.reason) == ("refused", "config")
        assert log.state.config == config()
    assert log.state.halted is None


def test_other_partitions_take_any_higher_generation():
    log = Log(partition=1, k=2)
    assert log.outcome_of(config(4, k=2, era=2)) == "configured"
    for generation in (3, 4):
        assert log.outcome_of(config(generation, k=2, era=3)) == "config"


def test_the_first_config_may_be_of_any_generation():
    log = Log(generation=5, era=0)
    assert log.state.config.generation == 5


@pytest.mark.parametrize(
    ("after", "expected"), [(999, "config"), (1_000, "configured")]
)
def test_the_first_era_may_be_a_day_ahead_of_its_own_entry(after, expected):
    log = Log(configured=False)
    assert log.outcome_of(config(era=LATEST + 1), after=after) == expected


def test_a_config_without_any_append_time_is_a_day_from_the_epoch_at_most():
    log = Log(configured=False)
    assert log.outcome_of(config(era=24 * 3_600 + 1), kind=CREATE_TIME) == "config"
    assert log.outcome_of(config(era=24 * 3_600), kind=CREATE_TIME) == "configured"


def test_a_config_beyond_us_halts(log):
    transition = log.one(config(2, era=2, level=3), after=5)
    assert (transition.outcome, transition.reason) == ("halted", "halted")
    assert log.state.halted == Halt(offset=1, feature_level=3)
    assert log.state.config == config()
    assert (log.state.next_offset, log.state.now_ms) == (1, START_MS + 5)


def test_the_first_config_may_halt():
    log = Log(configured=False)
    assert log.outcome_of(config(level=3)) == "halted"
    assert log.state.config is None


# --- Members ---


def members(log):
    return {
        (name[1], one.since_offset, one.offset)
        for name, one in log.state.soft.members.items()
    }


def test_a_member_announces_itself(log):
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


def test_a_member_changes_nothing_that_is_hard(log):
    before = log.state.groups.copy(), log.state.keys.copy()
    log.append(member())
    assert (log.state.groups, log.state.keys) == before


def test_a_member_without_config_is_ignored():
    log = Log(configured=False)
    assert log.one(member()).reason == "no_config"
    assert members(log) == set()


def test_a_member_belongs_to_its_groups_home():
    home = home_partition("g", partition_count=2)
    for place, expected in ((home, "member"), (1 - home, "wrong_partition")):
        assert Log(place, k=2).outcome_of(member()) == expected


def test_members_are_bounded():
    log = Log(keys=2)
    log.append(member("c1"))
    log.append(member("c2"))
    transition = log.one(member("c3"))
    assert (transition.outcome, transition.reason) == ("refused", "limits")
    assert log.outcome_of(member("c1", seq=1)) == "member"


def test_gone_members_are_dropped_some_with_each_entry(log):
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


def test_a_group_without_anything_is_dropped():
    log = Log(forget_ms=0)
    epoch = log.claimed()
    log.append(release(epoch))
    log.append(b"", after=1)
    assert log.state.groups == {}


def test_an_operation_that_paused_nothing_ends_beside_a_pause():
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


def test_settings_are_kept_with_all_fields():
    log = Log(level=2)
    given = {"policy": "planner", "planner_version_max": 1, "debounce_ms": 0}
    given |= {"handoff_ms": 5, "handoffs_max": 2, "grace_ms": 7}
    transition = log.one(settings(**given))
    assert (transition.effect, transition.key) == ("group_configured", None)
    assert log.state.settings_of("g")._asdict() == {"generation": 1, **given}
    assert log.outcome_of(settings(2)) == "group_configured"
    assert log.state.settings_of("g") == (2, *[None] * 6)


@pytest.mark.parametrize("generation", [0, 1, 3])
def test_settings_of_another_generation_are_overtaken(generation):
    log = Log(level=2)
    log.append(settings(policy="fair"))
    transition = log.one(settings(max(generation, 1)))
    assert (transition.outcome, transition.reason) == ("refused", "settings_overtaken")
    assert log.state.settings_of("g").policy == "fair"


def test_settings_need_their_home_and_room_for_the_group():
    log = Log(level=2, k=8, groups=1)
    homes = {name: home_partition(name, partition_count=8) for name in "abcdefghgx"}
    here = [name for name, home in homes.items() if home == 0]
    assert log.outcome_of(settings(group="b")) == "wrong_partition"
    assert log.outcome_of(settings(group=here[0])) == "group_configured"
    assert log.outcome_of(settings(group=here[1])) == "limits"
    assert log.outcome_of(settings(2, group=here[0])) == "group_configured"


def test_settings_are_refused_while_they_may_be_elsewhere():
    assert target_log().outcome_of(settings(group=MOVES)) == "importing"


def test_a_group_with_settings_is_kept():
    log = Log(level=2, forget_ms=0, operations=1)
    log.append(settings())
    log.append(fence())
    log.append(fence(group="h"))  # the fence of g is forgotten
    assert sorted(log.state.groups) == ["g", "h"]
    assert log.state.groups["g"].fences == ()


def test_groups_of_old_plans_are_dropped_and_others_stay():
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


def test_what_ends_last_leaves_the_plan_of_its_group():
    log = Log(level=2, operations=1, forget_ms=10**9)
    log.append(fence())
    log.append(logkit.planned())
    log.append(fence("c2", group="h"))
    # The fence of the first group is forgotten, its plan is not.
    assert log.state.groups["g"].fences == ()
    assert log.state.plan_generation("g") == 1


def test_partition_0_takes_no_config_while_the_count_changes():
    log, *_ = source_log()
    assert log.outcome_of(config(3, era=3, k=2, level=2)) == "busy"
    log = target_log()
    assert log.outcome_of(config(3, era=3, k=2, level=2)) == "configured"


def test_members_announce_themselves_at_the_home_under_either_count():
    log, *_ = source_log()
    for number, group in enumerate(("g", "h", "i", "j")):
        assert log.outcome_of(member(group=group, seq=number)) == "member"
