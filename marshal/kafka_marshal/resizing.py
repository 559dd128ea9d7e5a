"""Changes of the number of coordinating partitions by an admin (PROTOCOL 10).

The fence of coordinating partition 0 is the commit point. Before it nothing is written
that a later change would find; after it the change only goes forward, and any process
can continue it: an admin that runs the same command, or members.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from kafka_marshal.admin_connection import AdminConnection
from kafka_marshal.engine.follower import Awaited, Follower
from kafka_marshal.engine.kept_states import POLL_MS
from kafka_marshal.errors import (
    ClaimRejected,
    DeadlineExceeded,
    LogUnreadable,
)
from kafka_marshal.pausing import Sender
from kafka_marshal.ports import Clock
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP
from kafka_marshal.protocol.layout_steps import (
    FINAL_AFTER_MS,
    Change,
    Moving,
    Progress,
    Reading,
    Steps,
    done_of,
    fence_of,
    final_of,
    groups_import_of,
    import_of,
    next_steps,
    progress_of,
    read,
)
from kafka_marshal.protocol.records import SUPPORTED_LEVEL, Member, Record
from kafka_marshal.resize_plan import ResizePlan, plan_resize, wait_text

IN_FLIGHT_MAX = 64
"""Most records that are appended before their verdicts are waited for."""
SHOW_MS = 1_000
"""How often progress is shown."""
WAITS_SHOWN_MAX = 5
OnResize = Callable[[Progress], None]


def ignore_resize(_progress: Progress) -> None:
    """Show no progress."""


def probe(
    follower: Follower,
    partitions: range,
    *,
    op_id: bytes,
    sender: Sender,
    timeout_ms: int,
) -> None:
    """Append a record to added partitions and read it back: both are possible.

    They are not in use, so the record changes nothing, and a change that is given up
    leaves nothing that shuts out a later one. It names the change: a reader that has
    read it knows that the first fence which follows is the first of all, with which the
    partition begins, whatever its log has lost before (PROTOCOL 10.7).

    Args:
        follower: Follows the log.
        partitions: The partitions.
        op_id: The operation, whose fence was not written yet.
        sender: The sender.
        timeout_ms: Longest wait for all of them.

    Raises:
        DeadlineExceeded: One of them was not read back in time.
        LogUnwritable: The broker refuses to append to one of them.
    """
    record = Member(
        **sender.fields(CHECKPOINT_GROUP) | {"incarnation": op_id},
        topics=(),
        host=sender.host,
        capacity=0,
        load=0,
        labels={},
        draining=True,
        feature_level_max=SUPPORTED_LEVEL,
        plan_generation=None,
    )
    follower.await_all([follower.append(t, record) for t in partitions], timeout_ms)


def write_first_fence(
    follower: Follower,
    plan: ResizePlan,
    *,
    op_id: bytes,
    sender: Sender,
    timeout_ms: int,
) -> Change:
    """Write the fence of coordinating partition 0, which decides; return the change.

    Raises:
        ClaimRejected: Partition 0 has a pause, a set position or a change by now.
        LogUnwritable: Its Config was changed meanwhile.
        DeadlineExceeded: No verdict in time. It may still be appended.
    """
    change = Change(
        op_id=op_id,
        from_count=plan.before.partition_count,
        config=msgspec.structs.replace(
            plan.before,
            generation=plan.before.generation + 1,
            era=max(plan.before.era + 1, follower.wall_s),
            partition_count=plan.to_count,
            tags=sender.tags,
        ),
    )
    fence = fence_of(change, sender=sender.fields(CHECKPOINT_GROUP))
    sent = follower.append(0, fence)
    follower.await_all([sent], timeout_ms)
    if sent.is_accepted:
        return change
    assert sent.transition is not None  # else the wait would have raised
    if sent.transition.reason == "busy":
        raise ClaimRejected(
            "a group was paused, or another change began, before this one; nothing was "
            "changed; see: marshal topic resize --dry-run, then repeat it",
            reason="busy",
        )
    raise sent.unwritable("the change", left="nothing was changed")


class Resize:
    """Continues the open change until it has ended in every partition. For one thread.

    Args:
        follower: Follows the log, and has read it to its end.
        clock: Local time.
        sender: The sender of its records.
        on_progress: Called about once a second, on this thread.
    """

    def __init__(
        self,
        follower: Follower,
        clock: Clock,
        *,
        sender: Sender,
        on_progress: OnResize = ignore_resize,
    ) -> None:
        self._follower, self._clock, self._sender = follower, clock, sender
        self._on_progress = on_progress
        self._moving = Moving()
        self._shown_ms: int | None = None

    def reading(self) -> Reading | None:
        """Return what was read of the open change, None once it has ended."""
        now_ms = self._clock.now_ms()
        replicas = self._follower.replicas
        return read(
            self._follower.by_partition,
            unread=self._follower.log_start_missing,
            elapsed_ms={t: one.elapsed_ms(now_ms) for t, one in replicas.items()},
            moving=self._moving,
        )

    def run(self, *, timeout_ms: int, step_ms: int) -> None:
        """Write what is next, until nothing is left.

        Args:
            timeout_ms: Longest time of all.
            step_ms: Longest wait for the verdicts of records.

        Raises:
            DeadlineExceeded: It has not ended in time, and can be continued.
            LogUnreadable: Two changes have one generation.
        """
        deadline_ms = self._clock.now_ms() + timeout_ms
        while (reading := self.reading()) is not None:
            steps = next_steps(reading)
            if steps.is_torn:
                raise LogUnreadable(
                    "coordinating partitions have the Configs of two changes of one "
                    "generation (torn_layout); compare them with: marshal topic info"
                )
            self._show(reading)
            left_ms = deadline_ms - self._clock.now_ms()
            if left_ms <= 0:
                raise DeadlineExceeded(_late(steps))
            sent = self._write(steps)
            if sent:
                self._follower.await_all(sent, step_ms)
            if not any(each.is_accepted for each in sent):
                self._follower.step(min(POLL_MS, left_ms))

    def _write(self, steps: Steps) -> list[Awaited]:
        sent = []
        for (partition, record), _ in zip(
            self._records(steps), range(IN_FLIGHT_MAX), strict=False
        ):
            sent.append(self._follower.append(partition, record))
        return sent

    def _records(self, steps: Steps) -> Iterator[tuple[int, Record]]:
        change = steps.change
        for t in sorted({*steps.fences, *steps.nudges}):
            yield t, fence_of(change, sender=self._fields())
        for t, lost in steps.earlier:
            yield t, fence_of(lost, sender=self._fields())
        for each in steps.imports:
            yield each.target, import_of(change, each, sender=self._fields())
        for group in steps.groups:
            record = groups_import_of(change, group, sender=self._fields())
            yield group.target, record
        for done in steps.dones:
            yield done.target, done_of(change, done, sender=self._fields())
        for final in steps.finals:
            yield final.partition, final_of(final, sender=self._fields())

    def _fields(self) -> dict[str, Any]:
        return self._sender.fields(CHECKPOINT_GROUP)

    def _show(self, reading: Reading) -> None:
        now_ms = self._clock.now_ms()
        if self._on_progress is ignore_resize:
            return
        if self._shown_ms is None or now_ms - self._shown_ms >= SHOW_MS:
            self._shown_ms = now_ms
            self._on_progress(progress_of(reading))


def _late(steps: Steps) -> str:
    waits = "; ".join(wait_text(wait) for wait in steps.waits[:WAITS_SHOWN_MAX])
    return (
        f"the change to {steps.change.to_count} coordinating partitions has begun and "
        f"has not ended in time; it waits for: {waits or 'the log'}; continue it with: "
        f"marshal topic resize --partitions {steps.change.to_count} --execute"
    )


class Resizing(AdminConnection):
    """Changes the number of coordinating partitions, as a part of ``Admin``."""

    def resize_topic(
        self,
        partition_count: int,
        *,
        execute: bool = False,
        ignore_members: bool = False,
        timeout_ms: int | None = None,
        on_progress: OnResize = ignore_resize,
    ) -> ResizePlan:
        """Change the number of coordinating partitions while members run.

        Keys that move are drained and brought to their new partition; all others notice
        nothing. If interrupted, a call with the same number continues, by any process.

        Args:
            partition_count: The new number: a multiple of the present one, or the other
                way round.
            execute: Whether to execute the plan.
            ignore_members: Whether to continue although live members do not follow.
            timeout_ms: Longest time of the whole change; by default long enough for the
                keys of owners that have died, and members that lag.
            on_progress: Called about once a second, on this thread.

        Returns:
            The plan, as of before the change.

        Raises:
            ConfigurationError: The number is not allowed.
            ClaimRejected: Something prevents the change; nothing was changed.
            DeadlineExceeded: The change has not ended in time; call it again.
        """
        follower = self._read()
        plan = plan_resize(
            follower,
            partition_count,
            now_ms=self._clock.now_ms(),
            wall_ms=self._clock.wall_ms(),
            ignore_members=ignore_members,
        )
        if not execute or not plan.is_needed:
            return plan
        plan.require()
        if plan.change is None:
            op_id = self._sender.new_op_id()
            follower = self._prepare(plan, op_id)
            write_first_fence(
                follower,
                plan,
                op_id=op_id,
                sender=self._sender,
                timeout_ms=self._timeout_ms,
            )
        follower = self._follow_all(max(plan.from_count, plan.to_count))
        resize = Resize(
            follower, self._clock, sender=self._sender, on_progress=on_progress
        )
        default_ms = plan.dead_owner_ms + FINAL_AFTER_MS + 2 * self._timeout_ms
        resize.run(timeout_ms=timeout_ms or default_ms, step_ms=self._timeout_ms)
        return plan

    def _prepare(self, plan: ResizePlan, op_id: bytes) -> Follower:
        """Add Kafka partitions and try them; return the follower of all."""
        if plan.added_count:
            self._add_partitions(plan.to_count)
        follower = self._follow_all(plan.to_count)
        added = range(plan.from_count, plan.to_count)
        probe(
            follower,
            added,
            op_id=op_id,
            sender=self._sender,
            timeout_ms=self._timeout_ms,
        )
        return follower

    def _add_partitions(self, count: int) -> None:
        topic = self._settings.coordination_topic
        self._topics.add_partitions(topic, count=count, timeout_ms=self._timeout_ms)

    def _follow_all(self, count: int) -> Follower:
        """Return a follower of so many partitions, which has read them to their ends.

        Raises:
            DeadlineExceeded: The cluster does not show them in time.
        """
        deadline_ms = self._clock.now_ms() + self._timeout_ms
        follower = self._follow()
        while len(follower.replicas) < count:
            if self._clock.now_ms() >= deadline_ms:
                raise DeadlineExceeded(
                    f"the coordination topic has {len(follower.replicas)} partitions, "
                    f"and {count} are needed; check the brokers with: marshal doctor, "
                    "then repeat the command"
                )
            follower = self._follow_again()
        follower.catch_up(self._timeout_ms)
        return follower
