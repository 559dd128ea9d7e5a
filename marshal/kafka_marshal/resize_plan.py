"""What a change of the number of coordinating partitions does, and what prevents it.

A change is refused before anything is written where it could not end, or would lose
something. All of it is judged from one reading of the log (PROTOCOL 10).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from kafka_marshal.engine.config_check import unformatted
from kafka_marshal.engine.follower import Follower
from kafka_marshal.errors import ClaimRejected, ConfigurationError
from kafka_marshal.protocol.hashing import (
    RESERVED_TOPICS,
)
from kafka_marshal.protocol.labels import LAYOUT_LABEL
from kafka_marshal.protocol.layout import COUNT_MAX, is_step, place_of
from kafka_marshal.protocol.layout_steps import (
    Change,
    Wait,
    fences_of,
    is_over,
    is_torn,
    members_of,
    read,
)
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.records import SECOND_LEVEL, Config
from kafka_marshal.protocol.state import WorldState

NAMED_MAX = 3
"""Most names that a message lists."""


@attrs.frozen(kw_only=True)
class Move:
    """Keys that move from one coordinating partition to another.

    Attributes:
        source: Where they are.
        target: Where they are placed by the new number.
        key_count: Their number.
        held_count: Those of them with an owner that is not stale, by estimate.
    """

    source: int
    target: int
    key_count: int
    held_count: int


@attrs.frozen(kw_only=True)
class Obstacle:
    """Why a change is not begun.

    Attributes:
        reason: One word: ``busy``, ``torn``, ``level``, ``unread``, ``paused``,
            ``unresolved``, ``members`` or ``limits``.
        text: What stands in the way, and what to run.
    """

    reason: str
    text: str


@attrs.frozen(kw_only=True)
class ResizePlan:
    """The effect of a change of the number of coordinating partitions.

    Attributes:
        before: The Config of coordinating partition 0 now.
        to_count: The number after the change.
        change: The open change to that number, which is continued; None for a new one.
        moves: Keys that move, by source and target.
        obstacles: Why a new change is not begun; empty if nothing prevents it.
        lagging: Group and client of live members that do not follow a change.
        partition_count: Kafka partitions that the coordination topic has.
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
        """Kafka partitions that are added to the topic first."""
        return max(0, self.to_count - self.partition_count)

    @property
    def moving_count(self) -> int:
        """Keys that move."""
        return sum(move.key_count for move in self.moves)

    @property
    def dead_owner_ms(self) -> int:
        """How long a moving key stays unusable at most, if its owner has died.

        A key of a live owner is unusable for three round trips, after its owner has
        finished what it works on.
        """
        return 2 * self.before.heartbeat_interval_ms

    def require(self) -> None:
        """Refuse what must not be begun.

        Raises:
            ClaimRejected: With the first obstacle, and the number of all others.
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
        wall_ms: Wall time; both estimate which owners and members are gone.
        ignore_members: Whether to leave members behind that do not follow.

    Raises:
        ConfigurationError: The number is not allowed.
        TopicMisconfigured: The topic is not formatted.
    """
    worlds = follower.by_partition
    before = worlds[0].config
    if before is None:
        raise unformatted(worlds.values())
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

    One that partition 0 has ended is open for the same number only, and not if another
    one has followed: the fence of the next one does what it has left (PROTOCOL 10.2),
    but for a partition that lacks it.
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
        "coordinating partitions have the Configs of two changes of one generation "
        "(torn_layout): nobody can claim safely; compare them with: marshal topic info"
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
    """Return what the topic lacks for any change."""
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
    return [*found, *_config_obstacles(worlds, before)]


def _is_unread(follower: Follower, partition: int, before: Config) -> bool:
    """Return whether what a partition lacks of its state prevents a change.

    One that comes into use begins with the fence, unless what is left of its log shows
    a later Config than partition 0 has.
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
    worlds: Mapping[int, WorldState], before: Config
) -> Iterator[Obstacle]:
    """Yield partitions in which the fence would not be accepted, or should not be."""
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
            f"torn_format: coordinating partitions {torn} do not have the format of "
            "partition 0; run: marshal topic format"
        )
        yield Obstacle(reason="torn", text=text)
    if ahead:
        text = (
            f"coordinating partitions {ahead} have a later Config than partition 0, "
            "whose log has lost its end: a change would be a second one of that "
            "generation; compare them with: marshal topic info"
        )
        yield Obstacle(reason="torn", text=text)
    if below:
        text = (
            f"coordinating partitions {below} have an earlier feature level than "
            "partition 0; to complete its upgrade, run: marshal topic format"
        )
        yield Obstacle(reason="level", text=text)


def _group_obstacles(
    worlds: Mapping[int, WorldState], from_count: int, elapsed_ms: Mapping[int, int]
) -> list[Obstacle]:
    """Return pauses, which do not move, and set positions.

    A pause that the next record would end is none: in an idle partition there may be no
    other record than the fence.
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
        text = (
            f"groups are paused, or will be: {_some(paused)}; a change would let a "
            "pause end early; end it with: marshal groups resume GROUP"
        )
        found.append(Obstacle(reason="paused", text=text))
    if unresolved:
        text = (
            f"positions of groups are being set: {_some(unresolved)}; end that with: "
            "marshal groups finish GROUP"
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
    text = (
        f"{len(lagging)} live members do not follow a change, for example "
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
    """Return where partitions have, or would have, more keys or groups than allowed."""
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


def _some(names: Iterable[str]) -> str:
    """Return some names, and how many more there are."""
    every = sorted(names)
    more = len(every) - NAMED_MAX
    return ", ".join(every[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def wait_text(wait: Wait) -> str:
    """Return what a change waits for, as a phrase."""
    left = "" if wait.left_ms is None else f", for up to {wait.left_ms} ms"
    match wait.reason:
        case "owned":
            what = f"{wait.key_count} keys of client {wait.client_id!r}"
        case "unresolved":
            what = f"a set position ({wait.key_count} locked keys)"
        case "quiet":
            what = "the quiet time of a reset"
        case "adoption":
            what = "members that act on the number before"
        case "behind":
            what = "records that its log has lost"
        case _:
            what = "its state, which is not known here"
    return f"partition {wait.partition}: {what}{left}"
