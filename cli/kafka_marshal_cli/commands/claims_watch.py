"""``marshal claims watch``: shows claims live."""

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any, Protocol

import attrs
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kafka_marshal import CoordinationError, TopicPartition, World, WorldWatch
from kafka_marshal.clock import instant
from kafka_marshal.counting import counted
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.views.watch import Change
from kafka_marshal_cli import parsing, presenters
from kafka_marshal_cli.follow_loop import Idle, Outages, check_reader, ending_in_order
from kafka_marshal_cli.render import (
    SCHEMA,
    Answer,
    Row,
    Section,
    escape,
    fitting,
    lines,
    log_place,
    table,
    to_json,
)
from kafka_marshal_cli.shared import (
    Call,
    OfGroup,
    OfTopic,
    OpenTimeout,
    Output,
    command,
    emit,
)
from kafka_marshal_cli.terminal import terminal

app = typer.Typer()

# A change redraws the table after the shorter time, changed ages after the longer.
DRAWN_EVERY_S_MIN = 0.25
DRAWN_EVERY_S_MAX = 1.0
# To draw 100,000 claims takes seconds of CPU time. After a drawing, wait for at least
# RESTS_MIN times as long as it took, but for at most REST_S_MAX, if brokers are slow.
RESTS_MIN = 4
REST_S_MAX = 15.0
CHANGES_SHOWN = 5
LOG_ENDS_EVERY_S = 5.0
_TITLE_LINES_MAX = 3
_HEAD_LINES_MAX = 2


AskLogEnds = Callable[[set[TopicPartition]], Mapping[TopicPartition, int]]


def _unknown_ends(_: set[TopicPartition]) -> Mapping[TopicPartition, int]:
    return {}


class View(Protocol):
    """Shows claims and their changes."""

    def start(self, world: World) -> None:
        """Show the claims at the start."""
        ...

    def on_change(self, change: Change, world: World) -> None:
        """Show a change."""
        ...

    def refresh(self, world: World, outage: CoordinationError | None) -> None:
        """Update what is shown; called after every wait."""
        ...


class Selection:
    """The claims that are watched.

    Args:
        group_id: Only claims of this group.
        topic: Only claims of this topic; pauses of groups are shown in any case.
        log_ends: Returns the log ends of the partitions that can be looked up.
        now_s: Returns the time in seconds.
    """

    def __init__(
        self,
        group_id: str | None,
        topic: str | None,
        *,
        log_ends: AskLogEnds = _unknown_ends,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.group_id = group_id
        self.topic = topic
        self._log_ends = log_ends
        self._now_s = now_s
        self._ends: Mapping[TopicPartition, int] = {}
        self._asked_s = float("-inf")

    def rows(self, world: World, *, is_away: bool = False) -> list[dict[str, Any]]:
        """Return the selected claims of a world, with their lag.

        Log ends are looked up at most every ``LOG_ENDS_EVERY_S``, and not while the
        brokers do not answer.
        """
        rows = presenters.claim_rows(world, group_id=self.group_id, topic=self.topic)
        if not is_away and self._now_s() - self._asked_s >= LOG_ENDS_EVERY_S:
            self._ends = self._log_ends(presenters.data_partitions(rows))
            self._asked_s = self._now_s()
        return presenters.with_lag(rows, self._ends)

    def __contains__(self, change: Change) -> bool:
        """Return whether a change concerns the selected claims."""
        if change.key is None:
            return self.group_id in {None, change.group_id}
        return presenters.is_selected(
            change.key, group_id=self.group_id, topic=self.topic
        )


class LineView:
    """Writes a line for each claim at the start, and for each change.

    Args:
        selection: The claims that are watched.
        is_json: Whether the lines are JSON.
        shows_start: Whether the claims at the start are shown.
    """

    def __init__(
        self, selection: Selection, *, is_json: bool, shows_start: bool
    ) -> None:
        self._selection = selection
        self._is_json = is_json
        self._shows_start = shows_start
        self._outages = Outages()

    def start(self, world: World) -> None:
        """Write a line for each claim that has an owner."""
        if not self._shows_start:
            return
        rows = [row for row in self._selection.rows(world) if row["owner"] is not None]
        section = Section("claims", rows, presenters.CLAIM_COLUMNS)
        if self._is_json:
            for line in lines(Answer(presenters.as_of(world), {}, (section,))):
                emit(to_json(line))
        else:
            for row in rows:
                emit(escape(held_text(row, world.read_at_ms)))
        sys.stdout.flush()

    def on_change(self, change: Change, world: World) -> None:
        """Write the line of a change."""
        if self._is_json:
            emit(to_json(change_row(change, world.read_at_ms)))
        else:
            emit(escape(change_text(change)))
        sys.stdout.flush()

    def refresh(self, world: World, outage: CoordinationError | None) -> None:
        """Report outages."""
        del world
        self._outages.report(outage)


class TableView:
    """Draws a table again after changes, with the last changes below it.

    Args:
        live: Draws the table.
        selection: The claims that are watched.
        now_s: Returns the time in seconds.
    """

    def __init__(
        self,
        live: Live,
        selection: Selection,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._live = live
        self._selection = selection
        self._now_s = now_s
        self._size = live.console.size
        self._drawn_s = float("-inf")
        self._took_s = 0.0
        self._is_changed = True
        self._was_away = False
        self._last: deque[str] = deque(maxlen=CHANGES_SHOWN)

    def start(self, world: World) -> None:
        """Draw the claims at the start."""
        self.refresh(world, None)

    def on_change(self, change: Change, world: World) -> None:
        """Store a change; ``refresh`` draws it."""
        del world
        self._is_changed = True
        self._last.append(change_text(change))

    def refresh(self, world: World, outage: CoordinationError | None) -> None:
        """Draw if something has changed or ages are out of date."""
        if (outage is not None) != self._was_away:
            self._was_away = outage is not None
            self._is_changed = True
        is_resized = self._live.console.size != self._size
        self._is_changed |= is_resized
        begun_s = self._now_s()
        rest_s = DRAWN_EVERY_S_MIN if self._is_changed else DRAWN_EVERY_S_MAX
        rest_s = max(rest_s, min(RESTS_MIN * self._took_s, REST_S_MAX))
        if begun_s - self._drawn_s < rest_s:
            return
        self._is_changed = False
        if is_resized:
            # The terminal folded the drawn lines again: how many they are is unknown.
            self._size = self._live.console.size
            self._live.console.clear()
        self._live.update(self._drawn(world, outage), refresh=True)
        self._drawn_s = self._now_s()
        self._took_s = self._drawn_s - begun_s

    def _changes(self, row_count: int) -> list[Text]:
        """Return the newest changes that fit below the claims.

        They get what ``row_count`` claims leave free, or a third of the terminal.
        """
        width, height = self._live.console.size
        room = max(height // 3, height - row_count - 2 * _TITLE_LINES_MAX)
        shown: list[Text] = []
        for line in reversed(self._last):
            text = Text(escape(line), style="dim")
            room -= len(text.wrap(self._live.console, width))
            if room < 0:
                break
            shown.insert(0, text)
        return shown

    def _drawn(self, world: World, outage: CoordinationError | None) -> Group:
        rows = self._selection.rows(world, is_away=outage is not None)
        head = f"{counted(len(rows), 'claim')}{_states(rows)}"
        head += f" at {instant(world.read_at_ms)}"
        if outage is not None:
            head += f"; THE BROKERS DO NOT ANSWER: {escape(str(outage))}"
        changes = self._changes(len(rows))
        if not rows:
            return Group(Text(head), Text("no claims"), *changes)
        cells = presenters.claim_columns(
            rows=rows,
            has_group=self._selection.group_id is None,
            has_handoff=any(row["offer"] for row in rows),
        )
        width, height = self._live.console.size

        def room() -> int:
            under = [Text(head), *changes]
            used = sum(len(text.wrap(self._live.console, width)) for text in under)
            # Titles may fold, and one line states how many rows are omitted.
            return max(1, height - used - _TITLE_LINES_MAX - 1)

        if len(rows) > room():
            rows = sorted(rows, key=_is_fresh)
        shown = Section("claims", rows[:height], cells, presenters.CLAIMS_LESS)
        section, left_out = fitting(shown, width)
        if left_out:
            titles = f"; no room for {', '.join(left_out)}"
            is_short = len(head + titles) <= _HEAD_LINES_MAX * width
            head += titles if is_short else f"; no room for {len(left_out)} columns"
        count = room()
        more = [Text(f"... and {len(rows) - count} more")] if rows[count:] else []
        shown = attrs.evolve(section, rows=section.rows[:count])
        drawn = Text.from_ansi(table(shown, width=width, is_color=True))
        return Group(Text(head), drawn, *more, *changes)


def _is_fresh(row: Row) -> bool:
    """Return whether an owner renews the claim; other claims are shown first."""
    return bool(row["freshness_estimate"] == Freshness.FRESH.value)


def _states(rows: Sequence[Row]) -> str:
    """Return the number of claims in each state; empty if all are fresh."""
    counts = Counter(row["freshness_estimate"] or "without owner" for row in rows)
    if all(map(_is_fresh, rows)):
        return ""
    return f" ({', '.join(f'{count} {name}' for name, count in counts.most_common())})"


def view_of(
    call: Call, selection: Selection, *, shows_start: bool, stack: ExitStack
) -> View:
    """Return a table for a terminal that can show one, else lines."""
    _, is_color = terminal(sys.stdout)
    console = Console(file=sys.stdout, no_color=not is_color, highlight=False)
    can_draw = console.is_terminal and not console.is_dumb_terminal
    if call.output is not Output.TABLE or not can_draw:
        is_json = call.output is not Output.TABLE
        return LineView(selection, is_json=is_json, shows_start=shows_start)
    live = Live(console=console, auto_refresh=False, redirect_stdout=False)
    return TableView(stack.enter_context(live), selection)


def held_text(row: Row, read_at_ms: int) -> str:
    """Return the line of a claim at the start, not escaped."""
    return (
        f"{instant(read_at_ms)} held     {row['group_id']} {row['topic']}-"
        f"{row['partition']} by {row['owner']['client_id']}, token {row['token']}"
        + ("" if row["position"] is None else f", position {row['position']}")
        + ("" if row["lag"] is None else f", lag {row['lag']}")
    )


def change_text(change: Change) -> str:
    """Return the line of a change for people, not escaped."""
    parts = [f"{instant(change.time_ms)} {change.what:<8} {change.group_id}"]
    if change.key is not None:
        parts.append(str(change.key.topic_partition))
    if change.client_id is not None:
        parts.append(f"by {change.person or change.client_id}")
    details = {
        "to": change.by,
        "for": None if change.what == "ready" else change.successor,
        "token": change.token,
        "position": change.position,
        "topics": " ".join(change.topics) or None,
        "from": None if change.begin_ms is None else instant(change.begin_ms),
        "until": None if change.until_ms is None else instant(change.until_ms),
        "reason:": change.reason,
    }
    also = [f"{name} {value}" for name, value in details.items() if value is not None]
    if change.what == "lost":
        parts[-1] = parts[-1].replace("by ", "of ", 1)
    also.append(f"at {log_place(change.partition, change.offset)}")
    return ", ".join([" ".join(parts), *also])


def change_row(change: Change, read_at_ms: int) -> dict[str, Any]:
    """Return the JSON object of a change."""
    key, incarnation = change.key, change.incarnation
    return {
        "schema": SCHEMA,
        "as_of": {
            "time_ms": read_at_ms,
            "offsets": {str(change.partition): change.offset + 1},
        },
        "section": "changes",
        "change": change.what,
        "group_id": change.group_id,
        "topic": None if key is None else key.topic,
        "partition": None if key is None else key.partition,
        "client_id": change.client_id,
        "incarnation": None if incarnation is None else incarnation.hex(),
        "token": None if change.token is None else str(change.token),
        "position": change.position,
        "by": change.by,
        "successor": change.successor,
        "person": change.person,
        "reason": change.reason,
        "topics": list(change.topics),
        "begin_ms": change.begin_ms,
        "until_ms": change.until_ms,
        "coordinating_partition": change.partition,
        "offset": change.offset,
        "appended_ms": change.time_ms,
    }


def follow(
    watch: WorldWatch,
    view: View,
    *,
    selection: Selection,
    idle: Idle,
    count_max: int,
) -> None:
    """Show changes until ``count_max`` are shown, or the idle limit has passed."""
    view.start(watch.world())
    count = 0
    while True:
        changes = [
            change for change in watch.changes(idle.wait_ms) if change in selection
        ]
        world = watch.world()
        for change in changes:
            view.on_change(change, world)
            count += 1
            if count == count_max:
                break
        view.refresh(world, watch.outage)
        if changes:
            idle.touch()
        if count == count_max > 0 or idle.is_over:
            return
        check_reader()


@app.command("watch", epilog="Example: marshal claims watch --group billing")
@command(waits=False)
def watch(
    call: Call,
    *,
    group: OfGroup = None,
    topic: OfTopic = None,
    count: Annotated[
        int, typer.Option(min=0, help="End after this many changes; 0 for no limit.")
    ] = 0,
    timeout: Annotated[
        str | None,
        typer.Option(metavar="MS", help="End after this time without a change."),
    ] = None,
    open_timeout: OpenTimeout = "30s",
    only_changes: Annotated[
        bool,
        typer.Option("--only-changes", help="Do not show the claims at the start."),
    ] = False,
) -> None:
    """Show claims live: a table on a terminal, else a line for each change.

    The table looks up log ends every 5 s. Lines show first the claims that are held,
    then each change, with the offset and time of its entry: claimed, resumed, released,
    lost (taken over), offered, ready, withdrawn, paused, renewed (a pause), unpaused,
    moved (to another coordinating partition). `-o json` and `-o jsonl` both write an
    object a line, of section `claims` or `changes`. If brokers do not answer, the
    command waits for them. Ctrl-C ends it with exit code 130, SIGTERM with 0.
    """
    idle_ms = None if timeout is None else parsing.duration_ms("--timeout", timeout)
    open_ms = parsing.timeout_ms("--open-timeout", open_timeout)
    with ending_in_order(), ExitStack() as stack:
        admin = stack.enter_context(call.admin())
        selection = Selection(group, topic, log_ends=admin.log_ends)
        watch = stack.enter_context(
            call.watch(timeout_ms=open_ms, first=lambda span: span.end)
        )
        watch.catch_up(open_ms)
        watch.world().config()
        view = view_of(call, selection, shows_start=not only_changes, stack=stack)
        idle = Idle(idle_ms)
        follow(watch, view, selection=selection, idle=idle, count_max=count)
