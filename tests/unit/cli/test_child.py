"""One process: what it reads, how it ends, and what it leaves behind."""

import os
import sys
from pathlib import Path

import pytest
from waiting import eventually

from kafka_marshal import ConfigurationError
from kafka_marshal_cli import child as module
from kafka_marshal_cli.child import Child, wait_any

WAIT_MS = 20_000


def started(script, payload=b"", **env):
    argv = [sys.executable, "-c", script]
    return Child(argv, payload, env={**os.environ, **env})


def ended(child):
    eventually(lambda: child.exit_code() is not None, "the process has ended")
    return child.exit_code()


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie that nobody has reaped yet does not run any more.
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("size", [0, 5, 4096, 4097, 1_000_000])
def test_it_reads_all_of_its_input(tmp_path, size):
    out = tmp_path / "out"
    script = f"import sys; open({str(out)!r}, 'wb').write(sys.stdin.buffer.read())"
    assert ended(started(script, b"x" * size)) == 0
    assert out.read_bytes() == b"x" * size


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_one_that_does_not_read_is_no_failure(size):
    assert ended(started("", b"x" * size)) == 0


@pytest.mark.parametrize("code", [0, 3])
def test_its_exit_code(code):
    child = started(f"raise SystemExit({code})")
    wait_any([child], WAIT_MS)
    assert child.exit_code() == code
    assert child.exit_code() == code
    assert child.fd is None


def test_what_it_leaves_in_the_background_ends_with_it(tmp_path):
    note = tmp_path / "pid"
    script = (
        "import subprocess, sys\n"
        "code = 'import time; time.sleep(600)'\n"
        "left = subprocess.Popen([sys.executable, '-c', code])\n"
        f"open({str(note)!r}, 'w').write(str(left.pid))"
    )
    assert ended(started(script)) == 0
    pid = int(note.read_text())
    eventually(lambda: not is_running(pid), "nothing is left")


READY = "import signal, sys, time; {}; open({!r}, 'w').close(); time.sleep(600)"


def test_it_ends_when_it_is_told_to(tmp_path):
    ready = tmp_path / "ready"
    child = started(READY.format("0", str(ready)))
    eventually(ready.exists, "it runs")
    assert not child.is_told_to_end
    child.end(grace_ms=WAIT_MS)
    assert ended(child) == -15
    assert child.is_told_to_end


def test_one_that_will_not_end_is_killed(tmp_path):
    ready = tmp_path / "ready"
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    child = started(READY.format(ignore, str(ready)))
    eventually(ready.exists, "it runs")
    child.end(grace_ms=0)
    assert child.exit_code() is None
    child.end(grace_ms=0)
    assert ended(child) == -9
    child.kill()


def test_it_runs_in_a_session_of_its_own():
    script = "import os; raise SystemExit(os.getsid(0) != os.getpid())"
    assert ended(started(script)) == 0


def test_a_wait_is_bounded():
    child = started("import time; time.sleep(600)")
    wait_any([child], 10)
    assert child.exit_code() is None
    child.kill()
    assert ended(child) == -9


def test_where_the_system_cannot_tell_of_its_end(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    monkeypatch.delattr(os, "waitid", raising=False)
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.001)
    child = started("raise SystemExit(3)")
    assert child.fd is None
    wait_any([child], WAIT_MS)
    assert child.exit_code() == 3


def test_what_cannot_be_started():
    with pytest.raises(ConfigurationError, match="cannot be started"):
        Child(["/no/such/program"], b"", env={})
