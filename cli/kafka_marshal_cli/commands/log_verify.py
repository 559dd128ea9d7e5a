"""``marshal log verify``: checks the invariants of a log (PROTOCOL 11).

Each partition is folded twice: one entry at a time, and in runs as members replay it,
with a snapshot that is taken and restored. Both results must be equal (S2, S5).
``protocol.log_judge`` checks the transitions of each entry.
"""

import secrets
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any

import attrs
import typer

from kafka_marshal.protocol.checkpoints import Watch
from kafka_marshal.protocol.codec import header_of
from kafka_marshal.protocol.import_check import ImportCheck
from kafka_marshal.protocol.log_judge import LogJudge
from kafka_marshal.protocol.rationalizer import apply, replay
from kafka_marshal.protocol.records import LayoutFence, LayoutFinal
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import Transitions, WorldState
from kafka_marshal.protocol.types import LogEntry
from kafka_marshal.snapshots import Snapshot
from kafka_marshal.views.log_scan import LogScan, require_formatted, unknown_text
from kafka_marshal.views.past import Prefix, Since
from kafka_marshal_cli import parsing, presenters
from kafka_marshal_cli.commands import log_states
from kafka_marshal_cli.exits import ExitCode
from kafka_marshal_cli.parsing import Moment
from kafka_marshal_cli.render import Answer, Section
from kafka_marshal_cli.shared import AT, Call, command, notify, wall_ms

# Records that may drop keys which moved away.
_LAYOUT_ENDS = (header_of(LayoutFence), header_of(LayoutFinal))

FINDINGS_MAX = 20

app = typer.Typer()


@attrs.define(kw_only=True)
class Verifier:
    """Verifies one coordinating partition.

    Attributes:
        begun: State to begin at: empty, or that of a checkpoint if the start of the
            log is gone. The verifier changes it.
        split: Offset at or after which the second fold restores a snapshot.
        chunk_max: Most entries that the second fold applies at once.
        kept: A stored state, compared with the fold at its offset.
        findings: Broken invariants, one line each, at most FINDINGS_MAX.
        entries_count: Number of folded entries.
    """

    begun: WorldState
    split: int
    chunk_max: int = 100
    kept: Snapshot | None = None
    findings: list[str] = attrs.field(factory=list)
    entries_count: int = 0
    snapshot_offset: int | None = None
    checkpoints_count: int = 0
    _kept_result: str | None = None
    _watch: Watch = attrs.field(factory=Watch)
    _first: WorldState = attrs.field(init=False)
    _second: WorldState = attrs.field(init=False)
    _judge: LogJudge = attrs.field(init=False)
    _begin_offset: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._first = self.begun
        self._second = WorldState(self.partition)
        self._begin_offset = self.begun.next_offset
        if self._begin_offset:
            self._second = from_bytes(to_bytes(self.begun))
        self._judge = LogJudge(self.begun)

    @property
    def partition(self) -> int:
        """The coordinating partition that is verified."""
        return self.begun.partition

    @property
    def state(self) -> WorldState:
        """The world of the partition."""
        return self._first

    def fold(self, entry: LogEntry) -> Transitions:
        """Fold one more entry, check its transitions, and return them.

        The caller then passes the run that contains the entry to ``repeat``.
        """
        self.entries_count += 1
        if self._kept_result is None and self.kept is not None:
            self._compare_kept(entry.offset)
        transitions = apply(self._first, entry)
        self._compare_checkpoint(transitions)
        for transition in transitions:
            for finding in self._judge.take(transition):
                self.report(f"{finding.invariant}: {finding.message}")
        return transitions

    def repeat(self, run: Sequence[LogEntry]) -> None:
        """Fold a run of entries the second time."""
        at = 0
        if self.snapshot_offset is None:
            at = bisect_left(run, self.split, key=attrgetter("offset"))
            self._replay(run[:at])
            if at < len(run):
                self._restore()
        self._replay(run[at:])

    def _replay(self, run: Sequence[LogEntry]) -> None:
        for start in range(0, len(run), self.chunk_max):
            replay(self._second, run[start : start + self.chunk_max])

    def finish(self) -> dict[str, Any]:
        """Compare both folds and return the result as a JSON object."""
        if self.snapshot_offset is None:
            self._restore()
        first, second = digest(self._first), digest(self._second)
        if first != second:
            self.report(
                f"S2: folded twice, once by a snapshot at {self.snapshot_offset}, the "
                f"digests differ: {first} and {second}"
            )
        self._compare_kept(None)
        halted = self._first.halted
        result = "ok" if halted is None else "halted"
        return {
            "partition": self.partition,
            "result": "broken" if self.findings else result,
            "begin_offset": self._begin_offset,
            "entries_count": self.entries_count,
            "next_offset": self._first.next_offset,
            "snapshot_offset": self.snapshot_offset,
            "undecodable_count": self._first.soft.counters.get("undecodable", 0),
            "checkpoints_count": self.checkpoints_count,
            "kept": self._kept_result,
            "digest": first,
            "findings": list(self.findings),
        }

    def _compare_kept(self, before: int | None) -> None:
        """Compare the stored state once all entries below its offset are folded.

        Args:
            before: Offset of the next entry; None at the end.
        """
        if self.kept is None or self._kept_result is not None:
            return
        kept, state = self.kept.state, self._first
        if before is not None and before < kept.offset:
            return
        if kept.offset < self._begin_offset:
            self._kept_result = "unknown"  # the log has lost the entries before it
            return
        names = (state.next_offset, state.leader_epoch, digest(state))
        is_same = names == (kept.offset, kept.leader_epoch, kept.digest)
        self._kept_result = "ok" if is_same else "differs"

    def _compare_checkpoint(self, transitions: Transitions) -> None:
        found = self._watch.on_entry(self._first, transitions)
        if found is None:
            return
        self.checkpoints_count += 1
        if not found.is_equal:
            self.report(
                f"S2: checkpoint {found.checkpoint_id.hex()} of {found.client_id} at "
                f"offset {found.begin_offset} has digest {found.theirs}, but the log "
                f"folds to {found.ours}"
            )

    def _restore(self) -> None:
        """Replace the second state by its copy from bytes (PROTOCOL 7.4)."""
        self.snapshot_offset = self._second.next_offset
        if self._second.halted is None:
            value = to_bytes(self._second)
            self._second = from_bytes(value)
            if to_bytes(self._second) != value:
                self.report(f"S5: the snapshot at {self.snapshot_offset} changed")

    def report(self, text: str) -> None:
        """Add a broken invariant, up to the limit."""
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(text)


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
            help="Only entries appended after it.",
        ),
    ] = None,
) -> None:
    """Fold the log twice and check the invariants of the protocol.

    Also compares checkpoints in the log with the folded state. Reads the whole log, up
    to --at. If retention has deleted the start of a partition, reading begins at its
    first remaining checkpoint; with --since, at the newest checkpoint before that time.
    Ends with exit code 70 if an invariant is broken, with 1 if only a snapshot file
    differs or a partition cannot be verified.
    """
    beginning = _beginning(since)
    sections = [] if snapshot is None else log_states.snapshots_of(snapshot)
    kept = {section.state.partition: section for section in sections}
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
    """Return where the fold begins, from the value of ``--since``."""
    if text is None:
        return None
    moment = parsing.past_moment("--since", text, now_ms=wall_ms())
    moment.require_partition()
    return Since(offsets=moment.offsets, time_ms=moment.time_ms)


def _verified(
    scan: LogScan, kept: Mapping[int, Snapshot], since: Since | None
) -> list[dict[str, Any]]:
    """Verify every coordinating partition; return one row for each.

    Raises:
        ConfigurationError: ``since`` is an offset that is not written yet.
        TopicMisconfigured: There is no Config, and no snapshot to compare: nothing
            would be verified.
    """
    if since is not None and since.offsets is not None:
        # The moment may be the end of the log, where nothing is written yet.
        ends = scan.ends
        others = {t: at for t, at in since.offsets.items() if at != ends.get(t)}
        Prefix(others, None).require_written(ends, now_ms=wall_ms())
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
