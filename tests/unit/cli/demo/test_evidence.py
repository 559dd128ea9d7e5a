"""Log facts become tenures."""

from kafka_marshal import Key
from kafka_marshal.protocol.types import OffsetRange
from kafka_marshal.testing.watching import Fact
from kafka_marshal_cli.demo.evidence import Evidence, epoch_of, tenures_of
from kafka_marshal_cli.demo.journal import Line

KEY = Key("g", "t", 0)


def fact(effect, client_id, epoch, offset, *, position=None, granted=None):
    time_ms = offset * 10
    return Fact(
        key=KEY,
        effect=effect,
        client_id=client_id,
        epoch=epoch,
        offset=offset,
        timestamp_ms=time_ms,
        position=position,
        granted=granted,
    )


def test_a_claim_that_is_released_and_one_that_is_taken():
    facts = [
        fact("claimed", "a", 1, 1),
        fact("renewed", "a", 1, 2, position=0),
        fact("granted", "a", 1, 3, position=5, granted=OffsetRange(0, 5)),
        fact("released", "a", 1, 4, position=5),
        fact("claimed", "b", 5, 5, position=5),
        fact("renewed", "b", 5, 6, position=7),
        fact("position_only", "b", 5, 7, position=8),
        fact("claimed", "c", 8, 8, position=8),
    ]
    first, second, third = tenures_of(facts)
    assert (first.ending, first.grants, first.start) == (
        "released",
        [OffsetRange(0, 5)],
        0,
    )
    assert (second.ending, second.start) == ("taken", 5)
    # Under a pause a beat moves the position and does not renew.
    assert (second.claimed_ms, second.renewed_ms) == (50, 60)
    assert (third.ending, third.start, third.claimed_ms) == ("held", 8, 80)
    evidence = evidence_of(tenures=(first, second, third))
    ((before, after, took_ms),) = [
        (each.before, each.after, each.took_ms) for each in evidence.takeovers()
    ]
    assert (before, after, took_ms) == (second, third, 20)


def test_uncommitted_records_are_the_rest_of_the_last_batch():
    (tenure,) = tenures_of([fact("claimed", "a", 1, 1)])
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
    evidence = evidence_of(journals={"a": lines})
    assert evidence.uncommitted_count(tenure) == 4
    assert evidence_of().uncommitted_count(tenure) == 0


def test_epoch_is_the_last_part_of_a_token():
    assert epoch_of("1790000000.4.17") == 17
    assert epoch_of("") == -1


def evidence_of(*, journals=None, tenures=()):
    return Evidence(
        delivery="alo",
        produced={},
        journals=journals or {},
        tenures=tenures,
        killed=None,
        pause=None,
        heartbeat_interval_ms=1,
        jitter_ms=1,
        round_trip_ms=1,
        batch=1,
    )
