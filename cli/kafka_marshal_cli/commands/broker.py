"""``marshal broker``: a real Kafka of one's own, for development."""

import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from kafka_marshal import Admin, CoordinationError
from kafka_marshal.admin import Format
from kafka_marshal_cli import parsing
from kafka_marshal_cli.shared import Call, command, data, tell

LOOK_S = 0.2
app = typer.Typer(help="A Kafka broker for development.", no_args_is_help=True)


class _Stopped(BaseException):
    """A signal came while the broker started; not an Exception, so nobody eats it."""


@app.command("run", epilog="Example: marshal broker run --port 9092 --data-dir ./kafka")
@command(connects=False, waits=False, answers=False)
def run(
    call: Call,
    *,
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port; 0 for any free one.")
    ] = 0,
    data_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep data here; else it goes at the end."),
    ] = None,
    format_: Annotated[
        bool,
        typer.Option("--format/--no-format", help="Format the coordination topic too."),
    ] = True,
    coordination_topic: Annotated[
        str,
        typer.Option(
            envvar="MARSHAL_COORDINATION_TOPIC",
            metavar="TOPIC",
            help="The topic that is formatted.",
        ),
    ] = "__marshal",
    partitions: Annotated[int, typer.Option(metavar="K", help="Its partitions.")] = 8,
    heartbeat_interval: Annotated[
        str, typer.Option(metavar="MS", help="Its H, in ms or like 2s.")
    ] = "2s",
) -> None:
    """Run an embedded Apache Kafka in the foreground, until SIGINT or SIGTERM.

    The first line on stdout is its address, once it serves. Data that is not
    kept in --data-dir goes at the end. Needs the extra `broker`.
    """
    del call
    wanted = Format(
        partition_count=partitions,
        heartbeat_interval_ms=parsing.duration_ms(
            "--heartbeat-interval", heartbeat_interval
        ),
    )
    # Needs Java and jars, which other commands do not.
    from kafka_marshal.testing.broker import EmbeddedBroker

    stop = threading.Event()
    is_up = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        del number, frame
        if not is_up and not stop.is_set():
            stop.set()
            raise _Stopped
        stop.set()

    before = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        with EmbeddedBroker(port=port, data_dir=data_dir) as broker:
            address = broker.bootstrap_servers
            if format_:
                with Admin(address, coordination_topic=coordination_topic) as admin:
                    admin.format_topic(wanted, ignore_formatted=True)
            is_up = True
            data(address)
            sys.stdout.flush()
            tell(f"broker runs, its log is {broker.log_path}; Ctrl-C ends it")
            while not stop.wait(LOOK_S):
                if not broker.is_running:
                    raise CoordinationError(
                        f"the broker ended by itself; the end of its log:\n"
                        f"{broker.log_tail()}"
                    )
    except _Stopped:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
