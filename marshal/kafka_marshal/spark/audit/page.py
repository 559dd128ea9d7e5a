"""The report's page: one file that needs nothing else, and obeys nothing it shows.

Whatever stands in the log may come from anybody who may write there, so the template
escapes every value (PROTOCOL 12). Only the plots go in as they are; they hold shapes.
"""

from collections.abc import Mapping
from typing import Any

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>Audit of {{ facts.coordination_topic }}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem;
 padding: 0 1rem; color: #202124; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: .87rem; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; vertical-align: top;
 border-bottom: 1px solid #e0e0e0; }
td { max-width: 24rem; overflow-wrap: break-word; } .wide { overflow-x: auto; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
code { font-size: .85em; } .note { color: #5f6368; font-size: .87rem; }
.good { color: #1b5e20; } .bad { color: #b71c1c; }
svg { max-width: 100%; height: auto; }
pre { background: #f5f5f5; padding: .6rem; overflow-x: auto; font-size: .8rem; }
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
<h1>Audit of {{ facts.coordination_topic }}</h1>
<p>Cluster {{ facts.cluster_id }}, as of {{ facts.as_of.time_ms | instant }};
{{ entries_count }} records of {{ partitions | length }} coordinating
partitions, {{ claims_count }} claims, {{ handoffs_count }} handoffs.
{% if ranged %}The report is of a range: {{ ranged }}. The fold began at the log's start
all the same.{% endif %}</p>

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
{% if keys_shown < keys_count or bars_shown < claims_count %}
<p class="note">{{ keys_shown }} of {{ keys_count }} keys are drawn, those that
changed hands most often, with {{ bars_shown }} of {{ claims_count }}
claims.</p>
{% endif %}
{{ timeline }}

<h2>Takeover times</h2>
<p class="note">From the release, or from the last renewal of an owner that fell silent,
to the next claim, in log time. A silent owner is stale after 2H at the earliest.</p>
{{ grid(takeovers, ["ending", "handoffs_count", "p50_ms", "p99_ms", "max_ms",
 "late_ms_max"]) }}
{{ gaps }}

<h2>{{ lag_title }}</h2>
<p class="note">{{ lag_note }}</p>
{{ distances }}
{% if lags %}
{{ grid(lags, ["group_id", "partitions_count", "lag", "lag_max"]) }}
{% endif %}

<h2>Heartbeat ages</h2>
<p class="note">How old claims were when they were renewed, of all groups since the
log's start.</p>
{{ ages }}

<h2>Records that took no effect</h2>
{{ grid(refused, ["outcome", "reason", "record_type", "count"]) }}
{% if clients_refused %}
<p class="note">By whom, the {{ clients_refused | length }} that come first:</p>
{{ grid(clients_refused, ["client_id", "reason", "count"]) }}
{% endif %}

<h2>Grants at most once</h2>
{{ grid(grants, ["group_id", "outcome", "count", "offsets_count"]) }}

<h2>Pauses</h2>
{{ grid(pauses, ["group_id", "client_id", "reason", "began", "ending",
 "renewals_count"]) }}

<h2>End state</h2>
{{ grid(partitions, ["coordinating_partition", "first_offset", "next_offset",
 "entries_count", "keys_count", "owned_count", "halted_level", "digest"]) }}
</body>
</html>
"""


def page(values: Mapping[str, Any], plots: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        values: What the template shows, all of it escaped.
        plots: SVG by name, which goes in as it is.
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
    """Return a value as the page writes it: printable, but not escaped yet."""
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
    """Return a time for people, in UTC."""
    from datetime import UTC, datetime

    try:
        moment = datetime.fromtimestamp(value_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{value_ms} ms"
    return moment.isoformat(sep=" ", timespec="seconds").replace("+00:00", " UTC")
