"""What all commands share: options, how they answer, and how they fail.

``command`` adds the shared options to a function and hands it a ``Call`` as
its first argument, so each option has one name, one help text and one meaning.
"""

import inspect
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TextIO

import attrs
import typer

from kafka_marshal import Admin, ConfigurationError, World, WorldWatch
from kafka_marshal.ports import LogRange
from kafka_marshal.views import LogScan
from kafka_marshal_cli import facts, names, parsing, profiles, render
from kafka_marshal_cli.chosen import Chosen, Config, ProfileName
from kafka_marshal_cli.exits import ExitCode, exit_code, message

TIMEOUT_MS_DEFAULT = 30_000
CONNECTION_PANEL = "Connection"


class Output(StrEnum):
    """How answers are written."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


BootstrapServer = Annotated[
    str,
    typer.Option(
        "-b",
        "--bootstrap-server",
        envvar="MARSHAL_BOOTSTRAP_SERVER",
        metavar="HOST:PORT,...",
        help="Brokers to start from; one live address is enough.",
        rich_help_panel=CONNECTION_PANEL,
    ),
]
CoordinationTopic = Annotated[
    str,
    typer.Option(
        "--coordination-topic",
        envvar="MARSHAL_COORDINATION_TOPIC",
        metavar="TOPIC",
        help="The topic that the claims stand in.",
        rich_help_panel=CONNECTION_PANEL,
    ),
]
CommandProperty = Annotated[
    list[str] | None,
    typer.Option(
        "-C",
        "--command-property",
        metavar="NAME=VALUE",
        help="A security or connection option, by kafka-python's name or "
        "librdkafka's dotted one. Repeatable; wins over the file.",
        rich_help_panel=CONNECTION_PANEL,
    ),
]
CommandConfig = Annotated[
    Path | None,
    typer.Option(
        "--command-config",
        envvar="MARSHAL_COMMAND_CONFIG",
        metavar="FILE",
        help="Properties file with such options.",
        rich_help_panel=CONNECTION_PANEL,
    ),
]
Transport = Annotated[
    str,
    typer.Option(
        "--transport",
        envvar="MARSHAL_TRANSPORT",
        metavar="auto|fast|kafka-python",
        help="Client library of the logs; auto takes the fast one where it can.",
        rich_help_panel=CONNECTION_PANEL,
    ),
]
Timeout = Annotated[
    str | None,
    typer.Option(
        "--timeout",
        envvar="MARSHAL_TIMEOUT",
        metavar="MS",
        help="When to give up, in ms or like 10s. By default 30 s.",
        rich_help_panel=CONNECTION_PANEL,
    ),
]
OutputOption = Annotated[
    Output,
    typer.Option(
        "-o",
        "--output",
        envvar="MARSHAL_OUTPUT",
        help="A table for people, one JSON document, or JSON lines.",
    ),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", hidden=True, help="Show tracebacks and Kafka's log."),
]


@attrs.frozen
class Call:
    """One call of a command: its shared options, and where it answers.

    Attributes:
        bootstrap_servers: Addresses of the cluster.
        coordination_topic: Name of the coordination topic.
        options: Security and connection options.
        timeout_ms: When to give up.
        is_timeout_given: Whether that was asked for.
        output: How to answer.
        is_debug: Whether tracebacks are shown.
        transport: Which client library reads and writes the logs.
        is_server_given: Whether addresses were asked for, wherever that stands.
        is_topic_given: Whether the coordination topic was.
    """

    bootstrap_servers: str = "localhost:9092"
    coordination_topic: str = "__marshal"
    options: Mapping[str, str] = attrs.field(factory=dict)
    timeout_ms: int = TIMEOUT_MS_DEFAULT
    is_timeout_given: bool = False
    output: Output = Output.TABLE
    is_debug: bool = False
    transport: str = "auto"
    is_server_given: bool = False
    is_topic_given: bool = False

    def world(
        self, *, offset: Mapping[int, int] | None = None, time_ms: int | None = None
    ) -> World:
        """Read the log and return the world, whatever it holds."""
        world = World.at(
            self.bootstrap_servers,
            offset=offset,
            time_ms=time_ms,
            coordination_topic=self.coordination_topic,
            options=self.options,
            transport=self.transport,
            timeout_ms=self.timeout_ms,
        )
        if offset is None and time_ms is None:
            names.keep(world, self.bootstrap_servers, topic=self.coordination_topic)
        return world

    def formatted_world(self) -> World:
        """Read the log and return the world of a topic that is in order."""
        world = self.world()
        world.config()
        return world

    def scan(self) -> LogScan:
        """Open the log for reading it once to its end."""
        return LogScan(
            self.bootstrap_servers,
            coordination_topic=self.coordination_topic,
            options=self.options,
            transport=self.transport,
            timeout_ms=self.timeout_ms,
        )

    def watch(
        self, *, timeout_ms: int, first: Callable[[LogRange], int] | None = None
    ) -> WorldWatch:
        """Open the log for following it."""
        return WorldWatch.open(
            self.bootstrap_servers,
            coordination_topic=self.coordination_topic,
            options=self.options,
            transport=self.transport,
            first=first,
            timeout_ms=timeout_ms,
        )

    def admin(self) -> Admin:
        """Return an admin of the cluster."""
        return Admin(
            self.bootstrap_servers,
            coordination_topic=self.coordination_topic,
            options=self.options,
            transport=self.transport,
            timeout_ms=self.timeout_ms,
        )

    def with_lag(self, claims: Iterable[facts.Row]) -> list[facts.Row]:
        """Return claims with their lag; the cluster is asked where their logs end."""
        rows = list(claims)
        wanted = facts.data_partitions(rows)
        ends = {}
        if wanted:
            with self.admin() as admin:
                ends = admin.log_ends(wanted)
        return facts.with_lag(rows, ends)

    def answer(self, answer: render.Answer) -> None:
        """Write an answer to stdout in the form that was asked for."""
        match self.output:
            case Output.JSON:
                data(render.to_json(render.document(answer), is_pretty=True))
            case Output.JSONL:
                for line in render.lines(answer):
                    data(render.to_json(line))
            case Output.TABLE:
                width, is_color = terminal(sys.stdout)
                data(render.people(answer, width=width, is_color=is_color))


def wall_ms() -> int:
    """Return wall time in epoch milliseconds, for people."""
    return time.time_ns() // 1_000_000


def data(line: str) -> None:
    """Write a line of data to stdout."""
    sys.stdout.write(line + "\n")


def tell(text: str) -> None:
    """Tell people something, on stderr; escaped here."""
    with suppress(BrokenPipeError):
        sys.stderr.write(render.escape_lines(text) + "\n")
        sys.stderr.flush()


def terminal(stream: TextIO) -> tuple[int | None, bool]:
    """Return the width of a terminal and whether it shows colour."""
    if not stream.isatty():
        return None, False
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() else 0
    if not width:
        with suppress(OSError):
            width = os.get_terminal_size(stream.fileno()).columns
    is_dumb = os.environ.get("TERM", "") in {"", "dumb"}
    return width or 80, not (os.environ.get("NO_COLOR") or is_dumb)


_CONNECTION = {
    "config": (Config, None),
    "profile": (ProfileName, None),
    "bootstrap_server": (BootstrapServer, "localhost:9092"),
    "coordination_topic": (CoordinationTopic, "__marshal"),
    "command_property": (CommandProperty, None),
    "command_config": (CommandConfig, None),
    "transport": (Transport, "auto"),
}
_TIMEOUT = {"timeout": (Timeout, None)}
_OUTPUT = {"output": (OutputOption, Output.TABLE)}
_DEBUG = {"debug": (Debug, False)}

Body = Callable[..., None]


@attrs.frozen
class Gathered:
    """Options that reach the body of a command as one argument.

    Attributes:
        options: Name to annotation and default.
        build: Returns the argument for what was given.
    """

    options: Mapping[str, tuple[Any, Any]]
    build: Callable[[Mapping[str, Any]], Any]


def command(
    *,
    connects: bool = True,
    waits: bool = True,
    answers: bool = True,
    gathers: Mapping[str, Gathered] | None = None,
) -> Callable[[Body], Body]:
    """Return a decorator that makes a function a command with shared options.

    Args:
        connects: It takes the options of a connection.
        waits: It takes ``--timeout``.
        answers: It takes ``--output``.
        gathers: Arguments of the function that stand for several options each.
    """
    groups = gathers or {}
    shared: dict[str, tuple[Any, Any]] = {
        **(_CONNECTION if connects else {}),
        **(_TIMEOUT if waits else {}),
        **(_OUTPUT if answers else {}),
        **_DEBUG,
    }

    def decorate(function: Body) -> Body:
        own = list(inspect.signature(function).parameters.values())[1:]
        for parameter in own:
            names.complete(parameter.name, parameter.annotation)

        @wraps(function)
        def run(**values: Any) -> None:  # noqa: ANN401 - whatever the options hold
            given = {name: values.pop(name) for name in shared}
            grouped = {
                name: {option: values.pop(option) for option in group.options}
                for name, group in groups.items()
            }

            def body() -> None:
                built = {n: groups[n].build(given) for n, given in grouped.items()}
                function(call_of(given), **values, **built)

            guard(body, is_debug=bool(given["debug"]))

        added = dict(shared)
        for group in groups.values():
            added |= group.options
        parameters = [
            *(
                p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
                for p in own
                if p.name not in groups
            ),
            *(
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    annotation=annotation,
                    default=default,
                )
                for name, (annotation, default) in added.items()
            ),
        ]
        # typer reads both; what stands here is what the command line takes.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def call_of(given: Mapping[str, Any]) -> Call:
    """Return the call that shared options describe.

    Raises:
        ConfigurationError: An option cannot be understood.
    """
    chosen: Chosen | None = given.get("profile")
    if chosen is not None and chosen.profile.warning is not None:
        tell(f"warning: {chosen.profile.warning}")
    options = {n: value.resolved(n) for n, value in options_of(given).items()}
    servers = given.get("bootstrap_server", "localhost:9092")
    named = options.pop("bootstrap.servers", None)
    if named is not None and servers == "localhost:9092":
        servers = named
    timeout = given.get("timeout")
    timeout_ms = TIMEOUT_MS_DEFAULT
    if timeout is not None:
        timeout_ms = parsing.duration_ms("--timeout", timeout)
        if timeout_ms < 1:
            raise ConfigurationError("--timeout must be at least 1 ms")
    return Call(
        bootstrap_servers=servers,
        coordination_topic=given.get("coordination_topic", "__marshal"),
        options=options,
        timeout_ms=timeout_ms,
        # One that stands in a profile is no word on how long to wait for others.
        is_timeout_given=timeout is not None
        and (chosen is None or chosen.is_given("timeout")),
        output=given.get("output", Output.TABLE),
        is_debug=bool(given.get("debug")),
        transport=given.get("transport", "auto"),
        is_server_given=named is not None or _is_set(chosen, "bootstrap_server"),
        is_topic_given=_is_set(chosen, "coordination_topic"),
    )


def _is_set(chosen: Chosen | None, name: str) -> bool:
    """Return whether an option has another value than what is built in."""
    return chosen is not None and chosen.origin(name) != "default"


def options_of(given: Mapping[str, Any]) -> dict[str, profiles.Value]:
    """Return security and connection options with where each came from.

    The command line wins over the properties file, and that over the profile.

    Raises:
        ConfigurationError: One of them cannot be understood.
    """
    options: dict[str, profiles.Value] = {}
    chosen: Chosen | None = given.get("profile")
    if chosen is not None:
        options |= chosen.profile.options
    config = given.get("command_config")
    if config is not None:
        origin = f"--command-config {config}"
        found = parsing.properties(config)
        options |= {name: profiles.Value(text, origin) for name, text in found.items()}
    line = parsing.pairs("-C/--command-property", given.get("command_property") or ())
    return options | {
        name: profiles.Value(text, "option --command-property")
        for name, text in line.items()
    }


def guard(body: Callable[[], None], *, is_debug: bool = False) -> None:
    """Run a command; turn whatever it raises into words and an exit code.

    Raises:
        Exit: With the code, where that is not 0.
    """
    if is_debug:
        _show_logs()
    try:
        body()
        sys.stdout.flush()
    except (typer.Exit, typer.Abort):
        raise
    except BrokenPipeError:
        # Who reads us has enough, as in `marshal log dump | head`.
        let_go_of_stdout()
        raise typer.Exit(ExitCode.OK) from None
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except Exception as error:  # noqa: BLE001 - told by its exit code
        if is_debug:
            traceback.print_exc(file=sys.stderr)
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        tell(f"marshal: {message(error)}")
        raise typer.Exit(exit_code(error)) from None


def let_go_of_stdout() -> None:
    """Send to nowhere what a closed pipe did not take, also at exit."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _show_logs() -> None:
    """Undo what ``main`` did to keep libraries' logs off people's screens."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    for name in ("kafka", "kafka_marshal"):
        logging.getLogger(name).propagate = True
