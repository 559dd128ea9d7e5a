"""The metrics: names, and conversion of values to Prometheus families.

Names, units and labels are public: dashboards and alerts depend on them.
``docs/METRICS.md`` lists them all.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from importlib import import_module
from itertools import accumulate
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import attrs

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.observability.logs import escaped

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

CLIENT = "client"
STATES = ("waiting", "claiming", "starting", "held", "draining")
SERVER_STOP_S = 5


class Kind(Enum):
    """Type of a family in Prometheus."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@attrs.frozen
class Family:
    """One metric.

    Attributes:
        name: Name in a scrape.
        kind: Gauge, counter or histogram.
        labels: Names of its labels, without the client.
        help: Its meaning, in one sentence.
        is_of_client: Whether each value is of one client, whose name can be a label.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    is_of_client: bool = True


of_process = partial(Family, is_of_client=False)
"""Returns a metric whose values are of the whole process."""

_GROUP = ("group",)
_TOPIC = ("group", "topic")
_KEY = ("group", "topic", "partition")

BUILD = of_process(
    "marshal_build_info",
    Kind.GAUGE,
    ("version",),
    "Version of the library; always 1.",
)
UP = Family(
    "marshal_up",
    Kind.GAUGE,
    _GROUP,
    "1 while the client works; 0 after it failed, or if it does not answer.",
)
INTERVAL = Family(
    "marshal_heartbeat_interval_seconds",
    Kind.GAUGE,
    _GROUP,
    "Heartbeat interval in the log.",
)
MEMBERS = Family(
    "marshal_members",
    Kind.GAUGE,
    _GROUP,
    "Clients that announced themselves within two heartbeat intervals.",
)
PAUSED = Family(
    "marshal_group_paused",
    Kind.GAUGE,
    _GROUP,
    "1 while the whole group is paused, else 0.",
)
PAUSE = Family(
    "marshal_pause_info",
    Kind.GAUGE,
    ("group", "operation", "by", "reason", "topics"),
    "A pause in force or scheduled: its author, reason, topics (or `all`); always 1.",
)
PAUSE_BEGIN = Family(
    "marshal_pause_begin_timestamp_seconds",
    Kind.GAUGE,
    ("group", "operation"),
    "Begin of the pause in marshal_pause_info; absent if its first record was not "
    "read.",
)
PAUSE_END = Family(
    "marshal_pause_end_timestamp_seconds",
    Kind.GAUGE,
    ("group", "operation"),
    "End of the pause in marshal_pause_info, unless it is renewed or ended before.",
)
DESIRED = Family(
    "marshal_desired_clients",
    Kind.GAUGE,
    _GROUP,
    "Most clients that could be given work; more would idle.",
)
UNCOVERED = Family(
    "marshal_uncovered_partitions",
    Kind.GAUGE,
    _GROUP,
    "Wanted partitions that no live client can claim.",
)
PLAN_GENERATION = Family(
    "marshal_plan_generation",
    Kind.GAUGE,
    _GROUP,
    "Number of the newest Plan of the group, as far as the log is read.",
)
STATE = Family(
    "marshal_claim_state",
    Kind.GAUGE,
    (*_KEY, "state"),
    "1 in the state that a claim is in, 0 in the others.",
)
EPOCH = Family(
    "marshal_claim_epoch",
    Kind.GAUGE,
    _KEY,
    "Epoch of a held claim: the last part of its fencing token.",
)
AGE = Family(
    "marshal_heartbeat_age_seconds",
    Kind.GAUGE,
    _KEY,
    "Time since the last renewal of a held claim in the log.",
)
LEASE = Family(
    "marshal_lease_remaining_seconds",
    Kind.GAUGE,
    _KEY,
    "Time until work under a held claim must stop.",
)
LAG = Family(
    "marshal_consumer_lag_records",
    Kind.GAUGE,
    _KEY,
    "Offsets from the position of a held partition to its end.",
)
GROUP_LAG = of_process(
    "kafka_consumergroup_lag",
    Kind.GAUGE,
    ("consumergroup", "topic", "partition"),
    "Offsets from the position in the log to the partition's end, under the name that "
    "lag tools use.",
)
UNCONFIRMED = Family(
    "marshal_amo_unconfirmed_records",
    Kind.GAUGE,
    _KEY,
    "At most once: offsets granted and not processed; a crash loses them.",
)
HANDED = Family(
    "marshal_records_handed_out_total",
    Kind.COUNTER,
    _KEY,
    "Records handed to the application.",
)
COMMITTED = Family(
    "marshal_records_committed_total",
    Kind.COUNTER,
    _KEY,
    "Records committed; at most once, the grant was the commit.",
)
WON = Family(
    "marshal_claims_won_total",
    Kind.COUNTER,
    (*_TOPIC, "reason"),
    "Claims won: claimed, or resumed after a restart.",
)
LOST = Family(
    "marshal_claims_lost_total",
    Kind.COUNTER,
    (*_TOPIC, "reason"),
    "Claims that were taken over or expired.",
)
RELEASED = Family(
    "marshal_claims_released_total",
    Kind.COUNTER,
    (*_TOPIC, "reason"),
    "Claims released by this client.",
)
TAKEOVER = Family(
    "marshal_takeover_duration_seconds",
    Kind.HISTOGRAM,
    (*_TOPIC, "after"),
    "Log time from the earlier owner's last renewal or release to this claim.",
)
HANDOFFS = Family(
    "marshal_handoffs",
    Kind.GAUGE,
    ("group", "phase"),
    "Partitions by handoff phase: offered, ready (not released yet), warming (offered "
    "to this client).",
)
HANDOFF_GAP = Family(
    "marshal_handoff_gap_seconds",
    Kind.HISTOGRAM,
    _TOPIC,
    "Log time from the release to the claim of a successor that had warmed up.",
)
IGNORED = of_process(
    "marshal_records_ignored_total",
    Kind.COUNTER,
    ("reason",),
    "Records of the coordination log that the fold did not accept.",
)
UNDECODABLE = of_process(
    "marshal_records_undecodable_total",
    Kind.COUNTER,
    (),
    "Values of the coordination log that cannot be decoded as records.",
)
REPLAY_LAG = of_process(
    "marshal_replay_lag_records",
    Kind.GAUGE,
    ("topic", "partition"),
    "Entries of a coordinating partition that are not folded yet.",
)
CHECKPOINT_AGE = of_process(
    "marshal_checkpoint_age_seconds",
    Kind.GAUGE,
    ("topic", "partition"),
    "Time since the newest checkpoint of a coordinating partition.",
)
DIVERGED = of_process(
    "marshal_replica_diverged",
    Kind.GAUGE,
    ("topic", "partition"),
    "1 if the last checkpoint has another digest than this process, else 0.",
)
WRONG_SETTINGS = of_process(
    "marshal_topic_wrong_settings",
    Kind.GAUGE,
    ("topic",),
    "Settings of the coordination topic that endanger claims.",
)
READ_BACK = of_process(
    "marshal_read_back_duration_seconds",
    Kind.HISTOGRAM,
    (),
    "Time from sending a record to reading it back with the fold's verdict.",
)
APPEND_FAILURES = of_process(
    "marshal_append_failures_total",
    Kind.COUNTER,
    (),
    "Failed appends to the coordination log.",
)
STEP = of_process(
    "marshal_engine_step_duration_seconds",
    Kind.HISTOGRAM,
    (),
    "Duration of a step of the engine, without the wait for the log.",
)
EVENTS = of_process(
    "marshal_events_total",
    Kind.COUNTER,
    ("event",),
    "Events sent to the observers; series of warnings and errors begin at 0.",
)

FAMILIES = (
    *(BUILD, UP, INTERVAL, MEMBERS, PAUSED, PAUSE, PAUSE_BEGIN, PAUSE_END),
    *(DESIRED, UNCOVERED, PLAN_GENERATION),
    *(STATE, EPOCH, AGE, LEASE),
    *(LAG, GROUP_LAG, UNCONFIRMED, HANDED, COMMITTED, WON, LOST, RELEASED),
    *(HANDOFFS, HANDOFF_GAP),
    *(TAKEOVER, IGNORED, UNDECODABLE, REPLAY_LAG, CHECKPOINT_AGE, DIVERGED),
    *(WRONG_SETTINGS, READ_BACK, APPEND_FAILURES),
    *(STEP, EVENTS),
)


class Durations(Protocol):
    """A histogram of the engine.

    Attributes:
        bounds_ms: Inclusive upper bound of each bucket; one more bucket has none.
        counts: Durations in each bucket.
        sum_ms: Sum of all durations.
    """

    bounds_ms: tuple[int, ...]
    counts: list[int]
    sum_ms: int


Labels = tuple[str, ...]


class Scrape:
    """The values of one scrape; values with the same name and labels are added up.

    Args:
        has_client: Whether values of one client have its name as a label.
        families: Every metric that may be added, in the order of the output.
    """

    def __init__(
        self, *, has_client: bool = False, families: Sequence[Family] = FAMILIES
    ) -> None:
        self._has_client = has_client
        self._families = families
        self._values: dict[Family, dict[Labels, float]] = {}
        self._durations: dict[Family, dict[Labels, list[Durations]]] = {}

    def add(
        self,
        family: Family,
        labels: Iterable[object],
        *,
        value: float,
        client: str = "",
    ) -> None:
        """Add one value."""
        names = self._labels_of(family, labels, client)
        values = self._values.setdefault(family, {})
        values[names] = values.get(names, 0) + value

    def add_durations(
        self,
        family: Family,
        labels: Iterable[object],
        *,
        durations: Durations,
        client: str = "",
    ) -> None:
        """Add one histogram."""
        names = self._labels_of(family, labels, client)
        found = self._durations.setdefault(family, {}).setdefault(names, [])
        found.append(durations)

    def _labels_of(
        self, family: Family, labels: Iterable[object], client: str
    ) -> Labels:
        names = tuple(escaped(str(label)) for label in labels)
        return (*names, client) if self._has_client and family.is_of_client else names

    def families(self) -> Iterator["Metric"]:
        """Return the added values, for the client library of Prometheus."""
        for family in self._families:
            metric = _metric(family)
            for labels, value in self._values.get(family, {}).items():
                metric.add_sample(family.name, self._named(family, labels), value)
            for labels, found in self._durations.get(family, {}).items():
                _add_buckets(metric, self._named(family, labels), found)
            if metric.samples:
                yield metric

    def _named(self, family: Family, labels: Labels) -> dict[str, str]:
        is_named = self._has_client and family.is_of_client
        names = (*family.labels, CLIENT) if is_named else family.labels
        return dict(zip(names, labels, strict=True))


def _add_buckets(
    metric: "Metric", labels: dict[str, str], found: Sequence[Durations]
) -> None:
    """Add one or more histograms together: cumulative buckets, in seconds."""
    counts = [sum(each) for each in zip(*(d.counts for d in found), strict=True)]
    bounds = [str(bound_ms / 1000) for bound_ms in found[0].bounds_ms]
    for bound, count in zip([*bounds, "+Inf"], accumulate(counts), strict=True):
        metric.add_sample(f"{metric.name}_bucket", labels | {"le": bound}, count)
    metric.add_sample(f"{metric.name}_count", labels, sum(counts))
    sum_s = sum(durations.sum_ms for durations in found) / 1000
    metric.add_sample(f"{metric.name}_sum", labels, sum_s)


def described(families: Sequence[Family] = FAMILIES) -> Iterator["Metric"]:
    """Return every family without values, so that a registry knows the names."""
    return map(_metric, families)


def _metric(family: Family) -> "Metric":
    # The client library of Prometheus adds the suffix of a counter itself.
    name = family.name
    if family.kind is Kind.COUNTER:
        name = name.removesuffix("_total")
    metric: Metric = prometheus("metrics_core").Metric(
        name, family.help, family.kind.value
    )
    return metric


def prometheus(module: str = "") -> ModuleType:
    """Import the client library of Prometheus, or one of its modules.

    Raises:
        ConfigurationError: The extra is not installed.
    """
    name = f"prometheus_client.{module}" if module else "prometheus_client"
    try:
        return import_module(name)
    except ImportError as missing:
        raise ConfigurationError(
            "metrics need prometheus-client; run: pip install 'kafka-marshal[metrics]'",
            setting="metrics",
        ) from missing


class Server:
    """Serves a registry over HTTP, on a thread of its own, until closed.

    Args:
        registry: Served at ``/metrics``.
        port: TCP port; 0 for a free one.
        host: Address to listen at; by default only for this machine.

    Attributes:
        port: The port that it listens at.

    Raises:
        ConfigurationError: The extra is missing, or the port cannot be used.
    """

    def __init__(
        self, registry: "CollectorRegistry", port: int, *, host: str = "127.0.0.1"
    ) -> None:
        start = prometheus().start_http_server
        try:
            self._server, self._thread = start(port, addr=host, registry=registry)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"metrics cannot be served at {host}:{port}: {error}; choose another "
                "port or address",
                setting="metrics_port",
            ) from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=SERVER_STOP_S)
