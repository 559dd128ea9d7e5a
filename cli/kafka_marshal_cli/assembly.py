"""The command ``marshal``, assembled from its subcommands."""

from typing import Annotated

import typer

from kafka_marshal import __version__
from kafka_marshal_cli.commands import (
    broker,
    claims,
    clients,
    cluster,
    completion,
    config,
    consume,
    demo,
    doctor,
    grants,
    groups,
    log,
    sidecar,
    spark,
    topic,
)
from kafka_marshal_cli.exits import MEANINGS
from kafka_marshal_cli.profiles import RootConfig, RootProfile

ENVIRONMENT = (
    "Data goes to stdout, messages for people to stderr. Options override the "
    "environment (MARSHAL_BOOTSTRAP_SERVER and so on), which overrides a profile in a "
    "TOML file; `marshal config show --origin` shows where each value was set."
)

app = typer.Typer(
    name="marshal",
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


for name, noun in {
    "topic": topic,
    "groups": groups,
    "claims": claims,
    "clients": clients,
    "grants": grants,
    "cluster": cluster,
    "config": config,
    "completion": completion,
    "log": log,
    "spark": spark,
    "broker": broker,
    "sidecar": sidecar,
}.items():
    app.add_typer(noun.app, name=name)
app.command("consume", help=consume.HELP, epilog=consume.EPILOG)(consume.consume)
app.command("doctor", epilog=doctor.EPILOG)(doctor.doctor)
app.command("demo", epilog="Example: marshal demo")(demo.demo)
