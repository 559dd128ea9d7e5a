"""Takes over the positions of a consumer group, for ``marshal groups adopt``.

``plan_adoption`` only reads. ``adopt`` claims each partition, sets its position by an
ordinary heartbeat and releases it. Both can be repeated at any time.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from itertools import chain
from typing import Any

import attrs

from kafka_marshal.admin.pausing import current_person
from kafka_marshal.client import Marshal
from kafka_marshal.counting import counted
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    DeadlineExceeded,
    LogUnreadable,
)
from kafka_marshal.kafka_io.data import GroupOffsets, KafkaDataLog, KafkaGroups
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.ports import DataReader, LogRange, TopicInfo
from kafka_marshal.protocol.codec import is_identifier
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.types import (
    OFFSET_MAX,
    PARTITION_MAX,
    TopicPartition,
    may_be_same_topic,
    whole_number,
)
from kafka_marshal.views.world import World


class Action(Enum):
    """The action on one partition."""

    SET = "set"
    """Set its position."""
    DONE = "done"
    """The partition already has this position."""
    KEEP = "keep"
    """The partition has another position, which is kept: the log is authoritative."""
    GONE = "gone"
    """The partition does not exist any more."""
    HELD = "held"
    """A live member of the group holds it; its position must not be set."""
    BEYOND = "beyond"
    """The offset, or the position in the log, belongs to an earlier topic."""


BLOCKING = frozenset({Action.HELD, Action.BEYOND})


@attrs.frozen(kw_only=True)
class Step:
    """The action on one partition, with the values that decide it.

    Attributes:
        partition: Data partition.
        action: The action.
        source: Origin of the offset: ``committed`` in Kafka, or a ``heartbeat`` of the
            Go original.
        offset: Next offset that the old group would process.
        position: Position afterwards; None if the partition is gone.
        before: Position in the coordination log now; None without one.
        lag: Records between the position afterwards and the end of the log.
        note: A sentence for people, if the case is unusual, else None.
    """

    partition: TopicPartition
    action: Action
    source: str
    offset: int
    position: int | None
    before: int | None
    lag: int | None
    note: str | None = None


@attrs.frozen(kw_only=True)
class AdoptionPlan:
    """All steps of an adoption.

    Attributes:
        group_id: Group of the coordination log.
        from_group: The old group, a consumer group in Kafka.
        from_topic: Coordination topic of the Go original, if it was read.
        is_source_active: Whether the old group has active members.
        steps: One for each partition, in order.
        unreadable_count: Records of ``from_topic`` that could not be read.
    """

    group_id: str
    from_group: str
    from_topic: str | None
    is_source_active: bool
    steps: tuple[Step, ...]
    unreadable_count: int = 0

    def of(self, *actions: Action) -> tuple[Step, ...]:
        """Return the steps with one of these actions."""
        return tuple(step for step in self.steps if step.action in actions)

    @property
    def blocked(self) -> tuple[Step, ...]:
        """The steps that prevent the adoption."""
        return self.of(*BLOCKING)


def step_of(
    partition: TopicPartition,
    offset: int,
    *,
    source: str,
    log_range: LogRange | None,
    before: int | None = None,
    is_current: bool = True,
    owner: str | None = None,
) -> Step:
    """Return the step for a partition.

    Args:
        partition: Data partition.
        offset: Next offset that the old group would process.
        source: Origin of the offset: ``committed`` or ``heartbeat``.
        log_range: Offsets that exist; None if the partition does not exist.
        before: Position in the coordination log; None without one.
        is_current: Whether that position is not of an earlier topic of this name.
        owner: client_id of a live owner in the coordination log, or None.
    """
    action, position, note = _decide(
        offset, log_range, before=before, is_current=is_current, owner=owner
    )
    lag = None
    if position is not None and log_range is not None:
        lag = max(0, log_range.end - max(position, log_range.start))
    return Step(
        partition=partition,
        action=action,
        source=source,
        offset=offset,
        position=position,
        before=before,
        lag=lag,
        note=note,
    )


def _decide(
    offset: int,
    log_range: LogRange | None,
    *,
    before: int | None,
    is_current: bool,
    owner: str | None,
) -> tuple[Action, int | None, str | None]:
    """Return the action, the position afterwards, and the note."""
    if log_range is None:
        return Action.GONE, None, "no such partition any more"
    if owner is not None:
        return Action.HELD, before, f"held by {owner!r}; stop it first"
    if before is not None and not is_current:
        note = (
            f"position {before} is of an earlier topic of this name; set one with: "
            "marshal groups reset"
        )
        return Action.BEYOND, None, note
    if before == offset:
        return Action.DONE, before, None
    if before is not None:
        note = "the coordination log already has a position, which is kept"
        return Action.KEEP, before, note
    if offset > log_range.end:
        note = f"the log ends at {log_range.end}: was the topic created again?"
        return Action.BEYOND, None, note
    if offset < log_range.start:
        gone = log_range.start - offset
        note = f"retention deleted {gone} unprocessed offsets; begins at the log start"
        return Action.SET, log_range.start, note
    return Action.SET, offset, None


# --- the text records of the Go original

_WITH_OFFSET = ("Heartbeat", "ReleasingPartition")
_FIELDS_COUNT = 9
# The original has a fixed heartbeat interval of 60 s; after two an owner is dead.
_LIVE_S = 2 * 60


@attrs.define
class OriginalGroup:
    """One group, as the coordination topic of the Go original shows it.

    Attributes:
        offsets: Next offset to process of each partition, from its last record.
        beats: Unix time in seconds of the last heartbeat of each partition still held.
        unreadable_count: Records that could not be read, of any group.
    """

    offsets: dict[TopicPartition, int] = attrs.field(factory=dict)
    beats: dict[TopicPartition, int] = attrs.field(factory=dict)
    unreadable_count: int = 0

    def is_active(self, now_s: int) -> bool:
        """Return whether a heartbeat is recent enough to count as alive."""
        return any(now_s - beat_s < _LIVE_S for beat_s in self.beats.values())


def read_group(values: Iterable[bytes | None], group_id: str) -> OriginalGroup:
    """Fold record values, in log order within each coordinating partition."""
    group = OriginalGroup()
    for value in values:
        try:
            _fold(group, (value or b"").decode(), group_id)
        except ValueError:
            group.unreadable_count += 1
    return group


def _fold(group: OriginalGroup, text: str, group_id: str) -> None:
    kind, *rest = text.split("/")
    if kind not in _WITH_OFFSET:
        if kind not in ("ClaimingPartition", "ClaimingMessages", "ReleaseGroup"):
            raise ValueError(kind)
        return
    if len(rest) != _FIELDS_COUNT - 1:
        raise ValueError(text)
    _version, time_s, _instance, _client, group_name, topic, number, offset = rest
    place = TopicPartition(topic, _whole(number, PARTITION_MAX))
    position = _whole(offset, OFFSET_MAX)
    beat_s = _whole(time_s, OFFSET_MAX)
    if group_name != group_id:
        return
    group.offsets[place] = position
    group.beats.pop(place, None)
    if kind == "Heartbeat":
        group.beats[place] = beat_s


def _whole(text: str, most: int) -> int:
    found = whole_number(text, most=most)
    if found is None:
        raise ValueError(text)
    return found


# --- reading and writing

TIMEOUT_MS = 30_000
CLAIMS_AT_ONCE = 16
POLL_MS = 200
POLL_RECORDS = 5_000


@attrs.frozen
class _Source:
    """The offsets of the old group, from both origins."""

    offsets: Mapping[TopicPartition, tuple[int, str]]
    is_active: bool
    unreadable_count: int = 0


def plan_adoption(
    connection: Mapping[str, Any],
    *,
    group_id: str,
    from_group: str | None = None,
    from_topic: str | None = None,
    topics: Sequence[str] = (),
    timeout_ms: int = TIMEOUT_MS,
) -> AdoptionPlan:
    """Return what adopting a consumer group would do; write nothing.

    Args:
        connection: Arguments of ``ConnectionConfig``.
        group_id: Group of the coordination log.
        from_group: The old group, a consumer group in Kafka; by default the one
            of the same name.
        from_topic: Coordination topic of the Go original. If a partition has an offset
            in this topic and a committed offset, the larger one is used, as in the
            original.
        topics: Only these data topics; by default all.
        timeout_ms: Longest time of each step.

    Raises:
        ConfigurationError: A name is invalid, or ``from_topic`` is the coordination
            topic.
        ClaimRejected: The old group has no committed offsets.
    """
    settings = ConnectionConfig(**connection)
    left = from_group or group_id
    _check(group_id, from_topic, coordination_topic=settings.coordination_topic)
    data = KafkaDataLog(settings)
    groups = KafkaGroups(settings)
    try:
        committed = groups.read(left, timeout_ms=timeout_ms)
        original = OriginalGroup()
        if from_topic is not None:
            original = _read_original(data, from_topic, left, timeout_ms=timeout_ms)
        source = _combined(committed, original, topics=topics)
        _require_offsets(source, left, topics=topics, settings=settings)
        world = World.open(**settings.arguments, timeout_ms=timeout_ms)
        topics_now = data.describe(
            sorted({place.topic for place in source.offsets}), timeout_ms
        )
        there = [place for place in source.offsets if _exists(place, topics_now)]
        ranges = data.ranges(there, timeout_ms)
    finally:
        groups.close()
        data.close(timeout_ms=1_000)
    return AdoptionPlan(
        group_id=group_id,
        from_group=left,
        from_topic=from_topic,
        is_source_active=source.is_active,
        steps=tuple(
            _steps(source, world, group_id=group_id, topics=topics_now, ranges=ranges)
        ),
        unreadable_count=source.unreadable_count,
    )


def adopt(
    connection: Mapping[str, Any],
    plan: AdoptionPlan,
    *,
    person: str | None = None,
    timeout_ms: int = TIMEOUT_MS,
) -> AdoptionPlan:
    """Set the positions of a plan; return the plan, computed again afterwards.

    Each partition is claimed, its position set by an ordinary heartbeat, and released,
    so no member of the group can interfere. If a partition fails, the others keep their
    new positions; repeat the adoption. Each claim names the person; by default the user
    who runs this process.

    Raises:
        ClaimRejected: The old group is still active or a step is blocked (nothing was
            written), or offsets of the old group changed during the adoption.
    """
    _require_ready(plan)
    to_set = plan.of(Action.SET)
    if to_set:
        name = f"adopt-{os.getpid()}-{time.time_ns()}"
        with Marshal(
            **connection,
            group_id=plan.group_id,
            client_id=name,
            state_dir="",
            mirror_offsets=False,
            person=current_person() if person is None else person,
            timeout_ms=timeout_ms,
        ) as marshal:
            with ThreadPoolExecutor(CLAIMS_AT_ONCE) as pool:
                work = [
                    pool.submit(_set, marshal, step, timeout_ms=timeout_ms)
                    for step in to_set
                ]
            # The pool has ended, so no result needs a wait.
            for done in work:
                done.result(0)
    after = plan_adoption(
        connection,
        group_id=plan.group_id,
        from_group=plan.from_group,
        from_topic=plan.from_topic,
        topics=sorted({step.partition.topic for step in plan.steps}),
        timeout_ms=timeout_ms,
    )
    _require_settled(plan, after)
    return after


def _check(group_id: str, from_topic: str | None, *, coordination_topic: str) -> None:
    if not is_identifier(group_id):
        raise ConfigurationError(
            f"{group_id!r} is not a valid group: 1 to 200 of A-Z a-z 0-9 . _ : -; name "
            "another one and adopt with from_group",
            setting="group_id",
        )
    if from_topic == coordination_topic:
        raise ConfigurationError(
            f"{from_topic!r} cannot be the coordination topic of the Go original and "
            "of kafka-marshal: name another topic for kafka-marshal with "
            "coordination_topic, and format that topic",
            setting="from_topic",
        )


def _combined(
    committed: GroupOffsets, original: OriginalGroup, *, topics: Sequence[str]
) -> _Source:
    found = {place: (at, "committed") for place, at in committed.offsets.items()}
    for place, offset in original.offsets.items():
        if place not in found or offset > found[place][0]:
            found[place] = (offset, "heartbeat")
    wanted = {p: at for p, at in found.items() if not topics or p.topic in topics}
    is_active = committed.is_active or original.is_active(int(time.time()))
    return _Source(wanted, is_active, original.unreadable_count)


def _require_offsets(
    source: _Source, left: str, *, topics: Sequence[str], settings: ConnectionConfig
) -> None:
    if not source.offsets:
        raise ClaimRejected(
            f"group {left!r} has no committed offsets"
            f"{' of these topics' if topics else ''}; see: "
            "kafka-consumer-groups --bootstrap-server "
            f"{','.join(settings.bootstrap_servers)} --all-groups --describe --offsets",
            reason="nothing_to_adopt",
        )


def _exists(place: TopicPartition, topics: Mapping[str, TopicInfo]) -> bool:
    found = topics.get(place.topic)
    return found is not None and place.partition < found.partition_count


def _steps(
    source: _Source,
    world: World,
    *,
    group_id: str,
    topics: Mapping[str, TopicInfo],
    ranges: Mapping[TopicPartition, LogRange],
) -> Iterator[Step]:
    known_ones = {
        key.topic_partition: (state, state.keys[key])
        for key, state in world.standing().items()
        if key.group_id == group_id
    }
    for place, (offset, where) in sorted(source.offsets.items()):
        owner = position = None
        is_current = True
        if place in known_ones:
            state, known = known_ones[place]
            position = known.next_unclaimed()
            if place.topic in topics:
                topic_id = topics[place.topic].topic_id
                is_current = may_be_same_topic(known.topic_id, topic_id)
            alive = world.estimated_freshness(state, known) is not Freshness.STALE
            if known.owner is not None and alive:
                owner = known.owner.client_id
        yield step_of(
            place,
            offset,
            source=where,
            log_range=ranges.get(place),
            before=position,
            is_current=is_current,
            owner=owner,
        )


def _read_original(
    data: KafkaDataLog, topic: str, group_id: str, *, timeout_ms: int
) -> OriginalGroup:
    found = data.describe([topic], timeout_ms)
    if topic not in found:
        raise LogUnreadable(
            f"topic {topic!r} does not exist on this cluster; name the coordination "
            "topic of the Go original, or leave it out"
        )
    count = found[topic].partition_count
    places = [TopicPartition(topic, number) for number in range(count)]
    ranges = data.ranges(places, timeout_ms)
    reader = data.reader()
    try:
        values = (
            _values(reader, place, ranges[place], timeout_ms=timeout_ms)
            for place in places
            if place in ranges
        )
        return read_group(chain.from_iterable(values), group_id)
    finally:
        reader.close(1_000)


def _values(
    reader: DataReader, place: TopicPartition, log_range: LogRange, *, timeout_ms: int
) -> Iterator[bytes | None]:
    """Yield the values of one partition's records, up to the end of ``log_range``."""
    if log_range.start >= log_range.end:
        return
    reader.assign([place])
    reader.seek(place, log_range.start)
    silent_since = time.monotonic()
    while time.monotonic() - silent_since < timeout_ms / 1000:
        for record in reader.poll(POLL_MS, POLL_RECORDS).get(place, ()):
            silent_since = time.monotonic()
            if record.offset >= log_range.end:
                return
            yield record.value
            if record.offset == log_range.end - 1:
                return
    raise DeadlineExceeded(f"{place} was not read to its end within {timeout_ms} ms")


def _require_ready(plan: AdoptionPlan) -> None:
    if plan.is_source_active:
        raise ClaimRejected(
            f"group {plan.from_group!r} still has active members, whose offsets move; "
            "stop its consumers, then adopt it",
            reason="source_active",
        )
    if plan.blocked:
        first = plan.blocked[0]
        raise ClaimRejected(
            f"{counted(len(plan.blocked), 'partition')} cannot be adopted, the first "
            f"is {first.partition}: {first.note}; nothing was written",
            reason=first.action.value,
        )


def _require_settled(plan: AdoptionPlan, after: AdoptionPlan) -> None:
    """Check that the old group stayed inactive and the log has the positions."""
    before = {step.partition: step.offset for step in plan.steps}
    moved = [s for s in after.steps if before.get(s.partition) != s.offset]
    if moved or after.is_source_active:
        where = f", at {moved[0].partition}" if moved else ""
        raise ClaimRejected(
            f"group {plan.from_group!r} was active during the adoption{where}; "
            "stop its consumers, then check each position with: marshal claims list "
            f"--group {plan.group_id}",
            reason="source_moved",
        )
    wanted = {step.partition: step.position for step in plan.of(Action.SET)}
    for step in after.steps:
        at = wanted.get(step.partition)
        if at is not None and (step.before is None or step.before < at):
            raise ClaimRejected(
                f"{step.partition} has position {step.before}, not {at}; run the "
                "same command again",
                reason="not_set",
            )


def _set(marshal: Marshal, step: Step, *, timeout_ms: int) -> None:
    assert step.position is not None
    topic, number = step.partition
    with marshal.claim(topic, number, timeout_ms=timeout_ms) as claim:
        # A position that was set after the plan was made takes precedence.
        if claim.position is None:
            claim.set_position(step.position)
