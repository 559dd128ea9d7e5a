"""``marshal shell``: browses a world as a tree, at a prompt or by a script."""

import sys
import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from kafka_marshal import ConfigurationError, World
from kafka_marshal.clock import instant
from kafka_marshal.errors import MarshalError
from kafka_marshal.protocol.placement import by_partition
from kafka_marshal.views.log_scan import unknown_text
from kafka_marshal_cli import parsing
from kafka_marshal_cli.commands.log_replay import read_lines
from kafka_marshal_cli.commands.log_states import (
    compared,
    difference,
    states_named,
    worlds_of,
)
from kafka_marshal_cli.exits import ExitCode, message
from kafka_marshal_cli.shared import AT, Call, command, emit, notify, wall_ms
from kafka_marshal_cli.world_shell import LINES_MAX, Session, Source
from kafka_marshal_cli.world_tree import Directory, tree_of

app = typer.Typer()
EPILOG = 'Example: marshal shell -c "cat /groups/billing/pause"'
REFRESH = "30s"


@app.command("shell", epilog=EPILOG)
@command(answers=False, option_groups=AT)
def shell(
    call: Call,
    *,
    at: parsing.Moment | None,
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="Output of `log snapshot` or `log dump`."),
    ] = None,
    lines: Annotated[
        list[str] | None,
        typer.Option(
            "-c",
            "--command",
            metavar="LINE",
            help="Run this line, then end. Repeatable.",
        ),
    ] = None,
    refresh: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="At a prompt, read the log again after this.",
        ),
    ] = REFRESH,
) -> None:
    """Browse the state of the log, or of a snapshot, as a tree of files.

    At a prompt, or with commands from -c or standard input: ls, cat, cd, find, tree,
    diff and more; `help` lists them. Writes nothing.

    /groups/GROUP has the keys by topic and partition, the members, the pause and the
    verdict of a set position; /partitions/T the state of a coordinating partition.

    A script sees one state, until it runs `refresh`. It ends with 1 if a command failed
    or `diff` found differences.
    """
    refresh_ms = parsing.duration_ms("--refresh", refresh)
    if file is not None and at is not None:
        raise ConfigurationError(
            "--at is a moment of the log, and FILE has its own; leave one of them out",
            setting="--at",
        )
    worlds = _Worlds(call, file, at)
    source = Source(worlds.read, worlds.differences)
    is_prompt = lines is None and _is_terminal()
    session = Session(
        source,
        emit=emit,
        notify=notify,
        lines_max=LINES_MAX if is_prompt else None,
    )
    if is_prompt:
        _prompt(session, worlds, refresh_ms=refresh_ms)
        return
    for line in _script() if lines is None else lines:
        session.run(line)
        sys.stdout.flush()
        if session.is_over:
            break
    if session.is_failed:
        raise typer.Exit(ExitCode.FAILED)


class _Worlds:
    """Reads the state of a session, from the log or a file, and states to compare."""

    def __init__(self, call: Call, file: str | None, at: parsing.Moment | None) -> None:
        self._call = call
        self._file = file
        self._at = at
        self._world: World | None = None
        self._read_s = 0.0

    def read(self) -> Directory:
        """Read the state of the session again; return its tree."""
        self._read_s = time.monotonic()
        if self._file is None:
            world = self._call.world(self._at, has_members=True)
            topic = self._call.coordination_topic
        else:
            states = [state for _, state in sorted(worlds_of(self._file).items())]
            world, topic = World(states, {}, read_at_ms=wall_ms()), self._file
        if world.log_start_missing:
            notify(f"marshal: {unknown_text(world.log_start_missing)}")
        self._world = world
        return tree_of(world, topic=topic)

    def refresh(self, session: Session, *, refresh_ms: int) -> None:
        """Read the log again if the last reading is old; failures are only reported."""
        age_s = time.monotonic() - self._read_s
        is_fixed = self._file is not None or self._at is not None
        if self._world is None or is_fixed or age_s * 1000 < refresh_ms:
            return
        before = self._world.read_at_ms
        try:
            session.refresh()
        except MarshalError as error:
            notify(f"this is the state of {instant(before)}: {message(error)}")

    def differences(self, other: str) -> Iterable[Mapping[str, Any]]:
        """Return how the state of the session differs from another one."""
        assert self._world is not None
        if other == "-":
            raise ConfigurationError(
                "standard input has commands here, and no state; name a file",
                setting="OTHER",
            )
        states = by_partition(self._world.partitions)
        ours = states, self._at is None or self._at.offsets is None
        theirs = states_named(self._call, other, setting="OTHER")
        return difference(*compared(ours, theirs))


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _script() -> Iterable[str]:
    try:
        yield from read_lines(sys.stdin)
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"standard input is not UTF-8: {error.reason}; write commands, one a line",
            setting="stdin",
        ) from error


def _prompt(session: Session, worlds: _Worlds, *, refresh_ms: int) -> None:
    """Read commands from a terminal until ``exit`` or the end of input."""
    _enable_editing(session)
    while not session.is_over:
        try:
            line = input(f"marshal:/{'/'.join(session.cwd)}> ")
            worlds.refresh(session, refresh_ms=refresh_ms)
            session.run(line)
        except EOFError:
            emit("")
            return
        except KeyboardInterrupt:  # ends the command, not the session
            emit("")
        sys.stdout.flush()


def _enable_editing(session: Session) -> None:
    """Edit lines, recall earlier ones and complete names, if Python has readline."""
    try:
        import readline
    except ImportError:  # some builds of Python lack it
        return
    found: list[str] = []

    def complete(word: str, number: int) -> str | None:
        if not number:
            before = readline.get_line_buffer()[: readline.get_begidx()]
            found[:] = session.candidates(before, word)
        return found[number] if number < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n")
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
