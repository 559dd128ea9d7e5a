"""Faults in a world of sidecars, one at a time, as a seed draws them."""

from typing import TYPE_CHECKING

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.hashing import home_partition
from simulator.base import GROUP
from simulator.node import Node
from simulator.pauses import Pauses
from simulator.plan import FENCES, HANDOFFS, PLANS, RESIZE, SEEKS
from simulator.plans import nonsense
from simulator.sidecar.client import Hosted
from simulator.sidecar.fences import HostedFences
from simulator.sidecar.positions import HostedAdmins
from simulator.sidecar.resizing import HostedResizes
from simulator.sidecar.seeks import HostedSeeks
from simulator.sidecar.world import POSITIONS, HostedWorld, Place, Process

if TYPE_CHECKING:
    from collections.abc import Callable

PROCESSES_MAX = 7
LEADERS = 8


class Troubles:
    """Lets faults strike in a world.

    Attributes:
        admins: Admins that set positions.
        resizes: Admins that change the number of coordinating partitions.
    """

    def __init__(self, world: HostedWorld) -> None:
        """Start with a world without faults."""
        self._world = world
        self._rng = world.rng
        self.admins, self.resizes = HostedAdmins(world), HostedResizes(world)
        self._fences, self._seeks = HostedFences(world), HostedSeeks(world)
        self._pauses = Pauses(world.cluster, world.watcher, group_id=GROUP)

    def strike(self) -> None:
        """Let one fault strike, of those that exist in this world."""
        acts: dict[str, Callable[[], None]] = {
            "cut": self._cut,
            "crash": self._crash_sidecar,
            "hang": self._hang_sidecar,
            "death": self._kill,
            "stop": self._stop,
            "suspend": self._suspend,
            "line": self._break_line,
            "drain": self._drain,
            "pause": self._pause,
            "churn": self._churn,
            "failover": self._fail_over,
            FENCES: self._fences.strike,
            POSITIONS: self.admins.strike,
            PLANS: self._write_nonsense,
            RESIZE: self.resizes.strike,
            SEEKS: self._seeks.strike,
        }
        names = [name for name in acts if name in self._world.faults]
        if names:
            name = self._rng.choice(names)
            self._world.count(name)
            acts[name]()

    def _write_nonsense(self) -> None:
        """Write the next Plan of the group, of any members for any keys."""
        world, count = self._world, self._world.partition_count
        home = home_partition(GROUP, partition_count=count)
        names = [place.host.name for place in world.hosts]
        names += [each.client_id for each in world.processes]
        record = nonsense(
            self._rng,
            names,
            home=world.watcher.worlds[home],
            partitions=len(world.places),
            coordinators=count,
        )
        world.cluster.kafka.produce(world.cluster.place(home), encode(record))
        world.trace("somebody writes a plan of nonsense")

    def _span_ms(self) -> int:
        """Draw how long something lasts: often short, at times many leases."""
        return self._rng.randint(1, self._rng.choice([1, 2, 4, 8]) * self._world.h)

    def _victim(self, *, hosted: bool = False) -> Process | None:
        fit = [
            each
            for each in self._world.processes
            if not each.is_leaving and (not hosted or isinstance(each.work, Hosted))
        ]
        return self._rng.choice(fit) if fit else None

    def _running(self) -> Place | None:
        fit = [place for place in self._world.hosts if place.host.is_up]
        return self._rng.choice(fit) if fit else None

    # --- of sidecars

    def _crash_sidecar(self) -> None:
        place = self._running()
        if place is None:
            return
        after_ms = self._rng.choice([0, self._span_ms()])
        place.host.crash()
        place.mends_ms = 0
        place.drains_ms = None
        place.starts_ms = self._world.now_ms + after_ms
        self._world.trace(f"{place.host.name} crashes for {after_ms} ms")

    def _hang_sidecar(self) -> None:
        place = self._running()
        if place is not None:
            self._hang(place, self._world.now_ms + self._span_ms())

    def _hang(self, place: Place, until_ms: int) -> None:
        place.host.is_hung = True
        place.wakes_ms = until_ms
        for_ms = until_ms - self._world.now_ms
        self._world.trace(f"{place.host.name} is stopped for {for_ms} ms")

    def _drain(self) -> None:
        """Shut a sidecar down with a drain, and start it again."""
        place = self._running()
        if (
            place is not None
            and place.host.service is not None
            and not place.host.is_hung
        ):
            span_ms = self._span_ms()
            place.drains_ms = self._world.now_ms + span_ms
            if HANDOFFS in self._world.faults:
                place.host.service.start_handoff(for_ms=span_ms + self._world.h)
                place.recalls_ms = self._world.now_ms + span_ms // 2
            else:
                place.host.service.start_drain()
            self._world.trace(f"{place.host.name} is asked to end")

    def _suspend(self) -> None:
        """Stop everything on a machine; its boot clock continues."""
        place = self._rng.choice(self._world.hosts)
        until_ms = self._world.now_ms + self._span_ms()
        if place.host.is_up:
            self._hang(place, until_ms)
        for process in self._world.processes:
            if process.host is place.host:
                process.wakes_ms = until_ms
        self._world.trace(f"the machine of {place.host.name} is suspended")

    # --- of processes

    def _kill(self) -> None:
        process = self._victim()
        if process is not None:
            self._world.trace(f"{process.name} dies")
            self._world.remove(process)
            after_ms = self._rng.randint(0, 3 * self._world.h)
            self._world.restarts.append((self._world.now_ms + after_ms, process))

    def _stop(self) -> None:
        process = self._victim()
        if process is not None:
            for_ms = self._span_ms()
            process.wakes_ms = self._world.now_ms + for_ms
            self._world.trace(f"{process.name} is stopped for {for_ms} ms")

    def _break_line(self) -> None:
        process = self._victim(hosted=True)
        if process is not None and isinstance(process.work, Hosted):
            for_ms = self._span_ms()
            process.work.line.is_cut = True
            process.mends_ms = self._world.now_ms + for_ms
            self._world.trace(f"{process.name} is cut off from it for {for_ms} ms")

    def _churn(self) -> None:
        world = self._world
        if len(world.processes) < PROCESSES_MAX and world.chance(0.5):
            world.join(self._rng.choice([*world.hosts, None]))
            return
        process = self._victim()
        if process is None or len(world.processes) == 1:
            return
        world.trace(f"{process.name} leaves")
        work = process.work
        if isinstance(work, Node) and not work.engine.is_ready:
            world.remove(process)  # it has no session yet
        else:
            process.is_leaving = True
            work.leave()

    # --- of the network and the cluster

    def _cut(self) -> None:
        """Cut a sidecar or a process off from the cluster."""
        world, for_ms = self._world, self._span_ms()
        process, place = self._victim(), self._running()
        if process is not None and (place is None or world.chance(0.5)):
            process.mends_ms = world.now_ms + for_ms
            if isinstance(process.work, Node):
                process.work.cut(is_cut=True)
            else:
                process.work.data.cut = True
            world.trace(f"{process.name} is cut off for {for_ms} ms")
        elif place is not None:
            place.mends_ms = world.now_ms + for_ms
            place.host.cut(is_cut=True)
            world.trace(f"{place.host.name} is cut off for {for_ms} ms")

    def _fail_over(self) -> None:
        world = self._world
        number = self._rng.randrange(len(world.watcher.worlds))
        skew_ms = self._rng.randint(-3 * world.h, 3 * world.h)
        place = world.cluster.place(number)
        # Each leader epoch has its own broker: no clock steps within an epoch.
        leaders = LEADERS * (1 + world.is_resizing)
        leader = leaders * (world.cluster.kafka.log(place).leader_epoch + 1) + number
        world.cluster.kafka.set_skew(leader, skew_ms)
        world.cluster.kafka.fail_over(place, leader=leader)
        world.trace(f"{place} is led by {leader}, its clock at {skew_ms:+}")

    def _pause(self) -> None:
        for_ms = self._span_ms()
        self.pause(for_ms)

    def pause(self, for_ms: int) -> None:
        """Pause the group for a time."""
        self._pauses.begin(for_ms)
        self._world.trace(f"the group is paused for {for_ms} ms")

    def end_pauses(self) -> None:
        """End every pause."""
        self._pauses.end()
