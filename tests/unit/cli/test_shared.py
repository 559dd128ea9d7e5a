"""What all commands share: options, answers, and how they fail."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from kafka_marshal import ConfigurationError, TopicMisconfigured
from kafka_marshal.admin import client
from kafka_marshal_cli import shared
from kafka_marshal_cli.render import Answer, Section, column
from kafka_marshal_cli.shared import (
    Call,
    Execute,
    Output,
    call_of,
    command,
    emit,
    notify,
)

ROW = {"name": "[red]\x1b[31m"}
ANSWER = Answer(
    {"time_ms": 1, "offsets": {}}, {}, (Section("rows", [ROW], (column("N", "name"),)),)
)


def run(body, *arguments, env=None, **traits):
    """Run a command whose body gets its call, and return the outcome."""
    app = typer.Typer()

    @app.command()
    @command(**traits)
    def act(
        call: Call,
        *,
        word: Annotated[str, typer.Argument()] = "w",
        flag: Annotated[bool, typer.Option("--flag")] = False,
    ) -> None:
        """Do what the test wants."""
        body(call, word, flag)

    return CliRunner().invoke(app, list(arguments), env=env or {})


def test_a_call_has_all_shared_options():
    calls = []
    arguments = "-b h:1 --coordination-topic t -C a=1 -C b.c=2 --timeout 2s -o jsonl"
    arguments += " --transport fast"
    outcome = run(lambda *got: calls.append(got), *arguments.split(), "x", "--flag")
    assert outcome.exit_code == 0, outcome.output
    ((call, word, flag),) = calls
    assert (word, flag) == ("x", True)
    options = {"a": "1", "b.c": "2"}
    assert call == Call(
        bootstrap_servers="h:1",
        coordination_topic="t",
        options=options,
        timeout_ms=2_000,
        is_timeout_given=True,
        output=Output.JSONL,
        transport="fast",
        is_server_given=True,
        is_topic_given=True,
    )


def test_variables_override_defaults_and_options_override_both():
    calls = []
    run(lambda call, *_: calls.append(call))
    env = {
        "MARSHAL_BOOTSTRAP_SERVER": "e:1",
        "MARSHAL_COORDINATION_TOPIC": "et",
        "MARSHAL_OUTPUT": "json",
        "MARSHAL_TRANSPORT": "kafka-python",
    }
    run(lambda call, *_: calls.append(call), env=env)
    run(lambda call, *_: calls.append(call), "-b", "o:1", env=env)
    assert calls[0] == Call(
        bootstrap_servers="localhost:9092",
        coordination_topic="__marshal",
        options={},
        timeout_ms=30_000,
    )
    assert calls[1] == Call(
        bootstrap_servers="e:1",
        coordination_topic="et",
        output=Output.JSON,
        transport="kafka-python",
        is_server_given=True,
        is_topic_given=True,
    )
    assert calls[2].bootstrap_servers == "o:1"


def test_a_command_that_writes_accepts_a_person(monkeypatch):
    calls = []
    made = []
    monkeypatch.setattr(client, "Admin", lambda *_, **given: made.append(given))
    arguments = ([], ["--as", "ada"])
    for each in arguments:
        run(lambda call, *_: calls.append(call), *each, writes=True)
    env = {"MARSHAL_AS": "bob"}
    run(lambda call, *_: calls.append(call), env=env, writes=True)
    assert [call.person for call in calls] == [None, "ada", "bob"]
    calls[1].admin()
    assert made[0]["person"] == "ada"


def test_a_command_refuses_shared_options_that_it_does_not_use():
    outcome = run(lambda *_: None, "-b", "h:1", connects=False)
    assert outcome.exit_code == 2
    assert run(lambda *_: None, "-o", "json", answers=False).exit_code == 2
    assert run(lambda *_: None, "--timeout", "1", waits=False).exit_code == 2
    assert run(lambda *_: None, "--as", "ada").exit_code == 2


def test_the_command_line_overrides_a_file_of_options(tmp_path):
    path = tmp_path / "client.properties"
    ignored = "enable.metrics.push=false\nmetadata.recovery.strategy=none\n"
    path.write_text(
        f"client.id=file\nssl.ca.location=/ca\nbootstrap.servers=f:1\n{ignored}"
    )
    given = {"command_config": path, "command_property": ["client.id=line"]}
    call = call_of(given)
    assert call.options == {"client.id": "line", "ssl.ca.location": "/ca"}
    assert call.bootstrap_servers == "f:1"
    assert call_of({**given, "bootstrap_server": "o:1"}).bootstrap_servers == "o:1"


JAAS = (
    "org.apache.kafka.common.security.plain.PlainLoginModule required "
    'username="u" password="p";'
)


def test_an_option_overrides_the_same_one_under_another_name(tmp_path):
    path = tmp_path / "client.properties"
    path.write_text("sasl.mechanism=PLAIN\nssl.ca.location=/ca\n")
    given = ["sasl_mechanism=GSSAPI", "ssl_cafile=/other"]
    call = call_of({"command_config": path, "command_property": given})
    assert call.options == {"sasl_mechanism": "GSSAPI", "ssl_cafile": "/other"}


def test_java_options_are_converted_on_the_command_line_too(tmp_path):
    path = tmp_path / "client.properties"
    path.write_text("sasl.mechanism=PLAIN\n")
    given = [f"sasl.jaas.config={JAAS}"]
    call = call_of({"command_config": path, "command_property": given})
    assert call.options == {
        "sasl.mechanism": "PLAIN",
        "sasl.username": "u",
        "sasl.password": "p",
    }


def test_a_timeout_of_zero_is_refused():
    with pytest.raises(ConfigurationError, match="--timeout"):
        call_of({"timeout": "0"})


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TopicMisconfigured("torn [bold]\x1b[31m\nmarshal: fine"), 3),
        (ConfigurationError("x"), 2),
        (ZeroDivisionError("x"), 70),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 0),
        (typer.Exit(7), 7),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_become_exit_codes(error, code):
    def body(*_):
        raise error

    outcome = run(body)
    assert outcome.exit_code == code
    assert "Traceback" not in outcome.output
    assert "\x1b" not in outcome.output


def test_an_error_is_escaped_on_stderr():
    def body(*_):
        raise TopicMisconfigured("torn [bold]\x1b[31m\nmarshal: fine")

    outcome = run(body)
    assert outcome.stdout == ""
    assert outcome.stderr.splitlines() == [
        r"marshal: torn [bold]\x1b[31m",
        "  marshal: fine",
        "  next: marshal topic info",
    ]


def test_a_suggested_command_connects_to_the_same_cluster(tmp_path):
    def body(*_):
        raise TopicMisconfigured("it is torn")

    path = tmp_path / "a b.toml"
    path.write_text("[profiles.p]\n[profiles.q]\n")
    words = (
        f"-b h:1,i:2 --coordination-topic t --profile p --config {tmp_path}/a\\ b.toml"
    )
    properties = ("-C", "sasl.password=hush", "-C", "security.protocol=SASL_SSL")
    outcome = run(body, *shlex.split(words), *properties)
    assert outcome.stderr.splitlines()[1] == (
        f"  next: marshal --config '{path}' --profile p -b h:1,i:2 "
        "--coordination-topic t -C sasl.password=... -C security.protocol=SASL_SSL "
        "topic info"
    )
    env = {"MARSHAL_BOOTSTRAP_SERVER": "h:1"}
    assert run(body, env=env).stderr.splitlines()[1] == "  next: marshal topic info"


def test_a_command_in_a_note_connects_to_the_same_cluster():
    def body(*_):
        notify("no member of it; see: marshal groups list")

    outcome = run(body, "-b", "h:1")
    assert outcome.stderr == "no member of it; see: marshal -b h:1 groups list\n"


def test_debug_shows_a_traceback_and_logs(monkeypatch):
    def body(*_):
        raise TopicMisconfigured("x")

    shown = []
    monkeypatch.setattr(shared, "_show_logs", lambda: shown.append(1))
    assert "Traceback" in run(body, "--debug").stderr
    assert shown == [1]


def test_output_before_an_error_is_kept():
    def body(*_):
        emit("line")
        raise TopicMisconfigured("x")

    assert run(body).stdout == "line\n"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["topic", "random-id"]]
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
def test_an_output_that_cannot_be_written_is_an_error(arguments):
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "kafka_marshal_cli", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr.startswith("marshal: ")
    assert "No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("arguments", ["--version", "topic random-id"])
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_output_streams_are_no_error(arguments, closed):
    line = f'"{sys.executable}" -m kafka_marshal_cli {arguments} {closed}'
    ended = subprocess.run(
        ["/bin/sh", "-c", line], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_answer_is_a_table_json_or_json_lines():
    def body(call, *_):
        call.answer(ANSWER)

    assert run(body).stdout == "N\n[red]\\x1b[31m\n"
    whole = json.loads(run(body, "-o", "json").stdout)
    assert whole == {"schema": 1, "as_of": {"time_ms": 1, "offsets": {}}, "rows": [ROW]}
    (line,) = run(body, "-o", "jsonl").stdout.splitlines()
    assert json.loads(line)["section"] == "rows"
    assert "\x1b" not in line


def test_messages_for_people_are_escaped(capsys):
    notify("a\x07b")
    assert capsys.readouterr().err == "a\\x07b\n"


@pytest.mark.parametrize(
    ("flags", "executed"),
    [((), False), (("--dry-run",), False), (("--execute",), True)],
)
def test_a_change_is_made_only_with_execute(flags, executed):
    outcome, seen = executing(*flags)
    assert outcome.exit_code == 0, outcome.output
    assert seen == [executed]


@pytest.mark.parametrize(
    "flags", [("--execute", "--dry-run"), ("--dry-run", "--execute")]
)
def test_execute_and_dry_run_exclude_each_other(flags):
    outcome, seen = executing(*flags)
    assert (outcome.exit_code, seen) == (2, [])
    assert "either --execute or --dry-run" in outcome.output
    assert "next: act --help" in outcome.output


def executing(*flags):
    """Run a command that can execute; return the outcome and the value of Execute."""
    app, seen = typer.Typer(), []

    @app.command()
    @command()
    def act(call: Call, *, execute: Execute = False) -> None:
        """Do what the test wants."""
        seen.append(execute)

    return CliRunner().invoke(app, list(flags), prog_name="act"), seen
