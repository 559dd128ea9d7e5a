"""Whole clients over a cluster in memory: the production engine, on virtual time.

A ``Node`` represents one process: an engine with one session and, on request, one
consumer, with its own connection and its own clock. Nothing runs by itself: the test
steps the nodes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from kafka_marshal.config import Callbacks, ConsumerConfig
from kafka_marshal.consumer import Consumer
from kafka_marshal.defaults import COORDINATION_TOPIC
from kafka_marshal.engine import (
    Engine,
    Holding,
    Ports,
    Session,
    Subscription,
)
from kafka_marshal.engine.kept_states import KeptStates
from kafka_marshal.engine.standbys import StandbyThread
from kafka_marshal.engine.warm_fetches import new_fetcher
from kafka_marshal.policies import find_policy
from kafka_marshal.ports import Event, TopicInfo
from kafka_marshal.protocol.claiming import Claimant, PreviousLife
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.records import (
    LIMIT_DEFAULTS,
    SUPPORTED_LEVEL,
    Config,
    Limits,
)
from kafka_marshal.protocol.types import Key, Owner, TopicPartition
from simulator.clock import (
    ClockView,
    InlineBackground,
    SeededEntropy,
    VirtualClock,
)
from simulator.fakelog import FakeKafka, FatePolicy

EVENTS_MAX = 10_000
LIVES_MAX = 8


@attrs.frozen
class ConsumerSpec:
    """The subscription of a node.

    Attributes:
        config: The settings of its consumer.
        callbacks: The callbacks of its consumer.
    """

    config: ConsumerConfig
    callbacks: Callbacks = attrs.field(factory=Callbacks)


class Recorder:
    """An observer that stores its events.

    Attributes:
        events: The last events, oldest first.
        forward: Called with each event as well.
    """

    def __init__(self) -> None:
        """Start without events."""
        self.events: list[Event] = []
        self.forward: Callable[[Event], None] | None = None

    def observe(self, event: Event) -> None:
        """Store an event."""
        self.events.append(event)
        del self.events[:-EVENTS_MAX]
        if self.forward is not None:
            self.forward(event)

    def named(self, name: str) -> list[Event]:
        """Return the events of one name."""
        return [event for event in self.events if event.name == name]


class Node:
    """One process: engine, session and perhaps a consumer.

    Attributes:
        log: Its session with the coordination topic; ``log.cut`` disconnects it.
        data: Its session for data topics; ``data.cut`` disconnects it.
        clock: Its own clock.
        background: Its look-ups; they run at once unless held.
        policies: Calls of foreign policies; they return at once unless held.
        warming: Its calls of ``on_warm``; they run at once unless held.
        standing_by: Its calls of ``on_standby``; they run at once unless held.
        warm_fetches: Its fetches for these calls; they run at once unless held.
        observer: Stores its events.
        engine: The production engine.
        session: Its one session.
        consumer: Its consumer, None before ``consume``.
    """

    def __init__(
        self,
        cluster: "Cluster",
        owner: Owner,
        *,
        group_id: str = "g",
        seed: int = 0,
        clock: ClockView | None = None,
        lives: tuple[PreviousLife, ...] = (),
        sources: Sequence[KeptStates] = (),
        can_plan: bool = True,
        labels: Mapping[str, str] | None = None,
        host: str | None = None,
    ) -> None:
        """Start a process; its next step begins to read the log."""
        kafka = cluster.kafka
        self.log = kafka.coordination_log(name=owner.client_id)
        self.log.configure(cluster.config.heartbeat_interval_ms)
        self.data = kafka.data_log()
        self.clock = cluster.clock.view() if clock is None else clock
        self.background = InlineBackground()
        self.policies = InlineBackground()
        self.warming = InlineBackground()
        self.standing_by = InlineBackground()
        self.warm_fetches = InlineBackground()
        self.observer = Recorder()
        self.entropy = SeededEntropy(seed)
        ports = Ports(
            log=self.log,
            data=self.data,
            clock=self.clock,
            entropy=self.entropy,
            background=self.background,
            policies=self.policies,
            observer=self.observer,
        )
        self.engine = Engine(
            ports, cluster_id=cluster.config.cluster_id, sources=sources
        )
        self.session = Session(
            self.engine.context,
            Claimant(owner, group_id, master=self.entropy.random_bytes(32)),
            host=f"host-of-{owner.client_id}" if host is None else host,
            lives=lives,
            can_plan=can_plan,
            labels=labels,
        )
        self.engine.add_session(self.session)
        self.consumer: Consumer | None = None
        self._kafka = kafka
        self._earlier = lives

    @property
    def owner(self) -> Owner:
        """Its client_id and incarnation."""
        return self.session.claimant.owner

    @property
    def lives(self) -> tuple[PreviousLife, ...]:
        """Earlier incarnations that a restart would read, newest first."""
        master = self.session.claimant.master
        lives = (PreviousLife(self.owner.incarnation, master), *self._earlier)
        return lives[:LIVES_MAX]

    @property
    def held(self) -> dict[Key, Holding]:
        """Every key that it may use now, by its leases."""
        now_ms = self.clock.now_ms()
        holdings = self.session.holdings
        return {k: h for k, h in holdings.items() if h.claim.is_valid(now_ms)}

    def consume(self, spec: ConsumerSpec) -> Consumer:
        """Subscribe; the consumer starts to contend for partitions in the next step."""
        config = spec.config
        matches = config.matches(COORDINATION_TOPIC)
        topics: Iterable[str] = config.topics
        if matches is not None:
            topics = filter(matches, self._kafka.topic_names())
        infos = {}
        for topic in topics:
            found = self._kafka.topic(topic)
            infos[topic] = TopicInfo(len(found.partitions), found.topic_id)
        subscription = Subscription(
            group_id=self.session.claimant.group_id,
            topics=infos,
            policy=find_policy(config.policy),
            config=config,
            matches=matches,
            on_warm=spec.callbacks.on_warm,
            warming=self.warming,
            warm_fetcher=new_fetcher(
                config,
                data=self.data,
                background=self.warm_fetches,
                observe=self.engine.context.observe,
            ),
        )
        on_standby = spec.callbacks.on_standby
        if on_standby is not None:
            subscription.standby = StandbyThread(on_standby, self.standing_by)
        self.session.subscribe(subscription)
        self.consumer = Consumer(
            self.engine,
            self.session,
            subscription=subscription,
            reader=self.data.reader(isolation_level=config.isolation_level),
            callbacks=spec.callbacks,
        )
        return self.consumer

    @property
    def is_backing_off(self) -> bool:
        """Whether it claims no keys of others now, after it released keys."""
        now_ms = self.clock.now_ms()
        return any(s.backoff.is_on(now_ms) for s in self.session.subscriptions)

    def step(self) -> None:
        """Let the engine read and act once."""
        self.engine.step(0)

    def leave(self) -> None:
        """Begin to close; step until ``has_left``."""
        if self.consumer is not None:
            self.consumer.close(timeout_ms=0)
        self.session.begin_close(release=True)

    @property
    def has_left(self) -> bool:
        """Whether all its releases are read back."""
        return not self.session.leaving_count

    def cut(self, *, is_cut: bool) -> None:
        """Cut the network between this process and the cluster, or restore it."""
        self.log.cut = self.data.cut = is_cut


class Cluster:
    """A cluster with a formatted coordination topic.

    Attributes:
        clock: True time.
        kafka: The cluster.
        config: The Config in every coordinating partition.
        nodes: Every process that was started and not removed.
    """

    def __init__(
        self,
        *,
        heartbeat_interval_ms: int = 3_000,
        partitions: int = 1,
        policy: FatePolicy | None = None,
        limits: dict[str, int] | None = None,
    ) -> None:
        """Make a cluster with a formatted topic."""
        self.clock = VirtualClock(now_ms=1_000)
        self.kafka = FakeKafka(self.clock, policy=policy)
        self.kafka.create_topic(COORDINATION_TOPIC, partitions, is_log_append_time=True)
        bounds = limits or {}
        self.config = Config(
            generation=1,
            format_id=b"format".ljust(16, b"."),
            era=1,
            cluster_id="simulated",
            heartbeat_interval_ms=heartbeat_interval_ms,
            partition_count=partitions,
            feature_level=SUPPORTED_LEVEL,
            limits=Limits(**{name: bounds.get(name) for name in LIMIT_DEFAULTS}),
        )
        self.nodes: list[Node] = []
        self._starts = 0
        for partition in range(partitions):
            self.kafka.produce(self.place(partition), encode(self.config))

    @property
    def heartbeat_interval_ms(self) -> int:
        """Heartbeat interval of the log."""
        return self.config.heartbeat_interval_ms

    def place(self, partition: int) -> TopicPartition:
        """Return the topic and partition of a coordinating partition."""
        return TopicPartition(COORDINATION_TOPIC, partition)

    def fill(self, topic: str, counts: Sequence[int]) -> list[TopicPartition]:
        """Make a data topic with the given number of records in each partition."""
        self.kafka.create_topic(topic, len(counts))
        places = [TopicPartition(topic, number) for number in range(len(counts))]
        for place, count in zip(places, counts, strict=True):
            for number in range(count):
                self.kafka.produce(place, b"%d" % number)
        return places

    def node(
        self,
        client_id: str,
        *,
        group_id: str = "g",
        spec: ConsumerSpec | None = None,
        clock: ClockView | None = None,
        lives: tuple[PreviousLife, ...] = (),
        incarnation: bytes | None = None,
        sources: Sequence[KeptStates] = (),
        can_plan: bool = True,
        labels: Mapping[str, str] | None = None,
        host: str | None = None,
    ) -> Node:
        """Start a process with a new incarnation, or the given one."""
        self._starts += 1
        if incarnation is None:
            name = f"{client_id}#{self._starts}".encode()
            incarnation = name.ljust(16, b".")[-16:]
        node = Node(
            self,
            Owner(client_id, incarnation),
            group_id=group_id,
            seed=self._starts,
            clock=clock,
            lives=lives,
            sources=sources,
            can_plan=can_plan,
            labels=labels,
            host=host,
        )
        if spec is not None:
            node.consume(spec)
        self.nodes.append(node)
        return node

    def crash(self, node: Node) -> None:
        """End a process without a shutdown; its appends in flight still land."""
        self.nodes.remove(node)

    def run(self, duration_ms: int, *, step_ms: int = 20) -> None:
        """Advance time, stepping every node."""
        for _ in range(-(-duration_ms // step_ms)):
            self.clock.advance(step_ms)
            for node in self.nodes:
                node.step()

    def run_until(
        self, condition: Callable[[], bool], limit_ms: int, *, step_ms: int = 20
    ) -> int:
        """Run until a condition holds; return how long it took.

        Raises:
            TimeoutError: It does not hold within the limit, in virtual time.
        """
        start_ms = self.clock.now_ms()
        while not condition():
            took_ms = self.clock.now_ms() - start_ms
            if took_ms >= limit_ms:
                raise TimeoutError(f"not within {limit_ms} ms of virtual time")
            self.run(step_ms, step_ms=step_ms)
        return self.clock.now_ms() - start_ms
