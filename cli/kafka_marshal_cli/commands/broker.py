"""``marshal broker``: an embedded Apache Kafka for development."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated

import attrs
import typer

from kafka_marshal import Admin, CoordinationError
from kafka_marshal.admin.formatting import Format
from kafka_marshal.defaults import COORDINATION_TOPIC
from kafka_marshal_cli import parsing
from kafka_marshal_cli.follow_loop import handling
from kafka_marshal_cli.shared import Call, command, emit, notify

POLL_S = 0.2
app = typer.Typer(no_args_is_help=True)


class _Stopped(BaseException):
    """A signal came while the broker started; no error handler catches it."""


@app.command("run", epilog="Example: marshal broker run --port 9092 --data-dir ./kafka")
@command(connects=False, waits=False, answers=False)
def run(
    call: Call,
    *,
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port; 0 for a free one.")
    ] = 0,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory to keep the data in; by default deleted at the end.",
        ),
    ] = None,
    format_: Annotated[
        bool,
        typer.Option(
            "--format/--no-format", help="Also format the coordination topic."
        ),
    ] = True,
    coordination_topic: Annotated[
        str,
        typer.Option(
            envvar="MARSHAL_COORDINATION_TOPIC",
            metavar="TOPIC",
            help="Name of the coordination topic.",
        ),
    ] = COORDINATION_TOPIC,
    partitions: Annotated[
        int, typer.Option(metavar="N", help="Coordinating partitions.")
    ] = 8,
    heartbeat_interval: Annotated[
        str, typer.Option(metavar="MS", help="Heartbeat interval.")
    ] = "2s",
) -> None:
    """Run an embedded Apache Kafka in the foreground, until SIGINT or SIGTERM.

    When the broker is ready, its address is the first line on stdout. Needs the extra
    `broker`.
    """
    del call
    wanted = Format(
        partition_count=partitions,
        heartbeat_interval_ms=parsing.duration_ms(
            "--heartbeat-interval", heartbeat_interval
        ),
    )
    format_or_not = partial(
        _format, wanted=wanted if format_ else None, topic=coordination_topic
    )
    with _signals() as signals:
        serve(signals, port=port, data_dir=data_dir, prepare=format_or_not)


@attrs.define
class Signals:
    """Handler of SIGINT and SIGTERM.

    Attributes:
        is_stopped: Set by the first signal. An Event will not do: its lock is not
            reentrant, and the handler may interrupt a thread that waits with the lock.
        is_serving: Whether the broker has started, so that ``is_stopped`` ends
            ``serve``; before that, a signal aborts the start.
    """

    is_stopped: bool = False
    is_serving: bool = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        del number, frame
        is_first = not self.is_stopped
        self.is_stopped = True
        if is_first and not self.is_serving:
            raise _Stopped


@contextmanager
def _signals() -> Iterator[Signals]:
    signals = Signals()
    with handling((signal.SIGINT, signal.SIGTERM), signals.on_signal):
        try:
            yield signals
        except _Stopped:
            notify("stopped before the broker was up")


def _format(address: str, *, wanted: Format | None, topic: str) -> None:
    if wanted is not None:
        with Admin(address, coordination_topic=topic) as admin:
            admin.format_topic(wanted, ignore_formatted=True)


def serve(
    signals: Signals,
    *,
    port: int,
    data_dir: Path | None,
    prepare: Callable[[str], None],
) -> None:
    """Run a broker until a signal comes.

    Raises:
        CoordinationError: The broker ended by itself.
    """
    # Imported here because only this command needs Java and jars.
    from kafka_marshal.testing.broker import EmbeddedBroker
    from kafka_marshal.testing.jars import fetch_note

    note = fetch_note()
    if note is not None:
        notify(note)
    notify("Starting Apache Kafka")
    with EmbeddedBroker(port=port, data_dir=data_dir) as broker:
        prepare(broker.bootstrap_servers)
        signals.is_serving = True
        emit(broker.bootstrap_servers)
        sys.stdout.flush()
        notify(f"the broker is running, its log is {broker.log_path}; Ctrl-C stops it")
        while not signals.is_stopped:
            time.sleep(POLL_S)
            if not broker.is_running:
                raise CoordinationError(
                    "the broker ended by itself; the end of its log:\n"
                    f"{broker.log_tail()}"
                )
