"""Prometheus metrics of clients, read from their state at each scrape.

A scrape holds the engine's lock for short times, copies values, and formats them
without the lock. The engine's meters count what the state does not have: totals and
durations. Labels come from the groups, topics and partitions of this process's own
clients. From records of other processes come only the person, reason and topics of a
pause, shortened to ``LABEL_CHARS_MAX``.
"""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast
from weakref import WeakKeyDictionary

from kafka_marshal.engine import Holding, Subscription
from kafka_marshal.engine.holdings import ClaimSession
from kafka_marshal.engine.interfaces import ClaimContext, ClaimEngine
from kafka_marshal.engine.meters import Histogram, Tally
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.observability import metrics as known
from kafka_marshal.observability.logs import SERIOUS
from kafka_marshal.ports import LogRange, Pending
from kafka_marshal.protocol.claiming import Phase
from kafka_marshal.protocol.granting import AtMostOnce
from kafka_marshal.protocol.planner import topic as whole_topics
from kafka_marshal.protocol.state import SKIPPED
from kafka_marshal.protocol.types import Key, TopicPartition, lag_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from kafka_marshal.aio import AsyncMarshal
    from kafka_marshal.client import Marshal

LOCK_MS_MAX = 1_000
KEYS_PER_HOLD = 100
LOOKUP_MS_MAX = 2_000
LOOKUP_EVERY_MS = 1_000
LABEL_CHARS_MAX = 200
# Effects of accepted records, and what is counted for checkpoints; every other counter
# of the fold is the reason of a record without effect. `paused` is both, and counts as
# a reason.
EFFECTS = frozenset(
    {
        *("member", "claimed", "resumed", "renewed", "position_only", "released"),
        *("granted", "unpaused", "scheduled", "forgotten", "configured", "fenced"),
        *("reset_staged", "reset", SKIPPED),
        *("staged", "decided", "position_set", "unlocked", "resolved"),
        *("group_configured", "planned", "offered", "offer_withdrawn", "ready"),
        *("directed", "directive_ended", "growing", "grown", "growth_withdrawn"),
        *("layout_fenced", "imported", "group_imported", "layout_done"),
        "layout_final",
    }
)


class Claims(Protocol):
    """Claims of one client_id in a group, as a scrape reads them."""

    @property
    def group_id(self) -> str:
        """The group."""
        ...

    @property
    def client_id(self) -> str:
        """Name of the client."""
        ...

    @property
    def engine(self) -> ClaimEngine:
        """The engine of the client."""
        ...

    @property
    def session(self) -> ClaimSession:
        """The engine's session of the client."""
        ...


class MarshalCollector:
    """Exports the metrics of one or more clients to Prometheus.

    It registers itself, and leaves the registry after the last of its clients has
    closed. One collector serves all clients of a registry; see ``add``.

    Args:
        clients: Each ``Marshal``, or open ``AsyncMarshal``, to export.
        registry: The registry; by default ``REGISTRY`` of ``prometheus_client``.
        client_label: Whether metrics of a client have its client_id as a label.
            Required if two clients of one group share a registry.

    Raises:
        ConfigurationError: The extra ``metrics`` is missing, or the registry
            already has metrics of these names.
    """

    def __init__(
        self,
        *clients: "Marshal | AsyncMarshal",
        registry: "CollectorRegistry | None" = None,
        client_label: bool = False,
    ) -> None:
        self._registry = registry or known.prometheus().REGISTRY
        self._has_client = client_label
        self._clients: list[Marshal] = []
        self._ends: WeakKeyDictionary[ClaimEngine, Ends] = WeakKeyDictionary()
        self._is_registered = False
        self._pid = os.getpid()
        for client in clients:
            self.add(client)

    def add(self, client: "Marshal | AsyncMarshal") -> None:
        """Export one more client, until it closes.

        Raises:
            ConfigurationError: Its metrics cannot be distinguished from those of
                another client.
            InvalidTransition: The client is an ``AsyncMarshal`` that is not open.
        """
        client = cast("Marshal", getattr(client, "marshal", client))
        ends = self._ends_of(client)
        for other in self._clients:
            alike = other.client_id == client.client_id or not self._has_client
            if other.group_id == client.group_id and alike:
                raise ConfigurationError(
                    f"clients {other.client_id!r} and {client.client_id!r} of group "
                    f"{client.group_id!r} cannot be distinguished in one registry; "
                    "use client_label=True, or a registry for each",
                    setting="client_label",
                )
        if not self._is_registered:
            self._register()
        self._clients.append(client)
        ends.refresh()
        client.call_on_close(partial(self.remove, client))

    def remove(self, client: "Marshal") -> None:
        """Stop exporting a client; close the collector after the last one."""
        self._clients = [other for other in self._clients if other is not client]
        if not self._clients:
            self.close()

    def close(self) -> None:
        """Leave the registry. Idempotent."""
        self._clients = []
        if self._is_registered:
            self._is_registered = False
            with suppress(KeyError):  # the application may have unregistered it
                self._registry.unregister(self)

    def _register(self) -> None:
        try:
            self._registry.register(self)
        except ValueError as error:
            raise ConfigurationError(
                "this registry already has metrics of these names; add the client to "
                f"the existing MarshalCollector: {error}",
                setting="registry",
            ) from error
        self._is_registered = True

    def describe(self) -> Iterator["Metric"]:
        """Return every metric without values."""
        return known.described()

    def collect(self) -> Iterator["Metric"]:
        """Return every metric with its present values."""
        scrape = known.Scrape(has_client=self._has_client)
        if os.getpid() == self._pid:  # PROTOCOL 1.7: a forked child has no claims.
            self._fill(scrape)
        return scrape.families()

    def _fill(self, scrape: known.Scrape) -> None:
        engines: set[int] = set()
        add_build(scrape)
        for client in tuple(self._clients):
            if client.is_closed:
                self.remove(client)  # its close was interrupted before the callback
                continue
            try:
                read_client(client, scrape)
                if id(client.engine) not in engines:
                    engines.add(id(client.engine))
                    read_engine(client.engine, scrape, ends=self._ends_of(client))
            except TimeoutError:
                add_silent(client, scrape)

    def _ends_of(self, client: "Marshal") -> "Ends":
        found = self._ends.get(client.engine)
        if found is None:
            found = Ends(client.engine, client.coordination_topic)
            self._ends[client.engine] = found
        return found


def add_build(scrape: known.Scrape) -> None:
    """Add the version of the library."""
    scrape.add(known.BUILD, (_version(),), value=1)


def add_silent(client: Claims, scrape: known.Scrape) -> None:
    """Add a client that does not answer."""
    scrape.add(known.UP, (client.group_id,), value=0, client=client.client_id)


def _version() -> str:
    try:
        return version("kafka-marshal")
    except PackageNotFoundError:  # a source tree that is not installed
        return "unknown"


@contextmanager
def _locked(engine: ClaimEngine) -> Iterator[None]:
    """Hold the engine's lock, with a limit on the wait.

    Raises:
        TimeoutError: The lock was not acquired in time.
    """
    if not engine.changed.acquire(timeout=LOCK_MS_MAX / 1000):
        raise TimeoutError
    try:
        yield
    finally:
        engine.changed.release()


# --- one client


class _GroupFigures(NamedTuple):
    """Values of one client and its group."""

    is_up: bool
    heartbeat_ms: int
    member_count: int | None
    is_paused: bool
    pauses: list[dict[str, Any]]
    desired_count: int
    uncovered_count: int | None
    plan_generation: int | None
    counts: tuple[dict[tuple[str, str], int], ...]
    takeovers: dict[tuple[str, str], Histogram]
    handoffs: dict[str, int]
    handoff_gaps: dict[str, Histogram]


class _KeyFigures(NamedTuple):
    """Values of one key of a client; None for a value that does not apply."""

    tally: Tally
    state: str | None = None
    epoch: int | None = None
    age_ms: int | None = None
    remaining_ms: int | None = None
    lag: int | None = None
    group_lag: int | None = None
    unconfirmed: int | None = None


# If a counter first appears with the value 1, Prometheus sees no increase, and no alert
# fires. So counters that alerts use begin with 0.
_LOSSES = ("lease_expired", "taken_over", "beat_ignored", "grant_ignored", "stuck")
_COUNTED = (known.WON, known.LOST, known.RELEASED)
_IN_SECONDS = ((known.AGE, "age_ms"), (known.LEASE, "remaining_ms"))
_AS_THEY_ARE = (
    (known.EPOCH, "epoch"),
    (known.LAG, "lag"),
    (known.GROUP_LAG, "group_lag"),
    (known.UNCONFIRMED, "unconfirmed"),
)


def read_client(client: Claims, scrape: known.Scrape) -> None:
    """Add the values of one client.

    Raises:
        TimeoutError: The client's engine does not answer; no values, or only some, are
            added.
    """
    engine, session = client.engine, client.session
    with _locked(engine):
        figures = _group_figures(engine, session)
        keys = [*session.holdings, *session.meters.tallies]
    _add_group(client, figures, scrape)
    todo = list(dict.fromkeys(keys))
    for start in range(0, len(todo), KEYS_PER_HOLD):
        some = todo[start : start + KEYS_PER_HOLD]
        # Read all totals of a key under one lock: otherwise a claim that ends
        # meanwhile would be counted twice, or not at all.
        with _locked(engine):
            read = {key: _key_figures(engine, session, key) for key in some}
        for key, each in read.items():
            _add_key(client, key, scrape=scrape, figures=each)


def _group_figures(engine: ClaimEngine, session: ClaimSession) -> _GroupFigures:
    context, meters = engine.context, session.meters
    group_id = session.claimant.group_id
    member_count = context.member_count(group_id)
    uncovered_count = sum(len(each.uncovered) for each in session.subscriptions)
    return _GroupFigures(
        is_up=engine.failure is None and session.failure is None,
        heartbeat_ms=context.heartbeat_interval_ms,
        member_count=member_count,
        is_paused=context.is_paused(group_id),
        pauses=context.pauses(group_id),
        desired_count=max(map(_workers_max, session.subscriptions), default=0),
        # With a sidecar the members are unknown, and so is this count.
        uncovered_count=None if member_count is None else uncovered_count,
        plan_generation=context.plan_generation(group_id),
        counts=(
            dict(meters.won),
            {(topic, why): 0 for topic, _ in meters.won for why in _LOSSES}
            | meters.lost,
            dict(meters.released),
        ),
        takeovers={name: found.copy() for name, found in meters.takeovers.items()},
        handoffs=dict(session.handoff_counts),
        handoff_gaps={
            topic: found.copy() for topic, found in meters.handoff_gaps.items()
        },
    )


def _add_group(client: Claims, figures: _GroupFigures, scrape: known.Scrape) -> None:
    group, name = (client.group_id,), client.client_id
    gauges = {
        known.UP: figures.is_up,
        known.INTERVAL: figures.heartbeat_ms / 1000,
        known.MEMBERS: figures.member_count,
        known.PAUSED: figures.is_paused,
        known.DESIRED: figures.desired_count,
        known.UNCOVERED: figures.uncovered_count,
        known.PLAN_GENERATION: figures.plan_generation,
    }
    for family, value in gauges.items():
        if value is None:
            continue  # unknown with a sidecar
        scrape.add(family, group, value=value, client=name)
    for pause in figures.pauses:
        _add_pause(client, pause, scrape)
    for family, counts in zip(_COUNTED, figures.counts, strict=True):
        for what, count in counts.items():
            scrape.add(family, (*group, *what), value=count, client=name)
    for what, found in figures.takeovers.items():
        labels = (*group, *what)
        scrape.add_durations(known.TAKEOVER, labels, durations=found, client=name)
    for phase, count in figures.handoffs.items():
        scrape.add(known.HANDOFFS, (*group, phase), value=count, client=name)
    for topic, found in figures.handoff_gaps.items():
        place = (*group, topic)
        scrape.add_durations(known.HANDOFF_GAP, place, durations=found, client=name)


def _add_pause(client: Claims, pause: dict[str, Any], scrape: known.Scrape) -> None:
    # A group has at most 13 pauses (PROTOCOL 4.14, 4.15). Cut the texts of admins.
    name, labels = client.client_id, (pause["group_id"], pause["op_id"])
    text = (
        pause["person"] or pause["client_id"],
        pause["reason"] or "",
        " ".join(pause["topics"]) or "all",
    )
    cut = (each[:LABEL_CHARS_MAX] for each in text)
    scrape.add(known.PAUSE, (*labels, *cut), value=1, client=name)
    for family, field in (
        (known.PAUSE_BEGIN, "begin_ms"),
        (known.PAUSE_END, "until_ms"),
    ):
        if pause[field] is not None:
            scrape.add(family, labels, value=pause[field] / 1000, client=name)


def _key_figures(engine: ClaimEngine, session: ClaimSession, key: Key) -> _KeyFigures:
    tally = session.meters.tallies.get(key, Tally())
    holding = session.holdings.get(key)
    if holding is None:
        return _KeyFigures(tally)
    tally = tally.plus(holding.tally)
    state = _state_of(holding)
    seen = engine.context.glance(key)
    if seen is None or not holding.claim.is_owned:
        return _KeyFigures(tally, state=state)
    claim = holding.claim
    group_lag = lag_of(seen.position, session.end_of(key), is_owned=True)
    return _KeyFigures(
        state=state,
        epoch=claim.epoch,
        age_ms=seen.age_ms,
        remaining_ms=max(0, claim.lease.hard_until_ms - engine.context.now_ms),
        lag=session.lag_of(key),
        group_lag=group_lag,
        unconfirmed=_unconfirmed_count(holding),
        tally=tally,
    )


def _unconfirmed_count(holding: Holding) -> int | None:
    """Return how many offsets a crash would lose now, None under at least once."""
    at_most_once = isinstance(holding.progress, AtMostOnce)
    return holding.unconfirmed_count if at_most_once else None


def _workers_max(subscription: Subscription) -> int:
    """Return how many clients, at most, could hold a claim of the subscription."""
    most = subscription.claims_max
    count = len(subscription.all_keys())
    if subscription.policy is whole_topics:
        count = len(subscription.topics)
    return -(-count // most) if most else count


def _state_of(holding: Holding) -> str:
    """Return the state of a claim that is held or contended for."""
    if holding.drain is not None and holding.claim.phase is Phase.HELD:
        return "draining"
    return holding.claim.phase.value


def _add_key(
    client: Claims, key: Key, *, scrape: known.Scrape, figures: _KeyFigures
) -> None:
    name = client.client_id
    add = partial(scrape.add, client=name)
    if figures.state is not None:
        for state in known.STATES:
            add(known.STATE, (*key, state), value=figures.state == state)
    for family, field in _IN_SECONDS:
        value = getattr(figures, field)
        if value is not None:
            add(family, key, value=value / 1000)
    for family, field in _AS_THEY_ARE:
        value = getattr(figures, field)
        if value is not None:
            add(family, key, value=value)
    add(known.HANDED, key, value=figures.tally.handed)
    add(known.COMMITTED, key, value=figures.tally.committed)


# --- one engine


def read_engine(engine: ClaimEngine, scrape: known.Scrape, *, ends: "Ends") -> None:
    """Add the values of one engine.

    Raises:
        TimeoutError: The engine does not answer; nothing is added.
    """
    meters = engine.context.meters
    with _locked(engine):
        worlds = [replica.world for replica in engine.context.replicas.values()]
        counters = [dict(world.soft.counters) for world in worlds]
        next_offsets = {world.partition: world.next_offset for world in worlds}
        read_backs, rounds = meters.read_backs.copy(), meters.rounds.copy()
        failed_appends = meters.failed_appends
        upkeep = list(_upkeep(engine.context, ends.topic))
    # With a sidecar there are no counters here: the sidecar folds the log.
    for name, count in _added_up(counters).items() if counters else ():
        if name == "undecodable":
            scrape.add(known.UNDECODABLE, (), value=count)
        elif name not in EFFECTS:
            scrape.add(known.IGNORED, (name,), value=count)
    for place, found in ends.refresh().items():
        behind = found.end - next_offsets.get(place.partition, 0)
        scrape.add(known.REPLAY_LAG, place, value=max(0, behind))
    for family, labels, value in upkeep:
        scrape.add(family, labels, value=value)
    for event, count in (dict.fromkeys(SERIOUS, 0) | meters.events()).items():
        scrape.add(known.EVENTS, (event,), value=count)
    scrape.add(known.APPEND_FAILURES, (), value=failed_appends)
    scrape.add_durations(known.READ_BACK, (), durations=read_backs)
    scrape.add_durations(known.STEP, (), durations=rounds)


def _upkeep(
    context: ClaimContext, topic: str
) -> Iterator[tuple[known.Family, tuple[str, ...], float]]:
    """Yield values of checkpoints and of the topic's settings, for each partition."""
    if not context.replicas:
        return  # with a sidecar, which has metrics of its own
    wall_ms = context.ports.clock.wall_ms()
    for t, replica in context.replicas.items():
        place, last_ms = (topic, str(t)), replica.checkpoints.last_ms
        if last_ms is not None:
            yield known.CHECKPOINT_AGE, place, max(0, wall_ms - last_ms) / 1000
        if replica.compared is not None:
            yield known.DIVERGED, place, float(not replica.compared.is_equal)
    yield known.WRONG_SETTINGS, (topic,), len(context.wrong_settings)


def _added_up(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    # Export `undecodable` from the start: an alert needs the step from zero.
    total = {"undecodable": 0}
    for each in counters:
        for name, count in each.items():
            total[name] = total.get(name, 0) + count
    return total


class Ends:
    """Ends of the coordinating partitions, looked up in the background.

    Each scrape starts a lookup and exports the last result: a scrape does not wait for
    brokers, which may be the part that fails.

    Args:
        engine: The engine that reads the partitions.
        topic: The coordination topic.
    """

    def __init__(self, engine: ClaimEngine, topic: str) -> None:
        # Hold only the context, so that the WeakKeyDictionary can drop the engine.
        self._context = engine.context
        self.topic = topic
        self._lock = threading.Lock()  # scrapes may run concurrently
        self._call: Pending[Mapping[TopicPartition, LogRange]] | None = None
        self._known: Mapping[TopicPartition, LogRange] = {}
        self._due_ms = 0

    def refresh(self) -> Mapping[TopicPartition, LogRange]:
        """Return the last result; start a lookup if one is due."""
        context = self._context
        with self._lock:
            self._collect()
            now_ms = context.now_ms
            # With a sidecar there are no replicas: it has metrics of its own.
            is_due = context.replicas and now_ms >= self._due_ms
            if self._call is None and is_due:
                self._due_ms = now_ms + LOOKUP_EVERY_MS
                places = [TopicPartition(self.topic, t) for t in context.replicas]
                ask = partial(context.ports.data.ranges, places, LOOKUP_MS_MAX)
                self._call = context.ports.background.submit(ask)
                self._collect()
            return self._known

    def _collect(self) -> None:
        if self._call is not None and self._call.done():
            if self._call.exception(0) is None:
                self._known = self._call.result(0)
            self._call = None
