"""The report of an audit: one page of bounded size.

Spark aggregates; the driver gets only the top rows of lists, and counts per bucket.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kafka_marshal.kafka_io.transport import open_data_log
from kafka_marshal.protocol.hashing import RESERVED_TOPICS
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.spark.audit import plots
from kafka_marshal.spark.audit.folding import Source
from kafka_marshal.spark.audit.invariants import INVARIANTS, Finding
from kafka_marshal.spark.audit.job import IS_DATA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kafka_marshal.spark.audit.job import Audit

KEYS_SHOWN_MAX = 40
BARS_SHOWN_MAX = 4_000
ROWS_SHOWN_MAX = 50
GROUPS_SHOWN_MAX = 8
MOMENTS_MAX = 120
PARTITIONS_ASKED_MAX = 10_000

Row = dict[str, Any]
Ends = Mapping[TopicPartition, int]

_KEYS = f"""
SELECT group_id, topic, partition, COUNT(*) AS claims_count, MAX(start_offset) AS last
FROM intervals WHERE {IS_DATA} GROUP BY group_id, topic, partition
ORDER BY claims_count DESC, group_id, topic, partition LIMIT :limit
"""  # noqa: S608 - of constants
_COUNTS = f"""
SELECT COUNT(*) AS claims_count,
       COUNT(DISTINCT group_id, topic, partition) AS keys_count
FROM intervals WHERE {IS_DATA}
"""  # noqa: S608
_BARS = """
SELECT i.group_id, i.topic, i.partition, i.client_id, i.start_append_ms AS start_ms,
       COALESCE(i.end_append_ms, p.append_ms) AS end_ms
FROM intervals i JOIN shown_keys k
  ON i.group_id = k.group_id AND i.topic = k.topic AND i.partition = k.partition
JOIN partitions p ON i.coordinating_partition = p.coordinating_partition
ORDER BY i.start_append_ms DESC LIMIT :limit
"""
_GAPS = f"""
SELECT ending, CAST(FLOOR(LOG2(GREATEST(gap_ms, 1)) * 4) AS INT) AS bucket,
       COUNT(*) AS count
FROM handoffs WHERE {IS_DATA} GROUP BY ending, bucket
"""  # noqa: S608
_REFUSED = """
SELECT outcome, reason, record_type, COUNT(*) AS count FROM refused
GROUP BY outcome, reason, record_type ORDER BY count DESC, outcome, reason LIMIT :limit
"""
_CLIENTS_REFUSED = """
SELECT client_id, reason, COUNT(*) AS count FROM refused WHERE client_id IS NOT NULL
GROUP BY client_id, reason ORDER BY count DESC, client_id, reason LIMIT 10
"""
_GRANTS = """
SELECT group_id, outcome, COUNT(*) AS count,
       SUM(CASE WHEN outcome = 'granted' THEN last_offset - first_offset + 1 ELSE 0 END)
         AS offsets_count
FROM grants GROUP BY group_id, outcome ORDER BY group_id, outcome LIMIT :limit
"""
_PAUSES = """
SELECT group_id, client_id, person, reason, topics, MIN(start_append_ms) AS start_ms,
       MAX(until_ms) AS until_ms, MAX(ending) AS ending,
       MAX(CASE WHEN ending <> 'ran_out' THEN end_append_ms END) AS end_ms,
       MAX(renewals_count) AS renewals_count
FROM pauses GROUP BY group_id, op_id, client_id, person, reason, topics
ORDER BY start_ms DESC LIMIT :limit
"""
_AGES = """
SELECT twentieths_of_h, SUM(beats_count) AS count FROM ages GROUP BY twentieths_of_h
"""
# Samples of positions, and the last position of each claim, which is in no sample.
_SAMPLES = """
SELECT group_id, topic, partition, offset, append_ms, position FROM positions
UNION ALL
SELECT i.group_id, i.topic, i.partition, COALESCE(i.end_offset, p.next_offset),
       COALESCE(i.end_append_ms, p.append_ms), i.position
FROM intervals i JOIN partitions p
  ON i.coordinating_partition = p.coordinating_partition
WHERE i.position IS NOT NULL
"""
_SPAN = "SELECT MIN(append_ms) AS first, MAX(append_ms) AS last FROM samples"
_GROUPS = """
SELECT group_id, COUNT(*) AS count FROM samples GROUP BY group_id
ORDER BY count DESC, group_id LIMIT :limit
"""
# The distance of each key from its reference (log end, else its highest position) at
# each sample. A group's sum changes by the difference from the key's last sample. In
# floating point, because positions in the log may be too large for sums of integers.
_DISTANCES = """
SELECT group_id, moment, SUM(change) AS change FROM (
  SELECT p.group_id,
         CAST(FLOOR((CAST(p.append_ms AS DOUBLE) - :first) / :step) AS INT) AS moment,
         CAST(COALESCE(before, reference) AS DOUBLE) - position AS change
  FROM (
    SELECT s.*, LAG(s.position) OVER (
             PARTITION BY s.group_id, s.topic, s.partition
             ORDER BY s.append_ms, s.offset) AS before,
           COALESCE(e.log_end, MAX(s.position) OVER (
             PARTITION BY s.group_id, s.topic, s.partition)) AS reference
    FROM samples s LEFT JOIN data_ends e
      ON s.topic = e.topic AND s.partition = e.partition
  ) p
  JOIN shown_groups g ON p.group_id = g.group_id
) GROUP BY group_id, moment ORDER BY group_id, moment
"""
_LAGS = """
SELECT i.group_id, COUNT(*) AS partitions_count,
       SUM(GREATEST(e.log_end - i.position, 0)) AS lag,
       MAX(GREATEST(e.log_end - i.position, 0)) AS lag_max
FROM intervals i JOIN data_ends e ON i.topic = e.topic AND i.partition = e.partition
WHERE i.ending = 'open' AND i.position IS NOT NULL
GROUP BY i.group_id ORDER BY lag DESC, i.group_id LIMIT :limit
"""
_DATA = """
SELECT DISTINCT topic, partition FROM intervals ORDER BY topic, partition LIMIT :limit
"""
TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Audit of {{ facts.coordination_topic }}</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem;
 padding: 0 1rem; color: #202124; background: #fff; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: .87rem; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; vertical-align: top;
 border-bottom: 1px solid #e0e0e0; }
th { overflow-wrap: normal; } td { max-width: 24rem; overflow-wrap: break-word; }
.wide { overflow-x: auto; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
code { font-size: .85em; } .note { color: #5f6368; font-size: .87rem; }
.good { color: #1b5e20; } .bad { color: #b71c1c; }
svg { display: block; max-width: 100%; min-width: 44rem; height: auto; }
pre { background: #f5f5f5; padding: .6rem; overflow-x: auto; font-size: .8rem; }
@media screen and (prefers-color-scheme: dark) {
 body { color: #e3e3e3; background: #1a1a1a; } th, td { border-color: #444; }
 .note { color: #a8adb2; } .good { color: #81c784; } .bad { color: #ef9a9a; }
 pre { background: #2a2a2a; } svg { filter: invert(.9) hue-rotate(180deg); }
}
@media print {
 body { margin: 0; max-width: none; } h2, h3 { break-after: avoid; }
 svg { min-width: 0; } svg, tr { break-inside: avoid; }
 .wide, pre { overflow: visible; } pre { white-space: pre-wrap; }
}
</style>
</head>
<body>
{% macro grid(rows, columns) %}
{% if rows %}
<div class="wide"><table><thead><tr>
{% for name in columns %}<th>{{ name | replace("_", " ") }}</th>{% endfor %}
</tr></thead><tbody>
{% for row in rows %}<tr>
{% for name in columns %}
<td{% if row[name] is number %} class="n"{% endif %}>{{ row[name] }}</td>
{% endfor %}
</tr>{% endfor %}
</tbody></table></div>
{% else %}<p class="note">none</p>{% endif %}
{% endmacro %}
{% macro plot(svg, what) %}
<div class="wide"><div role="img" aria-label="{{ what }}">{{ svg }}</div></div>
{% endmacro %}
<h1>Audit of {{ facts.coordination_topic }}</h1>
<p>Cluster {{ facts.cluster_id }}, as of {{ facts.as_of.time_ms | instant }};
{{ entries_count }} records of {{ partitions | length }} coordinating
partitions, {{ claims_count }} claims, {{ handoffs_count }} handoffs.
{% if ranged %}The report is of a range: {{ ranged }}. The fold still began at the
log's start.{% endif %}</p>

<h2>Invariants</h2>
{% if findings %}
<p class="bad">{{ findings | length }} of {{ invariants | length }} are broken.</p>
{% for each in findings %}
<h3 class="bad">{{ each.invariant.name }}: {{ each.count }}
{{ "row" if each.count == 1 else "rows" }}</h3>
<p>{{ each.invariant.meaning }} ({{ each.invariant.clauses }})</p>
{{ grid(each.rows, each.rows[0].keys() | list) }}
<details><summary>query</summary><pre>{{ each.invariant.sql }}</pre></details>
{% endfor %}
{% else %}
<p class="good">All {{ invariants | length }} hold:
{{ invariants | map(attribute="name") | join(", ") }}.</p>
{% endif %}

<h2>Who owned what</h2>
<p class="note">{% if keys_shown < keys_count or bars_shown < claims_count %}
{{ keys_shown }} of {{ keys_count }} keys are drawn, those that changed hands most
often, with the last {{ bars_shown }} of {{ claims_count }} claims.
{% endif %}
<code>marshal claims history GROUP TOPIC:PARTITION</code> lists those of one
partition.</p>
{{ plot(timeline, "The owners of each partition over time") }}

<h2>Takeover times</h2>
<p class="note">From the release, or from the last renewal of a silent owner, to the
next claim, in log time. A silent owner is stale after two heartbeat intervals at the
earliest. Late is how long a process that waited for a key got it after it could.</p>
{{ grid(takeovers, ["ending", "handoffs_count", "p50_ms", "p99_ms", "max_ms",
 "late_ms_max"]) }}
{{ plot(gaps, "Number of handoffs by time without owner") }}

<h2>{{ lag_title }}</h2>
<p class="note">{{ lag_note }}</p>
{{ plot(distances, lag_title) }}
{% if lags %}
{{ grid(lags, ["group_id", "partitions_count", "lag", "lag_max"]) }}
{% endif %}

<h2>Heartbeat ages</h2>
<p class="note">How old claims were when they were renewed, of all groups since the
log's start.</p>
{{ plot(ages, "Number of renewals by age of the claim") }}

<h2>Records that took no effect</h2>
{{ grid(refused, ["outcome", "reason", "record_type", "count"]) }}
{% if clients_refused %}
<p class="note">The clients with most of them:</p>
{{ grid(clients_refused, ["client_id", "reason", "count"]) }}
{% endif %}

<h2>Grants (delivery amo)</h2>
<p class="note"><code>marshal grants losses --group GROUP</code> lists what was never
processed.</p>
{{ grid(grants, ["group_id", "outcome", "count", "offsets_count"]) }}

<h2>Pauses</h2>
<p class="note">A reset has one, too; <code>marshal groups history GROUP</code> lists
what admins did.</p>
{{ grid(pauses, ["group_id", "client_id", "person", "reason", "topics", "began",
 "until", "ending", "ended", "renewals_count"]) }}

<h2>End state</h2>
{{ grid(partitions, ["coordinating_partition", "first_offset", "next_offset",
 "entries_count", "keys_count", "owned_count", "halted_level", "digest"]) }}
</body>
</html>
"""


def write_report(
    audit: "Audit",
    path: str | Path,
    *,
    findings: Sequence[Finding],
    ends: Ends | None = None,
) -> None:
    """Write an audit as one page of HTML.

    Args:
        audit: The audit.
        path: The file; an existing one is replaced.
        findings: Result of ``Audit.check``.
        ends: Log ends of the data partitions, from ``data_ends``. With these the page
            shows the lag, else the distance to the highest known position.

    Raises:
        ConfigurationError: The packages for plots are missing.
    """
    plots.require_report()
    text = render(audit, findings=findings, ends=ends)
    Path(path).write_text(text, encoding="utf-8")


def data_ends(audit: "Audit", source: Source) -> Ends:
    """Query the log ends of all data partitions of the audit.

    Raises:
        CoordinationError: The cluster did not answer.
    """
    rows = _rows(audit.spark, _DATA, limit=PARTITIONS_ASKED_MAX)
    places = [TopicPartition(row["topic"], row["partition"]) for row in rows]
    data = open_data_log(source)
    try:
        names = sorted({p.topic for p in places if p.topic not in RESERVED_TOPICS})
        known = data.describe(names, source.timeout_ms)
        there = [
            place
            for place in places
            if place.topic in known
            and place.partition < known[place.topic].partition_count
        ]
        ranges = data.ranges(there, source.timeout_ms)
    finally:
        data.close(0)
    return {place: found.end for place, found in ranges.items()}


def render(
    audit: "Audit", *, findings: Sequence[Finding], ends: Ends | None = None
) -> str:
    """Return the page of an audit."""
    spark = audit.spark
    parts = audit.partitions()
    pauses = _rows(spark, _PAUSES, limit=ROWS_SHOWN_MAX)
    for row in pauses:
        row["began"] = instant(row["start_ms"])
        row["until"] = instant(row["until_ms"])
        row["ended"] = None if row["end_ms"] is None else instant(row["end_ms"])
    (counts,) = _rows(spark, _COUNTS)
    bars, takeovers = _bars(spark), audit.takeovers()
    lines, lags = _lines(spark, ends or {})
    bounds = {k: v for k, v in audit.facts["bounds"].items() if v is not None}
    values = {
        "facts": audit.facts,
        "partitions": parts,
        "entries_count": sum(row["entries_count"] for row in parts),
        **counts,
        "handoffs_count": sum(row["handoffs_count"] for row in takeovers),
        "ranged": ", ".join(f"{name} {value}" for name, value in bounds.items()),
        "invariants": INVARIANTS,
        "findings": findings,
        "keys_shown": len({bar.lane for bar in bars}),
        "bars_shown": len(bars),
        "takeovers": takeovers,
        "refused": _rows(spark, _REFUSED, limit=ROWS_SHOWN_MAX),
        "clients_refused": _rows(spark, _CLIENTS_REFUSED),
        "grants": _rows(spark, _GRANTS, limit=ROWS_SHOWN_MAX),
        "pauses": pauses,
        "lags": lags,
        **_words(is_real=ends is not None),
    }
    gaps: dict[str, dict[float, int]] = {}
    for row in _rows(spark, _GAPS):
        gaps.setdefault(row["ending"], {})[2 ** (row["bucket"] / 4)] = row["count"]
    ages = {row["twentieths_of_h"]: row["count"] for row in _rows(spark, _AGES)}
    drawn = {
        "timeline": plots.timeline(bars),
        "gaps": plots.gaps(gaps),
        "distances": plots.distances(lines),
        "ages": plots.ages(ages),
    }
    return page(values, drawn)


def _words(*, is_real: bool) -> dict[str, str]:
    if is_real:
        return {
            "lag_title": "Lag over time",
            "lag_note": "From each position to where the data partition ended "
            "when the report was made, summed over a group's partitions: what is at "
            "the right is the lag now.",
        }
    return {
        "lag_title": "Distance to the highest known position over time",
        "lag_note": "From each position to the highest one that the log has of the "
        "same partition, summed over a group's partitions. The ends of the data "
        "partitions were not looked up; --with-lag does that.",
    }


def _bars(spark: "SparkSession") -> list[plots.Bar]:
    """Return the bars of the timeline, in the order of its lanes."""
    keys = spark.sql(_KEYS, args={"limit": KEYS_SHOWN_MAX})
    keys.createOrReplaceTempView("shown_keys")
    rows = _rows(spark, _BARS, limit=BARS_SHOWN_MAX)
    rows.sort(key=itemgetter("group_id", "topic", "partition", "start_ms"))
    return [
        plots.Bar(
            lane=f"{row['group_id']} {row['topic']}-{row['partition']}",
            client_id=row["client_id"],
            start_ms=row["start_ms"],
            end_ms=max(row["start_ms"], row["end_ms"] or 0),
        )
        for row in rows
    ]


def _lines(
    spark: "SparkSession", ends: Ends
) -> tuple[dict[str, list[tuple[int, float]]], list[Row]]:
    """Return the distances of groups over time, and the current lags."""
    rows = [(*place, end) for place, end in ends.items()]
    form = "topic string, partition int, log_end bigint"
    spark.createDataFrame(rows, form).createOrReplaceTempView("data_ends")
    spark.sql(_SAMPLES).createOrReplaceTempView("samples")
    groups = spark.sql(_GROUPS, args={"limit": GROUPS_SHOWN_MAX})
    groups.createOrReplaceTempView("shown_groups")
    (span,) = _rows(spark, _SPAN)
    lines: dict[str, list[tuple[int, float]]] = {}
    if span["first"] is not None:
        step_ms = max(1, (span["last"] - span["first"]) // MOMENTS_MAX + 1)
        for row in _rows(spark, _DISTANCES, first=span["first"], step=step_ms):
            line = lines.setdefault(row["group_id"], [])
            before = line[-1][1] if line else 0.0
            at_ms = span["first"] + row["moment"] * step_ms
            line.append((at_ms, before + row["change"]))
    return lines, _rows(spark, _LAGS, limit=ROWS_SHOWN_MAX)


def _rows(spark: "SparkSession", sql: str, **args: int) -> list[Row]:
    return [row.asDict() for row in spark.sql(sql, args=args).collect()]


def page(values: Mapping[str, Any], plots: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        values: Values for the template; they are escaped.
        plots: SVG by name; it is not escaped.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else shown(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["instant"] = instant
    drawn = {name: Markup(svg) for name, svg in plots.items()}  # noqa: S704 - shapes
    return environment.from_string(TEMPLATE).render(**values, **drawn)


def shown(value: object) -> str:
    """Return a value as printable text, without escaping for HTML."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}"
    text = str(value)
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\n" else f"\\u{ord(c):04x}" for c in text
    )


def instant(value_ms: int) -> str:
    """Return a readable time in UTC."""
    from datetime import UTC, datetime

    try:
        moment = datetime.fromtimestamp(value_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{value_ms} ms"
    return moment.isoformat(sep=" ", timespec="seconds").replace("+00:00", " UTC")
