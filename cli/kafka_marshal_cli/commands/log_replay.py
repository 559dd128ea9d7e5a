"""Folds a log in text form and prints the world: ``marshal log replay``. Pure.

Reads line by line and holds no more than the worlds themselves, so that a dump
of any length can be piped through. Whatever a line holds, it is folded or named:
there is no traceback for a bad file.
"""

from collections.abc import Iterable, Iterator
from typing import TextIO

import msgspec

from kafka_marshal.errors import (
    CoordinationError,
    LogTruncated,
    LogUnreadable,
    MalformedRecord,
)
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.text import object_to_entry, transition_to_object
from kafka_marshal.protocol.transition import Transitions
from kafka_marshal.protocol.world import world_to_object
from kafka_marshal_cli.exits import ExitCode
from kafka_marshal_cli.render import escape, to_json

LINE_CHARACTERS_MAX = 16 * 1024 * 1024
"""A line beyond this is no entry: Kafka's records are smaller."""

Worlds = dict[int, WorldState]
"""Coordinating partition to its world."""


def replay_lines(
    lines: Iterable[str], worlds: Worlds
) -> Iterator[tuple[int, Transitions]]:
    """Fold lines of text into worlds, in place, one step for each entry.

    Args:
        lines: Entries of any number of coordinating partitions, those of each
            in the order of their offsets; blank lines are passed over.
        worlds: Where partitions are added as they appear. It holds what was
            folded so far also when a line turns out bad.

    Yields:
        The coordinating partition of an entry and what the entry did; nothing
        is done by entries behind a halt (PROTOCOL 3.3).

    Raises:
        MalformedRecord: A line is no entry.
        LogTruncated: An offset or leader epoch of a partition goes back.
        LogUnreadable: An entry has no leader epoch.
    """
    number = 0
    try:
        for number, line in enumerate(lines, 1):  # noqa: B007 - errors name it
            if line.strip():
                partition, entry = object_to_entry(_read_json(line))
                world = worlds.setdefault(partition, WorldState(partition))
                yield partition, apply(world, entry)
    except UnicodeDecodeError as error:  # while the next line was read
        reason = error.reason
        raise MalformedRecord(f"line {number + 1} is not UTF-8: {reason}") from error
    except (MalformedRecord, LogTruncated, LogUnreadable) as error:
        raise type(error)(f"line {number}: {error}") from error


def _read_json(line: str) -> object:
    if len(line) > LINE_CHARACTERS_MAX:
        raise MalformedRecord(f"longer than {LINE_CHARACTERS_MAX} characters")
    try:
        value: object = msgspec.json.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedRecord(f"no JSON object: {error}"[:200]) from error
    return value


def read_lines(source: TextIO) -> Iterator[str]:
    """Yield the lines of a text, none of them endless."""
    while line := source.readline(LINE_CHARACTERS_MAX + 1):
        yield line


def run_replay(source: TextIO, out: TextIO, *, err: TextIO, transitions: bool) -> int:
    """Replay a text log and print what it comes to (PROTOCOL 3.8).

    Args:
        source: The log, a JSON object a line.
        out: Gets the world as one JSON document, at the end.
        err: Gets one line that says what is wrong with the log.
        transitions: Print what each entry did, an object a line, before the
            world; lines that were printed stay also if a later one is bad.

    Returns:
        The exit code: 0, or 3 where a partition halted (its world is printed),
        or 1 for a log that goes back or cannot be read (no world).
    """
    worlds: Worlds = {}
    try:
        for partition, told in replay_lines(read_lines(source), worlds):
            if transitions:
                for transition in told:
                    line = to_json(transition_to_object(partition, transition))
                    out.write(line + "\n")
    except (MalformedRecord, CoordinationError) as error:
        err.write(f"marshal: {escape(str(error))}\n")
        return ExitCode.FAILED
    out.write(to_json(world_to_object(worlds.values())) + "\n")
    has_halted = any(world.halted is not None for world in worlds.values())
    return ExitCode.REFUSED if has_halted else ExitCode.OK
