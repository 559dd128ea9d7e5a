import pytest
from logkit import KEY, Log, beat

from kafka_marshal.protocol.transition import Step, count
from kafka_marshal.protocol.types import LogEntry

ENTRY = LogEntry(9, 0, 0, 1, b"")


@pytest.fixture
def log():
    log = Log()
    log.claimed()
    return log


def fields(transition):
    return (
        transition.offset,
        transition.outcome,
        transition.effect,
        transition.reason,
        transition.key,
        transition.epoch,
        transition.detail,
        transition.record,
    )


RECORD = beat(1)
CASES = [
    pytest.param(
        lambda step: step.skipped(),
        (9, "skipped", None, None, None, None, None, RECORD),
        "skipped",
        id="skipped",
    ),
    pytest.param(
        lambda step: step.accepted("renewed", KEY),
        (9, "accepted", "renewed", None, KEY, 1, None, RECORD),
        "renewed",
        id="accepted",
    ),
    pytest.param(
        lambda step: step.accepted("granted", KEY, detail={"first": 1, "last": 2}),
        (9, "accepted", "granted", None, KEY, 1, {"first": 1, "last": 2}, RECORD),
        "granted",
        id="accepted with figures",
    ),
    pytest.param(
        lambda step: step.accepted("paused"),
        (9, "accepted", "paused", None, None, None, None, RECORD),
        "paused",
        id="accepted without key",
    ),
    pytest.param(
        lambda step: step.refused("held", KEY, detail={"remaining_ms": 5}),
        (9, "refused", None, "held", KEY, 1, {"remaining_ms": 5}, RECORD),
        "held",
        id="refused",
    ),
    pytest.param(
        lambda step: step.refused("limits", KEY._replace(partition=5)),
        (9, "refused", None, "limits", KEY._replace(partition=5), None, None, RECORD),
        "limits",
        id="a key that does not exist has no epoch",
    ),
    pytest.param(
        lambda step: step.ignored("not_owner", KEY),
        (9, "ignored", None, "not_owner", KEY, 1, None, RECORD),
        "not_owner",
        id="ignored",
    ),
    pytest.param(
        lambda step: step.undecodable(),
        (9, "undecodable", None, "undecodable", None, None, None, RECORD),
        "undecodable",
        id="undecodable",
    ),
    pytest.param(
        lambda step: step.halted(),
        (9, "halted", None, "halted", None, None, None, RECORD),
        "halted",
        id="halted",
    ),
]


@pytest.mark.parametrize(("outcome", "expected", "counter"), CASES)
def test_an_outcome_is_told_and_counted(log, outcome, expected, counter):
    before = dict(log.state.soft.counters)
    transition = outcome(Step(log.state, ENTRY, RECORD))
    assert fields(transition) == expected
    counted = {**before, counter: before.get(counter, 0) + 1}
    assert log.state.soft.counters == counted


def test_counting_starts_at_nothing(log):
    count(log.state, "new")
    count(log.state, "new")
    assert log.state.soft.counters["new"] == 2
    count(log.state, "new", times=3)
    assert log.state.soft.counters["new"] == 5


def test_counting_nothing_makes_no_counter(log):
    count(log.state, "new", times=0)
    assert "new" not in log.state.soft.counters


def test_transitions_are_values(log):
    first = log.one(beat(1), after=1)
    assert first == log.append(beat(1), offset=2 + 1)[0].__class__(*fields(first))
    with pytest.raises(AttributeError):
        first.outcome = "refused"
