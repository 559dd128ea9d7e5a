"""Commands are imported when they are invoked: imports, help and conversions."""

import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from enum import Enum
from io import StringIO
from pathlib import Path
from typing import Annotated

import pytest
import typer
from slices import HANG_S
from typer.main import get_command
from typer.testing import CliRunner

from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.lazy import LazyCommand, convert_quickly, option_first

KAFKA = ("kafka", "confluent_kafka")
HEAVY = (*KAFKA, "rich", "pydantic", "asyncio", "ssl", "tomllib", "kafka_marshal.ports")
COMMANDS = "kafka_marshal_cli.commands"


REPORT = (
    "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"
)
MAIN = f"{REPORT}; from kafka_marshal_cli.main import main; main()"


def run(*arguments, env=None, code=0):
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        env=env,
    )
    assert done.returncode == code, done.stderr
    return done


def modules_of(done):
    """Return the names of all modules that a program had imported at its end."""
    return set(done.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (["--version"], [*HEAVY, "typer", "attrs", "msgspec", "logging", COMMANDS]),
        (["--help"], [*HEAVY, "attrs", "msgspec", "json", COMMANDS]),
        (["claims", "list", "--help"], [*KAFKA, "rich", f"{COMMANDS}.claims_watch"]),
        (["groups", "list", "--help"], [*KAFKA, "rich", f"{COMMANDS}.groups_reset"]),
        (
            ["log", "replay", os.devnull],
            [*HEAVY, "kafka_marshal.views.world", "kafka_marshal.engine"],
        ),
    ],
    ids=lambda value: " ".join(value) if value[0] not in KAFKA else "",
)
def test_a_command_imports_only_what_it_uses(arguments, unwanted):
    assert modules_of(run(*arguments)).isdisjoint(unwanted)


@pytest.mark.parametrize("group", [[], ["claims"]])
def test_a_group_without_a_command_shows_its_help_and_imports_no_rich(group):
    done = run(*group, code=2)
    assert done.stdout == run(*group, "--help").stdout.removesuffix("\n")
    assert "rich" not in modules_of(done)


def test_completion_of_a_group_imports_no_command():
    asked = {"_MARSHAL_COMPLETE": "complete_bash", "_TYPER_COMPLETE_ARGS": "marshal cl"}
    done = run(
        env={**os.environ, **asked, "COMP_WORDS": "marshal cl", "COMP_CWORD": "1"}
    )
    assert done.stdout.split() == ["claims", "clients", "cluster"]
    assert modules_of(done).isdisjoint([*KAFKA, COMMANDS])


def stubs(group, path=()):
    for name, command in group.commands.items():
        if isinstance(command, LazyCommand):
            yield " ".join((*path, name)), command, command.load()
        found = command.load() if isinstance(command, LazyCommand) else command
        if hasattr(found, "commands"):
            yield from stubs(found, (*path, name))


def test_a_command_is_listed_with_the_first_paragraph_of_its_help():
    found = list(stubs(get_command(app)))
    assert {"consume", "groups", "groups reset", "log tail"} < {n for n, _, _ in found}
    for name, listed, command in found:
        first = " ".join(command.help.split("\n\n")[0].split())
        assert (name, listed.help, listed.hidden) == (name, first, command.hidden)


def test_the_help_of_a_group_has_its_description():
    outcome = CliRunner().invoke(app, ["claims", "--help"])
    assert "Claims: which client holds which partition." in outcome.output


def test_paragraphs_of_help_fill_the_width_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    shown = CliRunner().invoke(app, ["groups", "reset", "--help"]).output
    [paragraph] = [line for line in shown.splitlines() if "Without --execute" in line]
    assert "or a member ends the reset." in paragraph


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


small = typer.Typer()


@small.command()
def show(
    *,
    place: Annotated[str, typer.Argument()],
    names: Annotated[list[str] | None, typer.Option("--name")] = None,
    colour: Annotated[Colour, typer.Option()] = Colour.RED,
    path: Annotated[Path | None, typer.Option(exists=True)] = None,
    number: Annotated[int, typer.Option(min=0, max=9)] = 1,
    shout: Annotated[str, typer.Option(parser=str.upper)] = "x",
) -> None:
    """Show every kind of value."""
    typer.echo(repr((place, names, colour, path, number, shout)))


@pytest.mark.parametrize(
    "arguments",
    [
        "here",
        "here --name a --name b --colour blue",
        "here --path / --number 3 --shout abc",
        "here --number 9",
        "here --path /none/such",
        "",
        "--help",
    ],
)
def test_values_are_converted_as_typer_converts_them(arguments):
    plain, quick = get_command(small), get_command(small)
    convert_all(quick)
    assert quick.params != plain.params
    assert outcome(quick, arguments) == outcome(plain, arguments)


@pytest.mark.parametrize("number", ["1_0", "\u0663", "5.0", "0x5", "9" * 20, "nan"])
def test_a_number_with_other_than_decimal_digits_is_refused(number):
    command = get_command(small)
    convert_all(command)
    code, shown = outcome(command, f"here --number {number}")
    assert (code, "is not a whole number" in " ".join(shown.split())) == (2, True)


@pytest.mark.parametrize(
    ("number", "why"),
    [
        ("10", "10 is more than 9"),
        ("-1", "-1 is less than 0"),
        # The largest offset, by which Kafka's tools name the end, and the next one.
        ("9223372036854775807", "9223372036854775807 is more than 9"),
        ("9223372036854775808", "9223372036854775808 is out of range"),
        ("-9223372036854775808", "-9223372036854775808 is out of range"),
    ],
)
def test_a_number_out_of_its_range_is_refused(number, why):
    command = get_command(small)
    convert_all(command)
    code, shown = outcome(command, f"here --number={number}")
    assert (code, why in shown) == (2, True)


def test_a_wrong_choice_is_refused_with_the_choices():
    command = get_command(small)
    convert_all(command)
    code, shown = outcome(command, "here --colour green")
    assert (code, "'green' is not one of red, blue" in shown) == (2, True)


def convert_all(command):
    for each in (command, *getattr(command, "commands", {}).values()):
        convert_quickly(each)


def outcome(command, arguments):
    """Return the exit code of a command, and its output."""
    shown = StringIO()
    with redirect_stdout(shown), redirect_stderr(shown), pytest.raises(SystemExit) as e:
        command.main(arguments.split(), prog_name="show")
    return e.value.code, shown.getvalue()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["-o", "json", "--group", "g"], ["g", "-o", "json"]),
        (["t:3", "-g", "g", "x"], ["g", "t:3", "x"]),
        (["--group=g", "--at=-5m"], ["g", "--at=-5m"]),
        (["g", "t"], ["g", "t"]),
        (["g", "--", "--group", "h"], ["g", "--", "--group", "h"]),
        (["--group"], ["--group"]),
    ],
)
def test_the_group_option_becomes_the_first_argument(given, wanted):
    assert option_first(given, ("--group", "-g")) == wanted


@pytest.mark.parametrize("flags", [("--group", "a"), ("-g", "a"), ("--group=a",)])
@pytest.mark.parametrize("command", ["groups pause", "groups reset --to-earliest"])
def test_a_command_accepts_its_group_as_an_option(command, flags):
    done = CliRunner().invoke(app, [*command.split(), *flags])
    # The group is accepted, other options are missing.
    assert "marshal: give " in done.output


@pytest.mark.parametrize("flags", [("--topic", "t", "--topic=u/v"), ("t", "u/v")])
def test_consume_accepts_its_topics_as_options(flags):
    given = ("--group", "g", "--client-id", "c", "-b", "localhost:1")
    done = CliRunner().invoke(app, ["consume", *given, *flags])
    assert "'u/v' is no valid topic name" in done.output


@pytest.mark.parametrize("command", ["claims list", "grants losses", "consume"])
def test_the_group_option_has_the_same_short_name_in_commands(command):
    shown = CliRunner().invoke(app, [*command.split(), "--help"]).output
    assert "-g, --group" in " ".join(shown.replace(",--", ", --").split())


def test_an_unknown_command_is_refused_with_the_visible_commands():
    done = CliRunner().invoke(app, ["topic", "describe"])
    assert done.exit_code == 2
    assert "No such command 'describe'" in done.output
    assert "format" in done.output
    # A hidden command.
    assert "release" not in CliRunner().invoke(app, ["groups", "x"]).output
