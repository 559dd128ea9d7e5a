"""A machine in memory: a boot clock, a sidecar's production service, a death watch.

The sidecar can crash and come back. Nothing runs by itself.
"""

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kafka_marshal.defaults import COORDINATION_TOPIC
from kafka_marshal.errors import MarshalError
from kafka_marshal.kafka_io.topic_rules import TopicDescription
from kafka_marshal.observability import FanOut
from kafka_marshal.protocol.types import Owner
from kafka_marshal.runtime import Runtime
from kafka_marshal.sidecar.health import Lifecycle, State
from kafka_marshal.sidecar.service import SidecarService
from simulator.clock import ClockView
from simulator.node import Cluster, Node

if TYPE_CHECKING:
    from kafka_marshal.sidecar.process_monitor import DeathWatch

SEED_BITS = 32


class Watched:
    """A process whose death is reported; see ``deathwatch.Watched``."""

    def __init__(self, pid: int, *, is_dead: bool, on_dead: Callable[[], None]) -> None:
        """Start to watch a process."""
        self.pid = pid
        self.is_dead = is_dead
        self.is_closed = False
        self.on_dead = on_dead

    def replace(self, pids: object) -> bool:
        """Do nothing: children of a process die with it here."""
        del pids
        return True

    def without_dead(self, pids: tuple[int, ...]) -> tuple[int, ...]:
        """Return all: there are no children."""
        return pids

    def close(self) -> None:
        """Stop watching."""
        self.is_closed = True


class Deaths:
    """The death watch of a sidecar, which finds deaths only in ``look``."""

    def __init__(self) -> None:
        """Start without watched processes."""
        self._watched: list[Watched] = []
        self._dead: set[int] = set()

    def watch(
        self,
        pid: int,
        started: int,
        *,
        children: tuple[int, ...],
        on_dead: Callable[[], None],
    ) -> Watched:
        """Watch a process; its children die with it here."""
        del started, children
        found = Watched(pid, is_dead=pid in self._dead, on_dead=on_dead)
        self._watched.append(found)
        return found

    def note(self, pid: int) -> None:
        """Record the death of a process; the sidecar finds it in the next ``look``."""
        self._dead.add(pid)

    def look(self) -> None:
        """Report the processes that died to the sidecar."""
        for each in list(self._watched):
            if each.is_closed:
                self._watched.remove(each)
            elif each.pid in self._dead:
                self._watched.remove(each)
                each.is_dead = True
                each.on_dead()

    def forget(self) -> None:
        """Record that the sidecar itself has died."""
        for each in self._watched:
            each.is_closed = True
        self._watched.clear()


class Host:
    """A machine with a sidecar.

    Attributes:
        name: Name of the sidecar in the log.
        clock: The boot clock of all of its processes.
        deaths: Watches the processes of the machine.
        node: The sidecar's engine, None while it does not run.
        service: The sidecar's service, None until the log was read.
        rng: Random numbers of this machine.
        is_hung: Whether the sidecar is stopped: requests wait, and are executed later,
            after their clients have given up.
        backlog: Requests that arrived meanwhile.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        *,
        folder: Path,
        clock: ClockView,
        rng: random.Random,
    ) -> None:
        """Make a machine whose sidecar does not run yet."""
        self.name = name
        self.clock = clock
        self.deaths = Deaths()
        self.node: Node | None = None
        self.service: SidecarService | None = None
        self.rng = rng
        self.is_hung = False
        self.backlog: list[Callable[[SidecarService], object]] = []
        self._cluster = cluster
        self._folder = folder
        self._states = Lifecycle(clock)

    @property
    def is_up(self) -> bool:
        """Whether the sidecar runs, even if it does not serve yet."""
        return self.node is not None

    def start(self) -> None:
        """Start the sidecar; it serves once it has read the log."""
        owner = Owner(self.name, self.rng.randbytes(16))
        seed = self.rng.getrandbits(SEED_BITS)
        node = Node(
            self._cluster, owner, group_id="of-nobody", seed=seed, clock=self.clock
        )
        node.engine.remove_session(node.session)
        self.node = node

    def step(self) -> None:
        """Let the sidecar's threads act once."""
        if self.node is None or self.is_hung:
            return
        asked, self.backlog = self.backlog, []
        for do in asked:
            if self.service is not None:
                with contextlib.suppress(MarshalError):
                    do(self.service)
        self.node.step()
        if self.service is None and self.node.engine.is_ready:
            self._serve(self.node)
        self.deaths.look()

    def _serve(self, node: Node) -> None:
        self._states = Lifecycle(self.clock)
        for state in (State.STARTING, State.RECOVERY):
            self._states.move(state, reason="simulated")
        ports = node.engine.context.ports
        count = self._cluster.config.partition_count
        description = TopicDescription(
            name=COORDINATION_TOPIC, exists=True, partition_count=count
        )
        service = SidecarService(
            Runtime(node.engine, ports, description, FanOut(), "simulated"),
            client_id=self.name,
            state_dir=self._folder,
            version="simulated",
            states=self._states,
            watch=cast("DeathWatch", self.deaths),
        )
        service.restore(timeout_ms=1)
        self._states.move(State.RUNNING, reason="simulated")
        self.service = service

    def crash(self) -> None:
        """End the sidecar without a shutdown; its clients continue."""
        if self.service is not None:
            for host in self.service.groups:
                if host.identity is not None:
                    host.identity.close()
        self.deaths.forget()
        self.backlog.clear()
        self.is_hung = False
        self.node = self.service = None

    def end(self) -> None:
        """Shut the sidecar down, without waiting for its releases to be read back."""
        if self.service is not None:
            self.service.close(timeout_ms=0)
        self.crash()

    def cut(self, *, is_cut: bool) -> None:
        """Cut the network between the sidecar and the cluster, or restore it."""
        if self.node is not None:
            self.node.cut(is_cut=is_cut)
