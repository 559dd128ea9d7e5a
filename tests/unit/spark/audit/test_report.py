"""The page of the report."""

import re

from kafka_marshal.spark.audit.invariants import INVARIANTS, OVERLAP, Finding
from kafka_marshal.spark.audit.job import _TAKEOVERS
from kafka_marshal.spark.audit.report import (
    _COUNTS,
    _GAPS,
    _KEYS,
    instant,
    page,
    shown,
)

HOSTILE = "</td><script>alert(1)</script>\x1b[31m\u202e"
PLOTS = dict.fromkeys(("timeline", "gaps", "distances", "ages"), "<svg></svg>")


def values(**change):
    return {
        "facts": {
            "coordination_topic": HOSTILE,
            "cluster_id": HOSTILE,
            "as_of": {"time_ms": 0},
        },
        "partitions": [],
        "entries_count": 1_234_567,
        "claims_count": 0,
        "handoffs_count": 0,
        "ranged": "",
        "invariants": INVARIANTS,
        "findings": [],
        "keys_shown": 0,
        "keys_count": 0,
        "bars_shown": 0,
        "takeovers": [],
        "refused": [],
        "clients_refused": [],
        "grants": [],
        "pauses": [],
        "lags": [],
        "lag_title": "Lag",
        "lag_note": "note",
    } | change


def test_values_are_escaped_and_plots_are_not():
    row = {"outcome": HOSTILE, "reason": None, "record_type": HOSTILE, "count": 3}
    text = page(values(refused=[row]), PLOTS)
    assert "<script" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "&lt;script&gt;" in text
    assert text.count("<svg></svg>") == 4
    assert "1,234,567 records" in text
    assert "All 9 hold: overlap, tokens_grow" in " ".join(text.split())


def test_findings_are_shown_with_rows_and_query():
    finding = Finding(OVERLAP, 21, ({"client_id": HOSTILE, "start_offset": 5},))
    text = page(values(findings=[finding], ranged="from_ms 5"), PLOTS)
    assert "1 of 9 are broken" in text
    assert "overlap: 21 rows" in " ".join(text.split())
    assert "LEAD(start_offset)" in text
    assert "from_ms 5" in text
    assert "<script" not in text


def test_the_page_states_how_many_keys_are_drawn():
    text = page(values(keys_shown=40, keys_count=5_000, bars_shown=4_000), PLOTS)
    assert "40 of 5,000 keys are drawn" in text


def test_the_page_fits_a_phone_a_dark_screen_and_paper():
    text = page(values(), PLOTS)
    assert '<meta name="viewport" content="width=device-width' in text
    assert "color-scheme: light dark" in text
    assert "@media screen and (prefers-color-scheme: dark)" in text
    assert "@media print" in text
    assert len(re.findall(r'role="img" aria-label="\w', text)) == len(PLOTS)


def test_claims_of_reserved_keys_are_omitted():
    """They are claimed every few minutes, and would crowd out all others."""
    for sql in (_KEYS, _COUNTS, _GAPS, _TAKEOVERS):
        assert "topic NOT IN ('/checkpoint', '/planner')" in sql


def test_values_and_times_are_formatted_for_readers():
    assert [shown(v) for v in (None, True, False, 1_000, 2.6, "x")] == [
        "-",
        "yes",
        "no",
        "1,000",
        "3",
        "x",
    ]
    assert shown("a\tb\n") == "a\\u0009b\n"
    assert instant(0) == "1970-01-01 00:00:00 UTC"
    assert instant(2**62) == f"{2**62} ms"
