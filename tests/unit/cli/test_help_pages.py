"""Help of commands: its content, and its layout at widths of terminals."""

import re
from textwrap import dedent
from typing import Annotated

import pytest
import typer
from rich.text import Text
from typer.main import get_command
from typer.testing import CliRunner

from kafka_marshal_cli.assembly import app, complete_command
from kafka_marshal_cli.help_pages import page

SGR = re.compile(r"\x1b\[[0-9;]*m")

small = typer.Typer(help="Do a little.\n\nOr more, with `--much`.", epilog="The end.")


@small.command("show", epilog="Example: small show x")
def show(
    *,
    place: Annotated[str, typer.Argument(metavar="PLACE", help="The place.")],
    quickly: Annotated[
        bool, typer.Option("--quickly/--slowly", help="How to go there.")
    ] = False,
    number: Annotated[
        int, typer.Option("-n", "--number-of-a-few", envvar="NUMBER", help="How many.")
    ] = 1,
    host: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Where.", rich_help_panel="Connection"),
    ] = None,
    secret: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    r"""Show every kind of parameter (see pip install 'x\[y]')."""


@small.command("other", hidden=True)
def other() -> None:
    """Not listed."""


@pytest.fixture
def group():
    return get_command(small)


def shown(command, **settings):
    context = command.make_context("small", [], resilient_parsing=True)
    return page(command, context, **{"width": 60, **settings})


def test_the_help_of_a_group_lists_its_options_and_commands(group):
    assert shown(group) == dedent("""\
        Usage: small [OPTIONS] COMMAND [ARGS]...

        Do a little.

        Or more, with `--much`.

        Options:
          --install-completion  Install completion for the current
                                shell.
          --show-completion     Show completion for the current
                                shell, to copy it or customize the
                                installation.
          --help                Show this message and exit.

        Commands:
          show  Show every kind of parameter (see pip install
                'x[y]').

        The end.""")


def test_the_help_of_a_command_has_a_section_per_panel(group):
    [usage, what, *sections, end] = shown(group.commands["show"]).split("\n\n")
    assert usage.startswith("Usage: small [OPTIONS] ")
    assert what == "Show every kind of parameter (see pip install 'x[y]')."
    assert [each.split("\n")[0] for each in sections] == [
        "Arguments:",
        "Options:",
        "Connection:",
    ]
    options = " ".join(sections[1].split())
    assert "--quickly / --slowly How to go there. [default: slowly]" in options
    assert "How many. [env var: NUMBER; default: 1]" in options
    assert "PLACE" in sections[0]
    assert sections[2] == "Connection:\n  --host HOST  Where."
    assert end == "Example: small show x"


def test_the_text_of_a_long_option_starts_on_the_next_line(group):
    lines = shown(group.commands["show"]).splitlines()
    [at] = [i for i, line in enumerate(lines) if "--number-of-a-few" in line]
    assert lines[at + 1].strip().startswith("How many.")


def test_color_does_not_change_the_text_of_the_help(group):
    for command in (group, group.commands["show"]):
        colored = shown(command, is_color=True)
        assert SGR.sub("", colored) == shown(command)
        assert "\x1b[1mOptions\x1b[0m:" in colored
        assert "\x1b[36m\x1b[1m--help\x1b[0m" in colored
    assert "\x1b[36m\x1b[1mshow\x1b[0m" in shown(group, is_color=True)


def every_command(command):
    yield command
    for each in getattr(command, "commands", {}).values():
        yield from every_command(each)


COMMANDS = list(every_command(complete_command()))


@pytest.mark.parametrize("width", [80, 100, 300])
def test_no_help_line_is_wider_than_the_terminal(width):
    for command in COMMANDS:
        for line in shown(command, width=width).splitlines():
            assert len(line) <= width, line


def test_a_narrow_terminal_drops_no_word_of_the_help():
    for command in COMMANDS:
        assert shown(command, width=1).split() == shown(command, width=300).split()


def test_placeholders_are_names_and_not_types_of_python():
    text = "\n".join(shown(command, width=300) for command in COMMANDS)
    assert re.findall(r"<(?:int|str|list)|[{]|\[\[", text) == []
    assert "--claims-max N " in text


@pytest.mark.parametrize(
    ("path", "usage"),
    [
        ("consume", "[OPTIONS] TOPIC..."),
        ("claims who", "[OPTIONS] GROUP TOPIC[:PARTITION] [PARTITION]"),
        ("clients drain", "[OPTIONS] [CLIENT]"),
    ],
)
def test_a_usage_error_shows_the_usage_line_of_the_command(path, usage):
    """typer writes the error."""
    outcome = CliRunner().invoke(app, [*path.split(), "--no-such-option"])
    assert f"{path} {usage}\n" in outcome.output


def test_help_texts_have_no_markup_but_escaped_brackets():
    for command in COMMANDS:
        texts = [
            command.help,
            command.epilog,
            *(each.help for each in help_of(command)),
        ]
        for text in filter(None, texts):
            assert Text.from_markup(text).plain == text.replace(r"\[", "[")


def help_of(command):
    return [each for each in command.params if getattr(each, "help", None)]
