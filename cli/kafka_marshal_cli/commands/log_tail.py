"""``marshal log tail``: shows entries of the log and what each did."""

import difflib
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any

import attrs
import typer

from kafka_marshal import ConfigurationError, WorldWatch
from kafka_marshal.clock import instant
from kafka_marshal.counting import counted
from kafka_marshal.ports import LogRange
from kafka_marshal.protocol.codec import Undecodable, decode, person_of
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import KINDS
from kafka_marshal.protocol.state import ACCEPTED, UNDECODABLE, Transitions
from kafka_marshal.protocol.text import entry_to_object, transition_to_object
from kafka_marshal.protocol.types import whole_number
from kafka_marshal.views.log_scan import require_restored
from kafka_marshal.views.watch import Folded
from kafka_marshal_cli import parsing
from kafka_marshal_cli.follow_loop import Idle, Outages, check_reader, ending_in_order
from kafka_marshal_cli.parsing import Moment
from kafka_marshal_cli.render import escape, log_place, plain, to_json
from kafka_marshal_cli.shared import (
    AT,
    Call,
    OfGroup,
    OpenTimeout,
    command,
    emit,
    notify,
)

app = typer.Typer()

LAST_DEFAULT = 10
TYPES = (*(kind.name for kind in KINDS), UNDECODABLE)
FIELD_CHARACTERS_MAX = 60
# Fields shown at the front of the line, and fields that only programs use.
_SHOWN_IN_FRONT = frozenset({"client_id", "group_id", "topic", "partition"})
_FOR_PROGRAMS = frozenset({"seq", "tags", "resume_hash", "grantee", "topic_id"})


class TailOutput(StrEnum):
    """Format of entries."""

    TEXT = "text"
    JSONL = "jsonl"


@attrs.frozen(kw_only=True)
class Filter:
    """The entries to show.

    Attributes:
        partition: Only this coordinating partition.
        group_id: Only this group.
        types: Only these record types; empty for all.
        first: Only from this offset on.
    """

    partition: int | None = None
    group_id: str | None = None
    types: frozenset[str] = frozenset()
    first: int = 0

    @property
    def is_by_content(self) -> bool:
        """Whether the filter depends on the content of an entry."""
        return self.group_id is not None or bool(self.types)

    def __contains__(self, folded: Folded) -> bool:
        """Return whether an entry is shown."""
        entry = folded.entry
        if self.partition not in {None, folded.partition} or entry.offset < self.first:
            return False
        if not self.is_by_content:
            return True
        record = UNDECODABLE if entry.undecodable else decode(entry.value)
        group_id = getattr(record, "group_id", None)
        if self.group_id is not None and group_id != self.group_id:
            return False
        return not self.types or _type_of(record) in self.types


def _type_of(record: object) -> str:
    kinds = (kind.name for kind in KINDS if isinstance(record, kind.record))
    return next(kinds, UNDECODABLE)


def types_of(given: str | None) -> frozenset[str]:
    """Return the record types of ``--type``.

    Raises:
        ConfigurationError: One of them does not exist.
    """
    known = {name.lower(): name for name in TYPES}
    names = [] if given is None else [name.strip() for name in given.split(",")]
    for name in names:
        if name.lower() not in known:
            near = difflib.get_close_matches(name.lower(), known, 1)
            hint = f"did you mean {known[near[0]]}? " if near else ""
            raise ConfigurationError(
                f"--type {name!r} is not a record type; {hint}there are "
                f"{', '.join(TYPES)}",
                setting="--type",
            )
    return frozenset(known[name.lower()] for name in names)


def verdict(transitions: Transitions) -> str:
    """Return what an entry did, as short text."""
    if not transitions:
        return "not folded"
    counts: Counter[str] = Counter()
    for each in transitions:
        what = each.effect if each.outcome == ACCEPTED else each.outcome
        if each.reason not in {None, each.outcome}:
            what = f"{what}: {each.reason}"
        if each.detail:
            what = f"{what} ({plain(each.detail)})"
        counts[what or each.outcome] += 1
    parts = (name if n == 1 else f"{name} x{n}" for name, n in counts.items())
    return ", ".join(parts)


def text_line(folded: Folded) -> str:
    """Return the line of an entry for people, not escaped."""
    line = entry_to_object(folded.partition, folded.entry)
    place = log_place(folded.partition, folded.entry.offset)
    head = f"{place:<8} {instant(folded.entry.timestamp_ms)}"
    if "undecodable" in line:
        value = folded.entry.value or b""
        found = f"undecodable ({line['undecodable']['reason']}) {value[:32].hex()}"
        return f"{head} {found} -> {verdict(folded.transitions)}"
    payload = line["payload"]
    fields: Mapping[str, Any] = payload["data"]
    who = "/".join(str(fields[n]) for n in ("group_id", "client_id") if n in fields)
    parts = [head, payload["type"], who]
    if "partition" in fields and "topic" in fields:
        parts.append(f"{fields['topic']}-{fields['partition']}")
    elif "topic" in fields:
        parts.append(fields["topic"])
    parts += [f"{name}={_shortened(value)}" for name, value in _shown_fields(fields)]
    record = decode(folded.entry.value)
    person = None if isinstance(record, Undecodable) else person_of(record)
    if person is not None:
        parts.append(f"by={_shortened(person)}")
    return (
        f"{' '.join(part for part in parts if part)} -> {verdict(folded.transitions)}"
    )


def _shown_fields(fields: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in fields.items():
        if name in _SHOWN_IN_FRONT | _FOR_PROGRAMS or value in (None, False, {}):
            continue
        if name == "incarnation":
            yield name, str(value)[:8]
        elif name == "beats":
            yield name, len(value)
        elif name == "resume":
            yield name, f"of epoch {value['epoch']}"
        else:
            yield name, value


def _shortened(value: object) -> str:
    text = plain(value)
    if len(text) > FIELD_CHARACTERS_MAX:
        text = text[:FIELD_CHARACTERS_MAX] + "..."
    return f"({text})" if " " in text else text


def json_line(folded: Folded, *, transitions: bool) -> str:
    """Return the entry in the text form of the log, as ``log dump`` writes it."""
    line = entry_to_object(folded.partition, folded.entry)
    if transitions:
        line["transitions"] = [
            transition_to_object(folded.partition, each) for each in folded.transitions
        ]
    return to_json(line)


class Tail:
    """Writes entries: first the last existing ones, then new ones.

    Args:
        wanted: Selects the entries to show.
        output: Format.
        transitions: Whether JSON shows what each entry did.
        last: How many existing entries are shown; None for all.

    Attributes:
        has_written: Whether an entry was shown.
    """

    def __init__(
        self,
        wanted: Filter,
        output: TailOutput,
        *,
        transitions: bool,
        last: int | None,
    ) -> None:
        self._wanted = wanted
        self._output = output
        self._transitions = transitions
        self._last = last
        self.has_written = False
        # The last entries of the whole log are among the last of each partition.
        self._kept: dict[int, deque[Folded]] = {}

    def add_existing(self, folded: Folded) -> None:
        """Handle an entry that was in the log at the start."""
        if folded not in self._wanted:
            return
        if self._last is None:
            self.write(folded)
        else:
            fresh: deque[Folded] = deque(maxlen=self._last)
            self._kept.setdefault(folded.partition, fresh).append(folded)

    def write_existing(self) -> None:
        """Write the last existing entries, in order of time."""
        kept = [folded for entries in self._kept.values() for folded in entries]
        kept.sort(key=lambda f: (f.entry.timestamp_ms, f.partition, f.entry.offset))
        self._kept.clear()
        for folded in kept[-(self._last or 1) :]:
            self.write(folded)
        sys.stdout.flush()

    def note_nothing(self) -> None:
        """Notify if entries were wanted, and none was shown."""
        if self._last != 0 and not self.has_written:
            notify("the log has no such entries; see: marshal topic info")

    def write_new(self, folded: Folded) -> bool:
        """Write a new entry; return whether it was shown."""
        is_shown = folded in self._wanted
        if is_shown:
            self.write(folded)
        return is_shown

    def write(self, folded: Folded) -> None:
        """Write one entry."""
        self.has_written = True
        if self._output is TailOutput.JSONL:
            emit(json_line(folded, transitions=self._transitions))
        else:
            emit(escape(text_line(folded)))


def run(
    watch: WorldWatch, tail: Tail, *, follows: bool, idle: Idle, outage_ms_max: int
) -> None:
    """Write the existing entries of the log, then new ones if ``follows``.

    Raises:
        DeadlineExceeded: Reading stalled before the end of the log.
    """
    outages, outage_limit = Outages(), Idle(outage_ms_max)
    while not watch.is_caught_up:
        if outage_limit.is_over:
            watch.catch_up(0)
        for folded in watch.read(outage_limit.wait_ms):
            outage_limit.touch()
            # Without ``follows``, end where the log ended at the start.
            if follows or folded.entry.offset < watch.ends[folded.partition]:
                tail.add_existing(folded)
        check_reader()
    tail.write_existing()
    while follows and not idle.is_over:
        is_shown = [tail.write_new(folded) for folded in watch.read(idle.wait_ms)]
        if any(is_shown):
            sys.stdout.flush()
            idle.touch()
        outages.report(watch.outage)
        check_reader()


def start_of(text: str | None, last: int | None) -> tuple[int, int | None]:
    """Return the first offset, and how many existing entries are shown.

    Args:
        text: Value of ``--from``.
        last: Value of ``-n``.

    Raises:
        ConfigurationError: The value is not an offset.
    """
    match text:
        case None:
            return 0, LAST_DEFAULT if last is None else last
        case "start":
            return 0, last
        case "end":
            return 0, 0
    first = whole_number(text)
    if first is None:
        raise ConfigurationError(
            f"--from is {text!r}; write start, end, or an offset", setting="--from"
        )
    return first, last


def first_wanted(wanted: Filter, last: int | None) -> Callable[[LogRange], int]:
    """Return a function that returns the first offset to read of a partition.

    A stored state can replace the earlier entries: what an entry does depends only on
    the state before it.

    Args:
        wanted: Selects the entries to show.
        last: How many existing entries are shown; None for all.
    """

    def first(span: LogRange) -> int:
        # The last entries that match by content can be anywhere in the log.
        is_counted = last == 0 or (last is not None and not wanted.is_by_content)
        begin = span.end - (last or 0) if is_counted else span.start
        return max(begin, wanted.first)

    return first


Partition = Annotated[
    int | None,
    typer.Option(metavar="T", min=0, help="Only this coordinating partition."),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="start|end|OFFSET",
        help="Where to begin, in each partition.",
    ),
]
Last = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--last",
        min=0,
        metavar="N",
        help=f"Begin with the last N; by default {LAST_DEFAULT}, or all after --from.",
    ),
]
OfTypes = Annotated[
    str | None,
    typer.Option(
        "--type",
        metavar="TYPE,...",
        help="Only these record types, like Heartbeat, or undecodable.",
    ),
]
Follow = Annotated[bool, typer.Option("-f", "--follow", help="Wait for new entries.")]
TextOrJson = Annotated[
    TailOutput, typer.Option("-o", "--output", help="Lines for people, or JSON.")
]
WithTransitions = Annotated[
    bool,
    typer.Option("--transitions", help="In JSON, too, show what each entry did."),
]
IdleTimeout = Annotated[
    str | None,
    typer.Option(
        metavar="MS", help="With --follow: end after this time without an entry."
    ),
]


def _show_past(
    call: Call, at: Moment, shown: Tail, *, first: Callable[[LogRange], int]
) -> None:
    """Write the last entries before a moment.

    Raises:
        LogUnreadable: The state before them is unknown.
    """
    with call.scan(at) as scan:
        restored = require_restored(scan.restore(first=first))
        for number, entry in scan:
            world = restored[number].world
            shown.add_existing(Folded(number, entry, apply(world, entry)))
            check_reader()
    shown.write_existing()
    shown.note_nothing()


@app.command("tail", epilog="Example: marshal log tail -f --group billing")
@command(waits=False, answers=False, option_groups=AT)
def tail(
    call: Call,
    *,
    at: Moment | None,
    partition: Partition = None,
    from_: From = None,
    last: Last = None,
    group: OfGroup = None,
    type_: OfTypes = None,
    follow: Follow = False,
    output: TextOrJson = TailOutput.TEXT,
    transitions: WithTransitions = False,
    timeout: IdleTimeout = None,
    open_timeout: OpenTimeout = "30s",
) -> None:
    """Show the last entries of the log and what each did.

    A line has the coordinating partition and offset, the time of the append, the
    record, and after an arrow what it did, or why it had no effect. `-o jsonl` writes
    the text form that `marshal log replay` reads. With --at the entries end at that
    moment. Ctrl-C ends the command with exit code 130, SIGTERM with 0.
    """
    idle_ms = None if timeout is None else parsing.duration_ms("--timeout", timeout)
    if idle_ms is not None and not follow:
        raise ConfigurationError(
            "--timeout ends --follow, which was not given; add it, or use "
            "--open-timeout",
            setting="--timeout",
        )
    open_ms = parsing.timeout_ms("--open-timeout", open_timeout)
    first, kept = start_of(from_, last)
    wanted = Filter(
        partition=partition, group_id=group, types=types_of(type_), first=first
    )
    first_of = first_wanted(wanted, kept)
    shown = Tail(wanted, output, transitions=transitions, last=kept)
    if at is not None:
        if follow:
            raise ConfigurationError(
                "--at is a moment of the past, and --follow waits for new entries; "
                "leave one of them out",
                setting="--at",
            )
        with ending_in_order():
            _show_past(call, at.of_partition(partition), shown, first=first_of)
        return
    with ending_in_order(), call.watch(timeout_ms=open_ms, first=first_of) as watch:
        if partition is not None and partition not in watch.ends:
            raise ConfigurationError(
                f"--partition is {partition}, and the coordination topic has "
                f"{counted(len(watch.ends), 'partition')}; see: marshal topic info",
                setting="--partition",
            )
        idle = Idle(idle_ms)
        run(watch, shown, follows=follow, idle=idle, outage_ms_max=open_ms)
        if not follow:
            shown.note_nothing()
