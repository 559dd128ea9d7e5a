"""Runs one engine per process and cluster, on its own thread.

All ``Marshal`` objects of a process that name the same cluster, topic and
credentials share one fetch session over the coordination log, whatever their
groups; the last one to close ends it.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import attrs

from kafka_marshal.clock import SystemClock, SystemEntropy, ThreadBackground
from kafka_marshal.deadline import Deadline
from kafka_marshal.defaults import CHECKPOINT_INTERVAL_MS
from kafka_marshal.engine import Engine, Ports
from kafka_marshal.engine.checkpoint_reader import SHORT_MAX, LogCheckpoints
from kafka_marshal.engine.checkpointing import CheckpointRule
from kafka_marshal.engine.engine import POLL_MS_MAX
from kafka_marshal.errors import DeadlineExceeded, MarshalError, TopicMisconfigured
from kafka_marshal.identity import host_label
from kafka_marshal.kafka_io.clients import AdminClient
from kafka_marshal.kafka_io.settings import (
    HEARTBEAT_INTERVAL_MS_DEFAULT,
    ConnectionConfig,
)
from kafka_marshal.kafka_io.topic_rules import TopicDescription, dangers
from kafka_marshal.kafka_io.transport import (
    choose,
    open_coordination_log,
    open_data_log,
)
from kafka_marshal.observability import FanOut
from kafka_marshal.ports import DataLog, Observer
from kafka_marshal.snapshots import open_store

if TYPE_CHECKING:
    from kafka_marshal.kafka_io.topiclog import TopicLog

CLOSE_MS = 5_000


@attrs.define(eq=False)
class Runtime:
    """An engine with its thread and its connections.

    Attributes:
        engine: The engine.
        ports: The engine's ports.
        description: The cluster's description of the topic when it was opened.
        observers: Observers of all ``Marshal`` objects that use the runtime.
        transport: The client library in use.
        users: Number of ``Marshal`` objects that use the runtime.
    """

    engine: Engine
    ports: Ports
    description: TopicDescription
    observers: FanOut
    transport: str
    users: int = 0
    _thread: threading.Thread | None = None
    _is_stopping: bool = False
    _pid: int = attrs.field(factory=os.getpid)

    @classmethod
    def open(
        cls,
        settings: ConnectionConfig,
        observer: Observer,
        *,
        timeout_ms: int,
        read_ms: int | None = None,
        state_home: Path | None = None,
        checkpoint_interval_ms: int = CHECKPOINT_INTERVAL_MS,
        lingers: bool = True,
        on_connected: Callable[[Engine], None] | None = None,
    ) -> "Runtime":
        """Connect, start the engine's thread and read the log to its end.

        Args:
            settings: How to reach the cluster.
            observer: Receives events until the runtime is open.
            timeout_ms: Longest time to connect.
            read_ms: Longest time to read the log; None for ``timeout_ms``.
            state_home: Directory for states that shorten later starts; None stores
                none, and reads the log from its start.
            checkpoint_interval_ms: How often to write checkpoints unless another
                process does; 0 = never.
            lingers: Whether an append waits a moment, to share a request with others.
            on_connected: Called after connecting and before reading.

        Raises:
            MarshalError: Opening failed; nothing is left open.
        """
        transport = choose(settings).name
        log, data = _open_logs(settings, lingers=lingers, timeout_ms=timeout_ms)
        observers = FanOut()
        observers.add(observer)
        ports = Ports(
            log=log,
            data=data,
            clock=SystemClock(),
            entropy=SystemEntropy(),
            background=ThreadBackground(),
            policies=ThreadBackground(name="marshal-policies"),
            observer=observers,
        )
        store = open_store(state_home, log.cluster_id, topic_id=log.topic_id)
        engine = Engine(
            ports,
            cluster_id=log.cluster_id,
            sources=(LogCheckpoints(whole_max=SHORT_MAX),),
            store=store,
        )
        rule = CheckpointRule(interval_ms=checkpoint_interval_ms)
        engine.write_checkpoints(_writer_id(), rule)
        runtime = cls(engine, ports, log.description, observers, transport)
        try:
            if on_connected is not None:
                on_connected(engine)
            runtime.start()
            # Connect the writer while the log is read, with the default interval.
            usual = HEARTBEAT_INTERVAL_MS_DEFAULT
            connecting = ports.background.submit(
                lambda: log.configure(usual, timeout_ms=timeout_ms)
            )
            engine.wait_ready(timeout_ms if read_ms is None else read_ms)
            with suppress(MarshalError, TimeoutError):  # the next line raises the cause
                connecting.result(timeout_ms / 1000)
            log.configure(engine.context.heartbeat_interval_ms, timeout_ms=timeout_ms)
        except BaseException:
            runtime.stop()
            raise
        observers.remove(observer)  # each user adds its own
        return runtime

    def require_safe_topic(self) -> None:
        """Refuse a topic whose settings would break the guarantees of claims.

        If this principal may not read the settings, observers get the event
        ``topic_unchecked`` instead.

        Raises:
            TopicMisconfigured: Names every such setting.
        """
        found = self.description
        if not found.configs:
            needs = f"DESCRIBE_CONFIGS on topic {found.name}"
            fields = {"topic": found.name, "needs": needs}
            self.engine.context.observe("topic_unchecked", fields)
            return
        problems = dangers(found)
        if problems:
            raise TopicMisconfigured(
                f"coordination topic {found.name} has settings that break the "
                f"guarantees of claims: {'; '.join(problems)}. See: marshal topic "
                "info; check_topic=False skips this check",
                problems=problems,
            )

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread = threading.Thread(
            target=self._run, name="kafka-marshal-engine", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and close every connection. Idempotent."""
        if os.getpid() != self._pid:
            return
        self._is_stopping = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=CLOSE_MS / 1000)
        if self.engine.failure is None:
            with self.engine.changed:
                self.engine.saver.save_all()
        self.ports.log.close(CLOSE_MS)
        self.ports.background.close(CLOSE_MS)
        self.ports.policies.close(0)
        self.ports.data.close(CLOSE_MS)

    def _run(self) -> None:
        while not self._is_stopping and self.engine.failure is None:
            self.engine.step(POLL_MS_MAX)


def _open_logs(
    settings: ConnectionConfig, *, lingers: bool, timeout_ms: int
) -> tuple["TopicLog", DataLog]:
    """Open both logs, with one connection for look-ups."""
    admin = AdminClient(settings)
    try:
        # The log has the heartbeat interval, so it is read before the writer is made.
        log = open_coordination_log(
            settings,
            heartbeat_interval_ms=None,
            timeout_ms=timeout_ms,
            lingers=lingers,
            admin=admin,
        )
        return log, open_data_log(settings, admin=admin)
    except BaseException:
        admin.close(timeout_ms=0)
        raise


def _writer_id() -> str:
    """Return the name of this process in the checkpoints that it writes."""
    return f"{host_label()}:{os.getpid()}"


_lock = threading.Lock()
_running: dict[object, Runtime] = {}
# By connection; held while its runtime is opened, which may take long.
_opening: WeakValueDictionary[object, threading.Lock] = WeakValueDictionary()


def _forget_locks() -> None:
    """Replace locks in a forked child, which has no other threads (PROTOCOL 1.7)."""
    global _lock, _opening
    _lock, _opening = threading.Lock(), WeakValueDictionary()


os.register_at_fork(after_in_child=_forget_locks)


def _name(settings: ConnectionConfig) -> object:
    options = tuple(
        (name, value if isinstance(value, str | int) else id(value))
        for name, value in sorted(settings.options.items())
    )
    servers = tuple(sorted(settings.bootstrap_servers))
    topic, transport = settings.coordination_topic, choose(settings).name
    return (os.getpid(), servers, topic, options, transport)


def acquire(
    settings: ConnectionConfig, make: Callable[..., Runtime], *, timeout_ms: int
) -> Runtime:
    """Return the process's runtime for a connection; make one if there is none.

    Does not wait for threads that open or close runtimes of other connections.

    Args:
        settings: The connection.
        make: Opens a runtime: ``make(timeout_ms=...)``.
        timeout_ms: Limit for both the wait and the opening.

    Raises:
        DeadlineExceeded: Another thread was still opening the runtime.
        MarshalError: Opening failed.
    """
    name, deadline = _name(settings), Deadline(timeout_ms)
    with _lock:
        opening = _opening.setdefault(name, threading.Lock())
    if not opening.acquire(timeout=max(0.0, timeout_ms / 1000)):
        raise DeadlineExceeded(
            f"another thread was still connecting to {settings.addresses} after "
            f"{timeout_ms} ms; check the brokers with: marshal doctor"
        )
    try:
        with _lock:
            runtime = _running.get(name)
            if runtime is not None and runtime.engine.failure is None:
                runtime.users += 1
                return runtime
        runtime = make(timeout_ms=min(timeout_ms, deadline.left_ms + 1))
        with _lock:
            _running[name] = runtime
            runtime.users += 1
            return runtime
    finally:
        opening.release()


def release(runtime: Runtime) -> None:
    """Stop using a runtime; the last user stops the runtime."""
    with _lock:
        runtime.users -= 1
        if runtime.users > 0:
            return
        for name, other in list(_running.items()):
            if other is runtime:
                del _running[name]
    runtime.stop()
