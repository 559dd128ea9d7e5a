"""Plots of the report as embedded SVG, of bounded size.

Not part of ``report``, because this module imports matplotlib.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import StringIO
from typing import TYPE_CHECKING, Any, NamedTuple

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.history.historian import AGES_PER_H

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLIENTS_COLOURED_MAX = 12
LABEL_CHARACTERS_MAX = 48
# Matplotlib's metadata contains URLs; the page must not refer to anything outside.
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_OTHERS = "#d5d8dc"  # differs from the gray of a named client
_YEAR_9999_MS = 253_370_764_800_000
_WIDTH_INCHES = 10.0
_LEGEND_CHARACTERS = 120  # of all columns together


class Bar(NamedTuple):
    """A claim on the timeline: its client, and its time in epoch ms."""

    lane: str
    client_id: str
    start_ms: int
    end_ms: int


def require_report() -> None:
    """Require the packages for plots.

    Raises:
        ConfigurationError: The extra is missing.
    """
    try:
        import jinja2
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigurationError(
            f"a report needs {error.name}, which is not installed; run: "
            "pip install 'kafka-marshal[report]'",
            setting="report",
        ) from error
    assert jinja2.__name__
    assert mpl.__name__


def timeline(bars: Sequence[Bar]) -> str:
    """Draw owners over time: a lane for each key, a color for each client."""
    lanes = list(dict.fromkeys(bar.lane for bar in bars))
    counts: dict[str, int] = {}
    for bar in bars:
        counts[bar.client_id] = counts.get(bar.client_id, 0) + 1
    by_count = sorted(counts, key=lambda name: (-counts[name], name))
    named = by_count[:CLIENTS_COLOURED_MAX]
    colours = {name: f"C{i}" for i, name in enumerate(named[:10])}
    colours |= dict(zip(named[10:], ("#1b5e20", "#4a148c"), strict=False))
    labels = [_label(name) for name in named]
    if len(by_count) > len(named):
        labels.append(f"{len(by_count) - len(named)} others")
    # The legend is below the plot, because names of clients are long.
    legend_columns = _LEGEND_CHARACTERS // max(map(len, [*labels, "." * 20]))
    legend_rows = -(-len(labels) // legend_columns)
    figure, axes = _axes(1.2 + 0.22 * (len(lanes) + legend_rows))
    for number, lane in enumerate(lanes):
        mine = [bar for bar in bars if bar.lane == lane]
        spans = [(_day(b.start_ms), _day(b.end_ms) - _day(b.start_ms)) for b in mine]
        tints = [colours.get(bar.client_id, _OTHERS) for bar in mine]
        axes.broken_barh(spans, (number - 0.4, 0.8), facecolors=tints)
    axes.set_yticks(range(len(lanes)), [_label(lane) for lane in lanes])
    axes.invert_yaxis()
    handles: list[Any] = [axes.bar(0, 0, color=colours[name]) for name in named]
    if len(labels) > len(named):
        handles.append(axes.bar(0, 0, color=_OTHERS))
    figure.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=legend_columns,
        frameon=False,
    )
    if bars:
        first, last = min(b.start_ms for b in bars), max(b.end_ms for b in bars)
        axes.set_xlim(_day(first), _day(max(last, first + 1)))
    _of_time(axes)
    return _svg(figure)


def gaps(counts: Mapping[str, Mapping[float, int]]) -> str:
    """Draw a histogram of how long keys had no owner.

    Args:
        counts: Numbers of handoffs, by ending of the last claim and lower edge of the
            bucket in ms. Each fourth bucket has twice the lower edge.
    """
    figure, axes = _axes(2.6)
    for ending, buckets in counts.items():
        edges = sorted(buckets)
        heights = [buckets[edge] for edge in edges]
        widths = [edge * (2**0.25 - 1) for edge in edges]
        name = ending.replace("_", " ")
        axes.bar(edges, heights, widths, align="edge", alpha=0.6, label=name)
    axes.set_xscale("log")
    axes.set_xlabel("gap in log time, ms")
    axes.set_ylabel("handoffs")
    if counts:
        axes.legend(frameon=False)
    return _svg(figure)


def distances(lines: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Draw over time (epoch ms) how many records groups are behind a reference."""
    figure, axes = _axes(2.6)
    for name, points in lines.items():
        moments = [_day(at_ms) for at_ms, _ in points]
        axes.step(moments, [n for _, n in points], where="post", label=_label(name))
    _of_time(axes)
    axes.set_ylabel("records")
    if lines:
        axes.legend(frameon=False)
    return _svg(figure)


def ages(counts: Mapping[int, int]) -> str:
    """Draw renewals by the age of the claim, in twentieths of a heartbeat interval."""
    figure, axes = _axes(2.6)
    edges = [twentieths / AGES_PER_H for twentieths in sorted(counts)]
    heights = [counts[twentieths] for twentieths in sorted(counts)]
    axes.bar(edges, heights, 1 / AGES_PER_H, align="edge")
    for bound, name in ((1, "1 interval"), (2, "2 intervals")):
        axes.axvline(bound, color="#c62828", linewidth=0.8)
        axes.text(bound, 1, f" {name}", transform=axes.get_xaxis_transform(), va="top")
    if counts:
        axes.set_yscale("log")
    axes.set_xlabel("age at renewal, in heartbeat intervals")
    axes.set_ylabel("renewals")
    return _svg(figure)


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib as mpl

    # Text is drawn as paths: independent of fonts, and without active content.
    with mpl.rc_context(
        {"svg.fonttype": "path", "svg.hashsalt": "kafka-marshal", "font.size": 9}
    ):
        yield


def _axes(height_inches: float) -> tuple["Figure", "Axes"]:
    from matplotlib.figure import Figure

    with _style():
        figure = Figure(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
        axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _of_time(axes: "Axes") -> None:
    """Label the horizontal axis in UTC, independently of matplotlib's settings."""
    dates: Any = import_module("matplotlib.dates")  # has no types
    locator = dates.AutoDateLocator(tz="UTC")
    minute, date = "%H:%M", "%Y-%m-%d"
    form = dates.ConciseDateFormatter(
        locator,
        tz="UTC",
        # For ticks by years, months, days, hours, minutes and seconds. zero_formats: at
        # the start of the next larger unit. offset_formats: the text below the axis.
        formats=["%Y", "%Y-%m", "%m-%d", minute, minute, "%H:%M:%S"],
        zero_formats=["", "%Y", "%Y-%m", "%m-%d", minute, "%H:%M:%S"],
        offset_formats=["", "", "%Y", date, date, date],
    )
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(form)
    axes.set_xlabel("UTC")


def _svg(figure: "Figure") -> str:
    buffer = StringIO()
    with _style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = _METADATA.sub("", buffer.getvalue())
    return text[text.index("<svg") :]


def _day(at_ms: int) -> float:
    """Return a time in days since 1970, as matplotlib needs it."""
    # Timestamps by wrong clocks may be in years that no calendar has.
    return min(max(at_ms, 0), _YEAR_9999_MS) / 86_400_000


def _label(text: str) -> str:
    """Return a label: short, and not parsed as a formula.

    The middle is cut, because the end has the partition, or the part that differs
    between the processes of a deployment.
    """
    half = LABEL_CHARACTERS_MAX // 2
    is_short = len(text) <= LABEL_CHARACTERS_MAX
    short = text if is_short else f"{text[: half - 1]}…{text[-half:]}"
    shown = "".join(c if c.isprintable() else "\ufffd" for c in short)
    return shown.replace("$", r"\$")
