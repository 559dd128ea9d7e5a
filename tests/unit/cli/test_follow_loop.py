"""Long-running commands: signals, idle time, outages and closed pipes."""

import os
import signal
import sys
import time

import pytest

from kafka_marshal import CoordinationError
from kafka_marshal_cli.follow_loop import (
    POLL_MS,
    Idle,
    Outages,
    check_reader,
    ending_in_order,
)


def test_a_sigterm_ends_the_block_without_an_error():
    before = signal.getsignal(signal.SIGTERM)
    reached = []
    with ending_in_order():
        signal.raise_signal(signal.SIGTERM)
        reached.append(1)
    assert reached == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_sigint_raises_keyboard_interrupt():
    with pytest.raises(KeyboardInterrupt), ending_in_order():
        signal.raise_signal(signal.SIGINT)


def test_idle_time_is_measured_since_the_last_activity(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    idle = Idle(1_000)
    assert (idle.is_over, idle.wait_ms) == (False, POLL_MS)
    now_s[0] = 0.95
    assert (idle.is_over, idle.wait_ms) == (False, 50)
    idle.touch()
    now_s[0] = 1.90
    assert not idle.is_over
    now_s[0] = 1.95
    assert (idle.is_over, idle.wait_ms) == (True, 0)
    forever = Idle(None)
    now_s[0] = 1e9
    assert (forever.is_over, forever.wait_ms) == (False, POLL_MS)


def test_an_outage_is_reported_once(capsys):
    outages = Outages()
    error = CoordinationError("no broker\x1b")
    for state in (None, error, error, None, None):
        outages.report(state)
    assert capsys.readouterr().err.splitlines() == [
        r"marshal: the brokers do not answer, waiting for them: no broker\x1b",
        "marshal: the brokers answer again",
    ]


def test_a_closed_pipe_is_detected_without_writing(monkeypatch, tmp_path):
    ours, theirs = os.pipe()
    with os.fdopen(theirs, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        check_reader()
        os.close(ours)
        with pytest.raises(BrokenPipeError):
            check_reader()
    with (tmp_path / "file").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        check_reader()
    with pytest.raises(ValueError, match="closed"):
        out.fileno()
    check_reader()
