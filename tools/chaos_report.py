"""Makes one report from the findings of `make chaos`, as JSON and as a page.

Run as ``python tools/chaos_report.py DIRECTORY``: reads ``findings/*.json`` there,
writes ``report.json`` and ``report.html``, prints one line for each fault.
"""

import json
import math
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jinja2 import Environment

FIGURE_TAKEOVER_MS = 500
FIGURE_GAP_MS = 1_000
FIGURE_KEPT = 0.99

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Real faults on three brokers</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 80em; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid #ccc; padding: .3em .6em; text-align: right; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
.failed { background: #fdd; } .skipped { color: #777; } small { color: #555; }
</style>
<h1>Real faults on three brokers</h1>
<p>{{ run.at }}, commit {{ run.commit }}, {{ run.machine }}, load {{ run.load }}.
<b>{{ totals.failed }} failed, {{ totals.passed }} passed,
{{ totals.skipped }} skipped.</b> Losses: {{ totals.losses }}; violations by the
checker of histories: {{ totals.violations }}.</p>
<p>Two workers in each of two groups, one at least once and one at most once, on both
transports, under a steady stream. <i>Gap</i>: the longest that any partition had no
work; <i>alone</i>: the same of a bare producer and consumer in the same run, so what
the brokers themselves took; <i>over</i>: gap minus alone, of each run the worst, each
guarantee and transport against bare clients of the same transport; <i>own</i>: what
the brokers took to replace a leader, until every partition took records again, and
<i>over own</i>: gap minus that. <i>Claims kept</i>:
runs in which all owners did; <i>owners</i>: how many did, each counted in each run.
<i>Repeats</i> (at least once) all lie within the bound of what was handled since the
last accepted position; the most that one takeover repeated stands beside.
<i>Unprocessed</i> (at most once) was granted to an owner that died, within {{ bound }}
of one claim. <i>In hand</i>: records that an owner was in the middle of when its
successor began. <i>History</i>: what the checker of simulated histories says of what
the workers noted: violations of S1, S3, S4, S7, 1.4, 6.1, 6.2, 6.3, and of how many
hand-outs. Times are in ms.</p>
<table>
<tr><th class="text">Fault<th>H<th>Runs<th>Takeover p50<th>p99<th>max<th>Work p99
<th>Gap p50<th>max<th>Alone max<th>Over p50<th>max
<th>Own p50<th>max<th>Over own p50<th>p99<th>max<th>Within +1 s<th>Claims kept
<th>Owners<th>Records<th>Repeats<th>Unprocessed<th>In hand<th>Losses<th>History
<th class="text">Verdict</tr>
{% for row in rows %}
<tr class="{{ row.verdict.partition(':')[0] }}">
<td><b>{{ row.name }}</b><br><small>{{ row.title }}</small></td>
<td>{{ row.h_ms }}</td><td>{{ row.runs }}</td>
<td>{{ row.takeover.p50 }}</td><td>{{ row.takeover.p99 }}</td>
<td>{{ row.takeover.max }}</td><td>{{ row.handed.p99 }}</td>
<td>{{ row.gap.p50 }}</td><td>{{ row.gap.max }}</td><td>{{ row.bare_gap.max }}</td>
<td>{{ row.over.p50 }}</td><td>{{ row.over.max }}</td>
<td>{{ row.own.p50 }}</td><td>{{ row.own.max }}</td>
<td>{{ row.over_own.p50 }}</td><td>{{ row.over_own.p99 }}</td>
<td>{{ row.over_own.max }}</td>
<td>{{ row.within }}</td><td>{{ row.kept }}</td><td>{{ row.owners }}</td>
<td>{{ row.records }}</td>
<td>{{ row.duplicates }}{% if row.repeats_max != "-" %}
<br><small>at most {{ row.repeats_max }}</small>{% endif %}</td>
<td>{{ row.unprocessed }}</td><td>{{ row.stale_hands }}</td><td>{{ row.losses }}</td>
<td>{{ row.history }}</td>
<td class="text">{{ row.verdict }}{% for note in row.notes %}<br>
<small>{{ note }}</small>{% endfor %}</td></tr>
{% endfor %}
</table>
<h2>Gaps by transport</h2>
<table><tr><th class="text">Fault<th class="text">Of<th>Gap p50<th>p99<th>max
<th>Over p50<th>p99<th>max</tr>
{% for row in rows %}{% for of, gap in row.gap_of.items() %}
{% set over = row.over_of.get(of, none) %}
<tr><td>{{ row.name }}</td><td class="text">{{ of }}</td>
<td>{{ gap.p50 }}</td><td>{{ gap.p99 }}</td><td>{{ gap.max }}</td>
{% if over %}<td>{{ over.p50 }}</td><td>{{ over.p99 }}</td><td>{{ over.max }}</td>
{% else %}<td><td><td>{% endif %}</tr>
{% endfor %}{% endfor %}</table>
<h2>Figures</h2>
<table><tr><th class="text">What<th class="text">Must reach<th class="text">Reached
<th class="text">Met</tr>
{% for row in figures %}<tr><td>{{ row.what }}</td><td class="text">{{ row.must }}</td>
<td class="text">{{ row.reached }}</td><td class="text">{{ row.met }}</td></tr>
{% endfor %}</table></html>
"""


def spread(values: list[int]) -> dict[str, Any]:
    """Return median, 99th percentile (nearest rank) and maximum; dashes for none."""
    if not values:
        return {"count": 0, "p50": "-", "p99": "-", "max": "-"}
    row = sorted(values)
    rank = {p: row[math.ceil(p / 100 * len(row)) - 1] for p in (50, 99)}
    return {"count": len(row), "p50": rank[50], "p99": rank[99], "max": row[-1]}


def summed(found: dict[str, Any]) -> dict[str, Any]:
    """Return one row of the report for one finding."""
    gaps, bare = found.get("gap_ms", []), found.get("bare_gap_ms", [])
    runs, kept = found.get("runs", 0), found.get("kept")
    histories = list(found.get("history", {}).values())
    rows = found.get("gaps", [])
    worst = [max(row.values()) for row in over_in(rows) if row]
    own = beyond_own(found)
    held_to = own or worst
    within = sum(over_ms <= FIGURE_GAP_MS for over_ms in held_to)
    gap_of = {of: [row[of] for row in rows if of in row] for of in names_in(rows)}
    plain = ("records", "duplicates", "unprocessed", "stale_hands", "losses")
    return {
        "name": found["name"],
        "title": found["title"],
        "verdict": found["verdict"],
        "h_ms": found.get("h_ms", "-"),
        "runs": runs or "-",
        "takeover": spread(found.get("takeover_ms", [])),
        "handed": spread(found.get("handed_ms", [])),
        "gap": spread(gaps),
        "bare_gap": spread(bare),
        "over": spread(worst),
        "own": spread(found.get("own_ms", [])),
        "over_own": spread(own),
        "over_of": {
            of: spread([row[of] for row in over_in(rows) if of in row])
            for of in names_in(over_in(rows))
        },
        "gap_of": {of: spread(row) for of, row in gap_of.items()},
        "owners": f"{found['owners_kept']}/{found['owners']}"
        if found.get("owners")
        else "-",
        "history": judged(histories),
        "repeats_max": max((each["duplicates_max"] for each in histories), default="-"),
        "within": f"{within}/{len(held_to)}" if rows else "-",
        "kept": "-" if kept is None else f"{kept}/{runs}",
        "notes": found.get("notes", []),
        **{name: found.get(name, "-") for name in plain},
    }


def names_in(rows: list[dict[str, int]]) -> list[str]:
    """Return all names in the rows, sorted."""
    return sorted({name for row in rows for name in row})


def over_in(rows: list[dict[str, int]]) -> list[dict[str, int]]:
    """Return, by run, each gap minus the gap of bare clients with its transport."""
    return [
        {
            of: gap_ms - row[f"alone {of.partition(' ')[2]}"]
            for of, gap_ms in row.items()
            if f"alone {of.partition(' ')[2]}" in row and not of.startswith("alone ")
        }
        for row in rows
    ]


def beyond_own(found: dict[str, Any]) -> list[int]:
    """Return the longest gap of each run minus the brokers' own failover time."""
    pairs = zip(found.get("gap_ms", []), found.get("own_ms", []), strict=False)
    return [gap_ms - own_ms for gap_ms, own_ms in pairs]


def judged(histories: list[dict[str, Any]]) -> str:
    """Return the number of violations, and of hand-outs checked, in all histories."""
    if not histories:
        return "-"
    count = sum(each["violations"] for each in histories)
    return f"{count} of {sum(each['handed'] for each in histories)}"


def figures(findings: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare takeovers, and hand-outs after a leader is killed, with their limits."""
    rows = []
    if kills := findings.get("client_kill", {}).get("takeover_ms"):
        limit_ms = 2 * findings["client_kill"]["h_ms"] + FIGURE_TAKEOVER_MS
        p99 = spread(kills)["p99"]
        rows.append(
            {
                "what": "takeover of a killed consumer's partitions",
                "must": f"p99 <= 2H + 0.5 s = {limit_ms} ms over >= 200 kills",
                "reached": f"{p99} ms over {len(kills)} kills",
                "met": p99 <= limit_ms and len(kills) >= 200,  # noqa: PLR2004
            }
        )
    if (death := findings.get("leader_kill", {})).get("gaps"):
        kept, runs = death["kept"], death["runs"]
        over = beyond_own(death)
        bare = [max(row.values()) for row in over_in(death["gaps"])]
        held, owners = death.get("owners_kept", 0), death.get("owners", 0)
        rows += [
            {
                "what": "leader SIGKILL: all healthy owners keep their claims",
                "must": "in >= 99 % of runs",
                "reached": f"{kept} of {runs} runs, {held} of {owners} owners",
                "met": kept >= FIGURE_KEPT * runs,
            },
            {
                "what": "leader SIGKILL: handing out resumes",
                "must": "within the brokers' own failover + 1 s",
                "reached": f"{figures_as_text(over)} after it, over {len(over)} runs "
                f"(after bare clients: {figures_as_text(bare)})",
                "met": max(over, default=FIGURE_GAP_MS + 1) <= FIGURE_GAP_MS,
            },
        ]
    return rows


def figures_as_text(values: list[int]) -> str:
    """Return median, 99th percentile and maximum in words."""
    row = spread(values)
    return f"{row['p50']} ms in the median, {row['p99']} ms at p99, {row['max']} ms max"


def make(folder: Path) -> dict[str, Any]:
    """Write and return the report of all findings so far."""
    paths = sorted((folder / "findings").glob("*.json"))
    found = {path.stem: json.loads(path.read_text()) for path in paths}
    rows = [summed(each) for each in found.values()]
    verdicts = [row["verdict"].partition(":")[0] for row in rows]
    git = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True, check=False, timeout=30)
    cores = os.cpu_count()
    report = {
        "run": {
            "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "commit": done.stdout.strip() or "unknown",
            "machine": f"{platform.system()} {platform.release()}, {cores} cores",
            "load": ", ".join(f"{load:.1f}" for load in os.getloadavg()),
        },
        "totals": {
            **{kind: verdicts.count(kind) for kind in ("passed", "failed", "skipped")},
            "losses": sum(each.get("losses", 0) for each in found.values()),
            "violations": sum(
                each["violations"]
                for one in found.values()
                for each in one.get("history", {}).values()
            ),
        },
        "figures": figures(found),
        "rows": rows,
        "findings": found,
    }
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    bound = "depth x batch = 4 x 40 records"
    page = Environment(autoescape=True).from_string(PAGE)
    (folder / "report.html").write_text(page.render(report, bound=bound))
    return report


def main(folder: Path) -> int:
    """Write the report; return 1 if a scenario failed, or if there is none."""
    report = make(folder)
    rows = report["rows"]
    for row in rows:
        print(f"{row['name']:20} {(row['verdict'].splitlines() or [''])[0][:58]}")
    for row in report["figures"]:
        print(f"{row['what']}: {row['reached']} ({row['must']})")
    print(f"written: {folder / 'report.json'}, {folder / 'report.html'}")
    return 0 if rows and not report["totals"]["failed"] else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
