"""The daemon: its parts put together, started, served, and ended in order.

It serves from the first moment, so that probes and clients hear what it is doing. It
ends for three reasons: a signal, an engine that can go no further, or a start that
failed; the last two are raised, and whoever supervises it starts it anew.
"""

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from kafka_marshal import __version__
from kafka_marshal.clock import SystemClock
from kafka_marshal.engine import Engine
from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
    MarshalError,
)
from kafka_marshal.observability.logs import LOGGER_NAME
from kafka_marshal.ports import Event, Observer
from kafka_marshal.remote.looking import LocalClient
from kafka_marshal.runtime import Runtime
from kafka_marshal.sidecar.config import Settings, tcp_address, token_of
from kafka_marshal.sidecar.group import DIED
from kafka_marshal.sidecar.health import (
    Health,
    Lifecycle,
    State,
    StateChange,
    SystemdNotifier,
    View,
    readyz,
)
from kafka_marshal.sidecar.metrics import Counts, Exposition, SidecarCollector
from kafka_marshal.sidecar.process_monitor import DeathWatch
from kafka_marshal.sidecar.service import SidecarService
from kafka_marshal.sidecar.sockets import UnixPlace, open_tcp, open_unix

if TYPE_CHECKING:
    import socket


T = TypeVar("T")

LOOK_S = 1.0
LOOK_AGAIN_S = 0.05
CLOSE_MS = 5_000
# A long log takes its time; what supervises the daemon hears that it goes on.
READ_MS = 600_000
END_S_MAX = 10
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log = logging.getLogger(LOGGER_NAME)


def require_extra() -> None:
    """Check that what serves is installed.

    Raises:
        ConfigurationError: It is not.
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
    """Run a sidecar in the foreground, until a signal comes. On the main thread.

    SIGTERM or SIGINT: a controlled shutdown, within ``drain_ms`` and what closing
    takes; the same once more: at once. SIGHUP is passed over: settings are read when
    the daemon starts, and a restart within H moves nothing.

    Args:
        settings: Its settings.
        observer: Takes the engine's events.

    Raises:
        ConfigurationError: A setting is impossible, or a sidecar runs already.
        MarshalError: It could not be started, or the engine can go no further.
    """
    settings.check()
    require_extra()
    with _opened(settings) as (place, sockets, token):
        daemon = Daemon(settings, observer, token=token)
        _log.info("sidecar %s listens on %s", settings.client_id, place.path)
        asyncio.run(daemon.main(sockets))
    if daemon.failure is not None:
        raise daemon.failure


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
            _log.info("it listens on %s as well", sockets[-1].getsockname())
        yield place, sockets, token
    finally:
        for each in sockets:
            each.close()
        place.close()


@attrs.define(eq=False)
class Components:
    """What there is of the inside; it grows while the daemon starts.

    Attributes:
        health: Takes views of it.
        watch: Knows of deaths.
        runtime: The engine with its connections, as soon as there is one.
        service: Holds the claims, as soon as there is one.
    """

    health: Health
    watch: DeathWatch
    runtime: Runtime | None = None
    service: SidecarService | None = None

    def look(self) -> View:
        """Return the view that probes rest on."""
        return self.health.look()

    @property
    def engine(self) -> Engine | None:
        """The engine, as soon as there is one."""
        return self.health.engine

    @property
    def process_count(self) -> int:
        """How many living processes are watched."""
        return self.watch.process_count

    def clients(self) -> Sequence[LocalClient]:
        """Return who is registered."""
        return [] if self.service is None else self.service.clients()


class _Deaths(Observer):
    """Counts clients that are known dead."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def observe(self, event: Event) -> None:
        if event.name == "client_gone" and event.fields.get("reason") == DIED:
            self._counts.death()


class Daemon:
    """One sidecar, from its start to its end.

    Args:
        settings: Its settings, checked.
        observer: Takes the engine's events.
        token: What TCP connections have to show, None where there is no TCP.

    Attributes:
        states: What it is doing.
        failure: Why it ended, where nobody asked it to.
    """

    def __init__(
        self, settings: Settings, observer: Observer, *, token: bytes | None = None
    ) -> None:
        from kafka_marshal.sidecar.http_app import App, AppContext

        self.failure: MarshalError | None = None
        clock = SystemClock()
        self.states = Lifecycle(clock)
        self._settings = settings
        self._observer = observer
        self._notifier = SystemdNotifier()
        counts = Counts()
        self._inside = Components(Health(self.states, clock), DeathWatch())
        collector = SidecarCollector(
            self._inside, counts, coordination_topic=settings.coordination_topic
        )
        self._serving = AppContext(
            self._inside.health,
            metrics=Exposition(collector),
            counts=counts,
            explain=lambda: f"{self.states.state.value}, {self.states.reason}",
            token=token,
            socket_gid=settings.socket_gid,
        )
        self._app: App = App(self._serving)
        self._stop = asyncio.Event()
        self._why = "it was to end"
        self._is_ready = True
        self.states.on_change(_log_change)
        self.states.on_change(self._notifier.on_change)

    async def main(self, sockets: "Sequence[socket.socket]") -> None:
        """Serve until asked to end; whatever happens, end in order."""
        from kafka_marshal.sidecar.requests import make_server

        self._listen_to_signals()
        self.states.move(
            State.STARTING, reason=f"connecting to {self._settings.bootstrap_servers}"
        )
        server = make_server(
            self._app,
            connections_max=self._settings.connections_max,
            socket_gid=self._settings.socket_gid,
        )
        serving = asyncio.create_task(server.serve(sockets=list(sockets)))
        looking = asyncio.create_task(self._look_on())
        try:
            await self._work(serving)
            await self._give_up_claims()
        finally:
            self._serving.service = None
            self._app.end_streams()
            server.should_exit = True
            await asyncio.wait({serving}, timeout=END_S_MAX)
            looking.cancel()
            self._app.close()
            await asyncio.to_thread(self._close)

    async def _work(self, serving: "asyncio.Task[None]") -> None:
        """Start, serve, drain: as far as it gets."""
        try:
            if await self._start():
                while not await self._is_stopped_within(LOOK_S):
                    _require_served(serving)
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
            self._why = f"asked to by {number.name}"
            self._stop.set()
            return
        # Whoever asks twice does not want to wait: what is held runs out, or the
        # next life of this sidecar takes it up.
        _log.warning("%s again: ending at once", number.name)
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.raise_signal(number)

    # --- starting

    async def _start(self) -> bool:
        """Connect, read the log, take up what was promised; False when stopped."""
        opening = on_thread("sidecar-open", self._open)
        loop = asyncio.get_running_loop()
        # Connecting and recovering have deadlines of their own: this is the last.
        limit_s = (2 * self._settings.open_ms + READ_MS) / 1000 + END_S_MAX
        deadline = loop.time() + limit_s
        while not opening.done():
            if await self._is_stopped_within(LOOK_AGAIN_S):
                return False
            if loop.time() >= deadline:
                raise DeadlineExceeded(f"not started within {limit_s:.0f} s")
        await opening
        self._serving.service = self._inside.service
        self.states.move(State.RUNNING, reason="serving")
        return True

    def _open(self) -> None:
        """Open what is inside; on a thread of its own, as far as it gets."""
        settings = self._settings
        connection = settings.connection()
        runtime = Runtime.open(
            connection,
            self._observer,
            timeout_ms=settings.open_ms,
            read_ms=READ_MS,
            state_home=settings.state_path,
            checkpoint_interval_ms=settings.checkpoint_interval_ms,
            on_connected=self._on_connected,
        )
        runtime.observers.add(self._observer)
        runtime.observers.add(_Deaths(self._serving.counts))
        self._inside.runtime = runtime
        runtime.require_safe_topic()
        self.states.explain("taking up what an earlier life had promised")
        service = SidecarService(
            runtime,
            client_id=settings.client_id,
            state_dir=settings.state_path,
            version=__version__,
            states=self.states,
            watch=self._inside.watch,
            bootstrap_servers=connection.bootstrap_servers,
        )
        self._inside.service = service
        count = service.restore(timeout_ms=settings.open_ms)
        if count:
            _log.info("%d clients of an earlier life are expected back", count)

    def _on_connected(self, engine: Engine) -> None:
        self._inside.health.engine = engine
        self.states.move(State.RECOVERY, reason="reading the coordination log")

    # --- serving

    async def _look_on(self) -> None:
        """Tell whoever supervises us how we are; find out when it is over."""
        while True:
            try:
                view = await asyncio.to_thread(self._inside.look)
                self._notifier.look(view)
                self._log_readiness(view)
            except Exception:  # noqa: BLE001 - a look must not end the daemon
                # It is told to nobody then, and the watchdog has the last word.
                _log.exception("looking at the sidecar failed")
            engine = self._inside.engine
            if engine is not None and engine.failure is not None:
                self.failure = self.failure or engine.failure
                self._why = "the engine can go no further"
                self._stop.set()
            await asyncio.sleep(LOOK_S)

    def _log_readiness(self, view: View) -> None:
        """Log when the answer of ``/readyz`` changes while it serves."""
        if view.state is not State.RUNNING:
            return
        verdict = readyz(view)
        if verdict.ok != self._is_ready:
            self._is_ready = verdict.ok
            if verdict.ok:
                _log.info("ready again")
            else:
                _log.warning("not ready: %s", "; ".join(verdict.reasons))

    # --- ending

    async def _drain(self) -> None:
        """Have every client give back what it has, and wait for it, for a while."""
        service = self._inside.service
        if service is None or self.failure is not None:
            return
        self.states.move(
            State.PENDING_CONTROLLED_SHUTDOWN,
            reason=f"{self._why}; clients have {self._settings.drain_ms} ms to let go",
        )
        await asyncio.to_thread(service.start_drain)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.drain_ms / 1000
        while loop.time() < deadline and self.failure is None:
            if await asyncio.to_thread(lambda: service.is_drained):
                return
            await asyncio.sleep(LOOK_AGAIN_S)
        _log.warning("not everything was given back in time; it runs out by itself")

    async def _give_up_claims(self) -> None:
        self.states.move(State.SHUTTING_DOWN, reason=self._why)
        service = self._inside.service
        if service is None:
            return
        try:
            await asyncio.to_thread(partial(service.close, timeout_ms=CLOSE_MS))
        except MarshalError as error:
            _log.warning("what was held could not be released: %s", error)

    def _close(self) -> None:
        """Close what is left, now that nobody asks any more."""
        if self._inside.runtime is not None:
            self._inside.runtime.stop()
        self._inside.watch.close()
        if self.states.state is State.SHUTTING_DOWN:
            self.states.move(State.NOT_RUNNING, reason=self._why)
        self._notifier.close()


def on_thread(name: str, call: Callable[[], T]) -> "asyncio.Future[T]":
    """Return what a call will return, made on a thread that nobody waits for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(put: Callable[[Any], None], value: object) -> None:
        if not future.done():
            put(value)

    def work() -> None:
        put: Callable[[Any], None] = future.set_result
        try:
            value: object = call()
        except Exception as error:  # noqa: BLE001 - whoever awaits it gets it
            put, value = future.set_exception, error
        # Who waited may be gone, and the loop with them.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, put, value)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


def _require_served(serving: "asyncio.Task[None]") -> None:
    """Check that the server goes on; it ends only when it is told to."""
    if serving.done():
        why = serving.exception() if not serving.cancelled() else None
        raise CoordinationError(
            f"the HTTP server ended by itself ({why or 'for no reason that it gave'}); "
            "start the sidecar anew"
        ) from why


def _log_change(change: StateChange) -> None:
    _log.info("%s: %s", change.after.value, change.reason)


def _on_hangup() -> None:
    _log.info("SIGHUP is passed over; settings are read when the sidecar starts")
