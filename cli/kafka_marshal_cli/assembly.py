"""The command ``marshal``, assembled from its subcommands.

``main`` is a module of its own, to show the version and handle Ctrl-C without typer.
"""

from typing import Annotated

import typer
from typer.core import TyperGroup
from typer.main import get_group

from kafka_marshal_cli.exits import MEANINGS
from kafka_marshal_cli.lazy import LazyCommand, lazy_group, load_all
from kafka_marshal_cli.profile_options import RootConfig, RootProfile

ENVIRONMENT = (
    "Data goes to stdout, messages for people to stderr. Options override the "
    "environment (MARSHAL_BOOTSTRAP_SERVER and so on), which overrides a profile in a "
    "TOML file; `marshal config show --origin` shows where each value was set. Options "
    "of the connection, --output, --timeout and --as may also precede the command."
)

# The first paragraph of each help text, as the help of `marshal` lists it.
SINGLE = {
    "consume": "Consume topics in a group and print one JSON object for each record.",
    "shell": "Browse the state of the log, or of a snapshot, as a tree of files.",
    "doctor": "Check this machine, the brokers, the coordination topic and its log.",
    "demo": "Start a real Kafka, kill a consumer, pause a group, and check the "
    "outcome.",
}
GROUPS = {
    "topic": "The coordination topic: format, alter, upgrade and check it.",
    "groups": "Groups: describe, pause, reset and adopt them.",
    "claims": "Claims: which client holds which partition.",
    "clients": "Clients: the processes of the groups.",
    "plan": "Plans: who should hold which partition, and the effect of changes.",
    "grants": "At most once: offsets that were lost, or are at risk.",
    "cluster": "The Kafka cluster: its id, controller and brokers.",
    "config": "Profiles and settings: values in force, and where they were set.",
    "completion": "Completion of commands, options and names in a shell.",
    "log": "The log: follow it, dump it, replay it, verify it.",
    "spark": r"Jobs on Spark (pip install 'kafka-marshal\[spark]').",
    "broker": "A Kafka broker for development.",
    "sidecar": "The sidecar: one daemon per host holds the claims of many processes.",
}

app = typer.Typer(
    name="marshal",
    cls=lazy_group(
        *(
            LazyCommand(name, name, help=text, is_group=name in GROUPS)
            for name, text in (SINGLE | GROUPS).items()
        )
    ),
    help="Share Kafka topics among processes by claims kept in a topic.",
    epilog="\n\n".join(
        [
            "Example: marshal topic format -b localhost:9092",
            "Exit codes:",
            *(f"{code.value}: {meaning}" for code, meaning in MEANINGS.items()),
            ENVIRONMENT,
        ]
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        from kafka_marshal import __version__

        typer.echo(f"marshal {__version__}")
        raise typer.Exit


@app.callback()
def root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
    config: RootConfig = None,
    profile: RootProfile = None,
) -> None:
    """Share Kafka topics among processes by claims kept in a topic."""
    del version, config, profile


def complete_command() -> TyperGroup:
    """Return the command with all subcommands imported, for documents and tests."""
    return load_all(get_group(app))
