"""The help of a command: plain text in columns, with a little color on a terminal.

typer would draw the help with rich, whose import takes longer than everything else that
help needs. ``lazy`` imports this module only to show help.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

import typer

from kafka_marshal_cli.terminal import columns, terminal

# The text of a longer name begins on the next line.
NAMES_WIDTH_MAX = 26
TEXT_WIDTH_MIN = 20
# Names of commands and options, but not placeholders of values.
_NAME = re.compile(r"^[a-z][\w-]*|(?<!\S)--?\w[\w-]*")

Node = Any  # a command, parameter or context: typer does not export the classes
Row = tuple[str, str]


def show(command: Node, ctx: Node) -> None:
    """Write the help of a command to stdout."""
    _, is_color = terminal(sys.stdout)
    text = page(command, ctx, width=columns(sys.stdout), is_color=is_color)
    try:
        typer.echo(text)
    except BrokenPipeError:  # as in `marshal --help | head`; typer would end with 1
        from kafka_marshal_cli.shared import discard_stdout

        discard_stdout()


def page(command: Node, ctx: Node, *, width: int, is_color: bool = False) -> str:
    """Return the help of a command.

    Args:
        command: A command or a group.
        ctx: Its context.
        width: Columns of the terminal.
        is_color: Whether titles may be bold, and names colored.
    """
    parts = [command.get_usage(ctx), *_paragraphs(command.help, width)]
    sections = _parameters(command, ctx)
    sections["Commands"] = list(_commands(command))
    for title, rows in sections.items():
        if rows:
            head = typer.style(title, bold=True) if is_color else title
            lines = _lines(rows, width, is_color=is_color)
            parts.append("\n".join([f"{head}:", *lines]))
    return "\n\n".join([*parts, *_paragraphs(command.epilog, width)])


def _parameters(command: Node, ctx: Node) -> dict[str, list[Row]]:
    """Return names and texts of parameters, by the title of their section."""
    found: dict[str, list[Row]] = {"Arguments": [], "Options": []}
    for each in command.get_params(ctx):
        row = each.get_help_record(ctx)  # None if it is hidden
        if row is not None:
            kind = "Arguments" if each.param_type_name == "argument" else "Options"
            title = getattr(each, "rich_help_panel", None) or kind
            found.setdefault(title, []).append(row)
    return found


def _commands(command: Node) -> Iterator[Row]:
    """Yield names and first paragraphs of the commands of a group."""
    for name, each in getattr(command, "commands", {}).items():
        if not each.hidden:
            yield name, each.help.split("\n\n")[0]


def _lines(rows: Sequence[Row], width: int, *, is_color: bool) -> Iterator[str]:
    wide = min(max(len(name) for name, _ in rows), NAMES_WIDTH_MAX)
    indent = " " * (wide + 4)
    text_width = max(width - len(indent), TEXT_WIDTH_MIN)
    for name, text in rows:
        first, *rest = _wrapped(text, text_width)
        shown = _NAME.sub(_colored, name) if is_color else name
        if len(name) > wide:
            yield f"  {shown}"
            yield indent + first
        else:
            yield f"  {shown}{' ' * (wide - len(name))}  {first}"
        yield from (indent + line for line in rest)


def _colored(found: re.Match[str]) -> str:
    return typer.style(found[0], fg="cyan", bold=True)


def _paragraphs(text: str | None, width: int) -> list[str]:
    paragraphs = text.split("\n\n") if text else []
    return ["\n".join(_wrapped(each, width)) for each in paragraphs]


def _wrapped(text: str, width: int) -> list[str]:
    """Return a paragraph as lines; its brackets are escaped, as typer expects."""
    plain = " ".join(text.replace(r"\[", "[").split())
    return wrap(plain, width, break_long_words=False, break_on_hyphens=False) or [""]
