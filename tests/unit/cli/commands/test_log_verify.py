"""The verifier accepts sound logs and names each violated invariant."""

import msgspec
import pytest
from logkit import (
    H,
    Log,
    claim,
    config,
    forgetting,
    messages,
    release,
    resets,
    sound_log,
)

from kafka_marshal.protocol.snapshot import digest, to_bytes
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key
from kafka_marshal_cli.commands import log_verify
from kafka_marshal_cli.commands.log_verify import FINDINGS_MAX, Verifier


def verified(log, split=4, chunk_max=3, run_max=5):
    verifier = Verifier(
        begun=WorldState(log.state.partition), split=split, chunk_max=chunk_max
    )
    for start in range(0, len(log.entries), run_max):
        run = log.entries[start : start + run_max]
        for entry in run:
            verifier.fold(entry)
        verifier.repeat(run)
    return verifier.finish()


@pytest.mark.parametrize("split", range(16))
@pytest.mark.parametrize("chunk_max", [1, 2, 100])
@pytest.mark.parametrize("run_max", [1, 5, 100])
def test_a_sound_log_is_ok(split, chunk_max, run_max):
    log = sound_log()
    result = verified(log, split, chunk_max, run_max)
    assert result["findings"] == []
    assert (result["result"], result["undecodable_count"]) == ("ok", 1)
    assert result["next_offset"] == result["entries_count"] == len(log.entries)


def test_an_empty_partition_is_ok():
    result = Verifier(begun=WorldState(3), split=0).finish()
    assert (result["result"], result["entries_count"]) == ("ok", 0)


@pytest.mark.parametrize("split", [0, 1, 9])
def test_a_halted_partition_is_reported(split):
    log = Log()
    log.append(config(2, era=2, level=9))
    log.append(claim())
    assert verified(log, split)["result"] == "halted"


@pytest.mark.parametrize("split", [0, 5, 7, 9])
def test_a_reset_to_an_earlier_state_is_no_finding(split):
    log = Log(level=2)
    epoch = log.claimed()
    value, expected_digest = to_bytes(log.state), digest(log.state)
    log.append(messages(epoch, 0, 30))
    log.claimed("c2", key=Key("g", "t", 1))
    for record in resets(value, expected_digest):
        log.append(record)
    log.append(b"", after=1)
    log.append(b"", after=3 * H)
    log.append(messages(log.claimed("c2"), 0, 9, client="c2"))
    assert log.key().granted == 10
    assert verified(log, split)["findings"] == []


def test_a_claim_of_a_key_forgotten_by_age_is_no_finding():
    log = Log(forget_ms=1)
    log.append(release(log.claimed(), 50))
    log.append(b"", after=10)
    log.claimed()
    assert verified(log)["findings"] == []


def doctored(monkeypatch, change):
    """Make the first fold wrong: ``change`` may replace each transition."""
    real = log_verify.apply

    def apply(state, entry):
        return tuple(change(state, each) or each for each in real(state, entry))

    monkeypatch.setattr(log_verify, "apply", apply)


def test_overlapping_grants_are_a_finding(monkeypatch):
    def change(state, each):
        if each.effect == "granted":
            return msgspec.structs.replace(each, detail={"first": 5, "last": 9})
        return None

    doctored(monkeypatch, change)
    (first, *_) = verified(sound_log())["findings"]
    assert first.startswith("S3: offset 5: ")


def test_two_folds_that_differ_are_a_finding(monkeypatch):
    monkeypatch.setattr(log_verify, "replay", lambda state, entries: None)
    result = verified(sound_log())
    assert result["result"] == "broken"
    assert result["findings"][-1].startswith("S2: ")


def test_a_snapshot_that_changes_when_restored_is_a_finding(monkeypatch):
    values = iter([b"one", b"two"])
    monkeypatch.setattr(log_verify, "to_bytes", lambda state: next(values))
    monkeypatch.setattr(log_verify, "from_bytes", lambda value: WorldState(0))
    assert any(f.startswith("S5: ") for f in verified(Log())["findings"])


def test_the_number_of_findings_is_bounded(monkeypatch):
    def change(state, each):
        if each.effect == "granted":
            return msgspec.structs.replace(each, detail={"first": 1, "last": 0})
        return None

    doctored(monkeypatch, change)
    log = Log()
    epoch = log.claimed()
    for last in range(FINDINGS_MAX + 5):
        log.append(messages(epoch, last, last))
    assert len(verified(log)["findings"]) == FINDINGS_MAX


def test_a_grant_of_a_forgotten_key_is_no_finding():
    log = Log(level=2)
    epoch = log.claimed()
    log.append(messages(epoch, 0, 9))
    log.append(release(epoch))
    log.append(forgetting(epoch))
    log.append(messages(log.claimed("c2"), 0, 9, client="c2"))
    assert verified(log)["findings"] == []
