"""Metrics of a sidecar for Prometheus: of the sidecar, and of every claim it holds.

The library's metrics are reported for each session of the sidecar, one per group, so
that dashboards and alerts for a consumer fit a sidecar. Totals are counted as they
happen (``Counts``); everything else is read at each scrape.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import attrs

from kafka_marshal import metrics as library
from kafka_marshal.engine import Engine, Session
from kafka_marshal.observability import metrics as known
from kafka_marshal.observability.metrics import Kind, of_process
from kafka_marshal.remote.answers import LocalClient
from kafka_marshal.sidecar.health import State, View, readyz

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from kafka_marshal.sidecar.server import Daemon

# Clients choose the names of groups. A client that uses a new name each minute must not
# fill the storage of these metrics.
GROUPS_MAX = 200
ROUTES_MAX = 1_000
OTHER = "other"
# Every version of Prometheus reads this format.
MEDIA = "text/plain; version=0.0.4; charset=utf-8"

STATE = of_process(
    "marshal_sidecar_state",
    Kind.GAUGE,
    ("state",),
    "1 for the current state of the sidecar, 0 for the others.",
)
READY = of_process(
    "marshal_sidecar_ready",
    Kind.GAUGE,
    (),
    "1 while clients should use the sidecar, as /readyz reports, else 0.",
)
CLIENTS = of_process(
    "marshal_sidecar_clients",
    Kind.GAUGE,
    ("group", "state"),
    "Registered clients by state.",
)
ASSIGNED = of_process(
    "marshal_sidecar_assigned_partitions",
    Kind.GAUGE,
    ("group",),
    "Partitions that are assigned to clients.",
)
LEASED = of_process(
    "marshal_sidecar_leased_clients",
    Kind.GAUGE,
    ("group",),
    "Clients whose latest lease deadline has not passed.",
)
LEASE_REMAINING = of_process(
    "marshal_sidecar_client_lease_remaining_seconds",
    Kind.GAUGE,
    ("group",),
    "Time until the latest lease deadline of any client of the group.",
)
BEAT_AGE = of_process(
    "marshal_sidecar_client_beat_age_seconds",
    Kind.GAUGE,
    ("group",),
    "Longest time since the last heartbeat of any client of the group.",
)
WATCHED = of_process(
    "marshal_sidecar_watched_processes",
    Kind.GAUGE,
    (),
    "Processes whose death will be detected at once.",
)
DEATHS = of_process(
    "marshal_sidecar_client_deaths_total",
    Kind.COUNTER,
    (),
    "Clients of which all processes died.",
)
STREAMS = of_process(
    "marshal_sidecar_event_streams",
    Kind.GAUGE,
    (),
    "Open event streams.",
)
EVENTS = of_process(
    "marshal_sidecar_events_sent_total",
    Kind.COUNTER,
    (),
    "Events sent to clients.",
)
OVERRUNS = of_process(
    "marshal_sidecar_feed_overruns_total",
    Kind.COUNTER,
    (),
    "Snapshots sent to clients that read their events too slowly.",
)
REQUESTS = of_process(
    "marshal_sidecar_requests_total",
    Kind.COUNTER,
    ("route", "status"),
    "Requests by operation and status.",
)
REFUSALS = of_process(
    "marshal_sidecar_refused_reports_total",
    Kind.COUNTER,
    ("request", "reason"),
    "Reports `ready` that were refused, and `released` that had no effect.",
)

OWN_FAMILIES = (
    *(STATE, READY, CLIENTS, ASSIGNED, LEASED, LEASE_REMAINING, BEAT_AGE, WATCHED),
    *(DEATHS, STREAMS, EVENTS, OVERRUNS, REQUESTS, REFUSALS),
)
FAMILIES = (*known.FAMILIES, *OWN_FAMILIES)


class Counts:
    """Counters of a sidecar. Thread-safe; never blocks for long.

    Attributes:
        overrun_count: Snapshots sent because a client fell behind.
        stream_count: Event streams that are open now.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, int], int] = {}
        self.death_count = 0
        self.event_count = 0
        self.overrun_count = 0
        self.stream_count = 0

    def death(self) -> None:
        """Count a client whose processes died."""
        with self._lock:
            self.death_count += 1

    def events(self, count: int, *, overruns: int = 0) -> None:
        """Count events that were sent, and snapshots of clients that fell behind."""
        with self._lock:
            self.event_count += count
            self.overrun_count += overruns

    def stream(self, change: int) -> None:
        """Count a stream that was opened (1) or has ended (-1)."""
        with self._lock:
            self.stream_count += change

    def request(self, route: str, status: int) -> None:
        """Count a request.

        Args:
            route: Name of the operation, never text of a client.
            status: Status of the response.
        """
        with self._lock:
            place = (route, status)
            if place not in self._requests and len(self._requests) >= ROUTES_MAX:
                place = (OTHER, status)
            self._requests[place] = self._requests.get(place, 0) + 1

    def requests(self) -> dict[tuple[str, int], int]:
        """Return the number of requests by operation and status."""
        with self._lock:
            return dict(self._requests)


@attrs.frozen
class _Claims:
    """The claims of one group, in the form that the library's metrics read."""

    engine: Engine
    session: Session

    @property
    def group_id(self) -> str:
        return self.session.claimant.group_id

    @property
    def client_id(self) -> str:
        return self.session.claimant.owner.client_id


class SidecarCollector:
    """Collects the metrics of one sidecar, for a registry of ``prometheus_client``.

    Args:
        source: The daemon.
        counts: Its counters.
        coordination_topic: Name of the coordination topic.
    """

    def __init__(
        self, source: "Daemon", counts: Counts, *, coordination_topic: str
    ) -> None:
        self._source = source
        self._counts = counts
        self._topic = coordination_topic
        self._ends: library.Ends | None = None

    def describe(self) -> Iterator["Metric"]:
        """Return every metric without values."""
        return known.described(FAMILIES)

    def collect(self) -> Iterator["Metric"]:
        """Return every metric with its current values."""
        scrape = known.Scrape(families=FAMILIES)
        library.add_build(scrape)
        engine = self._source.states.engine
        if engine is not None:
            self._add_engine(engine, scrape)
        view = self._source.states.view()
        _add_state(view, scrape)
        _add_counts(self._counts, scrape)
        if not view.is_busy:  # otherwise these would wait for the engine's lock
            _add_clients(self._source.clients(), scrape, now_ms=view.now_ms)
            for labels, count in self._source.refusals().items():
                scrape.add(REFUSALS, labels, value=count)
        scrape.add(WATCHED, (), value=self._source.watch.process_count)
        return scrape.families()

    def _add_engine(self, engine: Engine, scrape: known.Scrape) -> None:
        if self._ends is None:
            self._ends = library.Ends(engine, self._topic)
        # No group holds a claim before the log is read.
        sessions = engine.sessions if engine.context.config is not None else ()
        for session in sessions:
            each = _Claims(engine, session)
            try:
                library.read_client(each, scrape)
            except TimeoutError:
                library.add_silent(each, scrape)
        try:
            library.read_engine(engine, scrape, ends=self._ends)
        except TimeoutError:
            return  # `marshal_up` and `marshal_sidecar_ready` show it


def exposition(collector: SidecarCollector) -> Callable[[], tuple[bytes, str]]:
    """Return a function that makes the text and media type of ``/metrics``.

    Args:
        collector: The sidecar's metrics; those of its process are added.

    Raises:
        ConfigurationError: The extra is not installed.
    """
    prometheus = known.prometheus()
    registry = prometheus.CollectorRegistry()
    registry.register(collector)
    prometheus.ProcessCollector(registry=registry)
    return lambda: (prometheus.generate_latest(registry), MEDIA)


def _add_state(view: View, scrape: known.Scrape) -> None:
    for state in State:
        scrape.add(STATE, (state.value,), value=view.state is state)
    scrape.add(READY, (), value=readyz(view).ok)


def _add_clients(
    clients: Iterable[LocalClient], scrape: known.Scrape, *, now_ms: int
) -> None:
    groups: dict[str, list[LocalClient]] = {}
    for client in clients:
        is_known = client.group in groups or len(groups) < GROUPS_MAX
        groups.setdefault(client.group if is_known else OTHER, []).append(client)
    for group, found in groups.items():
        for client in found:
            scrape.add(CLIENTS, (group, client.state), value=1)
            scrape.add(ASSIGNED, (group,), value=len(client.assigned))
        deadlines = [client.lease_until_ms or 0 for client in found]
        pending = [until_ms for until_ms in deadlines if until_ms > now_ms]
        scrape.add(LEASED, (group,), value=len(pending))
        left_ms = max(pending, default=now_ms) - now_ms
        scrape.add(LEASE_REMAINING, (group,), value=left_ms / 1000)
        ages = [c.beat_age_ms for c in found if c.beat_age_ms is not None]
        if ages:
            scrape.add(BEAT_AGE, (group,), value=max(ages) / 1000)


def _add_counts(counts: Counts, scrape: known.Scrape) -> None:
    for family, value in (
        (DEATHS, counts.death_count),
        (EVENTS, counts.event_count),
        (OVERRUNS, counts.overrun_count),
        (STREAMS, counts.stream_count),
    ):
        scrape.add(family, (), value=value)
    for (route, status), count in counts.requests().items():
        scrape.add(REQUESTS, (route, status), value=count)
