"""Growth of keyed data topics by an admin, so that each key keeps its order.

Any process can repeat each step: the log and the topic show what is left to do
(PROTOCOL 9.10). Partitions are added only after the announcement was read back. The
ends of the old partitions are looked up only after producers have had the time to learn
the new count. An admin that continues waits for that whole time again, because nothing
shows when the partitions were added.
"""

from collections.abc import Callable, Iterable, Mapping

import attrs

from kafka_marshal.admin.connection import AdminConnection
from kafka_marshal.admin.pausing import ignore_progress
from kafka_marshal.arguments import require_text, to_whole, with_plain_arguments
from kafka_marshal.counting import counted
from kafka_marshal.engine.config_check import require_level
from kafka_marshal.engine.kept_states import POLL_MS
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    CoordinationError,
    LogUnwritable,
    TopicMisconfigured,
)
from kafka_marshal.ports import DataLog, TopicInfo
from kafka_marshal.protocol.growths import growths_of, position_in, source_of
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP
from kafka_marshal.protocol.items import Growth
from kafka_marshal.protocol.placement import standing_keys
from kafka_marshal.protocol.records import ENDS_MAX, GROWN_MAX, DataGrowth
from kafka_marshal.protocol.state import KeyState, WorldState
from kafka_marshal.protocol.types import Key, TopicPartition, may_be_same_topic

SETTLE_MS = 600_000
"""Longer than a producer takes by default to learn the number of partitions
(``metadata.max.age.ms``, 5 min) and then to send or give up the records that it has
(``delivery.timeout.ms``, 2 min; 5 min with librdkafka)."""
SETTLE_MS_MAX = 7 * 86_400_000
SHOW_MS = 10_000
"""How often the remaining time is shown."""
ANNOUNCE, ADD, SETTLE, END = "announce", "add", "settle", "end"
WITHDRAW = "withdraw"
Ends = Mapping[TopicPartition, int]


@attrs.frozen(kw_only=True)
class SourceReport:
    """How far a group is in one old partition, and which new partitions wait for it.

    Attributes:
        group_id: The group.
        topic: The topic.
        partition: The old partition.
        position: The group's position in the old partition, None if unknown.
        end: The position that the group has to reach: the log end as long as the growth
            is only announced; None if unknown.
        waiting: New partitions that the group does not begin before it has reached the
            end.
    """

    group_id: str
    topic: str
    partition: int
    position: int | None
    end: int | None
    waiting: tuple[int, ...]

    @property
    def lag(self) -> int | None:
        """Number of offsets from the position to the end, None if unknown."""
        if self.position is None or self.end is None:
            return None
        return max(0, self.end - self.position)


@attrs.frozen(kw_only=True)
class GrowthReport:
    """A growth that the log knows, and the groups that wait.

    Attributes:
        growth: The growth.
        sources: One for each old partition and each group with keys of the topic.
    """

    growth: Growth
    sources: tuple[SourceReport, ...]


@attrs.frozen(kw_only=True)
class GrowthPlan:
    """The effect of a growth, or of its withdrawal.

    Attributes:
        growth: The growth; its offset is -1 if the log does not know it yet.
        partition_count: Number of partitions of the topic now; None if it does not
            exist.
        is_withdrawal: Whether the growth is withdrawn.
        settle_ms: How long producers get to learn the new count.
        sources: One for each old partition and each group with keys of the topic.
    """

    growth: Growth
    partition_count: int | None
    is_withdrawal: bool = False
    settle_ms: int
    sources: tuple[SourceReport, ...]

    @property
    def steps(self) -> tuple[str, ...]:
        """Remaining steps, in order: ``announce``, ``add``, ``settle``, ``end``.

        A withdrawal has the single step ``withdraw``. Empty if nothing is left to do.
        """
        if self.is_withdrawal:
            return (WITHDRAW,)
        if self.growth.ends is not None:
            return ()
        announce = (ANNOUNCE,) if self.growth.offset < 0 else ()
        add = (ADD,) if self.added_count else ()
        return (*announce, *add, SETTLE, END)

    @property
    def added_count(self) -> int:
        """Number of partitions to add to the topic."""
        if self.is_withdrawal or self.partition_count is None:
            return 0
        return max(0, self.growth.new_count - self.partition_count)

    @property
    def duration_ms(self) -> int:
        """How long the remaining steps take, apart from a few requests."""
        return self.settle_ms if SETTLE in self.steps else 0


def plan_growth(
    worlds: Mapping[int, WorldState],
    topic: str,
    *,
    count: int,
    info: TopicInfo | None,
    settle_ms: int,
    ends: Ends,
) -> GrowthPlan:
    """Return the plan of a growth: what is left to do until a topic has grown.

    Args:
        worlds: Every coordinating partition, folded to its end.
        topic: The topic.
        count: New number of partitions.
        info: The topic in the cluster, None if it does not exist.
        settle_ms: How long producers get to learn the new count.
        ends: Log ends of the topic's partitions, as far as they are known.

    Raises:
        ConfigurationError: There is no such topic, or it cannot have that number.
        ClaimRejected: Another growth of the topic is open, or it got that number of
            partitions without a growth, or the log knows one of an earlier topic.
    """
    if info is None:
        raise ConfigurationError(
            f"topic {topic!r} does not exist; check its name", setting="topic"
        )
    known = growths_of(worlds[0].growths, topic, topic_id=info.topic_id)
    growth = _known(known, count, info) or Growth(
        topic=topic,
        old_count=info.partition_count,
        new_count=count,
        topic_id=info.topic_id,
        offset=-1,
        ends=None,
    )
    if growth.offset < 0:
        _require_possible(growth)
    return GrowthPlan(
        growth=growth,
        partition_count=info.partition_count,
        settle_ms=settle_ms,
        sources=_sources(growth, worlds, ends=ends),
    )


def _known(known: Iterable[Growth], count: int, info: TopicInfo) -> Growth | None:
    """Return the growth to this count, None if the log does not know it.

    Raises:
        ClaimRejected: Another growth is open, or one of an earlier topic is known.
    """
    for each in known:
        reached = each.old_count if each.ends is None else each.new_count
        if info.partition_count < reached:
            count_text = counted(info.partition_count, "partition")
            raise ClaimRejected(
                f"topic {each.topic!r} has {count_text}, and the log knows its growth "
                f"from {each.old_count} to {each.new_count}, which is of an "
                f"earlier topic of that name; to withdraw it, run: {command(each)} "
                "--withdraw --execute",
                reason="growth",
            )
        if each.new_count == count and (
            each.ends is None or info.partition_count == count
        ):
            return each
        if each.ends is None:
            raise ClaimRejected(
                f"topic {each.topic!r} grows from {each.old_count} to "
                f"{each.new_count} partitions, and that has not ended; to continue "
                f"it, run: {command(each)} --execute; to withdraw it: "
                f"{command(each)} --withdraw --execute",
                reason="busy",
            )
    return None


def _require_possible(growth: Growth) -> None:
    topic, old, new = growth.topic, growth.old_count, growth.new_count
    if new == old:
        raise ClaimRejected(
            f"topic {topic!r} has {old} partitions already, and the log knows no "
            "growth to that number: members claimed the new ones at once; nothing is "
            f"left to do; see: marshal groups grow --topic {topic}",
            reason="growth",
        )
    if new > GROWN_MAX:
        raise ConfigurationError(
            f"topic {topic!r} cannot get {new} partitions: the log knows growths to "
            f"{GROWN_MAX} at most; give a smaller number",
            setting="partitions",
        )
    if new < old or new % old:
        raise ConfigurationError(
            f"topic {topic!r} has {old} partitions and cannot get {new}; give a "
            f"multiple, such as {2 * old}: else it is not known which partition had "
            "the keys of a new one",
            setting="partitions",
        )
    if old > ENDS_MAX:
        raise ConfigurationError(
            f"topic {topic!r} has {old} partitions; one with more than {ENDS_MAX} "
            "cannot grow, because the log keeps the end of each",
            setting="topic",
        )


def plan_withdrawal(
    worlds: Mapping[int, WorldState],
    topic: str,
    *,
    count: int | None,
    info: TopicInfo | None,
    ends: Ends,
) -> GrowthPlan:
    """Return the plan of a withdrawal, after which nothing waits for the growth.

    Args:
        worlds: Every coordinating partition, folded to its end.
        topic: The topic, also one that does not exist any more.
        count: Number of partitions after the growth; None for the open growth, or for
            the only one.
        info: The topic in the cluster, None if it does not exist.
        ends: Log ends of the topic's partitions, as far as they are known.

    Raises:
        ClaimRejected: The log knows no such growth, or several.
    """
    known = growths_of(worlds[0].growths, topic, topic_id=None)
    found = [each for each in known if count in {None, each.new_count}]
    if len(found) > 1:
        found = [each for each in found if each.ends is None]
    if len(found) != 1:
        texts = [f"from {each.old_count} to {each.new_count}" for each in known]
        numbers = f"of these: {', '.join(texts)}" if texts else "none"
        to = "" if count is None else f" to {count} partitions"
        raise ClaimRejected(
            f"name the growth{to} of topic {topic!r} to withdraw, by its --partitions; "
            f"the log knows {numbers}; see: marshal groups grow --topic {topic}",
            reason="growth",
        )
    (growth,) = found
    return GrowthPlan(
        growth=growth,
        partition_count=None if info is None else info.partition_count,
        is_withdrawal=True,
        settle_ms=0,
        sources=_sources(growth, worlds, ends=ends),
    )


def command(growth: Growth) -> str:
    """Return the command that continues a growth, without ``--execute``."""
    return f"marshal groups grow --topic {growth.topic} --partitions {growth.new_count}"


def old_partitions(growths: Iterable[Growth]) -> list[TopicPartition]:
    """Return the old partitions of growths that have no ends yet."""
    return [
        TopicPartition(each.topic, number)
        for each in growths
        if each.ends is None
        for number in range(each.old_count)
    ]


def reports(
    worlds: Mapping[int, WorldState], growths: Iterable[Growth], *, ends: Ends
) -> tuple[GrowthReport, ...]:
    """Return the growths with the groups that wait.

    Args:
        worlds: Every coordinating partition, folded to its end.
        growths: The growths.
        ends: Log ends of the old partitions, as far as they are known.
    """
    return tuple(
        GrowthReport(growth=each, sources=_sources(each, worlds, ends=ends))
        for each in growths
    )


def waiting(
    worlds: Mapping[int, WorldState], group_id: str
) -> tuple[SourceReport, ...]:
    """Return the old partitions that new ones wait for in a group.

    Args:
        worlds: Coordinating partitions, folded to one moment. Without partition 0, the
            growths are unknown, and the result is empty.
        group_id: The group.
    """
    growths = worlds[0].growths if 0 in worlds else ()
    return tuple(
        source
        for each in growths
        for source in _sources(each, worlds, ends={}, group_id=group_id)
        if source.waiting
    )


def _sources(
    growth: Growth,
    worlds: Mapping[int, WorldState],
    *,
    ends: Ends,
    group_id: str | None = None,
) -> tuple[SourceReport, ...]:
    """Return the old partitions of one group, or of all groups."""
    states = {
        key: world.keys[key]
        for key, world in standing_keys(worlds).items()
        if key.topic == growth.topic and group_id in {None, key.group_id}
    }
    return tuple(
        _source(growth, Key(name, growth.topic, number), states, ends=ends)
        for name in sorted({key.group_id for key in states})
        for number in range(growth.old_count)
    )


def _source(
    growth: Growth, key: Key, states: Mapping[Key, KeyState], *, ends: Ends
) -> SourceReport:
    topic_id, known = growth.topic_id, states.get(key)
    source = source_of(growth, key)
    waiting: list[int] = []
    if not source.has_passed(known, topic_id=topic_id):
        waiting = [
            number
            for number in range(
                key.partition + growth.old_count, growth.new_count, growth.old_count
            )
            # A new partition with a position has begun.
            if position_in(
                states.get(key._replace(partition=number)), topic_id=topic_id
            )
            is None
        ]
    end = source.end
    if growth.ends is None:
        end = ends.get(TopicPartition(key.topic, key.partition))
    return SourceReport(
        group_id=key.group_id,
        topic=key.topic,
        partition=key.partition,
        position=position_in(known, topic_id=topic_id),
        end=end,
        waiting=tuple(waiting),
    )


@attrs.frozen(kw_only=True)
class GrowthProgress:
    """The step that begins or continues.

    Attributes:
        step: One of ``GrowthPlan.steps``.
        left_ms: During ``settle``, the time that producers still get; else 0.
    """

    step: str
    left_ms: int = 0


OnGrowth = Callable[[GrowthProgress], None]


class Growing(AdminConnection):
    """Grows keyed data topics, as a part of ``Admin``; for one thread."""

    _data: DataLog

    @with_plain_arguments
    def growths(self, topic: str | None = None) -> tuple[GrowthReport, ...]:
        """Return the growths that the log knows, and which partitions wait.

        Args:
            topic: Only growths of this topic; None for all.
        """
        self._settled()
        worlds = self._follow().by_partition
        growths = [each for each in worlds[0].growths if topic in {None, each.topic}]
        ends = self.log_ends(old_partitions(growths))
        return reports(worlds, growths, ends=ends)

    @with_plain_arguments
    def grow_topic(
        self,
        topic: str,
        partition_count: int | None = None,
        *,
        settle_ms: int = SETTLE_MS,
        reason: str | None = None,
        execute: bool = False,
        withdraw: bool = False,
        on_progress: OnGrowth = ignore_progress,
    ) -> GrowthPlan:
        """Add partitions to a keyed data topic; groups keep the order of each key.

        A group does not claim a new partition before it has processed the old one that
        had its keys, up to the log end of that at the time when all producers knew the
        new number. After an interruption, any process can continue by a call with the
        same number.

        Args:
            topic: The topic.
            partition_count: The new number, a multiple of the present one. None only
                with ``withdraw``: the growth that is open, or the only one.
            settle_ms: Longest time that producers take to learn the new number, and to
                send the records that they have assigned by the old one: at least their
                largest ``metadata.max.age.ms`` plus ``delivery.timeout.ms``.
            reason: Stored in the log, for people.
            execute: Whether to execute the plan.
            withdraw: Whether to withdraw the growth instead: no partition waits for it
                any more, even if keys lose their order.
            on_progress: Called on this thread with each step, and every ten seconds
                during ``settle``.

        Returns:
            The plan, as it was before the execution.

        Raises:
            ConfigurationError: The number is not allowed, or the feature level of the
                coordination topic is below 2.
            ClaimRejected: Another growth of the topic is open, or meanwhile the growth
                was withdrawn, or the topic deleted.
            TopicMisconfigured: The cluster refuses the number.
            LogUnwritable: This principal may not add partitions.
            DeadlineExceeded: No verdict in time; repeating the call completes it.
        """
        plan = self._plan(
            topic, partition_count, settle_ms=settle_ms, withdraw=withdraw
        )
        if not execute:
            return plan
        if WITHDRAW in plan.steps:
            on_progress(GrowthProgress(step=WITHDRAW))
            old_count = plan.growth.old_count
            end = plan.growth._replace(new_count=old_count, ends=None)
            self._record(end, reason)
        if ANNOUNCE in plan.steps:
            self._require_allowed(plan.growth)
            on_progress(GrowthProgress(step=ANNOUNCE))
            self._record(plan.growth, reason)
        if ADD in plan.steps:
            on_progress(GrowthProgress(step=ADD))
            self._add(plan.growth)
        if SETTLE in plan.steps and self._settle(plan, on_progress):
            on_progress(GrowthProgress(step=END))
            grown = plan.growth._replace(ends=self._ends(plan.growth))
            self._record(grown, reason)
        return plan

    def _plan(
        self, topic: str, count: int | None, *, settle_ms: int, withdraw: bool
    ) -> GrowthPlan:
        require_text("topic", topic)
        if topic == self._settings.coordination_topic:
            raise ConfigurationError(
                f"topic {topic!r} is the coordination topic; to change its number of "
                "partitions, run: marshal topic resize",
                setting="topic",
            )
        if not 0 <= settle_ms <= SETTLE_MS_MAX:
            raise ConfigurationError(
                f"settle_ms (--settle) must be 0 to {SETTLE_MS_MAX} ms, not "
                f"{settle_ms}",
                setting="settle_ms",
            )
        require_level(self._settled(), "the growth of a topic")
        worlds = self._follow().by_partition
        info = self._describe(topic)
        places = [] if info is None else range(info.partition_count)
        ends = self.log_ends([TopicPartition(topic, each) for each in places])
        if withdraw:
            return plan_withdrawal(worlds, topic, count=count, info=info, ends=ends)
        if count is None:
            raise ConfigurationError(
                f"name the number of partitions that topic {topic!r} is to have",
                setting="partitions",
            )
        to_whole("partitions", count)
        return plan_growth(
            worlds, topic, count=count, info=info, settle_ms=settle_ms, ends=ends
        )

    def _describe(self, topic: str) -> TopicInfo | None:
        return self._data.describe([topic], self._timeout_ms).get(topic)

    def _record(self, growth: Growth, reason: str | None) -> None:
        """Append a record that announces, ends or withdraws a growth; read it back."""
        record = DataGrowth(
            **self._sender.fields(CHECKPOINT_GROUP),
            topic=growth.topic,
            topic_id=growth.topic_id,
            old_count=growth.old_count,
            new_count=growth.new_count,
            ends=growth.ends,
            reason=reason,
        )
        (sent,) = self._write((0, record))
        why = None if sent.transition is None else sent.transition.reason
        if sent.is_accepted or why == "known":
            return
        if why in _WHY:
            raise ClaimRejected(
                f"the growth of topic {growth.topic!r} was refused ({why}): "
                f"{_WHY[why]}; see: marshal groups grow --topic {growth.topic}",
                reason=why,
            )
        raise sent.unwritable("the growth")

    def _require_allowed(self, growth: Growth) -> None:
        """Make the cluster check the new number before it is announced."""
        self._topics.add_partitions(
            growth.topic,
            count=growth.new_count,
            timeout_ms=self._timeout_ms,
            validate_only=True,
        )

    def _add(self, growth: Growth) -> None:
        """Add the announced partitions to the topic."""
        topic, count = growth.topic, growth.new_count
        try:
            self._topics.add_partitions(topic, count=count, timeout_ms=self._timeout_ms)
        except (TopicMisconfigured, LogUnwritable) as error:
            raise type(error)(
                f"{error}; the growth is announced, and its partitions are not added; "
                f"repeat it with: {command(growth)} --execute; or withdraw it with: "
                f"{command(growth)} --withdraw --execute"
            ) from error
        except CoordinationError as error:
            raise CoordinationError(
                f"{error}; the growth is announced, and its partitions may be added; "
                f"continue it with: {command(growth)} --execute"
            ) from error

    def _settle(self, plan: GrowthPlan, on_progress: OnGrowth) -> bool:
        """Wait until producers know the new number.

        Returns:
            False if another process has ended the growth meanwhile.

        Raises:
            ClaimRejected: The growth was withdrawn.
        """
        follower, growth = self._follow(), plan.growth
        begin_ms = shown_ms = self._clock.now_ms()
        while True:
            now_ms = self._clock.now_ms()
            left_ms = max(0, begin_ms + plan.settle_ms - now_ms)
            if now_ms >= shown_ms:
                shown_ms = now_ms + SHOW_MS
                on_progress(GrowthProgress(step=SETTLE, left_ms=left_ms))
            known = [
                each
                for each in growths_of(
                    follower.worlds[0].growths, growth.topic, topic_id=growth.topic_id
                )
                if each[1:3] == growth[1:3]
            ]
            if not known:
                raise ClaimRejected(
                    f"the growth of topic {growth.topic!r} to {growth.new_count} "
                    "partitions was withdrawn meanwhile; see: marshal groups history",
                    reason="growth",
                )
            if known[0].ends is not None:
                return False
            if not left_ms:
                return True
            follower.step(min(POLL_MS, left_ms))

    def _ends(self, growth: Growth) -> tuple[int, ...]:
        """Return the log ends of the old partitions, also past open transactions.

        Raises:
            ClaimRejected: The topic is not the one that was announced.
            CoordinationError: The brokers do not know all of the partitions now.
        """
        info = self._describe(growth.topic)
        if info is None or not may_be_same_topic(info.topic_id, growth.topic_id):
            raise ClaimRejected(
                f"topic {growth.topic!r} was deleted or created again while it grew; "
                f"to withdraw its growth, run: {command(growth)} --withdraw --execute",
                reason="old_topic",
            )
        places = [
            TopicPartition(growth.topic, each) for each in range(growth.old_count)
        ]
        ends = self._data.ends(places, self._timeout_ms)
        if ends.keys() != {*places}:
            raise CoordinationError(
                f"the brokers know {len(ends)} of the {len(places)} partitions of "
                f"topic {growth.topic!r}; see: marshal doctor, and try again"
            )
        return tuple(ends[place] for place in places)


_WHY = {
    "busy": "another growth of it was announced meanwhile",
    "growth": "it was withdrawn, or another one announced, meanwhile",
    "limits": "the log keeps no more growths; withdraw those that no group waits for",
}
