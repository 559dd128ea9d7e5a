"""The outcome of a demo, and its options."""

import json

import attrs
import pytest

from kafka_marshal import ConfigurationError
from kafka_marshal_cli.demo.play import Outcome
from kafka_marshal_cli.demo.stage import DemoOptions
from kafka_marshal_cli.demo.verdict import Check, Verdict

OPTIONS = DemoOptions(
    heartbeat_interval_ms=2_000,
    partitions=6,
    records=3_000,
    consumers=3,
    seed=1,
    keep=False,
)


def verdict(delivery, *, held=True):
    check = Check(name="Good", held=held, measured=0, bound=0, unit="", text="Well.")
    return Verdict(
        delivery=delivery,
        produced=1,
        processed=1,
        lost=(),
        duplicated=0,
        checks=(check,),
    )


@pytest.mark.parametrize(
    ("verdicts", "is_held"),
    [
        pytest.param([verdict("alo"), verdict("amo")], True, id="both"),
        pytest.param([verdict("alo"), verdict("amo", held=False)], False, id="broken"),
        pytest.param([verdict("alo")], False, id="half-a-run"),
        pytest.param([], False, id="no-run"),
    ],
)
def test_an_outcome_holds_only_if_both_verdicts_hold(verdicts, is_held):
    outcome = Outcome(
        options=OPTIONS, verdicts=tuple(verdicts), took_s=1.5, folder=None
    )
    document = json.loads(json.dumps(outcome.to_object()))
    assert outcome.held is document["held"] is is_held
    assert document["took_ms"] == 1_500
    assert len(document["rounds"]) == len(verdicts)


def test_a_verdict_without_checks_does_not_hold():
    assert not attrs.evolve(verdict("alo"), checks=()).held


@pytest.mark.parametrize("interval_ms", [0, 499, 60_001])
def test_heartbeat_intervals_out_of_range_are_refused(interval_ms):
    with pytest.raises(ConfigurationError, match="--heartbeat-interval must be"):
        attrs.evolve(OPTIONS, heartbeat_interval_ms=interval_ms)
