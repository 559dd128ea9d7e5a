"""``marshal log replay``: the state that a dump of the log folds to.

A dump is read line by line and only the states are held in memory, so a dump of any
length can be piped through. A bad line ends the command, with the number of the line.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, TextIO

import msgspec
import typer

from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    LogTruncated,
    LogUnreadable,
    MalformedRecord,
)
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import Transitions, WorldState
from kafka_marshal.protocol.text import (
    object_to_entry,
    transition_to_object,
    world_to_object,
)
from kafka_marshal_cli.exits import ExitCode
from kafka_marshal_cli.render import escape, to_json
from kafka_marshal_cli.shared import Call, command

app = typer.Typer()


@app.command("replay", epilog="Example: marshal log replay dump.jsonl --transitions")
@command(connects=False, waits=False, answers=False)
def replay(
    call: Call,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Output of `log dump`.")],
    *,
    transitions: Annotated[
        bool,
        typer.Option("--transitions", help="First print what each entry did."),
    ] = False,
) -> None:
    """Fold a dumped log and print the world as one JSON document. Needs no broker."""
    del call
    with ExitStack() as stack:
        source = sys.stdin
        if file != "-":
            try:
                source = stack.enter_context(Path(file).open(encoding="utf-8"))
            except OSError as error:
                raise ConfigurationError(
                    f"{file!r} cannot be read: {error}; name an output of "
                    "marshal log dump",
                    setting="FILE",
                ) from error
        code = run_replay(
            source,
            sys.stdout,
            err=sys.stderr,
            transitions=transitions,
            file=None if file == "-" else file,
        )
    if code:
        sys.stdout.flush()
        raise typer.Exit(code)


LINE_CHARACTERS_MAX = 16 * 1024 * 1024
"""A longer line cannot be an entry: records of Kafka are smaller."""

Worlds = dict[int, WorldState]
"""Worlds by coordinating partition."""


def replay_lines(
    lines: Iterable[str], worlds: Worlds
) -> Iterator[tuple[int, Transitions]]:
    """Fold lines of text into worlds, in place, one step for each entry.

    Args:
        lines: Entries of any number of coordinating partitions, those of each
            in the order of their offsets; blank lines are skipped.
        worlds: Receives partitions as they appear. After an error it has the
            state before the bad line.

    Yields:
        The coordinating partition of an entry and its transitions; entries after a
        halt have none (PROTOCOL 3.3).

    Raises:
        MalformedRecord: A line is not an entry, or cannot be read.
        LogTruncated: An offset or leader epoch of a partition goes back.
        LogUnreadable: An entry has no leader epoch.
    """
    number = 0
    try:
        for number, line in enumerate(lines, 1):  # noqa: B007 - errors name it
            if line.strip():
                partition, entry = object_to_entry(_read_json(line))
                world = worlds.get(partition)
                if world is None:
                    world = worlds[partition] = WorldState(partition)
                yield partition, apply(world, entry)
    except UnicodeDecodeError as error:  # while the next line was read
        reason = error.reason
        raise MalformedRecord(f"line {number + 1} is not UTF-8: {reason}") from error
    except OSError as error:
        text = f"line {number + 1} cannot be read: {error}"
        raise MalformedRecord(text) from error
    except (MalformedRecord, LogTruncated, LogUnreadable) as error:
        raise type(error)(f"line {number}: {error}") from error


def _read_json(line: str) -> object:
    if len(line) > LINE_CHARACTERS_MAX:
        raise MalformedRecord(f"longer than {LINE_CHARACTERS_MAX} characters")
    try:
        value: object = msgspec.json.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedRecord(f"not a JSON object: {error}"[:200]) from error
    return value


def read_lines(source: TextIO) -> Iterator[str]:
    """Yield the lines of a text, each cut at the longest allowed length."""
    while line := source.readline(LINE_CHARACTERS_MAX + 1):
        yield line


def run_replay(
    source: TextIO,
    out: TextIO,
    *,
    err: TextIO,
    transitions: bool,
    file: str | None = None,
) -> int:
    """Fold a text log and print the world (PROTOCOL 3.8).

    Args:
        source: The log, one JSON object for each line.
        out: Receives the world as one JSON document, at the end.
        err: Receives one line if the log is bad.
        transitions: Print what each entry did, one object for each line, before the
            world.
        file: Where the log comes from, for messages; None for standard input.

    Returns:
        The exit code: 0, or 3 if a partition halted (its world is printed), or 1
        for a log that goes back or cannot be read (no world).
    """
    worlds: Worlds = {}
    try:
        for partition, steps in replay_lines(read_lines(source), worlds):
            if transitions:
                for transition in steps:
                    line = to_json(transition_to_object(partition, transition))
                    out.write(line + "\n")
    except (MalformedRecord, CoordinationError) as error:
        text = str(error) if file is None else f"{file!r}: {error}"
        if not worlds and file is not None:
            text += f"; {_remedy(file)}"
        err.write(f"marshal: {escape(text)}\n")
        return ExitCode.FAILED
    out.write(to_json(world_to_object(worlds.values())) + "\n")
    has_halted = any(world.halted is not None for world in worlds.values())
    return ExitCode.REFUSED if has_halted else ExitCode.OK


def _remedy(file: str) -> str:
    """Return advice on a file that does not begin like a dump."""
    from kafka_marshal.snapshots import MAGIC  # here: it imports the engine

    with suppress(OSError), Path(file).open("rb") as opened:
        if opened.read(len(MAGIC)) == MAGIC:
            return f"it is a snapshot; show it with: marshal log dump {file}"
    return "name an output of marshal log dump"
