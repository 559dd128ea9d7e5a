"""Directives: who is drained or cordoned, and until when (PROTOCOL 9.7)."""

import pytest
from logkit import (
    INC,
    KEY,
    OP,
    START_MS,
    Log,
    claim,
    direct,
    ident,
    member,
    pause,
    release,
)

from kafka_marshal.protocol.fold_directives import FOLDS
from kafka_marshal.protocol.items import StandingDirective
from kafka_marshal.protocol.records import KINDS, SECOND_LEVEL
from kafka_marshal.protocol.snapshot import bytes_max, digest, to_bytes
from kafka_marshal.protocol.state import DIRECTIVES_MAX

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
