"""`marshal sidecar`: settings, and queries to a running sidecar."""

import json
import os
import re
import signal
import socketserver
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import get_args

import pytest
from daemonkit import World, eventually
from typer.testing import CliRunner

from kafka_marshal.config import Membership
from kafka_marshal.errors import CoordinationError
from kafka_marshal.remote.api import EventBody
from kafka_marshal.sidecar import server
from kafka_marshal.sidecar.routes import ROUTES
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.claiming_options import MEMBER
from kafka_marshal_cli.commands.sidecar import DAEMON
from kafka_marshal_cli.exits import ExitCode
from kafka_marshal_cli.profiles import SETTINGS

OPTIONS_ENV = {
    get_args(kind)[1].envvar
    for group in (DAEMON, MEMBER)
    for kind, _ in group.options.values()
}


@pytest.fixture
def world(tmp_path, monkeypatch):
    found = World(tmp_path / "own" / "sidecar.sock")
    monkeypatch.setattr(server, "Runtime", found)
    monkeypatch.setattr(server, "SidecarService", found.make_service)
    monkeypatch.setattr(server, "CHECK_S", 0.02)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MARSHAL_SIDECAR_SOCKET", str(found.path))
    monkeypatch.setenv("COLUMNS", "200")
    return found


def invoke(*arguments, **env):
    return CliRunner().invoke(app, ["sidecar", *arguments], env=env)


@pytest.fixture
def asked(world):
    """Run the daemon by its command on this thread, and a script on another."""

    def run(script, *arguments, **env):
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(lambda: (world.wait_ready(), script())[1])
            future.add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGTERM))
            outcome = invoke("run", *arguments, **env)
            return outcome, future.result(30)

    return run


def test_status_of_a_running_sidecar_is_shown(asked, world):
    outcome, (table, document, live) = asked(
        lambda: (
            invoke("status"),
            invoke("status", "-o", "json", "--check", "started"),
            invoke("status", "--check", "live", MARSHAL_SIDECAR_SOCKET=str(world.path)),
        )
    )
    assert outcome.exit_code == 0
    assert "sidecar" in outcome.stderr
    assert "listens on" in outcome.stderr
    assert {table.exit_code, document.exit_code, live.exit_code} == {0}
    assert "state:" in table.stdout
    found = json.loads(document.stdout)
    assert (found["state"], found["client_id"]) == ("RUNNING", "host-a")
    assert [row["check"] for row in found["checks"]] == ["live", "ready", "started"]


def test_a_failed_check_exits_as_refused(asked, world):
    # The log has not been read, so the sidecar is not ready.
    _, outcome = asked(lambda: invoke("status", "--check", "ready"))
    assert outcome.exit_code == ExitCode.REFUSED
    assert "not read to its end" in outcome.stdout


def test_clients_of_a_running_sidecar_are_listed(asked):
    _, (table, lines) = asked(
        lambda: (invoke("clients"), invoke("clients", "-o", "jsonl"))
    )
    assert "orders-0" in table.stdout
    assert "orders-1" in table.stdout
    (client,) = map(json.loads, lines.stdout.splitlines())
    assert (client["group_id"], client["client_id"], client["pid"]) == ("g", "c", 7)


def test_a_missing_sidecar_is_reported(world):
    for command in (["status"], ["clients"], ["status", "--check", "live"]):
        outcome = invoke(*command)
        assert outcome.exit_code == ExitCode.TIMEOUT
        assert f"no sidecar answers on '{world.path}'" in outcome.stderr
        assert "marshal sidecar run" in outcome.stderr


@pytest.mark.parametrize(
    ("status", "body"), [(404, '{"message": "page not found"}'), (200, "[1]")]
)
def test_another_program_on_the_socket_is_no_sidecar(tmp_path, status, body):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.wfile.write(f"HTTP/1.0 {status} X\r\n\r\n{body}".encode())

    path = str(tmp_path / "other.sock")
    with socketserver.UnixStreamServer(path, Other) as other:
        for command in ("status", "clients"):
            with ThreadPoolExecutor(1) as pool:
                pool.submit(other.handle_request)
                outcome = invoke(command, "--socket", path)
            assert outcome.exit_code == ExitCode.TIMEOUT
            assert f"another program answers, with status {status}" in outcome.stderr


@pytest.mark.parametrize("command", ["status", "run"])
def test_a_socket_of_an_unknown_user_is_wrong_usage(world, command):
    outcome = invoke(command, "--socket", "~nosuch/x.sock")
    assert outcome.exit_code == ExitCode.USAGE
    assert (
        "--socket '~nosuch/x.sock' begins with ~, which names no home" in outcome.stderr
    )


def test_a_connecting_sidecar_has_a_status_but_no_clients(world):
    world.hold = threading.Event()

    def script():
        eventually(lambda: world.get("/livez"), "it listens")
        try:
            return invoke("status"), invoke("clients")
        finally:
            world.hold.set()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(script)
        future.add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGTERM))
        assert invoke("run").exit_code == 0
        status, clients = future.result(30)
    assert status.exit_code == 0
    assert "STARTING" in status.stdout
    assert clients.exit_code == ExitCode.TIMEOUT
    assert "not ready: STARTING, connecting to" in clients.stderr


def test_options_override_settings_of_a_profile(asked, world, tmp_path):
    config = tmp_path / "marshal.toml"
    config.write_text(
        f"""
        [default]
        bootstrap-server = "broker-1:9092"
        client-id = "host-7"
        state-dir = "{tmp_path}"
        drain-timeout = "7s"
        handoff-timeout = "2s"
        labels = ["rack=r1"]
        restarts = true
        socket = "{tmp_path}/ignored.sock"
        [profiles.json]
        log-format = "json"
        """
    )
    outcome, _ = asked(
        lambda: None,
        *("--config", str(config), "--profile", "json", "--client-id", "host-8"),
    )
    assert outcome.exit_code == 0, outcome.stderr
    assert world.given["client_id"] == "host-8"
    assert world.given["state_dir"] == tmp_path
    assert world.given["bootstrap_servers"] == ("broker-1:9092",)
    assert world.given["member"] == Membership(labels={"rack": "r1"}, restarts=True)
    lines = [json.loads(line) for line in outcome.stderr.splitlines()]
    assert any("clients have 7000 ms" in line["event"] for line in lines)


def test_config_show_lists_the_settings_of_a_sidecar(tmp_path):
    config = tmp_path / "marshal.toml"
    config.write_text('[default]\ntcp = "127.0.0.1:1"\n')
    arguments = ["config", "show", "--config", str(config), "-o", "json"]
    outcome = CliRunner().invoke(app, arguments, env={"MARSHAL_SIDECAR_SOCKET": "/s"})
    rows = {
        row["setting"]: (row["value"], row["origin"])
        for row in json.loads(outcome.stdout)["settings"]
    }
    assert rows["socket"] == ("/s", "environment MARSHAL_SIDECAR_SOCKET")
    assert rows["tcp"] == ("127.0.0.1:1", f"{config} [default]")
    assert rows["drain-timeout"] == ("20s", "default")
    assert rows["handoff-timeout"] == ("10s", "default")
    assert rows["checkpoint-interval"] == ("5m", "default")
    assert rows["log-format"] == ("text", "default")
    assert rows["allow-admin"] == ("false", "default")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('sockte = "/x"', "'sockte' is unknown; did you mean 'socket'?"),
        ('tcp = "0.0.0.0:7070"', "which other hosts can reach"),
        ('socket = "/' + "x" * 200 + '"', "longer than the 107 bytes"),
        ('client-id = "a b"', "no valid name"),
        ("socket = {}", "must be a string"),
        ('labels = "weight=2"', "label 'weight' is announced by the engine itself"),
        ('drain-timeout = "soon"', "is 'soon', which is not a duration"),
        ('checkpoint-interval = "-1s"', "which is not a duration"),
        ('checkpoint-interval = "1ms"', "at least 1000 ms"),
    ],
)
def test_an_error_in_the_profile_file_names_file_and_key(
    world, tmp_path, text, expected
):
    config = tmp_path / "marshal.toml"
    config.write_text(f"[default]\ntoken-file = '{tmp_path}/token'\n{text}\n")
    env = {} if "socket =" not in text else {"MARSHAL_SIDECAR_SOCKET": None}
    outcome = invoke("run", "--config", str(config), **env)
    assert outcome.exit_code == ExitCode.USAGE
    words = " ".join(outcome.stderr.replace("│", " ").split())
    assert expected in words
    assert f"{config} [default]" in words
    assert text.partition(" ")[0].replace("-", "_") in words.replace("-", "_")
    assert world.done == []


@pytest.mark.parametrize("name", ["starlette", "uvicorn", "prometheus_client"])
def test_a_missing_package_is_reported_with_the_extra(world, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    outcome = invoke("run")
    assert outcome.exit_code == ExitCode.USAGE
    assert "pip install 'kafka-marshal[sidecar]'" in outcome.stderr
    assert not world.path.exists()


def test_an_unreachable_broker_is_reported_without_a_traceback(world):
    world.fault = CoordinationError("no broker answers on localhost:9092")
    outcome = invoke("run")
    assert outcome.exit_code == ExitCode.TIMEOUT
    assert "marshal: no broker answers on localhost:9092" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_a_running_sidecar_on_the_socket_is_reported(asked):
    _, outcome = asked(lambda: invoke("run"))
    assert outcome.exit_code == ExitCode.USAGE
    assert f"in use by a living sidecar (process {os.getpid()})" in outcome.stderr


def test_openapi_prints_the_description_of_the_api():
    outcome = invoke("openapi")
    assert outcome.exit_code == 0
    assert json.loads(outcome.stdout)["openapi"] == "3.1.0"


# --- docs/SIDECAR.md

DOCUMENTS = Path(__file__).resolve().parents[4] / "docs"
DOCUMENT = (DOCUMENTS / "SIDECAR.md").read_text()


def test_the_reference_has_the_settings_of_the_command():
    """docs/SIDECAR.md refers to the reference for most settings."""
    reference = (DOCUMENTS / "cli.md").read_text()
    _, found, rest = reference.partition("### `marshal sidecar run`\n")
    assert found
    section = rest.partition("\n#")[0]
    own = [each for each in SETTINGS if each.envvar in OPTIONS_ENV]
    assert len(own) > 10
    for each in own:
        assert f"`--{each.key}`" in section
        row = rf"^- `--{each.key}`.* \(.*`{each.envvar}`\): "
        assert re.search(row, reference, re.MULTILINE), each.key


def test_the_document_has_the_events_of_the_api():
    _, found, rest = DOCUMENT.partition("<!-- list: events of the sidecar -->\n")
    assert found
    heads = re.findall(r"^- (`.+?):", rest.partition("\n\n")[0], re.MULTILINE)
    listed = {name for head in heads for name in re.findall("`([^`]+)`", head)}
    assert listed == {each.__struct_config__.tag for each in get_args(EventBody)}


def test_the_document_has_the_actions_of_the_api():
    _, _, section = DOCUMENT.partition("\n## Acting on groups\n")
    listed = section.partition("\n```")[0]
    for route in ROUTES:
        if route.is_admin:
            name = route.path.removeprefix("/v1/groups/{group}")
            assert re.search(rf"`({route.method} /v1/groups/{{group}})?{name}`", listed)


@pytest.mark.parametrize(
    ("text", "expected"), [("allow-admin = true", True), ("", False)]
)
def test_actions_on_groups_are_allowed_by_a_setting(
    asked, world, tmp_path, text, expected
):
    config = tmp_path / "marshal.toml"
    config.write_text(f"[default]\n{text}\n")

    def finish():
        with world.client() as client:
            return client.post("/v1/groups/a%20b/finish").status_code

    # The group's name is invalid, so that nothing connects to Kafka.
    outcome, status = asked(finish, "--config", str(config))
    assert outcome.exit_code == 0, outcome.stderr
    assert status == (400 if expected else 403)
