"""What only an admin does to a log: raise its feature level, replace a state.

Both are planned first, as plain values that can be shown, and then written
(PROTOCOL 3.3, 4.12, 7.6).
"""

import secrets
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import attrs
import msgspec

from kafka_marshal.engine.checkpoint_reader import LogCheckpoints
from kafka_marshal.engine.follower import Follower
from kafka_marshal.engine.kept_states import KeptState
from kafka_marshal.engine.replica import Replica
from kafka_marshal.errors import ClaimRejected, ConfigurationError, LogUnwritable
from kafka_marshal.ports import CoordinationLog, LogRange
from kafka_marshal.protocol.checkpoints import checkpoint_key, split
from kafka_marshal.protocol.hashing import RESERVED_TOPICS, coordinating_partition
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.records import (
    CHECKPOINT_LEVEL,
    SUPPORTED_LEVEL,
    Config,
    ForgettingPartition,
    Reset,
)
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import ACCEPTED, KeyState, WorldState
from kafka_marshal.protocol.types import Key

# Parts of a Reset under way at once.
UNDER_WAY_MAX = 8
# Records that drop keys, which are small.
FORGOTTEN_UNDER_WAY_MAX = 100


# --- replacing a state


class KeyChange(NamedTuple):
    """What a Reset would do to one key.

    Attributes:
        key: The key.
        change: ``moved``, ``gone`` (it is not in the carried state) or ``back``.
        position: Next offset to process now, None where unknown.
        granted: Next offset that nobody was granted now, likewise.
        position_then: The same after the Reset.
        granted_then: The same after the Reset.
    """

    key: Key
    change: str
    position: int | None
    granted: int | None
    position_then: int | None
    granted_then: int | None

    @property
    def repeats(self) -> bool:
        """Whether something would be handed out or granted again."""
        is_below = (self.position_then or 0) < (self.position or 0)
        return is_below or (self.granted_then or 0) < (self.granted or 0)


@attrs.frozen
class ResetPlan:
    """What a Reset of one coordinating partition would change.

    Attributes:
        partition: T.
        checkpoint_id: The checkpoint that it goes back to, in hex.
        offset: First offset that is not in its state.
        next_offset: Where the log ends now.
        held: Keys that have an owner who is not stale.
        changes: Keys whose positions differ, or that come or go.
    """

    partition: int
    checkpoint_id: str
    offset: int
    next_offset: int
    held: tuple[Key, ...]
    changes: tuple[KeyChange, ...]

    @property
    def repeats_count(self) -> int:
        """How many keys would have something handed out again."""
        return sum(change.repeats for change in self.changes)


def find_checkpoint(
    log: CoordinationLog, partition: int, *, checkpoint_id: str | None, timeout_ms: int
) -> KeptState:
    """Return a complete checkpoint of a T, the newest one without an id.

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
            f"{start} on; those that there are: marshal log tail --partition "
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


def plan_reset(replica: Replica, kept: KeptState, *, now_ms: int) -> ResetPlan:
    """Return what replacing a T's state by a checkpoint's would change.

    Args:
        replica: The T, folded to its end.
        kept: The checkpoint.
        now_ms: Local time, by which it is estimated who is stale.
    """
    world, then = replica.world, from_bytes(kept.state)
    log_ms = world.now_ms + replica.elapsed_ms(now_ms)
    held = [
        key
        for key, known in sorted(world.keys.items())
        if known.owner and known.freshness(log_ms) is not Freshness.STALE
    ]
    own = checkpoint_key(world.partition)
    keys = sorted((world.keys.keys() | then.keys.keys()) - {own})
    changes = [
        change
        for key in keys
        if (change := _change(key, world.keys.get(key), then.keys.get(key)))
    ]
    return ResetPlan(
        world.partition,
        kept.source.rpartition(" ")[2],
        kept.offset,
        world.next_offset,
        tuple(key for key in held if key != own),
        tuple(changes),
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
    """Return whether the next claim drops a position of then (PROTOCOL 4.3)."""
    return None not in {now.topic_id, then.topic_id} and now.topic_id != then.topic_id


def require_harmless(
    plan: ResetPlan, *, allow_held: bool, allow_reprocess: bool
) -> None:
    """Refuse a Reset that would surprise those who work.

    Raises:
        ClaimRejected: It would take keys that are held, or hand out again what was
            processed, and that was not asked for.
    """
    if plan.held and not allow_held:
        raise ClaimRejected(
            f"{len(plan.held)} keys of partition {plan.partition} are held, such as "
            f"{plan.held[0]}: stop their clients or pause their groups first, or "
            "take them away with --force",
            reason="held",
        )
    if plan.repeats_count and not allow_reprocess:
        raise ClaimRejected(
            f"{plan.repeats_count} keys of partition {plan.partition} would go back, "
            "so that records are handed out again that were processed or granted at "
            "most once; --allow-reprocess says that this is meant",
            reason="reprocess",
        )


def write_reset(
    follower: Follower, kept: KeptState, *, client_id: str, timeout_ms: int
) -> int:
    """Replace the state of a T by a kept one; return the offset of the last part.

    Raises:
        LogUnwritable: The log refused it; the state is as it was.
        DeadlineExceeded: No verdict in time; what was sent may still land, and
            has no effect without its last part.
    """
    state = from_bytes(kept.state)
    # PROTOCOL 7.6: what another Reset had sent by then does not come back.
    state.staging = None
    state.rebuild_derived()
    value, told = to_bytes(state), bytes.fromhex(digest(state))
    parts = split(value)
    incarnation, op_id = secrets.token_bytes(16), secrets.token_bytes(16)
    offset = 0
    for first in range(0, len(parts), UNDER_WAY_MAX):
        awaited = [
            follower.append(
                kept.partition,
                Reset(
                    *(client_id, "marshal", incarnation, number, op_id, number),
                    *(len(parts), len(value), told),
                    parts[number],
                ),
            )
            for number in range(first, min(first + UNDER_WAY_MAX, len(parts)))
        ]
        follower.await_all(awaited, timeout_ms)
        for item in awaited:
            verdict = item.transition
            if verdict is None or verdict.outcome != ACCEPTED:
                reason = None if verdict is None else verdict.reason
                raise LogUnwritable(
                    f"coordinating partition {kept.partition} refused the reset "
                    f"({reason}); its state is as it was; see: marshal topic info"
                )
            offset = verdict.offset
    return offset


# --- forgetting keys


@attrs.frozen
class ForgetPlan:
    """Which keys of a group would be dropped.

    Attributes:
        keys: Those that would be, with their epochs.
        held: Those that are owned and not stale: they stay.
        existing: Topics that the cluster has: their keys stay unless that is allowed.
    """

    keys: tuple[tuple[Key, int], ...]
    held: tuple[Key, ...]
    existing: tuple[str, ...]


def topics_of(
    worlds: Iterable[WorldState], group_id: str, *, topic: str | None
) -> list[str]:
    """Return the data topics that a group has keys of, in order."""
    every = {key.topic for world in worlds for key in world.keys if key[0] == group_id}
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
        topics: Of these topics only.
        existing: Those of them whose keys stay.
        now_ms: Local time, by which it is estimated who is stale.
    """
    keys: list[tuple[Key, int]] = []
    held: list[Key] = []
    for replica in replicas:
        log_ms = replica.world.now_ms + replica.elapsed_ms(now_ms)
        for key, known in replica.world.keys.items():
            if key.group_id != group_id or key.topic not in topics:
                continue
            is_stale = known.freshness(log_ms) is Freshness.STALE
            if known.owner is not None and not is_stale:
                held.append(key)
            elif key.topic not in existing:
                keys.append((key, known.epoch))
    return ForgetPlan(tuple(sorted(keys)), tuple(sorted(held)), tuple(sorted(existing)))


def write_forgetting(
    follower: Follower, plan: ForgetPlan, *, client_id: str, timeout_ms: int
) -> tuple[Key, ...]:
    """Drop the keys of a plan; return those that were, without what changed meanwhile.

    Raises:
        ConfigurationError: The topic is of a feature level below 2.
        DeadlineExceeded: No verdict in time; what was sent may still land.
    """
    worlds = {world.partition: world for world in follower.worlds}
    config = _config(worlds, 0)
    if config.feature_level < CHECKPOINT_LEVEL:
        raise ConfigurationError(
            f"the coordination topic is of feature level {config.feature_level}, and "
            f"keys can be forgotten from {CHECKPOINT_LEVEL} on; run: marshal topic "
            "upgrade",
            setting="coordination_topic",
        )
    incarnation = secrets.token_bytes(16)
    dropped: list[Key] = []
    for first in range(0, len(plan.keys), FORGOTTEN_UNDER_WAY_MAX):
        some = plan.keys[first : first + FORGOTTEN_UNDER_WAY_MAX]
        awaited = []
        for seq, (key, epoch) in enumerate(some, first):
            group_id, topic, number = key
            record = ForgettingPartition(
                client_id, group_id, incarnation, seq, topic, number, epoch
            )
            t = coordinating_partition(
                topic, number, partition_count=config.partition_count
            )
            awaited.append(follower.append(t, record))
        follower.await_all(awaited, timeout_ms)
        for (key, _), item in zip(some, awaited, strict=True):
            verdict = item.transition
            if verdict is not None and verdict.outcome == ACCEPTED:
                dropped.append(key)
    return tuple(dropped)


# --- raising the feature level


@attrs.frozen
class UpgradePlan:
    """What an upgrade of the coordination topic would do.

    Attributes:
        level: Feature level in force, the lowest of all partitions.
        level_then: The level of this release.
        generation_then: Generation of the Config that it would write.
        partitions: Partitions that lack it.
        too_old: Live members whose release does not know the level.
    """

    level: int
    level_then: int
    generation_then: int
    partitions: tuple[int, ...]
    too_old: tuple[str, ...]


def plan_upgrade(worlds: Mapping[int, WorldState]) -> UpgradePlan:
    """Return what there is to do; T0 decides, the others may lag behind it."""
    first = _config(worlds, 0)
    is_new = first.feature_level >= SUPPORTED_LEVEL
    generation = first.generation + (0 if is_new else 1)
    partitions = tuple(
        t
        for t in range(first.partition_count)
        if _config(worlds, t).generation < generation
    )
    too_old = sorted(
        f"{member.record.group_id}/{member.record.client_id}"
        for world in worlds.values()
        for group_id in {name[0] for name in world.soft.members}
        for member in world.live_members(group_id)
        if member.record.feature_level_max < SUPPORTED_LEVEL
    )
    levels = [_config(worlds, t).feature_level for t in range(first.partition_count)]
    return UpgradePlan(
        min(levels), SUPPORTED_LEVEL, generation, partitions, tuple(too_old)
    )


def _config(worlds: Mapping[int, WorldState], partition: int) -> Config:
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
        ClaimRejected: Their releases do not know the level.
    """
    if plan.too_old:
        raise ClaimRejected(
            f"{len(plan.too_old)} live members would stop, such as "
            f"{plan.too_old[0]}: their release does not know feature level "
            f"{plan.level_then}; upgrade them first",
            reason="level",
        )


def write_upgrade(follower: Follower, plan: UpgradePlan, *, timeout_ms: int) -> Config:
    """Write the next Config, T0 first; return it.

    Raises:
        LogUnwritable: A partition took another Config.
    """
    worlds = {world.partition: world for world in follower.worlds}
    config = _config(worlds, 0)
    if 0 in plan.partitions:
        config = msgspec.structs.replace(
            config,
            generation=plan.generation_then,
            era=max(config.era + 1, follower.wall_s),
            feature_level=plan.level_then,
        )
    for t in plan.partitions:  # in order: T0 decides what the others get
        follower.await_all([follower.append(t, config)], timeout_ms)
        if worlds[t].config != config:
            raise LogUnwritable(
                f"coordinating partition {t} has another Config now; look with: "
                "marshal topic info, then run this again"
            )
    return config
