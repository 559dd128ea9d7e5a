"""The world that a plan describes: cluster, virtual time, and checks."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from kafka_marshal.config import Delivery
from kafka_marshal.ports import Event, Record
from kafka_marshal.protocol.hashing import coordinating_partition, home_partition
from kafka_marshal.protocol.placement import (
    by_partition,
    counts_of,
    partition_of,
    place_under,
)
from kafka_marshal.protocol.records import ClaimingMessages
from kafka_marshal.protocol.types import Key, Token, TopicPartition
from simulator.base import GROUP, TOPIC, BaseWorld
from simulator.checkers import (
    Folded,
    Sets,
    Violation,
    check_leases,
)
from simulator.chronicle import Chronicle
from simulator.coverage import Coverage
from simulator.exposure import Cuts, Exposures
from simulator.fakestore import Partition
from simulator.fates import Fates
from simulator.levels import Levels
from simulator.loop import Loop
from simulator.node import Cluster, Node
from simulator.plan import LEVELS, RESIZE, RESIZE_COUNTS, Plan, chance
from simulator.position_judge import PositionJudge
from simulator.readings import Readings

FAR_MS = 2**63


class World(BaseWorld):
    """A world of direct members: virtual time and checks.

    Attributes:
        plan: The plan that it was made from.
        fates: Draws the fates of appends.
        loop: Makes due calls.
        exposures: Judges hand-outs if records may be lost.
        cuts: How often coordinating partitions lost records, and which processes know.
        readings: The Configs that processes have read, if logs may lose them.
        coverage: Counts situations.
        levels: Judges records and Configs above a feature level.
        chronicle: The operations of processes, as they would note them.
        positions: Judges set positions (S8).
        names: Names of processes, by incarnation.
        seqs: Largest sequence number read of each process, by incarnation.
        attempts: Processes that request offsets under claims of others.
        route: Returns the data partition to which the producer of one sends now.
        check_order: Judges hand-outs of partitions that were added.
        excused: True time until which S4 is not demanded, by coordinating partition: a
            leader's clock stepped by more than leases allow for.
        is_healed: Whether all faults are healed, so that no more strike.
        is_timed: Whether bounds of time are judged now.
        is_truncating: Whether records that were read may be lost.
        is_judged: Whether steps are judged; otherwise only the history is.
        is_resizing: Whether the number of coordinating partitions may change.
    """

    def __init__(self, plan: Plan, *, is_judged: bool = True) -> None:
        """Make the world, without processes."""
        self.plan = plan
        self.fates = Fates(plan.seed, h_ms=plan.h_ms, latency_ms=plan.latency_ms)
        cluster = Cluster(
            heartbeat_interval_ms=plan.h_ms,
            partitions=plan.coordinators,
            policy=self.fates,
        )
        places = cluster.fill(TOPIC, [0] * plan.partitions)
        is_amo = plan.delivery is Delivery.AT_MOST_ONCE
        super().__init__(cluster, places, is_at_most_once=is_amo)
        self.loop = Loop(cluster.clock)
        self.is_resizing = RESIZE in plan.kinds
        self.coverage = Coverage(plan.h_ms)
        self.is_judged = is_judged
        self.names: dict[bytes, str] = {}
        self.seqs: dict[bytes, int] = {}
        self.attempts: set[bytes] = set()
        self.excused: dict[int, int] = {}
        self.route: Callable[[TopicPartition], TopicPartition] = lambda place: place
        self.check_order: Callable[[Key, Sequence[Record]], None] = lambda *_: None
        self.is_healed = False
        self.is_timed = False
        self.is_truncating = False
        self.on_news: Callable[[], None] = lambda: None
        self.on_record: Callable[[object], None] = lambda _: None
        self.on_folded: Callable[[Folded], None] = lambda _: None
        self.watcher.is_strict = is_judged
        self.levels = Levels(
            self.watcher,
            config=self.cluster.config,
            note=self.coverage.note,
            now_ms=lambda: self.now_ms,
        )
        if set(LEVELS) & set(plan.kinds):
            self.levels.activate()
        self.chronicle = Chronicle(self)
        self.positions = PositionJudge()
        self.exposures, self.cuts = Exposures(), Cuts()
        self.readings = Readings()
        self._numbers = self._number_by_key()
        self._keys = [
            [key for key, number in self._numbers.items() if number == each]
            for each in range(plan.coordinators)
        ]
        self._producing = chance(plan.seed, "produce")
        # True time at which the next append lands or is committed.
        self._change_ms = FAR_MS
        self._changes = -1
        rng = chance(plan.seed, "brokers")
        for broker in range(plan.coordinators):
            # Each leader is another machine: a step of its clock affects no other one.
            self.log_of(broker).leader = broker
            drift_ppm = rng.randint(-plan.drift_ppm, plan.drift_ppm)
            self.cluster.kafka.clocks.set_drift(broker, drift_ppm)

    def run(
        self, duration_ms: int, *, is_done: Callable[[], bool] | None = None
    ) -> int | None:
        """Let time pass; see ``Loop.run``."""
        return self.loop.run(duration_ms, after=self.settle, is_done=is_done)

    def settle(self) -> None:
        """Check committed records, and let processes read them."""
        kafka = self.cluster.kafka
        if kafka.changes == self._changes and self.now_ms < self._change_ms:
            return
        if self.watcher.catch_up():
            self.on_news()
        self._changes = kafka.changes
        # Appends in flight land, and are committed, at times of their own.
        change_ms = kafka.next_change_ms()
        if change_ms is not None and change_ms != self._change_ms:
            self.loop.at(change_ms, _nothing)
        self._change_ms = FAR_MS if change_ms is None else change_ms

    def log_of(self, partition: int) -> Partition:
        """Return the log of a coordinating partition."""
        return self.cluster.kafka.log(self.cluster.place(partition))

    def place_of(self, key: Key) -> int:
        """Return the coordinating partition of a key, by the log as it is now."""
        if not self.is_resizing:
            return self._numbers[key]
        found = partition_of(by_partition(self.watcher.worlds), key)
        return self._numbers[key] if found is None else found

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of coordinating partitions; during a change also the one before.

        It is that of the Config in force in partition 0, as an admin reads it.
        """
        if not self.is_resizing:
            return (self.plan.coordinators,)
        return counts_of(by_partition(self.watcher.worlds)) or (self.plan.coordinators,)

    @property
    def home(self) -> int:
        """The home of the group, under the count that is in force."""
        return home_partition(GROUP, partition_count=self.counts[0])

    def keys_of(self, partition: int) -> Sequence[Key]:
        """Return the keys of the group that a coordinating partition may have."""
        return [*self._numbers] if self.is_resizing else self._keys[partition]

    def _judged_in(self, node: Node, key: Key) -> int:
        """Return the coordinating partition of a claim that a process uses."""
        if not self.is_resizing:
            return self._numbers[key]
        return node.session.holdings[key].coordinator

    def _is_excused(self, key: Key, excused: Collection[int]) -> bool:
        """Return whether the clock of a partition that knows a key has stepped."""
        if not self.is_resizing:
            return self._numbers[key] in excused
        worlds = self.watcher.worlds
        if self.is_truncating:
            # A log may have lost the records that made it know the key.
            return any(place_under(key, count) in excused for count in RESIZE_COUNTS)
        return any(key in worlds[number].keys for number in excused)

    def _number_by_key(self) -> dict[Key, int]:
        count = self.plan.coordinators
        return {
            Key(GROUP, *place): coordinating_partition(*place, partition_count=count)
            for place in self.places
        }

    def name_of(self, incarnation: bytes) -> str:
        """Return the name of a process; for an unknown one its incarnation."""
        return self.names.get(incarnation) or incarnation.hex()

    # --- data

    def add_places(self, count: int) -> None:
        """Add data partitions to the topic."""
        self.cluster.kafka.add_partitions(TOPIC, count)
        first = len(self.places)
        added = [TopicPartition(TOPIC, first + number) for number in range(count)]
        self.places = [*self.places, *added]
        for place in added:
            key, total = Key(GROUP, *place), self.plan.coordinators
            self._numbers[key] = coordinating_partition(*place, partition_count=total)
            self._keys[self._numbers[key]].append(key)

    def produce(self, count: int) -> None:
        """Write records to the topic, if it exists.

        The value of each is the id of the topic that it is written to.
        """
        topic_id = self.topic_id
        for _ in range(count if topic_id else 0):
            place = self.route(self._producing.choice(self.places))
            self.cluster.kafka.produce(place, topic_id)

    # --- checks

    def check_leases(self, nodes: Sequence[Node]) -> None:
        """Demand S4, unless a step of a clock excuses it.

        Also demand that no process uses a claim that another process could win now, or
        has won: so two processes cannot use a key, whatever their order.
        """
        if not self.is_judged:
            return
        now_ms = self.now_ms
        if self.excused:
            self.excused = {t: u for t, u in self.excused.items() if u > now_ms}
        excused = self.excused.keys() | self._unnoticed(nodes)
        held = [(node, node.held) for node in nodes]
        check_leases(held, is_excused=lambda key: self._is_excused(key, excused))
        if self.is_truncating:
            return
        log_ms = [self.log_time_ms(t) for t in range(len(self.watcher.worlds))]
        for node, keys in held:
            for key in keys:
                number = self._judged_in(node, key)
                self.levels.check_use(node.owner, number, h_ms=self.plan.h_ms)
                if number not in excused:
                    self._check_lease(node, key, number, log_ms=log_ms[number])

    def has_halted(self, node: Node) -> bool:
        """Return whether a reader has halted, and demand S6."""
        try:
            return self.levels.check_reader(node.owner, node.engine)
        except Violation:
            if self.is_judged:
                raise
            return True  # in a wrong place, which is not judged here

    def is_torn(self, node: Node) -> bool:
        """Return whether a start found a Config that some partition lacks (2.2)."""
        with self._judging():
            self.watcher.check_reader(node.engine, {}, may_lag=self.is_truncating)
        return self.levels.is_torn(node.engine) or bool(self.unformatted)

    @property
    def unformatted(self) -> list[int]:
        """Partitions in use without a Config, while no change is open."""
        worlds = self.watcher.worlds
        if not self.is_truncating or any(each.layout for each in worlds):
            return []
        return [t for t in range(self.counts[0]) if worlds[t].config is None]

    def _unnoticed(self, nodes: Sequence[Node]) -> set[int]:
        """Return the partitions that were cut back without all processes knowing."""
        if not self.is_truncating:
            return set()
        return {
            number
            for number in range(len(self.watcher.worlds))
            if not all(self.cuts.is_known(node, number) for node in nodes)
        }

    def _check_lease(self, node: Node, key: Key, number: int, *, log_ms: int) -> None:
        state = self.watcher.worlds[number]
        quiet_ms = state.quiet_until_ms
        if quiet_ms is not None and log_ms < quiet_ms:
            return  # PROTOCOL 7.6: after a Reset, no other process can have the key yet
        known = state.keys.get(key)
        if known is None or known.owner != node.owner:
            name = self.names[node.owner.incarnation]
            owner = None if known is None else known.owner
            raise Violation("S4", f"{key} is used by {name}; it is {owner}'s")
        age_ms = log_ms - known.renewed_ms
        if age_ms > 2 * known.heartbeat_interval_ms:
            name = self.names[node.owner.incarnation]
            raise Violation("S4", f"{key} is used by {name}, and stale: {age_ms} ms")

    def log_time_ms(self, number: int) -> int:
        """Return the log time of a record that would be appended now."""
        state, log = self.watcher.worlds[number], self.log_of(number)
        if log.leader_epoch != state.leader_epoch or state.epoch_time_ms is None:
            return state.now_ms  # PROTOCOL 4.1: a new epoch starts to count
        wall_ms = self.cluster.kafka.clocks.wall_ms(log.leader, self.now_ms)
        return state.now_ms + max(0, wall_ms - state.epoch_time_ms)

    def on_handed(self, node: Node, key: Key, *, records: Sequence[Record]) -> None:
        """Check records that an application was handed just now."""
        name = self.name_of(node.owner.incarnation)
        with self._judging():
            self._check_topics(key, records)
        if self.is_truncating:
            self.hand_outs.count += len(records)
            self._expose(node, key, records)
            return
        with self._judging():
            self._check_fences(node)
            self.check_order(key, records)
        before = self.hand_outs.duplicate_count
        is_excused = self._is_excused(key, self.excused)
        topic_id = records[0].value
        self.chronicle.on_handed(name, key, records=records, topic_id=topic_id)
        with self._judging():
            number, h_ms = self.place_of(key), self.plan.h_ms
            self.levels.check_use(node.owner, number, h_ms=h_ms)
            for record in records:
                token = record.token
                assert token is not None
                self.hand_outs.handed_out(
                    key, token, offset=record.offset, is_excused=is_excused
                )
        if self.hand_outs.duplicate_count > before:
            self.coverage.note("duplicates")

    def _check_topics(self, key: Key, records: Sequence[Record]) -> None:
        """5.6: demand that records under a claim are of the topic that it names."""
        for record in records:
            token = record.token
            assert token is not None
            if record.value != self.watcher.topic_ids.get((key, token)):
                text = f"{record.offset} of another topic handed out under {token}"
                raise Violation("5.6", f"{key}: {text}")

    def _check_fences(self, node: Node) -> None:
        """4.13: demand that a process that has read its own fence hands out nothing."""
        for replica in node.engine.context.replicas.values():
            if (GROUP, *node.owner) in replica.world.fences:
                name = self.name_of(node.owner.incarnation)
                raise Violation("4.13", f"{name} hands out, and has read its fence")

    def on_processed(self, name: str, key: Key, *, record: Record) -> None:
        """Record that an application has processed a record."""
        offset, token = record.offset, record.token
        if self.is_truncating:
            place, sets = (key, record.value), self._sets_before(key, token)
            self.exposures.on_processed(place, offset=offset, sets=sets)
            return
        with self._judging():
            self.hand_outs.done(key, token, offset=offset)
        self.chronicle.on_processed(name, key, record=record)

    def on_sought(self, name: str, key: Key, *, token: Token, offset: int) -> None:
        """Record that a process has read that its seek is done (6.6)."""
        with self._judging():
            self.hand_outs.sought(key, token, offset=offset)
        self.watcher.skips.sought(key, token, offset=offset)
        self.chronicle.on_sought(name, key, token=token, offset=offset)

    def _expose(self, node: Node, key: Key, records: Sequence[Record]) -> None:
        """Record hand-outs in a world whose logs may lose records."""
        if self.plan.delivery is not Delivery.AT_MOST_ONCE or self.is_resizing:
            return  # PROTOCOL 10.9: more may be granted twice than can be reported
        name = self.name_of(node.owner.incarnation)
        cuts = self.cuts.known_to(node, self.place_of(key))
        for record in records:
            place = key, record.value
            assert record.token is not None
            self.exposures.on_handed(
                name,
                place,
                offset=record.offset,
                cuts=cuts,
                sets=self._sets_before(key, record.token),
                resets=self.watcher.resets.get((key, record.token), ()),
            )

    def _sets_before(self, key: Key, token: Token | None) -> Sets:
        """Return the set positions of a key before a claim of it was won."""
        assert token is not None
        return self.watcher.sets.get((key, token), ())

    def processed(self, key: Key) -> set[int]:
        """Return the offsets of a key that are done, in the present topic.

        These are offsets that were processed, or that a set position or a seek skipped,
        as far as the log still has it; see ``Exposures.processed`` and ``Skips``.
        """
        place = key, self.topic_id
        if not self.is_truncating:
            return self.hand_outs.processed.get(place, set())
        watcher, exposures = self.watcher, self.exposures
        number = self.place_of(key)
        sets = watcher.sets_of(key, watcher.worlds[number])
        # A key that its log has lost begins with the committed offset, which covers
        # offsets that lost claims processed, or lost set positions skipped.
        start = watcher.starts.get((key, sets), 0)
        before = {*range(watcher.set_to(key)), *exposures.processed_by_any(place)}
        before.intersection_update(range(start))
        skipped = watcher.skips.of((number, *place))
        return before | skipped | exposures.processed(place, sets)

    def on_started(self, node: Node) -> None:
        """Record that a process starts: it reads the logs as they are."""
        for number in range(len(self.watcher.worlds)):
            self.cuts.on_noticed(node, number)

    def on_ended(self, node: Node) -> None:
        """Record that a process ends: it will report nothing more."""
        name = self.name_of(node.owner.incarnation)
        self.chronicle.on_gone(name)
        if not self.is_truncating:
            return
        for number in range(len(self.watcher.worlds)):
            world, rebuilding = (
                self.watcher.worlds[number],
                node.engine.context.rebuilding,
            )
            is_behind = number in rebuilding or not self.cuts.is_known(node, number)
            for key in self.keys_of(number):
                known = world.keys.get(key)
                # An owner has nothing to report: it repeats its grants in the log.
                is_owner = known is not None and known.owner == node.owner
                cuts = self.cuts.count(number) - (is_behind or is_owner)
                self.exposures.on_ended(name, key, cuts=cuts)

    def observe(self, node: Node, event: Event) -> None:
        """Handle an event of the engine of a process; an ``Observer``."""
        self.coverage.observe(event)
        fields = event.fields
        if event.name == "replica_diverged" and self.is_judged:
            raise Violation("S2", f"{node.owner.client_id}: {dict(fields)}")
        if event.name == "log_truncated":
            self.cuts.on_noticed(node, fields["partition"])
        elif event.name == "grant_exposed":
            key, first, last = fields["key"], fields["first"], fields["last"]
            self.trace(
                f"{node.owner.client_id} reports: {key} is exposed: {first}, {last}"
            )
            self.exposures.on_reported(key, first=first, last=last)

    @contextmanager
    def _judging(self) -> Iterator[None]:
        try:
            yield
        except Violation:
            if self.is_judged:
                raise

    def _on_fold(self, folded: Folded) -> None:
        self.coverage.on_fold(folded)
        self.on_folded(folded)
        with self._judging():
            self.positions.take(folded)
        transition = folded.transition
        record = transition.record
        self.on_record(record)
        if record is not None:
            who = getattr(record, "incarnation", b"")
            self.seqs[who] = max(self.seqs.get(who, 0), getattr(record, "seq", 0))
        other = None
        if isinstance(record, ClaimingMessages) and record.grantee in self.attempts:
            self.coverage.note("granted_to_another")
            other = f"attempt {record.grantee.hex()}"
        if not self.is_truncating:
            with self._judging():
                self.hand_outs.on_fold(folded, other=other)
            self.chronicle.on_fold(folded, self.watcher.worlds[folded.partition])


def _nothing() -> None:
    """Do nothing: due changes happen by themselves once time has come."""
