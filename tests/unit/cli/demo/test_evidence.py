"""Evidence from the log: claims, grants, takeovers and findings."""

import pytest
from logkit import KEY, H, Log, beat, claim, messages, release

from kafka_marshal import Key
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.types import OffsetRange
from kafka_marshal_cli.demo import evidence
from kafka_marshal_cli.demo.evidence import Evidence, LogEvidence, epoch_of, place_of
from kafka_marshal_cli.demo.journal import Line

OTHER = Key("other", "t", 0)


def of(log):
    return LogEvidence.of(((0, entry) for entry in log.entries), "g")


def test_the_log_gives_claims_with_endings_grants_and_takeovers():
    log = Log()
    log.claimed(key=OTHER)
    one = log.claimed("a")
    log.append(messages(one, 0, 4, client="a"))
    log.append(messages(one, 0, 2, client="a"))  # grants nothing more
    log.append(release(one, 5, client="a"))
    two = log.claimed("b")
    log.append(beat(two, 7, client="b"), after=H)
    three = log.one(claim("c", expected=two), after=2 * H + 1).epoch
    found = of(log)
    assert [(each.client_id, each.ending) for each in found.claims] == [
        ("a", "released"),
        ("b", "taken_over"),
        ("c", "open"),
    ]
    assert [place_of(each) for each in found.claims] == [(0, one), (0, two), (0, three)]
    assert [each.start_position for each in found.claims] == [None, 5, 7]
    assert found.grants == {(0, one): [OffsetRange(0, 5)]}
    assert found.findings == ()
    ((before, after, took_ms),) = [
        (each.before, each.after, each.took_ms) for each in found.takeovers()
    ]
    assert (before, after) == found.claims[1:]
    assert took_ms == 2 * H + 1


def test_violations_of_invariants_are_findings(monkeypatch):
    def spoil(world, entry):
        transitions = apply(world, entry)
        if transitions[0].effect == "renewed":
            world.keys[KEY].owner = ("nobody", b"")
        return transitions

    monkeypatch.setattr(evidence, "apply", spoil)
    log = Log()
    log.append(beat(log.claimed(), 5))
    (found,) = of(log).findings
    assert found.startswith("S1: offset 2: ")


@pytest.mark.parametrize("has_journal", [True, False])
def test_uncommitted_records_are_the_rest_of_the_last_batch(has_journal):
    log = Log()
    assert log.claimed("a") == 1
    (held,) = of(log).claims
    lines = (
        Line(at=1, kind="batch", partition=0, offset=0, last=4, token="7.0.1"),
        *(
            Line(at=2, kind="record", partition=0, offset=offset, token="7.0.1")
            for offset in range(5)
        ),
        Line(at=3, kind="batch", partition=1, offset=0, last=9, token="7.0.1"),
        Line(at=4, kind="batch", partition=0, offset=5, last=9, token="7.0.1"),
        Line(at=5, kind="record", partition=0, offset=5, token="7.0.1"),
        Line(at=6, kind="batch", partition=0, offset=50, last=99, token="7.0.30"),
    )
    found = evidence_of({"a": lines} if has_journal else {})
    assert found.uncommitted_count(held) == (4 if has_journal else 0)


def test_the_epoch_is_the_last_part_of_a_token():
    assert epoch_of("1790000000.4.17") == 17
    assert epoch_of("") == -1


def evidence_of(journals):
    return Evidence(
        delivery="alo",
        produced={},
        journals=journals,
        log=LogEvidence(),
        killed=None,
        pause=None,
        heartbeat_interval_ms=1,
        jitter_ms=1,
        round_trip_ms=1,
        batch=1,
    )
