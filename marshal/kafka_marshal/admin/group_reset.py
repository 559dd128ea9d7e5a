"""Resets of a group to new positions: planned, executed and undone (PROTOCOL 8.7).

A plan is made from the state of the cluster and the coordination log; making it writes
nothing. ``SetPosition`` executes a plan: it sets all partitions, or none.

A plan is stored before the first record of its operation, and removed at its end. If
the command is killed, its plan stays, so that ``--continue`` can resume the operation.
Meanwhile members end the operation.
"""

import csv
import io
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs
import msgspec

from kafka_marshal.admin.finishing import ResetResult
from kafka_marshal.admin.pausing import op_id_of
from kafka_marshal.admin.set_position import (
    NotDrained,
    PositionPlan,
    Target,
    format_of,
)
from kafka_marshal.arguments import to_partition, to_whole
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    GroupPaused,
    PositionError,
)
from kafka_marshal.ports import LogRange, TopicInfo
from kafka_marshal.protocol.growths import growths_of, position_in, source_of
from kafka_marshal.protocol.hashing import RESERVED_TOPICS
from kafka_marshal.protocol.placement import keys_of
from kafka_marshal.protocol.resolving import PositionOperation, unresolved
from kafka_marshal.protocol.state import KeyState, WorldState
from kafka_marshal.protocol.types import (
    PARTITION_MAX,
    Key,
    TopicPartition,
    may_be_same_topic,
    whole_number,
)

# A plan of 100,000 partitions with the longest names has a fifth of it.
FILE_BYTES_MAX = 256 * 1024 * 1024
EARLIEST, LATEST, CURRENT = "earliest", "latest", "current"
OFFSET, SHIFT, TIME, OFFSETS = "offset", "shift", "time", "offsets"
FENCE = "fence"
RULES: Mapping[str, str] = {
    "to_earliest": EARLIEST,
    "to_latest": LATEST,
    "to_current": CURRENT,
    "to_offset": OFFSET,
    "shift_by": SHIFT,
    "to_datetime": TIME,
    "by_duration": TIME,
    "offsets": OFFSETS,
}
"""Kinds of a ``PositionSpec``, by the names that commands and requests use."""
_REFUSALS = (ClaimRejected, GroupPaused, ConfigurationError, NotDrained)
"""Errors of an execution that leave no open operation behind."""
PLANS_FOLDER = "plans"
"""Directory of the plans, in the state directory."""
PLAN_KEPT_S = 7 * 24 * 3600
"""How long a plan is kept if the log shows neither begin nor end of its operation.

Then its command died before the first record, or the log has forgotten the operation.
"""


@attrs.frozen
class PositionSpec:
    """A rule for new positions, like the reset options of Kafka's own tool.

    Attributes:
        kind: ``earliest``, ``latest``, ``current``, ``offset``, ``shift``, ``time``,
            ``offsets`` or ``fence``.
        value: The offset, the number of records to shift by, or the time in epoch ms.
        offsets: For kind ``offsets``: the offset of each partition.
        keys: For kind ``fence``: states of the group's keys at a moment of the log.
    """

    kind: str
    value: int = 0
    offsets: Mapping[TopicPartition, int] = attrs.field(factory=dict)
    keys: Mapping[TopicPartition, KeyState] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        offsets = {k: to_whole(self.kind, self.offsets[k]) for k in self.offsets}
        value = to_whole(self.kind, self.value)
        if self.kind == TIME:
            # For Kafka negative times have other meanings: -1 is the end of the log.
            value = max(0, value)
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "offsets", offsets)

    @classmethod
    def earliest(cls) -> "PositionSpec":
        """Return the rule that sets each partition to its log start."""
        return cls(EARLIEST)

    @classmethod
    def latest(cls) -> "PositionSpec":
        """Return the rule that sets each partition to its log end."""
        return cls(LATEST)

    @classmethod
    def current(cls) -> "PositionSpec":
        """Return the rule that keeps positions; the log end if there is none."""
        return cls(CURRENT)

    @classmethod
    def to_offset(cls, offset: int) -> "PositionSpec":
        """Return the rule that sets every partition to the same offset."""
        return cls(OFFSET, offset)

    @classmethod
    def shift_by(cls, count: int) -> "PositionSpec":
        """Return the rule that adds a number of records to each position."""
        return cls(SHIFT, count)

    @classmethod
    def to_time(cls, time_ms: int) -> "PositionSpec":
        """Return the rule for the first record at or after a time, else the log end."""
        return cls(TIME, time_ms)

    @classmethod
    def from_offsets(cls, offsets: Mapping[TopicPartition, int]) -> "PositionSpec":
        """Return the rule that sets each partition to an offset of its own."""
        return cls(OFFSETS, offsets={to_partition(p): offsets[p] for p in offsets})

    @classmethod
    def to_fence(cls, worlds: Iterable[WorldState], group_id: str) -> "PositionSpec":
        """Return the rule that restores the positions at a moment of the log.

        Partitions that had no position then, or whose topic was created again since,
        stay as they are.

        Args:
            worlds: The coordinating partitions at that moment (``World.partitions``).
            group_id: The group.
        """
        found = keys_of(worlds, group_id)
        return cls(FENCE, keys={key.topic_partition: found[key] for key in found})

    @classmethod
    def of(cls, rule: str, value: int) -> "PositionSpec":
        """Return a rule by its name in ``RULES``.

        Args:
            rule: The name; not ``offsets``.
            value: The offset, count, or time in epoch ms; ignored by other rules.
        """
        kind = RULES[rule]
        return cls(kind, 0 if kind in {EARLIEST, LATEST, CURRENT} else value)


@attrs.frozen(kw_only=True)
class PartitionReset:
    """What a reset does to one partition.

    Attributes:
        partition: Topic and partition.
        before: Position now, under at most once the larger of position and granted;
            None if neither the log nor Kafka's committed offsets have one.
        after: Position after the reset.
        log_range: Log start and end.
        repeats: Whether records that were granted at most once are handed out again.
        loses_order: Whether keys lose their order: after a growth of the topic, a new
            partition would begin before the old one has reached its end (PROTOCOL
            9.10).
        is_clamped: Whether the wanted position was outside of the log.
    """

    partition: TopicPartition
    before: int | None
    after: int
    log_range: LogRange
    repeats: bool
    loses_order: bool = False
    is_clamped: bool = False

    @property
    def lag_before(self) -> int | None:
        """Offsets from the position now to the log end; None if that is unknown."""
        return None if self.before is None else max(0, self.log_range.end - self.before)

    @property
    def lag_after(self) -> int:
        """Offsets from the position after the reset to the log end."""
        return max(0, self.log_range.end - self.after)

    @property
    def note(self) -> str | None:
        """A remark for people, None if there is nothing to note."""
        if self.repeats:
            return "handed out again"
        if self.loses_order:
            return "order of keys lost"
        return "clamped" if self.is_clamped else None


@attrs.frozen(kw_only=True)
class ResetPlan:
    """A reset of a group, as it can be shown before anything is written.

    Attributes:
        positions: The positions to set, as a file stores them.
        partitions: The effect on each partition, sorted.
    """

    positions: PositionPlan
    partitions: tuple[PartitionReset, ...]

    @property
    def op_id(self) -> str:
        """Identifies the plan, its operation and its undo, in hex."""
        return self.positions.op_id

    @property
    def group_id(self) -> str:
        """The group."""
        return self.positions.group_id

    @property
    def repeats_count(self) -> int:
        """Number of partitions that repeat records although consumed at most once."""
        return sum(each.repeats for each in self.partitions)

    @property
    def unordered(self) -> tuple[TopicPartition, ...]:
        """Partitions whose keys lose their order, after a growth of their topic."""
        return tuple(row.partition for row in self.partitions if row.loses_order)

    def executed(self, result: ResetResult | None) -> tuple[PartitionReset, ...]:
        """Return the effect with the positions that the reset actually replaced.

        They may differ from the plan, because owners continue until the pause. A row
        is as planned if there is no result, or if the log had no position: the group
        would have started from Kafka's committed offset.
        """
        moved = {} if result is None else result.moved
        befores = {place: before for place, (before, _) in moved.items()}
        return tuple(
            row
            if (before := befores.get(row.partition)) is None
            else attrs.evolve(row, before=before)
            for row in self.partitions
        )

    def to_csv(self) -> str:
        """Return lines of topic, partition and offset, as Kafka's tool exports them."""
        return "".join(
            f"{row.partition.topic},{row.partition.partition},{row.after}\n"
            for row in self.partitions
        )


@attrs.frozen(kw_only=True)
class Facts:
    """What the cluster knows about the partitions to reset.

    Attributes:
        topics: Partition count and id by topic.
        ranges: Log start and end by partition.
        committed: Kafka's committed offsets of the group; absent if unknown.
        at_time: First offset at or after the time of the rule, None if there is none.
    """

    topics: Mapping[str, TopicInfo]
    ranges: Mapping[TopicPartition, LogRange]
    committed: Mapping[TopicPartition, int | None] = attrs.field(factory=dict)
    at_time: Mapping[TopicPartition, int | None] = attrs.field(factory=dict)


# --- which partitions


def topics_of_group(worlds: Iterable[WorldState], group_id: str) -> tuple[str, ...]:
    """Return the data topics of which a group has keys, sorted.

    Raises:
        ClaimRejected: The log has no data topics of the group.
    """
    found = {key.topic for key in keys_of(worlds, group_id)} - RESERVED_TOPICS
    if not found:
        raise ClaimRejected(
            f"group {group_id!r} has no positions in the log; name its "
            "topics; see: marshal groups list",
            reason="unknown_group",
        )
    return tuple(sorted(found))


def partitions_of(
    wanted: Mapping[str, frozenset[int] | None],
    topics: Mapping[str, TopicInfo],
    *,
    group_id: str,
) -> tuple[TopicPartition, ...]:
    """Return the partitions to reset, sorted.

    Raises:
        ConfigurationError: The cluster lacks one of the topics or partitions.
    """
    found = []
    for topic, numbers in wanted.items():
        info = topics.get(topic)
        if info is None:
            raise ConfigurationError(
                f"topic {topic!r} does not exist; name other topics, or drop the "
                f"group's claims of it with: marshal claims forget {group_id} "
                f"--topic {topic}",
                setting="topics",
            )
        count = info.partition_count
        chosen = range(count) if numbers is None else sorted(numbers)
        if chosen and chosen[-1] >= count:
            raise ConfigurationError(
                f"topic {topic!r} has partitions 0 to {count - 1}, and no partition "
                f"{chosen[-1]}",
                setting="topics",
            )
        found += [TopicPartition(topic, number) for number in chosen]
    return tuple(sorted(found))


# --- the plan


def plan_reset(
    worlds: Iterable[WorldState],
    spec: PositionSpec,
    *,
    group_id: str,
    op_id: str,
    partitions: Sequence[TopicPartition],
    facts: Facts,
    is_clamped: bool = False,
    allows_reprocess: bool = False,
) -> ResetPlan:
    """Return the plan of a reset; nothing is written.

    Args:
        worlds: All coordinating partitions, folded to their ends.
        spec: The rule for new positions.
        group_id: The group.
        op_id: Identifies the operation, in hex.
        partitions: The partitions to reset.
        facts: What the cluster knows about them.
        is_clamped: Whether a position outside of its log becomes the nearest one
            inside, as with Kafka's tool.
        allows_reprocess: Whether partitions consumed at most once may go back.

    Raises:
        PositionError: A position lies outside of its log.
        ClaimRejected: A partition to shift has no position.
        ConfigurationError: There is nothing to reset.
    """
    known = keys_of(worlds, group_id)
    rows, left_out = [], []
    for place in partitions:
        state = known.get(Key(group_id, *place))
        state = _of_topic(state, facts.topics[place.topic])
        before = start_of(state, facts.committed.get(place))
        wanted = _position(spec, place, before=before, facts=facts)
        if wanted is None:
            left_out.append(place)
            continue
        after = _within(wanted, place, facts.ranges[place], is_clamped=is_clamped)
        rows.append(
            PartitionReset(
                partition=place,
                before=before,
                after=after,
                log_range=facts.ranges[place],
                repeats=state is not None and state.repeats_from(after),
                is_clamped=after != wanted,
            )
        )
    positions = PositionPlan(
        op_id=op_id,
        group_id=group_id,
        targets=tuple(
            Target(
                topic=row.partition.topic,
                topic_id=_hex(facts.topics[row.partition.topic].topic_id),
                partition=row.partition.partition,
                position=row.after,
            )
            for row in rows
        ),
        allows_reprocess=allows_reprocess,
        left_out=tuple(left_out),
        format_id=format_of(worlds),
    )
    return _plan(positions, rows, worlds, facts=facts)


def _plan(
    positions: PositionPlan,
    rows: Iterable[PartitionReset],
    worlds: Iterable[WorldState],
    *,
    facts: Facts,
) -> ResetPlan:
    """Return a plan, with a note at partitions whose keys lose their order."""
    unordered = _unordered(positions, worlds, facts=facts)
    noted = (attrs.evolve(r, loses_order=r.partition in unordered) for r in rows)
    return ResetPlan(positions=positions, partitions=tuple(noted))


def _unordered(
    plan: PositionPlan, worlds: Iterable[WorldState], *, facts: Facts
) -> set[TopicPartition]:
    """Return the partitions whose keys lose their order by the new positions.

    If, after a growth of the topic, a new partition would begin before the old one that
    had its keys has passed its end, both are returned (PROTOCOL 9.10).
    """
    known = keys_of(worlds, plan.group_id)
    after = {TopicPartition(t.topic, t.partition): t.position for t in plan.targets}

    def position(key: Key, topic_id: bytes | None) -> int | None:
        """Return the position of a partition after the reset."""
        now = position_in(known.get(key), topic_id=topic_id)
        return after.get(key.topic_partition, now)

    found = set()
    growths = [each for world in worlds for each in world.growths]
    for topic in {each.topic for each in plan.targets}:
        topic_id = facts.topics[topic].topic_id
        for growth in growths_of(growths, topic, topic_id=topic_id):
            for number in range(growth.old_count, growth.new_count):
                key = Key(plan.group_id, topic, number)
                source = source_of(growth, key)
                at, end = position(source.key, topic_id), source.end
                waits = at is None or end is None or at < end
                if waits and position(key, topic_id) is not None:
                    found |= {key.topic_partition, source.key.topic_partition}
    return found


def describe_plan(
    worlds: Iterable[WorldState],
    positions: PositionPlan,
    *,
    facts: Facts,
    is_partial: bool = False,
) -> ResetPlan:
    """Return the effect of given positions, such as those of an undo.

    Args:
        worlds: All coordinating partitions, folded to their ends.
        positions: The positions.
        facts: What the cluster knows about their partitions.
        is_partial: Whether to leave out partitions of topics that were created again.

    Raises:
        PositionError: A position is beyond the end of its log.
        ClaimRejected: A topic was created again since.
    """
    known = keys_of(worlds, positions.group_id)
    rows, targets = [], []
    for target in positions.targets:
        place = TopicPartition(target.topic, target.partition)
        info, log_range = facts.topics.get(target.topic), facts.ranges.get(place)
        is_same = info is not None and target.topic_id in {None, _hex(info.topic_id)}
        if log_range is None or not is_same:
            if is_partial:
                continue
            choice = "partial=True leaves it out"
            if positions.undoes is None:  # the plan of a reset, stored before
                finish = f"marshal groups finish {positions.group_id}"
                choice = f"end the open operation with: {finish}; then plan it again"
            raise ClaimRejected(
                f"{place} is not the partition that had this position: its topic was "
                f"deleted or created again; {choice}",
                reason="old_topic",
            )
        if target.position > log_range.end:
            choice = (
                "records at the end of its log were lost since; choose another "
                f"position with: marshal groups reset {positions.group_id} --topic "
                f"{place.topic}:{place.partition} --to-latest"
            )
            raise _outside(target.position, place, log_range, choice)
        targets.append(target)
        state = known.get(Key(positions.group_id, *place))
        rows.append(
            PartitionReset(
                partition=place,
                before=start_of(state, facts.committed.get(place)),
                after=target.position,
                log_range=log_range,
                repeats=state is not None and state.repeats_from(target.position),
            )
        )
    positions = msgspec.structs.replace(positions, targets=tuple(targets))
    return _plan(positions, rows, worlds, facts=facts)


def _hex(topic_id: bytes | None) -> str | None:
    return None if topic_id is None else topic_id.hex()


def _of_topic(state: KeyState | None, info: TopicInfo) -> KeyState | None:
    """Return the state of a key, None if it is of an earlier topic with this name."""
    if state is None or not may_be_same_topic(state.topic_id, info.topic_id):
        return None
    return state


def start_of(state: KeyState | None, committed: int | None) -> int | None:
    """Return where the next claim would start (PROTOCOL 5.6), None if unknown."""
    if state is None:
        return committed
    known = state.next_unclaimed()
    if known is None and not state.retired_topic_ids:
        return committed
    return known


def _position(
    spec: PositionSpec, place: TopicPartition, *, before: int | None, facts: Facts
) -> int | None:
    start, end = facts.ranges[place]
    if spec.kind == SHIFT:
        if before is None:
            raise ClaimRejected(
                f"{place} has no position to shift; set it to an offset, or "
                "to the earliest or latest one",
                reason="unknown_position",
            )
        return before + spec.value
    if spec.kind == TIME:
        found = facts.at_time.get(place)
        return end if found is None else found
    if spec.kind == FENCE:
        return start_of(
            _of_topic(spec.keys.get(place), facts.topics[place.topic]), None
        )
    return {
        EARLIEST: start,
        LATEST: end,
        CURRENT: end if before is None else before,
        OFFSET: spec.value,
        OFFSETS: spec.offsets.get(place, end),
    }[spec.kind]


def _within(
    position: int, place: TopicPartition, log_range: LogRange, *, is_clamped: bool
) -> int:
    nearest = min(max(position, log_range.start), log_range.end)
    if nearest != position and not is_clamped:
        choice = "choose one of these, or the nearest one with clamp=True"
        raise _outside(position, place, log_range, choice)
    return nearest


def _outside(
    position: int, place: TopicPartition, log_range: LogRange, what_next: str
) -> PositionError:
    return PositionError(
        f"position {position} of {place} lies outside of its log, which has the "
        f"positions {log_range.start} to {log_range.end}; nothing was written; "
        f"{what_next}",
        requested=position,
        log_start=log_range.start,
        log_end=log_range.end,
        partition=place,
    )


def group_of_operation(worlds: Iterable[WorldState], op_id: str) -> str:
    """Return the group whose positions an operation set, or is setting.

    Raises:
        ConfigurationError: The text is not an id.
        ClaimRejected: No key in the log shows the operation.
    """
    wanted = op_id_of(op_id)
    for world in worlds:
        for key, known in world.keys.items():
            if known.before(wanted) is not None:
                return key.group_id
    raise ClaimRejected(
        f"the log has no positions from before operation {op_id}: the operation was "
        "not committed, or later ones have set its partitions; see: marshal groups "
        "history",
        reason="unknown_operation",
    )


# --- files


def read_positions(path: Path) -> dict[TopicPartition, int]:
    """Return the positions in a file: a CSV file of Kafka's tool, or a plan.

    Raises:
        ConfigurationError: The file cannot be read, or is neither.
    """
    text = _read(path)
    if text.lstrip().startswith(b"{"):
        plan = _plan_of(path, text)
        return {TopicPartition(t.topic, t.partition): t.position for t in plan.targets}
    found: dict[TopicPartition, int] = {}
    try:
        lines = list(csv.reader(io.StringIO(text.decode())))
    except (UnicodeDecodeError, csv.Error) as error:
        raise _bad_file(path, str(error)) from error
    for number, line in enumerate(lines, 1):
        values = [each.strip() for each in line]
        if not any(values):
            continue
        numbers = [whole_number(each) for each in values[1:]]
        match numbers:
            case [int(partition), int(offset)] if partition <= PARTITION_MAX:
                place = TopicPartition(values[0], partition)
            case _:
                raise _bad_file(path, f"line {number} is not topic,partition,offset")
        if place in found:
            raise _bad_file(path, f"line {number} names {place} again")
        found[place] = offset
    if not found:
        raise _bad_file(path, "it has no positions")
    return found


def read_plan(path: str | Path) -> PositionPlan:
    """Return the plan of a file.

    Raises:
        ConfigurationError: The file cannot be read, or is no plan.
    """
    path = Path(path)
    return _plan_of(path, _read(path))


def write_plan(path: Path, plan: PositionPlan) -> None:
    """Store a plan before its first record, so that a later process can continue it.

    Raises:
        ConfigurationError: The file cannot be written, or it exists and is not this
            plan.
    """
    with suppress(ConfigurationError):
        if read_plan(path) == plan:
            return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(plan.to_bytes(), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigurationError(
            f"the plan cannot be stored in {str(path)!r}: {error}; name a file that "
            "does not exist, in a writable directory",
            setting="plan_file",
        ) from error


@contextmanager
def stored_plan(
    plan: ResetPlan,
    file: Path,
    *,
    on_open: Callable[[BaseException, str], None],
    is_kept: bool = False,
) -> Iterator[Path]:
    """Remove the file of a plan after its execution, unless the operation may be open.

    Args:
        plan: The plan.
        file: Where ``execute`` stores it.
        on_open: Called with the error and the command that continues the operation, if
            it may be open.
        is_kept: Whether the file stays in any case.
    """
    try:
        yield file
    except BaseException as error:
        if not isinstance(error, _REFUSALS):
            stored = shlex.quote(str(file))
            command = (
                f"marshal groups reset {plan.group_id} --continue {stored} --execute"
            )
            on_open(error, command)
            raise
        _remove(file, is_kept=is_kept)
        raise
    _remove(file, is_kept=is_kept)


def _remove(file: Path, *, is_kept: bool) -> None:
    if not is_kept:
        with suppress(OSError):
            file.unlink()


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            found = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    if len(found) > FILE_BYTES_MAX:
        raise _unreadable(path, f"it is larger than {FILE_BYTES_MAX} bytes")
    return found


def _plan_of(path: Path, content: bytes) -> PositionPlan:
    try:
        return PositionPlan.from_bytes(content)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{str(path)!r} cannot be used: {error}", setting="plan"
        ) from error


def _unreadable(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(f"{str(path)!r} cannot be read: {why}", setting="offsets")


def _bad_file(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{str(path)!r} cannot be used: {why}; it has lines of topic,partition,offset, "
        "or is a plan of marshal groups reset",
        setting="offsets",
    )


def remove_finished(home: Path, worlds: Iterable[WorldState], *, wall_s: float) -> None:
    """Remove the plans of a state directory whose operations have ended.

    The plan of an open operation stays, whatever its age, as does that of an operation
    on another coordination topic. Never raises: a plan that cannot be removed stays.

    Args:
        home: The state directory.
        worlds: All coordinating partitions, folded to their ends.
        wall_s: Wall time in seconds, to compare with the times of the files.
    """
    worlds, found = list(worlds), list[Path]()
    with suppress(OSError):  # another user's directory
        found = list(home.joinpath(PLANS_FOLDER).glob("*.json"))
    for path in found:
        with suppress(ConfigurationError, OSError):  # not a plan, or another user's
            plan, age_s = read_plan(path), wall_s - path.stat().st_mtime
            if _is_finished(plan, worlds, age_s=age_s):
                path.unlink()


def _is_finished(plan: PositionPlan, worlds: list[WorldState], *, age_s: float) -> bool:
    operation = PositionOperation(plan.group_id, bytes.fromhex(plan.op_id))
    groups = [g for w in worlds if (g := w.groups.get(plan.group_id)) is not None]
    is_pausing = any(
        each.pause is not None and each.pause.op_id == operation.op_id
        for each in groups
    )
    if is_pausing or operation in unresolved(worlds):
        return False
    if any(each.is_over(operation.op_id) for each in groups):
        return True
    return plan.format_id == format_of(worlds) and age_s > PLAN_KEPT_S
