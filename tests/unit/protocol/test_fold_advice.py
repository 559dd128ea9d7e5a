"""Advice: Plans, offers of keys and directives (PROTOCOL 9.2, 9.4, 9.7).

Clause 9.2 has its tests in tests/spec; here is what members remember of Plans.
"""

import pytest
from logkit import (
    INC,
    INC_AGAIN,
    KEY,
    MOVES,
    OP,
    SECRET,
    START_MS,
    H,
    Log,
    beat,
    claim,
    direct,
    fence,
    hashed,
    ident,
    member,
    offer,
    pause,
    planned,
    ready,
    release,
    resets,
    resume,
    stage,
    target_log,
)

from kafka_marshal.protocol import fold_advice
from kafka_marshal.protocol.fold_advice import FOLDS, WITHIN_MS_MAX
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.items import Offer, StandingDirective
from kafka_marshal.protocol.records import KINDS, SECOND_LEVEL
from kafka_marshal.protocol.snapshot import bytes_max, digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import DIRECTIVES_MAX, WorldState
from kafka_marshal.protocol.types import Key

SOON = START_MS + 100
ALL = "marshal"


def a_log(**settings):
    return Log(level=SECOND_LEVEL, **settings)


def in_force(log, group="g"):
    found = log.state.groups.get(group)
    return () if found is None else found.directives


def test_all_kinds_of_the_module_have_its_level():
    levels = {kind.record: kind.level for kind in KINDS}
    assert {levels[record] for record in FOLDS} == {SECOND_LEVEL}


def test_a_directive_names_a_client_until_its_end():
    log = a_log()
    plain = digest(log.state)
    transition = log.one(direct("c1", until=SOON, seq=3))
    assert (transition.outcome, transition.effect) == ("accepted", "directed")
    assert in_force(log) == (
        StandingDirective(OP, "admin", ident("admin"), 3, SOON, "c1", None, "drain"),
    )
    assert digest(log.state) != plain
    assert log.state.action_for(("g", "c1"), host="") == "drain"
    assert log.state.action_for(("g", "c2"), host="c1") is None
    assert log.state.action_for(("h", "c1"), host="") is None
    log.append(member("c9"), at=SOON - 1)
    assert in_force(log)
    log.append(member("c9", seq=1), at=SOON)
    assert not in_force(log)
    assert not log.state.directed
    assert log.state.action_for(("g", "c1"), host="") is None
    assert log.outcome_of(direct()) == "op_over"


def test_a_host_names_who_announced_it_in_every_group():
    log = a_log()
    assert log.outcome_of(direct(host="m1", group=ALL)) == "directed"
    assert log.state.action_for(("g", "c1"), host="m1") == "drain"
    assert log.state.action_for(("h", "c2"), host="m1") == "drain"
    assert log.state.action_for(("g", "c1"), host="m2") is None
    assert log.state.action_for(("g", "m1"), host="") is None, "a host is no client"


def test_drain_outdoes_cordon():
    log = a_log()
    log.append(direct(host="m1", group=ALL, action="cordon"))
    assert log.state.action_for(("g", "c1"), host="m1") == "cordon"
    log.append(direct(op=ident("other")))
    assert log.state.action_for(("g", "c1"), host="m1") == "drain"


def test_a_claim_is_judged_as_without_it():
    log = a_log()
    log.append(direct("c1"))
    epoch = log.claimed()
    assert log.outcome_of(release(epoch, 5)) == "released"
    assert log.outcome_of(claim("c1")) == "claimed"
    assert log.key(KEY).position == 5


def test_a_directive_lasts_no_longer_than_a_pause():
    log = a_log(max_pause_ms=50)
    log.append(direct())
    assert in_force(log)[0].until_ms == START_MS + 50


def test_its_operation_changes_and_ends_it():
    log = a_log()
    log.append(direct(until=SOON))
    assert log.outcome_of(direct(until=SOON + 7, seq=1)) == "directed"
    assert in_force(log)[0].until_ms == SOON + 7
    other = ident("again")
    assert log.outcome_of(direct(until=SOON, inc=other)) == "directed"
    assert in_force(log)[0].until_ms == SOON
    # Who ends it need not know what it asked for.
    ends = direct(host="elsewhere", until=0, inc=other, seq=1)
    assert log.outcome_of(ends) == "directive_ended"
    assert not in_force(log)
    assert log.outcome_of(direct(until=0, inc=other, seq=2)) == "op_over"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        pytest.param(direct(action="cordon", seq=1), "busy", id="other action"),
        pytest.param(direct("c2", seq=1), "busy", id="other client"),
        pytest.param(direct(host="m1", seq=1), "busy", id="host"),
        pytest.param(direct(seq=0), "old_seq", id="repeated"),
        pytest.param(direct(until=0, seq=0), "old_seq", id="overtaken end"),
        pytest.param(direct(until=0, op=ident("no")), "expired", id="unknown"),
    ],
)
def test_what_an_operation_cannot_do(record, reason):
    log = a_log()
    log.append(direct())
    before = to_bytes(log.state)
    assert log.one(record).reason == reason
    assert in_force(log)[0].action == "drain"
    assert len(to_bytes(log.state)) == len(before)


def test_only_the_home_takes_those_of_a_group():
    log = Log(partition=1, level=SECOND_LEVEL, k=2)
    reasons = {log.outcome_of(direct(group=group)) for group in "abcdefgh"}
    assert reasons == {"directed", "wrong_partition"}
    assert log.outcome_of(direct(group=ALL)) == "directed"


def test_below_its_level_it_is_ignored():
    log = Log(level=1)
    assert log.outcome_of(direct()) == "level"


def test_a_group_too_many():
    log = a_log(groups=1)
    log.claimed()
    assert log.outcome_of(direct(group="h")) == "limits"
    assert log.outcome_of(direct(group="g")) == "directed"


def test_there_are_no_more_than_so_many():
    log = a_log()
    for number in range(DIRECTIVES_MAX):
        assert log.outcome_of(direct(op=bytes(15) + bytes([number]))) == "directed"
    assert log.outcome_of(direct(op=b"\xff" * 16)) == "limits"
    assert log.outcome_of(direct(op=bytes(16), seq=1)) == "directed"
    assert log.outcome_of(direct(op=b"\xff" * 16, group="h")) == "directed"


def test_a_partition_has_no_more_than_it_remembers_operations():
    log = a_log(operations=1)
    log.append(direct())
    assert log.outcome_of(direct(group="h")) == "limits"
    assert log.outcome_of(direct(until=0, seq=1)) == "directive_ended"
    assert log.outcome_of(direct(group="h")) == "directed"


def test_a_group_with_nothing_else_goes_with_its_memory():
    log = a_log(operations=1)
    log.append(direct(until=SOON))
    log.append(direct(op=ident("b"), group="h", until=SOON), at=SOON)
    assert "g" in log.state.groups
    log.append(direct(op=ident("c"), group="h", until=SOON + 9))
    log.append(member("c9"), at=SOON + 9)
    assert "g" not in log.state.groups, "the younger operation took its place"


def test_a_pause_and_a_directive_do_not_see_each_other():
    log = a_log()
    log.append(pause(SOON, op=ident("pause")))
    log.append(direct(until=SOON + 5))
    log.append(member("c9"), at=SOON)
    group = log.state.groups["g"]
    assert (group.pause, len(group.directives)) == (None, 1)


def test_the_largest_directives_fit_the_bound():
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


def test_an_offer_changes_nothing_else():
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


def test_an_offer_lasts_an_hour_at_most():
    log, _ = offered(within_ms=WITHIN_MS_MAX + 1)
    assert log.key().offer.until_ms == START_MS + WITHIN_MS_MAX


def test_a_later_offer_replaces_it_and_its_ready():
    log, epoch = offered()
    log.append(ready(epoch))
    assert log.outcome_of(offer(epoch, "c3")) == "offered"
    assert log.key().offer[0::3] == ("c3", None)
    assert log.outcome_of(offer(epoch, None)) == "offer_withdrawn"
    assert log.key().offer is None


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"client": "c3"}, "not_owner"),
        ({"inc": INC_AGAIN}, "not_owner"),
        ({"key": Key("g", "t", 1)}, "not_owner"),
        ({"epoch": 0}, "old_epoch"),
    ],
)
def test_only_the_owner_offers(wrong, reason):
    log, epoch = held()
    transition = log.one(offer(**({"epoch": epoch} | wrong)))
    assert (transition.outcome, transition.reason) == ("ignored", reason)
    assert log.key().offer is None


def test_a_fenced_owner_and_a_paused_group_offer_nothing():
    log, epoch = held()
    log.append(pause(START_MS + 9 * H))
    assert log.outcome_of(offer(epoch)) == "paused"
    log.append(fence())
    assert log.outcome_of(offer(epoch)) == "sender_fenced"
    assert log.key().offer is None


def test_below_the_level_both_are_ignored():
    log = Log(level=1)
    epoch = log.claimed()
    assert log.outcome_of(offer(epoch)) == "level"
    assert log.outcome_of(ready(epoch)) == "level"


def test_ready_notes_who_and_changes_nothing_else():
    log, epoch = offered()
    transition = log.one(ready(epoch), after=3)
    assert (transition.outcome, transition.effect) == ("accepted", "ready")
    known = log.key()
    assert known.offer.ready == C2
    assert (known.owner.client_id, known.epoch) == ("c1", epoch)
    assert (known.renewed_ms, known.active_ms) == (START_MS, START_MS + 3)
    assert log.outcome_of(ready(epoch, inc=INC_AGAIN)) == "ready"
    assert log.key().offer.ready == INC_AGAIN


def test_the_order_of_refusals_of_ready():
    log, epoch = held()
    log.append(offer(epoch, within_ms=50))
    log.append(pause(START_MS + 9 * H))
    log.append(fence("c2"))
    log.append(fence("c3"))
    assert log.outcome_of(ready(epoch + 1, client="c3"), after=50) == "old_epoch"
    assert log.outcome_of(ready(epoch, client="c3")) == "not_successor"
    assert log.outcome_of(ready(epoch)) == "late"
    assert log.outcome_of(pause(0, seq=9)) == "unpaused"
    log.append(offer(epoch))
    assert log.outcome_of(ready(epoch)) == "sender_fenced"
    log.append(pause(START_MS + 9 * H, op=ident("again")))
    assert log.outcome_of(ready(epoch, inc=INC_AGAIN)) == "paused"
    assert log.outcome_of(ready(epoch, key=Key("g", "t", 9))) == "old_epoch"


def test_ready_without_an_offer():
    log, epoch = held()
    assert log.outcome_of(ready(epoch)) == "no_offer"


def test_an_offer_counts_until_just_before_its_end_and_stays():
    log, epoch = offered(within_ms=50)
    assert log.outcome_of(ready(epoch), after=49) == "ready"
    assert log.outcome_of(ready(epoch), after=1) == "late"
    assert log.key().offer.ready == C2


def test_an_offer_refuses_nobodys_claim():
    log, epoch = offered(within_ms=WITHIN_MS_MAX)
    log.append(ready(epoch))
    assert log.outcome_of(claim("c3"), after=2 * H) == "held"
    assert log.outcome_of(claim("c3"), after=1) == "claimed"


ENDS = {
    "release": lambda log, epoch: log.append(release(epoch, successor="c2")),
    "resume": lambda log, epoch: log.append(resume(epoch)),
    "claim": lambda log, _: log.append(claim("c3"), after=2 * H + 1),
    "stage": lambda log, _: [
        log.append(pause(START_MS + 9 * H), after=2 * H + 1),
        log.append(stage((0, 8), op=OP)),
    ],
}


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_a_claim_ends_its_offer(name):
    log, epoch = offered(within_ms=WITHIN_MS_MAX)
    assert log.key().offer is not None
    ENDS[name](log, epoch)
    assert log.key().offer is None
    assert log.key().owner is None or log.key().epoch > epoch
    assert to_bytes(from_bytes(to_bytes(log.state))) == to_bytes(log.state)


def test_a_reset_takes_offers_back():
    log, epoch = offered(within_ms=WITHIN_MS_MAX)
    value, before = to_bytes(log.state), digest(log.state)
    log.append(ready(epoch))
    (record,) = resets(value, before, bytes_max=10_000)
    assert log.outcome_of(record) == "reset"
    assert log.key().offer is None


def test_state_read_back_knows_its_offers():
    log, epoch = offered()
    log.append(ready(epoch))
    back = from_bytes(to_bytes(log.state))
    assert back == log.state
    assert digest(back) == digest(log.state)


def test_a_key_without_an_offer_keeps_its_digest():
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
    monkeypatch.setattr(fold_advice, "PLAN_RECORDS_MAX", 2)
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
