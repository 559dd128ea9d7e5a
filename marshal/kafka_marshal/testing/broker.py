"""A real Apache Kafka for tests, demos and development, in one Java process.

KRaft combined mode: one node that is broker and controller. It needs a Java runtime
(``testing.java``) and the jars (``testing.jars``), which are found or downloaded
automatically. Each broker has its own ports, cluster id and temporary data directory,
and ends with the process that started it.
"""

import atexit
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Self

from kafka_marshal.addresses import bracketed
from kafka_marshal.closing import Closing
from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
    InvalidTransition,
)
from kafka_marshal.testing.jars import kafka_jars
from kafka_marshal.testing.java import Java, find_java

_HOST = "127.0.0.1"
_LOOK_INTERVAL_S = 0.02
_FORMAT_TIMEOUT_S = 60
_STARTED = b"Kafka Server started"
_PORT_TAKEN = b"Address already in use"
_START_ATTEMPTS = 3
_STOPPED_MS_MAX = 10_000
_STOPPED_LOOK_S = 0.001
_TAIL_BYTES = 4_000
_ERRORS_SHOWN = 6
# Characters that a file of properties may have as they are.
_PLAIN = frozenset(map(chr, range(0x20, 0x7F))) - {"\\"}
_SUPERVISOR = Path(__file__).with_name("supervisor.py")

_JAVA_OPTIONS = (
    "-Xms128m",
    "-Xmx512m",
    # One small heap: the serial collector starts fastest and needs least.
    "-XX:+UseSerialGC",
    "-Djava.awt.headless=true",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSS",
)

# For a single node: no replication, and no delays.
_PROPERTIES = {
    "node.id": "1",
    "process.roles": "broker,controller",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
    "auto.create.topics.enable": "false",
    "min.insync.replicas": "1",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "4",
    "group.initial.rebalance.delay.ms": "0",
    # After a kill the next start must wait until the old session expires.
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": "3000",
    # By default the controller writes and flushes an empty record every half second:
    # half of the CPU time of an idle node. Only other nodes would need it.
    "metadata.max.idle.interval.ms": "0",
    # Tests write records with any CreateTime; Kafka 4 refuses the future.
    "log.message.timestamp.after.max.ms": str(2**63 - 1),
    # The default is a quarter of the heap.
    "log.cleaner.dedupe.buffer.size": "8388608",
}


def new_cluster_id() -> str:
    """Return a fresh cluster id in Kafka's form (a UUID in URL-safe base64)."""
    while True:
        text = urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        # A leading dash would read as an option on a command line.
        if not text.startswith("-"):
            return text


def free_ports(count: int) -> list[int]:
    """Return ``count`` TCP ports that are free at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((_HOST, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _await_stopped(pid: int) -> None:
    """Wait until SIGSTOP has stopped a process: on a busy machine that takes time."""
    deadline = Deadline(_STOPPED_MS_MAX)
    with suppress(OSError):  # there is no /proc, or the process has ended
        while not deadline.is_over:
            stat = Path(f"/proc/{pid}/stat").read_text()
            if stat.rpartition(")")[2].split()[0] == "T":
                return
            time.sleep(_STOPPED_LOOK_S)


def _errors_in(log: bytes) -> str:
    """Return the first errors of a log, which its end often no longer shows."""
    lines = [
        line for line in log.splitlines() if b" ERROR " in line or b"Cause" in line
    ]
    text = b"\n".join(lines[:_ERRORS_SHOWN]).decode(errors="replace")
    return f"Its first errors:\n{text}\n" if text else ""


def _escaped(text: str) -> str:
    """Return text for a file of properties, which Java reads as Latin-1."""
    units = struct.iter_unpack(">H", text.encode("utf-16-be", "surrogatepass"))
    return "".join(
        chr(unit) if chr(unit) in _PLAIN else f"\\u{unit:04x}" for (unit,) in units
    )


class PortTaken(CoordinationError):
    """Another process took the port before the broker bound it."""


class EmbeddedBroker(Closing):
    """One real Kafka broker, as a context manager.

    ::

        with EmbeddedBroker() as broker:
            use(broker.bootstrap_servers)

    Not thread-safe. A forked child may read its attributes; only the process
    that made the object can start and stop the broker.

    Attributes:
        log_path: The broker's log; it is removed with the data directory.
        cluster_id: Id of the cluster; known once the broker was started.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        data_dir: str | os.PathLike[str] | None = None,
        properties: Mapping[str, str] | None = None,
        java_options: Sequence[str] = (),
        class_path: Sequence[str | os.PathLike[str]] = (),
        host: str = _HOST,
        launcher: Sequence[str] = (),
        cluster_id: str = "",
        start_timeout_ms: int = 180_000,
    ) -> None:
        """Prepare a broker; ``start`` starts it.

        Args:
            port: Port that clients connect to; 0 draws a free one.
            data_dir: Directory to keep data in across runs. Without it the
                data is temporary and removed by ``stop``.
            properties: Server properties that override the defaults.
            java_options: Further options for Java, such as ``-Xmx1g``.
            class_path: Class path ahead of Kafka's own jars.
            host: Address that the broker listens on and advertises to clients.
            launcher: Words of a command that runs Java as its last step, such as
                ``ip netns exec NAME``; it must become Java (exec), not its parent.
            cluster_id: Id for new storage; if empty, a random one.
            start_timeout_ms: How long a start may take, without the download of jars.
        """
        self._wanted_port = port
        self._keeps_data = data_dir is not None
        self._data_dir = Path(data_dir) if data_dir is not None else None
        self._extra = dict(properties or {})
        self._java_options = (*_JAVA_OPTIONS, *java_options)
        self._class_path_first = [os.fspath(each) for each in class_path]
        self._connect_host = host.strip("[]")
        self._host = bracketed(self._connect_host)
        self._launcher = tuple(launcher)
        self._start_timeout_ms = start_timeout_ms
        self._owner_pid = os.getpid()
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._java_pid = 0
        self._java: Java | None = None
        self._class_path = ""
        self._ports: tuple[int, int] | None = None
        self._wanted_cluster_id = cluster_id
        self.cluster_id = ""

    # Properties.

    @property
    def bootstrap_servers(self) -> str:
        """The ``host:port`` to connect to; known once the broker was started."""
        if self._ports is None:
            raise InvalidTransition("The broker has no port yet; call start() first.")
        return f"{self._host}:{self._ports[0]}"

    @property
    def log_path(self) -> Path:
        """Path of the broker's log."""
        if self._data_dir is None:
            raise InvalidTransition("The broker has no log yet; call start() first.")
        return self._data_dir / "broker.log"

    @property
    def is_running(self) -> bool:
        """Whether the broker's process exists (also while it is paused)."""
        return self._supervisor is not None and self._supervisor.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the broker's Java."""
        self._require_running()
        return self._java_pid

    # Life cycle.

    def start(self) -> Self:
        """Start the broker and wait until it serves clients.

        Returns:
            This object.

        Raises:
            ConfigurationError: Java or jgo is missing, or a setting is wrong.
            CoordinationError: The broker ended; the message has the end of its log.
            DeadlineExceeded: It was not ready in time; it is stopped again.
        """
        self._require_owner()
        if self.is_running:
            raise InvalidTransition("The broker runs already; call stop() first.")
        if self._java is None:
            java = find_java()
            found = [*self._class_path_first, *map(str, kafka_jars(java))]
            self._class_path = os.pathsep.join(found)
            self._java = java
        if self._data_dir is None:
            self._data_dir = Path(tempfile.mkdtemp(prefix="kafka-marshal-broker-"))
        atexit.register(_stop_at_exit, weakref.ref(self))
        try:
            self._start_on_free_ports()
        except BaseException:
            self.stop()
            raise
        return self

    def _start_on_free_ports(self) -> None:
        """Start; if drawn ports were taken meanwhile, draw others."""
        drawn = self._ports is None
        for attempt in range(1, _START_ATTEMPTS + 1):
            if drawn:
                client_port, controller_port = free_ports(2)
                self._ports = (self._wanted_port or client_port, controller_port)
            deadline = Deadline(self._start_timeout_ms)
            self._write_properties()
            self._format()
            offset = self.log_path.stat().st_size if self.log_path.exists() else 0
            self._spawn()
            try:
                self._wait_ready(offset, deadline)
            except PortTaken:
                # A requested port, or one that clients know, cannot change.
                is_free_to_move = drawn and self._wanted_port == 0
                if not is_free_to_move or attempt == _START_ATTEMPTS:
                    raise
            else:
                return

    def stop(self, *, timeout_ms: int = 20_000) -> None:
        """Stop the broker; temporary data is removed. Idempotent.

        With a permanent data directory the shutdown is orderly. Temporary data needs
        none, and a kill is faster.

        Args:
            timeout_ms: How long an orderly shutdown may take before a kill.
        """
        self._require_owner()
        self._end(signal.SIGTERM if self._keeps_data else signal.SIGKILL, timeout_ms)
        if not self._keeps_data and self._data_dir is not None:
            rmtree(self._data_dir, ignore_errors=True)
            self._data_dir = None
            self._ports = None

    def kill(self) -> None:
        """Kill the broker at once (SIGKILL); its data stays for ``restart``."""
        self._require_owner()
        self._end(signal.SIGKILL, 0)

    def restart(self, *, timeout_ms: int = 20_000) -> None:
        """Start the broker again on the same ports and data.

        A broker that still runs gets an orderly shutdown first; after ``kill``
        or a crash it recovers its data.

        Args:
            timeout_ms: How long the orderly shutdown may take before a kill.
        """
        self._require_owner()
        if self._ports is None:
            raise InvalidTransition("The broker never ran; call start() first.")
        self._end(signal.SIGTERM, timeout_ms)
        self.start()

    def pause(self) -> None:
        """Stop the broker's process from running (SIGSTOP); sockets stay open.

        On Linux it is stopped when this returns. On other systems, or if it gets no
        processor time for the signal for long, it may still answer for a while.
        """
        self._require_running()
        os.kill(self._java_pid, signal.SIGSTOP)
        _await_stopped(self._java_pid)

    def resume(self) -> None:
        """Continue a paused broker (SIGCONT)."""
        self._require_running()
        os.kill(self._java_pid, signal.SIGCONT)

    def log_tail(self) -> str:
        """Return the end of the broker's log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - _TAIL_BYTES))
                return log.read().decode(errors="replace")
        except (OSError, InvalidTransition):
            return ""

    def __enter__(self) -> Self:
        return self.start()

    def close(self) -> None:
        """Stop it; see ``stop``. Idempotent."""
        self.stop()

    # Implementation.

    def _require_owner(self) -> None:
        if os.getpid() != self._owner_pid:
            raise InvalidTransition(
                f"This broker belongs to process {self._owner_pid}; a forked child "
                "cannot start or stop it."
            )

    def _require_running(self) -> None:
        self._require_owner()
        if not self.is_running:
            raise InvalidTransition("The broker does not run; call start() first.")

    def _place(self) -> Path:
        assert self._data_dir is not None
        return self._data_dir

    def _properties_path(self) -> Path:
        return self._place() / "server.properties"

    def _write_properties(self) -> None:
        assert self._ports is not None
        port, controller_port = self._ports
        if "," in str(self._place()):
            raise ConfigurationError(
                f"Kafka cannot keep data in {str(self._place())!r}: it takes a comma "
                "for the end of a directory's name. Name another directory as "
                "data_dir, or as TMPDIR for temporary data.",
                setting="data_dir",
            )
        ours = _PROPERTIES | {
            "listeners": f"PLAINTEXT://{self._host}:{port},"
            f"CONTROLLER://{self._host}:{controller_port}",
            "advertised.listeners": f"PLAINTEXT://{self._host}:{port}",
            "controller.quorum.voters": f"1@{self._host}:{controller_port}",
            "log.dirs": str(self._place() / "data"),
        }
        lines = [
            f"{key}={_escaped(str(value))}\n"
            for key, value in (ours | self._extra).items()
        ]
        try:
            self._place().mkdir(parents=True, exist_ok=True)
            self._properties_path().write_text("".join(lines))
        except OSError as error:
            raise ConfigurationError(
                f"Kafka cannot keep data in {str(self._place())!r}: {error}. Name a "
                "writable directory as data_dir, or as TMPDIR for temporary data.",
                setting="data_dir",
            ) from error

    def _command(self, main_class: str, *arguments: str) -> list[str]:
        assert self._java is not None
        return [
            str(self._java.executable),
            *self._java_options,
            "-cp",
            self._class_path,
            main_class,
            *arguments,
        ]

    def _format(self) -> None:
        """Format the storage unless an earlier run did."""
        meta = self._place() / "data" / "meta.properties"
        if meta.is_file():
            lines = dict(
                line.split("=", 1)
                for line in meta.read_text().splitlines()
                if "=" in line
            )
            self.cluster_id = lines["cluster.id"]
            return
        self.cluster_id = self._wanted_cluster_id or new_cluster_id()
        path = str(self._properties_path())
        done = subprocess.run(
            self._command(
                "kafka.tools.StorageTool", "format", "-t", self.cluster_id, "-c", path
            ),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(_FORMAT_TIMEOUT_S, self._start_timeout_ms / 1000),
            check=False,
        )
        if done.returncode != 0:
            output = (done.stdout + done.stderr).strip()[-_TAIL_BYTES:]
            raise ConfigurationError(
                "Kafka refused to format its storage; check the properties of "
                f"EmbeddedBroker. Its output:\n{output}",
                setting="properties",
            )

    def _spawn(self) -> None:
        java = self._command("kafka.Kafka", str(self._properties_path()))
        command = [*self._launcher, *java]
        supervisor = [
            sys.executable,
            "-I",
            "-S",
            str(_SUPERVISOR),
            str(os.getpid()),
            *command,
        ]
        with self.log_path.open("ab") as log:
            self._supervisor = subprocess.Popen(
                supervisor,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                # Interrupts of the terminal must reach this process, not the broker.
                start_new_session=True,
            )
        assert self._supervisor.stdout is not None
        with self._supervisor.stdout as pipe:
            line = pipe.readline()
        if not line.strip().isdigit():
            raise CoordinationError(f"The broker did not start:\n{self.log_tail()}")
        self._java_pid = int(line)

    def _wait_ready(self, log_offset: int, deadline: Deadline) -> None:
        """Wait until the log reports the start and the port answers."""
        assert self._ports is not None
        while True:
            ended = not self.is_running
            with self.log_path.open("rb") as log:
                log.seek(log_offset)
                text = log.read()
            if ended:
                self._end(signal.SIGKILL, 0)
                kind = PortTaken if _PORT_TAKEN in text else CoordinationError
                raise kind(
                    f"The broker ended while it started. {_errors_in(text)}The end of "
                    f"its log:\n{self.log_tail()}"
                )
            if _STARTED in text:
                with suppress(OSError):
                    address = (self._connect_host, self._ports[0])
                    socket.create_connection(address, timeout=1).close()
                    return
            if deadline.is_over:
                tail = self.log_tail()
                self._end(signal.SIGKILL, 0)
                raise DeadlineExceeded(
                    f"The broker was not ready after {deadline.timeout_ms} ms; "
                    "a slow machine needs a larger start_timeout_ms. The end of its "
                    f"log:\n{tail}"
                )
            time.sleep(_LOOK_INTERVAL_S)

    def _end(self, first: signal.Signals, timeout_ms: int) -> None:
        """End the broker's process by ``first``, then by SIGKILL; wait for it."""
        supervisor = self._supervisor
        if supervisor is None:
            return
        if supervisor.poll() is None and self._java_pid:
            # A paused process does not handle SIGTERM.
            for signum in (first, signal.SIGCONT):
                with suppress(ProcessLookupError):
                    os.kill(self._java_pid, signum)
            if first is not signal.SIGKILL:
                with suppress(subprocess.TimeoutExpired):
                    supervisor.wait(timeout_ms / 1000)
        if supervisor.poll() is None:
            if self._java_pid:
                with suppress(ProcessLookupError):
                    os.kill(self._java_pid, signal.SIGKILL)
            else:
                supervisor.kill()
        supervisor.wait(30)
        self._supervisor = None
        self._java_pid = 0


def _stop_at_exit(reference: "weakref.ref[EmbeddedBroker]") -> None:
    """Stop a broker that still runs, in the process that started it."""
    broker = reference()
    if broker is not None and broker._owner_pid == os.getpid():  # noqa: SLF001
        broker.stop()
