"""Kept states in a simulated world: checkpoints, states of hosts, Resets (PROTOCOL 7).

The state that a process began from must not show: at each offset its digests must be
those of a reader that has folded everything.
"""

from collections.abc import Callable, Mapping

from kafka_marshal.defaults import COORDINATION_TOPIC
from kafka_marshal.engine.checkpoint_reader import LogCheckpoints
from kafka_marshal.engine.checkpointing import CheckpointRule
from kafka_marshal.engine.kept_states import KeptState, KeptStates
from kafka_marshal.engine.snapshotter import capture
from kafka_marshal.ports import CoordinationLog, Event, LogRange
from kafka_marshal.protocol.checkpoints import split
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.records import (
    CheckpointBegin,
    CheckpointEnd,
    Reset,
)
from simulator.checkers import Violation
from simulator.files import HostFiles
from simulator.node import Node
from simulator.pauses import ADMIN
from simulator.plan import (
    CHECKPOINT,
    DAMAGE,
    HALT,
    KEEP,
    Fault,
    Plan,
    chance,
)
from simulator.world import World

ENTRIES = (40, 80, 160)
INTERVAL_HS = 20
ADMIN_GROUP = "marshal"
FIND_MS = 1_000


class Shelf(KeptStates):
    """The states that one host has kept, by coordinating partition."""

    def __init__(self) -> None:
        """Start without states."""
        self.states: dict[int, KeptState] = {}

    def find(
        self, wanted: Mapping[int, LogRange], *, log: CoordinationLog, timeout_ms: int
    ) -> Mapping[int, KeptState]:
        """Return the kept states of these partitions, whether or not they fit."""
        del log, timeout_ms
        return {t: state for t, state in self.states.items() if t in wanted}


class Keeping:
    """Lets processes write checkpoints, keep states, and begin from them.

    Attributes:
        on_begin: Called once with the process that begins a checkpoint next.
        files: Files of the hosts in worlds in which these get damaged, else None.
    """

    def __init__(self, world: World) -> None:
        """Start with nothing kept."""
        plan: Plan = world.plan
        rng = chance(plan.seed, "keeping")
        self.on_begin: list[Callable[[bytes], None]] = []
        self._world = world
        self._rule = CheckpointRule(
            interval_ms=INTERVAL_HS * plan.h_ms, entries=rng.choice(ENTRIES)
        )
        self._writes = CHECKPOINT in plan.kinds
        self._keeps = KEEP in plan.kinds
        # Newer programs write checkpoints that no process here may begin from.
        self._reads = self._writes or HALT in plan.kinds
        self._shelves: dict[str, Shelf] = {}
        self.files: HostFiles | None = None
        if DAMAGE in plan.kinds:
            topic_id = world.cluster.kafka.topic(COORDINATION_TOPIC).topic_id
            cluster_id = world.cluster.config.cluster_id
            self.files = HostFiles(cluster_id=cluster_id, topic_id=topic_id)
        # Processes that started on hosts with damaged files.
        self._hurt: set[bytes] = set()
        self._writing: set[bytes] = set()
        self._resets = 0

    def sources(self, client_id: str) -> tuple[KeptStates, ...]:
        """Return the sources in which a process of a client looks for states."""
        shelves: tuple[KeptStates, ...] = ()
        if self.files is not None:
            shelves = (self.files.folder(client_id),)
        elif self._keeps:
            shelves = (self._shelf(client_id),)
        return (*shelves, LogCheckpoints()) if self._reads else shelves

    def take_part(self, node: Node) -> None:
        """Let a process write checkpoints, if this world has them."""
        client_id = node.owner.client_id
        if self.files is not None and self.files.is_hurt(client_id):
            self._hurt.add(node.owner.incarnation)
        if self._writes:
            node.engine.write_checkpoints(node.owner.client_id, self._rule)

    def keep(self, node: Node) -> None:
        """Let the host of a process keep its present states."""
        context = node.engine.context
        client_id = node.owner.client_id
        shelf = self._shelf(client_id)
        for number, replica in context.replicas.items():
            is_whole = number not in context.rebuilding
            if is_whole and replica.world.leader_epoch is not None:
                state = capture(replica.world, source="its host")
                shelf.states[number] = state
                if self.files is not None:
                    self.files.save(client_id, state)

    def damage(self, node: Node, number: int, *, fault: Fault) -> str | None:
        """Damage the kept state of a partition at a host; return how, if at all."""
        rng = chance(self._world.plan.seed, f"damage/{fault.number}")
        if self.files is None:
            return None
        return self.files.damage(node.owner.client_id, number, rng=rng)

    def observe(self, node: Node, event: Event) -> None:
        """Note from the events of an engine the states that it begins from."""
        if self.files is not None:
            self.files.observe(node.owner.client_id, event)
            if event.name == "ready" and node.owner.incarnation in self._hurt:
                self._world.coverage.note("began_despite_damage")

    def require_sound(self) -> None:
        """Demand that no process began from a damaged file, or one of another log.

        Raises:
            Violation: A process did.
        """
        if self.files is not None and self.files.misled is not None:
            raise Violation("7.1", self.files.misled)

    def close(self) -> None:
        """Remove the files of all hosts."""
        if self.files is not None:
            self.files.close()

    def _shelf(self, client_id: str) -> Shelf:
        return self._shelves.setdefault(client_id, Shelf())

    # --- checkpoints

    def on_record(self, record: object) -> None:
        """Note from a folded record which process is writing a checkpoint now."""
        if isinstance(record, CheckpointBegin):
            self._writing.add(record.incarnation)
            while self.on_begin:
                self.on_begin.pop()(record.incarnation)
        elif isinstance(record, CheckpointEnd):
            self._writing.discard(record.incarnation)

    def writer(self, node: Node) -> bytes | None:
        """Return a process's incarnation in checkpoints, None if it writes none."""
        writer = node.engine.checkpointer
        return None if writer is None else writer.claimant.owner.incarnation

    def on_ended(self, node: Node) -> None:
        """Record that a process ends: its checkpoint may never be completed."""
        if self.writer(node) in self._writing:
            self._world.coverage.note("checkpoint_torn")

    # --- resets

    def reset(self, number: int) -> None:
        """Let an admin replace a partition's state by that of its last checkpoint."""
        world = self._world
        log = world.cluster.kafka.coordination_log(name=ADMIN.client_id)
        starts, ends = log.start_offsets(FIND_MS), log.end_offsets(FIND_MS)
        wanted = {number: LogRange(starts[number], ends[number])}
        kept = LogCheckpoints().find(wanted, log=log, timeout_ms=FIND_MS).get(number)
        if kept is None:
            world.trace(f"there is no checkpoint of {number} to go back to")
            return
        self._resets += 1
        world.trace(f"the state of {number} is replaced by that of {kept.offset}")
        op_id, parts = b"%016d" % self._resets, split(kept.state)
        for at, part in enumerate(parts):
            record = Reset(
                client_id=ADMIN.client_id,
                group_id=ADMIN_GROUP,
                incarnation=ADMIN.incarnation,
                seq=at,
                op_id=op_id,
                number=at,
                part_count=len(parts),
                size_bytes=len(kept.state),
                digest=bytes.fromhex(kept.digest),
                data=part,
            )
            world.cluster.kafka.produce(world.cluster.place(number), encode(record))
