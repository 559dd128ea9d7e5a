"""The daemon: starts the parts of a sidecar, serves, drains and ends in order.

It serves from the first moment, so that probes and clients see its state. It ends on a
signal, when the engine fails for good, or when the start fails. The two failures are
raised, and the service manager restarts the daemon.
"""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kafka_marshal import __version__
from kafka_marshal.clock import SystemClock, ThreadBackground
from kafka_marshal.deadline import Deadline
from kafka_marshal.engine import Engine
from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
    MarshalError,
)
from kafka_marshal.observability.logs import LOGGER_NAME
from kafka_marshal.ports import Event, Observer
from kafka_marshal.remote.answers import LocalClient
from kafka_marshal.runtime import Runtime
from kafka_marshal.sidecar.config import Settings, tcp_address, token_of
from kafka_marshal.sidecar.group import DIED
from kafka_marshal.sidecar.group_actions import GroupActions
from kafka_marshal.sidecar.health import (
    Lifecycle,
    State,
    SystemdNotifier,
    View,
    readyz,
)
from kafka_marshal.sidecar.metrics import Counts, SidecarCollector, exposition
from kafka_marshal.sidecar.process_monitor import DeathWatch
from kafka_marshal.sidecar.service import SidecarService
from kafka_marshal.sidecar.sockets import UnixPlace, open_tcp, open_unix

if TYPE_CHECKING:
    import socket


CHECK_S = 1.0
POLL_S = 0.05
CLOSE_MS = 5_000
# A long log takes its time; the service manager gets extensions meanwhile.
READ_MS = 600_000
END_S_MAX = 10
# Python's switch interval: how long a thread computes while another one waits. With the
# default, a response waits up to 5 ms for the engine, or a thread that reads the log.
SWITCH_S = 0.0001
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log = logging.getLogger(LOGGER_NAME)


def require_extra() -> None:
    """Check that the extra for serving is installed.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        import prometheus_client
        import starlette
        import uvicorn  # noqa: F401 - the others go with it
    except ImportError as error:
        raise ConfigurationError(
            "the sidecar needs the extra 'sidecar'; run: pip install "
            f"'kafka-marshal[sidecar]' ({error})",
            setting="sidecar",
        ) from error
    del prometheus_client, starlette


def run(settings: Settings, observer: Observer) -> None:
    """Run a sidecar in the foreground, until a signal arrives. On the main thread.

    The first SIGTERM or SIGINT starts a controlled shutdown within ``drain_ms`` and the
    time to close; the second one ends the process at once. SIGHUP is ignored: settings
    are read at the start, and a restart within a heartbeat interval moves nothing.

    Args:
        settings: Its settings.
        observer: Receives the engine's events.

    Raises:
        ConfigurationError: A setting is invalid, or a sidecar runs already.
        MarshalError: The start failed, or the engine failed for good.
    """
    settings.check()
    require_extra()
    with _opened(settings) as (place, sockets, token):
        daemon = Daemon(settings, observer, token=token)
        _log.info("sidecar %s listens on %s", settings.client_id, place.path)
        with _switching_often():
            asyncio.run(daemon.main(sockets, place))
    if daemon.failure is not None:
        raise daemon.failure


@contextlib.contextmanager
def _switching_often() -> Iterator[None]:
    """Make threads that compute give way to the event loop soon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def _opened(
    settings: Settings,
) -> Iterator[tuple[UnixPlace, "list[socket.socket]", bytes | None]]:
    """Open the sockets, and close them at the end."""
    token = None if settings.token_file is None else token_of(settings.token_file)
    place = open_unix(settings.socket, gid=settings.socket_gid)
    sockets = [place.listening]
    try:
        if settings.tcp is not None:
            host, port = tcp_address(settings.tcp)
            sockets.append(open_tcp(host, port))
            _log.info("the sidecar also listens on %s", sockets[-1].getsockname())
        yield place, sockets, token
    finally:
        for each in sockets:
            each.close()
        place.close()


class _Deaths(Observer):
    """Counts clients whose processes died."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def observe(self, event: Event) -> None:
        if event.name == "client_gone" and event.fields.get("reason") == DIED:
            self._counts.death()


class Daemon:
    """One sidecar, from its start to its end.

    Args:
        settings: Its settings, checked.
        observer: Receives the engine's events.
        token: Token of TCP connections, None without TCP.

    Attributes:
        states: Its lifecycle.
        watch: Watches the processes of its clients.
        service: The service behind the API; None until it is connected.
        failure: Why it ended without a signal, None otherwise.
    """

    def __init__(
        self, settings: Settings, observer: Observer, *, token: bytes | None = None
    ) -> None:
        from kafka_marshal.sidecar.http_app import App

        self.failure: MarshalError | None = None
        self.states = Lifecycle(SystemClock(), self._on_change)
        self.watch = DeathWatch()
        self.service: SidecarService | None = None
        self._runtime: Runtime | None = None
        self._settings = settings
        self._observer = observer
        self._notifier = SystemdNotifier()
        counts = Counts()
        self._actions: GroupActions | None = None
        if settings.allow_admin:
            self._actions = GroupActions(
                settings.connection,
                client_id=settings.client_id,
                state_dir=settings.state_path,
            )
        collector = SidecarCollector(
            self,
            counts,
            coordination_topic=settings.connection.coordination_topic,
        )
        self._app = App(
            states=self.states,
            metrics=exposition(collector),
            counts=counts,
            token=token,
            socket_gid=settings.socket_gid,
            actions=self._actions,
        )
        self._background = ThreadBackground(name="sidecar-open")
        self._stop = asyncio.Event()
        self._why = "shutdown"
        self._is_ready = True

    def _on_change(self, state: State, reason: str) -> None:
        _log.info("sidecar state %s: %s", state.value, reason)
        self._notifier.on_change(state, reason)

    def clients(self) -> Sequence[LocalClient]:
        """Return the registered clients."""
        return [] if self.service is None else self.service.clients()

    def refusals(self) -> Mapping[tuple[str, str], int]:
        """Return how many reports were refused, by request and reason."""
        return {} if self.service is None else self.service.refusals()

    async def main(self, sockets: "Sequence[socket.socket]", place: UnixPlace) -> None:
        """Serve until a signal, then end in order, whatever happens.

        Args:
            sockets: The sockets to serve.
            place: The Unix socket among them.
        """
        from kafka_marshal.sidecar.requests import make_server

        self._listen_to_signals()
        self.states.move(
            State.STARTING,
            reason=f"connecting to {self._settings.connection.addresses}",
        )
        server = make_server(
            self._app,
            connections_max=self._settings.connections_max,
            socket_gid=self._settings.socket_gid,
        )
        serving = asyncio.create_task(server.serve(sockets=list(sockets)))
        monitoring = asyncio.create_task(self._monitor())
        try:
            await self._work(serving, place)
            await self._give_up_claims()
        finally:
            self._app.service = None
            self._app.end_streams()
            server.end()
            await asyncio.wait({serving}, timeout=END_S_MAX)
            monitoring.cancel()
            self._app.close()
            await asyncio.to_thread(self._close)

    async def _work(self, serving: "asyncio.Task[None]", place: UnixPlace) -> None:
        """Start, serve and drain, as far as possible."""
        try:
            if await self._start():
                while not await self._is_stopped_within(CHECK_S):
                    _require_served(serving)
                    _require_there(place)
                await self._drain()
        except MarshalError as error:
            self.failure = error

    async def _is_stopped_within(self, seconds: float) -> bool:
        try:
            return await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            return False

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, _on_hangup)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._stop.is_set():
            self._why = f"received {number.name}"
            self._stop.set()
            return
        # A second signal means: do not wait. Leases expire, or the next process of
        # this sidecar resumes the claims.
        _log.warning(
            "received %s during the shutdown: the sidecar ends without releasing "
            "claims; leases expire, or its next process resumes them",
            number.name,
        )
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.raise_signal(number)

    # --- starting

    async def _start(self) -> bool:
        """Connect, read the log, restore clients; return False on a signal."""
        opening = self._background.submit(self._open)
        # Connecting and recovery have their own deadlines; this one bounds both.
        limit_ms = 2 * self._settings.open_ms + READ_MS + END_S_MAX * 1000
        deadline = Deadline(limit_ms)
        while not opening.done():
            if await self._is_stopped_within(POLL_S):
                return False
            if deadline.is_over:
                raise DeadlineExceeded(
                    "the sidecar did not connect and read the log within "
                    f"{limit_ms / 1000:.0f} s; check the brokers with: marshal doctor"
                )
        opening.result(0)
        self._app.service = self.service
        self.states.move(State.RUNNING, reason="serving")
        return True

    def _open(self) -> None:
        """Open runtime and service; runs on a thread of its own."""
        settings = self._settings
        connection = settings.connection
        settings.require_state_path()
        runtime = Runtime.open(
            connection,
            self._observer,
            timeout_ms=settings.open_ms,
            read_ms=READ_MS,
            state_home=settings.state_path,
            checkpoint_interval_ms=settings.checkpoint_interval_ms,
            # Appends do not linger, because tasks request grants one by one.
            lingers=False,
            on_connected=self._on_connected,
        )
        runtime.observers.add(self._observer)
        runtime.observers.add(_Deaths(self._app.counts))
        self._runtime = runtime
        runtime.require_safe_topic()
        self.states.explain("restoring the clients of the previous process")
        service = SidecarService(
            runtime,
            client_id=settings.client_id,
            state_dir=settings.state_path,
            version=__version__,
            states=self.states,
            watch=self.watch,
            bootstrap_servers=connection.bootstrap_servers,
            member=settings.member,
            handoff_ms=settings.handoff_ms,
        )
        self.service = service
        count = service.restore(timeout_ms=settings.open_ms)
        if count:
            _log.info(
                "restored %d clients of the previous process; waiting for them to "
                "reconnect",
                count,
            )

    def _on_connected(self, engine: Engine) -> None:
        self.states.engine = engine
        self.states.move(State.RECOVERY, reason="reading the coordination log")

    # --- serving

    async def _monitor(self) -> None:
        """Notify systemd, log readiness, leave idle groups, detect a failed engine."""
        while True:
            try:
                view = await asyncio.to_thread(self.states.view)
                self._notifier.update(view)
                self._log_readiness(view)
                if view.state is State.RUNNING and self.service is not None:
                    await asyncio.to_thread(self.service.close_idle)
            except Exception:  # noqa: BLE001 - monitoring must not end the daemon
                # While monitoring fails, nothing feeds systemd's watchdog.
                _log.exception("monitoring the sidecar failed")
            engine = self.states.engine
            if engine is not None and engine.failure is not None:
                self.failure = self.failure or engine.failure
                self._why = "the engine has failed"
                self._stop.set()
            await asyncio.sleep(CHECK_S)

    def _log_readiness(self, view: View) -> None:
        """Log changes of readiness while it serves."""
        if view.state is not State.RUNNING:
            return
        verdict = readyz(view)
        if verdict.ok != self._is_ready:
            self._is_ready = verdict.ok
            if verdict.ok:
                _log.info("sidecar ready again")
            else:
                _log.warning("sidecar not ready: %s", "; ".join(verdict.reasons))

    # --- ending

    async def _drain(self) -> None:
        """Hand off, then recall all leases; at most ``drain_ms`` in total."""
        service = self.service
        if service is None or self.failure is not None:
            return
        self.states.move(
            State.PENDING_CONTROLLED_SHUTDOWN,
            reason=(
                f"{self._why}; clients have {self._settings.drain_ms} ms to release "
                "their partitions"
            ),
        )
        if self._actions is not None:
            self._actions.runner.close()
        deadline = Deadline(self._settings.drain_ms)
        await self._hand_off(service)
        await asyncio.to_thread(service.start_drain)
        while self.failure is None:
            is_acting = self._actions is not None and self._actions.runner.is_busy
            if not is_acting and await asyncio.to_thread(lambda: service.is_drained):
                return
            if deadline.is_over:
                break
            await asyncio.sleep(POLL_S)
        _log.warning(
            "clients did not release all partitions within drain-timeout (%d ms); the "
            "remaining leases expire",
            self._settings.drain_ms,
        )

    async def _hand_off(self, service: SidecarService) -> None:
        """Hand off to other hosts, up to ``handoff_ms``, while clients continue."""
        handoff_ms = min(self._settings.handoff_ms, self._settings.drain_ms)
        if not handoff_ms or self._settings.member.restarts:
            return  # with restarts, partitions wait instead of moving twice
        deadline = Deadline(handoff_ms)
        # The directive ends by itself once this process must have ended.
        for_ms = self._settings.drain_ms + CLOSE_MS
        await asyncio.to_thread(partial(service.start_handoff, for_ms=for_ms))
        while not deadline.is_over and self.failure is None:
            if await asyncio.to_thread(lambda: service.is_handed_off):
                return
            await asyncio.sleep(POLL_S)
        _log.warning(
            "other hosts did not take over all partitions within %d ms; recalling the "
            "rest from the clients",
            handoff_ms,
        )

    async def _give_up_claims(self) -> None:
        self.states.move(State.SHUTTING_DOWN, reason=self._why)
        service = self.service
        if service is None:
            return
        try:
            await asyncio.to_thread(partial(service.close, timeout_ms=CLOSE_MS))
        except MarshalError as error:
            _log.warning(
                "the sidecar could not release its claims: %s; leases expire", error
            )

    def _close(self) -> None:
        """Close the remaining parts, after the last request."""
        if self._runtime is not None:
            self._runtime.stop()
        self._background.close(0)
        self.watch.close()
        if self.states.state is State.SHUTTING_DOWN:
            self.states.move(State.NOT_RUNNING, reason=self._why)
        self._notifier.close()


def _require_served(serving: "asyncio.Task[None]") -> None:
    """Check that the HTTP server still runs; it should end only on request."""
    if serving.done():
        why = serving.exception() if not serving.cancelled() else None
        raise CoordinationError(
            f"the HTTP server ended unexpectedly ({why or 'no reason given'}); "
            "restart the sidecar"
        ) from why


def _require_there(place: UnixPlace) -> None:
    """Check that clients can still connect, which a supervisor cannot detect."""
    if not place.is_there():
        raise CoordinationError(
            f"the socket {str(place.path)!r} was removed or replaced, so no client can "
            "connect any more; keep the folder from being cleaned up, and restart the "
            "sidecar: what its clients hold is resumed within a heartbeat interval"
        )


def _on_hangup() -> None:
    _log.info("ignoring SIGHUP; settings are read when the sidecar starts")
