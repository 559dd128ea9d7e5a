"""The report of tests with real faults: its totals, verdict and page."""

import json

import chaos_report
import pytest

KILLS = {
    "name": "client_kill",
    "title": "an owner is killed",
    "h_ms": 2_000,
    "runs": 200,
    "takeover_ms": [3_000] * 198 + [4_400, 9_000],
    "verdict": "passed",
}
DEATH = {
    "name": "leader_kill",
    "title": "the leader of T0 is killed",
    "h_ms": 10_000,
    "runs": 2,
    "kept": 2,
    "owners": 8,
    "owners_kept": 8,
    "gaps": [
        {"alo fast": 4_000, "alone fast": 3_900, "alone kafka-python": 1},
        {"alo fast": 6_100, "alone fast": 5_000, "amo kafka-python": 7, "alone x": 1},
    ],
    "history": {
        "alo": {"handed": 70, "violations": 0, "duplicates_max": 4},
        "amo": {"handed": 30, "violations": 1, "duplicates_max": 0},
    },
    "gap_ms": [4_000, 6_100],
    "own_ms": [3_900, 4_900],
    "bare_gap_ms": [3_900, 5_000],
    "losses": 0,
    "verdict": "passed",
    "notes": ["<b>escaped</b>"],
}
OVER = "100 ms in the median, 1200 ms at p99, 1200 ms max"
OVER_BARE = "100 ms in the median, 1100 ms at p99, 1100 ms max"
NO_DISK = {"name": "disk_full", "title": "a disk", "verdict": "skipped: no tmpfs"}
BROKEN = {"name": "quorum_lost", "title": "none", "losses": 3, "verdict": "failed: x"}


@pytest.fixture
def report(tmp_path, capsys):
    def make(*found):
        folder = tmp_path / "findings"
        folder.mkdir()
        for each in found:
            (folder / f"{each['name']}.json").write_text(json.dumps(each))
        status = chaos_report.main(tmp_path)
        page = (tmp_path / "report.html").read_text()
        return status, json.loads((tmp_path / "report.json").read_text()), page

    return make


def test_spread_uses_the_nearest_rank_for_percentiles():
    assert chaos_report.spread([]) == {"count": 0, "p50": "-", "p99": "-", "max": "-"}
    assert chaos_report.spread(KILLS["takeover_ms"]) == {
        "count": 200,
        "p50": 3_000,
        "p99": 3_000,
        "max": 9_000,
    }


def test_the_report_shows_totals_and_whether_targets_are_met(report):
    status, found, page = report(KILLS, DEATH, NO_DISK)
    assert status == 0
    totals = {"passed": 2, "failed": 0, "skipped": 1, "losses": 0, "violations": 1}
    assert found["totals"] == totals
    assert [(row["reached"], row["met"]) for row in found["figures"]] == [
        ("3000 ms over 200 kills", True),
        ("2 of 2 runs, 8 of 8 owners", True),
        (f"{OVER} after it, over 2 runs (after bare clients: {OVER_BARE})", False),
    ]
    (row,) = [row for row in found["rows"] if row["name"] == "leader_kill"]
    assert (row["within"], row["kept"], row["gap"]["max"]) == ("1/2", "2/2", 6_100)
    assert (row["owners"], row["over"]["max"]) == ("8/8", 1_100)
    assert (row["own"]["max"], row["over_own"]["max"]) == (4_900, 1_200)
    assert (row["history"], row["repeats_max"]) == ("1 of 100", 4)
    assert row["gap_of"]["alone fast"]["max"] == 5_000
    assert row["over_of"]["alo fast"]["p50"] == 100
    assert "alone kafka-python" in page
    assert "skipped: no tmpfs" in page
    assert "&lt;b&gt;escaped" in page


def test_a_failed_test_fails_the_run(report):
    status, found, _ = report(KILLS, BROKEN)
    assert status == 1
    assert found["totals"]["losses"] == 3


def test_a_run_without_findings_has_failed(report):
    assert report()[0] == 1
