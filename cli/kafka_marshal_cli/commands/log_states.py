"""``marshal log snapshot`` and ``diff``: states as files, and what differs."""

import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, TextIO

import typer

from kafka_marshal import ConfigurationError, LogUnreadable, MalformedRecord
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.snapshots import (
    MAGIC,
    Snapshot,
    read_file,
    snapshot_of,
    to_file_bytes,
    write_file,
)
from kafka_marshal.views import unknown_text
from kafka_marshal_cli import columns
from kafka_marshal_cli.commands.log_replay import read_lines, replay_lines
from kafka_marshal_cli.diffing import difference
from kafka_marshal_cli.exits import ExitCode
from kafka_marshal_cli.render import Answer, Section
from kafka_marshal_cli.shared import Call, command, tell, wall_ms

LIVE = "live"


@command()
def snapshot(
    call: Call,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Where to write it.")],
    *,
    dump: Annotated[
        str | None,
        typer.Option(
            metavar="DUMP", help="Of what `log dump` wrote (- = stdin): no broker."
        ),
    ] = None,
) -> None:
    """Write the state of every coordinating partition to a file.

    The log is folded from its start, or from its first checkpoint where the start is
    gone, or the dump. `marshal log verify --snapshot`
    compares the file with the log later, `marshal log diff` with another.
    """
    cluster_id, topic_id = "", b""
    if dump is None:
        worlds, cluster_id, topic_id = _live(call)
    else:
        worlds = _dumped(dump)
    whole = [
        snapshot_of(world, cluster_id=cluster_id, topic_id=topic_id)
        for _, world in sorted(worlds.items())
        if world.leader_epoch is not None and world.halted is None
    ]
    for number in sorted(worlds):
        if worlds[number].halted is not None:
            tell(f"marshal: partition {number} needs a newer release and is left out")
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
    as_of = {
        "time_ms": wall_ms(),
        "offsets": {str(state.partition): state.offset for state in states},
    }
    section = Section("partitions", rows, columns.KEPT)
    call.answer(Answer(as_of, {"file": file}, (section,)))


@command()
def diff(
    call: Call,
    one: Annotated[
        str, typer.Argument(metavar="ONE", help="A snapshot, a dump, or `live`.")
    ],
    *,
    other: Annotated[
        str, typer.Argument(metavar="OTHER", help="A snapshot, a dump, or `live`.")
    ],
) -> None:
    """Show in what two states of the log differ, key by key and field by field.

    Each is a file that `log snapshot` or `log dump` wrote, or the log itself. Ends
    with 1 where they differ.
    """
    first, second = (
        _live(call)[0] if each == LIVE else worlds_of(each) for each in (one, other)
    )
    rows = difference(first, second)
    offsets = {str(t): world.next_offset for t, world in sorted(second.items())}
    as_of = {"time_ms": wall_ms(), "offsets": offsets}
    section = Section("differences", rows, columns.DIFFERENCES)
    facts = {"result": "differ" if rows else "equal", "one": one, "other": other}
    call.answer(Answer(as_of, facts, (section,)))
    if rows:
        raise typer.Exit(ExitCode.FAILED)


def _live(call: Call) -> tuple[Mapping[int, WorldState], str, bytes]:
    with call.scan() as scan:
        restored = scan.restore()
        unknown = sorted(t for t, each in restored.items() if each.is_log_start_missing)
        if unknown:
            raise LogUnreadable(unknown_text(unknown))
        worlds = {number: each.world for number, each in restored.items()}
        for number, entry in scan:
            apply(worlds[number], entry)
        return worlds, scan.cluster_id, scan.topic_id or b""


def worlds_of(file: str) -> Mapping[int, WorldState]:
    """Return the states that a file holds, of snapshots or as text.

    Raises:
        ConfigurationError: It cannot be read, or is neither.
    """
    if file != "-" and _begins_as_snapshot(file):
        return {each.state.partition: state_of(each) for each in snapshots_of(file)}
    return _dumped(file)


def snapshots_of(file: str) -> list[Snapshot]:
    """Return the sections of a file of snapshots.

    Raises:
        ConfigurationError: It is none.
    """
    try:
        return read_file(Path(file))
    except (OSError, MalformedRecord) as error:
        raise _unreadable(file, error) from error


def state_of(section: Snapshot) -> WorldState:
    """Return the state in a section.

    Raises:
        ConfigurationError: Its bytes are no state, or not the one it names.
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
            _exhaust(replay_lines(read_lines(source), worlds))
        except MalformedRecord as error:
            raise _unreadable(file, error) from error
        return worlds


def _exhaust(steps: Iterable[object]) -> None:
    for _ in steps:
        pass


def _unreadable(file: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"{file!r} cannot be used: {error}; marshal log snapshot and marshal log dump "
        "write such",
        setting="FILE",
    )
