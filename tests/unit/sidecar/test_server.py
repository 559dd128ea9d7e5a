"""The daemon from its start to its end: states, signals and cleanup."""

import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import attrs
import httpx
import pytest
from daemonkit import INSTANCE, World, eventually, run_undrained
from fakeservice import assigned

from kafka_marshal.config import Membership
from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    LogTruncated,
    TopicMisconfigured,
)
from kafka_marshal.observability import NullObserver
from kafka_marshal.observability.logs import LOGGER_NAME
from kafka_marshal.ports import Event
from kafka_marshal.remote import api, paths
from kafka_marshal.sidecar import requests, server
from kafka_marshal.sidecar.config import Settings
from kafka_marshal.sidecar.group_actions import GroupActions
from kafka_marshal.sidecar.health import State, View
from kafka_marshal.sidecar.requests import make_server


@pytest.fixture
def world(tmp_path, monkeypatch):
    found = World(tmp_path / "own" / "sidecar.sock")
    monkeypatch.setattr(server, "Runtime", found)
    monkeypatch.setattr(server, "SidecarService", found.make_service)
    monkeypatch.setattr(server, "CHECK_S", 0.02)
    return found


def states(caplog):
    found = (re.match(r"sidecar state (\w+): ", line) for line in caplog.messages)
    return [each[1] for each in found if each]


def test_the_server_starts_serves_drains_and_ends(world, caplog):
    caplog.set_level(logging.INFO, LOGGER_NAME)
    world.run(world.wait_ready)
    assert states(caplog) == [
        "STARTING",
        "RECOVERY",
        "RUNNING",
        "PENDING_CONTROLLED_SHUTDOWN",
        "SHUTTING_DOWN",
        "NOT_RUNNING",
    ]
    calls = [each[0] for each in world.service.calls]
    assert calls[0] == "restore"
    assert calls[-2:] == ["start_drain", "close"]
    assert world.done == [("open", 30_000), "stop"]
    assert len(world.observers) == 2
    assert not world.path.exists()
    assert world.given["client_id"] == world.settings.client_id
    assert world.given["state_dir"] is None
    assert world.given["bootstrap_servers"] == ("localhost:9092",)


def test_idle_groups_are_left_while_nobody_registers(world):
    def script():
        world.wait_ready()
        eventually(lambda: world.service.idle_count > 1, "idle groups are left")

    world.run(script)


def test_deaths_of_clients_are_counted(world):
    def script():
        world.wait_ready()
        for reason in ("client_died", "client_silent", "client_died"):
            world.observe(Event("client_gone", {"reason": reason}))
            world.observe(Event("client_silent", {}))
        world.observe(Event("claimed", {}))
        figures = world.get(paths.METRICS).text
        assert "marshal_sidecar_client_deaths_total 2.0" in figures

    world.run(script)


def test_the_server_answers_while_it_connects(world):
    world.hold = threading.Event()

    def script():
        found = eventually(lambda: world.get(paths.LIVEZ), "it listens")
        assert found.status_code == 200
        for place in (paths.READYZ, paths.STARTUPZ, paths.INFO):
            assert world.get(place).status_code == 503
        assert "connecting to localhost:9092" in world.get(paths.INFO).text
        figures = world.get(paths.METRICS).text
        assert 'marshal_sidecar_state{state="STARTING"} 1.0' in figures
        world.hold.set()
        world.wait_ready()
        for place in (paths.LIVEZ, paths.STARTUPZ):
            assert world.get(place).status_code == 200

    world.run(script)


def test_a_daemon_that_reads_the_log_reports_state_recovery(world):
    world.reading = threading.Event()

    def script():
        eventually(
            lambda: (
                "reading the coordination log"
                in getattr(world.get(paths.STARTUPZ), "text", "")
            ),
            "it reads",
        )
        assert world.get(paths.READYZ).json()["state"] == "RECOVERY"
        world.reading.set()
        world.wait_ready()

    world.run(script)


def test_a_signal_while_the_daemon_connects_ends_it_at_once(world, caplog):
    caplog.set_level(logging.INFO, LOGGER_NAME)
    world.hold = threading.Event()
    world.run(lambda: eventually(lambda: world.get(paths.LIVEZ), "it listens"))
    assert states(caplog) == ["STARTING", "SHUTTING_DOWN", "NOT_RUNNING"]
    assert world.service.calls == []
    world.hold.set()


def test_the_switch_interval_is_shorter_while_the_daemon_runs(world):
    before, meanwhile = sys.getswitchinterval(), []
    world.run(lambda: world.wait_ready() or meanwhile.append(sys.getswitchinterval()))
    assert meanwhile[0] < before == sys.getswitchinterval()


def test_an_error_at_the_start_is_raised(world):
    world.fault = CoordinationError("no broker answers on localhost:9092")
    with pytest.raises(CoordinationError, match="no broker answers"):
        server.run(world.settings, NullObserver())
    assert not world.path.exists()
    assert world.done == [("open", 30_000)]


def test_a_misconfigured_topic_ends_the_daemon(world):
    world.topic_fault = TopicMisconfigured("settings that break the guarantees")
    with pytest.raises(TopicMisconfigured):
        server.run(world.settings, NullObserver())
    assert world.done[-1] == "stop"
    assert world.service.calls == []


def test_a_failed_engine_ends_the_daemon(world, caplog):
    caplog.set_level(logging.INFO, LOGGER_NAME)
    ended = threading.Event()

    def fail():
        world.wait_ready()
        world.engine.failure = LogTruncated("the log went back")
        ended.set()

    thread = threading.Thread(target=fail, daemon=True)
    thread.start()
    with pytest.raises(LogTruncated, match="went back"):
        server.run(world.settings, NullObserver())
    thread.join(30)
    # Without an engine nothing can be released, so clients are not asked to.
    assert "PENDING_CONTROLLED_SHUTDOWN" not in states(caplog)
    assert ("start_drain",) not in world.service.calls
    assert world.done[-1] == "stop"


def test_an_unexpected_end_of_the_http_server_is_raised(world, monkeypatch):
    def broken(app, *, connections_max, socket_gid):
        made = make_server(app, connections_max=connections_max, socket_gid=socket_gid)
        monkeypatch.setattr(made, "serve", fail)
        return made

    async def fail(sockets):
        raise OSError("out of files")

    monkeypatch.setattr(requests, "make_server", broken)
    with pytest.raises(CoordinationError, match=r"ended unexpectedly .out of files"):
        server.run(world.settings, NullObserver())
    assert world.done[-1] == "stop"


def test_the_removal_of_the_socket_ends_the_daemon(world):
    def remove():
        world.wait_ready()
        world.settings.socket.unlink()

    thread = threading.Thread(target=remove, daemon=True)
    thread.start()
    with pytest.raises(CoordinationError, match="was removed or replaced"):
        server.run(world.settings, NullObserver())
    thread.join(30)
    assert world.done[-1] == "stop"


def test_a_failed_check_is_logged_and_repeated(world, monkeypatch, caplog):
    looked = threading.Semaphore(0)

    def look(notifier, view):
        looked.release()
        raise RuntimeError("blind")

    def script():
        world.wait_ready()
        for _ in range(3):
            assert looked.acquire(timeout=30)

    monkeypatch.setattr(server.SystemdNotifier, "update", look)
    world.run(script)
    assert "monitoring the sidecar failed" in caplog.text


def test_a_drain_waits_for_clients(world):
    world.service.is_drained = False
    received = []

    def script():
        world.wait_ready()
        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        eventually(lambda: "snapshot" in received, "the stream stands")
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: ("start_drain",) in world.service.calls, "it drains")
        assert world.get(paths.READYZ).status_code == 503
        assert "PENDING_CONTROLLED_SHUTDOWN" in world.get(paths.READYZ).text
        world.service.feeds[-1].push(assigned())
        eventually(lambda: "assigned" in received, "streams go on")
        world.service.is_drained = True
        thread.join(30)
        assert not thread.is_alive()

    def listen():
        place = paths.EVENTS.format(group="g", client="c")
        headers = {api.INSTANCE_HEADER: INSTANCE}
        with (
            world.client() as client,
            client.stream("GET", place, headers=headers) as response,
        ):
            received.extend(
                line.removeprefix("event: ")
                for line in response.iter_lines()
                if line.startswith("event: ")
            )
        received.append("end")

    thread = threading.Thread(target=script, daemon=True)
    thread.start()
    server.run(world.settings, NullObserver())
    thread.join(30)
    assert received == ["snapshot", "assigned", "end"]


def test_clients_continue_while_partitions_are_handed_off(world, caplog):
    world.service.is_handed_off = False

    def script():
        world.wait_ready()
        os.kill(os.getpid(), signal.SIGTERM)
        begun = ("start_handoff", world.settings.drain_ms + server.CLOSE_MS)
        eventually(lambda: begun in world.service.calls, "it hands off")
        assert "PENDING_CONTROLLED_SHUTDOWN" in world.get(paths.READYZ).text
        assert ("start_drain",) not in world.service.calls
        world.service.is_handed_off = True
        eventually(lambda: ("start_drain",) in world.service.calls, "it drains")

    thread = threading.Thread(target=script, daemon=True)
    thread.start()
    server.run(world.settings, NullObserver())
    thread.join(30)
    assert "other hosts did not take over" not in caplog.text


@pytest.mark.parametrize(("handoff_ms", "is_tried"), [(60, True), (0, False)])
def test_a_handoff_has_a_deadline(world, caplog, handoff_ms, is_tried):
    world.service.is_handed_off = False
    world.settings = attrs.evolve(world.settings, handoff_ms=handoff_ms)
    world.run(world.wait_ready)
    calls = [each[0] for each in world.service.calls]
    assert ("start_handoff" in calls) == is_tried
    assert calls[-2:] == ["start_drain", "close"]
    assert ("other hosts did not take over" in caplog.text) == is_tried


def test_with_restarts_no_partitions_are_handed_off(world):
    world.service.is_handed_off = False
    member = Membership(restarts=True)
    world.settings = attrs.evolve(world.settings, member=member)
    world.run(world.wait_ready)
    calls = [each[0] for each in world.service.calls]
    assert calls[-2:] == ["start_drain", "close"]
    assert "start_handoff" not in calls
    assert world.given["member"] == member


def test_a_drain_has_a_deadline(world, caplog):
    world.service.is_drained = False
    world.settings = Settings(socket=world.path, drain_ms=60, state_dir="")
    world.run(world.wait_ready)
    assert "clients did not release all partitions within drain-timeout" in caplog.text
    assert world.service.calls[-1] == ("close", server.CLOSE_MS)


def test_without_time_for_a_drain_no_release_is_missed_that_has_happened(world, caplog):
    world.settings = Settings(socket=world.path, drain_ms=0, state_dir="")
    world.run(world.wait_ready)
    assert "clients did not release" not in caplog.text


def test_a_second_signal_ends_the_daemon_at_once(world):
    """In a process of its own, which the second signal ends."""
    process = multiprocessing.get_context("spawn").Process(
        target=run_undrained, args=(world.path,)
    )
    process.start()
    try:
        world.wait_ready()
        os.kill(process.pid, signal.SIGTERM)
        eventually(lambda: "PENDING" in world.get(paths.READYZ).text, "it drains")
        os.kill(process.pid, signal.SIGTERM)
        process.join(30)
        assert process.exitcode == -signal.SIGTERM
    finally:
        process.kill()
        process.join(30)


def test_sighup_is_ignored(world, caplog):
    caplog.set_level(logging.INFO, LOGGER_NAME)

    def script():
        world.wait_ready()
        os.kill(os.getpid(), signal.SIGHUP)
        eventually(lambda: "ignoring SIGHUP" in caplog.text, "it is logged")
        world.wait_ready()

    world.run(script)


def test_a_second_sidecar_on_a_socket_is_refused(world):
    def script():
        world.wait_ready()
        with pytest.raises(ConfigurationError, match="in use by a living sidecar"):
            server.run(world.settings, NullObserver())
        world.wait_ready()

    world.run(script)


def test_tcp_is_served_with_its_token(world, tmp_path, caplog):
    caplog.set_level(logging.INFO, LOGGER_NAME)
    token = tmp_path / "token"
    world.settings = Settings(
        socket=world.path, tcp="127.0.0.1:0", token_file=token, state_dir=""
    )

    def script():
        world.wait_ready()
        (line,) = [m for m in caplog.messages if "also listens" in m]
        port = re.search(r"\d{4,5}", line)[0]
        url = f"http://127.0.0.1:{port}{paths.INFO}"
        assert httpx.get(url, timeout=30).status_code == 401
        headers = {"authorization": f"Bearer {token.read_text().strip()}"}
        assert httpx.get(url, headers=headers, timeout=30).status_code == 200

    world.run(script)


@pytest.mark.parametrize("name", ["starlette", "uvicorn", "prometheus_client"])
def test_a_missing_extra_is_named(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=r"kafka-marshal\[sidecar\]"):
        server.require_extra()


def test_readiness_is_logged_when_it_changes(tmp_path, caplog):
    daemon = server.Daemon(Settings(socket=tmp_path / "s"), NullObserver())
    ready = View(
        now_ms=1_000,
        state=State.RUNNING,
        reason="serving",
        since_ms=0,
        is_replayed=True,
    )
    away = attrs.evolve(ready, held_count=1, overdue=("t-0 of group g",))
    stopping = attrs.evolve(away, state=State.SHUTTING_DOWN)
    with caplog.at_level(logging.INFO, logger=LOGGER_NAME):
        for view in (ready, ready, away, away, stopping, away, ready, ready):
            daemon._log_readiness(view)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("sidecar not ready: 1 of 1 claims were not renewed in time")
    assert second == "sidecar ready again"


def test_the_shutdown_waits_for_an_action_and_starts_no_other(world, monkeypatch):
    world.settings = attrs.evolve(world.settings, allow_admin=True)
    entered, found = threading.Event(), []

    class SlowAdmin:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            found.append("closed")

        def finish(self, group, *, reason):
            entered.set()
            calls = world.service.calls
            eventually(lambda: ("start_drain",) in calls, "the end has begun")
            with world.client() as client:
                found.append(client.post("/v1/groups/other/finish").status_code)
            assert ("close", server.CLOSE_MS) not in calls
            return ()

    monkeypatch.setattr(server, "GroupActions", partial(GroupActions, admin=SlowAdmin))

    def finish():
        with world.client() as client:
            return client.post("/v1/groups/g/finish")

    with ThreadPoolExecutor(1) as pool:

        def script():
            world.wait_ready()
            future = pool.submit(finish)
            assert entered.wait(30)
            return future

        answers = []
        world.run(lambda: answers.append(script()))
        response = answers[0].result(30)
    assert response.json() == {"group": "g", "operations": []}
    assert found == [503, "closed"]


def test_an_action_that_hangs_does_not_delay_the_shutdown(world, monkeypatch):
    world.settings = attrs.evolve(world.settings, allow_admin=True, drain_ms=1)
    made, entered, hold = [], threading.Event(), threading.Event()

    class HangingAdmin:
        def __init__(self, *_, **__):
            entered.set()
            assert hold.wait(60)
            raise CoordinationError("no broker")

    def make(*arguments, **given):
        made.append(GroupActions(*arguments, admin=HangingAdmin, **given))
        return made[0]

    monkeypatch.setattr(server, "GroupActions", make)

    def finish():
        with world.client() as client, suppress(httpx.TransportError):
            client.post("/v1/groups/g/finish")

    with ThreadPoolExecutor(1) as pool:

        def script():
            world.wait_ready()
            pool.submit(finish)
            assert entered.wait(30)

        world.run(script)
        assert made[0].runner.is_busy
        hold.set()
