"""The launcher and its fork server: what runs in a fork, and what does not.

A driver is a process that starts launchers as Spark does. A module that this test
writes takes the place of Spark's planner.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from slowness import until

from kafka_marshal.spark import launcher
from kafka_marshal.spark.forkserver import is_alive

RUN_S = 300
DRIVER = """
import json, os, signal, subprocess, sys
CODE = "from kafka_marshal.spark import launcher; launcher.run_forked('planner')"

def launcher(code=CODE, **more):
    return subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | more, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

def launched(**more):
    out, err = launcher(**more).communicate("asked")
    return {**json.loads(out), "err": err}
"""
PLANNER = """
import json, os, sys, time
known = getattr(sys, "known", 0)
sys.known = known + 1
if __name__ == "__main__":
    port = os.environ.get("PYTHON_WORKER_FACTORY_PORT")
    blas = os.environ.get("OPENBLAS_NUM_THREADS")
    told = {"pid": os.getpid(), "server": os.getppid(), "port": port, "known": known}
    told["blas"] = blas
    print(json.dumps(told | {"argv": sys.argv, "asked": sys.stdin.readline()}))
    print("told", file=sys.stderr)
    sys.stdout.flush()
    while "PYTHON_WORKER_FACTORY_WAITS" in os.environ:
        time.sleep(600)
    if "PYTHON_WORKER_FACTORY_READS" in os.environ:
        sys.stdin.read()
        print("ended in order")
"""


@pytest.fixture
def home(monkeypatch, tmp_path):
    """The folder of servers' sockets; their paths must be short."""
    (tmp_path / "planner.py").write_text(PLANNER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    base = Path("/tmp", f"km-{os.urandom(4).hex()}")
    base.mkdir(mode=0o700)
    monkeypatch.setenv("TMPDIR", str(base))
    home = base / f"marshal-spark-{os.getuid()}"
    yield home
    # A server ends with its driver, and removes its socket.
    until(lambda: not home.is_dir() or not list(home.iterdir()), "end of the servers")
    shutil.rmtree(base)


def driver(code):
    """Run a driver, and return what it printed last."""
    command = [sys.executable, "-c", DRIVER + code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def test_a_fork_has_the_streams_and_the_environment_of_its_launcher(home):
    found = driver(
        """
print(json.dumps([launched(PYTHON_WORKER_FACTORY_PORT=str(n)) for n in (1, 2)]))
"""
    )
    assert [each["port"] for each in found] == ["1", "2"]
    assert [each["asked"] for each in found] == ["asked", "asked"]
    assert [each["err"] for each in found] == ["told\n", "told\n"]
    assert all(each["argv"][0].endswith("planner.py") for each in found)


def test_a_fork_has_an_environment_of_any_size(home):
    """Larger than the buffer of a socket, as one with the class path of Hadoop."""
    found = driver(
        """
print(json.dumps(launched(**{f"PATHS_{n}": "x" * 100_000 for n in range(8)})))
"""
    )
    assert (found["asked"], found["known"]) == ("asked", 0)


def test_planners_of_one_driver_and_environment_share_one_server(home):
    found = driver(
        """
print(json.dumps([launched(), launched(), launched(OTHER="1")]))
"""
    )
    servers = [each["server"] for each in found]
    assert servers[0] == servers[1] != servers[2]
    # No fork changes the state of the next one.
    assert [each["known"] for each in found] == [0, 0, 0]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="no /proc here")
def test_a_server_has_one_thread_and_passes_no_blas_limit_to_forks(home):
    found = driver(
        """
from pathlib import Path

told = launched()
threads = [each.name for each in Path(f"/proc/{told['server']}/task").iterdir()]
print(json.dumps(told | {"threads": len(threads)}))
"""
    )
    assert found["threads"] == 1
    assert found["blas"] is None


def test_a_server_ends_with_its_driver(home):
    found = driver("print(json.dumps(launched()))")
    until(lambda: not is_alive(found["server"]), "end of the server")
    assert not list(home.iterdir())


def test_a_server_that_is_idle_ends_and_removes_its_socket(home):
    found = driver(
        """
import socket
from kafka_marshal.spark import forkserver

path, out = os.environ["TMPDIR"] + "/idle", os.dup(1)
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(path)
    listener.listen()
    ended = forkserver.serve(listener, lambda: True, idle_s=0.5)
os.write(out, json.dumps([ended, os.path.exists(path)]).encode())
"""
    )
    assert found == [None, False]


def test_a_new_server_replaces_one_that_was_killed(home):
    found = driver(
        """
import time
from kafka_marshal.spark.forkserver import is_alive

first = launched()
os.kill(first["server"], signal.SIGKILL)
while is_alive(first["server"]):  # it has its socket for as long
    time.sleep(0.01)
print(json.dumps([first, launched()]))
"""
    )
    assert found[0]["server"] != found[1]["server"]


def test_a_launcher_passes_sigterm_to_its_fork_and_exits_with_it(home):
    found = driver(
        """
process = launcher(PYTHON_WORKER_FACTORY_WAITS="1")
process.stdin.write("asked\\n")
process.stdin.flush()
told = json.loads(process.stdout.readline())
process.terminate()
process.communicate()
print(json.dumps(told | {"code": process.returncode}))
"""
    )
    assert found["code"] == 0
    until(lambda: not is_alive(found["pid"]), "end of the fork")


def test_a_fork_that_ends_by_itself_gets_no_sigterm(home):
    """Spark also closes its connection to the fork."""
    found = driver(
        """
code = CODE.replace(";", "; launcher.TERMINATE_AFTER_S = 600;")
process = launcher(code, PYTHON_WORKER_FACTORY_READS="1")
process.stdin.write("asked\\n")
process.stdin.flush()
told = json.loads(process.stdout.readline())
process.terminate()
rest, _ = process.communicate()
print(json.dumps(told | {"code": process.returncode, "rest": rest}))
"""
    )
    assert (found["code"], found["rest"]) == (0, "ended in order\n")


def test_programs_other_than_the_planner_run_without_a_fork(home):
    code = "from kafka_marshal.spark.launcher import main; main()"
    command = [sys.executable, "-c", code, "-c", "import sys; print(sys.argv)", "x"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_S, check=True
    )
    assert done.stdout == "['-c', 'x']\n"
    assert not home.exists()


def test_a_planner_runs_without_a_fork_if_no_server_can_start(home, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/nowhere")
    code = "from kafka_marshal.spark import launcher; launcher.PLANNER = 'planner'; "
    command = [sys.executable, "-c", code + "launcher.main()", "-m", "planner"]
    done = subprocess.run(
        command, input="", capture_output=True, text=True, timeout=RUN_S, check=True
    )
    assert json.loads(done.stdout)["server"] == os.getpid()


def test_a_socket_folder_open_to_other_users_is_refused(home):
    home.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="others can use it"):
        launcher.address()
