"""Actions of admins, each joined from the records that they wrote."""

import msgspec
import pytest
from author import write_log
from changekit import Change, group_at
from logkit import (
    CREATE_TIME,
    KEY,
    OP,
    START_MS,
    H,
    Log,
    beat,
    claim,
    config,
    decide,
    direct,
    fence,
    forgetting,
    growth,
    ident,
    imported_settings,
    layout_fence,
    layout_groups,
    member,
    pause,
    planned,
    release,
    resets,
    resolve,
    schedule,
    settings,
    stage,
)

from kafka_marshal.history import actions as actions_of
from kafka_marshal.history.actions import ActionLog
from kafka_marshal.history.admin_records import GROW, RESIZE, is_of_admin
from kafka_marshal.history.wording import action_to_object, outcome_of
from kafka_marshal.protocol.codec import decode, person_to_tags
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import SECOND_LEVEL, SUPPORTED_LEVEL
from kafka_marshal.protocol.snapshot import digest, to_bytes
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key

UNTIL = START_MS + 50_000
UNTIL_AT = "1970-01-01T00:17:30.000Z"
OTHER_OP = ident("other op")
OTHER = Key("g", "t", 1)


class Bench:
    """Logs of some coordinating partitions, and the actions collected from them."""

    def __init__(self, count=1, *, group_id=None, **settings):
        self.actions_log = ActionLog(group_id)
        self.logs = [Log(n, configured=False) for n in range(count)]
        for number in range(count):
            self.append(config(k=count, **settings), t=number)

    def append(self, record, *, t=0, **where):
        log = self.logs[t]
        transitions = log.append(record, **where)
        entry = log.entries[-1]
        self.actions_log.take(log.state, entry, transitions=transitions)
        return entry.offset

    def all(self, **now_ms):
        """Return the actions after the format."""
        return self.actions_log.actions(**now_ms)[1:]

    def one(self, **now_ms):
        (action,) = self.all(**now_ms)
        return action


def replaced(record, **fields):
    return msgspec.structs.replace(record, **fields)


# --- pauses


def test_a_pause_in_all_partitions_with_its_renewals_is_one_action():
    bench = Bench(3)
    tags = person_to_tags("alice")
    for t in range(3):
        bench.append(replaced(pause(UNTIL), reason="deploy", tags=tags), t=t)
    for t in range(3):
        bench.append(pause(UNTIL + 9, seq=1), t=t, after=1)
    action = bench.one()
    assert (action.kind, action.group_id, action.op_id) == ("pause", "g", OP)
    assert (action.outcome, action.refusals) == ("accepted", {})
    assert (action.first.client_id, action.first.person) == ("admin", "alice")
    assert (action.reason, action.until_ms) == ("deploy", UNTIL + 9)
    assert (action.renewals_count, action.records_count) == (3, 6)
    assert (action.lasting, action.ended) == ((0, 1, 2), None)
    assert outcome_of(action) == (
        "accepted until 1970-01-01T00:17:30.009Z, renewed 3 times; still in force"
    )


def test_a_pause_that_another_person_renews_names_both():
    bench = Bench(2)
    first = replaced(pause(UNTIL), tags=person_to_tags("alice"))
    other = replaced(pause(UNTIL + 9, client="eve"), tags=person_to_tags("bob"))
    for record in (first, other):
        for t in range(2):
            bench.append(record, t=t, after=1)
    action = bench.one()
    assert (action.first.person, action.renewed_by) == ("alice", "bob")
    assert "renewed 2 times, last by bob; still in force" in outcome_of(action)
    assert action_to_object(action)["renewed_by"] == "bob"


def test_a_resume_is_an_action_and_ends_the_pause():
    bench = Bench(2)
    for t in range(2):
        bench.append(pause(UNTIL), t=t)
    tags = person_to_tags("bob")
    for t in range(2):
        end = replaced(pause(0, client="eve"), reason="done", tags=tags)
        bench.append(end, t=t, after=5)
    paused, resumed = bench.all()
    assert (resumed.kind, resumed.outcome) == ("resume", "accepted")
    assert (resumed.first.client_id, resumed.reason) == ("eve", "done")
    assert resumed.records_count == 2
    ended = paused.ended
    assert (ended.how, ended.client_id, ended.person) == ("resumed", "eve", "bob")
    assert paused.lasting == ()
    assert outcome_of(paused) == (
        f"accepted until {UNTIL_AT}; resumed by eve (bob) at 1970-01-01T00:16:40.005Z"
    )
    assert outcome_of(resumed) == "accepted"


def test_a_pause_ends_by_expiry():
    bench = Bench()
    bench.append(pause(START_MS + 10))
    offset = bench.append(beat(0), after=10)
    action = bench.one()
    assert (action.ended.how, action.ended.offset) == ("expired", offset)
    assert outcome_of(action).endswith("; ended by expiry at 1970-01-01T00:16:40.010Z")


def test_the_outcome_shows_the_time_of_expiry_not_of_the_next_record():
    """In an idle partition the next record follows long after the expiry."""
    bench = Bench()
    bench.append(pause(START_MS + 10))
    bench.append(beat(0), after=200_000)
    action = bench.one()
    assert action.ended.at_ms == START_MS + 200_000
    assert outcome_of(action).endswith("; ended by expiry at 1970-01-01T00:16:40.010Z")


def test_a_resume_at_the_time_of_expiry_is_refused():
    bench = Bench()
    bench.append(pause(START_MS + 10))
    bench.append(pause(0, seq=1, client="eve"), after=10)
    paused, resumed = bench.all()
    assert paused.ended.how == "expired"
    assert (resumed.outcome, resumed.refusals) == ("refused", {"op_over": 1})


def test_a_pause_expires_although_another_one_follows():
    bench = Bench()
    bench.append(pause(START_MS + 10))
    bench.append(pause(UNTIL, op=OTHER_OP), after=10)
    first, second = bench.all()
    assert (first.ended.how, second.ended) == ("expired", None)


def test_a_pause_expires_by_the_clock_of_the_reader():
    bench = Bench()
    bench.append(pause(UNTIL))
    assert bench.one(elapsed={0: UNTIL - 1}).lasting == (0,)
    action = bench.one(elapsed={0: UNTIL})
    assert (action.ended.how, action.ended.offset) == ("expired", None)
    assert action.ended.at_ms == UNTIL


def test_a_pause_that_was_resumed_in_one_partition_lasts_in_another():
    bench = Bench(2)
    for t in range(2):
        bench.append(pause(UNTIL), t=t)
    bench.append(pause(0, seq=1), t=1)
    assert (bench.all()[0].ended, bench.all()[0].lasting) == (None, (0,))


def test_a_pause_may_be_refused_in_some_or_all_partitions():
    bench = Bench(2)
    bench.append(pause(UNTIL, op=OTHER_OP), t=1)
    for t in range(2):
        bench.append(pause(UNTIL), t=t, after=1)
    _, partial = bench.all()
    assert (partial.outcome, partial.refusals) == ("partial", {"busy": 1})
    assert outcome_of(partial).startswith(
        "accepted in some coordinating partitions only (refused: busy 1x) until"
    )
    bench.append(pause(UNTIL, group="h", op=OTHER_OP))
    bench.append(pause(UNTIL, group="h", op=ident("late")), after=1)
    refused = bench.all()[-1]
    assert (refused.outcome, refused.refusals) == ("refused", {"busy": 1})
    assert outcome_of(refused) == "refused (refused: busy 1x)"


def test_an_action_whose_expired_record_is_repeated_is_not_partial():
    bench = Bench()
    bench.append(pause(START_MS - 1))
    bench.append(pause(UNTIL, seq=1), after=1)
    action = bench.one()
    assert (action.outcome, action.refusals) == ("accepted", {"expired": 1})


def test_entries_with_create_time_do_not_expire_a_pause():
    bench = Bench()
    bench.append(pause(START_MS + 10))
    bench.append(pause(0, seq=1), at=START_MS + 99, kind=CREATE_TIME)
    assert bench.all()[0].ended.how == "resumed"


# --- scheduled pauses

BEGIN = START_MS + 10_000


def test_a_scheduled_pause_begins_and_ends_without_a_record():
    bench = Bench(2, level=SECOND_LEVEL)
    for t in range(2):
        bench.append(replaced(schedule(BEGIN, UNTIL), reason="sunday"), t=t)
    action = bench.one()
    assert (action.kind, action.outcome, action.reason) == (
        *("pause", "accepted"),
        "sunday",
    )
    assert (action.begin_ms, action.until_ms) == (BEGIN, UNTIL)
    assert (action.scheduled, action.lasting, action.ended) == ((0, 1), (), None)
    assert outcome_of(action) == (
        f"accepted from 1970-01-01T00:16:50.000Z until {UNTIL_AT}; not begun yet"
    )
    bench.append(b"?", at=BEGIN)
    assert (bench.one().scheduled, bench.one().lasting) == ((1,), (0,))
    bench.append(b"?", t=1, at=BEGIN)
    assert outcome_of(bench.one()).endswith("; still in force")
    for t in range(2):
        offset = bench.append(b"?", t=t, at=UNTIL)
    ended = bench.one().ended
    assert (ended.how, ended.offset) == ("expired", offset)


def test_a_resume_cancels_a_scheduled_pause():
    bench = Bench(level=SECOND_LEVEL)
    bench.append(schedule(BEGIN, UNTIL))
    bench.append(pause(0, seq=1, client="eve"), after=1)
    paused, resumed = bench.all()
    assert (paused.ended.how, paused.ended.client_id) == ("resumed", "eve")
    assert (paused.scheduled, resumed.kind) == ((), "resume")


def test_a_scheduled_pause_may_expire_before_it_can_begin():
    bench = Bench(level=SECOND_LEVEL)
    bench.append(pause(UNTIL + 9, op=OTHER_OP))
    bench.append(schedule(BEGIN, UNTIL), after=1)
    bench.append(schedule(UNTIL, UNTIL + 99, op=ident("next")), after=1)
    bench.append(b"?", at=UNTIL + 9)
    lasting, never, begun = bench.all()
    assert lasting.ended.how == never.ended.how == "expired"
    assert begun.lasting == (0,)


def test_a_scheduled_pause_expires_by_the_clock_of_the_reader():
    bench = Bench(level=SECOND_LEVEL)
    bench.append(schedule(BEGIN, UNTIL))
    assert bench.one(elapsed={0: UNTIL}).ended.how == "expired"
    assert bench.one(elapsed={0: UNTIL - 1}).scheduled == (0,)


def test_a_pause_scheduled_before_a_checkpoint_is_no_action():
    log = Log(level=SECOND_LEVEL)
    log.append(schedule(BEGIN, UNTIL))
    found = ActionLog()
    found.begin(log.state)
    transitions = log.append(b"?", at=BEGIN)
    found.take(log.state, log.entries[-1], transitions=transitions)
    assert found.actions() == []
    transitions = log.append(pause(0, seq=1))
    found.take(log.state, log.entries[-1], transitions=transitions)
    assert [a.kind for a in found.actions()] == ["resume"]


# --- positions


def staged(bench):
    epoch = bench.append(claim())
    bench.append(release(epoch, 9))
    bench.append(pause(UNTIL))
    bench.append(replaced(stage((0, 4)), tags=person_to_tags("alice")))


def test_a_committed_set_position_is_one_action():
    bench = Bench(level=SECOND_LEVEL)
    staged(bench)
    assert bench.one().outcome == "open"
    bench.append(decide())
    bench.append(replaced(resolve(commit=True, client="c7"), reason="replay"))
    action = bench.one()
    assert (action.kind, action.outcome) == ("reset", "committed")
    assert action.records_count == 4
    (key,) = action.keys
    assert (key.key, key.position, key.before) == (KEY, 4, 9)
    assert key.outcome == "position_set"
    assert action.ended.client_id == "c7"
    assert outcome_of(action) == "committed: 1 position_set"


def test_an_aborted_set_position_unlocks_its_keys():
    bench = Bench(level=SECOND_LEVEL)
    staged(bench)
    bench.append(resolve(commit=False))
    action = bench.one()
    assert (action.outcome, action.keys[0].outcome) == ("aborted", "unlocked")


def test_a_pause_that_ends_before_the_commit_aborts_the_reset():
    bench = Bench(level=SECOND_LEVEL)
    staged(bench)
    bench.append(decide(), at=UNTIL)
    action = bench.one()
    assert (action.outcome, action.refusals) == ("aborted", {"op_over": 1})
    assert (action.keys[0].outcome, action.ended.how) == ("staged", "expired")
    assert outcome_of(action) == "aborted (refused: op_over 1x): 1 staged"


def test_a_refused_stage_names_its_keys():
    bench = Bench(level=SECOND_LEVEL)
    bench.append(pause(UNTIL))
    bench.append(stage((0, 4), (1, 5)))
    keys = bench.one().keys
    assert [(each.position, each.outcome) for each in keys] == [
        (4, "unknown_key"),
        (5, "unknown_key"),
    ]


def test_a_set_position_whose_tags_name_an_operation_is_its_undo():
    bench = Bench(level=SECOND_LEVEL)
    staged(bench)
    bench.append(decide())
    bench.append(resolve(commit=True))
    bench.append(pause(UNTIL, op=OTHER_OP), after=1)
    bench.append(stage((0, 9), op=OTHER_OP, tags=person_to_tags("ada", undoes=OP)))
    bench.append(decide(op=OTHER_OP))
    bench.append(resolve(commit=True, op=OTHER_OP))
    first, second = bench.all()
    assert (first.kind, second.kind) == ("reset", "undo")
    assert (second.outcome, second.undoes) == ("committed", OP)
    assert outcome_of(second) == (
        f"committed: 1 position_set, as before operation {OP.hex()}"
    )


def test_a_reset_that_happens_to_set_back_positions_is_no_undo():
    bench = Bench(level=SECOND_LEVEL)
    staged(bench)
    bench.append(decide())
    bench.append(resolve(commit=True))
    bench.append(pause(UNTIL, op=OTHER_OP), after=1)
    bench.append(stage((0, 9), op=OTHER_OP))
    assert [action.kind for action in bench.all()] == ["reset"] * 2


# --- forgetting, resets, Configs


def test_the_keys_that_one_command_forgets_are_one_action():
    bench = Bench()
    epochs = [bench.append(claim(key=key)) for key in (KEY, OTHER)]
    bench.append(release(epochs[0]))
    for key, epoch in zip((KEY, OTHER), epochs, strict=True):
        bench.append(forgetting(epoch, key=key))
    action = bench.one()
    assert (action.kind, action.outcome) == ("forget", "partial")
    assert [each.outcome for each in action.keys] == ["forgotten", "held"]
    bench.append(release(epochs[1], key=OTHER))
    bench.append(forgetting(epochs[1], key=OTHER))
    assert bench.one().outcome == "accepted"
    assert bench.one().op_id is None


def test_forgetting_an_unknown_key_is_refused():
    bench = Bench()
    bench.append(forgetting(1))
    assert (bench.one().outcome, bench.one().refusals) == ("refused", {"cas": 1})


def test_the_fence_of_a_process_in_all_partitions_is_one_action():
    bench = Bench(2, level=SECOND_LEVEL)
    for t in range(2):
        bench.append(fence(reason="hangs"), t=t)
    bench.append(fence("c2"), after=1)
    first, second = bench.all()
    assert (first.kind, first.outcome, first.records_count) == ("fence", "accepted", 2)
    assert (first.reason, first.first.client_id, first.op_id) == (
        *("hangs", "admin"),
        None,
    )
    assert outcome_of(first) == f"accepted: c1, process {ident('c1').hex()}"
    assert second.text.startswith("c2, ")


def test_each_change_of_settings_is_an_action():
    bench = Bench(level=SECOND_LEVEL)
    bench.append(settings(handoff_ms=5, policy="fair", reason="slow"))
    bench.append(settings(2), after=1)
    bench.append(settings(2, admin="admin-2"), after=1)
    first, second, third = bench.all()
    assert (first.kind, first.group_id, first.op_id) == ("settings", "g", None)
    text = "generation 1: policy fair, handoff_ms 5"
    assert (outcome_of(first), first.reason) == (f"accepted: {text}", "slow")
    assert second.text == "generation 2: defaults"
    assert (third.outcome, third.refusals) == ("refused", {"settings_overtaken": 1})


def test_a_drain_of_all_groups_is_one_action_with_its_end():
    bench = Bench(2, group_id="h", level=SECOND_LEVEL)
    for t in range(2):
        one = direct(host="m1", until=UNTIL, group="marshal")
        bench.append(msgspec.structs.replace(one, reason="reboot"), t=t)
    bench.append(direct("c1", until=UNTIL, op=OTHER_OP))
    action = bench.one()
    assert (action.kind, action.group_id, action.op_id) == ("drain", None, OP)
    assert (action.reason, action.until_ms, action.ended) == ("reboot", UNTIL, None)
    assert outcome_of(action) == f"accepted: host m1 until {UNTIL_AT}"
    for t in range(2):
        end = direct(host="m1", until=0, group="marshal", admin="ops", seq=1)
        bench.append(
            msgspec.structs.replace(end, tags=person_to_tags("bob")), t=t, after=1
        )
    action = bench.one()
    assert (action.ended.how, action.ended.client_id) == ("ended", "ops")
    assert (action.outcome, action.records_count) == ("accepted", 4)
    assert "; ended by ops (bob) at 1970" in outcome_of(action)
    assert action_to_object(action)["ended"]["person"] == "bob"


def test_a_refused_cordon_is_an_action():
    bench = Bench(level=SECOND_LEVEL)
    bench.append(direct("c1", until=1, action="cordon"))
    action = bench.one()
    assert (action.kind, action.until_ms) == ("cordon", None)
    assert outcome_of(action) == "refused (refused: expired 1x): client c1"


def test_records_above_the_level_in_force_are_refused_actions():
    bench = Bench(level=1)
    bench.append(fence())
    assert (bench.one().outcome, bench.one().refusals) == ("refused", {"level": 1})


def test_a_reset_concerns_all_groups_and_ends_pauses():
    bench = Bench()
    bench.append(claim())
    parts = resets(to_bytes(bench.logs[0].state), digest(bench.logs[0].state))
    bench.append(pause(UNTIL))
    bench.append(parts[0], after=1)
    paused, reset = bench.all()
    assert (reset.kind, reset.group_id, reset.outcome) == ("state_reset", None, "open")
    for part in parts[1:]:
        bench.append(part)
    paused, reset = bench.all()
    assert (reset.outcome, reset.records_count) == ("accepted", len(parts))
    assert (paused.ended.how, paused.ended.client_id) == ("reset", "admin")
    assert "ended by a Reset by admin at" in outcome_of(paused)


def test_a_reset_with_a_wrong_digest_is_refused():
    bench = Bench()
    for part in resets(b"?", bytes(16).hex()):
        bench.append(part)
    assert bench.one().outcome == "refused"


def test_a_reset_restores_a_pause():
    bench = Bench()
    bench.append(pause(UNTIL))
    parts = resets(to_bytes(bench.logs[0].state), digest(bench.logs[0].state))
    bench.append(pause(0, seq=1))
    for part in parts:
        bench.append(part)
    assert bench.all()[0].lasting == (0,)


def test_a_config_is_a_format_an_upgrade_or_a_change():
    bench = Bench(2)
    for t in range(2):
        bench.append(config(2, era=2, k=2, level=SUPPORTED_LEVEL), t=t, after=1)
    bench.append(config(3, era=3, k=2, h=2 * H, level=SUPPORTED_LEVEL), after=2)
    bench.append(config(9, era=9, k=2), after=3)
    bench.append(config(4, era=4, k=2, level=SUPPORTED_LEVEL + 1), after=4)
    found = bench.actions_log.actions()
    assert [(a.kind, a.outcome, a.records_count) for a in found] == [
        ("format", "accepted", 2),
        ("upgrade", "accepted", 2),
        ("config", "accepted", 1),
        ("config", "refused", 1),
        ("upgrade", "halted", 1),
    ]
    assert outcome_of(found[1]) == (
        "accepted: generation 2, heartbeat interval 1000 ms, feature level 2"
    )
    assert found[1].group_id is None


# --- which records


def test_a_plan_requested_by_a_person_is_an_action():
    """The slices of a plan are one action; a plan that was overtaken is another."""
    bench = Bench(level=SECOND_LEVEL)
    bench.append(planned(0, ("c1", 0, (1,))))
    tags = person_to_tags("ada")
    for seq, follows, number in [(1, 0, 0), (2, 1, 0), (3, 2, 1)]:
        plan = planned(follows, number=number, count=1 if seq == 1 else 2)
        plan = replaced(plan, client_id="admin", seq=seq, tags=tags)
        bench.append(replaced(plan, incarnation=ident("admin")), after=1)
    overtaken, action = bench.all()
    assert (overtaken.kind, overtaken.refusals) == ("rebalance", {"plan_overtaken": 1})
    assert (action.kind, action.group_id, action.op_id) == ("rebalance", "g", None)
    assert (action.first.person, action.records_count) == ("ada", 2)
    assert outcome_of(action) == "accepted: plan 3"


def test_records_of_members_are_no_actions():
    bench = Bench(level=SECOND_LEVEL)
    bench.append(planned(0, ("c1", 0, (1,))))
    epoch = bench.append(claim())
    bench.append(beat(epoch, 1))
    bench.append(member())
    bench.append(b"?")
    assert bench.all() == []
    assert bench.actions_log.records_count == 1


def test_one_group_has_its_own_actions_and_those_on_all_groups():
    bench = Bench(group_id="g")
    bench.append(pause(UNTIL, group="h"))
    bench.append(pause(UNTIL))
    assert [a.group_id for a in bench.actions_log.actions()] == [None, "g"]
    assert bench.actions_log.records_count == 2


def test_a_pause_from_before_a_checkpoint_is_continued():
    log = Log()
    log.append(pause(UNTIL))
    found = ActionLog()
    found.begin(log.state)
    transitions = log.append(pause(UNTIL + 9, seq=1))
    found.take(log.state, log.entries[-1], transitions=transitions)
    (action,) = found.actions()
    assert (action.lasting, action.until_ms) == ((0,), UNTIL + 9)
    transitions = log.append(pause(0, seq=2))
    found.take(log.state, log.entries[-1], transitions=transitions)
    assert [a.kind for a in found.actions()] == ["pause", "resume"]
    assert found.actions()[0].ended.how == "resumed"


def test_a_pause_also_lasts_where_only_a_checkpoint_has_it():
    found = ActionLog()
    logs = [Log(number, k=2) for number in range(2)]
    for log in logs:
        log.append(pause(UNTIL))
        found.begin(log.state)
    transitions = logs[0].append(pause(UNTIL + 9, seq=1))
    found.take(logs[0].state, logs[0].entries[-1], transitions=transitions)
    (action,) = found.actions()
    assert action.lasting == (0, 1)
    logs[1].append(b"?", at=UNTIL)
    found.take(logs[1].state, logs[1].entries[-1], transitions=())
    (action,) = found.actions()
    assert (action.lasting, action.ended) == ((0,), None)


def test_a_pause_whose_records_are_gone_ends_without_an_action():
    log = Log()
    log.append(pause(UNTIL))
    found = ActionLog()
    found.begin(log.state)
    transitions = log.append(b"?", at=UNTIL)
    found.take(log.state, log.entries[-1], transitions=transitions)
    assert found.actions() == []


def test_a_checkpoint_of_an_empty_state_has_no_actions():
    found = ActionLog()
    found.begin(WorldState(0))
    assert found.actions() == []


def test_actions_and_their_records_are_bounded(monkeypatch):
    monkeypatch.setattr(actions_of, "ACTIONS_MAX", 2)
    monkeypatch.setattr(actions_of, "RECORDS_PER_ACTION_MAX", 3)
    bench = Bench()
    for number in range(3):
        bench.append(pause(UNTIL, group=f"g{number}"))
    for seq in range(1, 6):
        last = bench.append(pause(UNTIL + seq, group="g2", seq=seq))
    found = bench.actions_log.actions()
    assert [a.group_id for a in found] == ["g1", "g2"]
    assert bench.actions_log.dropped_count == 2
    assert found[1].records_count == 6
    assert [r.offset for r in found[1].records] == [
        found[1].first.offset,
        last - 1,
        last,
    ]
    assert found[1].until_ms == UNTIL + 5


# --- comparisons with whole logs


def admin_offsets(entries):
    return {
        entry.offset
        for entry in entries
        if entry.value is not None
        and entry.undecodable is None
        and is_of_admin(decode(entry.value))
    }


@pytest.mark.parametrize("seed", range(60))
def test_every_record_of_an_admin_is_part_of_one_action(seed):
    entries, found, world = write_log(seed, 120), ActionLog(), WorldState(0)
    for entry in entries:
        found.take(world, entry, transitions=apply(world, entry))
    offsets = [r.offset for a in found.actions() for r in a.records]
    assert len(offsets) == len(set(offsets)) == found.records_count
    assert set(offsets) == admin_offsets(entries)
    assert sum(a.records_count for a in found.actions()) == found.records_count
    lasting = {(a.group_id, a.op_id) for a in found.actions() if a.lasting and a.op_id}
    assert lasting == {
        (name, pause.op_id)
        for name, group in world.groups.items()
        for pause in group.pauses
    }


def test_the_order_of_partitions_does_not_matter():
    logs = [Log(n, k=3) for n in range(3)]
    for t, log in enumerate(logs):
        log.append(replaced(pause(UNTIL), reason=f"reason {t}"), after=t)
        log.append(pause(0, seq=1), after=t)
        log.append(pause(UNTIL, op=OTHER_OP), after=t)
    results = []
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        found, worlds = ActionLog(), {t: WorldState(t) for t in order}
        for t in order:
            for entry in logs[t].entries:
                transitions = apply(worlds[t], entry)
                found.take(worlds[t], entry, transitions=transitions)
        results.append(found.actions())
    assert results[0] == results[1] == results[2]
    assert [a.reason for a in results[0] if a.kind == "pause"] == ["reason 0", None]


def test_a_pause_of_some_topics_names_them():
    bench = Bench(level=2)
    scope = {"t": (0, 3), "u": ()}
    bench.append(schedule(0, UNTIL, scope=scope))
    bench.append(schedule(0, UNTIL + 1, seq=1, scope=scope))
    bench.append(pause(UNTIL, op=OTHER_OP))
    bench.append(pause(0, seq=2))
    ours, whole = (each for each in bench.all() if each.kind == "pause")
    assert (ours.topics, ours.begin_ms) == (("t:0,3", "u"), None)
    assert (ours.until_ms, ours.ended.how) == (UNTIL + 1, "resumed")
    assert outcome_of(ours).startswith("accepted of t:0,3, u until ")
    assert (whole.topics, whole.lasting) == ((), (0,))


# --- changes of the partition count (PROTOCOL 10)


def resized(change):
    """Return the change of the partition count among the actions of all logs."""
    found = ActionLog("g")
    for log in reversed(change.logs):
        world = WorldState(log.state.partition)
        for entry in log.entries:
            transitions = apply(world, entry)
            found.take(world, entry, transitions=transitions)
    return [each for each in found.actions() if each.kind == RESIZE]


def test_a_change_of_the_partition_count_is_one_action():
    change = Change(2, 4)
    keys = change.moving(3)
    change.claimed(*keys)
    assert resized(change) == []
    change.fence()
    (action,) = resized(change)
    assert (action.outcome, action.group_id, action.op_id) == ("open", None, OP)
    assert outcome_of(action) == (
        "open: from 2 to 4 coordinating partitions; 4 partitions fenced within 0.0 s"
    )
    assert change.logs[0].outcome_of(layout_fence(4, 2)) == "busy"
    change.released(*keys)
    change.tick(1_500)
    change.imported()
    change.done()
    change.tick(500)
    change.final(0)
    assert [each.outcome for each in resized(change)] == ["open"]
    change.final()
    (action,) = resized(change)
    assert action.outcome == "accepted"
    assert action.refusals == {"busy": 1}
    assert outcome_of(action) == (
        "accepted: from 2 to 4 coordinating partitions; 4 partitions fenced within "
        "0.0 s, 3 keys imported within 1.5 s, 2 source and target pairs done within "
        "1.5 s, 4 partitions completed within 2.0 s"
    )
    found = action_to_object(action)
    assert [each["step"] for each in found["steps"]] == [
        "fenced",
        "imported",
        "done",
        "ended",
    ]
    assert found["steps"][1]["first_ms"] - action.first.at_ms == 1_500


def test_settings_that_move_are_a_step_of_the_change():
    change = Change(2, 4)
    group = group_at(0, 2, to_home=2, to_count=4)
    change.logs[0].append(settings(group=group))
    change.fence()
    change.tick(500)
    change.logs[2].append(layout_groups(imported_settings(group)))
    (action,) = resized(change)
    assert "1 settings and directives imported within 0.5 s" in outcome_of(action)


def test_a_refused_change_of_the_partition_count_has_no_steps():
    change = Change(2, 4)
    change.logs[0].append(pause(UNTIL))
    change.logs[0].append(layout_fence(4, 2))
    (action,) = resized(change)
    assert (action.outcome, action.refusals, action.steps) == (
        "refused",
        {"busy": 1},
        (),
    )
    assert outcome_of(action) == (
        "refused (refused: busy 1x): from 2 to 4 coordinating partitions"
    )


# --- growths of data topics


def test_a_growth_is_one_action_of_all_groups():
    bench = Bench(2, group_id="g", level=2)
    tags = person_to_tags("alice")
    bench.append(replaced(growth(8, 4), tags=tags))
    action = bench.one()
    assert (action.kind, action.group_id, action.op_id) == (GROW, None, None)
    assert (action.outcome, action.first.person) == ("open", "alice")
    assert outcome_of(action) == (
        "open: topic t from 4 to 8 partitions; 4 partitions announced within 0.0 s"
    )
    bench.append(replaced(growth(8, 4), client_id="eve"), after=1_000)
    bench.append(growth(8, 4, ends=(1, 2, 3, 4)), after=59_000)
    bench.append(growth(8, 4, ends=(5, 5, 5, 5)), after=1_000)
    action = bench.one()
    assert (action.outcome, action.ended) == ("accepted", None)
    assert (action.refusals, action.records_count) == ({"known": 2}, 4)
    assert outcome_of(action) == (
        "accepted: topic t from 4 to 8 partitions; 4 partitions announced within "
        "0.0 s, 4 partition ends recorded within 60.0 s"
    )
    steps = action_to_object(action)["steps"]
    assert [each["step"] for each in steps] == ["announced", "grown"]


def test_a_growth_that_is_withdrawn_before_it_has_grown_is_aborted():
    bench = Bench(level=2)
    bench.append(growth(8, 4))
    end = replaced(growth(4, 4), client_id="eve", tags=person_to_tags("bob"))
    bench.append(end, after=5)
    action = bench.one()
    assert (action.outcome, action.ended.how) == ("aborted", "withdrawn")
    assert outcome_of(action) == (
        "aborted: topic t from 4 to 8 partitions; 4 partitions announced within "
        "0.0 s; withdrawn by eve (bob) at 1970-01-01T00:16:40.005Z"
    )
    # A growth that is announced later is another one.
    bench.append(growth(12, 4), after=5)
    bench.append(growth(12, 4, ends=(1, 2, 3, 4)), after=5)
    bench.append(growth(4, 4), after=5)
    _, second = bench.all()
    assert (second.outcome, second.ended.how) == ("accepted", "withdrawn")
    assert second.text == "topic t from 4 to 12 partitions"


def test_a_growth_shows_its_reason():
    bench = Bench(level=2)
    bench.append(growth(8, 4, reason="more consumers"))
    bench.append(growth(8, 4, ends=(1, 2, 3, 4)))
    assert bench.one().reason == "more consumers"
    assert bench.one().first.reason == "more consumers"


@pytest.mark.parametrize("count", [4, 6])
@pytest.mark.parametrize("ends", [None, (1, 2, 3, 4)])
def test_a_growth_ends_if_the_topic_is_created_again_and_grown(count, ends):
    bench = Bench(level=2)
    other = growth(8, 4, topic="u", topic_id=ident("1"))
    bench.append(growth(8, 4, topic_id=ident("1")))
    bench.append(other)
    if ends:
        bench.append(growth(8, 4, topic_id=ident("1"), ends=ends))
    later = growth(2 * count, count, topic_id=ident("2"))
    bench.append(replaced(later, client_id="eve", tags=person_to_tags("bob")), after=5)
    first, beside, second = bench.all()
    assert first.outcome == ("accepted" if ends else "aborted")
    assert first.ended.how == "recreated"
    assert outcome_of(first).endswith(
        "; dropped for a later topic of that name by eve (bob) at "
        "1970-01-01T00:16:40.005Z"
    )
    assert (beside.outcome, beside.ended) == ("open", None)
    assert (second.outcome, second.ended) == ("open", None)
    assert second.text == f"topic t from {count} to {2 * count} partitions"


def test_a_growth_ends_with_a_reset_to_a_state_without_it():
    bench = Bench(level=2)
    state = bench.logs[0].state
    parts = resets(to_bytes(state), digest(state))
    bench.append(growth(8, 4))
    for part in parts:
        bench.append(part, after=5)
    first, second = bench.all()
    assert (first.outcome, first.ended.how) == ("aborted", "reset")
    assert (first.ended.client_id, second.kind) == ("admin", "state_reset")


def test_a_growth_that_was_refused_is_an_action_of_its_own():
    bench = Bench(2, level=2)
    bench.append(growth(8, 4))
    bench.append(growth(16, 4, seq=1))
    bench.append(growth(8, 4, seq=2), t=1)
    _, busy, elsewhere = bench.all()
    assert (busy.outcome, busy.refusals) == ("refused", {"busy": 1})
    assert (elsewhere.outcome, elsewhere.refusals) == (
        "refused",
        {"wrong_partition": 1},
    )
    assert outcome_of(busy) == (
        "refused (refused: busy 1x): topic t from 4 to 16 partitions"
    )


def test_a_growth_announced_before_a_checkpoint_shows_its_withdrawal():
    bench = Bench(level=2)
    bench.append(growth(8, 4))
    bench.append(growth(8, 4, ends=(1, 2, 3, 4)))
    world = bench.logs[0].state
    found = ActionLog()
    found.begin(world)
    transitions = bench.logs[0].append(growth(4, 4), after=5)
    found.take(world, bench.logs[0].entries[-1], transitions=transitions)
    (action,) = found.actions()
    assert outcome_of(action) == (
        "accepted: topic t from 4 partitions; withdrawn by admin at "
        "1970-01-01T00:16:40.005Z"
    )
