"""Plots are bounded, self-contained SVG without scripts and without text of the log."""

import re
import sys
from xml.etree import ElementTree as ET

import matplotlib as mpl
import pytest

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.spark.audit import plots
from kafka_marshal.spark.audit.plots import LABEL_CHARACTERS_MAX, Bar, _label

HOSTILE = "$\\frac{<script>-->\x1b"
YEAR_MS = 1_700_000_000_000


def bars(clients):
    return [
        Bar(
            lane=f"lane {n % 3}",
            client_id=c,
            start_ms=YEAR_MS + n,
            end_ms=YEAR_MS + n + 9,
        )
        for n, c in enumerate(clients)
    ]


@pytest.mark.parametrize(
    "plot",
    [
        pytest.param(lambda: plots.timeline([]), id="no-claims"),
        pytest.param(lambda: plots.timeline(bars([HOSTILE] * 3)), id="hostile-names"),
        pytest.param(
            lambda: plots.timeline(bars([f"c{n}" for n in range(40)])), id="many"
        ),
        pytest.param(
            lambda: plots.timeline(
                [Bar(lane="l", client_id="c", start_ms=0, end_ms=2**62)]
            ),
            id="hostile-times",
        ),
        pytest.param(lambda: plots.gaps({}), id="no-gaps"),
        pytest.param(
            lambda: plots.gaps({"taken_over": {2_000.0: 3}, "x": {1.0: 1}}), id="gaps"
        ),
        pytest.param(lambda: plots.distances({}), id="no-lines"),
        pytest.param(
            lambda: plots.distances({HOSTILE: [(YEAR_MS, 9), (YEAR_MS + 5, 0)]}),
            id="lines",
        ),
        pytest.param(lambda: plots.ages({}), id="no-ages"),
        pytest.param(lambda: plots.ages({6: 900, 80: 1}), id="ages"),
    ],
)
def test_a_plot_is_one_valid_svg(plot):
    svg = plot()
    assert ET.fromstring(svg).tag.endswith("svg")
    assert "<script" not in svg
    assert "<text" not in svg
    assert re.findall(r'href="(?!#)', svg) == []
    assert len(svg) < 400_000


def test_a_long_name_keeps_its_end():
    """Lanes of one topic differ only in the partition, at the end."""
    lanes = [f"{'g' * 200} {'t' * 249}-{n}" for n in (3, 12)]
    labels = [_label(lane) for lane in lanes]
    assert [label[-3:] for label in labels] == ["t-3", "-12"]
    assert {len(label) for label in labels} == {LABEL_CHARACTERS_MAX}
    assert _label("g" * LABEL_CHARACTERS_MAX) == "g" * LABEL_CHARACTERS_MAX


@pytest.mark.parametrize(
    ("last_s", "wanted", "below"),
    [
        (30, "12:00:30", "1970-01-01"),
        (3_600, "12:30", "1970-01-01"),
        (5 * 86_400, "01-03", "1970"),
    ],
)
def test_times_are_in_utc_whatever_the_settings(last_s, wanted, below):
    with mpl.rc_context({"timezone": "Asia/Tokyo"}):
        _, axes = plots._axes(2.0)
        axes.plot([0.5, 0.5 + last_s / 86_400], [0, 1])
        plots._of_time(axes)
        labels = [each.get_text() for each in axes.get_xticklabels()]
    assert wanted in labels
    assert axes.get_xlabel() == "UTC"
    assert axes.xaxis.get_major_formatter().get_offset() == below


def test_the_same_data_gives_the_same_plot():
    assert plots.ages({6: 9}) == plots.ages({6: 9})


def test_a_missing_extra_is_named(monkeypatch):
    plots.require_report()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match=r"kafka-marshal\[report\]"):
        plots.require_report()
