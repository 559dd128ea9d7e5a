"""Overrides by an admin: replace a state, forget keys, raise the feature level.

Each is first planned, as plain values that can be shown, and then written
(PROTOCOL 3.3, 4.12, 7.6).
"""

import secrets
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import attrs
import msgspec
from msgspec import UNSET, UnsetType

from kafka_marshal.admin.pausing import Sender
from kafka_marshal.engine.checkpoint_reader import LogCheckpoints
from kafka_marshal.engine.follower import Follower
from kafka_marshal.engine.kept_states import KeptState
from kafka_marshal.engine.replica import Replica
from kafka_marshal.errors import ClaimRejected, ConfigurationError, LogUnwritable
from kafka_marshal.ports import CoordinationLog, LogRange
from kafka_marshal.protocol.checkpoints import checkpoint_key, split
from kafka_marshal.protocol.hashing import RESERVED_TOPICS, coordinating_partition
from kafka_marshal.protocol.placement import keys_of
from kafka_marshal.protocol.records import (
    SUPPORTED_LEVEL,
    Config,
    ForgettingPartition,
    Reset,
)
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import KeyState, WorldState
from kafka_marshal.protocol.types import Key

# Parts of a Reset in flight at once.
IN_FLIGHT_MAX = 8
# Records that drop keys in flight at once; they are small.
FORGETTING_IN_FLIGHT_MAX = 100


# --- replacing a state


class KeyChange(NamedTuple):
    """The effect of a Reset on one key.

    Attributes:
        key: The key.
        change: ``moved``, ``gone`` (not in the new state) or ``back``.
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
        """Whether offsets would be handed out or granted again."""
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
        ConfigurationError: There is no such checkpoint in the log.
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
    if found is None:
        which = "no complete checkpoint"
        which += "" if checkpoint_id is None else f" {checkpoint_id!r}"
        raise ConfigurationError(
            f"there is {which} of partition {partition} in the log from offset "
            f"{start} on; list checkpoints with: marshal log tail --partition "
            f"{partition}",
            setting="checkpoint",
        )
    return found


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
    """Return the effect of replacing a state by that of a checkpoint.

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
    if now is not None and then is not None and _is_of_earlier_topic(now, then):
        after = (None, None)
    if now is not None and then is not None and before == after:
        return None
    change = "back" if now is None else "gone" if then is None else "moved"
    return KeyChange(key, change, *before, *after)


def _is_of_earlier_topic(now: KeyState, then: KeyState) -> bool:
    """Return whether the next claim drops the position of ``then`` (PROTOCOL 4.3)."""
    return None not in {now.topic_id, then.topic_id} and now.topic_id != then.topic_id


def require_harmless(
    plan: StateResetPlan, *, allow_held: bool, allow_reprocess: bool
) -> None:
    """Refuse a Reset with effects on running clients that were not allowed.

    Raises:
        ClaimRejected: It would take keys from their owners, or hand out processed
            records again, and that is not allowed.
    """
    if plan.held and not allow_held:
        raise ClaimRejected(
            f"{len(plan.held)} keys of partition {plan.partition} are held, for "
            f"example {plan.held[0]}: stop their clients or pause their groups first, "
            "or override them with --force",
            reason="held",
        )
    if plan.repeats_count and not allow_reprocess:
        raise ClaimRejected(
            f"{plan.repeats_count} keys of partition {plan.partition} would go back, "
            "so that records are handed out again that were processed or granted at "
            "most once; allow_reprocess=True allows that",
            reason="reprocess",
        )


def write_state_reset(
    follower: Follower, kept: KeptState, *, sender: Sender, timeout_ms: int
) -> int:
    """Write a Reset; return the offset of its last part.

    Raises:
        LogUnwritable: The log refused it; the state is unchanged.
        DeadlineExceeded: No verdict in time. Sent parts may still be appended, and
            have no effect without the last part.
    """
    state = from_bytes(kept.state)
    # PROTOCOL 7.6: parts of an earlier Reset are not restored.
    state.staging = None
    state.rebuild_derived()
    value, state_digest = to_bytes(state), bytes.fromhex(digest(state))
    parts = split(value)
    op_id = secrets.token_bytes(16)
    offset = 0
    for first in range(0, len(parts), IN_FLIGHT_MAX):
        awaited = [
            follower.append(
                kept.partition,
                Reset(
                    **sender.fields("marshal"),
                    op_id=op_id,
                    number=number,
                    part_count=len(parts),
                    size_bytes=len(value),
                    digest=state_digest,
                    data=parts[number],
                ),
            )
            for number in range(first, min(first + IN_FLIGHT_MAX, len(parts)))
        ]
        follower.await_all(awaited, timeout_ms)
        for item in awaited:
            if item.transition is None or not item.is_accepted:
                raise item.unwritable("the reset", left="its state is unchanged")
            offset = item.transition.offset
    return offset


# --- forgetting keys


@attrs.frozen
class ForgetPlan:
    """The keys of a group to drop.

    Attributes:
        keys: Keys to drop, with their epochs.
        held: Keys with an owner that is not stale: they stay.
        existing: Topics that the cluster has: their keys stay unless that is allowed.
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
        existing: Topics among them whose keys stay.
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


def write_forgetting(
    follower: Follower, plan: ForgetPlan, *, sender: Sender, timeout_ms: int
) -> tuple[Key, ...]:
    """Drop the keys of a plan; return the dropped ones.

    Keys that changed after the plan was made stay.

    Raises:
        DeadlineExceeded: No verdict in time; records may still be appended.
    """
    worlds = follower.by_partition
    config = settled_config(worlds, 0)
    dropped: list[Key] = []
    for first in range(0, len(plan.keys), FORGETTING_IN_FLIGHT_MAX):
        some = plan.keys[first : first + FORGETTING_IN_FLIGHT_MAX]
        awaited = []
        for key, epoch in some:
            group_id, topic, number = key
            record = ForgettingPartition(
                **sender.fields(group_id),
                topic=topic,
                partition=number,
                epoch=epoch,
            )
            t = coordinating_partition(
                topic, number, partition_count=config.partition_count
            )
            awaited.append(follower.append(t, record))
        follower.await_all(awaited, timeout_ms)
        dropped += [
            key
            for (key, _), item in zip(some, awaited, strict=True)
            if item.is_accepted
        ]
    return tuple(dropped)


# --- raising the feature level


@attrs.frozen(kw_only=True)
class UpgradePlan:
    """The effect of an upgrade of the coordination topic.

    Attributes:
        level: Feature level in force, the lowest of all partitions.
        level_then: Level of this release.
        generation_then: Generation of the new Config.
        partitions: Partitions without the new Config.
        too_old: Live members whose release does not support the level.
    """

    level: int
    level_then: int
    generation_then: int
    partitions: tuple[int, ...]
    too_old: tuple[str, ...]


def plan_upgrade(worlds: Mapping[int, WorldState]) -> UpgradePlan:
    """Return the plan; coordinating partition 0 decides, others may lag behind it."""
    first = settled_config(worlds, 0)
    is_new = first.feature_level >= SUPPORTED_LEVEL
    generation = first.generation + (0 if is_new else 1)
    partitions = tuple(
        t
        for t in range(first.partition_count)
        if settled_config(worlds, t).generation < generation
    )
    too_old = sorted(
        f"{member.record.group_id}/{member.record.client_id}"
        for world in worlds.values()
        for group_id in {name[0] for name in world.soft.members}
        for member in world.live_members(group_id)
        if member.record.feature_level_max < SUPPORTED_LEVEL
    )
    levels = [
        settled_config(worlds, t).feature_level for t in range(first.partition_count)
    ]
    return UpgradePlan(
        level=min(levels),
        level_then=SUPPORTED_LEVEL,
        generation_then=generation,
        partitions=partitions,
        too_old=tuple(too_old),
    )


def settled_config(worlds: Mapping[int, WorldState], partition: int) -> Config:
    """Return the Config of a coordinating partition.

    Raises:
        ConfigurationError: It has none.
    """
    config = worlds[partition].config
    if config is None:
        raise ConfigurationError(
            f"partition {partition} is not formatted; run: marshal topic format",
            setting="coordination_topic",
        )
    return config


def require_members(plan: UpgradePlan) -> None:
    """Refuse an upgrade that would stop live members.

    Raises:
        ClaimRejected: Their releases do not support the level.
    """
    if plan.too_old:
        raise ClaimRejected(
            f"{len(plan.too_old)} live members would stop, for example "
            f"{plan.too_old[0]}: their release does not support feature level "
            f"{plan.level_then}; upgrade them first",
            reason="level",
        )


def write_upgrade(
    follower: Follower,
    plan: UpgradePlan,
    *,
    timeout_ms: int,
    tags: bytes | UnsetType = UNSET,
) -> Config:
    """Write the next Config, to coordinating partition 0 first; return it.

    Args:
        follower: Follows the log, and has read it to its end.
        plan: The plan.
        timeout_ms: Longest time of each step.
        tags: Tags of a new Config; an interrupted upgrade is completed with its own.

    Raises:
        LogUnwritable: A partition accepted another Config.
    """
    worlds = follower.by_partition
    config = settled_config(worlds, 0)
    if 0 in plan.partitions:
        config = msgspec.structs.replace(
            config,
            generation=plan.generation_then,
            era=max(config.era + 1, follower.wall_s),
            feature_level=plan.level_then,
            tags=tags,
        )
    write_config(follower, config, partitions=plan.partitions, timeout_ms=timeout_ms)
    return config


def write_config(
    follower: Follower, config: Config, *, partitions: Iterable[int], timeout_ms: int
) -> None:
    """Write a Config to partitions that are behind it, in order: the first decides.

    Args:
        follower: Follows the log, and has read it to its end.
        config: The Config.
        partitions: The partitions, partition 0 first.
        timeout_ms: Longest time of each step.

    Raises:
        LogUnwritable: A partition accepted another Config.
    """
    worlds = follower.by_partition
    for t in partitions:
        follower.await_all([follower.append(t, config)], timeout_ms)
        if worlds[t].config != config:
            raise LogUnwritable(
                f"coordinating partition {t} has another Config now; see: "
                "marshal topic info, then repeat the change"
            )
