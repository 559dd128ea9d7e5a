"""Confirmation by a typed name before a command affects live clients."""

import os
import sys
from pathlib import Path

import pytest
import typer

from kafka_marshal import ConfigurationError
from kafka_marshal_cli import confirmation
from kafka_marshal_cli.exits import ExitCode

EFFECT = "client c1 is alive"


@pytest.fixture
def terminal(monkeypatch):
    """Make standard input a terminal; return the descriptor that types into it."""
    keyboard, end = os.openpty()
    with os.fdopen(end, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield keyboard
    os.close(keyboard)


def test_the_typed_name_confirms(terminal, capsys):
    os.write(terminal, b"c1\n")
    confirmation.require("c1", effect=EFFECT, yes=False)
    assert capsys.readouterr().err == f"{EFFECT}.\nType c1 to confirm:\n"


@pytest.mark.parametrize("typed", [b"\n", b"y\n", b"yes\n", b"c2\n", b"\x04"])
def test_any_other_text_does_not_confirm(terminal, typed, capsys):
    os.write(terminal, typed)
    with pytest.raises(typer.Exit) as caught:
        confirmation.require("c1", effect=EFFECT, yes=False)
    assert caught.value.exit_code == ExitCode.REFUSED
    # No other command helps, so none is named.
    assert capsys.readouterr().err.endswith(
        "not confirmed: 'c1' was not typed; nothing was written\n"
    )


def test_a_confirmation_without_an_answer_times_out(terminal, monkeypatch):
    monkeypatch.setattr(confirmation, "ANSWER_S_MAX", 0.01)
    with pytest.raises(typer.Exit):
        confirmation.require("c1", effect=EFFECT, yes=False)


def test_without_a_terminal_only_the_yes_option_confirms(monkeypatch):
    with Path(os.devnull).open(encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(ConfigurationError, match=r"alive.*not a terminal.*--yes"):
            confirmation.require("c1", effect=EFFECT, yes=False)
        confirmation.require("c1", effect=EFFECT, yes=True)
