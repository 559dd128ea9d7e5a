"""Looks at what a group left, and carries its positions into the coordination log."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs

from kafka_marshal.client import Marshal
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    DeadlineExceeded,
    LogUnreadable,
)
from kafka_marshal.kafka_io import ConnectionSettings, KafkaDataLog
from kafka_marshal.kafka_io.data import GroupOffsets, KafkaGroups
from kafka_marshal.ports import DataReader, LogRange
from kafka_marshal.protocol.codec import is_identifier
from kafka_marshal.protocol.freshness import Freshness
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.views import World

from .original import OriginalGroup, merged, read_group
from .plan import Action, AdoptionPlan, Finding, Step, steps_of

TIMEOUT_MS = 30_000
CLAIMS_AT_ONCE = 16
POLL_MS = 200
POLL_RECORDS = 5_000


@attrs.frozen
class _Source:
    """What the group that is left says, wherever it said it."""

    offsets: Mapping[TopicPartition, tuple[int, str]]
    is_active: bool
    unreadable_count: int = 0


def plan_adoption(
    bootstrap_servers: str | Sequence[str] = "localhost:9092",
    *,
    group_id: str,
    from_group: str | None = None,
    from_topic: str | None = None,
    topics: Sequence[str] = (),
    coordination_topic: str = "__marshal",
    options: Mapping[str, Any] | None = None,
    transport: str = "auto",
    timeout_ms: int = TIMEOUT_MS,
) -> AdoptionPlan:
    """Return what adopting a consumer group would do; write nothing.

    Args:
        bootstrap_servers: Addresses of the cluster.
        group_id: Group of the coordination log that is to go on.
        from_group: Consumer group in Kafka that is left; by default one of the
            same name.
        from_topic: Coordination topic of the Go original. Its last heartbeat of
            a partition counts beside the committed offset; the larger wins, as
            in the original.
        topics: Only these data topics; by default all.
        coordination_topic: Name of our own coordination topic.
        options: Security and connection options.
        transport: See ``Marshal``.
        timeout_ms: When to give up on each step.

    Raises:
        ConfigurationError: A name is impossible, or both topics are one.
        ClaimRejected: Nobody ever committed anything in that group.
    """
    settings = ConnectionSettings(
        bootstrap_servers, coordination_topic, options or {}, transport=transport
    )
    left = from_group or group_id
    _check(group_id, from_topic, coordination_topic=coordination_topic)
    data = KafkaDataLog(settings)
    groups = KafkaGroups(settings)
    try:
        committed = groups.read(left, timeout_ms=timeout_ms)
        original = OriginalGroup()
        if from_topic is not None:
            original = _read_original(data, from_topic, left, timeout_ms=timeout_ms)
        source = _combined(committed, original, topics=topics)
        _require_offsets(source, left, topics=topics)
        world = World.open(
            bootstrap_servers,
            coordination_topic=coordination_topic,
            options=options,
            transport=transport,
            timeout_ms=timeout_ms,
        )
        ranges = _ranges(data, list(source.offsets), timeout_ms=timeout_ms)
    finally:
        groups.close()
        data.close(timeout_ms=1_000)
    return AdoptionPlan(
        group_id,
        left,
        from_topic,
        source.is_active,
        steps_of(_findings(source, world, group_id=group_id, ranges=ranges)),
        source.unreadable_count,
    )


def adopt(
    bootstrap_servers: str | Sequence[str] = "localhost:9092",
    *,
    plan: AdoptionPlan,
    coordination_topic: str = "__marshal",
    options: Mapping[str, Any] | None = None,
    transport: str = "auto",
    timeout_ms: int = TIMEOUT_MS,
) -> AdoptionPlan:
    """Set the positions of a plan and return the plan as it stands afterwards.

    Each partition is claimed, its position set by an ordinary beat, and let go,
    so no member of the group can come between. What was set stays set when a
    later partition fails; run it again then.

    Raises:
        ClaimRejected: The group that is left still works, a step is blocked, or
            its offsets moved meanwhile. Before anything is written, but for the
            last.
    """
    _require_ready(plan)
    to_set = plan.of(Action.SET)
    if to_set:
        name = f"adopt-{os.getpid()}-{time.time_ns()}"
        with Marshal(
            bootstrap_servers,
            group_id=plan.group_id,
            client_id=name,
            coordination_topic=coordination_topic,
            options=options,
            transport=transport,
            state_dir="",
            mirror_offsets=False,
            timeout_ms=timeout_ms,
        ) as marshal:
            with ThreadPoolExecutor(CLAIMS_AT_ONCE) as pool:
                work = [
                    pool.submit(_set, marshal, step, timeout_ms=timeout_ms)
                    for step in to_set
                ]
            # The pool has ended: no result is waited for.
            for done in work:
                done.result(0)
    after = plan_adoption(
        bootstrap_servers,
        group_id=plan.group_id,
        from_group=plan.from_group,
        from_topic=plan.from_topic,
        topics=sorted({step.partition.topic for step in plan.steps}),
        coordination_topic=coordination_topic,
        options=options,
        transport=transport,
        timeout_ms=timeout_ms,
    )
    _require_settled(plan, after)
    return after


def _check(group_id: str, from_topic: str | None, *, coordination_topic: str) -> None:
    if not is_identifier(group_id):
        raise ConfigurationError(
            f"{group_id!r} is no valid group: 1 to 200 of A-Z a-z 0-9 . _ : -; name "
            "another one and adopt with from_group",
            setting="group_id",
        )
    if from_topic == coordination_topic:
        raise ConfigurationError(
            f"{from_topic!r} cannot be the coordination topic of both: give ours "
            "another name with coordination_topic, and format it",
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


def _require_offsets(source: _Source, left: str, *, topics: Sequence[str]) -> None:
    if not source.offsets:
        raise ClaimRejected(
            f"group {left!r} has no committed offsets"
            f"{' of these topics' if topics else ''}; see what there is with: "
            "kafka-consumer-groups --all-groups --describe --offsets",
            reason="nothing_to_adopt",
        )


def _ranges(
    data: KafkaDataLog, partitions: Sequence[TopicPartition], *, timeout_ms: int
) -> Mapping[TopicPartition, LogRange]:
    """Return the ranges of those partitions that exist."""
    topics = sorted({place.topic for place in partitions})
    found = data.describe(topics, timeout_ms)
    there = [
        place
        for place in partitions
        if place.topic in found and place.partition < found[place.topic].partition_count
    ]
    return data.ranges(there, timeout_ms)


def _findings(
    source: _Source,
    world: World,
    *,
    group_id: str,
    ranges: Mapping[TopicPartition, LogRange],
) -> Iterator[Finding]:
    known_ones = {
        key.topic_partition: (state, known)
        for state in world.partitions
        for key, known in state.keys.items()
        if key.group_id == group_id
    }
    for place, (offset, where) in source.offsets.items():
        owner = position = None
        if place in known_ones:
            state, known = known_ones[place]
            position = known.next_unclaimed()
            alive = world.estimated_freshness(state, known) is not Freshness.STALE
            if known.owner is not None and alive:
                owner = known.owner.client_id
        yield Finding(place, offset, where, ranges.get(place), position, owner)


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
        return merged(
            read_group(
                _values(reader, place, ranges[place], timeout_ms=timeout_ms), group_id
            )
            for place in places
            if place in ranges
        )
    finally:
        reader.close(1_000)


def _values(
    reader: DataReader, place: TopicPartition, log_range: LogRange, *, timeout_ms: int
) -> Iterator[bytes | None]:
    """Yield the values of one partition up to the end that it had when asked."""
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
            f"{len(plan.blocked)} partitions cannot be adopted, the first is "
            f"{first.partition}: {first.note}; nothing was written",
            reason=first.action.value,
        )


def _require_settled(plan: AdoptionPlan, after: AdoptionPlan) -> None:
    """Check that the group that was left stood still, and that the log took it."""
    before = {step.partition: step.offset for step in plan.steps}
    moved = [s for s in after.steps if before.get(s.partition) != s.offset]
    if moved or after.is_source_active:
        where = f", at {moved[0].partition}" if moved else ""
        raise ClaimRejected(
            f"group {plan.from_group!r} went on working while it was adopted{where}; "
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
        # Whoever set one since the plan was made knew more than the plan.
        if claim.position is None:
            claim.set_position(step.position)
