"""The entry point: exit, closed pipes and arguments that cannot be decoded."""

import os
import signal
import subprocess
import sys

import pytest
from slices import HANG_S

PROGRAM = """
import atexit, gc, sys
atexit.register(lambda: print(gc.get_freeze_count() > 1_000, file=sys.stderr))
from kafka_marshal_cli.main import main
main()
"""
RESULT = """
import typer
from kafka_marshal_cli.shared import emit, run_guarded

def differ():
    emit("they differ")
    raise typer.Exit(1)

app = typer.Typer()
@app.command()
def guarded(context: typer.Context):
    run_guarded(differ, context)

app()
"""

STARTER = """
import subprocess, sys
from kafka_marshal_cli.main import run

def start(prog_name):
    sys.exit(subprocess.call([sys.executable, "-c", "raise SystemExit(3)"], timeout=60))

run(start, program="marshal")
"""


def run(*arguments, env=None):
    """Run Python with these arguments."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


@pytest.mark.parametrize(("argument", "code"), [("--version", 0), ("nope", 2)])
def test_objects_are_frozen_against_collection_at_exit(argument, code):
    done = run("-c", PROGRAM, argument)
    assert done.returncode == code
    assert done.stderr.endswith("True\n")


def closed_pipe(*arguments):
    """Run a program whose standard output is a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | {"PYTHONUNBUFFERED": ""},
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=HANG_S,
            check=False,
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("--help", 0),
        ("groups reset --help", 0),
        ("--version", 0),
        ("config show", 0),
        ("completion show bash", 0),
        ("sidecar openapi", 0),
        ("", 2),
        ("groups", 2),
    ],
)
def test_output_to_a_closed_pipe_is_not_a_failure(line, code):
    done = closed_pipe("-m", "kafka_marshal_cli", *line.split())
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize("line", ["shell {}", "log replay -", "config show"])
def test_a_closed_standard_input_is_an_empty_one(tmp_path, line):
    (tmp_path / "dump").touch()
    done = subprocess.run(
        [
            *("/bin/sh", "-c", 'exec "$@" <&-', "sh"),
            *(sys.executable, "-m", "kafka_marshal_cli"),
            *line.format(tmp_path / "dump").split(),
        ],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_exit_codes_of_processes_are_known_if_the_parent_ignores_them():
    done = subprocess.run(
        [sys.executable, "-c", STARTER],
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 3


def test_the_exit_code_of_a_result_survives_a_closed_pipe():
    done = closed_pipe("-c", RESULT)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("setting", [{}, {"MARSHAL_AS": "größe"}])
def test_an_argument_that_the_locale_cannot_decode_is_wrong_usage(setting):
    arguments = [] if setting else ["--reason", "größe"]
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"} | setting
    done = run("-m", "kafka_marshal_cli", "config", "show", *arguments, env=env)
    assert done.returncode == 2
    name = "MARSHAL_AS" if setting else "argument"
    assert done.stderr.startswith(
        rf"marshal: {name} 'gr\xc3\xb6\xc3\x9fe' is not valid in "
    )
    assert "the encoding of the locale (LC_ALL=C)\n  next: " in done.stderr


def test_an_argument_that_is_not_utf_8_is_wrong_usage():
    done = run("-X", "utf8", "-m", "kafka_marshal_cli", "shell", b"g\xff")
    assert done.returncode == 2
    assert r"argument 'g\xff' is not valid in utf-8" in done.stderr
    assert done.stderr.endswith("next: write it in UTF-8\n")
