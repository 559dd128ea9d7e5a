"""`marshal completion`, in real shells where they are installed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from slices import HANG_S
from typer.testing import CliRunner

from kafka_marshal_cli.assembly import app

SHELLS = ("bash", "zsh", "fish")
CHECKS = {"bash": ["-n"], "zsh": ["-f", "-n"], "fish": ["--no-execute"]}
BASH = """
source "$1"
try() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    _marshal_completion marshal
    echo "${COMPREPLY[*]}"
}
try marshal groups describe b
try marshal claims w
try marshal consume payments --group billing --client-id w
try marshal claims list --topic ''
try marshal log tail --ty
"""


def script(shell):
    outcome = CliRunner().invoke(app, ["completion", "show", shell])
    assert outcome.exit_code == 0, outcome.stderr
    return outcome.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_the_completion_script_is_valid_in_its_shell(shell, tmp_path):
    text = script(shell)
    assert f"complete_{shell}" in text
    assert "_MARSHAL_COMPLETE" in text
    if shutil.which(shell) is not None:
        path = tmp_path / "script"
        path.write_text(text)
        subprocess.run([shell, *CHECKS[shell], path], check=True, timeout=HANG_S)


def test_an_unsupported_shell_is_wrong_usage():
    outcome = CliRunner().invoke(app, ["completion", "show", "tcsh"])
    assert outcome.exit_code == 2


def test_bash_completes_commands_options_and_names(tmp_path):
    cache = tmp_path / "cache" / "kafka-marshal"
    cache.mkdir(parents=True)
    domain = {
        "servers": "localhost:9092",
        "topic": "__marshal",
        "groups": ["billing", "alerts"],
        "topics": ["payments"],
        "clients": ["w1", "w2"],
    }
    kept = {"version": 1, "domains": [domain]}
    (cache / "names.json").write_text(json.dumps(kept))
    (tmp_path / "script").write_text(script("bash"))
    (tmp_path / "try").write_text(BASH)
    program = tmp_path / "marshal"
    program.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m kafka_marshal_cli "$@"\n'
    )
    program.chmod(0o755)
    found = subprocess.run(
        ["bash", "--norc", tmp_path / "try", tmp_path / "script"],
        env={
            **{n: v for n, v in os.environ.items() if not n.startswith("MARSHAL_")},
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "XDG_CONFIG_HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
        cwd=Path(__file__).resolve().parents[4],
    )
    assert [line.split() for line in found.stdout.splitlines()] == [
        ["billing"],
        ["watch", "who"],
        ["w1", "w2"],
        ["payments"],
        ["--type"],
    ]
    assert found.stderr == ""
