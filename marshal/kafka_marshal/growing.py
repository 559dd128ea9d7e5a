"""Growth of keyed data topics by an admin, so that each key keeps its order.

Each step can be repeated, by any process: what is left to do follows from the log and
from the topic (PROTOCOL 9.10). Partitions are added only once the announcement was read
back, and their ends are looked up only once producers have had the time to learn the
new count. An admin that continues waits for that whole time again: nothing shows when
the partitions were added.
"""

from collections.abc import Callable

import attrs

from kafka_marshal.admin_connection import AdminConnection
from kafka_marshal.engine.config_check import require_level
from kafka_marshal.engine.kept_states import POLL_MS
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    CoordinationError,
    LogUnwritable,
    TopicMisconfigured,
)
from kafka_marshal.growth_plan import (
    ADD,
    ANNOUNCE,
    END,
    SETTLE,
    WITHDRAW,
    GrowthPlan,
    GrowthReport,
    command,
    old_partitions,
    plan_growth,
    plan_withdrawal,
    reports,
)
from kafka_marshal.ports import DataLog, TopicInfo
from kafka_marshal.protocol.growths import growths_of
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP
from kafka_marshal.protocol.items import Growth
from kafka_marshal.protocol.records import DataGrowth
from kafka_marshal.protocol.types import TopicPartition

SETTLE_MS = 600_000
"""Longer than a producer takes by default to learn the number of partitions
(``metadata.max.age.ms``, 5 min) and then to send or give up what it had
(``delivery.timeout.ms``, 2 min; 5 min with librdkafka)."""
SETTLE_MS_MAX = 7 * 86_400_000
SHOW_MS = 10_000
"""How often the remaining time is shown."""


@attrs.frozen(kw_only=True)
class GrowthProgress:
    """The step that begins or continues.

    Attributes:
        step: One of ``GrowthPlan.steps``.
        left_ms: Rest of the time that producers get, else 0.
    """

    step: str
    left_ms: int = 0


OnGrowth = Callable[[GrowthProgress], None]


def ignore_growth(_progress: GrowthProgress) -> None:
    """Show no progress."""


class Growing(AdminConnection):
    """Grows keyed data topics, as a part of ``Admin``; for one thread."""

    _data: DataLog

    def growths(self, topic: str | None = None) -> tuple[GrowthReport, ...]:
        """Return the growths that the log knows, and which partitions wait.

        Args:
            topic: Only those of this topic.
        """
        self._settled()
        worlds = self._follow().by_partition
        growths = [each for each in worlds[0].growths if topic in {None, each.topic}]
        ends = self.log_ends(old_partitions(growths))
        return reports(worlds, growths, ends=ends)

    def grow_topic(
        self,
        topic: str,
        partition_count: int | None = None,
        *,
        settle_ms: int = SETTLE_MS,
        reason: str | None = None,
        execute: bool = False,
        withdraw: bool = False,
        on_progress: OnGrowth = ignore_growth,
    ) -> GrowthPlan:
        """Add partitions to a keyed data topic; groups keep the order of each key.

        A new partition is not claimed before the old one that had its keys has been
        processed to the end that it had when every producer knew the new number. If
        interrupted, a call with the same number continues, by any process.

        Args:
            topic: The topic.
            partition_count: The new number, a multiple of the present one. None only
                with ``withdraw``, for the growth that is open, or the only one.
            settle_ms: How long producers take at most to learn the new number, and to
                send what they had for the old one: at least their largest
                ``metadata.max.age.ms`` plus ``delivery.timeout.ms``.
            reason: Stored in the log, for people.
            execute: Whether to execute the plan.
            withdraw: Whether to withdraw the growth instead: no partition waits for it
                any more, whether or not the order of its keys is kept then.
            on_progress: Called with each step, and each ten seconds while producers
                get their time, on this thread.

        Returns:
            The plan, as of before.

        Raises:
            ConfigurationError: The number is not allowed, or the feature level of the
                coordination topic is below 2.
            ClaimRejected: Another growth of the topic is open, or it was withdrawn or
                the topic deleted meanwhile.
            TopicMisconfigured: The cluster refuses the number; the growth is announced.
            LogUnwritable: This principal may not add partitions; as above.
            DeadlineExceeded: No verdict in time; repeating it completes it.
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
            self._write(end, reason)
        if ANNOUNCE in plan.steps:
            on_progress(GrowthProgress(step=ANNOUNCE))
            self._write(plan.growth, reason)
        if ADD in plan.steps:
            on_progress(GrowthProgress(step=ADD))
            self._add(plan.growth)
        if SETTLE in plan.steps and self._settle(plan, on_progress):
            on_progress(GrowthProgress(step=END))
            grown = plan.growth._replace(ends=self._ends(plan.growth))
            self._write(grown, reason)
        return plan

    def _plan(
        self, topic: str, count: int | None, *, settle_ms: int, withdraw: bool
    ) -> GrowthPlan:
        if topic == self._settings.coordination_topic:
            raise ConfigurationError(
                f"topic {topic!r} is the coordination topic; to change its number of "
                "partitions, run: marshal topic resize",
                setting="topic",
            )
        if not 0 <= settle_ms <= SETTLE_MS_MAX:
            raise ConfigurationError(
                f"producers get 0 to {SETTLE_MS_MAX} ms, not {settle_ms}",
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
        return plan_growth(
            worlds, topic, count=count, info=info, settle_ms=settle_ms, ends=ends
        )

    def _describe(self, topic: str) -> TopicInfo | None:
        return self._data.describe([topic], self._timeout_ms).get(topic)

    def _write(self, growth: Growth, reason: str | None) -> None:
        """Append a record that says what a growth is to be, and read it back."""
        follower = self._follow()
        record = DataGrowth(
            **self._sender.fields(CHECKPOINT_GROUP),
            topic=growth.topic,
            topic_id=growth.topic_id,
            old_count=growth.old_count,
            new_count=growth.new_count,
            ends=growth.ends,
            reason=reason,
        )
        sent = follower.append(0, record)
        follower.await_all([sent], self._timeout_ms)
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

    def _add(self, growth: Growth) -> None:
        """Add the partitions, which were announced."""
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
        """Wait until producers know the new number; return False if it has ended.

        Raises:
            ClaimRejected: It was withdrawn.
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
        """Return the ends of the old partitions, with uncommitted records.

        Raises:
            ClaimRejected: The topic is not the one that was announced.
            CoordinationError: The brokers do not know all of them, at the moment.
        """
        info = self._describe(growth.topic)
        is_same = info is not None and (
            None in {info.topic_id, growth.topic_id} or info.topic_id == growth.topic_id
        )
        if not is_same:
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
