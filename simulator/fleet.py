"""Processes of a simulated world, and the applications in them.

Each process has two threads, which are called at different times: the engine's thread
reads and acts, the application's thread polls, works and commits.
"""

import random
from functools import partial

import attrs

from kafka_marshal.config import Callbacks, ConsumerConfig, Delivery
from kafka_marshal.errors import (
    ClaimLost,
    ClientFenced,
    LogTruncated,
    LogUnreadable,
    MarshalError,
    TopicMisconfigured,
)
from kafka_marshal.ports import Append, Event, Record
from kafka_marshal.protocol.claiming import PreviousLife
from kafka_marshal.protocol.types import Key
from simulator.base import GROUP, TOPIC, is_of_one_claim
from simulator.checkers import Violation
from simulator.garbage import GarbagePolicy, never_returns
from simulator.handoffs import Warming, mood_of, note_death, on_warm_of
from simulator.keeping import Keeping
from simulator.node import ConsumerSpec, Node
from simulator.plan import (
    GARBAGE_POLICY,
    HANDOFFS,
    PLANS,
    STANDBYS,
    can_plan,
    chance,
)
from simulator.standbys import hold, host_of, standing_by
from simulator.world import World

APPS_MAX = 6
PROMPT_TURNS = 0.2
WORK_FIRST = 0.7
OUT_OF_ORDER = 0.2
LONG_HANDLING = 0.02
HEALED_HANDLING_MS = 100


@attrs.define(eq=False, kw_only=True)
class App:
    """One process and its application.

    Attributes:
        node: The production engine, session and consumer.
        name: Names it in transcripts; no two processes have the same.
        rng: Its own random numbers.
        hand: Records handed out and not committed, with the times of their hand-outs.
        wakes_ms: True time until which the process is stopped.
        cut_until_ms: True time until which its network is cut, in some way.
        is_leaving: Whether it was asked to end.
        is_gone: Whether it has ended.
        is_waiting: Whether its application polled and got no records.
        checked: Offsets up to which its replicas were compared, by partition.
        step_ms: Time at which its engine is called next.
        turn_ms: Time at which its application is called next.
    """

    node: Node
    name: str
    rng: random.Random
    hand: list[tuple[Record, int]] = attrs.field(factory=list)
    wakes_ms: int = 0
    cut_until_ms: int = 0
    is_leaving: bool = False
    is_gone: bool = False
    is_waiting: bool = False
    checked: dict[int, int] = attrs.field(factory=dict)
    step_ms: int | None = None
    turn_ms: int | None = None


class Fleet:
    """All processes of a simulated world.

    Attributes:
        apps: The live processes.
        keeping: Checkpoints, and kept states of hosts.
        after_step: Called after each step of a process that continues.
    """

    def __init__(self, world: World) -> None:
        """Start without processes."""
        self.apps: list[App] = []
        self.keeping = Keeping(world)
        self.after_step = _nothing
        world.on_record = self.keeping.on_record
        self._world = world
        self._starts = 0
        self._restarts: dict[str, tuple[str, tuple[PreviousLife, ...]]] = {}
        self._names = 0
        self._ids = chance(world.plan.seed, "ids")
        plan = world.plan
        self._spec = ConsumerSpec(
            ConsumerConfig(
                topics=(TOPIC,),
                delivery=plan.delivery,
                policy=plan.policy,
                max_poll_records=plan.poll_max,
                max_granted_batches=plan.depth_max,
                max_handling_ms=None if plan.gives_up_slow else 0,
                release_behind=plan.gives_up_slow,
            ),
            Callbacks(on_lost=lambda _tp, _end: None),
        )
        self._is_amo = plan.delivery is Delivery.AT_MOST_ONCE

    @property
    def refresh_ms(self) -> int:
        """Interval at which processes look at the topics if nothing is urgent."""
        return self._spec.config.metadata_refresh_ms

    # --- coming and going

    def admit(self) -> App | None:
        """Start a process of a new client."""
        self._names += 1
        # Names and incarnations are in no order: no code may depend on one.
        return self.start(f"{self._ids.choice('abcdefgh')}{self._names}", ())

    def start(self, client_id: str, lives: tuple[PreviousLife, ...]) -> App | None:
        """Start a process of a client, with the earlier lives that it remembers.

        Returns:
            The process; None if its topic does not exist. Then it ends at once, and is
            started again later.
        """
        world, rng = self._world, self._ids
        self._starts += 1
        if world.topic_id is None:
            world.trace(f"{client_id} starts and finds no topic")
            world.coverage.note("topic_missing")
            self._plan_restart(f"{client_id}#{self._starts}", client_id, lives)
            return None
        drift_ppm = world.plan.drift_ppm
        clock = world.cluster.clock.view(
            drift_ppm=rng.randint(-drift_ppm, drift_ppm),
            offset_ms=rng.randint(0, 10**6),
        )
        node = world.cluster.node(
            client_id,
            group_id=GROUP,
            clock=clock,
            lives=lives,
            incarnation=rng.randbytes(16),
            sources=self.keeping.sources(client_id),
            can_plan=PLANS not in world.plan.kinds
            or can_plan(world.plan.seed, self._starts),
            host=host_of(world.plan.seed, self._starts)
            if STANDBYS in world.plan.kinds
            else None,
        )
        own = chance(world.plan.seed, f"app/{self._starts}")
        app = App(node=node, name=f"{client_id}#{self._starts}", rng=own)
        if HANDOFFS in world.plan.kinds:
            node.warming = self._warming_of(app)
        if STANDBYS in world.plan.kinds:
            hold(node, world.plan.seed, start=self._starts)
        node.consume(self._spec_of_next())
        if GARBAGE_POLICY in world.plan.kinds:
            own = chance(world.plan.seed, f"returns/{self._starts}")
            node.policies.is_held = never_returns(own)
        self.keeping.take_part(node)
        node.observer.forward = partial(self._observe, node)
        world.on_started(node)
        world.levels.started(node.owner)
        node.log.on_append = partial(self._on_append, node)
        self.apps.append(app)
        world.names[node.owner.incarnation] = app.name
        world.trace(f"{app.name} starts, {len(lives)} lives behind it")
        now_ms = world.now_ms
        self.call_step(app, now_ms + app.rng.randint(0, 100))
        self._call_turn(app, now_ms + app.rng.randint(0, 500))
        return app

    def _spec_of_next(self) -> ConsumerSpec:
        """Return the topics and policy of the next process."""
        plan, spec = self._world.plan, self._spec
        if GARBAGE_POLICY in plan.kinds:
            policy = GarbagePolicy(chance(plan.seed, f"garbage/{self._starts}"))
            spec = attrs.evolve(spec, config=attrs.evolve(spec.config, policy=policy))
        if HANDOFFS in plan.kinds:
            on_warm = on_warm_of(mood_of(plan.seed, self._starts))
            callbacks = attrs.evolve(spec.callbacks, on_warm=on_warm)
            spec = attrs.evolve(spec, callbacks=callbacks)
        if STANDBYS in plan.kinds:
            spec = standing_by(spec, plan.seed, start=self._starts)
        return spec

    def _warming_of(self, app: App) -> Warming:
        """Return the runner for ``on_warm`` calls of the last process."""
        seed = self._world.plan.seed

        def awake_ms() -> int | None:
            return None if app.is_gone or app.is_leaving else app.wakes_ms

        def die() -> None:
            self._world.trace(f"{app.name} dies while it warms up")
            self.remove(app)
            after_ms = app.rng.randint(1, 2 * self._world.plan.h_ms)
            is_resuming = app.rng.random() < WORK_FIRST
            self.start_later(app, after_ms, is_resuming=is_resuming)

        return Warming(
            self._world,
            mood_of(seed, self._starts),
            rng=chance(seed, f"warming/{self._starts}"),
            awake_ms=awake_ms,
            die=die,
        )

    def _observe(self, node: Node, event: Event) -> None:
        self._world.observe(node, event)
        self.keeping.observe(node, event)

    def _on_append(
        self, node: Node, partition: int, value: bytes, append: Append
    ) -> None:
        held = {
            holding.claim.epoch: (key, holding.claim.token)
            for key in self._world.keys_of(partition)
            if (holding := node.session.holdings.get(key)) is not None
            and holding.claim.epoch is not None
            and holding.coordinator == partition
        }
        self._world.chronicle.on_append(partition, value, append=append, held=held)
        self._world.levels.on_append(node.owner)
        if self._world.is_truncating:
            self._world.readings.on_append(node, value)

    def remove(self, app: App) -> None:
        """End a process without a shutdown."""
        if app.hand:
            self._world.coverage.note("crashed_with_records")
        if not app.is_leaving:
            note_death(self._world, app.node)
        app.is_gone = True
        self.apps.remove(app)
        self._world.cluster.crash(app.node)
        self._world.on_ended(app.node)
        self.keeping.on_ended(app.node)
        self._world.trace(f"{app.name} ends")

    def start_later(self, app: App, after_ms: int, *, is_resuming: bool) -> None:
        """Start the client of a process again; it may remember its lives."""
        lives = app.node.lives if is_resuming else ()
        client_id = app.node.owner.client_id
        self._plan_restart(app.name, client_id, lives, after_ms=after_ms)

    def _plan_restart(
        self,
        name: str,
        client_id: str,
        lives: tuple[PreviousLife, ...],
        *,
        after_ms: int | None = None,
    ) -> None:
        if after_ms is None:
            after_ms = self._world.plan.h_ms // 2
        self._restarts[name] = (client_id, lives)
        start = partial(self._restart, name)
        self._world.loop.at(self._world.now_ms + after_ms, start)

    def restart_all(self) -> None:
        """Start at once all processes that were to be started later."""
        for name in list(self._restarts):
            self._restart(name)

    def _restart(self, name: str) -> None:
        if name in self._restarts:
            self.start(*self._restarts.pop(name))

    def wake(self, app: App) -> None:
        """Let a stopped process continue; its threads run in either order."""
        now_ms = self._world.now_ms
        if app.rng.random() < WORK_FIRST:
            self._call_turn(app, now_ms)
        self.call_step(app, now_ms)
        if app.turn_ms != now_ms:
            self._call_turn(app, now_ms)

    # --- the engine's thread

    def on_news(self) -> None:
        """Let all processes read new committed records soon."""
        plan, now_ms = self._world.plan, self._world.now_ms
        late_ms = max(plan.latency_ms, plan.h_ms // 100)
        for app in self.apps:
            if app.step_ms is None or app.step_ms > now_ms + late_ms:
                self.call_step(app, now_ms + app.rng.randint(0, late_ms))

    def call_step(self, app: App, at_ms: int) -> None:
        """Call an engine at this time, or earlier if that is planned."""
        if app.step_ms is None or at_ms < app.step_ms:
            app.step_ms = at_ms
            self._world.loop.at(at_ms, partial(self._step, app, at_ms))

    def _step(self, app: App, due_ms: int) -> None:
        if app.is_gone or app.step_ms != due_ms:
            return
        world = self._world
        app.step_ms = None
        if world.now_ms < app.wakes_ms:
            self.call_step(app, app.wakes_ms)
            return
        node = app.node
        node.step()
        if not self._check(app):
            return
        self.after_step(app)
        if app.is_leaving and node.has_left:
            world.coverage.note("left_in_order")
            self.remove(app)
            return
        if node.session.failure is not None and not app.is_leaving:
            self._on_failure(app)
            return
        self.call_step(app, world.now_ms + self._rest_ms(app))
        if app.is_waiting and self._is_amo and world.is_healed:
            # A call that waits for grants is woken after each step of the engine.
            self._call_turn(app, world.now_ms)

    def _rest_ms(self, app: App) -> int:
        """Return how long an engine waits when nothing is committed."""
        h_ms, rng = self._world.plan.h_ms, app.rng
        rest_ms = rng.randint(h_ms // 40, h_ms // 8)
        # A busy machine often calls late; bounds hold only for machines that do not.
        is_prompt = self._world.is_timed or rng.random() < PROMPT_TURNS
        due_ms = app.node.session.next_due_ms() if is_prompt else None
        if due_ms is None:
            return rest_ms
        return max(1, min(rest_ms, due_ms - app.node.clock.now_ms()))

    def _check(self, app: App) -> bool:
        """Check the last step of an engine; return whether it continues."""
        world = self._world
        if world.is_truncating:
            world.readings.on_step(app.node)
        failure = app.node.engine.failure
        if isinstance(failure, LogTruncated) and world.is_truncating:
            self.remove(app)
            self.start_later(app, world.plan.h_ms // 2, is_resuming=False)
            return False
        world.settle()
        if isinstance(failure, LogUnreadable) and world.has_halted(app.node):
            self._on_halt(app)
            return False
        if isinstance(failure, TopicMisconfigured) and world.is_torn(app.node):
            world.trace(f"{app.name} refuses: a new Config has not reached all")
            world.coverage.note("refused_torn")
            self.remove(app)
            self.start_later(app, world.plan.h_ms // 2, is_resuming=False)
            return False
        if failure is not None:
            self._fault(app, failure)
            return False
        if not world.is_judged:
            return True
        self.keeping.require_sound()
        world.has_halted(app.node)
        has_folded = world.watcher.check_reader(
            app.node.engine, app.checked, may_lag=world.is_truncating
        )
        if has_folded or world.levels.stops:
            world.check_leases([each.node for each in self.apps])
        return True

    def _on_halt(self, app: App) -> None:
        """End a process that has read a Config of a level that it does not know."""
        world, owner = self._world, app.node.owner
        world.trace(f"{app.name} halts")
        world.coverage.note("halted")
        if world.levels.is_beside(owner):
            world.coverage.note("started_beside_halt")
        if app.hand:
            world.coverage.note("halted_with_records")
        if not app.is_leaving:
            self._poll_halted(app)
        self.remove(app)
        if not app.is_leaving and not world.is_healed:
            # Its supervisor starts it again, in vain.
            again_ms = app.rng.randint(1, 4) * world.plan.h_ms
            is_resuming = app.rng.random() < WORK_FIRST
            self.start_later(app, again_ms, is_resuming=is_resuming)

    def _poll_halted(self, app: App) -> None:
        """Poll after the halt: demand an error, and that no key is held."""
        assert app.node.consumer is not None
        try:
            polled = app.node.consumer.poll(0)
        except LogUnreadable:
            polled = {}
            has_raised = True
        else:
            has_raised = False
        if self._world.is_judged and (app.node.held or not has_raised):
            text = f"{app.name} halted, holds {app.node.held}, got {polled}"
            raise Violation("S6", text)

    def _fault(self, app: App, error: MarshalError) -> None:
        """Raise an error that must never happen; end the process if not judged."""
        if self._world.is_judged:
            raise Violation("fault", f"{app.name}: {error!r}") from error
        if not app.is_gone:
            self.remove(app)
            self.start_later(app, self._world.plan.h_ms // 2, is_resuming=False)

    def _on_failure(self, app: App) -> None:
        """End a process whose session has failed; it is started again."""
        world, failure = self._world, app.node.session.failure
        world.trace(f"{app.name} fails: {type(failure).__name__}")
        is_fenced = isinstance(failure, ClientFenced)
        world.coverage.note("fence_noticed" if is_fenced else "identity_conflict")
        self.remove(app)
        client_id = app.node.owner.client_id
        if all(other.node.owner.client_id != client_id for other in self.apps):
            is_resuming = is_fenced and app.rng.random() < WORK_FIRST
            self.start_later(app, world.plan.h_ms // 2, is_resuming=is_resuming)

    # --- the application's thread

    def _call_turn(self, app: App, at_ms: int) -> None:
        app.turn_ms = at_ms
        self._world.loop.at(at_ms, partial(self._turn, app, at_ms))

    def _turn(self, app: App, due_ms: int) -> None:
        if app.is_gone or app.turn_ms != due_ms or app.is_leaving:
            return
        if self._world.now_ms < app.wakes_ms:
            self._call_turn(app, app.wakes_ms)
            return
        is_busy = True
        if app.hand and (self._is_amo or app.rng.random() < WORK_FIRST):
            self._work(app, app.rng.randint(1, 4))
        else:
            is_busy = self._poll(app)
        if not app.is_gone:
            app.is_waiting = not is_busy
            wait_ms = self._handling_ms(app, is_busy=is_busy)
            self._call_turn(app, self._world.now_ms + wait_ms)

    def _handling_ms(self, app: App, *, is_busy: bool) -> int:
        h_ms, rng = self._world.plan.h_ms, app.rng
        if not is_busy:
            return rng.randint(h_ms // 40, h_ms // 5)
        if self._world.is_healed:
            return rng.randint(1, HEALED_HANDLING_MS)
        handling = self._world.plan.handling
        if handling == "long" and rng.random() < LONG_HANDLING:
            return rng.randint(h_ms, 4 * h_ms)
        if handling == "slow":
            return rng.randint(0, h_ms // 3)
        return rng.randint(0, h_ms // 50)

    def _poll(self, app: App) -> bool:
        """Poll; return whether there are records to process."""
        world, consumer = self._world, app.node.consumer
        assert consumer is not None
        try:
            polled = consumer.poll(0)
        except ClaimLost:
            return True
        except MarshalError as error:
            if app.node.session.failure is not None or app.node.engine.failure:
                return False  # the engine's thread handles it
            self._fault(app, error)
            return False
        for partition, records in polled.items():
            key = Key(GROUP, *partition)
            offsets = [record.offset for record in records]
            world.trace(f"{app.name} is handed {partition} {offsets}")
            world.on_handed(app.node, key, records=records)
            app.hand.extend((record, world.now_ms) for record in records)
        return bool(app.hand)

    def _work(self, app: App, count: int) -> None:
        """Process and commit some uncommitted records, at times out of order."""
        world, consumer = self._world, app.node.consumer
        assert consumer is not None
        for _ in range(min(count, len(app.hand))):
            at = 0
            if app.rng.random() < OUT_OF_ORDER:
                at = app.rng.randrange(len(app.hand))
            record, since_ms = app.hand.pop(at)
            if world.now_ms - since_ms > 2 * world.plan.h_ms:
                world.coverage.note("handled_beyond_2h")
            key = Key(GROUP, record.topic, record.partition)
            world.on_processed(app.name, key, record=record)
            try:
                consumer.commit(record)
            except ClaimLost:
                # Other records under that claim belong to another process now.
                app.hand = [
                    each for each in app.hand if not is_of_one_claim(each[0], record)
                ]
                return
            except MarshalError as error:
                if app.node.session.failure is None and not app.node.engine.failure:
                    self._fault(app, error)
                return


def _nothing(app: App) -> None:
    """Do nothing after a step of a process."""
