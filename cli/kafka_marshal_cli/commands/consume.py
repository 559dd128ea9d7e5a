"""``marshal consume``: a console consumer, one JSON object a record."""

import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated

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
from kafka_marshal.ports import READ_COMMITTED, READ_UNCOMMITTED
from kafka_marshal.protocol.claiming import Ending
from kafka_marshal.protocol.granting import DEPTH_MAX_DEFAULT
from kafka_marshal_cli import parsing
from kafka_marshal_cli.assumptions import shown
from kafka_marshal_cli.commands.consume_exec import EXEC, Asked
from kafka_marshal_cli.exec_pipe import ExecFailed, ExecLoop, ExecMode, ExecOptions
from kafka_marshal_cli.exits import ExitCode
from kafka_marshal_cli.live import Idle
from kafka_marshal_cli.records import record_object
from kafka_marshal_cli.render import to_json
from kafka_marshal_cli.shared import (
    Call,
    command,
    data,
    let_go_of_stdout,
    tell,
    wall_ms,
)
from kafka_marshal_cli.telling import TELLING, Telling
from kafka_marshal_cli.via import VIA, Via

POLL_MS = 200
POLL_RECORDS_DEFAULT = 500
DRAIN_MS = 2_000
EVENTS_MAX = 1_000
EPILOG = (
    "Example: marshal consume payments --group billing --client-id worker-1 | jq .value"
)
HELP = """\
Consume topics in a group and print one JSON object a record.

Fields: topic, partition, offset, token, timestamp (the record's, epoch ms),
handed_out_ms (the time of hand-out), key and value as text, or key_base64
and value_base64 where they are not UTF-8. A record is committed after its
line was flushed. SIGTERM and SIGINT end it in order: what is in hand is
finished, positions are written, claims released. At its end it says how
many records it consumed and what it released.

With --exec nothing is printed: a process is run for each record instead.
Its environment has MARSHAL_TOPIC, MARSHAL_PARTITION, MARSHAL_OFFSET (also
LAST_OFFSET and COUNT), MARSHAL_KEY, MARSHAL_TOKEN, MARSHAL_TIMESTAMP_MS,
MARSHAL_ATTEMPT and MARSHAL_GROUP. It is ended (TERM, then KILL), with all
that it started, when its claim is lost, when it takes too long, and when we
are asked to stop; what was not processed stays uncommitted.
"""
# Claims that come and go are told by the consumer's own callbacks.
_TOLD_ELSEWHERE = frozenset({"claimed", "claim_ended", "ready", "session_failed"})


class Guarantee(StrEnum):
    """What a crash may do to a record."""

    ALO = "alo"
    AMO = "amo"


class Policy(StrEnum):
    """Which partitions are tried."""

    FAIR = "fair"
    GREEDY = "greedy"
    TOPIC = "topic"


class Reset(StrEnum):
    """Where a partition without any position starts."""

    EARLIEST = "earliest"
    LATEST = "latest"
    NONE = "none"


class Isolation(StrEnum):
    """Which records of transactions are read."""

    UNCOMMITTED = READ_UNCOMMITTED
    COMMITTED = READ_COMMITTED


class Events(Observer):
    """Keeps events until the main thread tells them.

    The engine's thread must not wait for a stuck stderr: it keeps the leases.
    """

    def __init__(self, telling: Telling | None = None) -> None:
        self._telling = telling or Telling()
        self._waiting: deque[tuple[Event, int]] = deque(maxlen=EVENTS_MAX)

    def observe(self, event: Event) -> None:
        """Take one event."""
        is_told = self._telling.is_json or event.name not in _TOLD_ELSEWHERE
        if is_told and self._telling.wants(event):
            self._waiting.append((event, wall_ms()))

    def tell(self) -> None:
        """Write what has come, a line each."""
        while self._waiting:
            tell(self._telling.line(*self._waiting.popleft()))


class _Stopped(BaseException):
    """A signal came before anything was in hand; no handler of errors eats it."""


class Stopper:
    """Ends the loop at a SIGINT, SIGTERM or SIGHUP; the same again kills.

    Attributes:
        is_stopped: Whether a signal came.
        consumer: What is stopped; None before anything can be in hand.
        on_kill: What must go with us when we are killed.
    """

    def __init__(self) -> None:
        self.is_stopped = False
        self.consumer: Consumer | None = None
        self.on_kill: Callable[[], None] | None = None
        self._seen: set[int] = set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Listen for signals for the time of the block."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as by nohup
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        except _Stopped:
            tell("stopped before anything was consumed")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number in self._seen:
            self._die(number)
            return
        self._seen.add(number)
        self.is_stopped = True
        if self.consumer is None:
            # Nothing is in hand yet: leave from wherever we wait.
            raise _Stopped
        self.consumer.stop()

    def _die(self, number: int) -> None:
        if self.on_kill is not None:
            self.on_kill()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


@attrs.frozen
class Ends:
    """What ends a run, and what is told in every round of it."""

    stopper: Stopper
    events: Events
    idle_ms: int | None


@attrs.define
class Summary:
    """What a run came to: told once everything is closed.

    Attributes:
        count: Returns how many records were consumed.
        consumer: What consumed them; None before it is there.
        held: Partitions that it held when its work ended.
    """

    count: Callable[[], int] = attrs.field(default=lambda: 0)
    consumer: Consumer | None = None
    held: list[TopicPartition] = attrs.field(factory=list)

    @contextmanager
    def taken(self, events: Events) -> Iterator[None]:
        """Tell the last events after the block, and note what is held then."""
        try:
            yield
        finally:
            events.tell()
            with suppress(MarshalError):
                if self.consumer is not None:
                    self.held = sorted(self.consumer.assignment())

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tell after the block, where a consumer was there."""
        try:
            yield
        finally:
            if self.consumer is not None:
                tell(self.text(is_confirmed=self.consumer.is_close_confirmed))

    def text(self, *, is_confirmed: bool) -> str:
        """Return the line."""
        released = f"released {shown(self.held)}" if self.held else "held nothing"
        if self.held and not is_confirmed:
            released = (
                f"the log did not confirm the release of {shown(self.held)}, which "
                "others take over after 2H"
            )
        return f"consumed {self.count()} records, {released}"


Topics = Annotated[list[str], typer.Argument(metavar="TOPIC", help="Data topics.")]
Group = Annotated[
    str, typer.Option(metavar="GROUP", envvar="MARSHAL_GROUP", help="The group.")
]
ClientId = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        envvar="MARSHAL_CLIENT_ID",
        help="Name of this client, unique in the group; keep it.",
    ),
]
DeliveryOption = Annotated[
    Guarantee, typer.Option(help="At least once, or at most once.")
]
PolicyOption = Annotated[
    Policy, typer.Option(help="An equal share, whatever is free, or whole topics.")
]
ClaimsMax = Annotated[
    int,
    typer.Option(min=0, help="Most partitions, or whole topics; 0 for no limit."),
]
MaxRecords = Annotated[
    int,
    typer.Option(
        min=0,
        help="End after so many records; 0 for no limit. At most once, what was "
        "granted beyond is lost.",
    ),
]
IdleTimeout = Annotated[
    str | None, typer.Option(metavar="MS", help="End after so long without a record.")
]
OpenTimeout = Annotated[
    str,
    typer.Option(
        metavar="MS", envvar="MARSHAL_TIMEOUT", help="When to give up connecting."
    ),
]
MaxPollRecords = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Records of a batch; at most once, what a crash can lose of each "
        "partition. By default 500; 1 for --exec of single records at most once.",
    ),
]
ResetOption = Annotated[
    Reset, typer.Option(help="Where to start where nobody has been yet.")
]
FromBeginning = Annotated[
    bool,
    typer.Option("--from-beginning", help="The same as --auto-offset-reset earliest."),
]
IsolationOption = Annotated[
    Isolation,
    typer.Option(
        help="Whether records of open and aborted transactions are read, or only "
        "committed ones."
    ),
]
ExpectedInterval = Annotated[
    str | None,
    typer.Option(
        metavar="MS",
        help="The H that is expected; another one in the log is an error.",
    ),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        envvar="MARSHAL_STATE_DIR",
        help="Where the identity is kept that lets a restart resume at once.",
    ),
]


@command(
    waits=False,
    answers=False,
    gathers={"asked": EXEC, "telling": TELLING, "via": VIA},
)
def consume(
    call: Call,
    *,
    topics: Topics,
    group: Group,
    client_id: ClientId,
    delivery: DeliveryOption = Guarantee.ALO,
    policy: PolicyOption = Policy.FAIR,
    claims_max: ClaimsMax = 0,
    max_records: MaxRecords = 0,
    timeout: IdleTimeout = None,
    open_timeout: OpenTimeout = "30s",
    max_poll_records: MaxPollRecords = None,
    auto_offset_reset: ResetOption = Reset.EARLIEST,
    from_beginning: FromBeginning = False,
    isolation_level: IsolationOption = Isolation.UNCOMMITTED,
    heartbeat_interval: ExpectedInterval = None,
    state_dir: StateDir = None,
    asked: Asked | None,
    telling: Telling,
    via: Via,
) -> None:
    """Consume topics in a group: print records, or run processes on them."""
    idle_ms = _optional_ms("--timeout", timeout)
    open_ms = parsing.duration_ms("--open-timeout", open_timeout)
    h_ms = _optional_ms("--heartbeat-interval", heartbeat_interval)
    is_amo = delivery is Guarantee.AMO
    batch_max = max_poll_records or _batch_max(asked, is_amo=is_amo)
    batch_max = min(batch_max, max_records or batch_max)
    processes = _processes(
        asked, group=group, is_amo=is_amo, batch_max=batch_max, records_max=max_records
    )
    stopper, events, summary = Stopper(), Events(telling), Summary()
    with (
        stopper.installed(),
        summary.told(),
        Marshal(
            via.servers(call),
            group_id=group,
            client_id=client_id,
            coordination_topic=via.topic(call),
            options=call.options,
            transport=call.transport,
            heartbeat_interval_ms=h_ms,
            state_dir=state_dir,
            observer=events,
            sidecar=via.sidecar,
            sidecar_token_file=via.token,
            timeout_ms=open_ms,
        ) as marshal,
        telling.exported(marshal),
        marshal.consumer(
            *topics,
            delivery=_DELIVERIES[delivery],
            policy=policy.value,
            claims_max=claims_max,
            auto_offset_reset="earliest" if from_beginning else auto_offset_reset.value,
            isolation_level=isolation_level.value,
            max_poll_records=batch_max,
            max_granted_batches=_depth(max_records, processes),
            max_handling_ms=_handling_ms(processes),
            on_claimed=partial(_on_claimed, telling),
            on_lost=partial(_on_lost, telling),
            timeout_ms=open_ms,
        ) as consumer,
    ):
        stopper.consumer = summary.consumer = consumer
        how = processes or Printer(consumer, max_records)
        with summary.taken(events):
            _work(how, Ends(stopper, events, idle_ms), summary=summary, is_amo=is_amo)


def _work(
    how: "ExecOptions | Printer", ends: Ends, *, summary: Summary, is_amo: bool
) -> None:
    """Print records, or run processes, until the end; then wait for the positions."""
    consumer = summary.consumer
    assert consumer is not None
    if isinstance(how, ExecOptions):
        loop = exec_loop(consumer, how, ends=ends)
        summary.count = lambda: loop.done_count
        run_processes(loop, ends)
    else:
        summary.count = lambda: how.count
        print_all(how, ends, is_amo=is_amo)
    consumer.flush()


def _processes(
    asked: Asked | None, *, group: str, is_amo: bool, batch_max: int, records_max: int
) -> ExecOptions | None:
    """Return which processes to run; None where records are printed."""
    if asked is None:
        return None
    return asked.of(
        at_most_once=is_amo, batch_max=batch_max, records_max=records_max, group=group
    )


def _depth(records_max: int, processes: ExecOptions | None) -> int:
    """Return how many batches may be granted ahead.

    What is granted beyond what is wanted, or worked on, would be lost.
    """
    return 1 if records_max or processes is not None else DEPTH_MAX_DEFAULT


def _handling_ms(processes: ExecOptions | None) -> int | None:
    """Return how long we may be away before another member gets our work.

    One that is at work is watched, and --exec-timeout says how long it may take;
    to move its record would be to begin anew.
    """
    return None if processes is None else 0


def _batch_max(asked: Asked | None, *, is_amo: bool) -> int:
    """Return how many records a poll may return where nobody says.

    At most once, all that was granted is lost with us. A process takes its time,
    so no more is asked for than it works on.
    """
    is_single = asked is not None and asked.options.mode is ExecMode.RECORD
    return 1 if is_amo and is_single else POLL_RECORDS_DEFAULT


def exec_loop(consumer: Consumer, options: ExecOptions, *, ends: Ends) -> ExecLoop:
    """Return what runs the processes."""
    return ExecLoop(
        consumer,
        options,
        is_stopped=lambda: ends.stopper.is_stopped,
        each_round=ends.events.tell,
    )


def run_processes(loop: ExecLoop, ends: Ends) -> None:
    """Run processes until stopped, done, or idle for too long.

    Raises:
        Exit: With 1, where a process failed and that ends it.
    """
    ends.stopper.on_kill = loop.kill
    try:
        loop.run(Idle(ends.idle_ms))
    except ExecFailed as failed:
        tell(f"marshal: {failed}")
        raise typer.Exit(ExitCode.FAILED) from None


def _optional_ms(option: str, text: str | None) -> int | None:
    return None if text is None else parsing.duration_ms(option, text)


_DELIVERIES = {
    Guarantee.ALO: Delivery.AT_LEAST_ONCE,
    Guarantee.AMO: Delivery.AT_MOST_ONCE,
}


class Printer:
    """Writes records and commits each once it is out.

    Attributes:
        count: Records written.
        is_done: Whether no more are wanted.
    """

    def __init__(self, consumer: Consumer, records_max: int) -> None:
        self.consumer = consumer
        self.count = 0
        self._max = records_max

    @property
    def is_done(self) -> bool:
        """Whether as many were written as were asked for."""
        return bool(self._max) and self.count >= self._max

    def next(self, timeout_ms: int) -> bool:
        """Print the next record, if there is one in time.

        Raises:
            BrokenPipeError: It could not be written; it is not committed.
        """
        handed = self.consumer.poll(timeout_ms, 1)
        handed_out_ms = wall_ms()
        for records in handed.values():
            for record in records:
                data(to_json(record_object(record, handed_out_ms)))
                sys.stdout.flush()
                self.count += 1
                try:
                    self.consumer.commit(record)
                except ClaimLost as lost:
                    tell(f"lost: {lost}")
        return bool(handed)


def print_all(printer: Printer, ends: Ends, *, is_amo: bool) -> None:
    """Print records until stopped, done, idle for too long, or read no more."""
    try:
        run(printer, ends.stopper, events=ends.events, idle_ms=ends.idle_ms)
        if is_amo:
            drain(printer)
    except BrokenPipeError:
        # The record that could not be written stays uncommitted. Leaving
        # releases; what was committed before goes along.
        let_go_of_stdout()
        tell("the reader of our output is gone; what it did not take is kept")


def run(
    printer: Printer, stopper: Stopper, *, events: Events, idle_ms: int | None
) -> None:
    """Print records until stopped, done, or idle for too long."""
    since = time.monotonic()
    while not stopper.is_stopped and not printer.is_done:
        wait_ms = POLL_MS if idle_ms is None else min(POLL_MS, idle_ms)
        if printer.next(wait_ms):
            since = time.monotonic()
        elif idle_ms is not None and (time.monotonic() - since) * 1000 >= idle_ms:
            break
        events.tell()


def drain(printer: Printer) -> None:
    """Print what was granted at most once: nobody else ever will."""
    printer.consumer.stop()
    while not printer.is_done and printer.next(DRAIN_MS):
        pass


def _on_claimed(telling: Telling, partition: TopicPartition, token: Token) -> None:
    if telling.is_verbose and not telling.is_json:  # as JSON an event says the same
        tell(f"claimed: {partition} token {token}")


def _on_lost(telling: Telling, partition: TopicPartition, ending: Ending) -> None:
    if telling.is_json or not (telling.is_verbose or ending.was_lost):
        return
    how = "lost" if ending.was_lost else "released"
    by = f" to {ending.winner}" if ending.winner else ""
    tell(f"{how}: {partition} ({ending.reason}){by}")
