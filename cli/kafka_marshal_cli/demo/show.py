"""Output of the demo: a table that refreshes, or plain lines.

A terminal gets the table, with finished steps as lines above it. Any other output
gets only lines, one for each step and each change of owner, without control
characters.
"""

import time
from collections.abc import Mapping, Sequence

import attrs
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kafka_marshal.closing import Closing
from kafka_marshal_cli.demo.verdict import Verdict

REFRESHES_PER_SECOND = 8
COLOURS = ("cyan", "magenta", "yellow", "blue", "bright_green", "bright_red")
DELIVERIES = {"alo": "at least once", "amo": "at most once"}


@attrs.frozen(kw_only=True)
class PartitionRow:
    """One partition by the log and the journals."""

    name: str
    holder: str | None
    token: str
    processed: int
    produced: int


@attrs.frozen(kw_only=True)
class WorkerRow:
    """One consumer process."""

    name: str
    pid: int
    state: str
    held: int
    processed: int


@attrs.frozen
class Board:
    """The owners of all partitions at one moment."""

    title: str
    partitions: tuple[PartitionRow, ...] = ()
    workers: tuple[WorkerRow, ...] = ()

    def holders(self) -> dict[str, str | None]:
        """Return the owner of each partition."""
        return {row.name: row.holder for row in self.partitions}


def changes(
    before: Mapping[str, str | None], after: Mapping[str, str | None]
) -> list[str]:
    """Return one line for each change of owner.

    A partition that has never had an owner has no line.
    """
    moves: dict[tuple[str, str], list[str]] = {}
    for name, holder in after.items():
        old = before.get(name)
        if old != holder:
            moves.setdefault((old or "no owner", holder or "no owner"), []).append(name)
    return [
        f"{', '.join(names)}: {old} -> {new}" for (old, new), names in moves.items()
    ]


def board_table(board: Board) -> RenderableType:
    """Return the board as tables."""
    names = [row.name for row in board.workers]
    claims = Table(title=board.title, title_justify="left", title_style="bold")
    claims.add_column("partition")
    claims.add_column("held by", min_width=10)
    claims.add_column("token", style="dim")
    for heading in ("processed", "produced", "to do"):
        claims.add_column(heading, justify="right")
    for row in board.partitions:
        claims.add_row(
            row.name,
            _painted(row.holder, names),
            row.token,
            f"{row.processed:,}",
            f"{row.produced:,}",
            f"{max(0, row.produced - row.processed):,}",
        )
    workers = Table.grid(padding=(0, 2))
    for worker in board.workers:
        workers.add_row(
            _painted(worker.name, names),
            f"process {worker.pid}",
            Text(worker.state, style="" if worker.state == "running" else "bold red"),
            f"{worker.held} partitions",
            f"{worker.processed:,} records processed",
        )
    return Group(claims, workers)


def _painted(name: str | None, names: Sequence[str]) -> Text:
    if name is None:
        return Text("no owner", style="dim italic")
    colour = COLOURS[names.index(name) % len(COLOURS)] if name in names else ""
    return Text(name, style=colour)


def verdict_lines(verdict: Verdict) -> list[str]:
    """Return a round's verdict as plain lines."""
    return [
        _headline(verdict),
        f"  {_figures(verdict)}",
        *(
            f"  {_word(held=check.held)}: {check.name}. {check.text}"
            for check in verdict.checks
        ),
    ]


def verdict_table(verdict: Verdict) -> RenderableType:
    """Return a round's verdict for a terminal."""
    style = "bold green" if verdict.held else "bold red"
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=2)
    grid.add_column(ratio=5)
    shown = ""
    for check in verdict.checks:
        word = Text(_word(held=check.held), style="green" if check.held else "bold red")
        grid.add_row(word, check.name if check.name != shown else "", check.text)
        shown = check.name
    return Group(
        Text(_headline(verdict), style=style), Text(_figures(verdict)), grid, Text()
    )


def _headline(verdict: Verdict) -> str:
    name = DELIVERIES[verdict.delivery]
    if verdict.held:
        return f"Verdict, {name}: every guarantee held."
    broken = sum(not check.held for check in verdict.checks)
    return f"Verdict, {name}: {broken} of {len(verdict.checks)} checks FAILED."


def _figures(verdict: Verdict) -> str:
    return (
        f"{verdict.produced:,} records produced, {verdict.processed:,} processed, "
        f"{len(verdict.lost):,} lost, {verdict.duplicated:,} duplicated"
    )


def _word(*, held: bool) -> str:
    return "held" if held else "FAILED"


class Show(Closing):
    """Shows a running demo. A context manager; used by one thread.

    Args:
        console: Output; a terminal gets the table.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._live: Live | None = None
        self._holders: dict[str, str | None] = {}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def step(self, text: str) -> None:
        """Show a step, with the time since the start."""
        at = f"{self.elapsed_s:5.1f} s"
        if not self._console.is_terminal:
            self._plain(f"{at}  {text}")
            return
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        grid.add_row(at, Text(text))
        self._console.print(grid)

    def update(self, board: Board) -> None:
        """Show the owners of all partitions."""
        holders = board.holders()
        if self._console.is_terminal:
            self._refresh(board)
        elif holders != self._holders:
            for line in changes(self._holders, holders):
                self._plain(f"         {line}")
        self._holders = holders

    def verdict(self, verdict: Verdict) -> None:
        """Show the verdict of a round in place of the table."""
        self.clear()
        if self._console.is_terminal:
            self._console.print()
            self._console.print(verdict_table(verdict))
            return
        for line in verdict_lines(verdict):
            self._plain(line)

    def clear(self) -> None:
        """Remove the table; lines stay."""
        self._holders = {}
        if self._live is not None:
            self._live.stop()
            self._live = None

    def close(self) -> None:
        """Remove the table. Idempotent."""
        self.clear()

    def _refresh(self, board: Board) -> None:
        table = board_table(board)
        if self._live is None:
            self._live = Live(
                table,
                console=self._console,
                refresh_per_second=REFRESHES_PER_SECOND,
                transient=True,
            )
            self._live.start()
        else:
            self._live.update(table)

    def _plain(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)
