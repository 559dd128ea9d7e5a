"""PROTOCOL 10: changes of the number of coordinating partitions.

With one partition, KEY moves to a second one, and STAYS does not.
"""

from itertools import permutations

import msgspec
import pytest
from logkit import (
    KEY,
    MOVES,
    OP,
    REMAINS,
    START_MS,
    STAYS,
    H,
    Log,
    batch,
    beat,
    claim,
    config,
    decide,
    direct,
    fence,
    forgetting,
    ident,
    imported,
    imported_directive,
    imported_settings,
    layout_done,
    layout_fence,
    layout_final,
    layout_groups,
    layout_import,
    member,
    messages,
    offer,
    pause,
    planned,
    ready,
    release,
    resets,
    resolve,
    resume,
    schedule,
    settings,
    source_log,
    stage,
    target_log,
)

from kafka_marshal.protocol.hashing import coordinating_partition, home_partition
from kafka_marshal.protocol.layout import (
    digest_of,
    group_items,
    is_final,
    item_of,
    moving_keys,
    place_of,
)
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import ImportedPrevious
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import Previous, WorldState
from kafka_marshal.protocol.types import Key, Token

PLACE = {"generation": 2, "partition": 1}
OTHER = ident("another")


def source(**settings):
    """Return partition 0 of a topic with one coordinating partition."""
    return Log(level=2, **settings)


def shrunk(partition, k=1, before=2):
    """Return a partition in which a fence has opened a change to fewer."""
    log = Log(partition, k=before, level=2)
    assert log.outcome_of(layout_fence(k, before)) == "layout_fenced"
    return log


# --- 10.2 ---


def test_10_2_a_fence_opens_a_layout_and_puts_its_config_in_force():
    log = source(keys=9, h=H)
    log.append(layout_fence(2, keys=9))
    assert log.state.config == config(2, era=2, k=2, level=2, keys=9)
    assert log.state.layout == (OP, 1, 1, ())
    assert log.state.eras == ((1, 1),)


@pytest.mark.parametrize(
    "bad",
    [
        {"k": 1},
        {"k": 3, "before": 2},
        {"k": 4, "before": 2},
        {"k": 10_001},
        {"generation": 3},
        {"generation": 1},
        {"era": 1},
        {"era": START_MS // 1_000 + 86_401},
        {"cluster_id": "x"},
        {"format_id": OTHER},
        {"h": H + 1},
        {"keys": 9},
        {"level": 3},
    ],
    ids=str,
)
def test_10_2_partition_0_refuses_a_fence_that_does_not_follow(bad):
    log = source()
    assert log.outcome_of(layout_fence(**{"k": 2} | bad)) == "config"
    assert log.state.layout is None


def test_10_2_other_partitions_accept_any_fence_of_a_later_generation():
    for k, before, change, expected in (
        (4, 2, {"generation": 7, "h": 5, "keys": 9}, "layout_fenced"),
        (4, 2, {"generation": 1}, "config"),
        (4, 2, {"format_id": OTHER}, "config"),
        (6, 3, {}, "config"),
        (1, 2, {}, "layout_fenced"),
    ):
        log = Log(1, k=2, level=2)
        assert log.outcome_of(layout_fence(k, before, **change)) == expected
    log = Log(4, configured=False)
    for k, before, change, expected in (
        (4, 2, {}, "config"),
        (8, 3, {}, "config"),
        (8, 4, {"level": 1}, "config"),
        (8, 4, {"era": START_MS // 1_000 + 86_401}, "config"),
        (8, 4, {}, "layout_fenced"),
    ):
        assert log.outcome_of(layout_fence(k, before, **change)) == expected
    assert log.state.layout == (OP, 4, 4, ((0, 0, None),))
    empty = Log(configured=False)
    assert empty.outcome_of(layout_fence(2)) == "config"


def test_10_2_a_fence_of_impossible_counts_is_refused():
    """Huge counts would give a partition millions of sources."""
    log = Log(5, configured=False)
    for k, before in ((2**29, 2**30), (2**30, 2**29), (10_002, 5_001), (3, 2**31 - 2)):
        assert log.outcome_of(layout_fence(k, before)) == "config"
    assert Log(5, configured=False).outcome_of(layout_fence(10, 5)) == "layout_fenced"


def test_10_2_only_a_partition_without_config_judges_a_fence_at_level_1():
    log = Log(level=1)
    assert log.outcome_of(layout_fence(2, level=1)) == "level"
    log = Log(1, configured=False)
    assert log.outcome_of(layout_final()) == "level"
    assert log.one(layout_fence(2, level=3)).outcome == "halted"
    assert log.state.halted is not None


def test_10_2_partition_0_is_busy_while_paused_unresolved_or_in_a_change():
    log = source()
    log.append(pause(START_MS + 9))
    assert log.outcome_of(layout_fence(2)) == "busy"
    log.append(pause(0, seq=1))
    log.append(schedule(START_MS + 5, START_MS + 9, op=OTHER))
    assert log.outcome_of(layout_fence(2)) == "busy"
    log.append(pause(0, op=OTHER, seq=1))
    log.claimed()
    log.append(release(log.key().epoch))
    log.append(pause(START_MS + 9, op=ident("three")))
    for record in (
        stage((0, 5), op=ident("three")),
        decide(op=ident("three")),
        pause(0, op=ident("three"), seq=1),
    ):
        log.append(record)
    assert log.outcome_of(layout_fence(2)) == "busy"
    log.append(resolve(commit=True, op=ident("three")))
    assert log.outcome_of(layout_fence(2)) == "layout_fenced"
    assert log.outcome_of(layout_fence(4, 2, generation=3, era=3)) == "busy"
    assert log.outcome_of(config(3, era=3, k=2, level=2)) == "busy"
    assert log.outcome_of(pause(START_MS + 9, op=ident("four"))) == "busy"
    later = schedule(START_MS + 5, START_MS + 9, op=ident("four"))
    assert log.outcome_of(later) == "busy"
    assert log.outcome_of(pause(0, op=ident("four"))) == "expired"


def test_10_2_a_partition_with_a_layout_refuses_pauses_but_accepts_a_config():
    log = target_log()
    assert log.outcome_of(pause(START_MS + 9)) == "busy"
    assert log.outcome_of(schedule(START_MS + 5, START_MS + 9)) == "busy"
    assert log.outcome_of(pause(0)) == "expired"
    assert log.outcome_of(config(3, era=3, k=2, level=2)) == "configured"
    assert log.state.layout is not None


def test_10_2_each_part_of_a_reset_is_refused_while_a_layout_is_open():
    log, *_ = source_log()
    parts = resets(to_bytes(log.state), digest(log.state))
    assert [log.outcome_of(part) for part in parts] == ["busy"] * len(parts)


def test_10_2_a_partition_that_comes_into_use_begins_with_its_fence():
    """After 2 -> 1 -> 2 it would otherwise have its old keys again."""
    log = Log(1, k=2, level=2)
    mine = Key("marshal", "/checkpoint", 1)
    epoch = log.claimed(key=mine)
    log.claimed()
    log.append(fence("c9", group="other"))
    log.append(settings(group="g"))
    log.append(direct())
    log.append(layout_fence(1, 2))
    log.append(layout_fence(2, 1, generation=3, era=3), after=-5, epoch=1)
    assert (log.state.keys, log.state.groups, log.state.eras) == ({}, {}, ())
    begun = WorldState(1)
    apply(begun, log.entries[-1])
    assert to_bytes(log.state) == to_bytes(begun)
    assert log.outcome_of(beat(epoch, key=mine)) == "not_owner"


def test_10_2_a_partition_that_comes_into_use_refuses_only_an_old_generation():
    log = Log(1, k=2, level=2)
    log.claimed()
    log.append(release(log.key().epoch))
    log.append(pause(START_MS + 9))
    log.append(stage((0, 5)))
    log.append(layout_fence(1, 2, generation=4, era=4))
    assert log.outcome_of(layout_fence(2, 1, generation=4, era=5)) == "config"
    assert log.outcome_of(layout_fence(2, 1, generation=5, era=5)) == "layout_fenced"


def test_10_2_a_fence_drops_the_keys_that_a_missed_final_would_have_dropped():
    log = Log(1, k=2, level=2)
    log.claimed()
    log.append(layout_fence(4, 2))
    assert moving_keys(log.state) == [KEY]
    log.append(layout_fence(8, 4, generation=3, era=3))
    assert (log.state.keys, log.state.groups) == ({}, {})


def test_10_2_members_count_on_the_home_by_either_count():
    one, two = (home_partition("g", partition_count=k) for k in (1, 2))
    log = source()
    log.append(layout_fence(2))
    assert (one, log.outcome_of(member())) == (0, "member")
    log.append(layout_final())
    assert log.outcome_of(member(seq=1)) == (
        "member" if two == 0 else "wrong_partition"
    )


# --- 10.3 ---


def test_10_3_records_about_a_key_that_stays_are_judged_as_usual():
    log, _, epoch = source_log()
    assert log.outcome_of(beat(epoch, 5, key=STAYS), after=H) == "renewed"
    assert log.outcome_of(messages(epoch, 5, 9, key=STAYS)) == "granted"
    assert log.outcome_of(offer(epoch, key=STAYS)) == "offered"
    assert log.outcome_of(release(epoch, key=STAYS)) == "released"
    assert log.outcome_of(claim("c2", key=STAYS, generation=2)) == "claimed"
    assert log.state.token(STAYS) == Token(2, 0, log.key(STAYS).epoch)


def test_10_3_a_moving_key_is_neither_claimed_nor_granted_nor_renewed():
    log, epoch, _ = source_log()
    for record, reason in (
        (claim("c2"), "wrong_generation"),
        (claim("c2", generation=2), "wrong_partition"),
        (resume(epoch, generation=2), "wrong_partition"),
    ):
        transition = log.one(record)
        assert (transition.reason, transition.detail) == (reason, PLACE)
    assert log.outcome_of(messages(epoch, 0, 9)) == "moving"
    assert log.outcome_of(offer(epoch)) == "moving"
    assert log.outcome_of(beat(epoch, 5), after=H) == "position_only"
    assert log.outcome_of(batch((epoch, 6)), after=H) == "position_only"
    assert log.outcome_of(forgetting(epoch)) == "moving"
    assert (log.key().renewed_ms, log.key().position) == (START_MS, 6)
    assert log.outcome_of(release(epoch, 7)) == "released"
    assert log.key().position == 7


def test_10_3_a_ready_and_a_stage_of_a_moving_key_are_refused():
    log = source()
    epoch = log.claimed()
    log.append(offer(epoch))
    log.append(layout_fence(2))
    assert log.outcome_of(ready(epoch)) == "moving"
    assert log.one(stage((0, 5))).reason == "moving"
    assert log.one(stage((1, 5))).reason == "not_paused"


def test_10_3_a_stage_with_any_moving_key_is_moving_before_other_reasons():
    log = Log(0, k=2, level=2)
    log.append(layout_fence(4, 2))
    places = [
        [coordinating_partition("t", number, partition_count=k) for k in (2, 4)]
        for number in range(50)
    ]
    misplaced = next(n for n, (before, _) in enumerate(places) if before != 0)
    moving = next(n for n, place in enumerate(places) if place[0] == 0 != place[1])
    assert log.one(stage((misplaced, 5))).reason == "wrong_partition"
    for positions in permutations([(misplaced, 5), (moving, 5)]):
        transition = log.one(stage(*positions))
        assert (transition.reason, transition.key) == ("moving", Key("g", "t", moving))


def test_10_3_records_of_the_last_owner_do_not_change_a_final_key():
    log, epoch, _ = source_log()
    log.append(release(epoch, 7))
    before = log.key().position, log.key().owner
    for record in (beat(epoch, 9), release(epoch, 9), messages(epoch, 7, 9)):
        assert log.outcome_of(record) == "not_owner"
    assert (log.key().position, log.key().owner) == before


def test_10_3_a_late_beat_of_a_stale_owner_is_ignored():
    log, epoch, _ = source_log()
    assert log.outcome_of(beat(epoch, 5), after=2 * H) == "position_only"
    assert log.outcome_of(beat(epoch, 6), after=1) == "not_owner"
    assert log.outcome_of(beat(epoch, 6, rewind=True)) == "not_owner"
    (one,) = log.append(batch((epoch, 6)))
    assert one.reason == "not_owner"
    assert log.outcome_of(release(epoch, 6)) == "not_owner"
    assert log.key().position == 5


def test_10_3_a_key_is_not_final_while_its_partition_is_quiet():
    log = source()
    epoch = log.claimed()
    log.append(release(epoch))
    parts = resets(to_bytes(log.state), digest(log.state))
    assert [log.outcome_of(part) for part in parts][-1] == "reset"
    log.append(layout_fence(2))
    assert not is_final(log.state, KEY)
    log.append(b"", after=2 * H + 1)
    assert log.state.quiet_until_ms is None
    assert is_final(log.state, KEY)


def test_10_3_a_locked_key_is_not_final_until_it_is_resolved():
    """The pause of its set position had expired in partition 0 before the fence."""
    log = Log(1, k=2, level=2)
    epoch = log.claimed()
    log.append(release(epoch))
    log.append(pause(START_MS + 9))
    log.append(stage((0, 5)))
    log.append(layout_fence(4, 2), after=10)
    assert not is_final(log.state, KEY)
    assert log.outcome_of(resolve(commit=True)) == "position_set"
    assert is_final(log.state, KEY)
    assert log.key().position == 5


def test_10_3_no_silent_key_is_dropped_while_a_change_is_open():
    log = source(forget_ms=H)
    epoch = log.claimed(key=STAYS)
    log.append(release(epoch, key=STAYS))
    log.append(layout_fence(2, forget_ms=H))
    log.append(b"", after=9 * H)
    assert STAYS in log.state.keys
    assert log.outcome_of(forgetting(epoch, key=STAYS)) == "busy"
    log.append(layout_final())
    log.append(b"")
    assert STAYS not in log.state.keys


def test_10_3_a_retired_partition_refuses_a_claim_and_names_the_new_place():
    log = shrunk(1)
    for _ in range(2):
        transition = log.one(claim(generation=2))
        place = {"generation": 2, "partition": 0}
        assert (transition.reason, transition.detail) == ("retired", place)
        assert log.outcome_of(pause(START_MS + 9)) == "retired"
        later = schedule(START_MS + 5, START_MS + 9)
        assert log.outcome_of(later) == "retired"
        for record in (fence(), settings(), direct(), decide(), stage((1, 5))):
            assert log.one(record).reason == "retired"
        mine = Key("marshal", "/checkpoint", 1)
        assert log.outcome_of(claim("w", key=mine, generation=2)) in {
            "claimed",
            "duplicate",
        }
        log.append(layout_final())
    assert log.outcome_of(beat(3)) == "retired"
    assert log.outcome_of(forgetting(3)) == "retired"
    assert log.outcome_of(member()) == "retired"


# --- 10.4 to 10.6 ---


def test_10_4_an_import_makes_the_key_known():
    log = target_log()
    item = imported(
        KEY,
        5,
        7,
        topic_id=ident("topic"),
        retired_topic_ids=(ident("before"),),
        previous=ImportedPrevious(OP, 1, None),
        successor="c2",
    )
    transition = log.one(layout_import(item), after=3)
    assert (transition.effect, transition.key, transition.epoch) == ("imported", KEY, 0)
    known = log.key()
    now_ms = START_MS + 3
    assert (known.owner, known.epoch, known.epoch_leader_epoch) == (None, 0, 0)
    assert known.renewed_ms == known.active_ms == now_ms
    assert known.heartbeat_interval_ms == H
    assert (known.position, known.granted) == (5, 7)
    assert (known.topic_id, known.retired_topic_ids) == (
        ident("topic"),
        (ident("before"),),
    )
    assert known.previous == Previous(OP, 1, None)
    assert known.handoff == ("c2", now_ms + H // 2)
    assert item_of(KEY, known) == item
    assert log.state.token(KEY) == Token(2, 0, 0)
    assert log.outcome_of(claim("c3", generation=2)) == "handoff"
    epoch = log.claimed("c2", generation=2)
    assert log.state.token(KEY) > Token(2, 0, 0)
    assert log.outcome_of(beat(epoch, 9, client="c2")) == "renewed"


def test_10_4_only_the_first_import_of_a_key_counts():
    log = target_log()
    log.append(layout_import(imported(KEY, 5)))
    other = Key("h", *KEY[1:])
    known, new = log.append(layout_import(imported(KEY, 1), imported(other)))
    assert (known.outcome, known.reason) == ("ignored", "known")
    assert new.effect == "imported"
    assert log.key().position == 5
    assert log.state.layout.sources == ((0, 2, None),)
    assert log.outcome_of(beat(0)) == "not_owner"
    assert log.one(batch((0, 9))).reason == "not_owner"
    assert from_bytes(to_bytes(log.state)) == log.state
    assert log.claimed(generation=2)
    assert from_bytes(to_bytes(log.state)) == log.state


def test_10_4_an_import_that_does_not_fit_the_change_is_refused():
    log = target_log()
    assert log.outcome_of(layout_import(op=OTHER)) == "layout"
    assert log.outcome_of(layout_import(source=1)) == "wrong_partition"
    assert log.outcome_of(layout_import(imported(STAYS))) == "wrong_partition"
    assert log.outcome_of(layout_done(0)) == "layout_done"
    assert log.outcome_of(layout_import()) == "done"
    log, *_ = source_log()
    assert log.outcome_of(layout_import()) == "wrong_partition"
    assert source().outcome_of(layout_import()) == "layout"
    assert shrunk(1).outcome_of(layout_import()) == "retired"


def test_10_4_keys_of_a_source_beyond_the_limit_are_not_imported():
    log = target_log(keys=2, groups=1)
    outcomes = [
        log.outcome_of(layout_import(imported(KEY._replace(group_id=group))))
        for group in "gghi"
    ]
    assert outcomes == ["imported", "known", "imported", "limits"]
    assert len(log.state.keys) == 2


def test_10_5_a_done_counts_once_all_keys_are_imported():
    log = target_log()
    assert log.outcome_of(layout_done(op=OTHER)) == "layout"
    assert log.outcome_of(layout_done(source=1)) == "wrong_partition"
    assert log.outcome_of(claim(generation=2)) == "importing"
    assert log.outcome_of(layout_done(1)) == "incomplete"
    log.append(layout_import())
    assert log.outcome_of(layout_done(1), after=2) == "layout_done"
    assert log.state.layout.sources == ((0, 1, START_MS + 2),)
    assert log.outcome_of(layout_done(1)) == "done"
    assert log.claimed(generation=2)
    assert log.claimed(key=KEY._replace(group_id="h"), generation=2)


def test_10_5_a_change_to_fewer_partitions_has_several_sources():
    log = shrunk(0, 1, 3)
    assert log.state.layout.sources == ((1, 0, None), (2, 0, None))
    of_2 = Key("g", "t", 2)
    log.append(layout_import(imported(of_2), source=2))
    assert log.outcome_of(layout_import(imported(of_2), source=1)) == "wrong_partition"
    log.append(layout_done(1, source=2))
    assert log.outcome_of(claim(key=Key("g", "t", 1), generation=2)) == "claimed"
    assert log.outcome_of(claim(generation=2)) == "importing"
    assert log.outcome_of(claim(key=Key("g", "u", 0), generation=2)) == "claimed"
    assert log.outcome_of(layout_final()) == "incomplete"
    log.append(layout_done(0, source=1))
    assert log.outcome_of(layout_final()) == "layout_final"


def test_10_5_the_digest_of_the_items_is_frozen():
    log, *_ = source_log()
    items = [item_of(key, log.key(key)) for key in moving_keys(log.state)]
    assert [item.partition for item in items] == [0]
    assert digest_of(items).hex() == "38796c0b587e0008ae236bd91c798925"


def test_10_6_a_final_drops_the_keys_that_moved_away():
    log, _, epoch = source_log()
    assert log.outcome_of(layout_final(OTHER)) == "layout"
    assert log.outcome_of(layout_final()) == "layout_final"
    assert list(log.state.keys) == [STAYS]
    assert log.state.layout is None
    assert log.outcome_of(layout_final()) == "layout"
    assert log.outcome_of(beat(epoch, key=STAYS)) == "renewed"
    assert from_bytes(to_bytes(log.state)) == log.state


def test_10_1_a_snapshot_in_an_open_change_has_the_layout():
    log, *_ = source_log()
    again = from_bytes(to_bytes(log.state))
    assert again == log.state
    assert digest(again) == digest(log.state)


# --- 10.4: settings and directives ---


MOVES_TOO = next(
    name
    for name in (f"h{n}" for n in range(99))
    if home_partition(name, partition_count=2) == 1
)


def home_log():
    """Return partition 0 with settings, plans and directives, and a fence to two."""
    log = Log(level=2)
    for group in (MOVES, REMAINS):
        log.append(settings(group=group, policy="planner"))
        log.append(planned(0, group=group))
        log.append(direct(group=group))
    log.append(direct(group="marshal", host="h1"))
    assert log.outcome_of(layout_fence(2)) == "layout_fenced"
    return log


def test_10_4_settings_and_directives_move_to_the_new_home():
    log, target = home_log(), target_log()
    found, directives = group_items(log.state, 1)
    assert [each.group_id for each in found] == [MOVES]
    assert [each.group_id for each in directives] == [MOVES, "marshal"]
    assert target.outcome_of(settings(2, group=MOVES)) == "importing"
    assert target.outcome_of(planned(0, group=MOVES)) == "importing"
    assert target.outcome_of(direct(group=MOVES)) == "importing"
    assert target.outcome_of(direct(group="marshal")) == "importing"
    record = layout_groups(*found, *directives)
    effects = [each.effect for each in target.append(record)]
    assert effects == ["group_imported"] * 3
    assert [each.reason for each in target.append(record)] == ["known"] * 3
    source, state = log.state, target.state
    assert state.settings_of(MOVES) == source.settings_of(MOVES)
    for group in (MOVES, "marshal"):
        assert state.groups[group].directives == source.groups[group].directives
    assert target.state.layout.sources == ((0, 0, None),)
    assert from_bytes(to_bytes(state)) == state
    target.append(layout_done(0))
    assert target.outcome_of(settings(2, group=MOVES)) == "group_configured"
    assert target.outcome_of(planned(0, group=MOVES)) == "planned"
    assert target.outcome_of(direct(group=MOVES, until=0, seq=1)) == "directive_ended"


def test_10_4_settings_and_directives_that_do_not_fit_are_refused():
    item, target = imported_settings(MOVES), target_log()
    assert target.outcome_of(layout_groups(item, op=OTHER)) == "layout"
    assert target.outcome_of(layout_groups(item, source=1)) == "wrong_partition"
    for wrong in (imported_settings(REMAINS), imported_directive(REMAINS)):
        assert target.outcome_of(layout_groups(item, wrong)) == "wrong_partition"
    assert MOVES not in target.state.groups
    target.append(layout_done(0))
    assert target.outcome_of(layout_groups(item)) == "done"
    assert shrunk(1).outcome_of(layout_groups(item)) == "retired"
    # A partition in use before has the directives of the group ``marshal``.
    for_all = layout_groups(imported_directive("marshal"), source=1)
    assert shrunk(0).outcome_of(for_all) == "wrong_partition"


def test_10_4_settings_of_groups_beyond_the_limit_are_not_imported():
    target = target_log(groups=1)
    one, other = imported_settings(MOVES), imported_settings(MOVES_TOO)
    found = target.append(layout_groups(one, other))
    outcomes = [each.effect or each.reason for each in found]
    assert outcomes == ["group_imported", "limits"]


def test_10_4_directives_beyond_the_limit_are_not_imported():
    target = target_log(operations=1)
    one, other = imported_directive(MOVES), imported_directive(MOVES, op=OTHER)
    found = target.append(layout_groups(one, other))
    assert [each.effect or each.reason for each in found] == [
        "group_imported",
        "limits",
    ]
    target.append(b"", at=START_MS + 9 * H)
    assert target.state.groups[MOVES].directives == ()
    assert target.one(layout_groups(one)).reason == "known"


def test_10_6_a_final_drops_groups_whose_home_moved_away():
    log = home_log()
    assert log.outcome_of(settings(2, group=MOVES)) == "wrong_partition"
    assert log.outcome_of(settings(2, group=REMAINS)) == "group_configured"
    log.append(layout_final())
    assert MOVES not in log.state.groups
    assert MOVES not in log.state.soft.plans
    left = log.state.groups[REMAINS]
    assert (left.settings.generation, len(left.directives)) == (2, 1)
    assert left.planned is not None
    assert len(log.state.groups["marshal"].directives) == 1
    assert from_bytes(to_bytes(log.state)) == log.state


def test_10_9_lost_fences_and_imports_are_accepted_again():
    """First a target, then a source loses the fence and all after it."""
    log = target_log()
    log.append(layout_import(imported(KEY, 5, 7)))
    log.append(layout_done(1))
    lost = log.claimed(generation=2)
    before = log.state.token(KEY)
    log = Log(1, configured=False)
    assert log.outcome_of(layout_fence(2), epoch=1) == "layout_fenced"
    assert log.outcome_of(layout_done(1)) == "incomplete"
    assert log.outcome_of(layout_import(imported(KEY, 5, 7))) == "imported"
    assert log.outcome_of(layout_done(1)) == "layout_done"
    assert log.outcome_of(beat(lost)) == "not_owner"
    log.claimed(generation=2)
    assert log.state.token(KEY) > before
    log = source()
    log.claimed()
    assert log.state.token(KEY) < before
    assert log.outcome_of(layout_fence(2), epoch=1) == "layout_fenced"
    assert log.outcome_of(beat(log.key().epoch, 3)) == "position_only"


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_10_9_the_fence_that_restores_a_lost_change_is_accepted_once(before, after):
    """Other partitions have its Config; its sources have no keys left to import."""
    restored = layout_fence(after, before, op=OTHER)
    log = Log(1, k=before, level=2)
    assert log.outcome_of(restored) == "layout_fenced"
    assert log.outcome_of(restored) == "config"
    assert log.outcome_of(layout_fence(after, before)) == "config"
    for source in log.state.layout.sources:
        assert log.outcome_of(layout_final(op=OTHER)) == "incomplete"
        done = layout_done(0, source=source.partition, op=OTHER)
        assert log.outcome_of(done) == "layout_done"
    assert log.outcome_of(layout_final(op=OTHER)) == "layout_final"
    assert log.state.config.partition_count == after


@pytest.mark.parametrize(
    ("counts", "t"), [((2, 4, 8), 1), ((2, 4, 2), 1), ((4, 2, 4), 1)]
)
def test_10_9_the_fence_of_a_lost_change_is_needed_before_the_next(counts, t):
    """The next fence is refused before it, and then ends the restored change."""
    first, second, third = counts
    before = layout_fence(second, first, op=OTHER)
    later = layout_fence(third, second, generation=3, era=3)
    log = Log(t, k=first, level=2)
    assert log.outcome_of(later) == "config"
    assert log.outcome_of(before) == "layout_fenced"
    assert log.outcome_of(later) == "layout_fenced"
    assert (log.state.layout.op_id, log.state.config.partition_count) == (OP, third)
    assert log.outcome_of(before) == "config"


@pytest.mark.parametrize("t", [0, 1])
def test_10_9_a_lost_config_is_accepted_again(t):
    """The keys stay; a claim under the new Config gets a larger token."""
    key = next(
        each
        for each in (Key("g", "t", number) for number in range(99))
        if place_of(each, partition_count=2) == t
    )
    newest = config(3, era=9, k=2, level=2, h=2 * H)
    between = msgspec.structs.replace(newest, generation=2, era=2)
    log = Log(t, k=2, level=2)
    first = log.claimed(key=key)
    if t == 0:
        assert log.outcome_of(newest) == "config"
        assert log.outcome_of(between) == "configured"
    assert log.outcome_of(newest) == "configured"
    assert log.outcome_of(newest) == log.outcome_of(between) == "config"
    assert log.state.keys[key].epoch == first
    assert log.state.token(key).era == 1
    log.append(release(first, key=key))
    log.claimed(key=key, generation=3)
    assert log.state.token(key).era == 9


def test_10_9_a_config_of_level_2_comes_before_a_lost_fence():
    """At level 1 a partition ignores the fence; the Config keeps its count."""
    lost = layout_fence(4, 2, generation=3, era=9, op=OTHER)
    log = Log(1, k=2)
    assert log.one(lost).effect is None
    between = config(2, era=2, k=2, level=2)
    assert log.outcome_of(between) == "configured"
    assert log.outcome_of(lost) == "layout_fenced"


def test_10_9_partition_0_ends_an_open_change_before_the_next_fence():
    log, *_ = source_log()
    assert log.outcome_of(layout_fence(4, 2, generation=3, era=3)) == "busy"
    assert log.outcome_of(layout_final()) == "layout_final"
    assert log.outcome_of(layout_fence(4, 2, generation=3, era=3)) == "layout_fenced"


def test_10_6_a_lock_or_an_unresolved_verdict_delays_final_and_fence():
    """Their home is that of the count before the fence."""
    name = next(n for n in "abcdefgh" if home_partition(n, partition_count=2) == 1)
    stays = next(
        key
        for key in (Key(name, "t", number) for number in range(99))
        if place_of(key, partition_count=2) == place_of(key, partition_count=4) == 1
    )
    for is_staged in (True, False):
        log = Log(1, k=2, level=2)
        log.append(release(log.claimed(key=stays), key=stays))
        log.append(pause(START_MS + 9, group=name))
        record = stage((stays.partition, 5)) if is_staged else decide()
        log.append(msgspec.structs.replace(record, group_id=name))
        assert log.outcome_of(layout_fence(4, 2)) == "layout_fenced"
        for _ in range(2):
            assert log.outcome_of(layout_final()) == "busy"
            assert log.outcome_of(layout_fence(8, 4, generation=3, era=3)) == "busy"
        log.append(resolve(commit=not is_staged, group=name))
        assert log.outcome_of(layout_final()) == "layout_final"
