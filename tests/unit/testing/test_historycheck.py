"""What the history checker finds, and what it lets pass."""

import pytest

from kafka_marshal.engine import Delivery
from kafka_marshal.protocol.types import Key, Token
from kafka_marshal.testing.historycheck import Operation, check

KEY = Key("g", "t", 0)
ONE, TWO = Token(1, 0, 10), Token(1, 0, 20)
ALO, AMO = Delivery.AT_LEAST_ONCE, Delivery.AT_MOST_ONCE


def op(kind, who, token, first=None, last=None, *, outcome="ok"):
    return Operation(kind, outcome, who, KEY, token, 0, first, last)


def handled(who, token, first, last):
    """A batch that is handed out and processed."""
    return [
        op("hand_out", who, token, first, last),
        op("process", who, token, first, last),
    ]


def invariants(history, delivery=ALO, **rest):
    return [
        found.invariant for found in check(history, delivery=delivery, **rest).findings
    ]


def test_a_takeover_repeats_what_no_beat_had_told():
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
def test_what_must_not_be_at_least_once(history, invariant):
    assert invariants(history) == [invariant]


def test_what_is_never_processed_is_lost():
    history = [op("claim", "a", ONE), *handled("a", ONE, 0, 4)]
    verdict = check(history, delivery=ALO, ends={KEY: (0, 7)})
    assert [f.invariant for f in verdict.findings] == ["6.1"]
    assert verdict.findings[0].message == "g/t-0: 2 records never processed: [5, 6]"


def test_what_may_have_been_processed_does_not_count_as_processed():
    history = [
        op("claim", "a", ONE),
        op("hand_out", "a", ONE, 0, 0),
        op("process", "a", ONE, 0, 0, outcome="invoke"),
        op("process", "a", ONE, 0, 0, outcome="unknown"),
    ]
    assert invariants(history, ends={KEY: (0, 1)}) == ["6.1"]


GRANTED = [op("claim", "a", ONE), op("grant", "a", ONE, 0, 4)]


def test_grants_are_used_once_by_those_who_have_them():
    history = [
        *GRANTED,
        *handled("a", ONE, 0, 2),
        op("claim", "b", TWO),
        op("grant", "b", TWO, 5, 6),
        *handled("b", TWO, 5, 6),
        # It was granted to the first, who may be slow.
        op("process", "a", ONE, 2, 2, outcome="unknown"),
    ]
    assert invariants(history, AMO, ends={KEY: (0, 7)}) == []


@pytest.mark.parametrize(
    ("more", "invariant"),
    [
        pytest.param([op("grant", "b", TWO, 4, 5)], "S3", id="granted-twice"),
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
def test_what_must_not_be_at_most_once(more, invariant):
    assert invariants([*GRANTED, *more], AMO) == [invariant]


def test_what_failed_did_not_happen():
    history = [
        op("claim", "a", TWO, outcome="fail"),
        op("claim", "b", ONE),
        op("beat", "b", ONE, 9, outcome="unknown"),
        op("grant", "b", ONE, 0, 3, outcome="fail"),
        op("hand_out", "a", TWO, 0, 0, outcome="fail"),
        op("process", "a", TWO, 0, 0, outcome="fail"),
    ]
    assert invariants(history) == []


def test_at_most_once_a_second_hand_out_is_found_under_any_claim():
    history = [*GRANTED, *handled("a", ONE, 0, 0), op("claim", "b", TWO)]
    found = invariants([*history, op("hand_out", "b", TWO, 0, 0)], AMO)
    assert found == ["S3", "6.2"]
