"""The settings of a consumer: the only place with their defaults, bounds and messages.

``Marshal.consumer`` makes a ``ConsumerConfig`` from its arguments, Spark from options,
the command from flags, and a sidecar from ``remote.api.SubscriptionSpec``. Callbacks
are separate, because a configuration can be sent to another process.
"""

import re
from collections.abc import Callable, Mapping
from enum import Enum, StrEnum
from inspect import iscoroutinefunction

import attrs

from kafka_marshal.arguments import require_flag, to_count, to_ms, to_text
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.ports import ISOLATION_LEVELS, READ_UNCOMMITTED
from kafka_marshal.protocol.claiming import Ending
from kafka_marshal.protocol.codec import is_topic
from kafka_marshal.protocol.granting import DEPTH_MAX_DEFAULT
from kafka_marshal.protocol.labels import OWN_LABELS_MAX, problem_of
from kafka_marshal.protocol.planner import Policy
from kafka_marshal.protocol.types import PARTITION_MAX, Token, TopicPartition

TOPICS_MAX = 1_000
MAX_POLL_RECORDS = 500
WARM_BYTES = 4 * 1024 * 1024
INTERNAL_PREFIX = "__"
# The smallest value of each number.
LEAST = {
    "claims_max": 0,
    "consumer_timeout_ms": 0,
    "max_handling_ms": 0,
    "max_poll_records": 1,
    "max_granted_batches": 1,
    "max_uncommitted": 1,
    "max_fetched": 1,
    "warm_bytes": 0,
    "metadata_refresh_ms": 1,
    "standbys": 0,
}
OPTIONAL = frozenset({"consumer_timeout_ms", "max_handling_ms"})
# Larger values of these have the same effect, and fit into no record.
COUNTS_OF_PARTITIONS = frozenset({"claims_max", "standbys"})
# Bounds the size of a compiled pattern, and so the time to match one name: the largest
# pattern that compiles takes about 10 ms for a name of 249 characters.
PATTERN_BYTES_MAX = 256 * 1024
_INLINE_FLAGS = {re.IGNORECASE: "i", re.MULTILINE: "m", re.DOTALL: "s"}

Matches = Callable[[str], bool]
OnClaimed = Callable[[TopicPartition, Token], None]
OnWarm = Callable[[TopicPartition, int | None, str], None]
"""Partition, position (None if unknown) and the client_id of the owner."""
OnStandby = Callable[[TopicPartition, int | None, str | None], None]
"""Like ``OnWarm``; client_id None: the consumer no longer stands by for it."""
OnLost = Callable[[TopicPartition, Ending], None]
OnTopics = Callable[[frozenset[str]], None]


class Delivery(Enum):
    """The delivery guarantee of a consumer (PROTOCOL 6)."""

    AT_LEAST_ONCE = "alo"
    AT_MOST_ONCE = "amo"


class OffsetReset(StrEnum):
    """Where to start a partition without a position."""

    EARLIEST = "earliest"
    LATEST = "latest"
    NONE = "none"


CHOICES: Mapping[str, tuple[str, ...]] = {
    "auto_offset_reset": tuple(OffsetReset),
    "isolation_level": ISOLATION_LEVELS,
}


def to_delivery(given: Delivery | str) -> Delivery:
    """Return the guarantee for a ``Delivery``, ``"alo"`` or ``"amo"``.

    Raises:
        ConfigurationError: The value is something else.
    """
    try:
        return Delivery(given)
    except ValueError:
        raise ConfigurationError(
            f"delivery {given!r} is neither 'alo' (at least once) nor 'amo' (at most "
            "once)",
            setting="delivery",
        ) from None


def pattern_text(pattern: str | re.Pattern[str] | None) -> str | None:
    """Return a pattern as text; flags of a compiled one become inline flags.

    Raises:
        ConfigurationError: The pattern is not made for text, or a flag has no inline
            form.
    """
    if pattern is None or isinstance(pattern, str):
        return pattern and to_text(pattern)
    text = getattr(pattern, "pattern", None)
    if not isinstance(text, str):
        raise ConfigurationError(
            f"pattern {pattern!r} is not a regular expression for text; give a str",
            setting="pattern",
        )
    # Topic names are ASCII, so these two flags have no effect.
    flags = re.RegexFlag(pattern.flags) & ~(re.UNICODE | re.ASCII)
    inline = "".join(letter for flag, letter in _INLINE_FLAGS.items() if flags & flag)
    if flags & ~(re.IGNORECASE | re.MULTILINE | re.DOTALL):
        raise ConfigurationError(
            f"pattern {text!r} is compiled with {flags!r}; of the flags "
            "only IGNORECASE, MULTILINE and DOTALL can be used",
            setting="pattern",
        )
    return f"(?{inline}){text}" if inline else text


def topic_pattern(text: str) -> Matches:
    """Return a function that tests whether a pattern matches a whole topic name.

    The syntax is RE2's, as in Kafka's own consumer protocol. For every pattern,
    matching takes time linear in the length of the name, and releases the GIL. So a
    client's pattern can stop neither a sidecar nor the heartbeats of a process.

    Raises:
        ConfigurationError: RE2 does not support the pattern, or it is too large.
    """
    import re2

    options = re2.Options()
    options.max_mem = PATTERN_BYTES_MAX
    options.never_capture = True
    options.log_errors = False
    try:
        compiled = re2.compile(text, options)
    except re2.error as error:
        why = error.args[0] if error.args else error
        words = why.decode("utf-8", "replace") if isinstance(why, bytes) else str(why)
        raise ConfigurationError(
            f"pattern {text[:200]!r} cannot be used: {words}. Patterns have the "
            "syntax of RE2 (https://github.com/google/re2/wiki/Syntax), without "
            "back-references and look-around; write it without, or name the topics",
            setting="pattern",
        ) from error
    return lambda name: compiled.fullmatch(name) is not None


def require_callback(setting: str, callback: object) -> None:
    """Raise unless a callback is a plain function.

    Raises:
        ConfigurationError: It cannot be called, or is a coroutine function, whose
            coroutine nobody would await.
    """
    if not callable(callback):
        raise ConfigurationError(
            f"{setting} must be a function, not {callback!r}", setting=setting
        )
    if iscoroutinefunction(callback):
        raise ConfigurationError(
            f"{setting} must be a plain function, not a coroutine function; with "
            "asyncio it is called on the event loop, and may create a task",
            setting=setting,
        )


@attrs.frozen(kw_only=True)
class ConsumerConfig:
    """The settings of a consumer, checked. Can be pickled if the policy is a name.

    Attributes:
        topics: Names of data topics; empty if there is a pattern.
        pattern: Instead of names, a regular expression in RE2's syntax, which must
            match whole topic names.
        delivery: The guarantee; also given as ``"alo"`` or ``"amo"``.
        policy: Decides which partitions to hold: the name of a policy, or a function.
        claims_max: Most partitions to hold, or topics under a policy that assigns
            whole topics; 0 = no limit.
        auto_offset_reset: Where to start partitions without a position.
        starts: Start offsets by partition; they override ``auto_offset_reset``.
        isolation_level: ``read_uncommitted``, or ``read_committed`` to return records
            of transactions only after their commit.
        max_poll_records: Most records of one poll; under at most once also the size of
            a batch.
        max_granted_batches: Under at most once, most batches of a partition that are
            requested, granted or being processed, in total; a crash loses them
            (PROTOCOL 6.3). The consumer uses only as many as hide the round trip; 1 =
            only the batch being processed.
        max_uncommitted: Most uncommitted records per partition; at this limit no
            more are handed out or fetched until some are committed.
        max_fetched: Most records fetched and not yet handed out, of all partitions
            together. Under at most once, it is raised to ``max_granted_batches``
            batches, but not above 16,000 records or 4 batches, whichever is more. The
            consumer uses only as many as hide the time of a fetch.
        warm_bytes: Most bytes to fetch of a partition from the start of ``on_warm``
            until the claim; 0 = none.
        max_handling_ms: Longest time between two polls while records wait, before
            another member gets these; 0 = no limit, None = the heartbeat interval.
        release_behind: Whether to release a partition whose lag grows, if another
            member keeps up.
        consumer_timeout_ms: Iteration ends after this long without a record; None
            waits for ever.
        metadata_refresh_ms: Time between two refreshes of metadata.
        standbys: Number of standbys of each partition, on as many hosts. This member
            stands by for a partition of another one if it is among the first standbys
            of it, up to this number (PROTOCOL 9.9); 0 = for none.

    Raises:
        ConfigurationError: A setting is invalid; ``setting`` has its name.
    """

    topics: tuple[str, ...] = ()
    pattern: str | None = attrs.field(default=None, converter=pattern_text)
    delivery: Delivery = attrs.field(
        default=Delivery.AT_LEAST_ONCE, converter=to_delivery
    )
    policy: str | Policy = "fair"
    claims_max: int = 0
    auto_offset_reset: str = "earliest"
    starts: Mapping[TopicPartition, int] = attrs.field(factory=dict)
    isolation_level: str = READ_UNCOMMITTED
    max_poll_records: int = MAX_POLL_RECORDS
    max_granted_batches: int = DEPTH_MAX_DEFAULT
    max_uncommitted: int = 10_000
    max_fetched: int = 5_000
    warm_bytes: int = WARM_BYTES
    max_handling_ms: int | None = None
    release_behind: bool = True
    consumer_timeout_ms: int | None = None
    metadata_refresh_ms: int = 30_000
    standbys: int = 0

    def __attrs_post_init__(self) -> None:
        self._check_topics()
        # Numbers and texts of NumPy can be compared, but not encoded.
        given: dict[str, object] = {"topics": tuple(map(to_text, self.topics))}
        if isinstance(self.policy, str):
            given["policy"] = to_text(self.policy)
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None or name not in OPTIONAL:
                read = to_ms if name.endswith("_ms") else to_count
                number = read(name, value, least=least)
                if name in COUNTS_OF_PARTITIONS:
                    number = min(number, PARTITION_MAX)
                given[name] = number
        for name, value in given.items():
            object.__setattr__(self, name, value)
        require_flag("release_behind", self.release_behind)
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigurationError(
                    f"{name} {value!r} must be one of {', '.join(choices)}",
                    setting=name,
                )
            object.__setattr__(self, name, to_text(value))

    def _check_topics(self) -> None:
        if bool(self.topics) == (self.pattern is not None):
            raise ConfigurationError(
                "name at least one topic, or give a pattern, not both",
                setting="topics",
            )
        for topic in self.topics:
            if not isinstance(topic, str):
                raise ConfigurationError(
                    f"{topic!r} is not the name of a topic; give names one by one, "
                    "like consumer('orders', 'invoices')",
                    setting="topics",
                )
            if not is_topic(topic):
                raise ConfigurationError(
                    f"{topic!r} is no valid topic name: 1 to 249 of A-Z a-z 0-9 . _ -; "
                    "a regular expression is given as pattern",
                    setting="topics",
                )
        if len(self.topics) > TOPICS_MAX:
            raise ConfigurationError(
                f"{len(self.topics)} topics are named, and at most {TOPICS_MAX} are "
                "allowed; use more consumers, each of its own client",
                setting="topics",
            )
        if self.pattern is not None:
            topic_pattern(self.pattern)

    @property
    def is_at_most_once(self) -> bool:
        """Whether records are granted before they are processed."""
        return self.delivery is Delivery.AT_MOST_ONCE

    def matches(self, coordination_topic: str) -> Matches | None:
        """Return the test for names of topics to consume, None without a pattern.

        The whole name must match. The coordination topic and internal topics never do.
        """
        if self.pattern is None:
            return None
        is_match = topic_pattern(self.pattern)

        def matches(name: str) -> bool:
            is_reserved = name == coordination_topic or name.startswith(INTERNAL_PREFIX)
            return not is_reserved and is_match(name)

        return matches


@attrs.frozen(kw_only=True)
class Callbacks:
    """The callbacks of one consumer, called on the application's thread if not noted.

    If the application has several threads, callbacks run on the thread that polls, or,
    while no thread polls, on one that asks for the assignment or for positions. With
    asyncio they always run on the event loop.

    Attributes:
        on_claimed: Called for each new partition.
        on_lost: Called for each partition that is lost or released while the consumer
            is open; closing does not call it. Without it, a partition that is lost
            with uncommitted records raises ``ClaimLost`` from the next call.
        on_warm: Called before another member releases a partition to this one, with the
            partition, its position at that time and the other member's client_id. Runs
            on a separate thread, one partition at a time, while the other member
            continues. If it raises, that is reported, and the other member keeps the
            partition.
        on_standby: Called for each partition of another member that this one stands by
            for, with the position at that time and the other member's client_id. Called
            with None for both when it stops standing by without getting the partition.
            Runs on a separate thread, one call at a time. Exceptions are reported.
        on_topics: Called with all topics whose partition 0 is held, whenever that set
            changes, also to the empty set.
    """

    on_claimed: OnClaimed | None = None
    on_lost: OnLost | None = None
    on_topics: OnTopics | None = None
    on_warm: OnWarm | None = None
    on_standby: OnStandby | None = None

    def require_fit(self, *, counts_topics: bool, standbys: int = 0) -> None:
        """Raise if a callback would never be called, or one is missing.

        Args:
            counts_topics: Whether the policy assigns whole topics.
            standbys: As in ``ConsumerConfig``.

        Raises:
            ConfigurationError: A callback cannot be called, or is a coroutine function;
                ``on_topics`` is given for a policy that does not assign whole topics,
                or standbys for one that does; or only one of ``standbys`` and
                ``on_standby`` is given.
        """
        for field in attrs.fields(type(self)):
            callback = getattr(self, field.name)
            if callback is not None:
                require_callback(field.name, callback)
        if standbys and counts_topics:
            raise ConfigurationError(
                "a consumer stands by for partitions, and this policy assigns whole "
                "topics; leave standbys and on_standby out, or use another policy",
                setting="standbys",
            )
        if bool(standbys) != (self.on_standby is not None):
            raise ConfigurationError(
                "standbys, the number of standbys of each partition, and on_standby, "
                "which loads the state of one, need each other; give both",
                setting="standbys",
            )
        if self.on_topics is not None and not counts_topics:
            raise ConfigurationError(
                "on_topics reports whole topics; it needs policy='topic'",
                setting="on_topics",
            )


def checked_labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    """Return the checked labels of a member.

    Raises:
        ConfigurationError: A name is reserved, a text does not fit, or there are too
            many labels.
    """
    given: object = labels
    if not isinstance(given, Mapping) or not all(
        isinstance(each, str) for pair in given.items() for each in pair
    ):
        raise ConfigurationError(
            f"labels are {given!r}; give a dict of texts, like {{'rack': 'r1'}}",
            setting="labels",
        )
    for name, text in labels.items():
        problem = problem_of(name, text)
        if problem is not None:
            raise ConfigurationError(f"label {name!r} {problem}", setting="labels")
    if len(labels) > OWN_LABELS_MAX:
        raise ConfigurationError(
            f"there are {len(labels)} labels; give {OWN_LABELS_MAX} at most",
            setting="labels",
        )
    return {to_text(name): to_text(text) for name, text in labels.items()}


@attrs.frozen(kw_only=True)
class Membership:
    """How a process takes part in its groups as a member.

    Attributes:
        labels: Labels for planners and custom policies, as in ``Marshal``.
        can_plan: Whether it may plan for a group with policy ``planner``.
        restarts: Whether the process, or a member that replaces it, starts again soon
            after its orderly end, so that its partitions wait for it.
    """

    labels: Mapping[str, str] = attrs.field(factory=dict)
    can_plan: bool = True
    restarts: bool = False
