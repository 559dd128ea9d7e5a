"""PROTOCOL 1: the ground rules, as far as the core alone can show them."""

import ast
from pathlib import Path

import pytest
from logkit import START_MS, H, Log, beat, claim, config, fold, release

import kafka_marshal.protocol
from kafka_marshal.protocol.snapshot import digest, to_bytes
from kafka_marshal.protocol.state import RING_VALUE_BYTES

CORE = Path(kafka_marshal.protocol.__file__).parent


def test_1_1_the_world_is_a_fold_of_the_entries_alone():
    log = Log()
    log.append(release(log.claimed(), 5))
    assert to_bytes(fold(log.entries)) == to_bytes(log.state)


@pytest.mark.parametrize("module", sorted(CORE.glob("*.py")), ids=lambda m: m.stem)
def test_1_1_the_core_imports_no_clock_random_or_system_module(module):
    imported = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert not imported & {"time", "datetime", "random", "secrets", "os", "socket"}


def test_1_2_h_and_limits_come_from_the_config_in_the_log():
    log = Log(h=10, span=2)
    log.claimed()
    assert log.outcome_of(claim("c2"), after=21) == "claimed"
    assert digest(Log(h=10).state) != digest(Log(h=11).state)
    assert digest(Log(span=1).state) != digest(Log(span=2).state)


def test_1_3_a_claim_is_judged_at_its_own_append():
    log = Log()
    log.claimed()
    # The claim was due when it was sent, but the owner's beat was appended first.
    log.append(beat(1), after=2 * H + 1)
    assert log.outcome_of(claim("c2")) == "held"


def test_1_4_a_late_append_is_judged_like_any_other():
    log = Log()
    log.claimed("c2")
    late = log.one(claim("c1"), after=5)
    assert (late.reason, log.key().owner.client_id) == ("held", "c2")


@pytest.mark.parametrize("value", [None, b"", b"\xff" * 100, b"\x01\x07\x00\x90"])
def test_1_5_an_undecodable_record_moves_the_clock_and_nothing_else(value):
    log = Log()
    log.claimed()
    quiet = fold(log.entries)
    assert log.outcome_of(value, after=7) == "undecodable"
    assert log.state.now_ms == START_MS + 7
    assert (log.state.keys, log.state.groups) == (quiet.keys, quiet.groups)
    assert log.state.config == config()
    (noted,) = log.state.soft.undecodable
    assert noted.head == (value or b"")[:RING_VALUE_BYTES]
    assert log.state.soft.counters["undecodable"] == 1
