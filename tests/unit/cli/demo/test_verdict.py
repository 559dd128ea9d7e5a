"""Verdicts about rounds that keep the guarantees and rounds that break one each."""

import attrs
import msgspec
import pytest

from kafka_marshal import Key, Token
from kafka_marshal.history.rows import Interval, Moment
from kafka_marshal.protocol.types import OffsetRange
from kafka_marshal_cli.demo.evidence import Evidence, LogEvidence, Pause
from kafka_marshal_cli.demo.journal import Line
from kafka_marshal_cli.demo.verdict import judge

H = 2_000
BATCH = 5
PAUSE = Pause(asked_at_ms=5_000, drained_at_ms=5_300, ended_at_ms=7_300)

# One partition of 20 records, at least once: worker a processes 0 to 9 and is killed
# at position 6, worker b resumes there, the group is paused, worker c does the rest.
DEAD = {"claimed_ms": 100, "renewed_ms": 600, "ending": "taken_over"}
SUCCESSOR = {"claimed_ms": 600 + 2 * H + 50, "renewed_ms": 4_900, "ending": "released"}


def claim(
    client_id, epoch, position, *, claimed_ms=7_400, renewed_ms=7_400, ending="open"
):
    return Interval(
        key=Key("g", "t", 0),
        client_id=client_id,
        incarnation=client_id.encode(),
        token=Token(1, 0, epoch),
        effect="claimed",
        why=None,
        start=Moment(epoch, claimed_ms, claimed_ms),
        heartbeat_interval_ms=H,
        renewed_offset=epoch,
        renewed_ms=renewed_ms,
        start_position=position,
        ending=ending,
    )


def batch(at, first, last, epoch):
    return Line(
        at=at, kind="batch", partition=0, offset=first, last=last, token=f"1.0.{epoch}"
    )


def records(at, first, last, epoch):
    return [
        Line(
            at=at + n,
            kind="record",
            partition=0,
            offset=first + n,
            token=f"1.0.{epoch}",
        )
        for n in range(last - first + 1)
    ]


def alo(**changes):
    claims = (
        claim("a", 3, None, **DEAD),
        claim("b", 9, 6, **SUCCESSOR),
        claim("c", 20, 15),
    )
    journals = {
        "a": (
            *(batch(500, 0, 4, 3), *records(501, 0, 4, 3)),
            *(batch(600, 5, 11, 3), *records(601, 5, 9, 3)),
        ),
        "b": (batch(4_700, 6, 14, 9), *records(4_701, 6, 14, 9)),
        "c": (batch(7_500, 15, 19, 20), *records(7_501, 15, 19, 20)),
    }
    evidence = Evidence(
        delivery="alo",
        produced={0: 20},
        journals=journals,
        log=LogEvidence(claims=claims),
        killed="a",
        pause=PAUSE,
        heartbeat_interval_ms=H,
        jitter_ms=H // 10,
        round_trip_ms=20,
        batch=BATCH,
    )
    return attrs.evolve(evidence, **changes)


def amo(**changes):
    """The same at most once: a was last granted 5 to 9 and processed 5 and 6."""
    claims = (
        claim("a", 3, None, **DEAD),
        claim("b", 9, 10, **SUCCESSOR),
        claim("c", 20, 15),
    )
    grants = {
        (0, 3): [OffsetRange(0, 5), OffsetRange(5, 10)],
        (0, 9): [OffsetRange(10, 15)],
        (0, 20): [OffsetRange(15, 20)],
    }
    journals = {
        "a": (*records(501, 0, 4, 3), *records(601, 5, 6, 3)),
        "b": tuple(records(4_701, 10, 14, 9)),
        "c": tuple(records(7_501, 15, 19, 20)),
    }
    log = LogEvidence(claims=claims, grants=grants)
    base = alo(delivery="amo", log=log, journals=journals)
    return attrs.evolve(base, **changes)


def with_lines(evidence, name, *lines):
    journals = dict(evidence.journals)
    journals[name] = (*journals[name], *lines)
    return attrs.evolve(evidence, journals=journals)


def without(evidence, name, *offsets):
    journals = dict(evidence.journals)
    journals[name] = tuple(
        line
        for line in journals[name]
        if line.kind != "record" or line.offset not in offsets
    )
    return attrs.evolve(evidence, journals=journals)


def with_claim(evidence, index, **changes):
    claims = list(evidence.log.claims)
    claims[index] = msgspec.structs.replace(claims[index], **changes)
    return with_log(evidence, claims=tuple(claims))


def with_log(evidence, **changes):
    return attrs.evolve(evidence, log=attrs.evolve(evidence.log, **changes))


def broken(evidence):
    return [check.name for check in judge(evidence).checks if not check.held]


# --- Kept


def test_at_least_once_with_a_takeover_holds():
    verdict = judge(alo())
    assert verdict.held, verdict.checks
    assert (verdict.produced, verdict.processed) == (20, 20)
    assert (verdict.lost, verdict.duplicated) == ((), 4)


def test_duplicates_are_bounded_by_uncommitted_records_of_the_killed():
    check = next(c for c in judge(alo()).checks if c.name.startswith("Duplicates"))
    assert (check.measured, check.bound) == (4, 4 + 2)


def test_at_most_once_only_granted_unprocessed_records_are_lost():
    verdict = judge(amo())
    assert verdict.held, verdict.checks
    assert verdict.lost == ((0, 7), (0, 8), (0, 9))
    assert "partition 0 offset 7 to 9" in str(verdict.to_object())


# --- Broken

LOST = "No record is lost"
DUPLICATES = "Duplicates stay within their bound"
TWICE = "No record is processed twice"
LOSSES = "Losses stay within their bound"
REPLACED = "Killed consumers are replaced in time"
RESTS = "A paused group processes nothing"
CLAIMED = "All work is done under a claim"
REAL = "Real records, real work"
RAN = "The round ran as planned"

BROKEN_ALO = [
    pytest.param(without(alo(), "c", 17), [LOST], id="lost-of-the-living"),
    pytest.param(without(alo(), "a", 3), [LOST], id="lost-below-position"),
    pytest.param(alo(produced={0: 21}), [LOST], id="lost-at-the-end"),
    pytest.param(alo(produced={0: 20, 1: 1}), [LOST], id="lost-partition"),
    pytest.param(
        with_lines(alo(), "b", *records(4_800, 5, 5, 9)),
        [DUPLICATES],
        id="duplicate-below-position",
    ),
    pytest.param(
        with_lines(alo(), "b", *records(4_800, 8, 8, 9)),
        [DUPLICATES],
        id="duplicate-within-a-claim",
    ),
    pytest.param(
        with_lines(alo(), "c", *records(7_600, 12, 12, 20)),
        [DUPLICATES],
        id="duplicate-after-a-release",
    ),
    pytest.param(
        with_claim(alo(), 0, ending="released"),
        [DUPLICATES, REPLACED],
        id="duplicate-without-takeover",
    ),
    pytest.param(
        with_lines(alo(), "a", batch(4_000, 10, 11, 3), *records(4_001, 10, 11, 3)),
        ["Positions keep up"],
        id="position-older-than-h",
    ),
]
BROKEN_AMO = [
    pytest.param(
        with_lines(amo(), "b", *records(4_800, 6, 6, 9)),
        [TWICE, CLAIMED],
        id="twice",
    ),
    pytest.param(
        with_lines(amo(), "b", *records(4_800, 10, 10, 9)),
        [TWICE],
        id="twice-within-a-grant",
    ),
    pytest.param(without(amo(), "b", 12), [LOSSES], id="lost-of-the-living"),
    pytest.param(amo(produced={0: 21}), [LOSSES], id="lost-without-grant"),
    pytest.param(amo(batch=2), [LOSSES], id="more-than-a-batch"),
    pytest.param(
        with_log(amo(), grants={(0, 3): [OffsetRange(0, 10)]}),
        [CLAIMED],
        id="processed-without-grant",
    ),
]
LATE_MS = 600 + 2 * H + H // 10 + 3 * 20
BROKEN_BOTH = [
    pytest.param({"problems": ("Late.",)}, RAN, id="late"),
    pytest.param({"killed": None}, REPLACED, id="nobody-killed"),
    pytest.param({"killed": "nobody"}, REPLACED, id="killed-held-nothing"),
    pytest.param({"pause": None}, RESTS, id="no-pause"),
    pytest.param({"produced": {0: 19}}, REAL, id="record-from-nowhere"),
    pytest.param(
        {"pause": Pause(5_000, 5_000 + 2 * H + 61, 9_100)},
        "A pause takes effect in time",
        id="slow-drain",
    ),
    pytest.param(
        {"pause": attrs.evolve(PAUSE, ended_at_ms=7_499)}, None, id="pause-that-ends"
    ),
    pytest.param(
        {"pause": attrs.evolve(PAUSE, ended_at_ms=7_600)}, RESTS, id="work-in-pause"
    ),
    pytest.param(
        {"pause": Pause(7_600, 7_700, 9_700)}, "A pause ends", id="pause-for-ever"
    ),
]


@pytest.mark.parametrize(("evidence", "names"), BROKEN_ALO + BROKEN_AMO)
def test_a_broken_delivery_guarantee_fails_its_check(evidence, names):
    assert broken(evidence) == names
    assert not judge(evidence).held


@pytest.mark.parametrize("make", [alo, amo], ids=["alo", "amo"])
@pytest.mark.parametrize(("changes", "name"), BROKEN_BOTH)
def test_a_round_that_did_not_run_as_planned_fails_its_check(make, changes, name):
    found = broken(make(**changes))
    assert (name in found) if name else not found


@pytest.mark.parametrize("make", [alo, amo], ids=["alo", "amo"])
@pytest.mark.parametrize(
    ("claimed_ms", "is_held"),
    [
        pytest.param(600 + 2 * H, False, id="before-2h"),
        pytest.param(600 + 2 * H + 1, True, id="just-stale"),
        pytest.param(LATE_MS, True, id="at-the-bound"),
        pytest.param(LATE_MS + 1, False, id="late"),
    ],
)
def test_a_takeover_that_is_early_or_late_fails_its_check(make, claimed_ms, is_held):
    start = Moment(9, claimed_ms, claimed_ms)
    found = broken(with_claim(make(), 1, start=start))
    assert found == ([] if is_held else [REPLACED])


def test_a_partition_without_a_new_owner_fails_its_check():
    evidence = alo()
    assert REPLACED in broken(with_log(evidence, claims=evidence.log.claims[:1]))


@pytest.mark.parametrize(
    "token",
    [
        pytest.param("1.0.999", id="unknown-claim"),
        pytest.param("1.0.3", id="claim-of-another"),
        pytest.param("", id="no-token"),
    ],
)
def test_a_record_processed_without_a_claim_fails_its_check(token):
    line = Line(at=7_800, kind="record", partition=0, offset=20, token=token)
    assert broken(with_lines(alo(produced={0: 21}), "c", line)) == [CLAIMED]


def test_a_violated_invariant_of_the_log_fails_the_round():
    assert broken(with_log(alo(), findings=("S1: offset 2: wrong",))) == [RAN]


def test_a_verdict_without_records_does_not_hold():
    nothing = alo(produced={}, journals={}, log=LogEvidence(), killed=None, pause=None)
    assert not judge(nothing).held
    assert REAL in broken(nothing)
