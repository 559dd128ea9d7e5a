"""The shared options of all commands, their output and their errors.

``command`` adds the shared options to a function and passes it a ``Call`` as its first
argument, so each option has one name, one help text and one meaning.
"""

import inspect
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import attrs
import typer

import kafka_marshal
from kafka_marshal.defaults import COORDINATION_TOPIC, SERVERS
from kafka_marshal.errors import ClaimRejected, ConfigurationError
from kafka_marshal_cli import completion_cache, parsing, profiles, render
from kafka_marshal_cli.exits import ExitCode, exit_code, message, with_connection
from kafka_marshal_cli.parsing import Moment
from kafka_marshal_cli.profile_options import (
    Config,
    ProfileName,
    SelectedProfile,
    flags_of,
    typed_connection,
)
from kafka_marshal_cli.terminal import terminal

if TYPE_CHECKING:
    from kafka_marshal import Admin, Key, World, WorldWatch
    from kafka_marshal.ports import LogRange
    from kafka_marshal.protocol import types
    from kafka_marshal.views.log_scan import LogScan
    from kafka_marshal_cli.presenters import Row

TIMEOUT_MS_DEFAULT = 30_000
CLOCK_AHEAD_MS_MAX = 60_000
REASON_CHARS_MAX = 1_024
CONNECTION_PANEL = "Connection"


class Output(StrEnum):
    """Format of answers."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


Group = Annotated[str, typer.Argument(metavar="GROUP", help="The group.")]
TopicPartition = Annotated[
    str, typer.Argument(metavar="TOPIC[:PARTITION]", help="The data topic.")
]
Partition = Annotated[
    int | None,
    typer.Argument(metavar="[PARTITION]", min=0, help="The data partition."),
]
"""Users write TOPIC PARTITION or TOPIC:PARTITION; see ``parsing.key_of``."""
OfGroup = Annotated[
    str | None,
    typer.Option("--group", "-g", metavar="GROUP", help="Only this group."),
]
OfTopic = Annotated[
    str | None, typer.Option(metavar="TOPIC", help="Only this data topic.")
]
OpenTimeout = Annotated[
    str,
    typer.Option(
        metavar="MS", envvar="MARSHAL_TIMEOUT", help="When to give up connecting."
    ),
]
"""For commands that run until they are stopped: they lack the shared ``--timeout``."""
Execute = Annotated[
    bool, typer.Option("--execute", help="Make the change; else it is only shown.")
]
"""A command with this also gets ``--dry-run``; both together are refused."""
WriteNothing = Annotated[bool, typer.Option("--dry-run", help="Only show the change.")]
"""Declared by commands that make their change without ``--execute``."""


def _short_enough(reason: str | None) -> str | None:
    count = len(reason or "")
    if count > REASON_CHARS_MAX:
        raise typer.BadParameter(
            f"the reason has {count} characters, more than {REASON_CHARS_MAX}"
        )
    return reason


Reason = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT", help="Stored in the log, for people.", callback=_short_enough
    ),
]
"""For commands with which admins write records."""
BootstrapServer = Annotated[
    str,
    typer.Option(
        "-b",
        "--bootstrap-server",
        envvar="MARSHAL_BOOTSTRAP_SERVER",
        metavar="HOST:PORT,...",
        help="Brokers; one live address is enough.",
        rich_help_panel=CONNECTION_PANEL,
    ),
]
CoordinationTopic = Annotated[
    str,
    typer.Option(
        envvar="MARSHAL_COORDINATION_TOPIC",
        metavar="TOPIC",
        help="Name of the coordination topic.",
        rich_help_panel=CONNECTION_PANEL,
    ),
]
CommandProperty = Annotated[
    list[str] | None,
    typer.Option(
        "-C",
        "--command-property",
        metavar="NAME=VALUE",
        help="A connection option of kafka-python, librdkafka or Java. Repeatable; "
        "overrides --command-config.",
        rich_help_panel=CONNECTION_PANEL,
    ),
]
CommandConfig = Annotated[
    Path | None,
    typer.Option(
        envvar="MARSHAL_COMMAND_CONFIG",
        metavar="FILE",
        help="Properties file with connection options.",
        rich_help_panel=CONNECTION_PANEL,
    ),
]
Transport = Annotated[
    str,
    typer.Option(
        envvar="MARSHAL_TRANSPORT",
        metavar="auto|fast|kafka-python",
        help="Client library; auto: fast if usable.",
        rich_help_panel=CONNECTION_PANEL,
    ),
]
Timeout = Annotated[
    str | None,
    typer.Option(
        envvar="MARSHAL_TIMEOUT",
        metavar="MS",
        help="Longest time of the command. By default 30 s.",
        rich_help_panel=CONNECTION_PANEL,
    ),
]
As = Annotated[
    str | None,
    typer.Option(
        "--as",
        envvar="MARSHAL_AS",
        metavar="NAME",
        help="Person for whom this is done, stored in the log. By default the system's "
        "user.",
    ),
]
OutputOption = Annotated[
    Output,
    typer.Option(
        "-o",
        "--output",
        envvar="MARSHAL_OUTPUT",
        help="Table, one JSON document, or JSON lines.",
    ),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", hidden=True, help="Show tracebacks and Kafka's log."),
]


@attrs.frozen(kw_only=True)
class Call:
    """One call of a command: the values of its shared options.

    Attributes:
        bootstrap_servers: Addresses of the cluster.
        coordination_topic: Name of the coordination topic.
        options: Security and connection options.
        timeout_ms: Longest time of the command.
        is_timeout_given: Whether --timeout is on the command line.
        output: Format of the answer.
        transport: Client library to read and write logs with.
        is_server_given: Whether addresses were set anywhere; False for the default.
        is_topic_given: Whether the coordination topic was set anywhere.
        person: Person for whom the command writes; None for the user who runs it.
    """

    bootstrap_servers: str = SERVERS
    coordination_topic: str = COORDINATION_TOPIC
    options: Mapping[str, str] = attrs.field(factory=dict)
    timeout_ms: int = TIMEOUT_MS_DEFAULT
    is_timeout_given: bool = False
    output: Output = Output.TABLE
    transport: str = "auto"
    is_server_given: bool = False
    is_topic_given: bool = False
    person: str | None = None

    def world(
        self,
        at: Moment | None = None,
        *,
        key: "Key | None" = None,
        has_members: bool = False,
    ) -> "World":
        """Read the log and return the world, even if the topic has errors.

        Args:
            at: The moment of ``--at``; None for the present.
            key: In a view of the past, read only the partition of this key.
            has_members: Whether a view of the past has members, see ``World.at``.
        """
        if at is None:
            world = kafka_marshal.World.open(**self.connection())
            completion_cache.save(
                world, self.bootstrap_servers, topic=self.coordination_topic
            )
            return world
        if key is None:
            at.require_partition()
        return kafka_marshal.World.at(
            offset=at.offset if at.offsets is None else at.offsets,
            time_ms=at.time_ms,
            key=key,
            has_members=has_members,
            **self.connection(),
        )

    def formatted_world(
        self, at: Moment | None = None, *, has_members: bool = False
    ) -> "World":
        """Read the log and return the world; raise if the topic has errors.

        A view of the past is empty before the topic was formatted. It raises if the
        log does not show the state of that moment any more.
        """
        if at is None:
            world = self.world()
            world.config()
        else:
            world = self.world(at, has_members=has_members)
            world.require_known()
        return world

    def connection(self) -> dict[str, Any]:
        """Return the connection settings, as arguments of readers of the log."""
        return {
            "bootstrap_servers": self.bootstrap_servers,
            "coordination_topic": self.coordination_topic,
            "options": self.options,
            "transport": self.transport,
            "timeout_ms": self.timeout_ms,
        }

    def scan(
        self, at: Moment | None = None, *, partition: int | None = None
    ) -> "LogScan":
        """Open the log for reading it once, to its end or to a moment.

        Args:
            at: The moment; if it has offsets, ``partition`` must be among them.
            partition: Read only this coordinating partition; None for all.
        """
        from kafka_marshal.views.log_scan import LogScan

        if at is not None:
            at.require_partition()
        only = None if partition is None else (lambda _: [partition])
        scan = LogScan(**self.connection(), only=only)
        if at is not None:
            offsets = at.offsets
            if offsets is not None and partition is not None:
                offsets = {partition: offsets[partition]}
            try:
                scan.until(offset=offsets, time_ms=at.time_ms)
            except BaseException:
                scan.close()
                raise
        return scan

    def watch(
        self, *, timeout_ms: int, first: "Callable[[LogRange], int] | None" = None
    ) -> "WorldWatch":
        """Open the log for following it."""
        return kafka_marshal.WorldWatch.open(
            **{**self.connection(), "timeout_ms": timeout_ms}, first=first
        )

    def admin(self) -> "Admin":
        """Return an admin of the cluster."""
        return kafka_marshal.Admin(**self.connection(), person=self.person)

    def log_ends(
        self, partitions: "Collection[types.TopicPartition]"
    ) -> "dict[types.TopicPartition, int]":
        """Return the log ends of data partitions that can be looked up."""
        from kafka_marshal.views.log_ends import LogEnds

        with LogEnds(**self.connection()) as ends:
            return ends.of(partitions)

    def with_lag(self, claims: "Iterable[Row]") -> "list[Row]":
        """Return claims with their lag, by the log ends of the cluster."""
        from kafka_marshal_cli import presenters

        rows = list(claims)
        wanted = presenters.data_partitions(rows)
        ends = {}
        if wanted:
            ends = self.log_ends(wanted)
        return presenters.with_lag(rows, ends)

    def partition_counts(self, topics: Iterable[str]) -> dict[str, int]:
        """Return the number of partitions of each topic; omit deleted topics."""
        with self.admin() as admin:
            found = {topic: admin.partition_count(topic) for topic in sorted(topics)}
        return {topic: count for topic, count in found.items() if count is not None}

    def answer(self, answer: render.Answer) -> None:
        """Write an answer to stdout in the format of --output."""
        match self.output:
            case Output.JSON:
                for part in render.json_parts(render.document(answer)):
                    sys.stdout.write(part)
                sys.stdout.write("\n")
            case Output.JSONL:
                for line in render.lines(answer):
                    emit(render.to_json(line))
            case Output.TABLE:
                width, is_color = terminal(sys.stdout)
                emit(render.people(answer, width=width, is_color=is_color))


def wall_ms() -> int:
    """Return wall time in epoch milliseconds, for people."""
    return time.time_ns() // 1_000_000


def emit(line: str) -> None:
    """Write a line of data to stdout."""
    sys.stdout.write(line + "\n")


_TYPED: ContextVar[Sequence[tuple[str, str]]] = ContextVar("_TYPED", default=())
"""Connection options on the command line of the command that runs."""


def advice(text: str) -> str:
    """Return advice with the connection options of the command that runs."""
    return with_connection(text, _TYPED.get())


def notify(text: str) -> None:
    """Write a message for people to stderr, escaped; see ``advice``."""
    with suppress(BrokenPipeError):
        sys.stderr.write(render.escape_lines(advice(text)) + "\n")
        sys.stderr.flush()


def unknown_group(group: str, where: str = "in the log") -> ClaimRejected:
    """Return the error for a group that nobody uses: the name may be misspelt."""
    return ClaimRejected(
        f"group {group!r} is not {where}; see: marshal groups list",
        reason="unknown_group",
    )


def note_unknown_group(world: "World", group: str) -> None:
    """Notify if nobody uses the group: the name may be misspelt."""
    if not world.members(group) and not world.claims(group):
        notify(
            f"the log knows no members and no claims of group {group!r}; see: marshal "
            "groups list"
        )


def note_clock_ahead(world: "World", *, written_ms: int) -> None:
    """Notify if the clock of this machine is far ahead of the brokers' clocks.

    A pause until a time by this clock then lasts longer than requested.

    Args:
        world: Read after a record of this command was appended.
        written_ms: When the record was written by this clock, epoch ms.
    """
    from kafka_marshal.clock import duration

    ahead_ms = written_ms - max(state.append_time_ms for state in world.partitions)
    if ahead_ms > CLOCK_AHEAD_MS_MAX:
        notify(
            f"the clock of this machine is {duration(ahead_ms)} ahead of the "
            "brokers, so the pause lasts that much longer; set the clock, resume the "
            "group, and pause it again"
        )


_CONNECTION = {
    "config": (Config, None),
    "profile": (ProfileName, None),
    "bootstrap_server": (BootstrapServer, SERVERS),
    "coordination_topic": (CoordinationTopic, COORDINATION_TOPIC),
    "command_property": (CommandProperty, None),
    "command_config": (CommandConfig, None),
    "transport": (Transport, "auto"),
}
_TIMEOUT = {"timeout": (Timeout, None)}
_OUTPUT = {"output": (OutputOption, Output.TABLE)}
_AS = {"as_": (As, None)}
_DRY_RUN = {"dry_run": (WriteNothing, False)}
_DEBUG = {"debug": (Debug, False)}

Body = Callable[..., None]
F = TypeVar("F", bound=attrs.AttrsInstance)


@attrs.frozen
class OptionGroup:
    """Options that the function of a command gets as one argument.

    Attributes:
        options: Name to annotation and default.
        build: Returns the argument for the values of the options.
    """

    options: Mapping[str, tuple[Any, Any]]
    build: Callable[[Mapping[str, Any]], Any]

    @classmethod
    def of(
        cls, form: type[F], build: Callable[[F], object] = lambda form: form
    ) -> "OptionGroup":
        """Return an option for each field of an attrs class.

        Args:
            form: The class; a field has the annotation and the default of an option.
            build: Returns the argument for an object of the class; by default the
                object.
        """
        options = {each.name: (each.type, each.default) for each in attrs.fields(form)}
        return cls(options, lambda given: build(form(**given)))


def _moment_of(given: Mapping[str, Any]) -> Moment | None:
    text = given["at"]
    return None if text is None else parsing.past_moment("--at", text, now_ms=wall_ms())


AT: Mapping[str, OptionGroup] = {
    "at": OptionGroup(
        {
            "at": (
                Annotated[
                    str | None,
                    typer.Option(
                        metavar="TIME|T:OFFSET",
                        help="A past moment: an ISO time, a time ago like -5m, "
                        "or a coordinating partition's last offset, like 3:100.",
                    ),
                ],
                None,
            )
        },
        _moment_of,
    )
}
"""``--at``, for ``option_groups`` of a command; the argument is a Moment or None."""


def command(
    *,
    connects: bool = True,
    waits: bool = True,
    answers: bool = True,
    writes: bool = False,
    option_groups: Mapping[str, OptionGroup] | None = None,
) -> Callable[[Body], Body]:
    """Return a decorator that makes a function a command with shared options.

    Args:
        connects: Add the options of a connection.
        waits: Add ``--timeout``.
        answers: Add ``--output``.
        writes: Add ``--as``, for a command that writes to the log as an admin.
        option_groups: Arguments of the function, each built from several options.
    """
    groups = option_groups or {}
    always: dict[str, tuple[Any, Any]] = {
        **(_CONNECTION if connects else {}),
        **(_TIMEOUT if waits else {}),
        **(_OUTPUT if answers else {}),
        **(_AS if writes else {}),
        **_DEBUG,
    }

    def decorate(function: Body) -> Body:
        own = list(inspect.signature(function).parameters.values())[1:]
        # typer passes the context to one argument, which some commands have already.
        named = [p.name for p in own if p.annotation is typer.Context]
        context_name = named[0] if named else "context"
        shared = dict(always)
        for parameter in own:
            completion_cache.complete(parameter.name, parameter.annotation)
            shared |= _DRY_RUN if parameter.annotation is Execute else {}

        @wraps(function)
        def run(**values: Any) -> None:  # noqa: ANN401 - whatever the options hold
            given = {name: values.pop(name) for name in shared}
            context: typer.Context = values.pop(context_name)
            values |= dict.fromkeys(named, context)
            grouped = {
                name: {option: values.pop(option) for option in group.options}
                for name, group in groups.items()
            }

            def body() -> None:
                _require_one(given, values)
                built = {n: groups[n].build(given) for n, given in grouped.items()}
                function(call_of(given), **values, **built)

            run_guarded(
                body,
                context,
                is_debug=bool(given["debug"]),
                topic=given.get("coordination_topic", COORDINATION_TOPIC),
            )

        context_option = (typer.Context, inspect.Parameter.empty)
        added = shared | ({} if named else {context_name: context_option})
        for group in groups.values():
            added |= group.options
        kept = map(_by_keyword, (each for each in own if each.name not in groups))
        parameters = [*kept, *_parameters(added)]  # typer reads both forms
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _require_one(given: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    if given.get("dry_run") and values["execute"]:
        raise ConfigurationError("give either --execute or --dry-run")


def _by_keyword(parameter: inspect.Parameter) -> inspect.Parameter:
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def _parameters(options: Mapping[str, tuple[Any, Any]]) -> list[inspect.Parameter]:
    """Return parameters for options: name to annotation and default."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(name, kind, annotation=annotation, default=default)
        for name, (annotation, default) in options.items()
    ]


def call_of(given: Mapping[str, Any]) -> Call:
    """Return the call for the values of the shared options.

    Raises:
        ConfigurationError: An option is invalid.
    """
    selected: SelectedProfile | None = given.get("profile")
    if selected is not None and selected.profile.warning is not None:
        notify(f"warning: {selected.profile.warning}")
    options = {n: value.resolved(n) for n, value in options_of(given).items()}
    if options:
        options = parsing.without_java(options)
    servers = given.get("bootstrap_server", SERVERS)
    named = options.pop("bootstrap.servers", None)
    if named is not None and servers == SERVERS:
        servers = named
    timeout = given.get("timeout")
    timeout_ms = TIMEOUT_MS_DEFAULT
    if timeout is not None:
        timeout_ms = parsing.timeout_ms("--timeout", timeout)
    return Call(
        bootstrap_servers=servers,
        coordination_topic=given.get("coordination_topic", COORDINATION_TOPIC),
        options=options,
        timeout_ms=timeout_ms,
        # A timeout in a profile does not limit the wait of `groups pause --wait`.
        is_timeout_given=timeout is not None
        and (selected is None or selected.is_given("timeout")),
        output=given.get("output", Output.TABLE),
        transport=given.get("transport", "auto"),
        is_server_given=named is not None or _is_set(selected, "bootstrap_server"),
        is_topic_given=_is_set(selected, "coordination_topic"),
        person=given.get("as_"),
    )


def _is_set(selected: SelectedProfile | None, name: str) -> bool:
    """Return whether an option was set anywhere."""
    return selected is not None and selected.origin(name) != "default"


def options_of(given: Mapping[str, Any]) -> dict[str, profiles.Value]:
    """Return security and connection options, each with its origin.

    The command line overrides the properties file, which overrides the profile.

    Raises:
        ConfigurationError: One of them is invalid.
    """
    levels: list[Mapping[str, profiles.Value]] = []
    selected: SelectedProfile | None = given.get("profile")
    if selected is not None:
        levels.append(selected.profile.options)
    config = given.get("command_config")
    if config is not None:
        origin = f"--command-config {config}"
        found = parsing.properties(profiles.user_path("--command-config", config))
        levels.append({n: profiles.Value(text, origin) for n, text in found.items()})
    line = parsing.pairs("-C/--command-property", given.get("command_property") or ())
    origin = "option --command-property"
    levels.append({name: profiles.Value(text, origin) for name, text in line.items()})
    return profiles.overridden(*levels)


def run_guarded(
    body: Callable[[], None],
    context: typer.Context,
    *,
    is_debug: bool = False,
    topic: str = COORDINATION_TOPIC,
) -> None:
    """Run a command; turn an error into a message and an exit code.

    Args:
        body: The command.
        context: Its context, for messages.
        is_debug: Whether to show tracebacks and the logs of libraries.
        topic: The coordination topic, for the message.

    Raises:
        Exit: With the code, if it is not 0.
    """
    if is_debug:
        _show_logs()
    typed = _TYPED.set(typed_connection(context))
    try:
        body()
        sys.stdout.flush()
    except (typer.Exit, typer.Abort):
        # Otherwise the flush at exit would fail and replace the exit code.
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            discard_stdout()
        raise
    except BrokenPipeError:
        # The reader has closed the pipe, as in `marshal log dump | head`.
        discard_stdout()
        raise typer.Exit(ExitCode.OK) from None
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except Exception as error:  # noqa: BLE001 - reported by its exit code
        if is_debug:
            import traceback

            traceback.print_exc(file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:
            discard_stdout()
        text = message(
            error, topic=topic, command=context.command_path, flags=flags_of(context)
        )
        notify(f"marshal: {text}")
        raise typer.Exit(exit_code(error)) from None
    finally:
        _TYPED.reset(typed)


def discard_stdout() -> None:
    """Redirect stdout to the null device, so that the flush at exit cannot fail."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _show_logs() -> None:
    """Show the logs of libraries, which ``main`` hides."""
    import logging

    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    for name in ("kafka", "kafka_marshal"):
        logging.getLogger(name).propagate = True
