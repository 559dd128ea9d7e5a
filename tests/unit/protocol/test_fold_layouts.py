"""How fences, imports, Dones and Finals change the state."""

import msgspec
import pytest
from logkit import (
    CREATE_TIME,
    KEY,
    MOVES,
    OP,
    REMAINS,
    START_MS,
    STAYS,
    H,
    Log,
    beat,
    claim,
    config,
    decide,
    direct,
    ident,
    imported,
    imported_directive,
    imported_settings,
    layout_done,
    layout_fence,
    layout_final,
    layout_groups,
    layout_import,
    offer,
    pause,
    planned,
    release,
    resolve,
    schedule,
    settings,
    source_log,
    stage,
    target_log,
)

from kafka_marshal.protocol.fold_layouts import FOLDS
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import KINDS, SECOND_LEVEL, ImportedPrevious
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import Previous, WorldState
from kafka_marshal.protocol.types import Key

OTHER = ident("other")
LATEST = START_MS // 1_000 + 86_400
MINE = Key("marshal", "/checkpoint", 1)


def is_sound(log):
    again = from_bytes(to_bytes(log.state))
    return again == log.state and digest(again) == digest(log.state)


def test_this_module_folds_all_layout_records_of_level_2():
    named = {kind.record for kind in KINDS if kind.name.startswith("Layout")}
    assert set(FOLDS) == named
    assert {kind.level for kind in KINDS if kind.record in named} == {SECOND_LEVEL}


# --- fences


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param({}, "layout_fenced", id="the-next"),
        pytest.param({"k": 1}, "config", id="the-same-count"),
        pytest.param({"k": 3, "before": 2}, "config", id="no-multiple"),
        pytest.param({"k": 4, "before": 2}, "config", id="from-another-count"),
        pytest.param({"generation": 3}, "config", id="a-generation-too-far"),
        pytest.param({"era": 1}, "config", id="the-same-era"),
        pytest.param({"era": LATEST}, "layout_fenced", id="a-day-ahead"),
        pytest.param({"era": LATEST + 1}, "config", id="further-ahead"),
        pytest.param({"cluster_id": "x"}, "config", id="another-cluster"),
        pytest.param({"format_id": OTHER}, "config", id="another-format"),
        pytest.param({"h": H + 1}, "config", id="another-interval"),
        pytest.param({"keys": 9}, "config", id="other-limits"),
        pytest.param({"level": 3}, "config", id="another-level"),
    ],
)
def test_partition_0_accepts_only_a_fence_that_follows_its_config(change, expected):
    log = Log(level=2)
    assert log.outcome_of(layout_fence(**{"k": 2} | change)) == expected
    assert (log.state.layout is None) == (expected == "config")
    assert is_sound(log)


def test_a_fence_needs_level_2_and_halts_above_the_known_level():
    assert Log().outcome_of(layout_fence(2, level=1)) == "level"
    log = Log(1, configured=False)
    assert log.outcome_of(layout_fence(2, level=3)) == "halted"
    assert log.state.halted == (0, 3)


def test_a_fence_ends_all_pauses_of_the_partition():
    log = Log(1, k=2, level=2)
    ops = [ident(name) for name in ("whole", "scoped", "later", "another")]
    log.append(pause(START_MS + 9, op=ops[0]))
    log.append(schedule(START_MS, START_MS + 9, op=ops[1], scope={"t": ()}))
    log.append(schedule(START_MS + 5, START_MS + 9, op=ops[2]))
    log.append(pause(START_MS + 9, op=ops[3], group="f"))
    assert log.outcome_of(layout_fence(4, 2)) == "layout_fenced"
    groups = log.state.groups
    assert [note[1] for note in groups["g"].over] == ops[:3]
    assert [note[1] for note in groups["f"].over] == ops[3:]
    assert not any(each.pauses or each.scheduled for each in groups.values())
    assert (log.state.scopes, log.state.lapses_ms) == ({}, None)
    assert is_sound(log)


@pytest.mark.parametrize("is_decided", [False, True])
def test_an_unresolved_set_position_delays_the_final_and_the_next_fence(is_decided):
    group = next(n for n in "abcdefgh" if home_partition(n, partition_count=2) == 1)
    log = Log(1, k=2, level=2)
    stays = Key(group, "t", 14)
    log.append(release(log.claimed(key=stays), key=stays))
    log.append(pause(START_MS + 9, group=group))
    record = decide() if is_decided else stage((14, 5))
    log.append(msgspec.structs.replace(record, group_id=group))
    assert log.outcome_of(layout_fence(4, 2)) == "layout_fenced"
    assert log.outcome_of(layout_final()) == "busy"
    assert log.outcome_of(layout_fence(8, 4, generation=3, era=3)) == "busy"
    log.append(resolve(commit=is_decided, group=group))
    assert log.outcome_of(layout_final()) == "layout_final"
    assert is_sound(log)


def test_a_fence_discards_the_state_of_a_partition_that_comes_into_use():
    log = Log(1, k=2, level=2)
    log.claimed(key=MINE)
    log.claimed()
    log.append(offer(log.key().epoch))
    assert log.outcome_of(settings(group="h")) == "group_configured"
    assert log.outcome_of(planned(group="h")) == "planned"
    assert log.state.soft.plans
    log.append(direct())
    log.append(pause(START_MS + 9))
    log.append(layout_fence(1, 2))
    log.append(layout_fence(2, 1, generation=3, era=3), epoch=4)
    assert (log.state.keys, log.state.groups, log.state.eras) == ({}, {}, ())
    assert (log.state.staging, log.state.lapses_ms) == (None, None)
    assert (log.state.plans_ms, log.state.soft.plans) == (None, {})
    assert log.state.soft.notes == {}
    assert log.state == from_nothing(log)
    assert is_sound(log)


def test_a_fence_is_the_first_config_of_a_source_that_has_none():
    """Its log went back; a Final has nothing to drop there."""
    log = Log(1, configured=False)
    assert log.outcome_of(layout_fence(1, 2)) == "layout_fenced"
    assert (log.state.eras, log.state.config.partition_count) == ((), 1)


def from_nothing(log):
    """Return the state of a reader that has the last entry alone."""
    state = WorldState(log.state.partition)
    apply(state, log.entries[-1])
    return state


@pytest.mark.parametrize("level", [1, 2])
def test_a_partition_that_comes_into_use_begins_as_if_the_fence_were_first(level):
    """Locks, feature levels and times from before it have no effect."""
    log = Log(1, k=2, level=2)
    log.claimed()
    log.append(release(log.key().epoch))
    log.append(pause(START_MS + 9))
    assert log.outcome_of(stage((0, 5))) == "staged"
    log.append(layout_fence(1, 2))
    again = {"generation": 3, "era": 3}
    assert log.outcome_of(layout_fence(2, 1, level=1, **again)) == "config"
    log.append(config(3, era=3, level=level))
    ahead = {"generation": 4, "era": LATEST + 1}
    early = {"after": 2, "kind": CREATE_TIME}
    assert log.outcome_of(layout_fence(2, 1, **ahead), **early) == "config"
    again = {"generation": 4, "era": 4}
    assert log.outcome_of(layout_fence(2, 1, **again), after=-1) == "layout_fenced"
    assert log.state == from_nothing(log)


def test_a_fence_drops_state_from_before_the_count_fell():
    """The log of this partition lost the change to fewer partitions."""
    log = Log(1, k=2, level=2)
    log.claimed()
    assert log.outcome_of(layout_fence(2, generation=9)) == "layout_fenced"
    assert (log.state.keys, log.state.groups) == ({}, {})
    assert log.outcome_of(claim(generation=9)) == "importing"
    assert is_sound(log)


# --- keys that move


def test_an_import_sets_all_fields_of_its_item():
    log = target_log()
    item = imported(
        KEY,
        5,
        7,
        topic_id=OTHER,
        retired_topic_ids=(OP,),
        previous=ImportedPrevious(OP, 1, 2),
        successor="c2",
    )
    transition = log.one(layout_import(item))
    assert (transition.effect, transition.key) == ("imported", KEY)
    known = log.key()
    assert (known.position, known.granted, known.topic_id) == (5, 7, OTHER)
    assert (known.retired_topic_ids, known.previous) == ((OP,), Previous(OP, 1, 2))
    assert known.handoff == ("c2", START_MS + H // 2)
    assert (known.renewed_ms, known.heartbeat_interval_ms) == (START_MS, H)
    assert is_sound(log)


def test_the_first_import_of_a_key_counts():
    log = target_log()
    log.append(layout_import(imported(position=5)))
    once = log.state.layout
    assert log.outcome_of(layout_import(imported(position=9))) == "known"
    assert (log.key().position, log.state.layout) == (5, once)
    assert once.sources == ((0, 1, None),)


def test_an_import_that_does_not_fit_the_change_is_refused():
    log = target_log()
    assert log.outcome_of(layout_import(op=OTHER)) == "layout"
    assert log.outcome_of(layout_import(source=1)) == "wrong_partition"
    assert log.one(layout_import(imported(), imported(STAYS))).key == STAYS
    assert log.state.keys == {}
    log.append(layout_done(0))
    assert log.outcome_of(layout_import()) == "done"
    assert Log(level=2).outcome_of(layout_import()) == "layout"
    assert source_log()[0].outcome_of(layout_import()) == "wrong_partition"


# --- the end of a change


def test_a_source_is_done_once_all_its_keys_are_imported():
    log = Log(k=3, level=2)
    log.append(layout_fence(1, 3))
    assert log.state.layout.sources == ((1, 0, None), (2, 0, None))
    assert log.outcome_of(layout_done(op=OTHER)) == "layout"
    assert log.outcome_of(layout_done(source=3)) == "wrong_partition"
    assert log.outcome_of(layout_done(source=1)) == "incomplete"
    log.append(layout_import(source=1))
    assert log.outcome_of(layout_done(source=1), after=3) == "layout_done"
    assert log.outcome_of(layout_done(source=1)) == "done"
    assert log.outcome_of(layout_final()) == "incomplete"
    log.append(layout_done(0, source=2))
    assert log.state.layout.sources == ((1, 1, START_MS + 3), (2, 0, START_MS + 3))
    assert is_sound(log)
    assert log.outcome_of(layout_final()) == "layout_final"
    assert log.outcome_of(claim(generation=2)) == "claimed"


def test_a_final_drops_the_keys_that_moved_away():
    log, _, epoch = source_log()
    log.append(settings(group="h"))
    assert log.outcome_of(layout_final(OTHER)) == "layout"
    assert log.outcome_of(layout_final()) == "layout_final"
    assert log.state.layout is None
    assert list(log.state.keys) == [STAYS]
    assert log.state.groups["g"].key_count == 1
    assert log.outcome_of(beat(epoch, key=STAYS)) == "renewed"
    assert log.outcome_of(config(3, era=3, k=2, level=2)) == "configured"
    assert is_sound(log)


# --- settings and directives


def effects_of(log, record):
    return [each.effect or each.reason for each in log.append(record)]


def test_settings_and_directives_are_imported_once():
    target = target_log()
    record = layout_groups(
        imported_settings(MOVES, 7, policy="planner"),
        imported_directive(MOVES),
        imported_directive("marshal"),
    )
    assert effects_of(target, record) == ["group_imported"] * 3
    assert effects_of(target, record) == ["known"] * 3
    group = target.state.groups[MOVES]
    assert (group.settings.generation, group.settings.policy) == (7, "planner")
    (one,) = group.directives
    assert (one.host, one.until_ms) == ("h1", START_MS + 9 * H)
    assert is_sound(target)
    target.append(b"", at=START_MS + 9 * H)
    assert target.state.directed == {}
    assert effects_of(target, layout_groups(imported_directive(MOVES))) == ["known"]


def test_imported_settings_and_directives_of_other_homes_are_refused():
    target = target_log()
    item = imported_settings(MOVES)
    assert target.outcome_of(layout_groups(item, op=OTHER)) == "layout"
    assert target.outcome_of(layout_groups(item, source=1)) == "wrong_partition"
    both = layout_groups(item, imported_directive(REMAINS))
    assert target.outcome_of(both) == "wrong_partition"
    assert target.outcome_of(layout_done(0)) == "layout_done"
    assert target.outcome_of(layout_groups(item)) == "done"
    fewer = Log(1, k=4, level=2)
    fewer.append(layout_fence(2, 4))
    for_all = layout_groups(imported_directive("marshal"), source=3)
    assert fewer.outcome_of(for_all) == "wrong_partition"


def test_imports_of_keys_and_settings_beyond_the_limits_are_ignored():
    target = target_log(keys=1, groups=2)
    record = layout_import(imported(), imported(KEY._replace(group_id="h")))
    assert effects_of(target, record) == ["imported", "limits"]
    one, other = (imported_settings(name) for name in moving_names(2))
    assert effects_of(target, layout_groups(one, other)) == ["group_imported", "limits"]
    assert is_sound(target)


def moving_names(count):
    """Return names of groups whose home moves to partition 1."""
    names = (f"x{n}" for n in range(99))
    return [n for n in names if home_partition(n, partition_count=2) == 1][:count]


def test_imports_of_directives_beyond_the_limits_are_ignored():
    target = target_log(operations=1)
    record = layout_groups(imported_directive(MOVES), imported_directive("marshal"))
    assert effects_of(target, record) == ["group_imported", "limits"]
    assert "marshal" not in target.state.groups


def test_a_final_keeps_the_directives_for_all_groups_in_every_partition():
    home, after = (home_partition("marshal", partition_count=n) for n in (1, 3))
    assert (home, after) != (0, 0)
    log = Log(level=2)
    log.append(direct(group="marshal"))
    log.append(settings(group="marshal"))
    log.append(layout_fence(3))
    log.append(layout_final())
    group = log.state.groups["marshal"]
    assert (len(group.directives), group.settings) == (1, None)
