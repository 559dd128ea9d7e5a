"""Checks the settings of a consumer and makes its subscription."""

import re
from collections.abc import Mapping, Sequence

import attrs
import re2

from kafka_marshal.engine import Delivery, StartRule, Subscription
from kafka_marshal.engine.topics import TOPICS_MAX, Matches, matching_topics
from kafka_marshal.errors import ConfigurationError, LogUnreadable
from kafka_marshal.policies import Policy, find_policy
from kafka_marshal.ports import (
    ISOLATION_LEVELS,
    READ_UNCOMMITTED,
    DataLog,
    TopicInfo,
)
from kafka_marshal.protocol.codec import is_topic
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.remote import api

OFFSET_RESETS = ("earliest", "latest", "none")
INTERNAL_PREFIX = "__"
# Bounds the size of a compiled pattern, and so the time to match one name: the
# largest that compiles takes about 10 ms for a name of 249 characters.
PATTERN_BYTES_MAX = 256 * 1024
_INLINE_FLAGS = {re.IGNORECASE: "i", re.MULTILINE: "m", re.DOTALL: "s"}


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


@attrs.frozen
class Settings:
    """Settings of a consumer's subscription; see ``Marshal.consumer``.

    Attributes:
        topics: Data topics by name, or none with a pattern.
        pattern: Which topics to join, or None.
        delivery: The guarantee.
        policy: Name of a policy, or a policy.
        claims_max: Most partitions, or whole topics.
        auto_offset_reset: Where to start without a position.
        metadata_refresh_ms: Time between two refreshes of metadata.
        max_handling_ms: Longest time between two polls; None = the heartbeat interval.
        release_behind: Whether to release partitions when the consumer lags.
        has_on_topics: Whether the application has a callback for whole topics.
        isolation_level: ``read_uncommitted``, or ``read_committed`` to return records
            of transactions only after their commit.
    """

    topics: Sequence[str]
    pattern: str | re.Pattern[str] | None
    delivery: Delivery = attrs.field(converter=to_delivery)
    policy: str | Policy
    claims_max: int
    auto_offset_reset: str
    metadata_refresh_ms: int
    max_handling_ms: int | None
    release_behind: bool
    has_on_topics: bool
    isolation_level: str = READ_UNCOMMITTED

    def __attrs_post_init__(self) -> None:
        if bool(self.topics) == (self.pattern is not None):
            raise ConfigurationError(
                "name at least one topic, or give a pattern, not both",
                setting="topics",
            )
        for topic in self.topics:
            if not is_topic(topic):
                raise ConfigurationError(
                    f"{topic!r} is no valid topic name: 1 to 249 of A-Z a-z 0-9 . _ -",
                    setting="topics",
                )
        if len(self.topics) > TOPICS_MAX:
            raise ConfigurationError(
                f"{len(self.topics)} topics are named, and at most {TOPICS_MAX} are "
                "allowed; use more consumers, each of its own client",
                setting="topics",
            )
        for name in ("claims_max", "max_handling_ms"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigurationError(
                    f"{name} must be 0 (no limit) or more", setting=name
                )
        if self.metadata_refresh_ms < 1:
            raise ConfigurationError(
                "metadata_refresh_ms must be at least 1", setting="metadata_refresh_ms"
            )
        if self.pattern is not None:
            topic_pattern(self.pattern)
        if self.auto_offset_reset not in OFFSET_RESETS:
            raise ConfigurationError(
                f"auto_offset_reset {self.auto_offset_reset!r} must be one of "
                f"{', '.join(OFFSET_RESETS)}",
                setting="auto_offset_reset",
            )
        if self.isolation_level not in ISOLATION_LEVELS:
            raise ConfigurationError(
                f"isolation_level {self.isolation_level!r} must be one of "
                f"{', '.join(ISOLATION_LEVELS)}",
                setting="isolation_level",
            )

    def subscription(
        self, group_id: str, data: DataLog, *, coordination_topic: str, timeout_ms: int
    ) -> Subscription:
        """Look the topics up, and return the subscription.

        Raises:
            ConfigurationError: The policy cannot be used.
            LogUnreadable: A named topic does not exist.
        """
        policy = find_policy(self.policy)
        if coordination_topic in self.topics:
            raise ConfigurationError(
                f"{coordination_topic!r} is the coordination topic, not a data topic; "
                "to read it, run: marshal log tail",
                setting="topics",
            )
        matches = self._matches(coordination_topic)
        found: Mapping[str, TopicInfo]
        if matches is None:
            found = data.describe(self.topics, timeout_ms)
            topics = {topic: _existing(topic, found) for topic in self.topics}
        else:
            found = matching_topics(data, matches, timeout_ms=timeout_ms)
            topics = dict(list(found.items())[:TOPICS_MAX])
        subscription = Subscription(
            group_id,
            topics,
            policy,
            self.delivery,
            StartRule(
                offset_reset=self.auto_offset_reset,
                isolation_level=self.isolation_level,
            ),
            self.claims_max,
            self.metadata_refresh_ms,
            matches,
            self.max_handling_ms,
            self.release_behind,
        )
        if self.has_on_topics and not subscription.counts_topics:
            raise ConfigurationError(
                "on_topics reports whole topics; it needs policy='topic'",
                setting="on_topics",
            )
        return subscription

    def wants(
        self, *, starts: Mapping[TopicPartition, int] | None = None
    ) -> api.SubscriptionSpec:
        """Return the subscription in the form for a sidecar.

        Args:
            starts: Where to start partitions without a position, if given.

        Raises:
            ConfigurationError: It cannot be sent to another process.
        """
        if not isinstance(self.policy, str):
            raise ConfigurationError(
                "with a sidecar a policy is given by name, because the sidecar runs it "
                f"for all its clients; {self.policy!r} is an object of this process",
                setting="policy",
            )
        return api.SubscriptionSpec(
            topics=tuple(self.topics),
            pattern=None if self.pattern is None else pattern_text(self.pattern),
            delivery=self.delivery.value,
            policy=self.policy,
            claims_max=self.claims_max,
            auto_offset_reset=self.auto_offset_reset,
            isolation_level=self.isolation_level,
            metadata_refresh_ms=self.metadata_refresh_ms,
            release_behind=self.release_behind,
            starts=tuple(
                api.Start(topic=topic, partition=number, offset=offset)
                for (topic, number), offset in sorted((starts or {}).items())
            ),
        )

    def _matches(self, coordination_topic: str) -> Matches | None:
        """Return the test for topics to join: a full match, and never internal ones."""
        if self.pattern is None:
            return None
        is_match = topic_pattern(self.pattern)

        def matches(name: str) -> bool:
            is_ours = name == coordination_topic or name.startswith(INTERNAL_PREFIX)
            return not is_ours and is_match(name)

        return matches


def topic_pattern(pattern: str | re.Pattern[str]) -> Matches:
    """Return the test for names of topics that a pattern matches in full.

    The syntax is RE2's, as in Kafka's own consumer protocol. Matching takes time
    linear in the length of the name for every pattern, and releases the GIL: a
    pattern of one client cannot stop a sidecar, nor the heartbeats of a process.

    Args:
        pattern: A regular expression, or a compiled one of the standard library.

    Raises:
        ConfigurationError: RE2 does not support the pattern, or it is too large.
    """
    text = pattern_text(pattern)
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


def pattern_text(pattern: str | re.Pattern[str]) -> str:
    """Return a pattern as text; flags of a compiled one become inline flags.

    Raises:
        ConfigurationError: The pattern is not one of text, or a flag has no inline
            form.
    """
    if isinstance(pattern, str):
        return pattern
    text = getattr(pattern, "pattern", None)
    if not isinstance(text, str):
        raise ConfigurationError(
            f"pattern {pattern!r} is no regular expression for text; give a str",
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


def _existing(topic: str, found: Mapping[str, TopicInfo]) -> TopicInfo:
    info = found.get(topic)
    if info is None or info.partition_count < 1:
        raise LogUnreadable(
            f"topic {topic!r} does not exist, or has no partitions, on this cluster; "
            "check its name, or create it first"
        )
    return info
