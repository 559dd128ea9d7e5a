"""Changes of the number of coordinating partitions by an admin (PROTOCOL 10).

The fence of coordinating partition 0 is the commit point. Nothing that is written
before it affects a later change. After it the change only goes forward, and any process
can continue it: an admin that runs the same command, or members. So a change that could
not end, or would lose something, is refused before anything is written. All of that is
judged from one reading of the log.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import attrs
import msgspec

from kafka_marshal.admin.connection import AdminConnection
from kafka_marshal.admin.pausing import ignore_progress
from kafka_marshal.arguments import to_whole, with_plain_arguments
from kafka_marshal.counting import counted
from kafka_marshal.deadline import Deadline
from kafka_marshal.defaults import format_command
from kafka_marshal.engine.config_check import unformatted
from kafka_marshal.engine.follower import Follower
from kafka_marshal.engine.kept_states import POLL_MS
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    DeadlineExceeded,
    LogUnreadable,
)
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP, RESERVED_TOPICS
from kafka_marshal.protocol.labels import LAYOUT_LABEL
from kafka_marshal.protocol.layout import COUNT_MAX, is_step, place_of
from kafka_marshal.protocol.layout_reading import (
    Change,
    LayoutProgress,
    Moving,
    Reading,
    is_over,
    is_torn,
    members_of,
    progress_of,
    read,
)
from kafka_marshal.protocol.layout_steps import (
    FINAL_AFTER_MS,
    Steps,
    Wait,
    done_of,
    fence_of,
    fences_of,
    final_of,
    groups_import_of,
    import_of,
    next_steps,
)
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.records import (
    SECOND_LEVEL,
    SUPPORTED_LEVEL,
    Config,
    Member,
    Record,
)
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.text import abbreviated

IN_FLIGHT_MAX = 64
"""Most records that are appended before their verdicts are waited for."""
SHOW_MS = 1_000
"""How often progress is shown."""
WAITS_SHOWN_MAX = 5
OnResize = Callable[[LayoutProgress], None]


@attrs.frozen(kw_only=True)
class Move:
    """Keys that move from one coordinating partition to another.

    Attributes:
        source: The coordinating partition that has them.
        target: The partition that gets them by the new number.
        key_count: Number of keys.
        held_count: Number of keys with an owner that is not stale, by estimate.
    """

    source: int
    target: int
    key_count: int
    held_count: int


@attrs.frozen(kw_only=True)
class Obstacle:
    """A reason not to begin a change.

    Attributes:
        reason: One word: ``busy``, ``torn``, ``level``, ``unread``, ``paused``,
            ``unresolved``, ``members`` or ``limits``.
        text: What prevents the change, and which command to run.
    """

    reason: str
    text: str


@attrs.frozen(kw_only=True)
class ResizePlan:
    """The effect of a change of the number of coordinating partitions.

    Attributes:
        before: The Config of coordinating partition 0 now.
        to_count: The number after the change.
        change: The open change, which is continued if it is to that number; else None.
        moves: Keys that move, by source and target.
        obstacles: Reasons not to begin, or continue, the change; empty without any.
        lagging: Group and client_id of live members that do not follow a change.
        partition_count: Number of Kafka partitions of the coordination topic.
    """

    before: Config
    to_count: int
    change: Change | None
    moves: tuple[Move, ...]
    obstacles: tuple[Obstacle, ...]
    lagging: tuple[tuple[str, str], ...]
    partition_count: int

    @property
    def from_count(self) -> int:
        """The number before the change."""
        if self.change is not None:
            return self.change.from_count
        return self.before.partition_count

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do."""
        return self.change is not None or self.from_count != self.to_count

    @property
    def added_count(self) -> int:
        """Number of Kafka partitions to add to the topic first."""
        return max(0, self.to_count - self.partition_count)

    @property
    def moving_count(self) -> int:
        """Number of keys that move."""
        return sum(move.key_count for move in self.moves)

    @property
    def dead_owner_ms(self) -> int:
        """Longest time that a moving key is unusable if its owner has died.

        A key of a live owner is unusable for three round trips, after the owner has
        finished its uncommitted records.
        """
        return 2 * self.before.heartbeat_interval_ms

    def require(self) -> None:
        """Refuse a change that has obstacles.

        Raises:
            ClaimRejected: Names the first obstacle, and the number of all others.
        """
        if not self.obstacles:
            return
        first, *others = self.obstacles
        more = f" (and {len(others)} more: see --dry-run)" if others else ""
        raise ClaimRejected(f"{first.text}{more}", reason=first.reason)


def plan_resize(
    follower: Follower,
    to_count: int,
    *,
    now_ms: int,
    wall_ms: int,
    ignore_members: bool = False,
) -> ResizePlan:
    """Return the plan of a change; an open one to the same number is continued.

    Args:
        follower: Follows the log, and has read it to its end.
        to_count: The new number of coordinating partitions.
        now_ms: Local time.
        wall_ms: Wall time, to estimate, with ``now_ms``, which owners and members have
            gone.
        ignore_members: Whether to begin although live members do not follow.

    Raises:
        ConfigurationError: The number is not allowed.
        TopicMisconfigured: The topic is not formatted.
    """
    worlds = follower.by_partition
    before = worlds[0].config
    if before is None:
        raise unformatted(worlds.values(), follower.topic)
    change = _open_change(follower, to_count)
    elapsed_ms = {
        t: max(replica.elapsed_ms(now_ms), wall_ms - replica.world.append_time_ms)
        for t, replica in follower.replicas.items()
    }
    lagging = _lagging(worlds.values(), elapsed_ms)
    moves: tuple[Move, ...] = ()
    obstacles: list[Obstacle] = []
    if change is not None:
        obstacles += _torn(worlds, change)
        if change.to_count != to_count:
            obstacles.append(_busy(change))
    elif to_count != before.partition_count:
        _require_count(before.partition_count, to_count)
        moves = _moves(worlds, before.partition_count, to_count, elapsed_ms=elapsed_ms)
        obstacles += [
            *_topic_obstacles(follower, before, to_count),
            *_group_obstacles(worlds, before.partition_count, elapsed_ms),
            *([] if ignore_members else _members(lagging)),
            *_limits(worlds, before, to_count),
        ]
    return ResizePlan(
        before=before,
        to_count=to_count,
        change=change,
        moves=moves,
        obstacles=tuple(obstacles),
        lagging=lagging,
        partition_count=len(worlds),
    )


def _open_change(follower: Follower, to_count: int) -> Change | None:
    """Return the change that is open, None without one.

    A change that partition 0 has ended is still open if the same number is wanted, or
    if a partition lacks its fence; not if partition 0 has a later Config. All else that
    it has left is done by the fence of the next change (PROTOCOL 10.2).
    """
    worlds = follower.by_partition
    reading = read(worlds, unread=follower.log_start_missing)
    if reading is None:
        return None
    change, first = reading.change, worlds[0].config
    if first is None or not is_over(reading.known, change):
        return change
    if first.generation > change.generation:
        return None
    return None if change.to_count != to_count and not fences_of(reading) else change


def _require_count(from_count: int, to_count: int) -> None:
    to_whole("partition_count", to_count)
    if not 1 <= to_count <= COUNT_MAX:
        raise ConfigurationError(
            f"partitions must be 1 to {COUNT_MAX}, not {to_count}",
            setting="partition_count",
        )
    if not is_step(from_count, to_count):
        raise ConfigurationError(
            f"the number of coordinating partitions cannot change from {from_count} to "
            f"{to_count}: one must be a multiple of the other, for example "
            f"{2 * from_count}; other numbers take two changes",
            setting="partition_count",
        )


def _torn(worlds: Mapping[int, WorldState], change: Change) -> list[Obstacle]:
    if not is_torn(worlds, change):
        return []
    text = (
        "coordinating partitions disagree on the layout (torn_layout): they have the "
        "Configs of two changes of one generation, and nobody can claim safely; "
        "compare them with: marshal topic info"
    )
    return [Obstacle(reason="torn", text=text)]


def _busy(change: Change) -> Obstacle:
    text = (
        f"a change from {change.from_count} to {change.to_count} coordinating "
        f"partitions is open; complete it first: marshal topic resize --partitions "
        f"{change.to_count} --execute"
    )
    return Obstacle(reason="busy", text=text)


def _topic_obstacles(
    follower: Follower, before: Config, to_count: int
) -> list[Obstacle]:
    """Return the obstacles to any change of this topic."""
    found = []
    if before.feature_level < SECOND_LEVEL:
        text = (
            f"a change needs feature level {SECOND_LEVEL}, and the topic has "
            f"{before.feature_level}; run: marshal topic upgrade --execute"
        )
        found.append(Obstacle(reason="level", text=text))
    concerned = range(max(before.partition_count, to_count))
    unread = [t for t in concerned if _is_unread(follower, t, before)]
    if unread:
        text = (
            f"the state of coordinating partitions {unread} is not known, since their "
            "logs have lost their beginning, or need a newer release; see: marshal "
            "doctor"
        )
        found.append(Obstacle(reason="unread", text=text))
    worlds = follower.by_partition
    return [*found, *_config_obstacles(worlds, before, topic=follower.topic)]


def _is_unread(follower: Follower, partition: int, before: Config) -> bool:
    """Return whether a partition's state is unknown in a way that prevents a change.

    The state of a partition that comes into use does not matter, because it begins with
    the fence, unless the rest of its log shows a later Config than partition 0 has.
    """
    replica = follower.replicas.get(partition)
    if replica is not None and replica.world.halted is not None:
        return True
    if partition not in follower.log_start_missing:
        return False
    config = None if replica is None else replica.world.config
    is_ahead = config is not None and config.generation > before.generation
    return is_ahead or partition < before.partition_count


def _config_obstacles(
    worlds: Mapping[int, WorldState], before: Config, *, topic: str
) -> Iterator[Obstacle]:
    """Yield obstacles: partitions that would not, or should not, accept the fence."""
    torn, ahead, below = [], [], []
    for t in range(before.partition_count):
        config = worlds[t].config if t in worlds else None
        if config is None or config.format_id != before.format_id:
            torn.append(t)
        elif config.generation > before.generation:
            ahead.append(t)
        elif config.generation == before.generation:
            if config.partition_count != before.partition_count:
                ahead.append(t)
        elif config.feature_level < SECOND_LEVEL:
            below.append(t)
    if torn:
        text = (
            f"torn_format: coordinating partitions {torn} disagree with partition 0 "
            f"on the format; run: {format_command(topic)}"
        )
        yield Obstacle(reason="torn", text=text)
    if ahead:
        text = (
            f"coordinating partitions {ahead} have a later Config than partition 0, "
            "which has lost records at the end of its log: a change would be a second "
            "one of that generation; compare them with: marshal topic info"
        )
        yield Obstacle(reason="torn", text=text)
    if below:
        text = (
            f"coordinating partitions {below} have an earlier feature level than "
            f"partition 0; to complete its upgrade, run: {format_command(topic)}"
        )
        yield Obstacle(reason="level", text=text)


def _group_obstacles(
    worlds: Mapping[int, WorldState], from_count: int, elapsed_ms: Mapping[int, int]
) -> list[Obstacle]:
    """Return the obstacles of groups: pauses, which do not move, and set positions.

    A pause that the next record would end does not count: in an idle partition, that
    record may be the fence.
    """
    paused: set[str] = set()
    unresolved: set[str] = set()
    for t in range(min(from_count, len(worlds))):
        unresolved |= {group_id for group_id, _ in worlds[t].locked}
        wall_ms = worlds[t].append_time_ms + elapsed_ms[t]
        for group_id, group in worlds[t].groups.items():
            ends = [each.until_ms for each in group.pauses]
            ends += [each.until_ms for each in group.scheduled]
            if any(wall_ms < until_ms for until_ms in ends):
                paused.add(group_id)
            if group.unresolved:
                unresolved.add(group_id)
    found = []
    if paused:
        named = abbreviated(sorted(paused))
        text = (
            f"groups are paused, or will be: {named}; a change would let a "
            f"pause end early; end it with: marshal groups resume {min(paused)}"
        )
        found.append(Obstacle(reason="paused", text=text))
    if unresolved:
        named = abbreviated(sorted(unresolved))
        text = (
            f"positions of groups are being set: {named}; end that with: "
            f"marshal groups finish {min(unresolved)}"
        )
        found.append(Obstacle(reason="unresolved", text=text))
    return found


def _lagging(
    worlds: Iterable[WorldState], elapsed_ms: Mapping[int, int]
) -> tuple[tuple[str, str], ...]:
    """Return live members that do not announce the generation that they act on."""
    return tuple(
        sorted(
            {
                (group_id, client_id)
                for (group_id, client_id, _), member in members_of(
                    worlds, elapsed_ms
                ).items()
                if LAYOUT_LABEL not in member.record.labels
            }
        )
    )


def _members(lagging: Sequence[tuple[str, str]]) -> list[Obstacle]:
    if not lagging:
        return []
    members = counted(len(lagging), "live member does", many="live members do")
    text = (
        f"{members} not follow a change, for example "
        f"{'/'.join(lagging[0])}: their release is too old, and they would claim "
        "nothing any more; upgrade them first, or leave them behind with "
        "--ignore-members"
    )
    return [Obstacle(reason="members", text=text)]


def _moves(
    worlds: Mapping[int, WorldState],
    from_count: int,
    to_count: int,
    *,
    elapsed_ms: Mapping[int, int],
) -> tuple[Move, ...]:
    every: Counter[tuple[int, int]] = Counter()
    held: Counter[tuple[int, int]] = Counter()
    for t in range(min(from_count, len(worlds))):
        world = worlds[t]
        log_ms = world.now_ms + elapsed_ms[t]
        for key, known in world.keys.items():
            if key.topic in RESERVED_TOPICS:
                continue
            pair = world.partition, place_of(key, partition_count=to_count)
            if pair[0] == pair[1]:
                continue
            every[pair] += 1
            if known.owner is not None:
                held[pair] += known.freshness(log_ms) is not Freshness.STALE
    return tuple(
        Move(source=source, target=target, key_count=count, held_count=held[pair])
        for pair, count in sorted(every.items())
        for source, target in [pair]
    )


def _limits(
    worlds: Mapping[int, WorldState], before: Config, to_count: int
) -> list[Obstacle]:
    """Return the obstacles of partitions that would exceed limits of keys or groups."""
    found = []
    for target in range(min(to_count, before.partition_count)):
        every = range(target, before.partition_count, to_count)
        own = [worlds[t] for t in every if t in worlds]
        counts = {
            "keys": sum(len(world.keys) for world in own),
            "groups": len({name for world in own for name in world.groups}),
        }
        for name, count in counts.items():
            if count > before.limit(name):
                text = (
                    f"coordinating partition {target} would have {count} {name}, and "
                    f"the limit is {before.limit(name)}; raise it first: marshal topic "
                    f"alter --limit {name}={count} --execute"
                )
                found.append(Obstacle(reason="limits", text=text))
    return found


def wait_text(wait: Wait) -> str:
    """Return what a change waits for, as a phrase."""
    left = "" if wait.left_ms is None else f", for up to {wait.left_ms} ms"
    match wait.reason:
        case "owned":
            what = f"{counted(wait.key_count, 'key')} of client {wait.client_id!r}"
        case "unresolved":
            locked = counted(wait.key_count, "locked key")
            what = f"positions that are being set ({locked})"
        case "quiet":
            what = "the quiet time of a reset"
        case "adoption":
            what = "members that act on the previous number of partitions"
        case "behind":
            what = "records that its log has lost"
        case _:
            what = "its state, which is not known here"
    return f"partition {wait.partition}: {what}{left}"


def _late(steps: Steps) -> str:
    waits = "; ".join(wait_text(wait) for wait in steps.waits[:WAITS_SHOWN_MAX])
    return (
        f"the change to {steps.change.to_count} coordinating partitions has begun and "
        f"has not ended in time; it waits for: {waits or 'the log'}; continue it with: "
        f"marshal topic resize --partitions {steps.change.to_count} --execute"
    )


class Resizing(AdminConnection):
    """Changes the number of coordinating partitions, as a part of ``Admin``."""

    @with_plain_arguments
    def resize_topic(
        self,
        partition_count: int,
        *,
        execute: bool = False,
        ignore_members: bool = False,
        timeout_ms: int | None = None,
        on_progress: OnResize = ignore_progress,
    ) -> ResizePlan:
        """Change the number of coordinating partitions while members run.

        Keys that move are drained and imported into their new partition; all other keys
        are not affected. After an interruption, any process can continue by a call with
        the same number.

        Args:
            partition_count: The new number, a multiple or a divisor of the present one.
            execute: Whether to execute the plan.
            ignore_members: Whether to begin although live members do not follow.
            timeout_ms: Longest time of the whole change; by default long enough for the
                keys of owners that have died, and for members that lag.
            on_progress: Called about once a second, on this thread.

        Returns:
            The plan, as it was before the change.

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
            if plan.added_count:
                self._add_partitions(plan.to_count)
            self._follow_all(plan.to_count)
            self._probe(range(plan.from_count, plan.to_count), op_id)
            self._write_first_fence(plan, op_id)
        self._follow_all(max(plan.from_count, plan.to_count))
        default_ms = plan.dead_owner_ms + FINAL_AFTER_MS + 2 * self._timeout_ms
        self._continue(timeout_ms or default_ms, on_progress=on_progress)
        return plan

    def _probe(self, partitions: range, op_id: bytes) -> None:
        """Append a record to partitions that come into use, and read it back.

        This proves that both are possible. The partitions are not in use yet, so the
        record has no effect, and a change that is given up does not shut out a later
        one. The record names the change. A reader that has read it knows that the next
        fence is the first of all, with which the partition begins, whatever its log has
        lost before (PROTOCOL 10.7).

        Raises:
            DeadlineExceeded: A record was not read back in time.
            LogUnwritable: The broker refuses to append to one of the partitions.
        """
        record = Member(
            **self._sender.fields(CHECKPOINT_GROUP) | {"incarnation": op_id},
            topics=(),
            host=self._sender.host,
            capacity=0,
            load=0,
            labels={},
            draining=True,
            feature_level_max=SUPPORTED_LEVEL,
            plan_generation=None,
        )
        self._write(*((t, record) for t in partitions))

    def _write_first_fence(self, plan: ResizePlan, op_id: bytes) -> None:
        """Write the fence of coordinating partition 0, which decides.

        Raises:
            ClaimRejected: Partition 0 now has a pause, a set position or a change.
            LogUnwritable: The Config of partition 0 was changed meanwhile.
            DeadlineExceeded: No verdict in time. The fence may still be appended.
        """
        change = Change(
            op_id=op_id,
            from_count=plan.before.partition_count,
            config=msgspec.structs.replace(
                plan.before,
                generation=plan.before.generation + 1,
                era=max(plan.before.era + 1, self._follow().wall_s),
                partition_count=plan.to_count,
                tags=self._sender.tags,
            ),
        )
        (sent,) = self._write((0, fence_of(change, sender=self._fields())))
        if sent.is_accepted:
            return
        assert sent.transition is not None  # else the wait would have raised
        if sent.transition.reason == "busy":
            raise ClaimRejected(
                "a group was paused, or another change began, before this one; nothing "
                "was changed; see: marshal topic resize --dry-run, then repeat it",
                reason="busy",
            )
        left = (
            "nothing was changed; another admin may have changed its Config meanwhile, "
            "or the clock of this machine is more than a day ahead of the brokers: see "
            "marshal doctor"
        )
        raise sent.unwritable("the change", left=left)

    def _continue(self, timeout_ms: int, *, on_progress: OnResize) -> None:
        """Write the next records of the open change, until it has ended everywhere.

        Raises:
            DeadlineExceeded: The change has not ended in time, and can be continued.
            LogUnreadable: Two changes have one generation.
        """
        follower, clock, moving = self._follow(), self._clock, Moving()
        deadline, shown_ms = Deadline(timeout_ms, clock.now_ms), None
        while (reading := self._reading(moving)) is not None:
            steps = next_steps(reading)
            if steps.is_torn:
                raise LogUnreadable(
                    "coordinating partitions disagree on the layout (torn_layout): "
                    "they have the Configs of two changes of one generation; compare "
                    "them with: marshal topic info"
                )
            now_ms = clock.now_ms()
            if on_progress is not ignore_progress and (
                shown_ms is None or now_ms - shown_ms >= SHOW_MS
            ):
                shown_ms = now_ms
                on_progress(progress_of(reading))
            if deadline.is_over:
                raise DeadlineExceeded(_late(steps))
            sent = self._write(*islice(self._records(steps), IN_FLIGHT_MAX))
            if not any(each.is_accepted for each in sent):
                follower.step(min(POLL_MS, deadline.left_ms))

    def _reading(self, moving: Moving) -> Reading | None:
        """Return the open change as far as it was read, None once it has ended."""
        follower, now_ms = self._follow(), self._clock.now_ms()
        return read(
            follower.by_partition,
            unread=follower.log_start_missing,
            elapsed_ms={
                t: one.elapsed_ms(now_ms) for t, one in follower.replicas.items()
            },
            moving=moving,
        )

    def _records(self, steps: Steps) -> Iterator[tuple[int, Record]]:
        change = steps.change
        for t in sorted({*steps.fences, *steps.repeat_fences}):
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

    def _add_partitions(self, count: int) -> None:
        topic = self._settings.coordination_topic
        self._topics.add_partitions(topic, count=count, timeout_ms=self._timeout_ms)

    def _follow_all(self, count: int) -> None:
        """Follow at least this number of partitions, and read them to their ends.

        Raises:
            DeadlineExceeded: The cluster does not show the partitions in time.
        """
        deadline = Deadline(self._timeout_ms, self._clock.now_ms)
        follower = self._follow()
        while len(follower.replicas) < count:
            if deadline.is_over:
                found = counted(len(follower.replicas), "partition")
                raise DeadlineExceeded(
                    f"the coordination topic has {found}, and {count} are needed; "
                    "check the brokers with: marshal doctor, then repeat the command"
                )
            follower = self._follow_again()
        follower.catch_up(self._timeout_ms)
