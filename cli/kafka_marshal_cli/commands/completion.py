"""``marshal completion``: completion scripts for shells."""

from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from kafka_marshal_cli.shared import Call, command, emit

app = typer.Typer(no_args_is_help=True)


class Shell(StrEnum):
    """A shell with a completion script."""

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
    """Print the completion script of a shell.

    For this session: `source <(marshal completion show bash)`, or zsh; `marshal
    completion show fish | source`. Permanently: `marshal --install-completion`. Names
    come from a cache that other commands fill.
    """
    del call
    script = get_completion_script(
        prog_name="marshal", complete_var="_MARSHAL_COMPLETE", shell=shell.value
    )
    emit(script.strip())
