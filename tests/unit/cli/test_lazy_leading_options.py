"""Shared options before the name of a command are moved behind it."""

from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kafka_marshal_cli.assembly import app, complete_command
from kafka_marshal_cli.lazy import FLAGS, PROFILE, WITH_VALUE, split

COMMANDS = {
    "groups": SimpleNamespace(is_group=True),
    "doctor": SimpleNamespace(is_group=False),
}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("-o json groups list x", "groups list -o json x"),
        ("-ojson --timeout=5s doctor -o table", "doctor -ojson --timeout=5s -o table"),
        ("groups -b a:1 --profile p list", "groups list -b a:1 --profile p"),
        ("--profile p -o json doctor", "--profile p doctor -o json"),
        ("--config=f --debug groups list", "--config=f groups list --debug"),
        ("groups list -o json", "groups list -o json"),
        ("-o json nope x", "nope -o json x"),
        # Without a command they have no effect.
        ("-o json", ""),
        ("-o json --help", "--help"),
        ("-o json groups --help", "groups --help"),
        ("-o json groups", "groups"),
        # Options that are not shared stay where they are.
        ("--group g groups list", "--group g groups list"),
        ("groups --group g list", "groups --group g list"),
    ],
)
def test_leading_shared_options_are_moved_behind_the_command(given, wanted):
    assert split(given.split(), COMMANDS).joined == wanted.split()


def test_every_shared_option_can_precede_the_command():
    """The table repeats options of commands, which are imported only when invoked."""
    groups: Any = complete_command().commands["groups"]
    command = groups.commands["pause"]
    shared = {"bootstrap_server", "coordination_topic", "command_property", "as_"}
    shared |= {"command_config", "transport", "timeout", "output", "debug"}
    shared |= {"config", "profile"}
    found = [each for each in command.params if each.name in shared]
    assert len(found) == len(shared)
    names = {name for each in found for name in each.opts}
    assert names == WITH_VALUE | FLAGS | PROFILE


def test_a_command_accepts_shared_options_before_its_name():
    refused = CliRunner().invoke(app, ["-o", "xml", "groups", "-b", "a:1", "list"])
    assert refused.exit_code == 2
    assert "marshal groups list" in refused.output
    assert "xml" in refused.output


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--group", "g", "claims", "list"], "follow the name of the command"),
        (["--confg", "f", "claims", "list"], "--config"),
    ],
)
def test_other_options_before_a_command_are_refused(given, text):
    refused = CliRunner().invoke(app, given, env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert text in refused.output
