"""Histories that the operation judge accepts, and violations that it reports."""

import pytest

from kafka_marshal.config import Delivery
from kafka_marshal.protocol.types import Key, Token
from simulator.operation_judge import Operation, check

KEY = Key("g", "t", 0)
ONE, TWO = Token(1, 0, 10), Token(1, 0, 20)
ALO, AMO = Delivery.AT_LEAST_ONCE, Delivery.AT_MOST_ONCE


H_MS = 10_000
SOFT_MS = 7 * H_MS // 4


def op(kind, who, token, first=None, last=None, *, outcome="ok", at_ms=0, **rest):
    return Operation(
        kind=kind,
        outcome=outcome,
        process=who,
        key=KEY,
        token=token,
        at_ms=at_ms,
        first=first,
        last=last,
        **rest,
    )


def handled(who, token, first, last):
    """Return a batch that is handed out and processed."""
    return [
        op("hand_out", who, token, first, last),
        op("process", who, token, first, last),
    ]


def invariants(history, delivery=ALO, **rest):
    return [
        found.invariant for found in check(history, delivery=delivery, **rest).findings
    ]


def test_a_takeover_repeats_records_after_the_last_position():
    history = [
        op("claim", "a", ONE),
        *handled("a", ONE, 0, 4),
        op("beat", "a", ONE, 3),
        *handled("a", ONE, 5, 6),
        op("claim", "b", TWO),
        *handled("b", TWO, 3, 9),
        op("beat", "b", TWO, 10),
    ]
    verdict = check(history, delivery=ALO, ends={KEY: (0, 10)})
    assert verdict.findings == ()
    assert (verdict.handed, verdict.processed) == (14, 10)
    assert (verdict.duplicates, verdict.duplicates_max, verdict.takeovers) == (4, 4, 1)


@pytest.mark.parametrize(
    ("history", "invariant"),
    [
        pytest.param(
            [op("claim", "a", TWO), op("claim", "b", ONE)], "S7", id="token-went-back"
        ),
        pytest.param(
            [
                op("claim", "a", ONE),
                op("claim", "b", TWO),
                *handled("b", TWO, 0, 0),
                *handled("a", ONE, 1, 1),
            ],
            "S4",
            id="two-hand-out",
        ),
        pytest.param(handled("a", ONE, 0, 0), "S4", id="nobody-won-it"),
        pytest.param(
            [op("claim", "a", ONE), *handled("a", ONE, 0, 1), *handled("a", ONE, 1, 2)],
            "S3",
            id="twice-under-a-token",
        ),
        pytest.param(
            [
                op("claim", "a", ONE),
                *handled("a", ONE, 0, 4),
                op("beat", "a", ONE, 5),
                op("claim", "b", TWO),
                *handled("b", TWO, 4, 4),
            ],
            "6.1",
            id="more-duplicates-than-allowed",
        ),
        pytest.param(
            [
                op("claim", "a", ONE),
                op("hand_out", "a", ONE, 0, 4),
                op("process", "a", ONE, 0, 3),
                op("beat", "a", ONE, 5),
            ],
            "6.1",
            id="position-skips",
        ),
        pytest.param(
            [op("claim", "a", ONE), op("process", "a", ONE, 0, 0)],
            "6.2",
            id="processed-and-never-handed-out",
        ),
    ],
)
def test_each_violation_at_least_once_is_reported(history, invariant):
    assert invariants(history) == [invariant]


def sent(kind, who, token, number, *, at_ms, outcome="ok", **rest):
    """Return an operation that is sent at a time, and its outcome 50 ms later."""
    return [
        op(kind, who, None, outcome="invoke", number=number, at_ms=at_ms),
        op(kind, who, token, outcome=outcome, number=number, at_ms=at_ms + 50, **rest),
    ]


@pytest.mark.parametrize(
    ("history", "invariant"),
    [
        pytest.param(
            [op("claim", "a", ONE), op("claim", "b", TWO), op("beat", "a", ONE)],
            "S1",
            id="a-beat-of-a-former-owner-counts",
        ),
        pytest.param(
            [op("claim", "a", ONE), op("beat", "b", ONE)],
            "S1",
            id="a-beat-of-another-process-counts",
        ),
        pytest.param([op("claim", "a", ONE, number=1)], "1.4", id="never-begun"),
        pytest.param(
            [op("pause", "admin", None), op("claim", "a", ONE)],
            "8.1",
            id="won-in-a-pause",
        ),
        pytest.param(
            [
                op("claim", "a", ONE),
                op("pause", "admin", None),
                op("beat", "a", ONE, renews=True),
            ],
            "8.1",
            id="renewed-in-a-pause",
        ),
        pytest.param(
            [
                op("claim", "a", ONE),
                op("beat", "a", ONE, 3, outcome="invoke"),
                op("beat", "a", ONE, 3, outcome="unknown"),
            ],
            "6.1",
            id="a-position-that-was-told-too-early-and-never-arrived",
        ),
    ],
)
def test_an_impossible_operation_is_a_violation(history, invariant):
    assert set(invariants([op("claim", "z", Token(1, 0, 1)), *history])) == {invariant}


@pytest.mark.parametrize(
    ("late_ms", "found"), [(0, []), (H_MS // 500, []), (H_MS // 10, ["S4"])]
)
def test_a_lease_counts_from_the_sending_of_its_last_renewal(late_ms, found):
    handed = op("hand_out", "a", ONE, 0, 0, at_ms=7_000 + SOFT_MS + late_ms // 2)
    history = [
        *sent("claim", "a", ONE, 1, at_ms=0),
        *sent("beat", "a", ONE, 2, at_ms=7_000, renews=True),
        # It is unknown whether the first renewed the lease; the second did not.
        *sent("beat", "a", ONE, 3, at_ms=8_000, outcome="unknown"),
        *sent("beat", "a", ONE, 4, at_ms=9_000),
        handed,
    ]
    findings = check(history, delivery=ALO, h_ms=H_MS).findings
    assert [finding.invariant for finding in findings] == found
    assert check(history, delivery=ALO).findings == ()


def test_an_unknown_claim_counts_once_it_is_read_back():
    history = [
        op("claim", "a", None, outcome="invoke", number=1),
        op("claim", "a", None, outcome="unknown", number=1),
        op("claim", "a", ONE, number=1),
        *handled("a", ONE, 0, 2),
    ]
    assert invariants(history) == []
    del history[2]
    assert invariants(history) == ["S4"]


def test_a_claim_after_a_pause_is_no_violation():
    paused = [op("pause", "admin", None), op("unpause", "admin", None)]
    assert invariants([*paused, op("claim", "a", ONE)]) == []


def test_at_most_once_an_unknown_processing_counts_as_done():
    begun = op("process", "a", ONE, 0, 0, outcome="unknown")
    history = [*GRANTED, op("hand_out", "a", ONE, 0, 0), begun]
    again = [op("claim", "b", TWO), *handled("b", TWO, 0, 0)]
    assert invariants([*history, *again], AMO) == ["S3", "6.2", "S3"]


def of_topics(*more, first=b"one", second=b"two"):
    """Return a history of two topics of one name; the second has fewer records."""
    return [
        op("claim", "a", ONE, topic_id=first),
        op("grant", "a", ONE, 0, 4),
        op("hand_out", "a", ONE, 0, 4, topic_id=first),
        op("process", "a", ONE, 0, 4),
        op("beat", "a", ONE, 5),
        op("claim", "b", TWO, topic_id=second),
        op("grant", "b", TWO, 0, 1),
        op("hand_out", "b", TWO, 0, 1, topic_id=second),
        op("process", "b", TWO, 0, 1),
        *more,
    ]


@pytest.mark.parametrize("delivery", [ALO, AMO])
def test_equal_offsets_of_another_topic_id_are_other_records(delivery):
    late = op("process", "a", ONE, 4, 4, outcome="unknown")
    history = of_topics(late)
    verdict = check(history, delivery=delivery, ends={KEY: (0, 2)})
    assert verdict.findings == ()
    assert (verdict.handed, verdict.processed, verdict.duplicates) == (7, 7, 0)
    assert set(invariants(of_topics(second=b"one"), delivery)) == {"S3", "6.1"}


def test_only_the_last_topic_must_be_processed_to_its_end():
    assert invariants(of_topics(), ends={KEY: (0, 3)}) == ["6.1"]
    skips = op("beat", "b", TWO, 5, outcome="invoke")
    assert invariants(of_topics(skips)) == ["6.1"]


def test_a_hand_out_of_another_topic_id_is_a_violation():
    early = op("beat", "b", TWO, 5, outcome="invoke")
    history = of_topics(op("hand_out", "b", TWO, 2, 2, topic_id=b"one"))
    assert invariants(history) == ["5.6"]
    # An owner may send heartbeats before its claim is recorded.
    history.insert(5, early)
    assert invariants(history) == ["5.6"]


def test_a_record_that_is_never_processed_is_a_violation():
    history = [op("claim", "a", ONE), *handled("a", ONE, 0, 4)]
    verdict = check(history, delivery=ALO, ends={KEY: (0, 7)})
    assert [f.invariant for f in verdict.findings] == ["6.1"]
    assert verdict.findings[0].message == "g/t-0: 2 records never processed: [5, 6]"


def test_an_interrupted_record_does_not_count_as_processed():
    history = [
        op("claim", "a", ONE),
        op("hand_out", "a", ONE, 0, 0),
        op("process", "a", ONE, 0, 0, outcome="invoke"),
        op("process", "a", ONE, 0, 0, outcome="unknown"),
    ]
    assert invariants(history, ends={KEY: (0, 1)}) == ["6.1"]


GRANTED = [op("claim", "a", ONE), op("grant", "a", ONE, 0, 4)]


def test_grants_used_once_by_their_owners_are_no_violation():
    history = [
        *GRANTED,
        *handled("a", ONE, 0, 2),
        op("claim", "b", TWO),
        op("grant", "b", TWO, 5, 6),
        *handled("b", TWO, 5, 6),
        # It was granted to a, which may be slow.
        op("process", "a", ONE, 2, 2, outcome="unknown"),
    ]
    assert invariants(history, AMO, ends={KEY: (0, 7)}) == []


@pytest.mark.parametrize(
    ("more", "invariant"),
    [
        pytest.param(
            [op("claim", "b", TWO), op("grant", "b", TWO, 4, 5)],
            "S3",
            id="granted-twice",
        ),
        pytest.param(
            [op("claim", "b", TWO), op("grant", "a", ONE, 5, 6)],
            "S1",
            id="granted-under-a-claim-that-is-over",
        ),
        pytest.param(
            [
                op("hand_out", "a", ONE, 0, 1),
                op("beat", "a", ONE, 5, outcome="invoke", done=1),
            ],
            "6.3",
            id="told-as-done-and-in-hand",
        ),
        pytest.param([op("hand_out", "a", ONE, 4, 5)], "6.2", id="beyond-the-grant"),
        pytest.param(
            [op("claim", "b", TWO), op("hand_out", "b", TWO, 0, 0)],
            "6.2",
            id="of-somebody-else",
        ),
        pytest.param(
            [*handled("a", ONE, 0, 0), op("process", "a", ONE, 0, 0)],
            "S3",
            id="processed-twice",
        ),
    ],
)
def test_each_violation_at_most_once_is_reported(more, invariant):
    assert invariants([*GRANTED, *more], AMO) == [invariant]


def test_a_failed_operation_is_not_judged():
    history = [
        op("claim", "a", TWO, outcome="fail"),
        op("claim", "b", ONE),
        op("beat", "b", ONE, 9, outcome="unknown"),
        op("grant", "b", ONE, 0, 3, outcome="fail"),
        op("hand_out", "a", TWO, 0, 0, outcome="fail"),
        op("process", "a", TWO, 0, 0, outcome="fail"),
    ]
    assert invariants(history) == []


def test_at_most_once_a_repeat_under_a_later_claim_is_a_violation():
    history = [*GRANTED, *handled("a", ONE, 0, 0), op("claim", "b", TWO)]
    found = invariants([*history, op("hand_out", "b", TWO, 0, 0)], AMO)
    assert found == ["S3", "6.2"]


def granted(who, token, first, last):
    """Return a batch that is granted, handed out and processed."""
    return [op("grant", who, token, first, last), *handled(who, token, first, last)]


@pytest.mark.parametrize(
    ("head", "invariant"),
    [pytest.param(5, None, id="back"), pytest.param(8, "S3", id="not-so-far")],
)
def test_offsets_taken_back_by_a_reset_may_be_handed_out_again(head, invariant):
    history = [
        op("claim", "a", ONE),
        *granted("a", ONE, 0, 9),
        op("reset", "admin", None, head),
        op("claim", "b", TWO),
        *granted("b", TWO, 5, 9),
    ]
    found = invariants(history, AMO)
    assert set(found) == ({invariant, "6.1"} if invariant else set())


def test_a_reset_without_a_position_takes_back_all_offsets():
    history = [
        op("claim", "a", ONE, topic_id=b"one"),
        *granted("a", ONE, 0, 9),
        op("reset", "admin", None, topic_id=b"two"),
        op("claim", "b", TWO, topic_id=b"one"),
        *granted("b", TWO, 0, 9),
    ]
    assert invariants(history, AMO) == []


@pytest.mark.parametrize(
    ("to", "head", "missed"),
    [
        pytest.param(2, 8, 0, id="forward-over-what-a-seek-goes-back-to"),
        pytest.param(8, 4, 4, id="back-over-what-a-seek-skipped"),
        pytest.param(2, None, 0, id="to-the-committed-offset"),
    ],
)
def test_a_reset_replaces_the_position_of_a_seek(to, head, missed):
    history = [
        op("claim", "a", ONE),
        *handled("a", ONE, 0, 3),
        op("beat", "a", ONE, 4),
        *([*handled("a", ONE, 4, 7), op("beat", "a", ONE, 8)] if to == 2 else []),
        op("seek", "a", ONE, to, outcome="invoke"),
        op("seek", "a", ONE, to),
        op("sought", "a", ONE, to),
        op("reset", "admin", None, head),
        op("claim", "b", TWO),
        *handled("b", TWO, 8, 9),
    ]
    verdict = check(history, delivery=ALO, ends={KEY: (0, 10)})
    assert len(verdict.findings) == bool(missed)
    assert all(f"{missed} records" in each.message for each in verdict.findings)


def test_a_seek_confirmed_after_a_reset_skips_no_offset():
    history = [
        op("claim", "a", ONE),
        op("seek", "a", ONE, 7, outcome="invoke"),
        op("seek", "a", ONE, 7),
        op("reset", "admin", None, 3),
        op("sought", "a", ONE, 7),
        op("seek", "a", ONE, 9, outcome="invoke"),
        op("claim", "b", TWO, 3),
        *handled("b", TWO, 3, 4),
    ]
    verdict = check(history, delivery=ALO, ends={KEY: (0, 6)})
    assert [each.invariant for each in verdict.findings] == ["6.1"]
    assert "1 records never processed: [5]" in verdict.findings[0].message


@pytest.mark.parametrize(("reported", "found"), [(8, []), (9, ["6.1"])])
def test_a_report_of_a_seek_that_another_overtook_may_skip_as_far(reported, found):
    """A sidecar may write the target of the first as an ordinary position."""
    history = [
        op("claim", "a", ONE),
        *handled("a", ONE, 0, 3),
        op("seek", "a", ONE, 8, outcome="invoke"),
        op("seek", "a", ONE, 2, outcome="invoke"),
        op("beat", "a", ONE, reported),
        op("seek", "a", ONE, 2),
        op("sought", "a", ONE, 2),
        *handled("a", ONE, 2, 9),
    ]
    verdict = check(history, delivery=ALO, ends={KEY: (0, 10)})
    assert [each.invariant for each in verdict.findings] == found


# --- set positions


def set_to(position, *, topic_id=None):
    return op("set", "admin", None, position, topic_id=topic_id)


def test_offsets_below_a_set_position_need_no_processing():
    history = [
        op("claim", "a", ONE),
        *handled("a", ONE, 0, 4),
        op("beat", "a", ONE, 5),
        set_to(8),
        op("claim", "b", TWO),
        *handled("b", TWO, 8, 9),
        op("beat", "b", TWO, 10),
    ]
    assert check(history, delivery=ALO, ends={KEY: (0, 10)}).findings == ()


def test_offsets_above_a_set_position_must_be_processed_again():
    history = [
        op("claim", "a", ONE),
        *handled("a", ONE, 0, 9),
        op("beat", "a", ONE, 10),
        set_to(4),
        op("claim", "b", TWO),
        *handled("b", TWO, 4, 6),
        op("beat", "b", TWO, 7),
    ]
    ends = {KEY: (0, 10)}
    (found,) = check(history, delivery=ALO, ends=ends).findings
    assert found == ("6.1", "g/t-0: 3 records never processed: [7, 8, 9]")
    skipping = [*history, op("beat", "b", TWO, 10)]
    assert invariants(skipping) == ["6.1"]


def test_at_most_once_offsets_may_repeat_after_a_set_position():
    history = [
        op("claim", "a", ONE),
        *granted("a", ONE, 0, 9),
        set_to(4),
        op("claim", "b", TWO),
        *granted("b", TWO, 4, 9),
        # The old owner completes a record handed out before.
        op("process", "a", ONE, 9, outcome="unknown"),
    ]
    assert invariants(history, AMO) == []
    assert "S3" in invariants([*history, op("grant", "b", TWO, 9)], AMO)
    assert "S3" in invariants([*history, op("process", "b", TWO, 9)], AMO)


def test_a_hand_out_below_a_set_position_is_a_violation():
    history = [op("claim", "a", ONE), set_to(4), op("claim", "b", TWO)]
    assert invariants([*history, *handled("b", TWO, 3, 3)]) == ["6.1"]


def test_a_heartbeat_between_a_set_position_and_a_claim_is_refused():
    history = [op("claim", "a", ONE), set_to(4), op("beat", "a", ONE)]
    assert invariants(history) == ["S1"]


def test_a_set_without_a_position_is_a_violation():
    assert invariants([op("set", "admin", None)]) == ["8.5"]


def test_a_set_position_applies_to_one_topic_id():
    history = [
        op("claim", "a", ONE, topic_id=b"one"),
        *handled("a", ONE, 0, 4),
        op("beat", "a", ONE, 5),
        set_to(0, topic_id=b"one"),
        op("claim", "b", TWO, topic_id=b"two"),
        *handled("b", TWO, 0, 1),
        op("beat", "b", TWO, 2),
    ]
    assert check(history, delivery=ALO, ends={KEY: (0, 2)}).findings == ()


def test_a_seek_back_requires_offsets_below_a_set_position():
    history = [
        op("set", "admin", None, 4),
        op("claim", "a", ONE),
        *handled("a", ONE, 4, 5),
    ]
    ends = {KEY: (0, 6)}
    assert invariants(history, ends=ends) == []
    back = [op("seek", "a", ONE, 2, outcome="invoke"), op("seek", "a", ONE, 2)]
    back.append(op("sought", "a", ONE, 2))
    assert invariants([*history, *back], ends=ends) == ["6.1"]
    assert invariants([*history, *back, *handled("a", ONE, 2, 5)], ends=ends) == []
