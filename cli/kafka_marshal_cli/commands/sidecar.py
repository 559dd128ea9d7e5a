"""``marshal sidecar``: the daemon that holds claims for the processes of a host."""

import http.client
import json
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from kafka_marshal import ConfigurationError, CoordinationError, unix_sockets
from kafka_marshal.clock import duration
from kafka_marshal.config import Membership
from kafka_marshal_cli import parsing
from kafka_marshal_cli.claiming_options import MEMBER, LogFormat, state_dir_of
from kafka_marshal_cli.exits import ExitCode
from kafka_marshal_cli.profile_options import Config, ProfileName, SelectedProfile
from kafka_marshal_cli.profiles import user_path
from kafka_marshal_cli.render import NOTHING, Answer, Column, Section, column
from kafka_marshal_cli.shared import (
    Call,
    OpenTimeout,
    OptionGroup,
    command,
    emit,
    wall_ms,
)

app = typer.Typer(no_args_is_help=True)
ANSWER_BYTES_MAX = 64 * 1024 * 1024
_option: Any = partial(typer.Option, rich_help_panel="Sidecar")

Socket = Annotated[
    Path | None,
    _option(
        metavar="PATH",
        envvar="MARSHAL_SIDECAR_SOCKET",
        help="Unix socket of the sidecar; by default kafka-marshal/sidecar.sock in "
        "$XDG_RUNTIME_DIR or /run.",
    ),
]


class Check(StrEnum):
    """The checks of ``status --check``."""

    LIVE = "live"
    READY = "ready"
    STARTED = "started"


PROBES = {Check.LIVE: "livez", Check.READY: "readyz", Check.STARTED: "startupz"}


@attrs.frozen(kw_only=True)
class DaemonOptions:
    """Settings of the daemon, which ``config show`` shows as well."""

    socket: Socket = None
    socket_group: Annotated[
        str | None,
        _option(
            metavar="GROUP",
            envvar="MARSHAL_SIDECAR_SOCKET_GROUP",
            help="System group whose members may also use the socket.",
        ),
    ] = None
    tcp: Annotated[
        str | None,
        _option(
            metavar="HOST:PORT",
            envvar="MARSHAL_SIDECAR_TCP",
            help="Loopback address to serve in addition; needs --token-file.",
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        _option(
            metavar="FILE",
            envvar="MARSHAL_SIDECAR_TOKEN_FILE",
            help="Token of clients over TCP; created if the file does not exist.",
        ),
    ] = None
    drain_timeout: Annotated[
        str,
        _option(
            metavar="MS",
            envvar="MARSHAL_SIDECAR_DRAIN_TIMEOUT",
            help="How long a controlled shutdown waits for clients to release claims.",
        ),
    ] = "20s"
    handoff_timeout: Annotated[
        str,
        _option(
            metavar="MS",
            envvar="MARSHAL_SIDECAR_HANDOFF_TIMEOUT",
            help="How long of --drain-timeout clients continue, while partitions are "
            "handed off to other hosts; 0 recalls partitions at once.",
        ),
    ] = "10s"
    checkpoint_interval: Annotated[
        str,
        _option(
            metavar="MS",
            envvar="MARSHAL_SIDECAR_CHECKPOINT_INTERVAL",
            help="How often to write a checkpoint if no other member does; 0: never.",
        ),
    ] = "5m"
    log_format: Annotated[
        LogFormat,
        _option(envvar="MARSHAL_SIDECAR_LOG_FORMAT", help="Lines for people, or JSON."),
    ] = LogFormat.TEXT
    allow_admin: Annotated[
        bool,
        _option(
            "--allow-admin",
            envvar="MARSHAL_SIDECAR_ALLOW_ADMIN",
            help="Let clients pause, resume and reset groups, and read their "
            "history, with the sidecar's rights.",
        ),
    ] = False


DAEMON = OptionGroup.of(DaemonOptions)


# Options of commands that query a sidecar: its socket may be set in a profile.
_SOCKET_OPTIONS = OptionGroup(
    {
        "config": (Config, None),
        "profile": (ProfileName, None),
        "socket": (Socket, None),
    },
    lambda given: _socket_path(given["socket"]),
)


@app.command("run", epilog="Example: marshal sidecar run --config marshal.toml")
@command(
    waits=False,
    answers=False,
    option_groups={"daemon": DAEMON, "member": MEMBER},
)
def run(
    call: Call,
    *,
    context: typer.Context,
    daemon: DaemonOptions,
    member: Membership,
    client_id: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            envvar="MARSHAL_CLIENT_ID",
            help="Name in the log; by default the host's name.",
        ),
    ] = None,
    state_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            envvar="MARSHAL_STATE_DIR",
            help="Directory of identity and lease journal, which a restart resumes.",
        ),
    ] = None,
    open_timeout: OpenTimeout = "30s",
) -> None:
    """Run the sidecar in the foreground, until SIGTERM or SIGINT.

    The signal begins a controlled shutdown; the same signal again ends the sidecar at
    once. The log goes to stderr. Needs the extra `sidecar`; see docs/SIDECAR.md.
    """
    from kafka_marshal.sidecar.config import ConnectionConfig, Settings

    given: dict[str, Any] = {
        "client_id": client_id,
        "socket": daemon.socket and user_path("--socket", daemon.socket).absolute(),
        "token_file": daemon.token_file
        and user_path("--token-file", daemon.token_file),
    }
    try:
        settings = Settings(
            connection=ConnectionConfig(
                call.bootstrap_servers,
                coordination_topic=call.coordination_topic,
                options=call.options,
                transport=call.transport,
            ),
            state_dir=state_dir_of(state_dir),
            socket_group=daemon.socket_group,
            tcp=daemon.tcp,
            open_ms=parsing.timeout_ms("--open-timeout", open_timeout),
            drain_ms=parsing.duration_ms("--drain-timeout", daemon.drain_timeout),
            handoff_ms=parsing.duration_ms("--handoff-timeout", daemon.handoff_timeout),
            checkpoint_interval_ms=parsing.duration_ms(
                "--checkpoint-interval", daemon.checkpoint_interval
            ),
            log_format=daemon.log_format.value,
            allow_admin=daemon.allow_admin,
            member=member,
            **{name: value for name, value in given.items() if value is not None},
        )
        _serve(settings)
    except ConfigurationError as error:
        raise _with_origin(error, context) from error


def _serve(settings: Any) -> None:  # noqa: ANN401 - of a lazy import
    from kafka_marshal.sidecar.logs import start_logging
    from kafka_marshal.sidecar.server import require_extra
    from kafka_marshal.sidecar.server import run as serve

    settings.check()
    require_extra()
    observer, stop_logging = start_logging(settings.log_format)
    try:
        serve(settings, observer)
    finally:
        stop_logging()


def _with_origin(error: ConfigurationError, context: typer.Context) -> BaseException:
    """Return the error with the origin of the invalid setting added."""
    name = error.setting.removeprefix("--").replace("-", "_")
    if name not in {param.name for param in context.command.params}:
        return error
    chosen: SelectedProfile = context.params["profile"]
    origin = chosen.origin(name)
    if origin == "default":
        return error
    return ConfigurationError(f"{error} ({name} by {origin})", setting=error.setting)


# --- queries


_ERROR = "error"  # a field of every answer that is an error


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, *, timeout_s: float) -> None:
        super().__init__("sidecar", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = unix_sockets.connect(str(self._path), self._timeout_s)


def query(
    path: Path, place: str, *, timeout_ms: int, fields: frozenset[str]
) -> tuple[int, dict[str, Any]]:
    """Send a GET request to a sidecar; return the status and the document.

    Args:
        path: The sidecar's socket.
        place: Path of the request.
        timeout_ms: Deadline.
        fields: Every answer of a sidecar has one of these.

    Raises:
        CoordinationError: No sidecar answers.
    """
    connection = _Connection(path, timeout_s=timeout_ms / 1000)
    try:
        connection.request("GET", place)
        response = connection.getresponse()
        return response.status, _answer(response, fields)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CoordinationError(
            f"no sidecar answers on {str(path)!r}: {error}; start one with: "
            "marshal sidecar run, or name its socket with --socket"
        ) from error
    finally:
        connection.close()


def _answer(
    response: http.client.HTTPResponse, fields: frozenset[str]
) -> dict[str, Any]:
    found = json.loads(response.read(ANSWER_BYTES_MAX))
    if not (isinstance(found, dict) and found.keys() & fields):
        raise ValueError(f"another program answers, with status {response.status}")
    return found


def _socket_path(given: Path | None) -> Path:
    from kafka_marshal.sidecar.probe import default_socket

    return Path(default_socket()) if given is None else user_path("--socket", given)


VERDICTS = (
    column("CHECK", "check"),
    Column("PASSED", lambda row: "yes" if row["ok"] else "no"),
    Column("REASONS", lambda row: "; ".join(row["reasons"])),
)
CLIENTS = (
    column("GROUP", "group_id"),
    column("CLIENT", "client_id"),
    column("STATE", "state"),
    column("PROCESS", "pid"),
    column("LAST HEARTBEAT", "beat_age_ms", as_text=duration),
    Column("SUBSCRIPTIONS", lambda row: ", ".join(row["subscriptions"]) or NOTHING),
    Column("PARTITIONS", lambda row: ", ".join(row["assigned"]) or NOTHING),
    Column("WARMS UP", lambda row: ", ".join(row["warming"]) or NOTHING),
)


@app.command("status", epilog="Example: marshal sidecar status --check ready")
@command(connects=False, option_groups={"path": _SOCKET_OPTIONS})
def status(
    call: Call,
    *,
    path: Path,
    check: Annotated[
        Check | None,
        typer.Option(help="Exit with 3 unless the check passes: for probes."),
    ] = None,
) -> None:
    """Show the state of the sidecar of this host."""
    rows = []
    for name, place in PROBES.items():
        _, verdict = query(
            path,
            f"/{place}",
            timeout_ms=call.timeout_ms,
            fields=frozenset({"state"}),
        )
        rows.append({"check": name.value, **verdict})
    answered, info = query(
        path,
        "/v1/info",
        timeout_ms=call.timeout_ms,
        fields=frozenset({"client_id", _ERROR}),
    )
    facts: dict[str, Any] = {"socket": str(path), "state": rows[0]["state"]}
    if answered == http.client.OK:
        names = ("client_id", "incarnation", "version", "coordination_topic")
        facts |= {name: info[name] for name in names}
        facts["bootstrap_servers"] = ",".join(info["bootstrap_servers"])
        facts["heartbeat_interval_ms"] = info["heartbeat_interval_ms"]
    as_of = {"time_ms": wall_ms(), "offsets": {}}
    call.answer(Answer(as_of, facts, (Section("checks", rows, VERDICTS),)))
    if check is not None and not all(
        row["ok"] for row in rows if row["check"] == check.value
    ):
        raise typer.Exit(ExitCode.REFUSED)


@app.command("clients", epilog="Example: marshal sidecar clients")
@command(connects=False, option_groups={"path": _SOCKET_OPTIONS})
def clients(call: Call, *, path: Path) -> None:
    """List the clients of the sidecar of this host and their partitions."""
    answered, found = query(
        path,
        "/v1/clients",
        timeout_ms=call.timeout_ms,
        fields=frozenset({"clients", _ERROR}),
    )
    if answered != http.client.OK:
        raise CoordinationError(f"{found['message']}; see: marshal sidecar status")
    rows = [
        # The same names and order of columns as in other commands.
        {"group_id": row.pop("group"), "client_id": row.pop("client"), **row}
        for row in found["clients"]
    ]
    section = Section("clients", rows, CLIENTS)
    call.answer(Answer(found["as_of"], {}, (section,)))


@app.command("openapi", epilog="Example: marshal sidecar openapi > sidecar.json")
@command(connects=False, waits=False, answers=False)
def openapi(call: Call) -> None:
    """Print the sidecar's API, as OpenAPI 3.1 in JSON."""
    from kafka_marshal.sidecar.routes import openapi_text

    del call
    emit(openapi_text().decode())
