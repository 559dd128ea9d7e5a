"""``marshal demo``: consumers share a topic, one is killed and replaced.

It parses the command line; ``demo.play`` runs the demo.
"""

import secrets
import sys
from typing import Annotated

import typer
from rich.console import Console

from kafka_marshal_cli import parsing, render
from kafka_marshal_cli.demo.play import Outcome, play
from kafka_marshal_cli.demo.show import Show
from kafka_marshal_cli.demo.stage import DemoOptions
from kafka_marshal_cli.exits import ExitCode
from kafka_marshal_cli.shared import Call, Output, command, emit

app = typer.Typer()

HeartbeatInterval = Annotated[
    str,
    typer.Option(
        "--heartbeat-interval",
        metavar="DURATION",
        help="A killed consumer is replaced after two intervals.",
    ),
]
Partitions = Annotated[
    int, typer.Option("--partitions", min=1, max=64, help="Partitions of each topic.")
]
Records = Annotated[
    int,
    typer.Option("--records", min=100, max=10_000, help="Records at the start."),
]
Consumers = Annotated[
    int, typer.Option("--consumers", min=2, max=8, help="Consumer processes.")
]
Keep = Annotated[bool, typer.Option("--keep", help="Keep journals and logs.")]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Chooses which consumer dies; by default random."),
]


@app.command("demo", epilog="Example: marshal demo")
@command(connects=False, waits=False)
def demo(
    call: Call,
    *,
    heartbeat_interval: HeartbeatInterval = "2s",
    partitions: Partitions = 6,
    records: Records = 3_000,
    consumers: Consumers = 3,
    keep: Keep = False,
    seed: Seed = None,
) -> None:
    """Start a real Kafka, kill a consumer, pause a group, and check the outcome.

    Needs no broker, and takes a minute. Consumer processes share a topic; one is killed
    and the others take over; the group is paused and resumed. A second round does the
    same with delivery at most once. The verdict is computed from the journals of the
    consumers and the log. The exit code is 0 if every guarantee held, else 1.
    """
    is_data = call.output is not Output.TABLE
    options = DemoOptions(
        heartbeat_interval_ms=parsing.duration_ms(
            "--heartbeat-interval", heartbeat_interval
        ),
        partitions=partitions,
        records=records,
        consumers=consumers,
        seed=secrets.randbelow(1_000_000) if seed is None else seed,
        keep=keep,
    )
    show = Show(Console(stderr=is_data))
    try:
        outcome = play(options, show)
    except KeyboardInterrupt:
        show.step("Interrupted: everything that was started is stopped; no verdict.")
        raise typer.Exit(ExitCode.FAILED) from None
    if is_data:
        pretty = call.output is Output.JSON
        emit(render.to_json(outcome.to_object(), is_pretty=pretty))
    _conclude(outcome, show)
    if not outcome.held:
        raise typer.Exit(ExitCode.FAILED)


def _conclude(outcome: Outcome, show: Show) -> None:
    if outcome.folder is not None:
        show.step(f"Journals and logs are in {outcome.folder}.")
    summary = "Every guarantee held." if outcome.held else "A guarantee did NOT hold."
    seed = outcome.options.seed
    show.step(f"{summary} It took {outcome.took_s:.0f} s (--seed {seed}).")
    sys.stdout.flush()
