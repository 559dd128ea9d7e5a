"""``marshal consume``: a console consumer, one JSON object for each record."""

import logging
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from types import FrameType
from typing import Annotated, Any

import attrs
import typer

from kafka_marshal import (
    ClaimLost,
    Consumer,
    Delivery,
    Event,
    Marshal,
    MarshalError,
    Observer,
    Token,
    TopicPartition,
)
from kafka_marshal.config import (
    LEAST,
    MAX_POLL_RECORDS,
    Callbacks,
    ConsumerConfig,
    Membership,
    OffsetReset,
)
from kafka_marshal.metrics import MarshalCollector
from kafka_marshal.observability.logs import flat, level_of, to_line
from kafka_marshal.observability.metrics import Server, prometheus
from kafka_marshal.ports import READ_COMMITTED, READ_UNCOMMITTED
from kafka_marshal.protocol.claiming import Ending
from kafka_marshal.protocol.granting import DEPTH_MAX_DEFAULT
from kafka_marshal.protocol.text import abbreviated
from kafka_marshal_cli import parsing
from kafka_marshal_cli.claiming_options import (
    MEMBER,
    SIDECAR,
    LogFormat,
    SidecarOption,
    state_dir_of,
)
from kafka_marshal_cli.exec_pipe import (
    EXEC,
    ExecFailed,
    ExecLoop,
    ExecMode,
    ExecOptions,
    Hooks,
)
from kafka_marshal_cli.exits import ExitCode
from kafka_marshal_cli.follow_loop import Idle, handling
from kafka_marshal_cli.presenters import record_object
from kafka_marshal_cli.render import to_json
from kafka_marshal_cli.shared import (
    Call,
    OpenTimeout,
    OptionGroup,
    command,
    discard_stdout,
    emit,
    notify,
    wall_ms,
)

DRAIN_MS = 2_000
EVENTS_MAX = 1_000
LIMIT_PARTS = 100
"""With delivery at most once, a batch has at most this part of the record limit."""
app = typer.Typer()
EPILOG = (
    "Example: marshal consume payments --group billing --client-id worker-1 | jq .value"
)
HELP = """\
Consume topics in a group and print one JSON object for each record.

Fields: topic, partition, offset, token, timestamp (of the record, epoch ms),
handed_out_ms, key and value as text, or key_base64 and value_base64 if they are not
UTF-8. A record is committed after its line was flushed. On SIGTERM or SIGINT the
command finishes uncommitted records, writes positions and releases claims.

With --exec it runs a process for each record and prints nothing. The environment of the
process has MARSHAL_TOPIC, MARSHAL_PARTITION, MARSHAL_OFFSET, MARSHAL_LAST_OFFSET,
MARSHAL_COUNT, MARSHAL_KEY, MARSHAL_VALUE_IS_NULL (1 for a null value), MARSHAL_TOKEN,
MARSHAL_TIMESTAMP_MS, MARSHAL_ATTEMPT and MARSHAL_GROUP. If the claim is lost,
--exec-timeout is over, or the command is stopped, the process and all processes that it
started are ended (TERM, then KILL), and its records stay uncommitted.
"""
# Events about claims: callbacks of the consumer report these.
_REPORTED_ELSEWHERE = frozenset({"claimed", "claim_ended", "ready", "session_failed"})
HOST_DEFAULT = "127.0.0.1"
_option: Any = partial(typer.Option, rich_help_panel="Metrics and log")


class Policy(StrEnum):
    """Which partitions are claimed."""

    FAIR = "fair"
    GREEDY = "greedy"
    TOPIC = "topic"


class Isolation(StrEnum):
    """Which records of transactions are read."""

    UNCOMMITTED = READ_UNCOMMITTED
    COMMITTED = READ_COMMITTED


@attrs.frozen(kw_only=True)
class Reporting:
    """Options for metrics and events. With JSON, all events are written."""

    metrics_port: Annotated[
        int | None,
        _option(
            min=0,
            max=65_535,
            metavar="PORT",
            help="Serve /metrics for Prometheus; 0 for a free port. Needs the "
            "extra metrics.",
        ),
    ] = None
    metrics_host: Annotated[
        str,
        _option(
            metavar="ADDRESS", help="Address to serve on; 0.0.0.0 for other machines."
        ),
    ] = HOST_DEFAULT
    log_format: Annotated[
        LogFormat, _option(help="Events on stderr: text or JSON lines.")
    ] = LogFormat.TEXT
    is_verbose: Annotated[
        bool, _option("-v", "--verbose", help="Write all events, not only warnings.")
    ] = False

    def includes(self, event: Event) -> bool:
        """Return whether an event is written to stderr."""
        return (
            self.is_json or self.is_verbose or level_of(event.name) >= logging.WARNING
        )

    @property
    def is_json(self) -> bool:
        """Whether events are written as JSON, with claims won and lost among them."""
        return self.log_format is LogFormat.JSON

    def line(self, event: Event, wall_ms: int) -> str:
        """Return the line of an event that was observed at a wall time."""
        if not self.is_json:
            return f"event: {to_line(event.name, event.fields)}"
        at = datetime.fromtimestamp(wall_ms / 1000, UTC)
        head = {
            "timestamp": at.isoformat(timespec="milliseconds"),
            "level": logging.getLevelName(level_of(event.name)).lower(),
            "event": event.name,
        }
        return to_json(head | flat(event.fields))

    @contextmanager
    def exported(self, marshal: Marshal) -> Iterator[None]:
        """Serve the client's metrics during the block, if a port was given.

        Raises:
            ConfigurationError: The port or address cannot be used.
        """
        if self.metrics_port is None:
            yield
            return
        client = prometheus()
        registry = client.CollectorRegistry()
        client.ProcessCollector(registry=registry)
        client.PlatformCollector(registry=registry)
        collector = MarshalCollector(marshal, registry=registry)
        server = Server(registry, self.metrics_port, host=self.metrics_host)
        notify(f"metrics: port {server.port} of {self.metrics_host}, path /metrics")
        try:
            yield
        finally:
            server.close()
            collector.close()


def _checked(given: Reporting) -> Reporting:
    if given.metrics_port is not None:
        prometheus()  # fail on a missing extra before anything is claimed
    return given


REPORTING = OptionGroup.of(Reporting, _checked)


class EventBuffer(Observer):
    """Stores events until the main thread writes them.

    The engine's thread renews leases, so it must not wait for a blocked stderr.
    """

    def __init__(self, reporting: Reporting | None = None) -> None:
        self._reporting = reporting or Reporting()
        self._waiting: deque[tuple[Event, int]] = deque(maxlen=EVENTS_MAX)

    def observe(self, event: Event) -> None:
        """Store one event."""
        is_own = self._reporting.is_json or event.name not in _REPORTED_ELSEWHERE
        if is_own and self._reporting.includes(event):
            self._waiting.append((event, wall_ms()))

    def flush(self) -> None:
        """Write the stored events, one line each."""
        while self._waiting:
            notify(self._reporting.line(*self._waiting.popleft()))


class _Stopped(BaseException):
    """A signal came before the consumer was open; no error handler catches it."""


class Stopper:
    """Stops the loop at SIGINT, SIGTERM or SIGHUP; a repeated one kills the process.

    Attributes:
        is_stopped: Whether a signal came.
        consumer: The consumer to stop, None before it is open.
        on_kill: Called before the process kills itself.
    """

    def __init__(self) -> None:
        self.is_stopped = False
        self.consumer: Consumer | None = None
        self.on_kill: Callable[[], None] | None = None
        self._seen: set[int] = set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle signals during the block."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as by nohup
            numbers.append(signal.SIGHUP)
        with handling(numbers, self._on_signal):
            try:
                yield
            except _Stopped:
                notify("stopped before anything was consumed")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number in self._seen:
            self._die(number)
            return
        self._seen.add(number)
        self.is_stopped = True
        if self.consumer is None:
            # No records were handed out yet, so any wait may be abandoned.
            raise _Stopped
        self.consumer.stop()

    def _die(self, number: int) -> None:
        if self.on_kill is not None:
            self.on_kill()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


@attrs.define
class Summary:
    """The summary of a run, reported after everything is closed.

    Attributes:
        count: Returns how many records were consumed.
        consumer: The consumer; None before it is open.
        held: Partitions that the consumer held at the end of the work.
    """

    count: Callable[[], int] = attrs.field(default=lambda: 0)
    consumer: Consumer | None = None
    held: list[TopicPartition] = attrs.field(factory=list)

    @contextmanager
    def collected(self, events: EventBuffer) -> Iterator[None]:
        """After the block, write the last events and store the held partitions."""
        try:
            yield
        finally:
            events.flush()
            with suppress(MarshalError):
                if self.consumer is not None:
                    self.held = sorted(self.consumer.assignment())

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Write the summary after the block if a consumer was open."""
        try:
            yield
        finally:
            if self.consumer is not None:
                notify(self.text(is_confirmed=self.consumer.is_close_confirmed))

    def text(self, *, is_confirmed: bool) -> str:
        """Return the summary as a line."""
        released = f"released {abbreviated(self.held)}" if self.held else "held nothing"
        if self.held and not is_confirmed:
            released = (
                f"the log did not confirm the release of {abbreviated(self.held)}; "
                "other members take them over after two heartbeat intervals"
            )
        count = self.count()
        return f"consumed {count} record{'s' * (count != 1)}, {released}"


Topics = Annotated[
    list[str],
    typer.Argument(metavar="TOPIC", help="Data topics, or --topic for each."),
]
Group = Annotated[
    str,
    typer.Option(
        "--group", "-g", metavar="GROUP", envvar="MARSHAL_GROUP", help="The group."
    ),
]
ClientId = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        envvar="MARSHAL_CLIENT_ID",
        help="Unique name in the group, the same at every start.",
    ),
]
DeliveryOption = Annotated[
    Delivery, typer.Option(help="At least once, or at most once.")
]
PolicyOption = Annotated[
    Policy, typer.Option(help="An equal share, all free partitions, or whole topics.")
]
ClaimsMax = Annotated[
    int,
    typer.Option(
        min=LEAST["claims_max"],
        help="Maximum partitions, or topics with policy topic; 0 for no limit.",
    ),
]
MaxRecords = Annotated[
    int,
    typer.Option(
        "--max-records",
        "--max-messages",
        min=0,
        metavar="N",
        help="End after this many records; 0 for no limit. At most once, offsets "
        "granted beyond the limit are lost: per partition up to a hundredth of it, or "
        "--max-poll-records.",
    ),
]
IdleTimeout = Annotated[
    str | None,
    typer.Option(
        "--timeout",
        "--timeout-ms",
        metavar="MS",
        help="End after this time without a record.",
    ),
]
MaxPollRecords = Annotated[
    int | None,
    typer.Option(
        min=LEAST["max_poll_records"],
        metavar="N",
        help="Maximum records of a batch; at most once, a crash can lose these per "
        "partition. By default 500; 1 for --exec of single records at most once.",
    ),
]
ResetOption = Annotated[
    OffsetReset, typer.Option(help="Where to start without a position.")
]
FromBeginning = Annotated[
    bool,
    typer.Option("--from-beginning", help="As --auto-offset-reset earliest."),
]
IsolationOption = Annotated[
    Isolation,
    typer.Option(help="All records, or those of committed transactions."),
]
ExpectedInterval = Annotated[
    str | None,
    typer.Option(
        metavar="MS",
        help="Expected interval; another one in the log is an error.",
    ),
]
StateDir = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        envvar="MARSHAL_STATE_DIR",
        help="Directory of the identity, which a restart resumes.",
    ),
]


OPTION_GROUPS = {
    "execs": EXEC,
    "member": MEMBER,
    "reporting": REPORTING,
    "via": SIDECAR,
}


@app.command("consume", help=HELP, epilog=EPILOG)
@command(
    waits=False,
    answers=False,
    option_groups=OPTION_GROUPS,
)
def consume(
    call: Call,
    *,
    topics: Topics,
    group: Group,
    client_id: ClientId,
    delivery: DeliveryOption = Delivery.AT_LEAST_ONCE,
    policy: PolicyOption = Policy.FAIR,
    claims_max: ClaimsMax = 0,
    max_records: MaxRecords = 0,
    timeout: IdleTimeout = None,
    open_timeout: OpenTimeout = "30s",
    max_poll_records: MaxPollRecords = None,
    auto_offset_reset: ResetOption = OffsetReset.EARLIEST,
    from_beginning: FromBeginning = False,
    isolation_level: IsolationOption = Isolation.UNCOMMITTED,
    heartbeat_interval: ExpectedInterval = None,
    state_dir: StateDir = None,
    execs: ExecOptions | None,
    member: Membership,
    reporting: Reporting,
    via: SidecarOption,
) -> None:
    """Consume topics in a group: print records, or run processes on them."""
    open_ms = parsing.timeout_ms("--open-timeout", open_timeout)
    h_ms = _optional_ms("--heartbeat-interval", heartbeat_interval)
    is_amo = delivery is Delivery.AT_MOST_ONCE
    batch_max = _batch_max(execs, max_poll_records, is_amo=is_amo, limit=max_records)
    processes = execs and execs.of_run(
        at_most_once=is_amo, batch_max=batch_max, records_max=max_records, group=group
    )
    config = ConsumerConfig(
        topics=tuple(topics),
        delivery=delivery,
        policy=policy.value,
        claims_max=claims_max,
        auto_offset_reset="earliest" if from_beginning else auto_offset_reset.value,
        isolation_level=isolation_level.value,
        max_poll_records=batch_max,
        **_limits(max_records, processes),
    )
    stopper, events, summary = Stopper(), EventBuffer(reporting), Summary()
    idle_ms = _optional_ms("--timeout", timeout)
    with (
        stopper.installed(),
        summary.reported(),
        Marshal(
            **via.connection(call),
            group_id=group,
            client_id=client_id,
            heartbeat_interval_ms=h_ms,
            state_dir=state_dir_of(state_dir),
            observer=events,
            labels=member.labels,
            can_plan=member.can_plan,
            timeout_ms=open_ms,
        ) as marshal,
        reporting.exported(marshal),
        marshal.open_consumer(
            config, _callbacks(reporting), timeout_ms=open_ms
        ) as consumer,
    ):
        stopper.consumer = summary.consumer = consumer
        if member.restarts:
            marshal.expect_restart()
        hooks = Hooks(lambda: stopper.is_stopped, events.flush)
        printer = Printer(consumer, hooks, records_max=max_records, is_amo=is_amo)
        loop = None if processes is None else ExecLoop(consumer, processes, hooks)
        stopper.on_kill = None if loop is None else loop.kill
        _run(loop or printer, Idle(idle_ms), summary=summary, events=events)


def _run(
    work: "ExecLoop | Printer", idle: Idle, *, summary: Summary, events: EventBuffer
) -> None:
    """Process records until the loop ends; then write the positions to the log.

    Raises:
        Exit: With 1, after a process failed and --on-error is stop.
    """
    consumer = summary.consumer
    assert consumer is not None
    summary.count = lambda: work.done_count
    with summary.collected(events):
        try:
            work.run(idle)
        except ExecFailed as failed:
            notify(f"marshal: {failed}")
            raise typer.Exit(ExitCode.FAILED) from None
        consumer.flush()


def _callbacks(reporting: Reporting) -> Callbacks:
    return Callbacks(
        on_claimed=partial(_on_claimed, reporting),
        on_lost=partial(_on_lost, reporting),
    )


def _limits(records_max: int, processes: ExecOptions | None) -> dict[str, Any]:
    """Return how many batches may be granted ahead, and the limit on handling time.

    With delivery at most once, offsets that are granted beyond the limit of records, or
    before a process can handle them, would be lost. Only --exec-timeout limits
    processes: if their partition were handed to another member, the work would repeat.
    """
    is_bounded = records_max or processes is not None
    return {
        "max_granted_batches": 1 if is_bounded else DEPTH_MAX_DEFAULT,
        "max_handling_ms": None if processes is None else 0,
    }


def _batch_max(
    execs: ExecOptions | None, given: int | None, *, is_amo: bool, limit: int
) -> int:
    """Return the records of a batch: ``given``, or the default of --max-poll-records.

    With delivery at most once, a crash loses all granted records, so the default is 1
    if processes handle single records. It is small if the number of records is limited,
    because records granted beyond the limit are lost at the end.
    """
    default = MAX_POLL_RECORDS
    if is_amo and execs is not None and execs.mode is ExecMode.RECORD:
        default = 1
    elif is_amo and limit:
        default = min(MAX_POLL_RECORDS, max(1, limit // LIMIT_PARTS))
    return min(given or default, limit or sys.maxsize)


def _optional_ms(option: str, text: str | None) -> int | None:
    return None if text is None else parsing.duration_ms(option, text)


class Printer:
    """Prints records and commits each one after it was flushed.

    Args:
        consumer: The consumer; only this loop uses it.
        hooks: Functions that the loop calls.
        records_max: End after this many records; 0 for no limit.
        is_amo: Whether records are granted before they are handed out.

    Attributes:
        done_count: Records written.
    """

    def __init__(
        self, consumer: Consumer, hooks: Hooks, *, records_max: int, is_amo: bool
    ) -> None:
        self.done_count = 0
        self._consumer = consumer
        self._hooks = hooks
        self._max = records_max
        self._is_amo = is_amo

    def run(self, idle: Idle) -> None:
        """Print records until a signal, a limit, or a reader that closes the pipe."""
        try:
            while not self._hooks.is_stopped() and not self._is_done:
                if self._next(idle.wait_ms):
                    idle.touch()
                elif idle.is_over:
                    break
                self._hooks.each_round()
            if self._is_amo:
                self._drain()
        except BrokenPipeError:
            # The record that could not be written stays uncommitted. Closing the
            # consumer writes the earlier positions.
            discard_stdout()
            notify(
                "the reader of the output is gone; records that it did not read stay "
                "uncommitted"
            )

    @property
    def _is_done(self) -> bool:
        return bool(self._max) and self.done_count >= self._max

    def _drain(self) -> None:
        """Print the remaining granted records: no other client will process them."""
        self._consumer.stop()
        while not self._is_done and self._next(DRAIN_MS):
            pass

    def _next(self, timeout_ms: int) -> bool:
        """Print the next record; return whether there was one.

        Raises:
            BrokenPipeError: The record could not be written, and is not committed.
        """
        handed = self._consumer.poll(timeout_ms, 1)
        handed_out_ms = wall_ms()
        for records in handed.values():
            for record in records:
                emit(to_json(record_object(record, handed_out_ms)))
                sys.stdout.flush()
                self.done_count += 1
                try:
                    self._consumer.commit(record)
                except ClaimLost as lost:
                    notify(f"lost: {lost}")
        return bool(handed)


def _on_claimed(reporting: Reporting, partition: TopicPartition, token: Token) -> None:
    if reporting.is_verbose and not reporting.is_json:  # JSON has an event for it
        notify(f"claimed: {partition} token {token}")


def _on_lost(reporting: Reporting, partition: TopicPartition, ending: Ending) -> None:
    if reporting.is_json or not (reporting.is_verbose or ending.was_lost):
        return
    how = "lost" if ending.was_lost else "released"
    by = f" to {ending.winner}" if ending.winner else ""
    notify(f"{how}: {partition} ({ending.reason}){by}")
