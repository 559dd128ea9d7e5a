"""Tells systemd how the sidecar is (sd_notify(3)): ready, status, alive, stopping.

A few datagrams to the socket that ``NOTIFY_SOCKET`` names; without it, nothing. The
watchdog is not fed by a timer, which would go on beside an engine that hangs, but by
what the sidecar is for: a heartbeat that the log confirmed, or, while nothing is
held, a round of the engine.
"""

import os
import select
import socket
from collections.abc import Mapping

from kafka_marshal.observability.text import escaped
from kafka_marshal.sidecar.health import View
from kafka_marshal.sidecar.states import Change, State

# What is held without a confirmed beat is over after 2H, and then rounds feed: one
# more interval, and an outage of the brokers alone never ends in a restart.
WATCHDOG_INTERVALS = 3
# Reading a long log, or waiting for clients to let go, may outlast the unit's limits.
EXTEND_MS = 30_000
WAIT_S_MAX = 1
US_PER_MS = 1_000

_ENDING = frozenset({State.PENDING_CONTROLLED_SHUTDOWN, State.SHUTTING_DOWN})
_SLOW = frozenset({State.RECOVERY, State.PENDING_CONTROLLED_SHUTDOWN})


class Notifier:
    """Tells whoever started this process how it is. Thread-safe.

    A change of state waits for a manager that is busy, for a second at most, because
    it is told once; everything else does not wait.

    ``on_change`` is for ``States.on_change``; ``look`` is to be called about once a
    second, on any one thread.

    Args:
        environ: Where ``NOTIFY_SOCKET``, ``WATCHDOG_USEC`` and ``WATCHDOG_PID``
            stand; the environment of the process where None.

    Attributes:
        watchdog_ms: How long systemd waits between two signs of life, None where it
            does not watch.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        found = os.environ if environ is None else environ
        self.watchdog_ms = _watchdog_ms(found)
        self._socket = _connected(found.get("NOTIFY_SOCKET", ""))
        self._fed_for: tuple[str, int] | None = None
        self._status = ""

    @property
    def is_active(self) -> bool:
        """Return whether there is anybody to tell."""
        return self._socket is not None

    def on_change(self, change: Change) -> None:
        """Tell a change of state."""
        lines = [self._status_line(change.after, change.reason)]
        if change.after is State.RUNNING:
            lines.append("READY=1")
        elif change.after in _ENDING:
            lines.append("STOPPING=1")
        if self._socket is not None:
            select.select([], [self._socket], [], WAIT_S_MAX)
        self._send(lines)

    def look(self, view: View) -> None:
        """Tell what changed: the reason of a state, and a sign of life where due."""
        lines = []
        status = self._status_line(view.state, view.reason, view)
        if status != self._status:
            lines.append(status)
            self._status = status
        if view.state in _SLOW:
            lines.append(f"EXTEND_TIMEOUT_USEC={EXTEND_MS * US_PER_MS}")
        lines += self._feed(view)
        self._send(lines)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        found, self._socket = self._socket, None
        if found is not None:
            found.close()

    def _feed(self, view: View) -> list[str]:
        if self.watchdog_ms is None:
            return []
        lines = self._stretch(view)
        sign = _sign_of_life(view)
        if sign is not None and sign != self._fed_for:
            self._fed_for = sign
            lines.append("WATCHDOG=1")
        return lines

    def _stretch(self, view: View) -> list[str]:
        """Ask for more time where H is longer than the unit's author thought."""
        interval_ms = view.heartbeat_interval_ms
        least_ms = WATCHDOG_INTERVALS * (interval_ms or 0)
        if self.watchdog_ms is None or self.watchdog_ms >= least_ms:
            return []
        self.watchdog_ms = least_ms
        return [f"WATCHDOG_USEC={least_ms * US_PER_MS}"]

    def _status_line(self, state: State, reason: str, view: View | None = None) -> str:
        count = 0 if view is None else view.held_count
        held = f"; {count} held" if count else ""
        return f"STATUS={state.value}: {escaped(reason)}{held}"

    def _send(self, lines: list[str]) -> None:
        found = self._socket
        if found is None or not lines:
            return
        try:
            found.send("\n".join(lines).encode())
        except OSError:
            return  # a service manager that is gone, or busy, is no reason to stop


def _sign_of_life(view: View) -> tuple[str, int] | None:
    """Return what shows that the sidecar does its work; the same = nothing new."""
    if not view.has_engine or view.state is State.SHUTTING_DOWN:
        # No engine yet, or none any more: how long that may last is the unit's to
        # say, by its limits of starting and stopping.
        return ("state", view.now_ms)
    if view.failure is not None or view.is_busy:
        return None
    if view.beat_at_ms is not None:
        return ("beat", view.beat_at_ms)
    return None if view.round_at_ms is None else ("round", view.round_at_ms)


def _watchdog_ms(environ: Mapping[str, str]) -> int | None:
    """Return the watchdog's limit, None where there is none, or it is not ours."""
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    try:
        found_us = int(environ["WATCHDOG_USEC"])
    except (KeyError, ValueError):
        return None
    return max(1, found_us // US_PER_MS) if found_us > 0 else None


def _connected(address: str) -> socket.socket | None:
    """Return a socket to a path, or to an abstract name (``@...``)."""
    if address[:1] not in {"/", "@"}:
        return None
    place = "\0" + address[1:] if address[0] == "@" else address
    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    found.settimeout(0)
    try:
        found.connect(place)
    except OSError:
        found.close()
        return None
    return found
