"""A world of hosts, sidecars, clients and plain consumers, with its invariants.

A seed draws the world. Every process is called one step at a time; after each call at
most one process may use a key by its own deadlines, whichever claims it in the log.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from kafka_marshal.config import Callbacks, ConsumerConfig, Delivery
from kafka_marshal.engine import Holding
from kafka_marshal.errors import (
    ClaimLost,
    ClientFenced,
    IdentityConflict,
    MarshalError,
)
from kafka_marshal.ports import Record
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.records import GroupSettings
from kafka_marshal.protocol.settings import PLANNER
from kafka_marshal.protocol.types import Key, Owner, Token
from simulator.base import GROUP, TOPIC, BaseWorld, is_of_one_claim
from simulator.checkers import Folded, Violation
from simulator.fakestore import AppendFate
from simulator.garbage import NAME as GARBAGE
from simulator.handoffs import COLD, DIE, NEVER, SLOW, mood_of, on_warm_of
from simulator.loop import Loop
from simulator.node import Cluster, ConsumerSpec, Node
from simulator.plan import GARBAGE_POLICY, HANDOFFS, PLANS, RESIZE, chance
from simulator.position_judge import PositionJudge
from simulator.sidecar.client import Hosted
from simulator.sidecar.host import SEED_BITS, Host

CLAIMED_TOPIC = "claimed"
FAULTS = (
    "delay",
    "late",
    "loss",
    "copies",
    "cut",
    "crash",
    "hang",
    "death",
    "stop",
    "suspend",
    "line",
    "answers",
    "slow",
    "drain",
    "pause",
    "churn",
    "failover",
    "drift",
    "unwatched",
)
"""Kinds of faults; a seed draws which of these exist in its world."""
POSITIONS = "positions"
"""Only on request: admins set positions, and die during that."""
RESIZED_FROM = 4
"""Coordinating partitions at the start, if their number changes."""
ENDS = 0.3
ENDS_SLOWLY = 0.02
"""Probability that a call of ``on_warm`` ends in a round."""
OF_APPENDS = frozenset({"delay", "late", "loss", "copies"})


@attrs.define(eq=False, kw_only=True)
class Process:
    """An application, with a sidecar or without.

    Attributes:
        name: Its name, unique for ever.
        client_id: Its name in the group.
        work: The process: a client of a sidecar, or one with its own engine.
        mood: How its application warms up, if it does.
        hand: Records handed out and not committed.
        wakes_ms: True time until which it is stopped.
        mends_ms: True time until which its connection, or its network, is cut.
        is_leaving: Whether it was asked to end.
        checked: Offsets up to which its replicas were compared, by partition.
    """

    name: str
    client_id: str
    work: Hosted | Node
    mood: str = COLD
    hand: list[Record] = attrs.field(factory=list)
    wakes_ms: int = 0
    mends_ms: int = 0
    is_leaving: bool = False
    checked: dict[int, int] = attrs.field(factory=dict)

    @property
    def host(self) -> Host | None:
        """Its machine's sidecar, if it uses one."""
        return self.work.host if isinstance(self.work, Hosted) else None

    @property
    def held(self) -> dict[Key, Holding]:
        """The keys that it may use now, by its own lease and clock."""
        return self.work.held


@attrs.define(eq=False, kw_only=True)
class Place:
    """A host's sidecar, and the faults that affect it.

    Attributes:
        host: The host.
        wakes_ms: True time until which the sidecar is stopped.
        mends_ms: True time until which its network is cut.
        starts_ms: True time at which it is started again, None while it runs.
        drains_ms: True time at which a drain is over, even if keys are left.
        recalls_ms: True time until which it hands keys off first, None without handoff.
        checked: Offsets up to which its replicas were compared, by partition.
    """

    host: Host
    wakes_ms: int = 0
    mends_ms: int = 0
    starts_ms: int | None = None
    drains_ms: int | None = None
    recalls_ms: int | None = None
    checked: dict[int, int] = attrs.field(factory=dict)


class Fates:
    """Draws the fate of every append, until it is healed."""

    def __init__(self, rng: random.Random, h: int) -> None:
        self.faults: tuple[str, ...] = ()
        self.hardness = 0.0
        self._rng = rng
        self._h = h

    def of_append(self, writer: str, partition: int) -> AppendFate:
        """Return the fate of the next append."""
        del writer, partition
        rng, h = self._rng, self._h
        if not self.faults or rng.random() > self.hardness:
            return AppendFate()
        kind = rng.choice(self.faults)
        if kind == "delay":
            return AppendFate(delay_ms=rng.randint(1, h // 2))
        if kind == "late":
            fails_ms = rng.randint(1, h // 2)
            return AppendFate(delay_ms=rng.randint(1, 3 * h), fails_after_ms=fails_ms)
        if kind == "loss":
            return AppendFate(is_lost=True)
        return AppendFate(delay_ms=rng.choice([0, h // 10]), copies=2)


class HostedWorld(BaseWorld):
    """The hosts and processes of a simulated world, and their steps."""

    is_broken: bool = True

    def __init__(
        self,
        seed: int,
        *,
        folder: Path,
        delivery: Delivery | None = None,
        faults: Sequence[str] | None = None,
        span: int | None = None,
    ) -> None:
        """Draw a world.

        Args:
            seed: Decides everything.
            folder: Empty folder for identities and lease journals of sidecars.
            delivery: The guarantee of delivery; None: drawn.
            faults: Kinds of faults, of ``FAULTS``; None: drawn.
            span: Limit of the Config; None for the default.
        """
        self.seed = seed
        rng = self.rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
        self.h = rng.choice([1_000, 2_000, 5_000])
        self.counts: dict[str, int] = {}
        drawn = rng.choice(list(Delivery))
        self.delivery = delivery or drawn
        lot = [name for name in FAULTS if rng.random() < 0.5]  # noqa: PLR2004
        self.faults = frozenset(lot if faults is None else faults)
        self.fates = self._draw_fates()
        self.on_folded: Callable[[Folded], None] = lambda _: None
        self.on_driven: Callable[[Process], None] = lambda _: None
        partitions = rng.randint(1, 2)
        cluster = Cluster(
            heartbeat_interval_ms=self.h,
            partitions=RESIZED_FROM if self.is_resizing else partitions,
            policy=self.fates,
            limits={} if span is None else {"span": span},
        )
        places = cluster.fill(TOPIC, [0] * rng.randint(1, 4))
        cluster.fill(CLAIMED_TOPIC, [0])
        is_amo = self.delivery is Delivery.AT_MOST_ONCE
        self.loop, self.positions = Loop(cluster.clock), PositionJudge()
        super().__init__(cluster, places, is_at_most_once=is_amo)
        self.spec = ConsumerSpec(
            ConsumerConfig(
                topics=(TOPIC,),
                delivery=self.delivery,
                policy=self._policy(rng.choice(["fair", "fair", "greedy"])),
                max_poll_records=rng.choice([1, 3, 20]),
                max_granted_batches=rng.choice([1, 2, 4]),
                max_handling_ms=0,
                release_behind=False,
            ),
            Callbacks(on_lost=lambda _tp, _end: None),
        )
        self._warming_rng = chance(seed, "warming")
        self.processes: list[Process] = []
        self._users: dict[tuple[Key, Token], Process] = {}
        self._names = self._pids = self._starts = 0
        self.restarts: list[tuple[int, Process]] = []
        self.hosts = [
            Place(host=self._host(f"host-{number}", folder))
            for number in range(rng.randint(1, 2))
        ]
        for place in self.hosts:
            for _ in range(rng.randint(1, 3)):
                self.join(place)
        if self.faults & {HANDOFFS, PLANS}:
            self._set_group()
        self.join_claimer(rng.choice(self.hosts))
        for _ in range(rng.randint(0, 2)):
            self.join(None)

    def _draw_fates(self) -> Fates:
        fates = Fates(random.Random(self.seed + 1), self.h)  # noqa: S311
        fates.faults = tuple(sorted(self.faults & OF_APPENDS))
        fates.hardness = self.rng.choice([0.05, 0.2, 0.4])
        return fates

    @property
    def is_resizing(self) -> bool:
        """Whether the number of coordinating partitions may change."""
        return RESIZE in self.faults

    def _set_group(self) -> None:
        """Draw how long successors have to warm up, and for how many keys at once.

        Also lets the group follow Plans, if this world has them.
        """
        rng, count = chance(self.seed, "handoffs"), self.cluster.config.partition_count
        record = GroupSettings(
            client_id="admin",
            group_id=GROUP,
            incarnation=bytes(16),
            seq=1,
            generation=1,
            policy=PLANNER if PLANS in self.faults else None,
            planner_version_max=None,
            debounce_ms=None,
            handoff_ms=rng.choice([self.h // 2, 3 * self.h, 20 * self.h]),
            handoffs_max=rng.choice([1, 8]),
            grace_ms=None,
            reason=None,
        )
        home = home_partition(GROUP, partition_count=count)
        self.cluster.kafka.produce(self.cluster.place(home), encode(record))

    def _mood(self) -> str:
        if HANDOFFS not in self.faults:
            return COLD
        return mood_of(self.seed, self._starts)

    def warm_up(self, process: Process, *, is_calm: bool) -> None:
        """Let a process end calls of ``on_warm``, or die during them."""
        warming = process.work.warming
        if not warming.waiting_count or process.mood == NEVER:
            return
        if process.mood == DIE and not is_calm and self.is_broken:
            if self._chance_of_warming(ENDS):
                self.trace(f"{process.name} dies while it warms up")
                self.count("successor_died_warming")
                self.remove(process)
                self.restarts.append((self.now_ms + self.h // 2, process))
            return
        if is_calm or self._chance_of_warming(
            ENDS_SLOWLY if process.mood == SLOW else ENDS
        ):
            warming.run_waiting(count=1)
            self.count("warmed")

    def _chance_of_warming(self, part: float) -> bool:
        return self._warming_rng.random() < part

    def _policy(self, drawn: str) -> str:
        return GARBAGE if GARBAGE_POLICY in self.faults else drawn

    def _host(self, name: str, folder: Path) -> Host:
        rng = random.Random(self.rng.getrandbits(SEED_BITS))  # noqa: S311
        drift_ppm = self.rng.randint(-900, 900) if "drift" in self.faults else 0
        clock = self.cluster.clock.view(
            drift_ppm=drift_ppm, offset_ms=self.rng.randint(0, 10**6)
        )
        host = Host(self.cluster, name, folder=folder / name, clock=clock, rng=rng)
        host.start()
        return host

    def chance(self, part: float) -> bool:
        """Draw whether something with this probability happens."""
        return self.rng.random() < part

    def pass_time(self, duration_ms: int) -> None:
        """Let time pass, and end the faults that are over by then."""
        self.loop.run(duration_ms, after=self._follow)
        now_ms = self.now_ms
        for due_ms, process in list(self.restarts):
            if now_ms >= due_ms:
                self.restarts.remove((due_ms, process))
                self.start_again(process)
        for process in self.processes:
            if process.mends_ms and now_ms >= process.mends_ms:
                self.mend(process)
        for place in self.hosts:
            self._look_after(place, now_ms)
        self.check()

    def _follow(self) -> None:
        """Fold an admin's records after its turn: S8 needs all partitions in order."""
        self.watcher.catch_up()

    def _look_after(self, place: Place, now_ms: int) -> None:
        host = place.host
        if place.mends_ms and now_ms >= place.mends_ms:
            place.mends_ms = 0
            host.cut(is_cut=False)
            self.trace(f"{host.name} is connected again")
        if host.is_hung and now_ms >= place.wakes_ms:
            host.is_hung = False
            self.trace(f"{host.name} goes on")
        if place.starts_ms is not None and now_ms >= place.starts_ms:
            place.starts_ms = None
            place.checked = {}
            host.start()
            self.trace(f"{host.name} starts")

    def drive_host(self, place: Place) -> None:
        """Let a sidecar act once, unless it is stopped."""
        host = place.host
        host.step()
        if place.drains_ms is None or host.service is None:
            return
        if place.recalls_ms is not None:
            if not (host.service.is_handed_off or self.now_ms >= place.recalls_ms):
                return
            place.recalls_ms = None
            host.service.start_drain()
            self.trace(f"{host.name} recalls what is left")
        if host.service.is_drained or self.now_ms >= place.drains_ms:
            place.drains_ms = None
            host.end()
            place.starts_ms = self.now_ms + self.rng.randint(0, self.h)
            self.trace(f"{host.name} has ended in order")

    def drive(self, process: Process, *, is_calm: bool = False) -> None:
        """Let one process act once, unless it is stopped."""
        if self.now_ms < process.wakes_ms or process not in self.processes:
            return
        work = process.work
        if isinstance(work, Node):
            if is_calm or self.chance(0.9):
                work.step()
            failure: MarshalError | None = work.session.failure
        else:
            self._drive_hosted(work, is_calm=is_calm)
            failure = work.failure
        self.check()
        self.on_driven(process)
        if HANDOFFS in self.faults and not process.is_leaving:
            self.warm_up(process, is_calm=is_calm)
            if process not in self.processes:
                return
        if process.is_leaving:
            if work.has_left:
                self.remove(process)
            return
        if failure is not None:
            if not isinstance(failure, IdentityConflict | ClientFenced):
                raise Violation("fault", f"{process.name}: {failure!r}")
            # Its supervisor starts it again: its name may be free by then, and its
            # next process is not fenced.
            is_fenced = isinstance(failure, ClientFenced)
            self.count("fence_noticed" if is_fenced else "identity_conflict")
            why = "an admin fenced it" if is_fenced else "its name is in use"
            self.trace(f"{process.name} fails: {why}")
            self.remove(process)
            self.restarts.append((self.now_ms + self.h // 2, process))
            return
        if is_calm or self.chance(0.8):
            self._poll(process)
        self.work(process, self.rng.randint(0, 4))

    def _drive_hosted(self, work: Hosted, *, is_calm: bool) -> None:
        """Let the threads of a process act, in any order; some may not get a turn."""
        rng = self.rng
        most = 100 if is_calm or "slow" not in self.faults else rng.choice([0, 1, 9])
        phases = 3 if is_calm or "slow" not in self.faults else rng.randint(0, 3)
        acts: list[Callable[[], None]] = [
            work.watch,
            lambda: work.follow(most),
            lambda: work.beat(phases),
            work.carry,
            work.grant,
        ]
        for act in rng.sample(acts, len(acts)):
            if is_calm or self.chance(0.9):
                act()
                self._check_users()

    def _poll(self, process: Process) -> None:
        consumer = process.work.consumer
        if consumer is None:
            return
        try:
            polled = consumer.poll(0)
        except ClaimLost:
            return
        except MarshalError as error:
            raise Violation("fault", f"{process.name}: {error!r}") from error
        for partition, records in polled.items():
            key = Key(GROUP, *partition)
            offsets = [record.offset for record in records]
            self.trace(f"{process.name} is handed {partition} {offsets}")
            for record in records:
                assert record.token is not None
                self.hand_outs.handed_out(key, record.token, offset=record.offset)
            process.hand.extend(records)

    def work(self, process: Process, count: int) -> None:
        """Process and commit some uncommitted records, in any order."""
        consumer = process.work.consumer
        if consumer is None:
            return
        for _ in range(min(count, len(process.hand))):
            record = process.hand.pop(self.rng.randrange(len(process.hand)))
            key = Key(GROUP, record.topic, record.partition)
            self.hand_outs.done(key, record.token, offset=record.offset)
            try:
                consumer.commit(record)
            except ClaimLost:
                # Other records under that claim belong to another process now.
                process.hand = [
                    each for each in process.hand if not is_of_one_claim(each, record)
                ]
                return

    # --- what must hold

    def check(self) -> None:
        """Check everything that must hold at any time."""
        self.watcher.catch_up()
        self._check_users()
        for process in self.processes:
            if isinstance(process.work, Node):
                self._check_reader(process.name, process.work, process.checked)
        for place in self.hosts:
            host = place.host
            if host.node is not None:
                self._check_reader(host.name, host.node, place.checked)
            for each in () if host.service is None else host.service.groups:
                # Late records of an earlier life may look like those of a twin.
                if not isinstance(each.failure, IdentityConflict | ClientFenced | None):
                    raise Violation("fault", f"{host.name}: {each.failure!r}")

    def _check_reader(self, name: str, node: Node, checked: dict[int, int]) -> None:
        self.watcher.check_reader(node.engine, checked)
        if node.engine.failure is not None:
            raise Violation("fault", f"{name}: {node.engine.failure!r}")

    def _check_users(self) -> None:
        """Demand S4 of processes, and of claimants, which may be sidecars."""
        users: dict[Key, Process] = {}
        claimants: dict[Key, object] = {}
        for process in self.processes:
            for key, holding in process.held.items():
                other = users.setdefault(key, process)
                if other is not process:
                    names = f"{other.name} and {process.name}"
                    raise Violation("S4", f"{key} is used by {names} at one instant")
                claimants[key] = process.host or process
                token = holding.claim.token
                assert token is not None
                first = self._users.setdefault((key, token), process)
                if first is not process:
                    names = f"{first.name} and {process.name}"
                    raise Violation("S4", f"{key}: {names} have used {token}")
        for place in self.hosts:
            service, now_ms = place.host.service, place.host.clock.now_ms()
            for host in () if service is None else service.groups:
                for key, holding in host.session.holdings.items():
                    if not holding.claim.is_valid(now_ms):
                        continue
                    if claimants.setdefault(key, place.host) is not place.host:
                        raise Violation("S4", f"{key} is held by {host.group_id} twice")

    def _on_fold(self, folded: Folded) -> None:
        self.positions.take(folded)
        self.on_folded(folded)
        super()._on_fold(folded)

    @property
    def partition_count(self) -> int:
        """The number of coordinating partitions in force."""
        config = self.watcher.worlds[0].config or self.cluster.config
        return config.partition_count

    def count(self, what: str) -> None:
        """Count a situation."""
        self.counts[what] = self.counts.get(what, 0) + 1

    # --- processes

    def join(self, place: Place | None) -> None:
        """Start a consumer: with a sidecar, or with its own engine."""
        self._names += 1
        if place is None:
            self._start_plain(f"c{self._names}")
        else:
            self._start_hosted(f"c{self._names}", place.host, claims=())

    def join_claimer(self, place: Place) -> None:
        """Start a process that claims a partition without consuming it."""
        self._names += 1
        key = Key(GROUP, CLAIMED_TOPIC, 0)
        self._start_hosted(f"c{self._names}", place.host, claims=(key,))

    def _start_plain(self, client_id: str) -> None:
        rng = self.rng
        drift_ppm = rng.randint(-900, 900) if "drift" in self.faults else 0
        offset_ms = rng.randint(0, 10**6)
        node = Node(
            self.cluster,
            Owner(client_id, rng.randbytes(16)),
            group_id=GROUP,
            seed=rng.getrandbits(SEED_BITS),
            clock=self.cluster.clock.view(drift_ppm=drift_ppm, offset_ms=offset_ms),
        )
        node.warming.is_held = True
        on_warm = on_warm_of(self._mood())
        callbacks = attrs.evolve(self.spec.callbacks, on_warm=on_warm)
        node.consume(attrs.evolve(self.spec, callbacks=callbacks))
        self._add(client_id, node, where="alone")

    def _start_hosted(
        self, client_id: str, host: Host, *, claims: tuple[Key, ...]
    ) -> None:
        self._pids += 1
        is_watched = "unwatched" not in self.faults or self.chance(0.5)
        work = Hosted(
            host,
            client_id,
            cluster=self.cluster,
            pid=self._pids if is_watched else None,
            spec=None if claims else self.spec,
            claims=claims,
            mood=self._mood(),
        )
        if "answers" in self.faults:
            chance = self.rng.choice([0.02, 0.2])
            work.line.loses = lambda: self.is_broken and self.chance(chance)
        self._add(client_id, work, where=host.name)

    def _add(self, client_id: str, work: Hosted | Node, *, where: str) -> None:
        mood = self._mood()
        self._starts += 1
        process = Process(
            name=f"{client_id}#{self._starts}",
            client_id=client_id,
            work=work,
            mood=mood,
        )
        self.processes.append(process)
        self.trace(f"{process.name} starts, {where}")

    def start_again(self, process: Process) -> None:
        """Start another process in the place of one that has ended."""
        work = process.work
        if isinstance(work, Node):
            self._start_plain(process.client_id)
        else:
            self._start_hosted(process.client_id, work.host, claims=work.claims)

    def remove(self, process: Process) -> None:
        """End a process without a shutdown; a watching sidecar finds its death."""
        self.processes.remove(process)
        work = process.work
        if isinstance(work, Hosted) and work.pid is not None:
            work.host.deaths.note(work.pid)
        self.trace(f"{process.name} ends")

    def mend(self, process: Process) -> None:
        """Restore the connections of a process to its sidecar and to the cluster."""
        process.mends_ms = 0
        work = process.work
        if isinstance(work, Node):
            work.cut(is_cut=False)
        else:
            work.line.is_cut = work.data.cut = False
        self.trace(f"{process.name} is connected again")

    def produce(self, count: int) -> None:
        """Write records to consume."""
        for _ in range(count):
            self.cluster.kafka.produce(self.rng.choice(self.places), b"x")
