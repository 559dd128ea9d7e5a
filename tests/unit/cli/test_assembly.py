"""The whole command: subcommands, help, usage errors and exit codes."""

import subprocess
import sys

import pytest
from slices import HANG_S
from typer.testing import CliRunner

from kafka_marshal import __version__
from kafka_marshal_cli.assembly import app, complete_command
from kafka_marshal_cli.exits import ExitCode

COMMANDS = {
    "broker run",
    "claims explain",
    "claims forget",
    "claims history",
    "claims list",
    "claims watch",
    "claims who",
    "clients cordon",
    "clients drain",
    "clients fence",
    "clients forget",
    "clients list",
    "clients uncordon",
    "cluster id",
    "completion show",
    "config path",
    "config show",
    "consume",
    "demo",
    "doctor",
    "grants losses",
    "groups adopt",
    "groups describe",
    "groups finish",
    "groups grow",
    "groups history",
    "groups list",
    "groups pause",
    "groups reset",
    "groups set",
    "groups resume",
    "groups undo",
    "log diff",
    "log dump",
    "log replay",
    "log reset",
    "log snapshot",
    "log tail",
    "log verify",
    "plan rebalance",
    "plan show",
    "plan simulate",
    "plan verify",
    "shell",
    "sidecar clients",
    "sidecar openapi",
    "sidecar run",
    "sidecar status",
    "spark audit",
    "topic alter",
    "topic resize",
    "topic format",
    "topic info",
    "topic random-id",
    "topic upgrade",
}


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def leaves(command, path=()):
    children = getattr(command, "commands", None)
    if children is None:
        if not command.hidden:
            yield " ".join(path)
        return
    for name, child in children.items():
        yield from leaves(child, (*path, name))


def test_the_command_has_exactly_the_listed_subcommands():
    assert set(leaves(complete_command())) == COMMANDS


@pytest.mark.parametrize("path", sorted(COMMANDS))
def test_every_command_has_help_with_an_example(path):
    outcome = invoke(*path.split(), "--help")
    assert outcome.exit_code == 0
    assert f"Example: marshal {path}" in outcome.output
    assert "--debug" not in outcome.output


def test_the_help_lists_every_exit_code():
    outcome = invoke("--help")
    for code in ExitCode:
        assert f"\n{code.value}: " in outcome.output


def test_the_version_option_prints_the_version():
    assert invoke("--version").stdout == f"marshal {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["groups", "describe"],
        ["consume", "t"],
        ["consume", "t", "--group", "g", "--client-id", "c", "--delivery", "maybe"],
        ["claims", "who", "g", "t", "x"],
        ["topic", "info", "-o", "xml"],
        ["groups", "release", "g"],
        ["groups", "release", "g", "--for", "10"],
        ["topic", "format", "--partitions", "0"],
        ["topic", "format", "--limit", "nope=1"],
        ["topic", "info", "-C", "sasl.mechanism"],
        ["topic", "info", "-C", "no.such.option=1"],
        ["topic", "info", "-b", "a:b"],
        ["log", "replay", "/no/such/file"],
        ["consume", "t", "--group", "a b", "--client-id", "c"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_code_2(arguments):
    outcome = invoke(*arguments)
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["claims", "watch", "--grup", "g"], "--group"),
        (["claims", "wach"], "watch"),
        (["confg", "show"], "config"),
        (["log", "tail", "--type", "Heartbeet"], "Heartbeat"),
        (["consume", "t", "--on-eror", "skip"], "--on-error"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_misspelling_is_refused_with_the_nearest_valid_word(arguments, near):
    outcome = invoke(*arguments)
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert near in outcome.stderr


def test_marshal_without_arguments_shows_the_help():
    outcome = invoke()
    assert "Usage: marshal" in outcome.output


def test_the_command_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "kafka_marshal_cli", "topic", "random-id"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert len(bytes.fromhex(done.stdout.strip())) == 16
    assert done.stderr == ""
