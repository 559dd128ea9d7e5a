"""The engine: reads and folds the log, passes verdicts to sessions and drives them."""

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kafka_marshal.conditions import Condition
from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import (
    CoordinationError,
    InvalidTransition,
    LogTruncated,
    MarshalError,
    TopicMisconfigured,
)
from kafka_marshal.ports import Run, runs_of
from kafka_marshal.protocol.claiming import Claimant
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP
from kafka_marshal.protocol.import_check import ImportCheck
from kafka_marshal.protocol.placement import newest
from kafka_marshal.protocol.records import ClaimingMessages, Config, LayoutImport
from kafka_marshal.protocol.state import ACCEPTED, SKIPPED, KeyState, Transition
from kafka_marshal.protocol.types import Key, LogEntry, Owner

from .checkpointing import Checkpointer, CheckpointRule
from .config_check import agreed_config, behind, lagging
from .context import Context, Ports
from .heartbeats import INTERVALS_PER_H
from .kept_states import KeptStates
from .layout_change import AddedPartitions, LayoutChange
from .proxy_grants import ProxyGrants
from .rebuilding import Rebuilder
from .replica import Replica, check_halt
from .resolver import Resolver
from .session import Session
from .snapshotter import Snapshotter, StateStore
from .waits import await_news, wait_for_news

if TYPE_CHECKING:
    from kafka_marshal.ports import Pending

POLL_MS_MAX = 100
POLL_MS_MIN = 1
CATCH_UP_MS_MAX = 1_000
# Pause after an act, as a multiple of its duration: rounds need the lock, too.
ACT_RESTS = 4
UNREAD = "was not read to its end"

# Effects that may change the coordinating partitions of keys (PROTOCOL 10).
LAYOUT_CHANGES = frozenset({"layout_fenced", "layout_done", "layout_final"})
# Frequent effects that change no owner.
ROUTINE = frozenset({"renewed", "position_only", "granted"})
UNKNOWN_MS = -1


class IntervalFollower:
    """Adapts the pace of a process and its append timeouts to the heartbeat interval.

    A change of the interval reaches the coordinating partitions one by one (PROTOCOL
    4.12), and each key is judged by the interval of its own partition. This process
    follows the shortest interval. Called on the engine's thread, under its lock.
    """

    __slots__ = ("_call", "_configured_ms", "_context", "_due_ms")

    def __init__(self, context: Context) -> None:
        self._context = context
        # The interval that the timeouts follow; None before the first change.
        self._configured_ms: int | None = None
        self._call: Pending[None] | None = None
        self._due_ms = 0

    def follow(self, before_ms: int) -> bool:
        """Set the pace from the Configs in force; return whether it has changed.

        Args:
            before_ms: The previous interval.
        """
        context = self._context
        settled = context.settled
        least_ms = min(
            replica.heartbeat_interval_ms or before_ms
            for t, replica in context.replicas.items()
            if t < settled.partition_count
        )
        is_of_all = least_ms == settled.heartbeat_interval_ms
        context.least_interval_ms = None if is_of_all else least_ms
        if least_ms == before_ms:
            return False
        fields = {"before_ms": before_ms, "interval_ms": least_ms}
        context.observe("interval_changed", fields)
        self._configured_ms = before_ms
        return True

    def drive(self, now_ms: int) -> None:
        """Set the timeouts of appends in the background; retry if that failed."""
        if self._call is not None:
            if not self._call.done():
                return
            error, self._call = self._call.exception(0), None
            if isinstance(error, CoordinationError):
                self._context.observe("timeouts_unchanged", {"error": error})
                self._configured_ms = UNKNOWN_MS
                self._due_ms = now_ms + self._context.heartbeat_interval_ms
        wanted_ms = self._context.heartbeat_interval_ms
        if self._configured_ms in {None, wanted_ms} or now_ms < self._due_ms:
            return
        self._configured_ms = wanted_ms
        log = self._context.ports.log
        self._call = self._context.ports.background.submit(
            lambda: log.configure(wanted_ms)
        )


class Engine:
    """Reads the coordination log and drives all sessions of a process.

    ``step`` is called by one thread only. Everything else may be called by any
    thread that holds ``changed`` (a condition whose lock guards all state).

    Attributes:
        changed: Notified after every step that folded something or acted.
        lock: The lock of ``changed``. It is taken for each record, and taking it
            directly costs a third of taking ``changed``.
        context: Ports, replicas and, once ready, the Config.
        proxy_grants: Requests for offsets on behalf of other processes.
        saver: Saves states for later starts.
        rebuilder: Starts partitions, and starts them again after truncation.
        checkpointer: Writes checkpoints when they are due, None if disabled.
        resolver: Finishes set positions that their admin has left unfinished.
        layout: Takes part in changes of the partition count.
        failure: Set when the engine has stopped for good; its sessions are fenced.
    """

    def __init__(
        self,
        ports: Ports,
        *,
        cluster_id: str | None = None,
        sources: Sequence[KeptStates] = (),
        store: StateStore | None = None,
    ) -> None:
        """Start with nothing read.

        Args:
            ports: Interfaces to Kafka, time, threads and observers.
            cluster_id: Cluster id that the Config must have; None skips the check.
            sources: Sources of kept states to start from, in order of preference.
            store: Store for this engine's own states; it is the first source.
        """
        now_ms = ports.clock.now_ms()
        count = ports.log.partition_count
        replicas = {t: Replica(t, now_ms=now_ms) for t in range(count)}
        self.lock = threading.RLock()
        self.changed = Condition(self.lock)
        self.context = Context(ports, replicas)
        self.proxy_grants = ProxyGrants(self.context)
        kept = sources if store is None else (store, *sources)
        self.rebuilder = Rebuilder(self.context, self.proxy_grants, sources=kept)
        self.saver = Snapshotter(self.context, store)
        self.checkpointer: Checkpointer | None = None
        self.resolver = Resolver(self.context)
        self.layout = LayoutChange(self.context)
        self._imports = ImportCheck()
        self._added = AddedPartitions(self.context)
        self._interval = IntervalFollower(self.context)
        self.failure: MarshalError | None = None
        self._cluster_id = cluster_id
        self._named: set[Key] = set()
        self._audit_at_ms = 0
        self._acts_again_ms = 0
        # The unreported error about Configs that differ, and when to report it.
        self._torn: TopicMisconfigured | None = None
        self._torn_at_ms: int | None = None
        self._sessions: dict[bytes, Session] = {}
        self._by_group: dict[str, list[Session]] = {}

    @property
    def is_ready(self) -> bool:
        """Whether everything written before the start has been folded."""
        return self.context.config is not None and self.failure is None

    @property
    def log_start_missing(self) -> tuple[int, ...]:
        """Coordinating partitions in use whose log start is missing (PROTOCOL 7.3).

        They are only observed: this process claims none of their keys.
        """
        return tuple(self.rebuilder.missing())

    @property
    def diverged(self) -> tuple[int, ...]:
        """Partitions whose last checkpoint has another digest than our own state."""
        replicas = self.context.replicas.items()
        last = {t: replica.compared for t, replica in replicas}
        return tuple(t for t, one in last.items() if one and not one.is_equal)

    # --- sessions

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The sessions that the engine drives."""
        return tuple(self._sessions.values())

    def add_session(self, session: Session) -> None:
        """Start driving a session.

        Raises:
            InvalidTransition: The same client_id is open in this process.
        """
        claimant = session.claimant
        for other in self._by_group.get(claimant.group_id, []):
            if other.claimant.owner.client_id == claimant.owner.client_id:
                raise InvalidTransition(
                    f"client_id {claimant.owner.client_id!r} of group "
                    f"{claimant.group_id!r} is already open in this process; close "
                    "it first or use another client_id"
                )
        self._sessions[claimant.owner.incarnation] = session
        self._by_group.setdefault(claimant.group_id, []).append(session)

    def remove_session(self, session: Session) -> None:
        """Stop driving a session. Idempotent."""
        claimant = session.claimant
        if self._sessions.pop(claimant.owner.incarnation, None) is not None:
            alike = self._by_group[claimant.group_id]
            alike.remove(session)
            if not alike:  # a sidecar may see any number of groups
                del self._by_group[claimant.group_id]

    def write_checkpoints(self, client_id: str, rule: CheckpointRule) -> None:
        """Start taking part in writing checkpoints (PROTOCOL 7.2).

        Args:
            client_id: Client that claims the reserved keys, in the group ``marshal``.
            rule: When checkpoints are due.
        """
        draw = self.context.ports.entropy.random_bytes
        claimant = Claimant(
            Owner(client_id, draw(16)), CHECKPOINT_GROUP, master=draw(32)
        )
        self.checkpointer = Checkpointer(self.context, claimant, rule)

    # --- the round

    def step(self, timeout_ms: int) -> None:
        """Read for at most ``timeout_ms``, fold, and drive all sessions.

        The wait ends early if something is due before: a claim that can be tried now
        must not wait for new entries (PROTOCOL 11, L1).

        Never raises. A transient fault is reported to the observer, and leases continue
        to run out; a permanent fault sets ``failure`` and fences all claims.
        """
        runs: Sequence[Run] = ()
        try:
            self._begin_due()
            wait_ms = min(timeout_ms, self._until_due_ms()) if timeout_ms else 0
            runs = self.context.ports.log.poll_runs(wait_ms)
        except LogTruncated as error:
            if error.partition is None:
                self._fail(error)
                return
            with self.changed:
                self._on_truncated(error.partition, error)
        except CoordinationError as error:
            if not error.retriable:
                self._fail(error)
                return
            self.context.observe("log_poll_failed", {"error": error})
        except MarshalError as error:
            self._fail(error)
            return
        except Exception as error:  # noqa: BLE001 - else its thread ends unnoticed
            self._fail(_broken(error))
            return
        runs = [*runs_of(self.rebuilder.take_aside()), *runs]
        with self.changed:
            try:
                self._timed_round(runs)
            except Exception as error:  # noqa: BLE001 - a bug must not leave zombies
                self._fail(_broken(error))
            self.changed.notify_all()

    def act(self, session: Session) -> None:
        """Drive one session at once, because its subscriptions have changed.

        May be called on any thread: the thread that steps may be waiting for the log,
        for up to 100 ms. Does nothing shortly after an act that took long (many clients
        of a sidecar and many partitions): the next round acts. Never raises.
        """
        with self.changed:
            since_ms = self.context.now_ms
            if not self.is_ready or since_ms < self._acts_again_ms:
                return
            try:
                session.tick(since_ms)
            except Exception as error:  # noqa: BLE001 - as in a round
                self._fail(_broken(error))
            now_ms = self.context.now_ms
            self._acts_again_ms = now_ms + ACT_RESTS * (now_ms - since_ms)

    def _until_due_ms(self) -> int:
        with self.changed:
            dues = [session.next_due_ms() for session in self._sessions.values()]
            dues.append(self.layout.next_due_ms())
        due_ms = min((due for due in dues if due is not None), default=None)
        if due_ms is None:
            return POLL_MS_MAX
        return max(POLL_MS_MIN, due_ms - self.context.now_ms)

    def _timed_round(self, runs: Iterable[Run]) -> None:
        since_ms = self.context.now_ms
        self._round(runs)
        meters, now_ms = self.context.meters, self.context.now_ms
        meters.rounds.observe(now_ms - since_ms)
        meters.round_at_ms = now_ms

    def _round(self, runs: Iterable[Run]) -> None:
        if self.failure is not None:
            return
        try:
            self._fold(runs)
            at = self.context.ports.log.positions()
            is_lost = self.rebuilder.is_lost
            self.context.folded = {t: to for t, to in at.items() if not is_lost(t)}
            self._finish_rebuilding(at)
            if self.context.config is not None:
                self.rebuilder.drive(self.context.now_ms)
        except CoordinationError as error:
            self._fail(error)
            return
        if self.context.config is not None:
            now_ms = self.context.now_ms
            self._interval.drive(now_ms)
            self._report_torn(now_ms)
            for session in list(self._sessions.values()):
                session.tick(now_ms)
            if self.checkpointer is not None:
                self.checkpointer.drive(now_ms)
            self.resolver.drive(
                now_ms, sessions=self.sessions, folded=self.context.folded
            )
            self.layout.drive(now_ms, sessions=self.sessions)
            self._added.drive(now_ms)
            self._audit(now_ms)
            self.saver.drive(now_ms)

    def _audit(self, now_ms: int) -> None:
        """Stop everything if a claim is in use that the log does not show as our own.

        Only a bug can cause that, and continuing could let two processes work on one
        partition. A round checks the keys that the log has named since the last round;
        three times per heartbeat interval all keys are checked.
        """
        named, self._named = self._named, set()
        is_due = now_ms >= self._audit_at_ms
        if not named and not is_due:
            return
        if is_due:
            interval_ms = self.context.heartbeat_interval_ms
            self._audit_at_ms = now_ms + interval_ms // INTERVALS_PER_H
        for session in self._sessions.values():
            owner = session.claimant.owner
            holdings = session.holdings
            for key in holdings if is_due else named & holdings.keys():
                holding = holdings[key]
                if not holding.claim.is_valid(now_ms):
                    continue
                replica = self.context.replicas[holding.coordinator]
                known = replica.world.keys.get(key)
                ours = known is not None and known.owner == owner
                if not ours or known is None or known.epoch != holding.claim.epoch:
                    raise InvalidTransition(
                        f"{key} is in use under epoch {holding.claim.epoch}, but the "
                        f"log has {_owner_in(known)}"
                    )

    def _fold(self, runs: Iterable[Run]) -> None:
        now_ms = self.context.now_ms
        touched: set[int] = set()
        for partition, run in runs:
            replica = self.context.replicas.get(partition)
            if replica is None:
                continue  # PROTOCOL 2.5: partitions added in Kafka do not count
            if self.rebuilder.is_lost(partition):
                continue  # read before the truncation or addition was detected
            touched.add(partition)
            try:
                if partition in self.context.rebuilding:
                    self._fold_rebuilding(replica, run, now_ms=now_ms)
                else:
                    self._fold_live(replica, run, now_ms=now_ms)
            except LogTruncated as error:
                self._on_truncated(partition, error)
        if self._imports.is_waiting:
            self._compare_imports()
        if touched:
            for session in self._sessions.values():
                session.check_clock(touched, now_ms)

    def _compare_imports(self) -> None:
        """Report imports that differ from what their sources show (PROTOCOL 10.4)."""
        unknown = {*self.context.rebuilding, *self.rebuilder.log_start_missing}
        replicas = self.context.replicas.items()
        worlds = {t: each.world for t, each in replicas if t not in unknown}
        for found in self._imports.compare(worlds):
            fields = {**found._asdict(), "key": found.key and str(found.key)}
            self.context.observe("import_diverged", fields)

    def _fold_rebuilding(
        self, replica: Replica, entries: Sequence[LogEntry], *, now_ms: int
    ) -> None:
        """Fold a partition that must be read to its end before any decision on it."""
        for entry, transitions in replica.fold_run(entries, now_ms):
            check_halt(replica)
            if replica.world.layout is not None:
                self._imports.take(replica.world, transitions)
            partition = replica.world.partition
            self.rebuilder.watch(partition, entry, transitions=transitions)

    def _fold_live(
        self, replica: Replica, entries: Sequence[LogEntry], *, now_ms: int
    ) -> None:
        partition = replica.world.partition
        for entry in entries:
            transitions = replica.fold(entry, now_ms)
            check_halt(replica)
            if replica.world.layout is not None:
                self._imports.take(replica.world, transitions)
            if transitions:
                self._apply_state_record(partition, transitions[0])
                self._route(transitions, now_ms, partition=partition)
                self._notify_checkpointer(partition, transitions, now_ms=now_ms)

    def _apply_state_record(self, partition: int, first: Transition) -> None:
        """Handle a checkpoint, layout change or Reset in a partition read to its end.

        Other records concern single keys or groups, and are routed to sessions.
        """
        if first.outcome == SKIPPED:
            compared = self.context.replicas[partition].take_compared()
            if compared is not None and not compared.is_equal:
                fields = {"partition": partition, **compared._asdict()}
                self.context.observe("replica_diverged", fields)
        elif first.effect in LAYOUT_CHANGES:
            self._reload_config()
            self._end_dropped(partition)
        elif first.effect == "reset":
            # PROTOCOL 7.6: none of its keys has an owner any more.
            fields = {"partition": partition, "offset": first.offset}
            self.context.observe("state_reset", fields)
            for session in self._sessions.values():
                session.forget(partition)
            place_of = self.context.partition_of
            self.rebuilder.grants.forget(lambda key: place_of(key) == partition)

    def _end_dropped(self, partition: int) -> None:
        """End the claims of keys that a partition has dropped while they were in use.

        Only a writer that begins the partition again, or ends a change before all keys
        are imported, causes that (SECURITY.md).
        """
        keys = self.context.replicas[partition].world.keys
        for session in self._sessions.values():
            for holding in list(session.holdings.values()):
                is_there = holding.claim.is_owned and holding.coordinator == partition
                if is_there and holding.key not in keys:
                    session.abandon(holding, reason="fenced")

    def _notify_checkpointer(
        self, partition: int, transitions: tuple[Transition, ...], *, now_ms: int
    ) -> None:
        record, writer = transitions[0].record, self.checkpointer
        if writer is None or record is None or isinstance(record, Config):
            return
        if record.incarnation == writer.claimant.owner.incarnation:
            writer.on_own(partition, transitions, now_ms=now_ms)

    def _route(
        self, transitions: tuple[Transition, ...], now_ms: int, *, partition: int
    ) -> None:
        first = transitions[0]
        record = first.record
        self._named.update(
            transition.key
            for transition in transitions
            if transition.effect not in ROUTINE and transition.key is not None
        )
        if isinstance(record, Config) and first.outcome == ACCEPTED:
            self._reload_config()
        if record is None or isinstance(record, Config):
            return
        if isinstance(record, ClaimingMessages):
            self.proxy_grants.on_record(record, first)
        elif isinstance(record, LayoutImport):
            self._route_imports(transitions, now_ms)
        own = self._sessions.get(record.incarnation)
        if own is not None and own.claimant.group_id == record.group_id:
            own.on_own(transitions, now_ms, partition=partition)
            self._note_own(first, partition)
        for session in self._by_group.get(record.group_id, ()):
            if session is own:
                continue
            for transition in transitions:
                if transition.outcome != ACCEPTED:
                    continue
                if transition.effect == "member":
                    session.on_member(transition, now_ms, partition=partition)
                else:
                    session.on_foreign(transition, partition=partition)

    def _note_own(self, first: Transition, partition: int) -> None:
        """Note that a record of this process has released a key or was granted."""
        if first.key is None:
            return
        if first.effect == "released":
            self.layout.on_released(first.key)
        elif first.effect == "granted":
            world = self.context.replicas[partition].world
            self.rebuilder.grants.take(world, first.key)

    def _route_imports(self, transitions: tuple[Transition, ...], now_ms: int) -> None:
        """Have the sessions claim keys that were imported (PROTOCOL 10.4)."""
        for transition in transitions:
            key = transition.key
            if transition.outcome == ACCEPTED and key is not None:
                for session in self._by_group.get(key.group_id, ()):
                    session.on_imported(key, now_ms)

    # --- reading to the end

    def catch_up(
        self, timeout_ms: int, *, partitions: Collection[int] | None = None
    ) -> None:
        """Wait until the log is folded to its current end; not on the stepping thread.

        Afterwards the worlds hold every record that was acknowledged before the call.

        Args:
            timeout_ms: Limit for the whole call.
            partitions: Coordinating partitions to read to their ends; None = all.

        Raises:
            DeadlineExceeded: The end was not reached in time.
            MarshalError: The engine failed.
        """
        deadline = Deadline(timeout_ms, self.context.ports.clock.now_ms)
        # The calling thread requests the ends: the stepping thread may be in a poll for
        # 100 ms, and if the log has nothing new there is no need to wait for that poll.
        ends = self._fetch_ends(deadline, partitions)
        await_news(
            self,
            lambda: all(
                self.context.folded.get(t, 0) >= end for t, end in ends.items()
            ),
            timeout_ms=deadline.left_ms,
            fault=UNREAD,
        )

    def catch_up_keys(self, keys: Collection[Key], timeout_ms: int) -> None:
        """Wait until every record about some keys is folded; raises as ``catch_up``.

        Only the keys' coordinating partitions have such records, unless these show that
        the partition count is changing, or has changed (PROTOCOL 10).
        """
        deadline = Deadline(timeout_ms, self.context.ports.clock.now_ms)
        with self.changed:
            partitions = self._partitions_of(keys)
        if partitions is not None:
            self.catch_up(timeout_ms, partitions=partitions)
            with self.changed:
                if self._partitions_of(keys) == partitions:
                    return
        self.catch_up(deadline.left_ms)

    def _partitions_of(self, keys: Collection[Key]) -> frozenset[int] | None:
        """Return the partitions that alone know keys; None if others may, too."""
        if not self.is_ready or self.context.placement.has_layouts:
            return None
        return frozenset(map(self.context.partition_of, keys))

    def _fetch_ends(
        self, deadline: Deadline, partitions: Collection[int] | None
    ) -> Mapping[int, int]:
        """Return the log's end offsets, retried until the log answers."""
        while True:
            with self.changed:
                folded = self.context.folded
            left_ms = min(max(1, deadline.left_ms), CATCH_UP_MS_MAX)
            try:
                ends = self.context.ports.log.end_offsets(left_ms, partitions)
            except CoordinationError as error:
                if not error.retriable:
                    raise
                self.context.observe("log_poll_failed", {"error": error})
            else:
                # An end below the folded offset comes from a new leader that lags, or
                # from a truncated log, which is folded again first.
                if all(end >= folded.get(t, 0) for t, end in ends.items()):
                    return ends
            with self.changed:
                late = f"{UNREAD} within {deadline.timeout_ms} ms"
                wait_for_news(self, deadline, late=late)

    # --- start

    def _begin_due(self) -> None:
        """Find the start offsets of partitions that have none yet."""
        if not self.rebuilder.is_due(self.context.now_ms):
            return
        found, ends = self.rebuilder.find_starts()
        with self.changed:
            self.rebuilder.begin(found, ends, now_ms=self.context.now_ms)
            for partition, restored in found.items():
                self.saver.record(partition, restored.world.next_offset)

    def _on_truncated(self, partition: int, error: LogTruncated) -> None:
        """Drop the state of a truncated coordinating partition; the others continue."""
        for session in list(self._sessions.values()):
            session.forget(partition)
        self.rebuilder.on_truncated(partition, error)

    def _finish_rebuilding(self, at: Mapping[int, int]) -> None:
        done = self.rebuilder.finish(at)
        if self.context.config is not None:
            for partition in done:
                self._reload_config()
                self.rebuilder.compare(partition, self._sessions.values())
        elif self.rebuilder.is_ended():
            self.context.config = self._agreed_config()
            self._follow_count()
            fields = {"partition_count": self.context.config.partition_count}
            self.context.observe("ready", fields)
            self.rebuilder.compare_all(self._sessions.values())

    def _agreed_config(self) -> Config:
        worlds = {t: r.world for t, r in self.context.replicas.items()}
        topic = self.context.ports.log.topic
        agreed = agreed_config(worlds, cluster_id=self._cluster_id, topic=topic)
        return newest(agreed, worlds.values())

    def _follow_count(self) -> None:
        """Place keys by the Config and the layouts in force (PROTOCOL 10).

        Partitions that the log client does not read yet count as being rebuilt. They
        may be sources of keys, if a second change was made before this process read the
        first.
        """
        context = self.context
        has_changed = context.placement.follow(context.settled)
        count = context.settled.partition_count
        count = max(count, context.placement.from_count or 0)
        for t in range(len(context.replicas), count):
            context.replicas[t] = Replica(t, now_ms=context.now_ms)
            self.rebuilder.add(t)
        if has_changed or context.placement.has_layouts:
            for session in self._sessions.values():
                session.on_layout(is_new=has_changed)

    def _reload_config(self) -> None:
        context = self.context
        if context.config is None:
            return  # Not ready: all partitions must be read first.
        before_ms = context.heartbeat_interval_ms
        worlds = {t: replica.world for t, replica in context.replicas.items()}
        try:
            context.config = self._agreed_config()
            late = behind(worlds)
            if late:
                raise lagging(late, context.ports.log.topic)
        except TopicMisconfigured as torn:
            # A new generation reaches the coordinating partitions one by one;
            # meanwhile each is judged by its own Config. The error is reported if the
            # difference lasts.
            self._torn = torn
            later = newest(context.settled, worlds.values())
            if later.partition_count != context.settled.partition_count:
                context.config = later  # PROTOCOL 10.8: it places claims
            if self._torn_at_ms is None:
                self._torn_at_ms = context.now_ms + context.heartbeat_interval_ms
        else:
            self._torn = self._torn_at_ms = None
        self._follow_count()
        if self._interval.follow(before_ms):
            for session in self._sessions.values():
                session.on_interval()

    def _report_torn(self, now_ms: int) -> None:
        if self._torn is not None and now_ms >= (self._torn_at_ms or 0):
            self.context.observe("config_torn", {"error": self._torn})
            self._torn = None

    def wait_ready(self, timeout_ms: int) -> None:
        """Wait until the engine is ready; not on the stepping thread.

        Raises:
            MarshalError: The engine failed; see the cause.
            LogUnreadable: The log start of a partition is missing; the engine keeps
                observing, and becomes ready if a checkpoint appears.
            DeadlineExceeded: Not ready in time.
        """
        await_news(self, self._is_ready_or_raises, timeout_ms=timeout_ms, fault=UNREAD)

    def _is_ready_or_raises(self) -> bool:
        if not self.is_ready:
            self.rebuilder.require_log_start()
        return self.is_ready

    def _fail(self, error: MarshalError) -> None:
        with self.changed:
            if self.failure is None:
                self.failure = error
                self.context.observe("engine_failed", {"error": error})
                for session in self._sessions.values():
                    session.fence(error)
            self.changed.notify_all()


def _owner_in(known: KeyState | None) -> str:
    if known is None or known.owner is None:
        return "no owner"
    return f"owner {known.owner.client_id!r} with epoch {known.epoch}"


def _broken(error: Exception) -> MarshalError:
    """Return the failure that reports a bug in the engine."""
    failure = InvalidTransition(
        f"the engine of kafka-marshal stopped on an internal error: {error!r}; it has "
        "fenced all its claims; please report it with the output of: marshal log dump"
    )
    failure.__cause__ = error
    return failure
