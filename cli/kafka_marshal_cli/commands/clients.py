"""``marshal clients``: the processes that the log knows."""

from typing import Annotated

import typer

from kafka_marshal_cli import columns, facts
from kafka_marshal_cli.render import Answer, Section
from kafka_marshal_cli.shared import Call, command

app = typer.Typer(help="Clients: which processes take part.", no_args_is_help=True)


@app.command("list", epilog="Example: marshal clients list --group billing")
@command()
def list_clients(
    call: Call,
    *,
    group: Annotated[
        str | None, typer.Option(metavar="GROUP", help="Of this group only.")
    ] = None,
) -> None:
    """List every client: active, leaving, fenced or unregistered."""
    world = call.formatted_world()
    rows = facts.member_rows(world, group_id=group)
    section = Section("clients", rows, columns.CLIENTS)
    call.answer(Answer(facts.as_of(world), {}, (section,)))
