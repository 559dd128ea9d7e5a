"""PROTOCOL 4.14 and 4.15: pauses of a group, and of a part of it."""

import pytest
from logkit import (
    OP,
    SECRET,
    START_MS,
    Log,
    batch,
    beat,
    claim,
    decide,
    hashed,
    ident,
    messages,
    pause,
    release,
    resolve,
    resume,
    schedule,
    stage,
)

from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.types import Key

# --- 4.14 PauseGroup ---

BEGIN, AFTER = START_MS + 100, START_MS + 200
MONTH_MS = 30 * 86_400_000


def test_4_14_a_pause_group_gets_the_first_reason_that_applies():
    log = Log(level=2, groups=1, max_pause_ms=150)
    one, two = ident("one"), ident("two")
    assert log.outcome_of(schedule(BEGIN, AFTER, op=one)) == "scheduled"
    assert log.outcome_of(schedule(BEGIN, AFTER, op=one)) == "scheduled"
    assert log.outcome_of(schedule(BEGIN, AFTER, group="h")) == "limits"
    far = START_MS + MONTH_MS + 1
    assert log.outcome_of(schedule(far, far + 1, op=two)) == "limits"
    assert log.outcome_of(schedule(BEGIN, BEGIN, op=two)) == "expired"
    assert log.outcome_of(schedule(BEGIN, AFTER + 1, op=one)) == "busy"
    for name in "bcd":
        assert log.outcome_of(schedule(BEGIN, AFTER, op=ident(name))) == "scheduled"
    assert log.outcome_of(schedule(BEGIN, AFTER, op=two)) == "limits"
    assert log.outcome_of(pause(0, op=one)) == "unpaused"
    assert log.outcome_of(schedule(BEGIN, AFTER, op=one)) == "op_over"


def test_4_14_below_level_2_a_pause_group_is_ignored():
    assert Log().outcome_of(schedule(BEGIN, AFTER)) == "level"


def test_4_14_a_pause_group_with_a_past_begin_is_judged_as_a_release_group():
    log = Log(level=2)
    assert log.outcome_of(schedule(START_MS, AFTER)) == "paused"
    assert log.outcome_of(schedule(START_MS, AFTER, op=ident("two"))) == "busy"


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(beat(1, 7), id="beat"),
        pytest.param(batch((1, 7)), id="batch"),
        pytest.param(messages(1, 0, 5), id="messages"),
        pytest.param(claim("c2"), id="claim"),
        pytest.param(resume(1), id="resume"),
        pytest.param(release(1, 3), id="release"),
        pytest.param(pause(AFTER, op=ident("two")), id="another pause"),
        pytest.param(b"garbage", id="garbage"),
    ],
)
@pytest.mark.parametrize("at", [BEGIN - 1, BEGIN, AFTER - 1, AFTER])
def test_4_14_a_pause_begins_as_if_by_a_release_group_before_the_entry(record, at):
    """So what holds for pauses (S4) holds for scheduled ones."""
    planned, plain = Log(level=2), Log(level=2)
    for log in (planned, plain):
        log.claimed(resume_hash=hashed(SECRET))
    planned.append(schedule(BEGIN, AFTER, seq=3))
    if BEGIN <= at < AFTER:
        plain.append(pause(AFTER, seq=3), at=at)
    else:
        plain.append(b"")
    assert planned.outcome_of(record, at=at) == plain.outcome_of(record, at=at)
    assert planned.key() == plain.key()
    assert planned.state.active_pause("g") == plain.state.active_pause("g")


def test_4_14_a_scheduled_pause_begins_after_the_pause_of_a_set_position():
    log = Log(level=2)
    log.append(release(log.claimed(), 5))
    log.append(schedule(BEGIN, AFTER, op=ident("planned")))
    log.append(pause(AFTER - 50))
    assert log.outcome_of(stage((0, 2)), at=BEGIN) == "staged"
    assert log.outcome_of(decide()) == "decided"
    assert log.state.active_pause("g").op_id == OP
    assert log.outcome_of(resolve(commit=True)) == "position_set"
    assert log.outcome_of(claim()) == "paused"
    assert log.state.active_pause("g").op_id == ident("planned")
    assert log.outcome_of(claim(), at=AFTER) == "claimed"


def test_4_14_a_scheduled_pause_that_ends_during_another_never_begins():
    log = Log(level=2)
    log.append(schedule(BEGIN, AFTER, op=ident("planned")))
    log.append(pause(AFTER + 5))
    log.append(b"", at=AFTER + 4)
    assert len(log.state.groups["g"].scheduled) == 1
    assert log.outcome_of(claim(), at=AFTER + 5) == "claimed"
    assert log.state.groups["g"].is_over(ident("planned"))
    assert log.state.groups["g"].is_over(OP)


# --- 4.15 Scope ---

ONE, TWO = ident("one"), ident("two")
T_ALL, T_0, U_ALL = {"t": ()}, {"t": (0,)}, {"u": ()}
T_KEYS = [Key("g", "t", 0), Key("g", "t", 1)]


def held(log):
    return [(each.op_id, each.until_ms) for each in log.state.groups["g"].pauses]


def scoped(scope, until=AFTER, **fields):
    return schedule(0, until, scope=scope, **fields)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        pytest.param(beat(1, 7), "position_only", id="beat"),
        pytest.param(batch((1, 7)), "position_only", id="batch"),
        pytest.param(messages(1, 0, 5), "paused", id="messages"),
        pytest.param(claim("c2"), "paused", id="claim"),
        pytest.param(resume(1), "paused", id="resume"),
        pytest.param(release(1, 3), "released", id="release"),
    ],
)
@pytest.mark.parametrize("at", [START_MS, AFTER])
def test_4_15_a_key_in_scope_is_judged_as_in_a_pause_of_its_group(record, expected, at):
    """So what holds for pauses (S4) holds for those with a scope, key by key."""
    logs = [Log(level=2) for _ in range(4)]
    whole, inside, outside, plain = logs
    for log in logs:
        log.claimed(resume_hash=hashed(SECRET))
    assert whole.outcome_of(pause(AFTER)) == "paused"
    assert inside.outcome_of(scoped({"s": (), "t": (0, 7)})) == "paused"
    assert outside.outcome_of(scoped({"t": (1,), "u": ()})) == "paused"
    plain.append(b"")
    found = [log.outcome_of(record, at=at) for log in logs]
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert (found[0] == expected) is (at < AFTER or expected == "released")
    assert whole.key() == inside.key()
    assert outside.key() == plain.key()


def test_4_15_a_topic_without_partitions_stands_for_all_of_them():
    log = Log(level=2)
    log.append(scoped(T_ALL))
    assert [log.outcome_of(claim(key=key)) for key in T_KEYS] == ["paused"] * 2
    for key in (Key("g", "u", 0), Key("h", "t", 0), Key("g", "/planner", 0)):
        assert log.outcome_of(claim(key=key)) == "claimed"


def test_4_15_several_pauses_last_at_a_time_and_end_independently():
    log = Log(level=2)
    log.append(scoped(T_0, op=ONE))
    log.append(scoped(T_ALL, AFTER + 10, op=TWO))
    log.append(pause(AFTER - 10))
    assert held(log) == [(OP, AFTER - 10), (ONE, AFTER), (TWO, AFTER + 10)]
    assert log.outcome_of(claim(), at=AFTER - 10) == "paused"
    assert log.outcome_of(claim(key=Key("g", "u", 0))) == "claimed"
    assert log.outcome_of(pause(0, op=TWO, client="other")) == "unpaused"
    first, second = T_KEYS
    assert log.outcome_of(claim(key=first)) == "paused"
    assert log.outcome_of(claim(key=second)) == "claimed"
    assert log.outcome_of(claim(key=first), at=AFTER) == "claimed"
    assert log.outcome_of(scoped(T_0, AFTER + 9, op=ONE)) == "op_over"


def test_4_15_a_set_position_needs_the_groups_own_pause():
    log = Log(level=2)
    log.append(release(log.claimed(), 5))
    log.append(scoped(T_ALL, op=ONE))
    assert log.outcome_of(stage((0, 2))) == "not_paused"
    assert log.outcome_of(stage((0, 2), op=ONE)) == "not_paused"
    log.append(pause(AFTER - 50))
    assert log.outcome_of(stage((0, 2))) == "staged"
    assert log.outcome_of(decide()) == "decided"
    assert log.outcome_of(resolve(commit=True)) == "position_set"
    assert held(log) == [(ONE, AFTER)]
    assert log.outcome_of(claim()) == "paused"
    assert log.outcome_of(claim(), at=AFTER) == "claimed"
    assert log.key().position == 2


def test_4_15_scheduled_pauses_with_a_scope_begin_beside_all_others():
    log = Log(level=2)
    log.append(pause(AFTER - 10))
    assert log.outcome_of(schedule(BEGIN, AFTER, op=ONE, scope=T_0)) == "scheduled"
    assert log.outcome_of(schedule(BEGIN, AFTER, op=TWO, scope=T_ALL)) == "scheduled"
    assert log.outcome_of(schedule(BEGIN, AFTER, op=ident("x"))) == "scheduled"
    log.append(b"", at=BEGIN)
    assert held(log) == [(OP, AFTER - 10), (ONE, AFTER), (TWO, AFTER)]
    log.append(b"", at=AFTER - 10)
    assert held(log) == [(ident("x"), AFTER), (ONE, AFTER), (TWO, AFTER)]
    log.append(b"", at=AFTER)
    # The group's own first, then by op_id.
    assert [op for _, op in log.state.groups["g"].over] == [OP, ident("x"), ONE, TWO]


def test_4_15_a_scheduled_pause_begins_early_only_with_its_scope():
    log = Log(level=2)
    log.append(schedule(BEGIN, AFTER, op=ONE, scope=T_0))
    log.append(schedule(BEGIN, AFTER, op=TWO, scope=T_0))
    assert log.outcome_of(schedule(BEGIN, AFTER, op=ONE, scope=T_ALL)) == "busy"
    assert log.outcome_of(pause(AFTER, op=ONE)) == "busy"
    assert log.outcome_of(scoped(T_ALL, op=ONE)) == "busy"
    assert log.outcome_of(scoped(T_0, op=ONE)) == "paused"
    assert log.outcome_of(scoped(U_ALL, until=0, op=TWO)) == "unpaused"
    assert log.outcome_of(schedule(BEGIN, AFTER, op=TWO, scope=T_0)) == "op_over"
    assert (held(log), log.state.groups["g"].scheduled) == ([(ONE, AFTER)], ())


def test_4_15_a_pause_with_a_scope_gets_the_first_reason_that_applies():
    log = Log(level=2, groups=1, max_pause_ms=150)
    assert log.outcome_of(scoped(T_0, START_MS)) == "expired"
    assert log.outcome_of(scoped(T_0, op=ONE, seq=3)) == "paused"
    assert log.outcome_of(scoped(T_0, group="h")) == "limits"
    assert log.outcome_of(scoped(U_ALL, op=ONE, seq=3)) == "busy"
    assert log.outcome_of(pause(AFTER, op=ONE, seq=3)) == "busy"
    assert log.outcome_of(schedule(BEGIN, AFTER, op=ONE, scope=T_0)) == "busy"
    assert log.outcome_of(scoped(T_0, op=ONE, seq=3)) == "old_seq"
    assert log.outcome_of(pause(0, op=ONE, seq=3)) == "old_seq"
    assert log.outcome_of(scoped(T_0, START_MS + 999, op=ONE, seq=4)) == "paused"
    assert held(log) == [(ONE, START_MS + 150)]
    assert log.outcome_of(pause(AFTER, op=TWO)) == "paused"
    assert log.outcome_of(scoped(U_ALL, op=TWO, seq=1)) == "busy"
    for number in range(7):
        assert log.outcome_of(scoped(T_0, op=ident(str(number)))) == "paused"
    assert log.outcome_of(scoped(T_0, op=ident("8"))) == "limits"
    later = schedule(BEGIN, AFTER, op=ident("8"), scope=T_0)
    assert log.outcome_of(later) == "limits"
    assert log.outcome_of(scoped(T_0, START_MS, op=ident("8"))) == "expired"
    assert log.outcome_of(scoped(T_0, op=ONE, seq=5)) == "paused"
    assert log.outcome_of(pause(0, op=ONE, seq=6)) == "unpaused"
    assert log.outcome_of(later) == "scheduled"
    assert log.outcome_of(scoped(T_0, op=ONE)) == "op_over"


def test_4_15_pauses_with_a_scope_are_limited_over_all_groups():
    log = Log(level=2, operations=2)
    assert log.outcome_of(scoped(T_0, group="a")) == "paused"
    assert log.outcome_of(schedule(BEGIN, AFTER, group="b", scope=T_0)) == "scheduled"
    assert log.outcome_of(scoped(T_0, group="c")) == "limits"
    assert "c" not in log.state.groups
    assert log.outcome_of(pause(AFTER, group="c")) == "paused"
    assert log.outcome_of(scoped(T_0, AFTER + 9, group="c"), at=AFTER) == "op_over"
    assert log.outcome_of(scoped(T_0, AFTER + 9, group="d")) == "paused"


def test_4_15_the_digest_of_a_log_without_scopes_is_frozen():
    log = Log(level=2)
    log.claimed()
    log.append(schedule(BEGIN, AFTER, op=ONE))
    log.append(schedule(0, AFTER, op=TWO))
    # The digest of the same records in the release before scopes.
    assert digest(log.state) == "2d6a84b16fc5955e0cc215c03de60c26"
