"""Resets of groups in the cluster: planned, executed, undone, finished (PROTOCOL 8.7).

``group_reset`` makes the plans, and ``SetPosition`` executes them.
"""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import msgspec

from kafka_marshal.admin.connection import AdminConnection
from kafka_marshal.admin.finishing import (
    OnProgress,
    ResetResult,
    Resolution,
    open_operations,
)
from kafka_marshal.admin.group_reset import (
    OFFSETS,
    TIME,
    Facts,
    PositionSpec,
    ResetPlan,
    describe_plan,
    group_of_operation,
    partitions_of,
    plan_reset,
    remove_finished,
    start_of,
    topics_of_group,
    write_plan,
)
from kafka_marshal.admin.pausing import ignore_progress, parse_topics
from kafka_marshal.admin.set_position import PositionPlan, SetPosition, plan_undo
from kafka_marshal.arguments import require_name, with_plain_arguments
from kafka_marshal.errors import ConfigurationError, CoordinationError
from kafka_marshal.ports import DataLog, TopicInfo
from kafka_marshal.protocol.placement import keys_of
from kafka_marshal.protocol.types import Key, TopicPartition

if TYPE_CHECKING:
    from kafka_marshal.kafka_io.data import KafkaOffsets

DRAIN_INTERVALS = 2
"""Number of heartbeat intervals after which an owner that does not release is stale."""
PAUSE_MS_MIN = 30_000
"""Shortest length of the pause, which is renewed while the admin lives."""


class Resetting(AdminConnection):
    """Resets of groups to new positions, as a part of ``Admin``; for one thread."""

    _data: DataLog
    _offsets: "KafkaOffsets"

    @with_plain_arguments
    def plan_reset(
        self,
        group_id: str,
        spec: PositionSpec,
        *,
        topics: Sequence[str] | None = None,
        clamp: bool = False,
        allow_reprocess: bool = False,
    ) -> ResetPlan:
        """Return the effect of a reset of a group to new positions; write nothing.

        Args:
            group_id: The group.
            spec: The rule for new positions.
            topics: Topics, or ``topic:0,1`` for some partitions; None for all topics
                of the group. Ignored if the rule gives an offset for each partition.
            clamp: Whether a position outside of its log becomes the nearest one
                inside, as with Kafka's tool; otherwise it is refused.
            allow_reprocess: Whether partitions consumed at most once may go back, so
                that records are handed out again.

        Raises:
            ConfigurationError: A topic or partition does not exist.
            PositionError: A position lies outside of its log.
            ClaimRejected: The log has no positions of the group; or the rule shifts a
                partition that has no position.
        """
        require_name("group_id", group_id)
        if not isinstance(spec, PositionSpec):
            raise ConfigurationError(
                f"{spec!r} is not a PositionSpec; give one, like "
                "PositionSpec.earliest()",
                setting="spec",
            )
        self._settled()
        worlds = self._follow().worlds
        if spec.kind == OFFSETS:
            wanted = _topics_named(spec.offsets)
        elif topics is None:
            wanted = dict.fromkeys(topics_of_group(worlds, group_id))
        else:
            wanted = parse_topics(topics)
        infos = self._data.describe(sorted(wanted), self._timeout_ms)
        partitions = partitions_of(wanted, infos, group_id=group_id)
        return plan_reset(
            worlds,
            spec,
            group_id=group_id,
            op_id=secrets.token_hex(16),
            partitions=partitions,
            facts=self._facts(group_id, partitions, infos=infos, spec=spec),
            is_clamped=clamp,
            allows_reprocess=allow_reprocess,
        )

    @with_plain_arguments
    def plan_undo(
        self, op_id: str, *, partial: bool = False, allow_reprocess: bool = False
    ) -> ResetPlan:
        """Return the effect of undoing a reset; write nothing.

        Partitions without a position before the reset stay as they are; they are in
        ``positions.left_out``.

        Args:
            op_id: The operation to undo, in hex.
            partial: Whether to undo only the partitions that can still be undone, if
                later operations, recreated topics or forgetting affect others.
            allow_reprocess: As in ``plan_reset``.

        Raises:
            ClaimRejected: The log does not show the positions before the operation, or
                not of all its partitions.
        """
        self._settled()
        worlds = self._follow().worlds
        positions = plan_undo(
            worlds,
            group_id=group_of_operation(worlds, op_id),
            op_id=op_id,
            new_op_id=secrets.token_hex(16),
            is_partial=partial,
        )
        positions = msgspec.structs.replace(positions, allows_reprocess=allow_reprocess)
        return self._described(positions, is_partial=partial)

    def describe_plan(self, plan: PositionPlan) -> ResetPlan:
        """Return the effect that a stored plan (``read_plan``) has now; write nothing.

        Raises:
            ClaimRejected: A topic was deleted or created again since.
            PositionError: A position is beyond the end of its log now.
        """
        require_name("group_id", plan.group_id)
        self._settled()
        return self._described(plan)

    def _described(
        self, positions: PositionPlan, *, is_partial: bool = False
    ) -> ResetPlan:
        partitions = [TopicPartition(t.topic, t.partition) for t in positions.targets]
        infos = self._data.describe(
            sorted({each.topic for each in partitions}), self._timeout_ms
        )
        facts = self._facts(positions.group_id, partitions, infos=infos)
        worlds = self._follow().worlds
        return describe_plan(worlds, positions, facts=facts, is_partial=is_partial)

    @with_plain_arguments
    def execute(
        self,
        plan: ResetPlan | PositionPlan,
        *,
        plan_file: str | Path | None = None,
        reason: str | None = None,
        drain_ms: int | None = None,
        on_progress: OnProgress = ignore_progress,
    ) -> ResetResult:
        """Set the positions of a plan, all or none; or continue after an admin died.

        The group is paused, releases its keys, and continues by itself from the new
        positions. Then Kafka's committed offsets are written, best effort.

        Args:
            plan: The plan; to continue, the stored plan (``read_plan``).
            plan_file: File to store the plan in before the first record. Without it, an
                operation whose admin dies can only be finished (``finish``).
            reason: Stored in the log, for people.
            drain_ms: Longest wait until the group has released its keys; by default
                two heartbeat intervals, after which silent owners are stale, plus the
                time of a step.
            on_progress: Called on this thread with each step.

        Raises:
            ConfigurationError: The plan cannot be stored; nothing was written.
            ClaimRejected: Nothing is set: another operation is not resolved, or a
                partition consumed at most once would go back, or the positions have
                changed since an undo was planned.
            GroupPaused: Nothing is set: another operation has paused the group.
            DeadlineExceeded: The group did not release its keys, and nothing is set;
                or the log did not answer: execute the plan again.
        """
        positions = plan.positions if isinstance(plan, ResetPlan) else plan
        require_name("group_id", positions.group_id)
        config = self._settled()
        if plan_file is not None:
            write_plan(Path(plan_file), positions)
        interval_ms = config.heartbeat_interval_ms
        if drain_ms is None:
            drain_ms = DRAIN_INTERVALS * interval_ms + self._timeout_ms
        operation = SetPosition(
            self._follow(),
            self._clock,
            self._sender,
            plan=positions,
            config=config,
            for_ms=min(max(PAUSE_MS_MIN, interval_ms), config.limit("max_pause_ms")),
            reason=reason,
            on_progress=on_progress,
        )
        result = operation.run(self._timeout_ms, drain_ms=drain_ms)
        mirrored = self._mirrored(result)
        self._remove_plans()
        return mirrored

    @with_plain_arguments
    def undo(
        self,
        op_id: str,
        *,
        partial: bool = False,
        allow_reprocess: bool = False,
        plan_file: str | Path | None = None,
        reason: str | None = None,
        on_progress: OnProgress = ignore_progress,
    ) -> ResetResult:
        """Set a group back to its positions before an operation.

        The undo is an operation of its own, and can be undone. For arguments and errors
        see ``plan_undo`` and ``execute``.
        """
        plan = self.plan_undo(op_id, partial=partial, allow_reprocess=allow_reprocess)
        return self.execute(
            plan, plan_file=plan_file, reason=reason, on_progress=on_progress
        )

    @with_plain_arguments
    def finish(
        self,
        group_id: str,
        *,
        reason: str | None = None,
        on_progress: OnProgress = ignore_progress,
    ) -> tuple[ResetResult, ...]:
        """End the resets of a group that are not resolved, as the log decided them.

        A committed reset is applied everywhere. Any other is aborted, even if its admin
        is alive. Members of any group do this by themselves once the pause is over.

        Raises:
            DeadlineExceeded: The log did not answer; call it again.
        """
        require_name("group_id", group_id)
        config, follower = self._settled(), self._follow()
        results = []
        for each in open_operations(follower.worlds, group_id):
            resolution = Resolution(
                follower,
                self._sender,
                group_id=group_id,
                op_id=each.op_id,
                config=config,
                reason=reason,
                on_progress=on_progress,
            )
            result = resolution.finish(self._timeout_ms)
            results.append(self._mirrored(result))
        self._remove_plans()
        return tuple(results)

    def _remove_plans(self) -> None:
        """Remove stored plans of ended operations, also those of killed commands."""
        if self._state_home is not None:
            wall_s = self._clock.wall_ms() / 1_000
            remove_finished(self._state_home, self._follow().worlds, wall_s=wall_s)

    def _facts(
        self,
        group_id: str,
        partitions: Sequence[TopicPartition],
        *,
        infos: Mapping[str, TopicInfo],
        spec: PositionSpec | None = None,
    ) -> Facts:
        known = keys_of(self._follow().worlds, group_id)
        without = [
            place
            for place in partitions
            if start_of(known.get(Key(group_id, *place)), None) is None
        ]
        at_time: Mapping[TopicPartition, int | None] = {}
        if spec is not None and spec.kind == TIME:
            times = dict.fromkeys(partitions, spec.value)
            at_time = self._offsets.at_times(times, self._timeout_ms)
        return Facts(
            topics=infos,
            ranges=self._data.ranges(partitions, self._timeout_ms),
            committed=self._data.committed(
                group_id, without, timeout_ms=self._timeout_ms
            ),
            at_time=at_time,
        )

    def _mirrored(self, result: ResetResult) -> ResetResult:
        """Write the positions of a commit to Kafka, best effort (PROTOCOL 5.7)."""
        offsets = {place: after for place, (_, after) in result.moved.items()}
        try:
            self._data.commit(result.group_id, offsets, timeout_ms=self._timeout_ms)
        except CoordinationError as error:
            return attrs.evolve(result, mirror_error=str(error))
        return result


def _topics_named(
    offsets: Mapping[TopicPartition, int],
) -> dict[str, frozenset[int] | None]:
    found: dict[str, frozenset[int] | None] = {}
    for place in offsets:
        found[place.topic] = (found.get(place.topic) or frozenset()) | {place.partition}
    return found
