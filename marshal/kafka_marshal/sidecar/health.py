"""The state of a sidecar: its lifecycle, answers to probes, and systemd.

The lifecycle has the states of Kafka's own brokers::

    NOT_RUNNING -> STARTING -> RECOVERY -> RUNNING
                      |           |      /    |
                      |           |     /     v
                      |           |    /  PENDING_CONTROLLED_SHUTDOWN
                      v           v   v       |
    NOT_RUNNING <---- SHUTTING_DOWN <---------+

Any other change is a bug of the caller: ``Lifecycle.move`` raises and changes nothing.

Probes ask three questions, as in Kubernetes: alive, ready, started. Each answer is a
pure function of a view. A coordination log that cannot be reached fails no probe by
itself: leases end by their deadlines, and a restart would only end them sooner.

systemd (sd_notify(3)) gets ready, status, watchdog and stopping messages. The watchdog
is fed by confirmed heartbeats, or, while nothing is held, by rounds of the engine. A
timer would continue to feed it while the engine hangs.
"""

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from enum import Enum

import attrs
import msgspec

from kafka_marshal.engine import Engine
from kafka_marshal.errors import InvalidTransition
from kafka_marshal.observability.logs import escaped
from kafka_marshal.ports import Clock
from kafka_marshal.protocol.text import NAMED_MAX, abbreviated
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote.answers import Verdict

# --- States ----------------------------------------------------------------------


class State(Enum):
    """A state of a sidecar; its value is shown to people and clients.

    Attributes:
        NOT_RUNNING: Not yet started, or stopped.
        STARTING: Reading settings, connecting.
        RECOVERY: Reading the log to its end, and the lease journals (PROTOCOL 12).
        RUNNING: Serving.
        PENDING_CONTROLLED_SHUTDOWN: Handing partitions off, then recalling all leases.
        SHUTTING_DOWN: Releasing the remaining claims, closing.
    """

    NOT_RUNNING = "NOT_RUNNING"
    STARTING = "STARTING"
    RECOVERY = "RECOVERY"
    RUNNING = "RUNNING"
    PENDING_CONTROLLED_SHUTDOWN = "PENDING_CONTROLLED_SHUTDOWN"
    SHUTTING_DOWN = "SHUTTING_DOWN"


# The states that may follow each state. Before RUNNING there is nothing to drain.
NEXT: dict[State, frozenset[State]] = {
    State.NOT_RUNNING: frozenset({State.STARTING}),
    State.STARTING: frozenset({State.RECOVERY, State.SHUTTING_DOWN}),
    State.RECOVERY: frozenset({State.RUNNING, State.SHUTTING_DOWN}),
    State.RUNNING: frozenset({State.PENDING_CONTROLLED_SHUTDOWN, State.SHUTTING_DOWN}),
    State.PENDING_CONTROLLED_SHUTDOWN: frozenset({State.SHUTTING_DOWN}),
    State.SHUTTING_DOWN: frozenset({State.NOT_RUNNING}),
}


# --- Probes ----------------------------------------------------------------------


# A round may send three requests to the cluster, ten seconds each.
ROUND_MS_MAX = 45_000
LOCK_MS_MAX = 1_000

STOPPING = frozenset({State.SHUTTING_DOWN, State.NOT_RUNNING})
STARTED = frozenset(
    {State.RUNNING, State.PENDING_CONTROLLED_SHUTDOWN, State.SHUTTING_DOWN}
)


@attrs.frozen(kw_only=True)
class View:
    """The facts from which probes are answered, as of one moment.

    Attributes:
        now_ms: Local time.
        state: State of the sidecar.
        reason: Why it is in that state.
        since_ms: Local time of the last change of the state.
        has_engine: Whether there is an engine yet.
        failure: Why the engine has failed for good, None while it has not.
        is_busy: Whether the engine's lock was not available, so that all attributes
            below, except ``round_at_ms``, are unknown.
        round_at_ms: End of the engine's last round, None before the first.
        is_replayed: Whether everything written before the start is folded.
        held_count: Number of claims held.
        overdue: Claims that were not renewed in time; nothing of them is handed out.
        failed: Groups without claims from now on, each with the reason.
        beat_at_ms: When the newest confirmed heartbeat was sent, None while nothing is
            held.
        heartbeat_interval_ms: Heartbeat interval, None until the log is read.
        log_start_missing: Coordinating partitions whose log start is gone and that have
            no checkpoint.
        rebuilding: Coordinating partitions that are being read again.
        diverged: Coordinating partitions whose last checkpoint had another digest than
            this replica.
        notes: Problems that may cost partitions, but do not make the sidecar unready.
    """

    now_ms: int
    state: State
    reason: str
    since_ms: int
    has_engine: bool = False
    failure: str | None = None
    is_busy: bool = False
    round_at_ms: int | None = None
    is_replayed: bool = False
    held_count: int = 0
    overdue: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    beat_at_ms: int | None = None
    heartbeat_interval_ms: int | None = None
    log_start_missing: tuple[int, ...] = ()
    rebuilding: tuple[int, ...] = ()
    diverged: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def livez(view: View) -> Verdict:
    """Return whether the daemon should continue to run.

    False once its engine has failed for good, or has finished no round for too long.
    """
    return _verdict(view, _dead_reasons(view))


def readyz(view: View) -> Verdict:
    """Return whether clients should use the sidecar.

    They should if it serves, has read the log to its end, and may use all its claims.
    In Kubernetes a pod with an unready container is removed from its Services, which
    does not help a consumer: so problems that only cost partitions are notes.
    """
    verdict = _verdict(view, _unready_reasons(view))
    notes = tuple(escaped(note) for note in view.notes)
    return msgspec.structs.replace(verdict, reasons=verdict.reasons + notes)


def startupz(view: View) -> Verdict:
    """Return whether the sidecar has started; stays true while it shuts down."""
    reasons = () if view.state in STARTED else (_state_reason(view),)
    return _verdict(view, reasons)


def _verdict(view: View, reasons: tuple[str, ...] | Iterator[str]) -> Verdict:
    found = tuple(escaped(reason) for reason in reasons)
    return Verdict(
        ok=not found,
        state=view.state.value,
        reasons=found or (escaped(view.reason),),
    )


def _state_reason(view: View) -> str:
    return f"the sidecar is {view.state.value}: {view.reason}"


def _dead_reasons(view: View) -> Iterator[str]:
    # During shutdown the engine stops before the process does; the shutdown has its
    # own deadline, which a probe must not cut short.
    if view.state in STOPPING or not view.has_engine:
        return
    if view.failure is not None:
        yield f"the engine has failed: {view.failure}"
        return
    since_ms = view.since_ms if view.round_at_ms is None else view.round_at_ms
    silent_ms = view.now_ms - since_ms
    if silent_ms > ROUND_MS_MAX:
        yield (
            f"the engine finished no round for {silent_ms} ms (limit {ROUND_MS_MAX} ms)"
        )


def _unready_reasons(view: View) -> Iterator[str]:
    yield from _dead_reasons(view)
    if view.state is not State.RUNNING:
        yield _state_reason(view)
    elif view.is_busy:
        yield f"the engine's lock was busy for {LOCK_MS_MAX} ms"
    elif not view.is_replayed:
        yield "the coordination log is not read to its end"
    yield from _state_reasons(view)
    for group_id, why in view.failed[:NAMED_MAX]:
        yield (
            f"this sidecar can hold no partitions of group {group_id} any more: {why}"
        )
    if view.overdue:
        yield (
            f"{len(view.overdue)} of {view.held_count} claims were not renewed in "
            "time, so no new records are handed out of: " + abbreviated(view.overdue)
        )


def _state_reasons(view: View) -> Iterator[str]:
    """Yield what is wrong with this process's copy of the log (PROTOCOL 7)."""
    if view.log_start_missing:
        yield (
            f"coordinating partitions {list(view.log_start_missing)}: the log start "
            "is gone, and no checkpoint covers the gap; the data partitions that they "
            "coordinate are not claimed; see: marshal doctor"
        )
    if view.rebuilding:
        yield (
            f"coordinating partitions {list(view.rebuilding)}: the log was truncated; "
            "it is being read again"
        )
    if view.diverged:
        yield (
            f"coordinating partitions {list(view.diverged)}: the checkpoint has "
            "another digest than this replica, so one of the two is wrong; compare "
            "them with: marshal log verify"
        )


def _view_inside(view: View, engine: Engine) -> View:
    config = engine.context.config
    sessions = engine.sessions
    held = [
        holding
        for session in sessions
        for holding in session.holdings.values()
        if holding.claim.is_owned
    ]
    return attrs.evolve(
        view,
        is_replayed=engine.is_ready,
        held_count=len(held),
        overdue=tuple(
            _name(each.key)
            for each in held
            if each.claim.lease.soft_until_ms <= view.now_ms
        ),
        failed=tuple(
            (session.claimant.group_id, str(session.failure))
            for session in sessions
            if session.failure is not None
        ),
        beat_at_ms=max((each.claim.base_ms for each in held), default=None),
        heartbeat_interval_ms=None if config is None else config.heartbeat_interval_ms,
        log_start_missing=engine.log_start_missing,
        rebuilding=() if config is None else _rebuilding(engine),
        diverged=engine.diverged,
        notes=(*_failed_appends(engine, view.now_ms), *_drains(engine)),
    )


def _failed_appends(engine: Engine, now_ms: int) -> Iterator[str]:
    failed = engine.context.failed_append
    # The engine appends three times in an interval.
    if failed and now_ms - failed.at_ms <= engine.context.heartbeat_interval_ms:
        yield f"an append to the coordination log failed: {failed.error}"


def _drains(engine: Engine) -> Iterator[str]:
    drained = [each for each in engine.sessions if each.self_drain.why is not None]
    for session in drained[:NAMED_MAX]:
        group_id, why = session.claimant.group_id, session.self_drain.why
        yield (
            f"the sidecar hands its partitions of group {group_id} to other hosts: "
            f"{why}"
        )


def _rebuilding(engine: Engine) -> tuple[int, ...]:
    if not engine.context.is_behind:
        return ()
    return tuple(sorted(engine.context.rebuilding - set(engine.log_start_missing)))


def _name(key: Key) -> str:
    return f"{key.topic}-{key.partition} of group {key.group_id}"


OnChange = Callable[[State, str], None]
"""Called with each new state, and the reason for it."""


class Lifecycle:
    """The state of one sidecar. Thread-safe.

    Args:
        clock: Local time.
        on_change: Called on each change, one at a time and in order, on the thread that
            makes the change; it must not block.

    Attributes:
        engine: The engine, None until it exists.
    """

    def __init__(self, clock: Clock, on_change: OnChange = lambda _, __: None) -> None:
        self.engine: Engine | None = None
        self._clock = clock
        self._on_change = on_change
        self._lock = threading.RLock()
        self._state = State.NOT_RUNNING
        self._reason = "not started"
        self._since_ms = clock.now_ms()

    @property
    def state(self) -> State:
        """Return the current state."""
        return self._state

    @property
    def reason(self) -> str:
        """Return why the sidecar is in this state, or what it waits for."""
        return self._reason

    def move(self, to: State, *, reason: str) -> None:
        """Change the state.

        Raises:
            InvalidTransition: The lifecycle has no such transition.
        """
        with self._lock:
            before = self._state
            if to not in NEXT[before]:
                legal = " or ".join(sorted(state.value for state in NEXT[before]))
                raise InvalidTransition(
                    f"a sidecar in {before.value} cannot become {to.value} "
                    f"({reason}); only {legal} follows it"
                )
            self._state, self._reason = to, reason
            self._since_ms = self._clock.now_ms()
            self._on_change(to, reason)

    def explain(self, reason: str) -> None:
        """Replace the reason for the current state, for example to show progress."""
        with self._lock:
            self._reason = reason

    def view(self) -> View:
        """Return the facts from which probes are answered, as of now.

        Waits for the engine's lock for at most a second.
        """
        view = View(
            now_ms=self._clock.now_ms(),
            state=self._state,
            reason=self._reason,
            since_ms=self._since_ms,
        )
        engine = self.engine
        if engine is None:
            return view
        view = attrs.evolve(
            view,
            has_engine=True,
            # None until the engine's thread has finished its first round.
            round_at_ms=engine.context.meters.round_at_ms,
            failure=None if engine.failure is None else str(engine.failure),
        )
        if not engine.changed.acquire(timeout=LOCK_MS_MAX / 1000):
            return attrs.evolve(view, is_busy=True)
        try:
            return _view_inside(view, engine)
        finally:
            engine.changed.release()


# --- systemd ---------------------------------------------------------------------


# Claims without a confirmed heartbeat end after two intervals; from then on rounds feed
# the watchdog. So, with one more interval, an outage of the brokers causes no restart.
WATCHDOG_INTERVALS = 3
# Reading a long log, or draining clients, may take longer than the limits of the
# systemd unit, which are extended by this.
EXTEND_MS = 30_000
WAIT_S_MAX = 1
US_PER_MS = 1_000

_ENDING = frozenset({State.PENDING_CONTROLLED_SHUTDOWN, State.SHUTTING_DOWN})
_SLOW = frozenset({State.RECOVERY, State.PENDING_CONTROLLED_SHUTDOWN})


class SystemdNotifier:
    """Notifies systemd. Thread-safe.

    A change of state waits up to a second for a busy systemd, because it is sent once;
    nothing else waits. Pass ``on_change`` to a ``Lifecycle``; call ``update`` about
    once a second, always on the same thread.

    Args:
        environ: ``NOTIFY_SOCKET``, ``WATCHDOG_USEC`` and ``WATCHDOG_PID``; the
            environment of the process if None.

    Attributes:
        watchdog_ms: Watchdog timeout of systemd, None without a watchdog.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        found = os.environ if environ is None else environ
        self.watchdog_ms = _watchdog_ms(found)
        self._socket = _connected(found.get("NOTIFY_SOCKET", ""))
        self._fed_for: tuple[str, int] | None = None
        self._status = ""

    def on_change(self, state: State, reason: str) -> None:
        """Send a change of state."""
        lines = [self._status_line(state, reason)]
        if state is State.RUNNING:
            lines.append("READY=1")
        elif state in _ENDING:
            lines.append("STOPPING=1")
        if self._socket is not None:
            select.select([], [self._socket], [], WAIT_S_MAX)
        self._send(lines)

    def update(self, view: View) -> None:
        """Send a new reason, and feed the watchdog if there is new evidence."""
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
        """Extend the watchdog's timeout if it is short for the heartbeat interval."""
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
            return  # a missing or busy service manager does not matter


def _sign_of_life(view: View) -> tuple[str, int] | None:
    """Return evidence that the sidecar works; an equal value is no new evidence."""
    if not view.has_engine or view.state is State.SHUTTING_DOWN:
        # Without an engine, the systemd unit's limits for starting and stopping apply.
        return ("state", view.now_ms)
    if view.failure is not None or view.is_busy:
        return None
    if view.beat_at_ms is not None:
        return ("beat", view.beat_at_ms)
    return None if view.round_at_ms is None else ("round", view.round_at_ms)


def _watchdog_ms(environ: Mapping[str, str]) -> int | None:
    """Return the watchdog's timeout, None if there is none for this process."""
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
