"""``marshal log verify``: two folds of the log, compared."""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kafka_marshal.protocol.codec import header_of
from kafka_marshal.protocol.import_check import ImportCheck
from kafka_marshal.protocol.records import LayoutFence, LayoutFinal
from kafka_marshal.views.log_scan import LogScan, require_formatted, unknown_text
from kafka_marshal.views.past import Since
from kafka_marshal_cli import parsing, presenters
from kafka_marshal_cli.commands import log_states
from kafka_marshal_cli.exits import ExitCode
from kafka_marshal_cli.parsing import Moment
from kafka_marshal_cli.render import Answer, Section
from kafka_marshal_cli.shared import AT, Call, command, notify, wall_ms
from kafka_marshal_cli.verify import KeptLike, Verifier

# Records that may drop keys which moved away.
_LAYOUT_ENDS = (header_of(LayoutFence), header_of(LayoutFinal))

app = typer.Typer()


@app.command("verify", epilog="Example: marshal log verify --snapshot before.snapshot")
@command(option_groups=AT)
def verify(
    call: Call,
    *,
    at: Moment | None,
    snapshot: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Output of `log snapshot` to compare with."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME|T:OFFSET",
            help="Only what was appended after it.",
        ),
    ] = None,
) -> None:
    """Fold the log twice and check the invariants of the protocol.

    Also compares checkpoints in the log with the folded state. Reads the whole log, up
    to --at; if retention has deleted the start of a partition, from its first remaining
    checkpoint, with --since from the newest one before that moment. Ends with 70 if an
    invariant is broken, with 1 if only a snapshot file differs or a partition cannot be
    verified.
    """
    beginning = _beginning(since)
    sections = [] if snapshot is None else log_states.snapshots_of(snapshot)
    kept = {section.state.partition: section.state for section in sections}
    with call.scan() if at is None else call.scan(at) as scan:
        rows = _verified(scan, kept, beginning)
    worst = max((row["result"] for row in rows), key=_RESULTS.index, default="ok")
    for row in rows:
        for finding in row["findings"]:
            notify(f"marshal: partition {row['partition']}: {finding}")
    as_of: presenters.Row = {
        "time_ms": wall_ms(),
        "offsets": {str(row["partition"]): row["next_offset"] for row in rows},
    }
    if at is not None:
        as_of["at"] = at.text
    section = Section("partitions", rows, presenters.VERIFY_COLUMNS)
    beyond = sorted(kept.keys() - {row["partition"] for row in rows})
    unknown = [row["partition"] for row in rows if row["kept"] == "unknown"]
    for number in unknown:
        notify(
            f"marshal: partition {number}: {snapshot} cannot be compared: the log has "
            "lost the entries before it"
        )
    differ = [row["partition"] for row in rows if row["kept"] == "differs"] + beyond
    for number in differ:
        notify(
            f"marshal: partition {number}: {snapshot} differs from the state of the log"
        )
    call.answer(Answer(as_of, {"result": worst}, (section,)))
    if worst == "broken":
        notify("next: marshal log dump, and report the bug")
        raise typer.Exit(ExitCode.BROKEN)
    if worst == "halted":
        notify("marshal: the log has records of a newer release; upgrade")
        raise typer.Exit(ExitCode.REFUSED)
    if worst == "unknown":
        notify("next: marshal doctor")
        raise typer.Exit(ExitCode.FAILED)
    if differ or unknown:
        notify(f"next: marshal log diff {snapshot} live")
        raise typer.Exit(ExitCode.FAILED)


# From good to bad.
_RESULTS = ("ok", "unknown", "halted", "broken")


def _beginning(text: str | None) -> Since | None:
    """Return where the fold begins, of ``--since``."""
    if text is None:
        return None
    moment = parsing.past_moment("--since", text, now_ms=wall_ms())
    moment.require_partition()
    return Since(offsets=moment.offsets, time_ms=moment.time_ms)


def _verified(
    scan: LogScan, kept: Mapping[int, KeptLike], since: Since | None
) -> list[dict[str, Any]]:
    """Verify every coordinating partition; return one row for each.

    Raises:
        TopicMisconfigured: There is no Config, and no snapshot to compare: nothing
            would be verified.
    """
    verifiers, unknown = {}, {}
    for number, restored in scan.restore(since=since).items():
        start, end = scan.starts[number], scan.ends[number]
        if restored.is_log_start_missing:
            unknown[number] = _unknown_row(number, start, end)
            notify(f"marshal: {unknown_text([number])}")
            continue
        if restored.source is None and since is not None:
            notify(
                f"marshal: partition {number} has no checkpoint before --since: "
                "verified from its start on"
            )
        if restored.source is not None:
            start = restored.world.next_offset
            notify(
                f"marshal: partition {number} begins at offset "
                f"{restored.log_start}; verified from offset {start} on, from the "
                f"state of {restored.source}"
            )
        split = start + secrets.randbelow(max(1, end - start))
        chunk = 1 + secrets.randbelow(1_000)
        verifiers[number] = Verifier(
            begun=restored.world, split=split, chunk_max=chunk, kept=kept.get(number)
        )
    imports = ImportCheck()
    for number, run in scan.runs():
        verifier = verifiers.get(number)
        if verifier is None:
            continue
        for entry in run:
            if entry.value is not None and entry.value.startswith(_LAYOUT_ENDS):
                imports.keep(verifier.state)
            imports.take(verifier.state, verifier.fold(entry))
            if imports.is_waiting:
                _compare(imports, verifiers)
        verifier.repeat(run)
    rows = unknown | {number: each.finish() for number, each in verifiers.items()}
    if not kept and all(row["result"] == "ok" for row in rows.values()):
        require_formatted([each.state for each in verifiers.values()])
    return [rows[number] for number in sorted(rows)]


def _compare(imports: ImportCheck, verifiers: Mapping[int, Verifier]) -> None:
    """Report imports that differ from their sources (PROTOCOL 10.4)."""
    worlds = {number: each.state for number, each in verifiers.items()}
    for found in imports.compare(worlds):
        key = "" if found.key is None else f" {found.key}"
        verifiers[found.partition].report(
            f"import_diverged: offset {found.offset}:{key} from coordinating partition "
            f"{found.source}: {found.why}"
        )


def _unknown_row(partition: int, start: int, end: int) -> dict[str, Any]:
    """Return the row of a partition that cannot be verified."""
    return {
        "partition": partition,
        "result": "unknown",
        "begin_offset": start,
        "entries_count": 0,
        "next_offset": end,
        "snapshot_offset": None,
        "undecodable_count": None,
        "checkpoints_count": 0,
        "kept": None,
        "digest": None,
        "findings": [],
    }
