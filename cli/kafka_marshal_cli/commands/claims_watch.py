"""``marshal claims watch``: claims as they come and go."""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kafka_marshal import CoordinationError, TopicPartition, World, WorldWatch
from kafka_marshal.watch import Change
from kafka_marshal_cli import columns, facts, parsing
from kafka_marshal_cli.live import Idle, Outages, check_reader, ending_in_order
from kafka_marshal_cli.render import (
    SCHEMA,
    Answer,
    Row,
    Section,
    escape,
    grid,
    instant,
    lines,
    to_json,
)
from kafka_marshal_cli.shared import Call, Output, command, data, terminal

# A table is drawn anew at a change, but not more often; and now and then, for ages.
DRAWN_EVERY_S_MIN = 0.25
DRAWN_EVERY_S_MAX = 1.0
CHANGES_SHOWN = 5
LOG_ENDS_EVERY_S = 5.0


AskLogEnds = Callable[[set[TopicPartition]], Mapping[TopicPartition, int]]


def _unknown_ends(_: set[TopicPartition]) -> Mapping[TopicPartition, int]:
    return {}


class Show(Protocol):
    """How changes are shown."""

    def begin(self, world: World) -> None:
        """Show what stands at the start."""
        ...

    def take(self, change: Change, world: World) -> None:
        """Show a change."""
        ...

    def tick(self, world: World, outage: CoordinationError | None) -> None:
        """Keep what is shown up to date; called after every wait."""
        ...


class Wanted:
    """Which claims are watched.

    Args:
        group_id: Of this group only.
        topic: Of this topic only; pauses of groups are told all the same.
        log_ends: Returns where logs end, of the partitions that can be asked.
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
        """Return the claims of a world that are watched, with their lag.

        Log ends are asked for at most every ``LOG_ENDS_EVERY_S``, and not while the
        brokers are away.
        """
        rows = facts.claim_rows(world, group_id=self.group_id, topic=self.topic)
        if not is_away and self._now_s() - self._asked_s >= LOG_ENDS_EVERY_S:
            self._ends = self._log_ends(facts.data_partitions(rows))
            self._asked_s = self._now_s()
        return facts.with_lag(rows, self._ends)

    def __contains__(self, change: Change) -> bool:
        """Whether a change is of interest."""
        if change.key is None:
            return self.group_id in {None, change.group_id}
        return facts.is_wanted(change.key, group_id=self.group_id, topic=self.topic)


class Lines:
    """A line for each claim at the start, and for each change.

    Args:
        wanted: Which claims are watched.
        is_json: Whether the lines are JSON.
        begins: Whether the claims at the start are told.
    """

    def __init__(self, wanted: Wanted, *, is_json: bool, begins: bool) -> None:
        self._wanted = wanted
        self._is_json = is_json
        self._begins = begins
        self._outages = Outages()

    def begin(self, world: World) -> None:
        """Tell every claim that somebody holds."""
        if not self._begins:
            return
        rows = [row for row in self._wanted.rows(world) if row["owner"] is not None]
        section = Section("claims", rows, columns.CLAIMS)
        if self._is_json:
            for line in lines(Answer(facts.as_of(world), {}, (section,))):
                data(to_json(line))
        else:
            for row in rows:
                data(escape(held_text(row, world.read_at_ms)))
        sys.stdout.flush()

    def take(self, change: Change, world: World) -> None:
        """Tell a change."""
        if self._is_json:
            data(to_json(change_row(change, world.read_at_ms)))
        else:
            data(escape(change_text(change)))
        sys.stdout.flush()

    def tick(self, world: World, outage: CoordinationError | None) -> None:
        """Tell of outages."""
        del world
        self._outages.tell(outage)


class Board:
    """A table that is drawn anew at every change, with the last changes below.

    Args:
        live: What draws it.
        wanted: Which claims are watched.
        now_s: Returns the time in seconds.
    """

    def __init__(
        self, live: Live, wanted: Wanted, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._live = live
        self._wanted = wanted
        self._now_s = now_s
        self._drawn_s = float("-inf")
        self._is_new = True
        self._was_away = False
        self._last: deque[str] = deque(maxlen=CHANGES_SHOWN)

    def begin(self, world: World) -> None:
        """Draw what stands."""
        self.tick(world, None)

    def take(self, change: Change, world: World) -> None:
        """Note a change; ``tick`` draws it."""
        del world
        self._is_new = True
        self._last.append(change_text(change))

    def tick(self, world: World, outage: CoordinationError | None) -> None:
        """Draw, where something is new or ages have moved on."""
        if (outage is not None) != self._was_away:
            self._was_away = outage is not None
            self._is_new = True
        since_s = self._now_s() - self._drawn_s
        if since_s < (DRAWN_EVERY_S_MIN if self._is_new else DRAWN_EVERY_S_MAX):
            return
        self._drawn_s, self._is_new = self._now_s(), False
        self._live.update(self._drawn(world, outage), refresh=True)

    def _drawn(self, world: World, outage: CoordinationError | None) -> Group:
        rows = self._wanted.rows(world, is_away=outage is not None)
        head = f"{len(rows)} claims at {instant(world.read_at_ms)}"
        if outage is not None:
            head += f"; THE BROKERS DO NOT ANSWER: {escape(str(outage))}"
        changes = [Text(escape(line), style="dim") for line in self._last]
        is_one = self._wanted.group_id is not None
        cells = columns.CLAIMS_OF_A_GROUP if is_one else columns.CLAIMS
        table = grid(Section("claims", rows, cells)) if rows else Text("no claims")
        return Group(Text(head), table, *changes)


def shown(call: Call, wanted: Wanted, *, begins: bool, stack: ExitStack) -> Show:
    """Return how the call wants it: a table on a terminal that can, else lines."""
    _, is_color = terminal(sys.stdout)
    console = Console(file=sys.stdout, no_color=not is_color, highlight=False)
    can_draw = console.is_terminal and not console.is_dumb_terminal
    if call.output is not Output.TABLE or not can_draw:
        return Lines(wanted, is_json=call.output is not Output.TABLE, begins=begins)
    live = Live(console=console, auto_refresh=False, redirect_stdout=False)
    return Board(stack.enter_context(live), wanted)


def held_text(row: Row, read_at_ms: int) -> str:
    """Return the line of a claim that stood at the start; not escaped yet."""
    return (
        f"{instant(read_at_ms)} held     {row['group_id']} {row['topic']}-"
        f"{row['partition']} by {row['owner']['client_id']}, token {row['token']}"
        + ("" if row["position"] is None else f", position {row['position']}")
        + ("" if row["lag"] is None else f", lag {row['lag']}")
    )


def change_text(change: Change) -> str:
    """Return the line of a change for people; not escaped yet."""
    what = [f"{instant(change.time_ms)} {change.what:<8} {change.group_id}"]
    if change.key is not None:
        what.append(str(change.key.topic_partition))
    if change.client_id is not None:
        what.append(f"by {change.client_id}")
    told = {
        "to": change.by,
        "token": change.token,
        "position": change.position,
        "until": None if change.until_ms is None else instant(change.until_ms),
        "reason:": change.reason,
    }
    also = [f"{name} {value}" for name, value in told.items() if value is not None]
    if change.what == "lost":
        what[-1] = what[-1].replace("by ", "of ", 1)
    also.append(f"at T{change.partition} offset {change.offset}")
    return ", ".join([" ".join(what), *also])


def change_row(change: Change, read_at_ms: int) -> dict[str, Any]:
    """Return the JSON object of a change."""
    key, incarnation = change.key, change.incarnation
    return {
        "schema": SCHEMA,
        "as_of": {
            "time_ms": read_at_ms,
            "offsets": {str(change.partition): change.offset + 1},
        },
        "kind": "change",
        "change": change.what,
        "group_id": change.group_id,
        "topic": None if key is None else key.topic,
        "partition": None if key is None else key.partition,
        "client_id": change.client_id,
        "incarnation": None if incarnation is None else incarnation.hex(),
        "token": None if change.token is None else str(change.token),
        "position": change.position,
        "by": change.by,
        "reason": change.reason,
        "until_ms": change.until_ms,
        "coordinating_partition": change.partition,
        "offset": change.offset,
        "appended_ms": change.time_ms,
    }


def follow(
    watch: WorldWatch, show: Show, *, wanted: Wanted, idle: Idle, count_max: int
) -> None:
    """Show what changes until enough has, or nothing does for too long."""
    show.begin(watch.world())
    count = 0
    while True:
        changes = [change for change in watch.changes(idle.wait_ms) if change in wanted]
        world = watch.world()
        for change in changes:
            show.take(change, world)
            count += 1
            if count == count_max:
                break
        show.tick(world, watch.outage)
        if changes:
            idle.touch()
        if count == count_max > 0 or idle.is_over:
            return
        check_reader()


@command(waits=False)
def watch(
    call: Call,
    *,
    group: Annotated[
        str | None, typer.Option(metavar="GROUP", help="Of this group only.")
    ] = None,
    topic: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="Of this topic only.")
    ] = None,
    count: Annotated[
        int, typer.Option(min=0, help="End after so many changes; 0 for no limit.")
    ] = 0,
    timeout: Annotated[
        str | None,
        typer.Option(metavar="MS", help="End after so long without a change."),
    ] = None,
    open_timeout: Annotated[
        str,
        typer.Option(
            metavar="MS", envvar="MARSHAL_TIMEOUT", help="When to give up connecting."
        ),
    ] = "30s",
    only_changes: Annotated[
        bool,
        typer.Option("--only-changes", help="Do not begin with the claims that stand."),
    ] = False,
) -> None:
    """Show claims live: a table on a terminal, else a line for each change.

    The table tells ages by estimate (AGE NOW), as `claims list` does, and asks
    for log ends every 5 s. Lines
    begin with the claims that are held (`-o jsonl`: kind `claims`), then tell
    each change (kind `change`): claimed, resumed, released, lost (taken over
    from an owner that did not let go), paused, unpaused, with the offset and
    time of the entry that made it. Brokers that go away are waited for.
    Ctrl-C ends it with 130, SIGTERM with 0.
    """
    idle_ms = None if timeout is None else parsing.duration_ms("--timeout", timeout)
    open_ms = parsing.duration_ms("--open-timeout", open_timeout)
    with ending_in_order(), ExitStack() as stack:
        admin = stack.enter_context(call.admin())
        wanted = Wanted(group, topic, log_ends=admin.log_ends)
        watch = stack.enter_context(
            call.watch(timeout_ms=open_ms, first=lambda span: span.end)
        )
        watch.catch_up(open_ms)
        watch.world().config()
        show = shown(call, wanted, begins=not only_changes, stack=stack)
        follow(watch, show, wanted=wanted, idle=Idle(idle_ms), count_max=count)
