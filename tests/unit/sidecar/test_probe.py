"""The probe: one request over the Unix socket, with the standard library alone."""

import os
import resource
import socket
import subprocess
import sys
import threading

import pytest
from slices import HANG_S

from kafka_marshal.sidecar import probe
from kafka_marshal.sidecar.config import Settings

SLOW = {"typing", "re", "json", "http.client", "importlib.metadata", "pathlib"}


@pytest.fixture
def answering(tmp_path):
    """Return a function that starts a server of one answer and returns its path."""
    path, asked, threads = str(tmp_path / "s.sock"), [], []

    def start(answer):
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(path)
        listening.listen()

        def serve():
            with listening, listening.accept()[0] as connection:
                connection.settimeout(30)
                asked.append(connection.recv(65_536))
                if answer is None:
                    connection.recv(1)  # until the probe closes the connection
                else:
                    connection.sendall(answer)

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return path

    start.asked = asked  # type: ignore[attr-defined]
    yield start
    for each in threads:
        each.join(30)
        assert not each.is_alive()


def run(monkeypatch, *arguments, socket_setting=None):
    monkeypatch.setattr(sys, "argv", ["marshal-probe", *arguments])
    monkeypatch.delenv("MARSHAL_SIDECAR_SOCKET", raising=False)
    if socket_setting is not None:
        monkeypatch.setenv("MARSHAL_SIDECAR_SOCKET", socket_setting)
    with pytest.raises(SystemExit) as ended:
        probe.main()
    return ended.value.code


YES = b'HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n{"ok":true}'
NO = b'HTTP/1.1 503 Service Unavailable\r\n\r\n{"ok":false}'


@pytest.mark.parametrize(
    ("check", "place"),
    [("live", b"/livez"), ("ready", b"/readyz"), ("started", b"/startupz")],
)
def test_each_check_requests_its_own_path(answering, monkeypatch, capsys, check, place):
    path = answering(YES)
    assert run(monkeypatch, check, socket_setting=path) == 0
    assert answering.asked[0].startswith(b"GET " + place + b" HTTP/1.1\r\n")
    assert capsys.readouterr().out == '{"ok":true}\n'


def test_a_failing_check_exits_with_3_and_prints_the_response(
    answering, monkeypatch, capsys
):
    assert run(monkeypatch, "ready", answering(NO)) == 3
    assert capsys.readouterr().out == '{"ok":false}\n'


@pytest.mark.parametrize("answer", [b"", b"nonsense", b"HTTP/1.1 x\r\n\r\n", None])
def test_a_missing_or_invalid_response_is_reported(
    answering, monkeypatch, capsys, answer
):
    monkeypatch.setattr(probe.ask, "__kwdefaults__", {"timeout_s": 0.2})
    path = answering(answer)
    assert run(monkeypatch, "live", path) == 5
    message = capsys.readouterr().err
    assert f"no sidecar answers on {path!r}" in message
    assert "marshal sidecar run" in message


def test_a_missing_sidecar_is_reported(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "live", str(tmp_path / "none")) == 5
    assert run(monkeypatch, "live", "/" + "x" * 200) == 5
    assert "no sidecar answers" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [(), ("well",), ("live", "a", "b")])
def test_invalid_arguments_print_the_usage(monkeypatch, capsys, arguments):
    assert run(monkeypatch, *arguments) == 2
    assert capsys.readouterr().err.startswith("usage: marshal-probe")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_prints_the_usage_and_exits_with_0(monkeypatch, capsys, flag):
    assert run(monkeypatch, flag) == 0
    assert capsys.readouterr().out.startswith("usage: marshal-probe")


def test_the_default_socket_is_that_of_the_sidecar(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert probe.default_socket() == str(Settings().socket)


def test_the_probe_imports_no_package_and_no_slow_module():
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import kafka_marshal.sidecar.probe\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    # Without site, whose .pth files import what they like.
    found = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    names = set(found.stdout.split())
    ours = {name for name in names if name.startswith("kafka_marshal")}
    assert ours == {
        *("kafka_marshal", "kafka_marshal.sidecar", "kafka_marshal.sidecar.probe"),
        "kafka_marshal.unix_sockets",
    }
    assert {name.split(".")[0] for name in names - ours} <= sys.stdlib_module_names
    assert not names & SLOW


def test_the_probe_costs_little_more_than_a_bare_interpreter(tmp_path):
    def cpu_s(*arguments):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, *arguments],
            timeout=HANG_S,
            check=False,
            capture_output=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    place = str(tmp_path / "none")
    asked = ("-m", "kafka_marshal.sidecar.probe", "live", place)
    # The least CPU time of five runs, which other processes hardly affect. The
    # command marshal takes forty times as long as a bare interpreter.
    bare = min(cpu_s("-c", "") for _ in range(5))
    assert min(cpu_s(*asked) for _ in range(5)) < 8 * bare
