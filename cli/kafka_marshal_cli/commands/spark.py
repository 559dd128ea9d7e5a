"""``marshal spark``: runs the audit of the log on Spark."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kafka_marshal import ConfigurationError
from kafka_marshal.clock import duration
from kafka_marshal_cli import parsing
from kafka_marshal_cli.exits import ExitCode
from kafka_marshal_cli.follow_loop import ending_in_order
from kafka_marshal_cli.render import Answer, Section, column, plain
from kafka_marshal_cli.shared import Call, command, notify, wall_ms

if TYPE_CHECKING:
    from kafka_marshal.spark.audit import Audit, Bounds, Finding, Source
    from kafka_marshal.spark.audit.store import Run

# Longest wait for the stream before a signal is handled.
POLL_S = 1.0

app = typer.Typer(no_args_is_help=True)


@app.callback()
def spark() -> None:
    r"""Jobs on Spark (pip install 'kafka-marshal\[spark]')."""


PARTITIONS = (
    column("T", "coordinating_partition"),
    column("RECORDS", "entries_count"),
    column("NEXT OFFSET", "next_offset"),
    column("KEYS", "keys_count"),
    column("OWNED", "owned_count"),
    column("NEEDS LEVEL", "halted_level"),
    column("DIGEST", "digest"),
)
HANDOFFS = (
    column("CLAIM BEFORE", "ending"),
    column("HANDOFFS", "handoffs_count"),
    column("GAP P50", "p50_ms", as_text=lambda ms: duration(round(ms))),
    column("P99", "p99_ms", as_text=lambda ms: duration(round(ms))),
    column("LONGEST", "max_ms", as_text=lambda ms: duration(round(ms))),
)
FINDINGS = (
    column("INVARIANT", "invariant"),
    column("ROWS", "rows_count"),
    column("MEANING", "meaning"),
    column("ROW", "row", as_text=plain),
)


Out = Annotated[
    str,
    typer.Option(
        metavar="DIR",
        help="Directory of the tables, new or empty, on every executor.",
    ),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="OFFSET|TIME",
        help="Report what was completed from here on.",
    ),
]
To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="OFFSET|TIME",
        help="Fold up to here.",
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write an HTML page."),
]
WithLag = Annotated[
    bool,
    typer.Option("--with-lag", help="For the report, look up the ends of data logs."),
]
Check = Annotated[
    bool,
    typer.Option("--check", help="Check the invariants; 70 if one is broken."),
]
Tolerance = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION",
        help="Longest allowed delay of a takeover. By default the heartbeat interval.",
    ),
]
Incremental = Annotated[
    bool,
    typer.Option("--incremental", help="Continue where the last run in DIR ended."),
]
Follow = Annotated[
    bool,
    typer.Option("-f", "--follow", help="Start one run after another."),
]
Every = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help="Time between two runs. By default 1m."),
]
AvailableNow = Annotated[
    bool,
    typer.Option("--available-now", help="Follow up to the present log end."),
]
Sample = Annotated[
    str,
    typer.Option(metavar="DURATION", help="Log time between a key's stored positions."),
]
Master = Annotated[
    str | None,
    typer.Option(metavar="MASTER", help="Master of Spark; by default all cores here."),
]


@app.command(
    "audit",
    epilog="Example: marshal spark audit --out audit --check --report audit.html",
)
@command()
def audit(
    call: Call,
    *,
    out: Out,
    from_: From = None,
    to: To = None,
    report: Report = None,
    with_lag: WithLag = False,
    check: Check = False,
    tolerance: Tolerance = None,
    incremental: Incremental = False,
    follow: Follow = False,
    every: Every = None,
    available_now: AvailableNow = False,
    sample: Sample = "1m",
    master: Master = None,
) -> None:
    """Fold the coordination log on Spark, and write what happened as Parquet tables.

    See docs/AUDIT.md. With --follow, Ctrl-C ends the command with exit code 130, and
    SIGTERM ends it in order, with an answer about all runs.
    """
    from kafka_marshal.spark import audit as jobs

    _require_consistent(
        follow=follow,
        others={"--from": from_, "--to": to, "--incremental": incremental or None},
        own={"--every": every, "--available-now": available_now or None},
    )
    is_checked = check or report is not None
    _require_used(report, is_checked=is_checked, with_lag=with_lag, tolerance=tolerance)
    source = _source(call)
    tolerance_ms = None
    if tolerance is not None:
        tolerance_ms = parsing.duration_ms("--tolerance", tolerance)
    options: dict[str, Any] = {
        "source": source,
        "sample_ms": parsing.duration_ms("--sample", sample),
    }
    if follow:
        options["every_ms"] = parsing.duration_ms("--every", every or "1m")
        options["available_now"] = available_now
    else:
        options["bounds"] = bounds_of(from_, to)
        options["incremental"] = incremental
    if report is not None:
        jobs.require_report()
        _require_place(report)
    with jobs.spark_session(master) as session:
        if follow:
            _follow(partial(jobs.follow, session, out, on_run=_report_run, **options))
            found = jobs.Audit(session, out)
        else:
            found = jobs.audit(session, out, **options)
        _report_starts(found)
        findings = found.check(tolerance_ms=tolerance_ms) if is_checked else []
        call.answer(_answer(found, findings, is_checked=is_checked))
        if report is not None:
            _write(found, report, findings=findings, source=with_lag and source)
    if check and findings:
        names = ", ".join(each.invariant.name for each in findings)
        notify(f"marshal: invariants are broken: {names}; see also: marshal log verify")
        raise typer.Exit(ExitCode.BROKEN)


def _require_consistent(
    *, follow: bool, others: dict[str, Any], own: dict[str, Any]
) -> None:
    """Refuse options that exclude, or need, --follow."""
    for name, value in (others if follow else own).items():
        if value is not None:
            why = (
                "a stream continues from the last run to the end of the log"
                if follow
                else "needs --follow"
            )
            raise ConfigurationError(f"{name}: {why}", setting=name)
    if others["--incremental"] and (others["--from"] or others["--to"]):
        raise ConfigurationError(
            "--incremental: each run reports what was appended since the last one; "
            "omit --from and --to",
            setting="--incremental",
        )


def _require_used(
    report: Path | None, *, is_checked: bool, with_lag: bool, tolerance: str | None
) -> None:
    """Refuse options that would have no effect."""
    if with_lag and report is None:
        raise ConfigurationError("--with-lag needs --report", setting="--with-lag")
    if tolerance and not is_checked:
        raise ConfigurationError(
            "--tolerance needs --check or --report", setting="--tolerance"
        )


def _require_place(report: Path) -> None:
    """Require that the report can be written, before an audit that may take hours."""
    folder = report.absolute().parent
    if report.is_dir():
        why = "it is a directory; name a file in it"
    elif not folder.is_dir():
        why = f"there is no directory {folder}; create it"
    elif not os.access(report if report.exists() else folder, os.W_OK):
        why = "this user may not write there"
    else:
        return
    raise ConfigurationError(
        f"--report {str(report)!r} cannot be written: {why}", setting="--report"
    )


def _follow(start: Callable[[], Any]) -> None:
    """Follow the log until a signal, or the end of the stream."""
    from kafka_marshal.spark.audit import await_end

    with ending_in_order():
        query = start()
        try:
            while not await_end(query, POLL_S):
                pass
        finally:
            query.stop()


def _report_starts(audit: "Audit") -> None:
    """Report partitions that do not begin at the start of the log."""
    for row in audit.partitions():
        if row["first_offset"]:
            notify(
                f"marshal: partition {row['coordinating_partition']} is covered "
                f"from offset {row['first_offset']} on, from the first checkpoint that "
                "remains; retention has deleted earlier entries"
            )


def _report_run(run: "Run") -> None:
    ends = run.facts["as_of"]["offsets"].values()
    notify(f"run {run.number}: {sum(ends)} offsets of the log are folded")


def _source(call: Call) -> "Source":
    from kafka_marshal.spark.audit import Source

    return Source(**call.connection())


def bounds_of(first: str | None, last: str | None) -> "Bounds":
    """Return the range of ``--from`` and ``--to``."""
    from kafka_marshal.spark.audit import Bounds

    now_ms = wall_ms()
    found: list[int | None] = []
    for option, text in (("--from", first), ("--to", last)):
        named: tuple[int | None, int | None] = (None, None)
        if text is not None:
            named = parsing.moment(option, text, now_ms=now_ms)
        found += named
    bounds = Bounds(*found)
    for start, end in (
        (bounds.from_offset, bounds.to_offset),
        (bounds.from_ms, bounds.to_ms),
    ):
        if start is not None and end is not None and end < start:
            raise ConfigurationError(
                f"--to {last} is before --from {first}", setting="--to"
            )
    return bounds


def _write(
    audit: "Audit",
    path: Path,
    *,
    findings: "list[Finding]",
    source: "Source | bool",
) -> None:
    from kafka_marshal.spark.audit import data_ends, write_report

    ends = None if isinstance(source, bool) else data_ends(audit, source)
    try:
        write_report(audit, path, findings=findings, ends=ends)
    except OSError as error:
        raise ConfigurationError(
            f"--report {str(path)!r} cannot be written: {error}", setting="--report"
        ) from error
    notify(f"report: {path}")


def _answer(audit: "Audit", findings: "list[Finding]", *, is_checked: bool) -> Answer:
    facts: dict[str, Any] = {"out": audit.out, "runs_count": len(audit.runs)}
    facts |= {f"{name}_count": n for name, n in audit.counts().items()}
    sections = [
        Section("partitions", audit.partitions(), PARTITIONS),
        Section("handoffs", audit.takeovers(), HANDOFFS),
    ]
    if is_checked:
        facts["is_sound"] = not findings
        rows = [
            {
                "invariant": each.invariant.name,
                "meaning": each.invariant.meaning,
                "rows_count": each.count,
                "row": dict(row),
            }
            for each in findings
            for row in each.rows
        ]
        sections.append(Section("findings", rows, FINDINGS))
    return Answer(audit.facts["as_of"], facts, sections)
