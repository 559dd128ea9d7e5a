"""``marshal completion``: what a shell needs to complete our words."""

from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from kafka_marshal_cli.shared import Call, command, data

app = typer.Typer(
    help="Completion of commands, options and names in a shell.", no_args_is_help=True
)


class Shell(StrEnum):
    """A shell that can be told how to complete."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command(
    "show",
    epilog="Example: marshal completion show bash > "
    "~/.local/share/bash-completion/completions/marshal",
)
@command(connects=False, waits=False, answers=False)
def show(
    call: Call,
    *,
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print the script that makes a shell complete `marshal`.

    For this session: `source <(marshal completion show bash)`, the same with
    zsh, `marshal completion show fish | source`. `marshal --install-completion`
    installs it for good, where it can tell which shell it is called from.
    Groups, topics and clients are completed as commands saw them last; no broker
    is asked.
    """
    del call
    script = get_completion_script(
        prog_name="marshal", complete_var="_MARSHAL_COMPLETE", shell=shell.value
    )
    data(script.strip())
