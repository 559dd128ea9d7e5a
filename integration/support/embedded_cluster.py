"""A real Kafka cluster of several brokers, for tests of their faults.

KRaft combined mode: each node is broker and controller, by default on loopback, with
ports and a cluster id of its own. Nodes are killed, stopped and started one by one;
replication and elections are Kafka's own::

    with EmbeddedCluster() as cluster:
        use(cluster.bootstrap_servers)
        cluster.kill(cluster.leader("orders", 0))
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from typing import Self, TypeVar

from replicas import KafkaReplicas

from kafka_marshal.closing import Closing
from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
    InvalidTransition,
)
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.testing.broker import (
    EmbeddedBroker,
    PortTaken,
    free_ports,
    new_cluster_id,
)

T = TypeVar("T")

_HOST = "127.0.0.1"
_NODES = 3
_NODES_MAX = 9
_START_ATTEMPTS = 3
_LOOK_INTERVAL_S = 0.1
_LOOK_TIMEOUT_MS = 5_000

# Several nodes on few cores: small heaps, and no time spent on compiling code that
# runs for a minute.
_JAVA_OPTIONS = ("-Xms64m", "-Xmx256m", "-XX:TieredStopAtLevel=1")


def _replicated(nodes: int) -> dict[str, str]:
    """Return properties of a node with which the loss of one node loses no record."""
    copies = str(min(nodes, 3))
    enough = str(min(nodes, 2))
    return {
        "default.replication.factor": copies,
        "min.insync.replicas": enough,
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": enough,
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": enough,
        # As Kafka does: nodes that fell behind see by it that they have caught up.
        "metadata.max.idle.interval.ms": "500",
        # Leaders stay where a fault left them: Kafka does not move them back.
        "auto.leader.rebalance.enable": "false",
    }


class EmbeddedCluster(Closing):
    """A cluster of brokers, as a context manager.

    Not thread-safe. Nodes have the ids 1 to ``nodes``. Only the process that made
    the object can start and stop nodes.

    Attributes:
        nodes: The brokers by node id; they end with ``stop``.
        cluster_id: Id of the cluster.
    """

    def __init__(
        self,
        *,
        nodes: int = _NODES,
        properties: Mapping[str, str] | None = None,
        java_options: Mapping[int, Sequence[str]] | None = None,
        class_path: Sequence[str | PathLike[str]] = (),
        hosts: Mapping[int, str] | None = None,
        advertised: Mapping[int, str] | None = None,
        launchers: Mapping[int, Sequence[str]] | None = None,
        data_dirs: Mapping[int, str | PathLike[str]] | None = None,
        start_timeout_ms: int = 180_000,
    ) -> None:
        """Prepare a cluster; ``start`` starts it.

        Args:
            nodes: Number of brokers, 1 to 9.
            properties: Server properties of every node, which override the defaults.
            java_options: Further options for Java, by node id.
            class_path: Class path ahead of Kafka's own jars.
            hosts: Addresses that nodes listen at, by node id; loopback otherwise.
            advertised: Addresses that nodes advertise to clients, ``host:port`` by node
                id, such as that of a proxy; their own address otherwise.
            launchers: Commands that run Java, by node id; see ``EmbeddedBroker``.
            data_dirs: Directories that keep data, by node id; temporary otherwise.
            start_timeout_ms: How long a start may take, without the download of jars.
        """
        if not 0 < nodes <= _NODES_MAX:
            raise ConfigurationError(
                f"a cluster has 1 to {_NODES_MAX} nodes, not {nodes}", setting="nodes"
            )
        self._ids = range(1, nodes + 1)
        self._properties = _replicated(nodes) | dict(properties or {})
        self._java_options = dict(java_options or {})
        self._class_path = tuple(class_path)
        self._hosts = dict.fromkeys(self._ids, _HOST) | dict(hosts or {})
        self._advertised = dict(advertised or {})
        self._launchers = dict(launchers or {})
        self._data_dirs = dict(data_dirs or {})
        self._start_timeout_ms = start_timeout_ms
        self._replicas: KafkaReplicas | None = None
        self.nodes: dict[int, EmbeddedBroker] = {}
        self.cluster_id = ""

    @property
    def bootstrap_servers(self) -> str:
        """The addresses of all nodes, ``host:port,host:port``."""
        if not self.nodes:
            raise InvalidTransition("The cluster has no ports; call start() first.")
        return ",".join(node.bootstrap_servers for node in self.nodes.values())

    # Life cycle.

    def start(self) -> Self:
        """Start all nodes at once and wait until each serves clients.

        Returns:
            This object.

        Raises:
            ConfigurationError: Java or jgo is missing, or a setting is wrong.
            CoordinationError: A node ended; the message has the end of its log.
            DeadlineExceeded: A node was not ready in time.
        """
        if self.nodes:
            raise InvalidTransition("The cluster was started; call stop() first.")
        for attempt in range(1, _START_ATTEMPTS + 1):
            self._make_nodes()
            try:
                self._on_each(self._ids, EmbeddedBroker.start)
            except PortTaken:
                # Another process took a port before the node bound it.
                self.stop()
                if attempt == _START_ATTEMPTS:
                    raise
            except BaseException:
                self.stop()
                raise
            else:
                break
        settings = ConnectionConfig(self.bootstrap_servers)
        self._replicas = KafkaReplicas(settings)
        return self

    def stop(self) -> None:
        """Stop all nodes; temporary data is removed. Idempotent."""
        if self._replicas is not None:
            self._replicas.close()
            self._replicas = None
        self._on_each(self.nodes, EmbeddedBroker.stop)
        self.nodes = {}

    def kill(self, *nodes: int) -> None:
        """Kill nodes at once (SIGKILL); their data stays for ``restart``."""
        self._on_each(nodes, EmbeddedBroker.kill)

    def restart(self, *nodes: int) -> None:
        """Restart nodes on their ports and data; running ones shut down in order.

        Several start together: a majority of the controllers must be up before
        any of them is ready.

        Raises:
            DeadlineExceeded: One was not ready in time.
        """
        self._on_each(nodes, EmbeddedBroker.restart)

    def pause(self, *nodes: int) -> None:
        """Stop the processes of nodes from running (SIGSTOP); sockets stay open."""
        for node in nodes:
            self.nodes[node].pause()

    def resume(self, *nodes: int) -> None:
        """Continue paused nodes (SIGCONT)."""
        for node in nodes:
            self.nodes[node].resume()

    # Queries.

    def leader(
        self, topic: str, partition: int, *, timeout_ms: int = _LOOK_TIMEOUT_MS
    ) -> int:
        """Return the node that leads a partition; wait until one does.

        Raises:
            DeadlineExceeded: None did in time.
        """

        def look() -> int | None:
            rows = self._looker().of(topic, timeout_ms=timeout_ms)
            found = [row.leader for row in rows if row.partition == partition]
            return found[0] if found else None

        return self._until(look, f"{topic}-{partition} has a leader", timeout_ms)

    def leaders(
        self, topic: str, *, timeout_ms: int = _LOOK_TIMEOUT_MS
    ) -> dict[int, int | None]:
        """Return the node that leads each partition of a topic, or None.

        Raises:
            CoordinationError: No node answered.
        """
        rows = self._looker().of(topic, timeout_ms=timeout_ms)
        return {row.partition: row.leader for row in rows}

    def controller(self, *, timeout_ms: int = _LOOK_TIMEOUT_MS) -> int:
        """Return the node whose controller leads the others; wait until one does.

        Raises:
            DeadlineExceeded: None did in time.
        """
        return self._until(
            lambda: self._looker().controller(timeout_ms=timeout_ms),
            "a controller leads",
            timeout_ms,
        )

    def wait_in_sync(
        self,
        *topics: str,
        nodes: Iterable[int] | None = None,
        timeout_ms: int = 60_000,
    ) -> None:
        """Wait until partitions have leaders and complete copies.

        Args:
            topics: The topics; all of their partitions are checked.
            nodes: The nodes whose copies must be complete, and no others; by
                default all that have one.
            timeout_ms: Longest wait.

        Raises:
            DeadlineExceeded: They are not complete in time.
        """
        wanted = None if nodes is None else frozenset(nodes)

        def is_complete() -> bool:
            rows = [row for each in topics for row in self._looker().of(each)]
            return bool(rows) and all(
                row.leader is not None
                and row.in_sync
                == (
                    frozenset(row.nodes)
                    if wanted is None
                    else wanted.intersection(row.nodes)
                )
                for row in rows
            )

        self._until(is_complete, f"{', '.join(topics)} in sync", timeout_ms)

    def __enter__(self) -> Self:
        return self.start()

    def close(self) -> None:
        """Stop it; see ``stop``. Idempotent."""
        self.stop()

    # Implementation.

    def _make_nodes(self) -> None:
        """Draw ports and a cluster id, and prepare a broker for each node."""
        ports = free_ports(2 * len(self._ids))
        clients = dict(zip(self._ids, ports[::2], strict=True))
        controllers = dict(zip(self._ids, ports[1::2], strict=True))
        self.cluster_id = new_cluster_id()
        voters = [f"{n}@{self._hosts[n]}:{controllers[n]}" for n in self._ids]
        for node in self._ids:
            host = self._hosts[node]
            own = {
                "node.id": str(node),
                "controller.quorum.voters": ",".join(voters),
                "listeners": f"PLAINTEXT://{host}:{clients[node]},"
                f"CONTROLLER://{host}:{controllers[node]}",
            }
            if node in self._advertised:
                listener = f"PLAINTEXT://{self._advertised[node]}"
                own["advertised.listeners"] = listener
            self.nodes[node] = EmbeddedBroker(
                port=clients[node],
                data_dir=self._data_dirs.get(node),
                properties=own | self._properties,
                java_options=(*_JAVA_OPTIONS, *self._java_options.get(node, ())),
                class_path=self._class_path,
                host=host,
                launcher=self._launchers.get(node, ()),
                cluster_id=self.cluster_id,
                start_timeout_ms=self._start_timeout_ms,
            )

    def _on_each(
        self, nodes: Iterable[int], act: Callable[[EmbeddedBroker], object]
    ) -> None:
        """Call a function for several nodes at once; raise the first error."""
        chosen = [self.nodes[node] for node in nodes]
        if not chosen:
            return
        # Wait for all nodes: the others end or start even if one fails.
        with ThreadPoolExecutor(len(chosen), "marshal-cluster") as pool:
            done = [pool.submit(act, node) for node in chosen]
        failed = [error for each in done if (error := each.exception(timeout=0))]
        # A port that is in use ends one node, and the others then fail without it.
        failed.sort(key=lambda error: not isinstance(error, PortTaken))
        if failed:
            raise failed[0]

    def _looker(self) -> KafkaReplicas:
        if self._replicas is None:
            raise InvalidTransition("The cluster does not run; call start() first.")
        return self._replicas

    def _until(self, look: Callable[[], T | None], what: str, timeout_ms: int) -> T:
        """Return what ``look`` returns once it is neither None nor false."""
        deadline = Deadline(timeout_ms)
        why = ""
        while True:
            try:
                if found := look():
                    return found
            except CoordinationError as error:
                why = f": {error}"
            if deadline.is_over:
                raise DeadlineExceeded(f"Not within {timeout_ms} ms: {what}{why}")
            time.sleep(_LOOK_INTERVAL_S)
