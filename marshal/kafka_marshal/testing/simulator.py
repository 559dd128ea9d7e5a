"""A deterministic simulation of a whole fleet (PROTOCOL 11).

Clients with the production engine, session and consumer run over a cluster in
memory on virtual time, one thread, one step at a time. A seed draws the world,
which faults exist in it and how hard they strike (a swarm), and every choice
after that; the same seed gives the same run, byte for byte. Safety is checked
after every step; then everything is healed, and liveness is demanded.
"""

import random
from collections.abc import Callable, Sequence

import attrs

from kafka_marshal.engine import Delivery
from kafka_marshal.engine.handout import ConsumerOptions
from kafka_marshal.errors import ClaimLost, MarshalError
from kafka_marshal.ports import Record
from kafka_marshal.protocol.codec import Undecodable, decode, encode
from kafka_marshal.protocol.records import ReleaseGroup
from kafka_marshal.protocol.types import Key, Owner, TopicPartition
from kafka_marshal.testing.checkers import (
    HandOuts,
    LogWatcher,
    Violation,
    check_leases,
)
from kafka_marshal.testing.fakestore import AppendFate
from kafka_marshal.testing.node import Cluster, Node, Wish

GROUP = "g"
TOPIC = "t"
TRANSCRIPT_TAIL = 60
DEAF_MS = 10**9
BACKOFF_HS_MAX = 300
ADMIN = Owner("admin", b"admin".ljust(16, b"."))
FAULTS = (
    "delay",
    "late",
    "loss",
    "copies",
    "cut",
    "deaf",
    "crash",
    "stop",
    "failover",
    "pause",
    "churn",
    "hostile",
    "twin",
    "drift",
)
"""What may go wrong; a seed draws which of these exist in its world."""


class SimulationFailed(AssertionError):
    """A run broke an invariant; the message tells the seed and the last steps.

    Attributes:
        seed: Repeats the run.
        invariant: What was broken, such as ``S4`` or ``liveness``.
        transcript: Everything that happened, one line each.
    """

    def __init__(self, seed: int, violation: Violation, transcript: list[str]) -> None:
        tail = "\n".join(transcript[-TRANSCRIPT_TAIL:])
        super().__init__(
            f"seed {seed}: {violation}\nrepeat it with: simulate({seed})\n"
            f"the last steps were:\n{tail}"
        )
        self.seed = seed
        self.invariant = violation.invariant
        self.transcript = transcript


@attrs.frozen
class Report:
    """What a run that held did.

    Attributes:
        seed: Its seed.
        faults: The faults that existed.
        virtual_ms: How long it took, on virtual time.
        handed: Records handed out.
        duplicates: How many of them had been handed out before.
        claims: Claims and resumes that were accepted.
        transcript: Everything that happened, one line each.
    """

    seed: int
    faults: tuple[str, ...]
    virtual_ms: int
    handed: int
    duplicates: int
    claims: int
    transcript: tuple[str, ...]


@attrs.define(eq=False)
class App:
    """An application on one node: what it has in hand, and what it is like.

    Attributes:
        node: The process.
        hand: Records handed out and not committed.
        wakes_ms: True time until which the process is stopped.
        mends_ms: True time until which its network is cut, in some way.
        is_leaving: Whether it was told to end.
        checked: Up to where its replicas were compared, by partition.
    """

    node: Node
    hand: list[Record] = attrs.field(factory=list)
    wakes_ms: int = 0
    mends_ms: int = 0
    is_leaving: bool = False
    checked: dict[int, int] = attrs.field(factory=dict)


class Fates:
    """Draws the fate of every append, until it is healed."""

    def __init__(self, rng: random.Random, h: int) -> None:
        """Start without any fault."""
        self.faults: frozenset[str] = frozenset()
        self.hardness = 0.0
        self._rng = rng
        self._h = h

    def of_append(self, writer: str, partition: int) -> AppendFate:
        """Return the fate of the next append."""
        del writer, partition
        rng, h = self._rng, self._h
        if not self.faults or rng.random() > self.hardness:
            return AppendFate()
        kind = rng.choice(sorted(self.faults))
        if kind == "delay":
            return AppendFate(delay_ms=rng.randint(1, h // 2))
        if kind == "late":
            fails_ms = rng.randint(1, h // 2)
            return AppendFate(delay_ms=rng.randint(1, 3 * h), fails_after_ms=fails_ms)
        if kind == "loss":
            return AppendFate(is_lost=True)
        return AppendFate(delay_ms=rng.choice([0, h // 10]), copies=2)


class Simulation:
    """One seeded run; ``run`` does it all."""

    def __init__(
        self,
        seed: int,
        *,
        delivery: Delivery | None = None,
        faults: Sequence[str] | None = None,
    ) -> None:
        """Draw a world.

        Args:
            seed: Decides everything.
            delivery: The guarantee asked for; drawn without it.
            faults: What may go wrong, of ``FAULTS``; drawn without it.
        """
        self.seed = seed
        rng = self.rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
        self.h = rng.choice([1_000, 2_000, 5_000])
        self.transcript: list[str] = []
        drawn = rng.choice(list(Delivery))
        self.delivery = delivery or drawn
        lot = [name for name in FAULTS if rng.random() < 0.5]  # noqa: PLR2004
        self.faults = frozenset(lot if faults is None else faults)
        self.fates = Fates(random.Random(seed + 1), self.h)  # noqa: S311
        self.fates.faults = self.faults & {"delay", "late", "loss", "copies"}
        self.fates.hardness = rng.choice([0.05, 0.2, 0.5])
        self.cluster = Cluster(
            heartbeat_interval_ms=self.h,
            partitions=rng.randint(1, 3),
            policy=self.fates,
        )
        self.places = self.cluster.fill(TOPIC, [0] * rng.randint(1, 5))
        self.watcher = LogWatcher(
            self.cluster.kafka,
            self.cluster.config.partition_count,
            on_position=self._check_moved,
            note=self.transcript.append,
        )
        is_amo = self.delivery is Delivery.AT_MOST_ONCE
        self.hand_outs = HandOuts(self.watcher, is_at_most_once=is_amo)
        depths = random.Random(seed + 2)  # noqa: S311 - repeatable on purpose
        self.wish = Wish(
            (TOPIC,),
            self.delivery,
            policy=rng.choice(["fair", "fair", "greedy"]),
            options=ConsumerOptions(
                max_poll_records=rng.choice([1, 3, 20]),
                max_granted_batches=depths.choice([1, 2, 4, 8]),
                on_lost=lambda _tp, _end: None,
            ),
            max_handling_ms=depths.choice([0, None]),
            releases_behind=depths.choice([False, True]),
        )
        self.apps: list[App] = []
        self._names = 0
        self._operations = 0
        self._restarts: list[tuple[int, Node, bool]] = []
        for _ in range(rng.randint(1, 4)):
            self._join()

    # --- the run

    def run(self, *, rounds: int = 250) -> Report:
        """Break things for so many rounds, heal them, and demand liveness.

        Raises:
            SimulationFailed: An invariant was broken.
        """
        start_ms = self.cluster.clock.now_ms()
        self._say(f"{self.delivery.value} H={self.h} faults={sorted(self.faults)}")
        try:
            for _ in range(rounds):
                self._round()
            self._heal()
        except Violation as violation:
            raise SimulationFailed(self.seed, violation, self.transcript) from violation
        return Report(
            self.seed,
            tuple(sorted(self.faults)),
            self.cluster.clock.now_ms() - start_ms,
            self.hand_outs.count,
            self.hand_outs.duplicate_count,
            self.watcher.claims,
            tuple(self.transcript),
        )

    def _round(self) -> None:
        rng = self.rng
        self._pass_time(rng.choice([1, 10, 50, 50, 100, 200, self.h // 4]))
        if rng.random() < 0.3:  # noqa: PLR2004 - three rounds in ten
            self._produce(rng.randint(1, 4))
        if rng.random() < 0.15:  # noqa: PLR2004
            self._break_something()
        for app in rng.sample(self.apps, len(self.apps)):
            self._drive(app)

    def _pass_time(self, duration_ms: int) -> None:
        self.cluster.clock.advance(duration_ms)
        now_ms = self.cluster.clock.now_ms()
        for due_ms, node, is_resuming in list(self._restarts):
            if now_ms >= due_ms:
                self._restarts.remove((due_ms, node, is_resuming))
                self._start(node.owner.client_id, node.lives if is_resuming else ())
        for app in self.apps:
            if app.mends_ms and now_ms >= app.mends_ms:
                self._mend(app)
        self._check()

    def _drive(self, app: App) -> None:
        """Let one process do what it does, unless it is stopped."""
        if self.cluster.clock.now_ms() < app.wakes_ms or app not in self.apps:
            return
        rng = self.rng
        node = app.node
        if rng.random() < 0.9:  # noqa: PLR2004 - its two threads run as they like
            node.step()
            self._check()
        if app.is_leaving:
            if node.has_left:
                self._remove(app)
            return
        if node.session.failure is not None:
            self._say(f"{_name(node)} fails: {type(node.session.failure).__name__}")
            self._remove(app)
            if all(other.node.owner.client_id != node.owner.client_id
                   for other in self.apps):  # fmt: skip
                due_ms = self.cluster.clock.now_ms() + self.h // 2
                self._restarts.append((due_ms, node, False))
            return
        if rng.random() < 0.8:  # noqa: PLR2004
            self._poll(app)
        self._work(app, rng.randint(0, 4))

    def _poll(self, app: App) -> None:
        consumer = app.node.consumer
        assert consumer is not None
        try:
            polled = consumer.poll(0)
        except ClaimLost:
            return
        except MarshalError as error:
            raise Violation("fault", f"{_name(app.node)}: {error!r}") from error
        for partition, records in polled.items():
            key = Key(GROUP, *partition)
            offsets = [record.offset for record in records]
            self._say(f"{_name(app.node)} is handed {partition} {offsets}")
            for record in records:
                assert record.token is not None
                self.hand_outs.handed_out(key, record.token, offset=record.offset)
            app.hand.extend(records)
        self._check()

    def _work(self, app: App, count: int) -> None:
        """Process and commit some of what is in hand, in any order."""
        consumer = app.node.consumer
        assert consumer is not None
        for _ in range(min(count, len(app.hand))):
            record = app.hand.pop(self.rng.randrange(len(app.hand)))
            key = Key(GROUP, record.topic, record.partition)
            self.hand_outs.done(key, record.offset)
            try:
                consumer.commit(record)
            except ClaimLost:
                # What else it got under that claim is somebody else's now.
                app.hand = [each for each in app.hand if each.token != record.token]
                return

    def _check(self) -> None:
        self.watcher.catch_up()
        check_leases(app.node for app in self.apps)
        for app in self.apps:
            self.watcher.check_reader(app.node.engine, app.checked)
            failure = app.node.engine.failure
            if failure is not None:
                raise Violation("fault", f"{_name(app.node)}: {failure!r}")

    def _check_moved(self, key: Key, old: int | None, new: int) -> None:
        self.hand_outs.check_moved(key, old, new=new)

    def _say(self, line: str) -> None:
        self.transcript.append(f"{self.cluster.clock.now_ms()} {line}")

    # --- processes

    def _join(self) -> None:
        self._names += 1
        self._start(f"c{self._names}", ())

    def _start(self, client_id: str, lives: tuple[object, ...]) -> None:
        drift_ppm = self.rng.randint(-900, 900) if "drift" in self.faults else 0
        clock = self.cluster.clock.view(
            drift_ppm=drift_ppm, offset_ms=self.rng.randint(0, 10**6)
        )
        node = self.cluster.node(
            client_id,
            group_id=GROUP,
            wish=self.wish,
            clock=clock,
            lives=lives,  # type: ignore[arg-type]
        )
        self.apps.append(App(node))
        self._say(f"{_name(node)} starts, {len(lives)} lives behind it")

    def _remove(self, app: App) -> None:
        self.apps.remove(app)
        self.cluster.crash(app.node)
        self._say(f"{_name(app.node)} ends")

    def _mend(self, app: App) -> None:
        app.mends_ms = 0
        app.node.cut(is_cut=False)
        app.node.log.read_lag_ms = 0
        self._say(f"{_name(app.node)} is connected again")

    def _produce(self, count: int) -> None:
        for _ in range(count):
            self.cluster.kafka.produce(self.rng.choice(self.places), b"x")

    # --- faults

    def _break_something(self) -> None:
        actions: dict[str, Callable[[], None]] = {
            "cut": self._cut,
            "deaf": self._deafen,
            "crash": self._crash,
            "stop": self._stop,
            "failover": self._fail_over,
            "pause": self._pause_group,
            "churn": self._churn,
            "hostile": self._write_hostile,
            "twin": self._start_twin,
        }
        names = [name for name in actions if name in self.faults]
        if names:
            actions[self.rng.choice(names)]()

    def _span_ms(self) -> int:
        """Draw how long something lasts: often short, at times many leases."""
        return self.rng.randint(1, self.rng.choice([1, 2, 4, 8]) * self.h)

    def _victim(self) -> App | None:
        fit = [app for app in self.apps if not app.is_leaving]
        return self.rng.choice(fit) if fit else None

    def _cut(self) -> None:
        app = self._victim()
        if app is not None:
            duration_ms = self._span_ms()
            app.mends_ms = self.cluster.clock.now_ms() + duration_ms
            app.node.log.cut = True
            app.node.data.cut = self.rng.random() < 0.5  # noqa: PLR2004
            self._say(f"{_name(app.node)} is cut off for {duration_ms} ms")

    def _deafen(self) -> None:
        """Cut one way only: what it sends arrives, it hears nothing, or late."""
        lag_ms = self.rng.choice([self.h // 2, DEAF_MS])
        self._make_deaf(self._span_ms(), lag_ms)

    def _make_deaf(self, duration_ms: int, lag_ms: int) -> None:
        app = self._victim()
        if app is not None:
            app.mends_ms = self.cluster.clock.now_ms() + duration_ms
            app.node.log.read_lag_ms = lag_ms
            self._say(f"{_name(app.node)} hears late for {duration_ms} ms")

    def _crash(self) -> None:
        app = self._victim()
        if app is not None:
            self._say(f"{_name(app.node)} crashes")
            self._remove(app)
            due_ms = self.cluster.clock.now_ms() + self.rng.randint(0, 3 * self.h)
            is_resuming = self.rng.random() < 0.6  # noqa: PLR2004
            self._restarts.append((due_ms, app.node, is_resuming))

    def _stop(self) -> None:
        app = self._victim()
        if app is not None:
            duration_ms = self._span_ms()
            app.wakes_ms = self.cluster.clock.now_ms() + duration_ms
            self._say(f"{_name(app.node)} is stopped for {duration_ms} ms")

    def _fail_over(self) -> None:
        number = self.rng.randrange(len(self.watcher.worlds))
        leader = self.rng.randint(0, 2)
        skew_ms = self.rng.randint(-3 * self.h, 3 * self.h)
        place = self.cluster.place(number)
        if leader == self.cluster.kafka.log(place).leader:
            leader = (leader + 1) % 3
        # Broker n leads many partitions; its clock does not step for the others.
        leader += 3 * number + 3 * 8 * self.cluster.kafka.log(place).leader_epoch
        self.cluster.kafka.set_skew(leader, skew_ms)
        self.cluster.kafka.fail_over(place, leader=leader)
        self._say(f"{place} is led by {leader}, its clock at {skew_ms:+}")

    def _pause_group(self) -> None:
        self._operations += 1
        for_ms = self._span_ms()
        if "deaf" in self.faults and self.rng.random() < 0.5:  # noqa: PLR2004
            # Troubles come together: whoever holds a key may miss all of it.
            self._make_deaf(for_ms + 3 * self.h, DEAF_MS)
        self._write_pause(for_ms, seq=1, operation=self._operations)
        self._say(f"the group is paused for {for_ms} ms")

    def _end_pause(self) -> None:
        for operation in range(1, self._operations + 1):
            self._write_pause(-(10**9), seq=2, operation=operation)

    def _write_pause(self, for_ms: int, *, seq: int, operation: int) -> None:
        op_id = b"%016d" % operation
        for number, world in enumerate(self.watcher.worlds):
            wall_ms = max(self.cluster.clock.wall_ms(), world.append_time_ms)
            record = ReleaseGroup(
                *ADMIN[:1], GROUP, ADMIN[1], seq, op_id, wall_ms + for_ms, None
            )
            self.cluster.kafka.produce(self.cluster.place(number), encode(record))

    def _churn(self) -> None:
        if len(self.apps) < 6 and self.rng.random() < 0.5:  # noqa: PLR2004
            self._join()
            return
        app = self._victim()
        if app is not None and len(self.apps) > 1:
            self._say(f"{_name(app.node)} leaves")
            if app.node.engine.is_ready:
                app.is_leaving = True
                app.node.leave()
            else:
                self._remove(app)  # it never got as far as to have a session

    def _write_hostile(self) -> None:
        """Write nonsense, or once more what somebody wrote before."""
        number = self.rng.randrange(len(self.watcher.worlds))
        place = self.cluster.place(number)
        value: bytes | None = self.rng.randbytes(self.rng.randint(0, 40))
        stored = self.cluster.kafka.log(place).records
        if self.rng.random() < 0.7:  # noqa: PLR2004
            value = self.rng.choice(stored).value
            if value and self.rng.random() < 0.2:  # noqa: PLR2004
                at = self.rng.randrange(len(value))
                bent = value[:at] + self.rng.randbytes(1) + value[at + 1 :]
                # Bent into a record, it would be a forgery in somebody's name.
                if isinstance(decode(bent), Undecodable):
                    value = bent
        offset = self.cluster.kafka.produce(place, value)
        self._say(f"somebody writes {len(value or b'')} bytes at {number}/{offset}")

    def _start_twin(self) -> None:
        app = self._victim()
        if app is not None and len(self.apps) < 6:  # noqa: PLR2004
            self._start(app.node.owner.client_id, ())

    # --- healing

    def _heal(self) -> None:
        self._say("everything is healed")
        self.fates.faults = frozenset()
        for app in self.apps:
            app.wakes_ms = 0
            self._mend(app)
        seen = set()
        for app in list(self.apps):
            if app.node.owner.client_id in seen:
                self._remove(app)
            seen.add(app.node.owner.client_id)
        if not any(not app.is_leaving for app in self.apps):
            self._join()
        self._produce(5)
        # What was on its way still lands.
        self._end_pause()
        self._go_on(3 * self.h, lambda: False)
        self._go_on(BACKOFF_HS_MAX * self.h, self._is_calm)
        bound_ms = 2 * self.h + self.h // 10 + self.h
        took_ms = self._go_on(bound_ms, lambda: not self._missing())
        if took_ms is None:
            raise Violation("liveness", f"{self._missing()} unowned for {bound_ms} ms")
        todo = sum(end - position for position, end in self._left().values())
        if self._go_on(3 * self.h + 400 * todo, lambda: not self._left()) is None:
            raise Violation("liveness", f"not all consumed: {self._left()}")
        self._check_rest()
        if self.delivery is Delivery.AT_MOST_ONCE:
            options = self.wish.options
            batches = options.max_granted_batches
            self.hand_outs.check_losses(most=batches * options.max_poll_records)

    def _go_on(self, limit_ms: int, is_done: Callable[[], bool]) -> int | None:
        clock = self.cluster.clock
        start_ms = clock.now_ms()
        while clock.now_ms() - start_ms < limit_ms:
            self._pass_time(50)
            for app in list(self.apps):
                self._drive(app)
                if app in self.apps and not app.is_leaving:
                    self._work(app, len(app.hand))
            if is_done():
                return clock.now_ms() - start_ms
        return None

    def _is_calm(self) -> bool:
        return not any(app.node.is_backing_off for app in self.apps)

    def _missing(self) -> list[TopicPartition]:
        held = {key.topic_partition for app in self.apps for key in app.node.held}
        return [place for place in self.places if place not in held]

    def _left(self) -> dict[TopicPartition, tuple[int, int]]:
        """Return position and end of every partition that is not done."""
        left = {}
        for place in self.places:
            key = Key(GROUP, *place)
            end = self.cluster.kafka.log(place).end
            known = [w.keys[key].next_unclaimed() for w in self.watcher.worlds
                     if key in w.keys]  # fmt: skip
            position = (known[0] if known else None) or 0
            if position < end:
                left[place] = (position, end)
        return left

    def _check_rest(self) -> None:
        """Nothing fails, so nothing moves (acceptance L31)."""
        self._go_on(2 * self.h, lambda: False)
        claims = self.watcher.claims
        self._go_on(4 * self.h, lambda: False)
        if self.watcher.claims != claims:
            raise Violation("L31", f"{self.watcher.claims - claims} keys moved")


def _name(node: Node) -> str:
    return node.owner.incarnation.decode().strip(".")


def simulate(
    seed: int,
    *,
    delivery: Delivery | None = None,
    faults: Sequence[str] | None = None,
    rounds: int = 250,
) -> Report:
    """Run one seed.

    Args:
        seed: Decides everything.
        delivery: The guarantee asked for; drawn without it.
        faults: What may go wrong, of ``FAULTS``; drawn without it.
        rounds: How long things are broken.

    Returns:
        What happened, where every invariant held.

    Raises:
        SimulationFailed: One did not; the message repeats it.
    """
    return Simulation(seed, delivery=delivery, faults=faults).run(rounds=rounds)
