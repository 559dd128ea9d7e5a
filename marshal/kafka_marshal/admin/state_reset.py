"""Overrides by an admin: replace a state, forget keys.

Each override is first planned, as plain values that can be shown, and then written
(PROTOCOL 4.12, 7.6).
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

import attrs

from kafka_marshal.admin.connection import AdminConnection
from kafka_marshal.admin.finishing import require_resolved
from kafka_marshal.arguments import require_name, with_plain_arguments
from kafka_marshal.counting import counted
from kafka_marshal.engine.checkpoint_reader import LogCheckpoints
from kafka_marshal.engine.kept_states import KeptState
from kafka_marshal.engine.replica import Replica
from kafka_marshal.errors import ClaimRejected, ConfigurationError
from kafka_marshal.kafka_io.transport import open_coordination_log
from kafka_marshal.ports import CoordinationLog, LogRange
from kafka_marshal.protocol.checkpoints import checkpoint_key, split
from kafka_marshal.protocol.hashing import RESERVED_TOPICS, coordinating_partition
from kafka_marshal.protocol.placement import keys_of
from kafka_marshal.protocol.records import ForgettingPartition, Reset
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import KeyState, WorldState
from kafka_marshal.protocol.types import Key, may_be_same_topic

# Parts of a Reset in flight at once.
IN_FLIGHT_MAX = 8
# Records that drop keys in flight at once; they are small.
FORGETTING_IN_FLIGHT_MAX = 100


# --- replacing a state


class KeyChange(NamedTuple):
    """The effect of a Reset on one key.

    Attributes:
        key: The key.
        change: ``moved``, ``gone`` (not in the new state) or ``back`` (only in it).
        position: Next offset to process now, None if unknown.
        granted: First offset above all grants now, None if unknown.
        position_then: Position after the Reset.
        granted_then: First offset above all grants after the Reset.
    """

    key: Key
    change: str
    position: int | None
    granted: int | None
    position_then: int | None
    granted_then: int | None

    @property
    def repeats(self) -> bool:
        """Whether the Reset causes offsets to be handed out or granted again."""
        is_below = (self.position_then or 0) < (self.position or 0)
        return is_below or (self.granted_then or 0) < (self.granted or 0)


@attrs.frozen(kw_only=True)
class StateResetPlan:
    """The effect of a Reset of one coordinating partition.

    Attributes:
        partition: The coordinating partition.
        checkpoint_id: The checkpoint to restore, in hex.
        offset: First offset after the state of the checkpoint.
        next_offset: End of the log now.
        held: Keys with an owner that is not stale.
        changes: Keys that are added, removed or whose positions change.
    """

    partition: int
    checkpoint_id: str
    offset: int
    next_offset: int
    held: tuple[Key, ...]
    changes: tuple[KeyChange, ...]

    @property
    def repeats_count(self) -> int:
        """Number of keys with offsets that would be handed out again."""
        return sum(change.repeats for change in self.changes)


def find_checkpoint(
    log: CoordinationLog, partition: int, *, checkpoint_id: str | None, timeout_ms: int
) -> KeptState:
    """Return a complete checkpoint of a coordinating partition, by default the newest.

    Raises:
        ConfigurationError: There is no such partition, or no such checkpoint.
        ClaimRejected: There is no complete checkpoint at all.
    """
    if not 0 <= partition < log.partition_count:
        raise ConfigurationError(
            f"partition must be 0 to {log.partition_count - 1}, not {partition}; see: "
            "marshal topic info",
            setting="partition",
        )
    start = log.start_offsets(timeout_ms)[partition]
    end = log.end_offsets(timeout_ms)[partition]
    source = LogCheckpoints(None if checkpoint_id is None else _id(checkpoint_id))
    wanted = {partition: LogRange(start, end)}
    found = source.find(wanted, log=log, timeout_ms=timeout_ms).get(partition)
    if found is not None:
        return found
    which = "" if checkpoint_id is None else f" {checkpoint_id!r}"
    why = (
        f"there is no complete checkpoint{which} of partition {partition} in the log "
        f"from offset {start} on; list checkpoints with: marshal log tail --partition "
        f"{partition} --from start --type CheckpointEnd"
    )
    if checkpoint_id is None:
        raise ClaimRejected(why, reason="no_checkpoint")
    raise ConfigurationError(why, setting="checkpoint")


def _id(checkpoint_id: str) -> bytes:
    try:
        value = bytes.fromhex(checkpoint_id)
    except ValueError:
        value = b""
    if len(value) != 16:  # noqa: PLR2004 - an id's bytes
        raise ConfigurationError(
            f"checkpoint must be 32 hex digits, not {checkpoint_id!r}",
            setting="checkpoint",
        )
    return value


def plan_state_reset(
    replica: Replica, kept: KeptState, *, now_ms: int
) -> StateResetPlan:
    """Return the effect of replacing a state by the state of a checkpoint.

    Args:
        replica: The coordinating partition, folded to its end.
        kept: The checkpoint.
        now_ms: Local time, to estimate which owners are stale.
    """
    world, then = replica.world, from_bytes(kept.state)
    own = checkpoint_key(world.partition)
    keys = sorted((world.keys.keys() | then.keys.keys()) - {own})
    changes = [
        change
        for key in keys
        if (change := _change(key, world.keys.get(key), then.keys.get(key)))
    ]
    return StateResetPlan(
        partition=world.partition,
        checkpoint_id=kept.source.rpartition(" ")[2],
        offset=kept.offset,
        next_offset=world.next_offset,
        held=tuple(sorted(key for key, _ in replica.held(now_ms) if key != own)),
        changes=tuple(changes),
    )


def _change(key: Key, now: KeyState | None, then: KeyState | None) -> KeyChange | None:
    before = (None, None) if now is None else (now.position, now.granted)
    after = (None, None) if then is None else (then.position, then.granted)
    if now is not None and then is not None:
        if not may_be_same_topic(now.topic_id, then.topic_id):
            after = (None, None)  # the next claim drops them (PROTOCOL 4.3)
        if before == after:
            return None
    change = "back" if now is None else "gone" if then is None else "moved"
    return KeyChange(key, change, *before, *after)


def require_harmless(
    plan: StateResetPlan, *, allow_held: bool, allow_reprocess: bool
) -> None:
    """Refuse a Reset with effects on running clients that were not allowed.

    Raises:
        ClaimRejected: The Reset would take keys from their owners, or hand out
            processed records again, and that is not allowed.
    """
    if plan.held and not allow_held:
        key, of = plan.held[0], f"of partition {plan.partition}"
        held = counted(len(plan.held), f"key {of} is held", many=f"keys {of} are held")
        raise ClaimRejected(
            f"{held}, for example {key.topic_partition} of group {key.group_id!r}: "
            "stop their clients or pause their groups first, or override them with "
            "--force",
            reason="held",
        )
    if plan.repeats_count and not allow_reprocess:
        raise ClaimRejected(
            f"{counted(plan.repeats_count, 'key')} of partition {plan.partition} would "
            "go back, so that records are handed out again that were processed "
            "or granted at most once; allow_reprocess=True allows that",
            reason="reprocess",
        )


# --- forgetting keys


@attrs.frozen
class ForgetPlan:
    """The keys of a group to drop.

    Attributes:
        keys: Keys to drop, with their epochs.
        held: Keys with an owner that is not stale: they stay.
        existing: Topics that still exist in the cluster: their keys stay. Empty if such
            keys may be dropped.
    """

    keys: tuple[tuple[Key, int], ...]
    held: tuple[Key, ...]
    existing: tuple[str, ...]


def topics_of(
    worlds: Iterable[WorldState], group_id: str, *, topic: str | None
) -> list[str]:
    """Return the data topics of a group's keys, in order."""
    every = {key.topic for key in keys_of(worlds, group_id)}
    wanted = every if topic is None else every & {topic}
    return sorted(wanted - RESERVED_TOPICS)


def plan_forgetting(
    replicas: Iterable[Replica],
    group_id: str,
    *,
    topics: Collection[str],
    existing: Collection[str],
    now_ms: int,
) -> ForgetPlan:
    """Return which keys of a group can be dropped.

    Args:
        replicas: The log, folded to its end.
        group_id: The group.
        topics: Only these topics.
        existing: Topics whose keys stay.
        now_ms: Local time, to estimate which owners are stale.
    """
    keys: list[tuple[Key, int]] = []
    held: list[Key] = []
    for replica in replicas:
        owned = {key for key, _ in replica.held(now_ms)}
        for key, known in replica.world.keys.items():
            if key.group_id != group_id or key.topic not in topics:
                continue
            if key in owned:
                held.append(key)
            elif key.topic not in existing:
                keys.append((key, known.epoch))
    return ForgetPlan(tuple(sorted(keys)), tuple(sorted(held)), tuple(sorted(existing)))


class Overriding(AdminConnection):
    """Overrides of a state, as a part of ``Admin``; for one thread."""

    @with_plain_arguments
    def reset_state(
        self,
        partition: int,
        *,
        checkpoint_id: str | None = None,
        execute: bool = False,
        allow_held: bool = False,
        allow_reprocess: bool = False,
    ) -> StateResetPlan:
        """Replace the state of a coordinating partition by the state of a checkpoint.

        Args:
            partition: The coordinating partition.
            checkpoint_id: Id of the checkpoint, in hex; None for the newest.
            execute: Whether to execute the plan.
            allow_held: Whether to take keys away from live clients.
            allow_reprocess: Whether records may be handed out again.

        Raises:
            ClaimRejected: There is no checkpoint; or the Reset would take keys away or
                repeat records, and that is not allowed; or an operation that sets
                positions is not resolved.
        """
        log = open_coordination_log(
            self._settings, heartbeat_interval_ms=None, timeout_ms=self._timeout_ms
        )
        try:
            kept = find_checkpoint(
                log,
                partition,
                checkpoint_id=checkpoint_id,
                timeout_ms=self._timeout_ms,
            )
        finally:
            log.close(self._timeout_ms)
        follower = self._read()
        replica, now_ms = follower.replicas[partition], self._clock.now_ms()
        plan = plan_state_reset(replica, kept, now_ms=now_ms)
        if execute:
            require_resolved(follower.worlds)
            require_harmless(
                plan, allow_held=allow_held, allow_reprocess=allow_reprocess
            )
            self._write_state(kept)
        return plan

    @with_plain_arguments
    def forget_keys(
        self,
        group_id: str,
        *,
        topic: str | None = None,
        execute: bool = False,
        allow_existing: bool = False,
    ) -> ForgetPlan:
        """Drop keys of a group without an owner, with their positions and grants.

        Args:
            group_id: The group.
            topic: Only keys of this data topic.
            execute: Whether to execute the plan.
            allow_existing: Whether to drop keys of topics that still exist in the
                cluster. The group then starts as if it had never read these topics, so
                records are processed again, also under at most once.

        Returns:
            The keys that were dropped, or would be.

        Raises:
            ConfigurationError: The topic has a feature level below 2.
            ClaimRejected: The log has no keys of the group in these topics.
        """
        require_name("group_id", group_id)
        config = self._settled()
        topics = topics_of(self._follow().worlds, group_id, topic=topic)
        if not topics:
            of_topic = "" if topic is None else f" of topic {topic!r}"
            raise ClaimRejected(
                f"group {group_id!r} has no keys{of_topic} in the log; see: marshal "
                f"claims list --group {group_id}",
                reason="unknown_key",
            )
        existing = []
        if not allow_existing:
            existing = [t for t in topics if self.partition_count(t) is not None]
        follower, now_ms = self._follow(), self._clock.now_ms()
        plan = plan_forgetting(
            follower.replicas.values(),
            group_id,
            topics=topics,
            existing=existing,
            now_ms=now_ms,
        )
        if execute:
            done = self._forget(plan, config.partition_count)
            keys = tuple(each for each in plan.keys if each[0] in done)
            plan = attrs.evolve(plan, keys=keys)
        return plan

    def _write_state(self, kept: KeptState) -> int:
        """Write a Reset; return the offset of its last part.

        Raises:
            LogUnwritable: The log refused the Reset; the state is unchanged.
            DeadlineExceeded: No verdict in time. Sent parts may still be appended; they
                have no effect without the last part.
        """
        state = from_bytes(kept.state)
        # PROTOCOL 7.6: parts of an earlier Reset are not restored.
        state.staging = None
        state.rebuild_derived()
        value, state_digest = to_bytes(state), bytes.fromhex(digest(state))
        parts = split(value)
        op_id = self._sender.new_op_id()
        offset = 0
        for first in range(0, len(parts), IN_FLIGHT_MAX):
            records = [
                Reset(
                    **self._sender.fields("marshal"),
                    op_id=op_id,
                    number=number,
                    part_count=len(parts),
                    size_bytes=len(value),
                    digest=state_digest,
                    data=parts[number],
                )
                for number in range(first, min(first + IN_FLIGHT_MAX, len(parts)))
            ]
            for item in self._write(*((kept.partition, each) for each in records)):
                if item.transition is None or not item.is_accepted:
                    raise item.unwritable("the reset", left="its state is unchanged")
                offset = item.transition.offset
        return offset

    def _forget(self, plan: ForgetPlan, partition_count: int) -> tuple[Key, ...]:
        """Drop the keys of a plan; return the dropped ones.

        Keys that changed after the plan was made stay.
        """
        dropped: list[Key] = []
        for first in range(0, len(plan.keys), FORGETTING_IN_FLIGHT_MAX):
            some = plan.keys[first : first + FORGETTING_IN_FLIGHT_MAX]
            records = []
            for (group_id, topic, number), epoch in some:
                record = ForgettingPartition(
                    **self._sender.fields(group_id),
                    topic=topic,
                    partition=number,
                    epoch=epoch,
                )
                place = coordinating_partition(
                    topic, number, partition_count=partition_count
                )
                records.append((place, record))
            for (key, _), item in zip(some, self._write(*records), strict=True):
                if item.is_accepted:
                    dropped.append(key)
        return tuple(dropped)
