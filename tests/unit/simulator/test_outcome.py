"""Outcomes of a run: failures and reports."""

import pytest

from simulator.checkers import HandOuts, LogWatcher, Violation
from simulator.node import Cluster
from simulator.outcome import (
    TRANSCRIPT_TAIL,
    UNEXPECTED,
    Report,
    RunFailed,
    violation_of,
)


def test_a_failed_run_shows_violation_command_and_transcript_end():
    lines = [f"line {number}." for number in range(TRANSCRIPT_TAIL + 1)]
    failed = RunFailed(7, Violation("S4", "two"), repeat="do it", transcript=lines)
    assert (failed.seed, failed.invariant, failed.transcript) == (7, "S4", lines)
    text = str(failed)
    assert text.startswith("seed 7: S4: two\ndo it\n")
    assert text.endswith(lines[-1])
    assert lines[0] not in text


def test_an_unexpected_error_is_a_violation_with_its_last_line_and_place():
    with pytest.raises(KeyError) as caught:
        {}["missing"]
    found = violation_of(caught.value)
    place = "test_an_unexpected_error_is_a_violation_with_its_last_line_and_place"
    assert found.invariant == UNEXPECTED
    assert str(found).startswith("error: KeyError: 'missing' (test_outcome.py:")
    assert str(found).endswith(f"in {place})")
    assert violation_of(found) is found


def test_a_report_has_the_figures_of_the_judges():
    watcher = LogWatcher(Cluster().kafka, 1)
    hand_outs = HandOuts(watcher, is_at_most_once=False)
    hand_outs.count, hand_outs.duplicate_count, watcher.claims = 5, 2, 3
    report = Report.of(
        7,
        ["cut"],
        virtual_ms=9,
        hand_outs=hand_outs,
        watcher=watcher,
        seen={"b": 1, "a": 2},
        transcript=["x"],
    )
    assert report == Report(
        seed=7,
        faults=("cut",),
        virtual_ms=9,
        handed=5,
        duplicates=2,
        claims=3,
        seen={"a": 2, "b": 1},
        transcript=("x",),
    )
    assert list(report.seen) == ["a", "b"]
