"""Parts of the state of keys and groups in a coordinating partition.

PROTOCOL 4 lists their elements in its table of items.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import attrs
from msgspec import Meta

from kafka_marshal.protocol.hashing import PLANNER_TOPIC
from kafka_marshal.protocol.records import (
    ENDS_MAX,
    Action,
    Counting,
    GrownCount,
    Host,
    Id,
    Name,
    Next,
    Offset,
    Partition,
    Plan,
    Scope,
)
from kafka_marshal.protocol.types import OFFSET_MAX, Key

Time = Annotated[int, Meta(ge=-(2**63), le=OFFSET_MAX)]
"""A time of the log. The types of snapshot elements state their bounds."""

Eras = tuple[tuple[int, int], ...]
"""Eras of earlier Configs, which tokens of standing claims have (PROTOCOL 4.10).

Each item is the offset of the Config that ended the era, and the era; oldest first.
"""

ERAS_MAX = 64
"""Maximum number of earlier eras that a coordinating partition keeps."""


def era_at(eras: Eras, offset: int) -> int | None:
    """Return the era in force at an offset, None if it is that of the present Config.

    If that era is no longer kept, return the next era that is kept.
    """
    at = _index(eras, offset)
    return eras[at][1] if at < len(eras) else None


def end_era(eras: Eras, ended: tuple[int, int], *, epochs: Iterable[int]) -> Eras:
    """Return the eras to keep when a Config has ended one.

    If there are more than `ERAS_MAX`, the oldest era without any of the epochs is
    dropped; if each era has one, the oldest of all.

    Args:
        eras: The eras kept so far.
        ended: The offset of the new Config, and the era that it ends.
        epochs: Epochs of standing claims; read only if an era has to be dropped.
    """
    found = (*eras, ended)
    if len(found) <= ERAS_MAX:
        return found
    used = {_index(found, epoch) for epoch in epochs}
    at = next((at for at in range(len(found)) if at not in used), 0)
    return found[:at] + found[at + 1 :]


def _index(eras: Eras, offset: int) -> int:
    """Return the place of an offset's era, the number of eras for the present one."""
    return bisect_right(eras, offset, key=lambda each: each[0])


@attrs.define(kw_only=True)
class Pause:
    """An admin operation that pauses a group until an append time (PROTOCOL 4.8).

    Attributes:
        op_id: The operation.
        client_id: Client that sent the last record.
        incarnation: Process of that client.
        seq: Sequence number of that record.
        incarnations: Processes that have sent one, in order of appearance.
        until_ms: End of the pause.
        scope: The partitions that it is limited to (PROTOCOL 4.15); None for all.
    """

    op_id: bytes
    client_id: str
    incarnation: bytes
    seq: int
    incarnations: tuple[bytes, ...]
    until_ms: int
    scope: Scope | None = None


class Scheduled(NamedTuple):
    """A pause that begins at an append time, whatever becomes of its sender.

    Attributes:
        begin_ms: The pause begins with the first entry whose append time reaches this.
        op_id: The operation.
        client_id: Client that scheduled it.
        incarnation: Process of that client.
        seq: Sequence number of its record.
        until_ms: End of the pause.
        scope: The partitions that it is limited to, None for the whole group.
    """

    begin_ms: Offset
    op_id: Id
    client_id: Name
    incarnation: Id
    seq: Offset
    until_ms: Next
    # Left out if None, so that pauses without a scope keep their digests.
    scope: Scope | None = None


def is_in_scope(scope: Scope | None, key: Key) -> bool:
    """Return whether a pause of the key's group, with this scope, pauses the key."""
    if scope is None:
        # PROTOCOL 2.3: a group's pause does not affect its planner key.
        return key.topic != PLANNER_TOPIC
    for each in scope:
        if each.topic == key.topic:
            return not each.partitions or key.partition in each.partitions
    return False


class Lock(NamedTuple):
    """The operation that locked a key, and what it will set (PROTOCOL 8.3).

    Attributes:
        op_id: The operation.
        plan_digest: Digest of all positions of the operation.
        position: Position that a commit sets.
        topic_id: Kafka's id of the topic that the position belongs to, or None.
    """

    op_id: Id
    plan_digest: Id
    position: Offset
    topic_id: Id | None


class Offer(NamedTuple):
    """A key that its owner offers to a successor (PROTOCOL 9.4).

    Attributes:
        successor: The client that may warm up.
        until_ms: Log time at which the offer ends.
        offset: Offset of the HandoffOffer.
        ready: Incarnation of the successor that reported ready, or None.
    """

    successor: Name
    until_ms: Time
    offset: Offset
    ready: Id | None


class Verdict(NamedTuple):
    """The commit of a set position, on the home of its group (PROTOCOL 8.4).

    Attributes:
        op_id: The operation.
        plan_digest: Digest of all its positions.
        key_count: Number of its keys.
        offset: Offset of the DecidePosition that committed it.
        is_resolved: Whether all its keys have been unlocked.
    """

    op_id: Id
    plan_digest: Id
    key_count: Counting
    offset: Offset
    is_resolved: bool


class Fence(NamedTuple):
    """One process of a client that cannot claim or renew any more (PROTOCOL 4.13).

    Attributes:
        offset: Offset of the record that fenced it.
        client_id: The client.
        incarnation: Its process.
    """

    offset: Offset
    client_id: Name
    incarnation: Id


class StandingDirective(NamedTuple):
    """A client or a host that is drained or cordoned (PROTOCOL 9.7).

    Attributes:
        op_id: The operation.
        client_id: Client that sent the last record.
        incarnation: Process of that client.
        seq: Sequence number of that record.
        until_ms: Append time at which it ends.
        client: The client that it names, or None.
        host: The host that it names, or None.
        action: ``drain`` or ``cordon``.
    """

    op_id: Id
    client_id: Name
    incarnation: Id
    seq: Offset
    until_ms: Next
    client: Name | None
    host: Host | None
    action: Action

    def names(self, client_id: str, host: str) -> bool:
        """Return whether it names this client, or the host that it announced."""
        return client_id == self.client or (host != "" and host == self.host)


class Planned(NamedTuple):
    """How many Plans of a group were accepted (PROTOCOL 9.2).

    Attributes:
        generation: Number of accepted Plans.
        log_time_ms: Log time of the last Plan.
    """

    generation: Annotated[int, Meta(ge=1)]
    log_time_ms: Time


class PlanNote(NamedTuple):
    """The slices of a group's last plan, as far as they were read; soft.

    Attributes:
        records: The slices, in order.
        generation: Plan generation of the group after the last slice.
        offset: Offset of the last slice.
        log_time_ms: Log time of the last slice.
    """

    records: tuple[Plan, ...]
    generation: int
    offset: int
    log_time_ms: int

    @property
    def is_whole(self) -> bool:
        """Whether all slices were read."""
        return len(self.records) == self.records[0].slice_count


class UndecodableEntry(NamedTuple):
    """A value that could not be decoded; only its first bytes are kept, for people."""

    offset: int
    reason: str
    head: bytes


class LayoutSource(NamedTuple):
    """A partition from which keys move here (PROTOCOL 10.4, 10.5).

    Attributes:
        partition: The source.
        imported_count: Number of its keys that were imported here.
        done_ms: Largest append time at the LayoutDone for this source, None before.
    """

    partition: Partition
    imported_count: Offset
    done_ms: Time | None


class Layout(NamedTuple):
    """A change of the partition count that is open in this partition (PROTOCOL 10).

    Attributes:
        op_id: The operation.
        from_count: The partition count before.
        offset: Offset of the LayoutFence.
        sources: The partitions from which keys move here; empty in a source.
    """

    op_id: bytes
    from_count: int
    offset: int
    sources: tuple[LayoutSource, ...]

    def source(self, partition: int) -> LayoutSource | None:
        """Return a source by its partition, or None."""
        return next((s for s in self.sources if s.partition == partition), None)


class Growth(NamedTuple):
    """A data topic that grows, or has grown (PROTOCOL 9.10).

    Attributes:
        topic: The topic.
        old_count: Number of partitions before.
        new_count: Number of partitions after.
        topic_id: Kafka's id of the topic, None if unknown.
        offset: Offset of the DataGrowth that announced it.
        ends: End of each old partition, None while the growth is only announced.
    """

    topic: Name
    old_count: Annotated[int, Meta(ge=1, le=ENDS_MAX)]
    new_count: GrownCount
    topic_id: Id | None
    offset: Offset
    ends: tuple[Offset, ...] | None


class Halt(NamedTuple):
    """Where a reader stopped folding, and the feature level that it would need."""

    offset: int
    feature_level: int
