"""``marshal log snapshot`` and ``diff``: store and compare states of the log."""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperCommand

from kafka_marshal import ConfigurationError
from kafka_marshal.errors import (
    LogTruncated,
    LogUnreadable,
    MalformedRecord,
)
from kafka_marshal.protocol.placement import by_partition
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import (
    GroupState,
    KeyState,
    WorldState,
)
from kafka_marshal.protocol.text import record_to_object
from kafka_marshal.snapshots import (
    MAGIC,
    Snapshot,
    read_file,
    snapshot_of,
    to_file_bytes,
    write_file,
)
from kafka_marshal.views.log_scan import require_restored
from kafka_marshal_cli import parsing, presenters
from kafka_marshal_cli.commands.log_replay import read_lines, replay_lines
from kafka_marshal_cli.exits import ExitCode
from kafka_marshal_cli.parsing import Moment
from kafka_marshal_cli.render import Answer, Section
from kafka_marshal_cli.shared import AT, Call, command, notify, wall_ms
from kafka_marshal_cli.world_tree import header_of, to_json_value

LIVE = "live"
_AGO = re.compile(r"-(P|PT)?[0-9]\w*", re.ASCII)


app = typer.Typer()


@app.command("snapshot", epilog="Example: marshal log snapshot before.snapshot")
@command(option_groups=AT)
def snapshot(
    call: Call,
    file: Annotated[str, typer.Argument(metavar="FILE", help="File to write.")],
    *,
    at: Moment | None,
    dump: Annotated[
        str | None,
        typer.Option(
            metavar="DUMP",
            help="Output of `log dump` to read instead; - for stdin.",
        ),
    ] = None,
) -> None:
    """Write the state of every coordinating partition to a file.

    The log, or the dump, is folded from its start, or from its first checkpoint if the
    start is gone. `marshal log verify --snapshot` compares the file with the log,
    `marshal log diff` with another state.
    """
    cluster_id, topic_id = "", b""
    if dump is None:
        worlds, cluster_id, topic_id = _live(call) if at is None else _past(call, at)
    elif at is None:
        worlds = _dumped(dump)
    else:
        raise ConfigurationError(
            "--at is a moment of the log, and --dump reads a file; to end a dump at a "
            "moment, run: marshal log dump --at",
            setting="--at",
        )
    whole = [
        snapshot_of(world, cluster_id=cluster_id, topic_id=topic_id)
        for _, world in sorted(worlds.items())
        if world.leader_epoch is not None and world.halted is None
    ]
    for number in sorted(worlds):
        if worlds[number].halted is not None:
            notify(f"marshal: partition {number} needs a newer release and is left out")
    try:
        write_file(Path(file), b"".join(map(to_file_bytes, whole)))
    except OSError as error:
        raise ConfigurationError(
            f"{file!r} cannot be written: {error}; name a file in a writable directory",
            setting="FILE",
        ) from error
    states = [each.state for each in whole]
    rows = [
        {
            "partition": state.partition,
            "next_offset": state.offset,
            "claims_count": len(worlds[state.partition].keys),
            "digest": state.digest,
        }
        for state in states
    ]
    as_of: presenters.Row = {
        "time_ms": wall_ms(),
        "offsets": {str(state.partition): state.offset for state in states},
    }
    if at is not None:
        as_of["at"] = at.text
    section = Section("partitions", rows, presenters.SNAPSHOT_COLUMNS)
    call.answer(Answer(as_of, {"file": file}, (section,)))


class DiffCommand(TyperCommand):
    """A command whose arguments may be times ago, like ``-5m``, and not options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        """Parse arguments; a space before a time ago keeps it from being an option."""
        ago = (f" {arg}" if _AGO.fullmatch(arg) else arg for arg in args)
        return super().parse_args(ctx, list(ago))


@app.command("diff", cls=DiffCommand, epilog="Example: marshal log diff -5m live")
@command()
def diff(
    call: Call,
    one: Annotated[
        str,
        typer.Argument(
            metavar="ONE", help="Snapshot, dump, `live`, or moment like -5m."
        ),
    ],
    *,
    other: Annotated[
        str,
        typer.Argument(
            metavar="OTHER", help="Snapshot, dump, `live`, or moment like -5m."
        ),
    ],
) -> None:
    """Show the differences of two states of the log, key by key and field by field.

    A state is an output of `log snapshot` or `log dump`, the log now (`live`), or the
    log at a moment, as for --at. With 3:100, only partition 3 is compared. Ends with
    exit code 1 if the states differ.
    """
    first, second = compared(
        states_named(call, one, setting="ONE"),
        states_named(call, other, setting="OTHER"),
    )
    rows = difference(first, second)
    offsets = {str(t): world.next_offset for t, world in sorted(second.items())}
    as_of = {"time_ms": wall_ms(), "offsets": offsets}
    section = Section("differences", rows, presenters.DIFFERENCE_COLUMNS)
    facts = {
        "result": "differ" if rows else "equal",
        "one": one.strip(),
        "other": other.strip(),
    }
    call.answer(Answer(as_of, facts, (section,)))
    if rows:
        raise typer.Exit(ExitCode.FAILED)


NamedStates = tuple[Mapping[int, WorldState], bool]
"""States by coordinating partition, and whether all partitions are requested."""


def states_named(call: Call, text: str, *, setting: str) -> NamedStates:
    """Return the states that an argument names: a file, ``live`` or a moment.

    Raises:
        ConfigurationError: The argument is none of these; the error has ``setting``.
    """
    if text == LIVE:
        return _live(call)[0], True
    if not text.startswith(" ") and (text == "-" or _exists(text)):
        return worlds_of(text), True
    try:
        at = parsing.past_moment("the moment", text.strip(), now_ms=wall_ms())
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{text.strip()!r} cannot be used: there is no such file, and {error}",
            setting=setting,
        ) from error
    return _past(call, at)[0], at.offsets is None


def _exists(name: str) -> bool:
    try:
        Path(name).stat()
    except PermissionError:  # in its directory; reading it will report that
        return True
    except (OSError, ValueError):  # such as a name that no file can have
        return False
    return True


def compared(one: NamedStates, other: NamedStates) -> list[Mapping[int, WorldState]]:
    """Return both states; if either is of some partitions, only the common ones."""
    common = one[0].keys() & other[0].keys()
    if one[1] and other[1]:
        return [one[0], other[0]]
    return [{t: each[t] for t in sorted(common)} for each in (one[0], other[0])]


def _past(
    call: Call, at: parsing.Moment
) -> tuple[Mapping[int, WorldState], str, bytes]:
    world = call.world(at)
    world.require_known()
    return by_partition(world.partitions), world.cluster_id or "", world.topic_id or b""


def _live(call: Call) -> tuple[Mapping[int, WorldState], str, bytes]:
    with call.scan() as scan:
        restored = require_restored(scan.restore())
        worlds = {number: each.world for number, each in restored.items()}
        for number, entry in scan:
            apply(worlds[number], entry)
        return worlds, scan.cluster_id, scan.topic_id or b""


def worlds_of(file: str) -> Mapping[int, WorldState]:
    """Return the states of a file of snapshots or of a dump.

    Raises:
        ConfigurationError: The file cannot be read, or is neither of these.
    """
    if file != "-" and _begins_as_snapshot(file):
        return by_partition(states_of(file))
    return _dumped(file)


def snapshots_of(file: str) -> list[Snapshot]:
    """Return the sections of a file of snapshots.

    Raises:
        ConfigurationError: It is not a file of snapshots.
    """
    try:
        return read_file(Path(file))
    except (OSError, MalformedRecord) as error:
        raise _unreadable(file, error, wanted="marshal log snapshot") from error


def states_of(file: str, partition: int | None = None) -> list[WorldState]:
    """Return the states of a file of snapshots, or that of one partition.

    Raises:
        ConfigurationError: It is not a file of snapshots, or lacks the partition.
    """
    sections = {each.state.partition: each for each in snapshots_of(file)}
    if partition is None:
        return [state_of(each) for each in sections.values()]
    if partition not in sections:
        raise ConfigurationError(
            f"--partition is {partition}, and {file!r} has the partitions "
            f"{sorted(sections)}; name one of these",
            setting="--partition",
        )
    return [state_of(sections[partition])]


def state_of(section: Snapshot) -> WorldState:
    """Return the state of a section.

    Raises:
        ConfigurationError: Its bytes are not a state, or do not match its digest.
    """
    try:
        return section.world()
    except MalformedRecord as error:
        raise _unreadable(section.state.source, error) from error


def _begins_as_snapshot(file: str) -> bool:
    try:
        with Path(file).open("rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise _unreadable(file, error) from error


def _dumped(file: str) -> Mapping[int, WorldState]:
    with ExitStack() as stack:
        source: TextIO = sys.stdin
        if file != "-":
            try:
                source = stack.enter_context(Path(file).open(encoding="utf-8"))
            except OSError as error:
                raise _unreadable(file, error) from error
        worlds: dict[int, WorldState] = {}
        try:
            for _ in replay_lines(read_lines(source), worlds):
                pass
        except (MalformedRecord, LogTruncated, LogUnreadable) as error:
            raise _unreadable(file, error) from error
        return worlds


def _unreadable(
    file: str,
    error: Exception,
    *,
    wanted: str = "marshal log snapshot or marshal log dump",
) -> ConfigurationError:
    return ConfigurationError(
        f"{file!r} cannot be used: {error}; name an output of {wanted}",
        setting="FILE",
    )


# --- differences


def difference(
    one: Mapping[int, WorldState], other: Mapping[int, WorldState]
) -> list[dict[str, Any]]:
    """Return every field in which two worlds differ, in order.

    Each row has the partition, the kind (``header``, ``config``, ``key``, ``group`` or
    ``partition``), the name, the field and both values; the value is null on the side
    that does not have the field.
    """
    rows: list[dict[str, Any]] = []
    for number in sorted(one.keys() | other.keys()):
        a, b = one.get(number), other.get(number)
        if a is None or b is None:
            ours = None if a is None else digest(a)
            theirs = None if b is None else digest(b)
            rows.append(_row(number, "partition", found=("digest", ours, theirs)))
        elif digest(a) != digest(b):
            rows += _state_differences(a, b)
    return rows


def _state_differences(a: WorldState, b: WorldState) -> Iterator[dict[str, Any]]:
    number = a.partition
    for each in _fields(header_of(a), header_of(b)):
        yield _row(number, "header", found=each)
    for each in _fields(_config(a), _config(b)):
        yield _row(number, "config", found=each)
    for key in sorted(a.keys.keys() | b.keys.keys()):
        name = f"{key.group_id}/{key.topic}/{key.partition}"
        for each in _fields(_key(a.keys.get(key)), _key(b.keys.get(key))):
            yield _row(number, "key", name=name, found=each)
    for group_id in sorted(a.groups.keys() | b.groups.keys()):
        ours, theirs = a.groups.get(group_id), b.groups.get(group_id)
        for each in _fields(_group(ours), _group(theirs)):
            yield _row(number, "group", name=group_id, found=each)


def _row(
    number: int, what: str, *, name: str = "", found: tuple[str, Any, Any]
) -> dict[str, Any]:
    field, one, other = found
    return {
        "partition": number,
        "what": what,
        "name": name,
        "field": field,
        "one": one,
        "other": other,
    }


def _fields(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterable[tuple[str, Any, Any]]:
    for field in [*one, *(name for name in other if name not in one)]:
        a, b = one.get(field), other.get(field)
        if a != b:
            yield field, a, b


def _config(state: WorldState) -> Mapping[str, Any]:
    config = state.config
    return {} if config is None else record_to_object(config)["data"]


def _key(known: KeyState | None) -> Mapping[str, Any]:
    return {} if known is None else to_json_value(known)


def _group(group: GroupState | None) -> Mapping[str, Any]:
    if group is None:
        return {}
    fields = to_json_value(group)
    del fields["key_count"]  # derived from the keys
    # ``known`` makes a group without a pause differ from a missing group.
    return {"known": True} | {name: each for name, each in fields.items() if each != []}
