"""``marshal clients``: the processes that the log knows.

A module of its own, as each noun of the command line has.
"""

from pathlib import Path
from typing import Annotated

import typer

from kafka_marshal import ClaimRejected, ConfigurationError
from kafka_marshal.identity import forget_client, state_home
from kafka_marshal.protocol.codec import is_identifier
from kafka_marshal_cli import presenters
from kafka_marshal_cli.render import Answer, Section
from kafka_marshal_cli.shared import Call, command

app = typer.Typer(help="Clients: the processes of the groups.", no_args_is_help=True)


@app.command("list", epilog="Example: marshal clients list --group billing")
@command()
def list_clients(
    call: Call,
    *,
    group: Annotated[
        str | None, typer.Option(metavar="GROUP", help="Only this group.")
    ] = None,
) -> None:
    """List every client: active, leaving, left, fenced or unregistered.

    The log drops clients that have left or are fenced when others of their group
    announce themselves.
    """
    world = call.formatted_world()
    rows = presenters.member_rows(world, group_id=group)
    section = Section("clients", rows, presenters.CLIENT_COLUMNS)
    call.answer(Answer(presenters.as_of(world), {}, (section,)))


@app.command("forget", epilog="Example: marshal clients forget billing worker-7")
@command()
def forget(
    call: Call,
    *,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The group.")],
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="The client_id.")],
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory of identities; by default that of the user."
        ),
    ] = None,
) -> None:
    """Remove the identity directory of a client that will not come back.

    The directory has the secrets with which a restarted client resumes its claims.
    Nothing is written to the log; claims of a client that is gone become stale by
    themselves. Refused while the client runs on this host.
    """
    for setting, name in (("GROUP", group), ("CLIENT", client)):
        if not is_identifier(name):
            raise ConfigurationError(f"{name!r} is not a valid name", setting=setting)
    world = call.formatted_world()
    home = state_home() if state_dir is None else state_dir
    domain = world.config().format_id.hex()
    try:
        is_removed = forget_client(
            home, domain=domain, group_id=group, client_id=client
        )
    except OSError as error:
        raise ConfigurationError(
            f"{home} cannot be changed: {error}; run this as the user of the client",
            setting="--state-dir",
        ) from error
    if not is_removed:
        raise ClaimRejected(
            f"this host has no identity of client {client!r} of group {group!r} in "
            f"{home}; see: marshal clients list",
            reason="unknown_client",
        )
    found = {"group_id": group, "client_id": client, "state_dir": str(home)}
    call.answer(Answer(presenters.as_of(world), found))
