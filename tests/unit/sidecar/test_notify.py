import os
import select
import socket
import threading

import attrs
import pytest

from kafka_marshal.sidecar.health import View
from kafka_marshal.sidecar.notify import EXTEND_MS, Notifier
from kafka_marshal.sidecar.states import Change, State, States
from kafka_marshal.testing.clock import VirtualClock

S = State
WELL = View(
    now_ms=1_000,
    state=S.RUNNING,
    reason="serving",
    since_ms=0,
    has_engine=True,
    round_at_ms=900,
    is_replayed=True,
    heartbeat_interval_ms=3_000,
)


class Manager:
    """What systemd is to a service: a socket for datagrams."""

    def __init__(self, address):
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address[0] == "@" else address)
        self.socket.setblocking(False)

    def heard(self):
        """Return the lines of every datagram that has come."""
        found = []
        while True:
            try:
                found.append(self.socket.recv(4096).decode().split("\n"))
            except BlockingIOError:
                return found

    def fed(self):
        return sum(lines.count("WATCHDOG=1") for lines in self.heard())

    def environ(self, **more):
        return {"NOTIFY_SOCKET": self.address} | more


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    name = f"@marshal-{os.getpid()}-{tmp_path.name}"
    found = Manager(str(tmp_path / "n") if request.param == "path" else name)
    yield found
    found.socket.close()


@pytest.fixture
def watched(manager):
    found = Notifier(manager.environ(WATCHDOG_USEC="60000000"))
    yield found
    found.close()


def but(**changes):
    return attrs.evolve(WELL, **changes)


def test_a_whole_life(manager):
    notifier, states = Notifier(manager.environ()), States(VirtualClock())
    assert notifier.is_active
    states.on_change(notifier.on_change)
    for state, reason in (
        (S.STARTING, "connecting"),
        (S.RECOVERY, "reading"),
        (S.RUNNING, "serving"),
        (S.PENDING_CONTROLLED_SHUTDOWN, "SIGTERM"),
        (S.SHUTTING_DOWN, "drained"),
        (S.NOT_RUNNING, "closed"),
    ):
        states.move(state, reason=reason)
    assert manager.heard() == [
        ["STATUS=STARTING: connecting"],
        ["STATUS=RECOVERY: reading"],
        ["STATUS=RUNNING: serving", "READY=1"],
        ["STATUS=PENDING_CONTROLLED_SHUTDOWN: SIGTERM", "STOPPING=1"],
        ["STATUS=SHUTTING_DOWN: drained", "STOPPING=1"],
        ["STATUS=NOT_RUNNING: closed"],
    ]
    notifier.close()


def test_a_status_is_told_once_and_anew_when_it_changes(manager):
    notifier = Notifier(manager.environ())
    for view in (WELL, WELL, but(held_count=3), but(held_count=3)):
        notifier.look(view)
    assert manager.heard() == [
        ["STATUS=RUNNING: serving"],
        ["STATUS=RUNNING: serving; 3 held"],
    ]
    notifier.close()


def test_a_reason_cannot_forge_a_line(manager):
    notifier = Notifier(manager.environ())
    notifier.look(but(reason="x\nREADY=1\nMAINPID=1"))
    ((line,),) = manager.heard()
    assert line.startswith("STATUS=")
    notifier.close()


@pytest.mark.parametrize("state", [S.RECOVERY, S.PENDING_CONTROLLED_SHUTDOWN])
def test_what_takes_long_asks_for_time(manager, state):
    notifier = Notifier(manager.environ())
    notifier.look(but(state=state))
    ((_, line),) = manager.heard()
    assert line == f"EXTEND_TIMEOUT_USEC={EXTEND_MS * 1000}"
    notifier.close()


def test_beats_feed_the_watchdog_and_time_does_not(manager, watched):
    held = but(held_count=1, beat_at_ms=100)
    watched.look(held)
    assert manager.fed() == 1
    for now_ms in range(1_000, 60_000, 1_000):
        # The loop turns, but nothing that it sends is confirmed.
        watched.look(attrs.evolve(held, now_ms=now_ms, round_at_ms=now_ms))
    assert manager.fed() == 0
    watched.look(attrs.evolve(held, beat_at_ms=200))
    watched.look(attrs.evolve(held, beat_at_ms=200))
    assert manager.fed() == 1


def test_rounds_feed_it_while_nothing_is_held(manager, watched):
    watched.look(but(round_at_ms=1))
    watched.look(but(round_at_ms=2))
    watched.look(but(round_at_ms=2))
    assert manager.fed() == 2
    watched.look(but(round_at_ms=None))
    assert manager.fed() == 0


@pytest.mark.parametrize(
    "sick", [{"failure": "gone"}, {"is_busy": True}], ids=["failed", "hangs"]
)
def test_an_engine_that_fails_or_hangs_feeds_nothing(manager, watched, sick):
    for now_ms in range(3):
        watched.look(but(now_ms=now_ms, round_at_ms=now_ms, **sick))
    assert manager.fed() == 0


@pytest.mark.parametrize(
    "view",
    [
        but(state=S.STARTING, has_engine=False, round_at_ms=None),
        but(state=S.SHUTTING_DOWN, failure="closed"),
        but(state=S.SHUTTING_DOWN, beat_at_ms=7),
    ],
    ids=["no-engine-yet", "no-engine-any-more", "engine-at-rest"],
)
def test_without_an_engine_the_other_limits_count(manager, watched, view):
    watched.look(view)
    watched.look(attrs.evolve(view, now_ms=view.now_ms + 1))
    assert manager.fed() == 2


def test_it_asks_for_three_intervals_where_the_limit_is_shorter(manager):
    notifier = Notifier(manager.environ(WATCHDOG_USEC="10000000"))
    assert notifier.watchdog_ms == 10_000
    notifier.look(but(heartbeat_interval_ms=None))
    notifier.look(WELL)
    assert not any("WATCHDOG_USEC" in line for each in manager.heard() for line in each)
    notifier.look(but(heartbeat_interval_ms=60_000))
    notifier.look(but(heartbeat_interval_ms=60_000))
    lines = [line for each in manager.heard() for line in each]
    assert lines.count("WATCHDOG_USEC=180000000") == 1
    assert notifier.watchdog_ms == 180_000
    notifier.close()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-1"}, None),
        ({"WATCHDOG_USEC": "10"}, 1),
        ({"WATCHDOG_USEC": "5000000"}, 5_000),
        ({"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": str(os.getpid())}, 5_000),
        ({"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": "1"}, None),
    ],
)
def test_the_limit_is_that_of_the_environment(environ, expected):
    assert Notifier(environ).watchdog_ms == expected


@pytest.mark.parametrize(
    "address", ["", "relative", "vsock:2:99", "/nowhere/at/all", "@nobody-is-here"]
)
def test_where_nobody_listens_nothing_happens(address):
    notifier = Notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "5000000"})
    assert not notifier.is_active
    notifier.look(WELL)
    notifier.close()
    notifier.close()


def test_a_manager_that_goes_or_does_not_read_stops_nothing(manager):
    notifier = Notifier(manager.environ(WATCHDOG_USEC="60000000"))
    for number in range(1_000):  # more than a socket's queue takes
        notifier.look(but(round_at_ms=number))
    assert manager.heard()
    manager.socket.close()
    notifier.look(but(round_at_ms=-1))
    notifier.close()


def test_a_change_of_state_waits_for_a_busy_manager(manager):
    notifier = Notifier(manager.environ())
    number = 0
    while select.select([], [notifier._socket], [], 0)[1]:
        notifier.look(but(reason=f"{number}"))
        number += 1
    heard = []
    reader = threading.Timer(0, lambda: heard.extend(manager.heard()))
    reader.start()
    notifier.on_change(Change(S.RECOVERY, S.RUNNING, "serving", 0))
    reader.join(60)
    heard += manager.heard()
    assert heard[-1] == ["STATUS=RUNNING: serving", "READY=1"]
    notifier.close()


def test_the_environment_is_that_of_the_process(manager, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    notifier = Notifier()
    notifier.look(WELL)
    assert manager.heard() == [["STATUS=RUNNING: serving"]]
    notifier.close()
