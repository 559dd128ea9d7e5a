"""Programs that tests start as forks behave like programs that Python starts."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import pytest
from slices import HANG_S

pytestmark = pytest.mark.skipif(
    not forked.CAN_FORK, reason="without pidfds each program starts afresh"
)
SHOWS = """
import json, os, signal, sys, threading
print(json.dumps({
    "arguments": sys.argv[1:],
    "name": __name__,
    "path": sys.path[0],
    "pid": os.getpid(),
    "variable": os.environ.get("OF_THE_TEST"),
    "is_home": "HOME" in os.environ,
    "input": sys.stdin.read(),
    "is_interruptible": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "threads": threading.active_count(),
    "has_imported": "kafka_marshal.engine.session" in sys.modules,
}))
print("an error", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def start(tmp_path):
    """Start a program with these arguments; its output is in `out` and `err`."""
    started = []

    def run(code, *arguments, **env):
        path = tmp_path / "program.py"
        path.write_text(code)
        with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
            process = forked.start([path, *arguments], env=env, stdout=out, stderr=err)
        started.append(process)
        return process

    yield run
    for each in started:
        each.kill()
        each.wait(HANG_S)


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_has_arguments_environment_and_streams_of_its_own(
    start, tmp_path, code
):
    process = start(SHOWS, str(code), "a b", OF_THE_TEST="x")
    assert process.wait(HANG_S) == process.poll() == process.returncode == code
    assert json.loads((tmp_path / "out").read_text()) == {
        "arguments": [str(code), "a b"],
        "name": "__main__",
        "path": str(tmp_path),
        "pid": process.pid,
        "variable": "x",
        "is_home": "HOME" in os.environ,
        "input": "",
        "is_interruptible": True,
        "threads": 1,
        "has_imported": True,
    }
    assert (tmp_path / "err").read_text() == "an error\n"
    assert "OF_THE_TEST" not in os.environ


def test_signals_end_a_program_and_a_wait_has_a_limit(start):
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = start("import time; time.sleep(3600)")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(HANG_S) == -number
        process.send_signal(number)  # it has ended: nothing is sent


def test_several_threads_get_the_status_of_an_end(start):
    process = start("import time; time.sleep(3600)")
    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(process.wait, HANG_S) for _ in range(4)]
        process.kill()
        assert {each.result(HANG_S) for each in waits} == {-signal.SIGKILL}


def test_a_failure_is_printed_as_python_prints_it(start, tmp_path):
    assert start("raise LookupError('why')").wait(HANG_S) == 1
    assert (tmp_path / "err").read_text().endswith("LookupError: why\n")


def test_the_server_has_one_thread(start):
    """Otherwise a fork could inherit a lock that no thread releases."""
    start("").wait(HANG_S)
    tasks = Path(f"/proc/{forked.server().pid}/task")
    assert len(list(tasks.iterdir())) == 1


def test_a_console_script_runs(tmp_path):
    path = Path(sys.executable).with_name("marshal")
    with (tmp_path / "out").open("wb") as out:
        process = forked.start([path, "--version"], stdout=out, stderr=out)
    assert process.wait(HANG_S) == 0
    assert (tmp_path / "out").read_text().startswith("marshal ")


def test_pipes_reach_a_program_and_close_with_it(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("print('ready', flush=True); print(input()); input()")
    process = forked.start_piped([path])
    assert process.stdout.readline() == "ready\n"
    process.stdin.write("a line\n")
    process.stdin.flush()
    assert process.communicate(HANG_S) == ("a line\n", None)
    assert process.returncode == 1  # it read the end of its input
    assert process.stdin.closed
    assert process.stdout.closed
    assert process.communicate(HANG_S) == ("", None)
