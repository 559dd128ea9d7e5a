"""Asks the person at the terminal before a command ends the work of live clients.

The person types the name of what is changed, so that a command for another group is not
confirmed by habit. Scripts pass ``--yes``.
"""

import select
import sys
from typing import Annotated

import typer

from kafka_marshal import ConfigurationError
from kafka_marshal_cli.exits import ExitCode
from kafka_marshal_cli.shared import notify

ANSWER_S_MAX = 300.0

Yes = Annotated[bool, typer.Option("--yes", help="Ask for no confirmation.")]


def require(name: str, *, effect: str, yes: bool) -> None:
    """Wait until the person has typed a name; return at once with ``--yes``.

    Args:
        name: The group or client to type.
        effect: What the command will do, as a sentence.
        yes: Whether ``--yes`` was given.

    Raises:
        ConfigurationError: Nobody can answer: standard input is not a terminal.
        Exit: As refused: another name was typed, or none within ``ANSWER_S_MAX``.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigurationError(
            f"{effect}; nothing was written, because this needs a confirmation and "
            "standard input is not a terminal. Add --yes to proceed",
            setting="--yes",
        )
    notify(f"{effect}.")
    notify(f"Type {name} to confirm:")
    ready, _, _ = select.select([sys.stdin], [], [], ANSWER_S_MAX)
    typed = sys.stdin.readline().strip() if ready else ""
    if typed != name:
        notify(f"not confirmed: {name!r} was not typed; nothing was written")
        raise typer.Exit(ExitCode.REFUSED)
