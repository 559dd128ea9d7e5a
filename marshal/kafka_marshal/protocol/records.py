"""The record kinds of the coordination log (PROTOCOL 3.6), as typed values.

Each class lists its fields in wire order, those of its base first; ``codec`` turns
them into bytes and back. ``position`` is always the *next* offset to process; only
``proposed_last_offset`` is inclusive (PROTOCOL 3.6).

The codec validates names inside a record, not these classes: a record in memory may
hold any name, but only a valid one can be encoded.
"""

from typing import Annotated, Literal, NamedTuple, TypedDict

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kafka_marshal.protocol.types import OFFSET_MAX, PARTITION_MAX

Offset = Annotated[int, Meta(ge=0, le=OFFSET_MAX)]
Partition = Annotated[int, Meta(ge=0, le=PARTITION_MAX)]
Sequence = Annotated[int, Meta(ge=0, le=OFFSET_MAX)]
Counting = Annotated[int, Meta(ge=1, le=PARTITION_MAX)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Id = Annotated[bytes, Meta(min_length=16, max_length=16)]
Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]
Tags = Annotated[bytes, Meta(max_length=1024)]
Name = Annotated[str, Meta(max_length=249)]
"""A client, group or topic; the codec checks the characters."""
Text = Annotated[str, Meta(max_length=1024)]
ShortText = Annotated[str, Meta(max_length=255)]
Host = Annotated[str, Meta(min_length=1, max_length=255)]
Beats = Annotated[tuple[tuple[Offset, Offset | None], ...], Meta(min_length=1)]
Next = Annotated[int, Meta(ge=0)]
"""The offset after another one, also after the largest offset."""
ConfigFrame = Annotated[bytes, Meta(min_length=1, max_length=4096)]
"""The frame of a Config; the codec checks that it is one."""
IMPORTED_MAX = 200
"""Maximum number of keys of a LayoutImport, and of each list of a LayoutGroups."""
ENDS_MAX = 4096
"""Maximum partitions of a data topic before it grows: their ends fit one record."""
GROWN_MAX = 100_000
"""Maximum partitions of a data topic after it has grown: tools list all of them."""
GrownCount = Annotated[int, Meta(ge=1, le=GROWN_MAX)]
CHUNK_BYTES_MAX = 47 * 1024
"""Maximum bytes of a state in one record; a frame has at most 48 KiB."""
Data = Annotated[bytes, Meta(min_length=1, max_length=CHUNK_BYTES_MAX)]
TopicNames = Annotated[tuple[Name, ...], Meta(max_length=1000)]
Labels = Annotated[dict[ShortText, ShortText], Meta(max_length=64)]


class Fields(
    msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False
):
    """Base of all records: a MessagePack array of exactly these fields."""


class SenderFields(Fields, frozen=True, kw_only=True):
    """Base of records that begin with their sender: all but a Config (PROTOCOL 3.6)."""

    client_id: Name
    group_id: Name
    incarnation: Id
    seq: Sequence


class SenderArgs(TypedDict):
    """The fields of ``SenderFields``, as keyword arguments of a record."""

    client_id: str
    group_id: str
    incarnation: bytes
    seq: int


class Resume(Fields, frozen=True):
    """The claim that a restarted process resumes (PROTOCOL 4.4)."""

    incarnation: Id
    epoch: Offset
    secret: Id


class Limits(Fields, frozen=True, kw_only=True):
    """Bounds on the state that every reader keeps (PROTOCOL 2.2).

    None means the default, see ``LIMIT_DEFAULTS``.
    """

    span: Counting | None
    max_pause_ms: Offset | None
    keys: Counting | None
    groups: Counting | None
    beats: Counting | None
    forget_ms: Offset | None
    locks: Counting | None
    operations: Counting | None


LIMIT_DEFAULTS = {
    "span": 2**24,
    "max_pause_ms": 24 * 3_600_000,
    "keys": 100_000,
    "groups": 10_000,
    "beats": 4_096,
    "forget_ms": 30 * 24 * 3_600_000,
    "locks": 10_000,
    "operations": 1_000,
}


class Heartbeat(SenderFields, frozen=True, kw_only=True):
    """Renews a lease and carries the position (PROTOCOL 4.5)."""

    topic: Name
    partition: Partition
    epoch: Offset
    position: Offset | None
    rewind: bool
    tags: Tags | UnsetType = UNSET


class ClaimingPartition(SenderFields, frozen=True, kw_only=True):
    """Claims a key; the first that the fold accepts wins (PROTOCOL 4.3)."""

    generation: Counting
    topic: Name
    partition: Partition
    topic_id: Id | None
    resume_hash: Hash | None
    expected_epoch: Offset | None
    resume: Resume | None
    tags: Tags | UnsetType = UNSET


class ReleasingPartition(SenderFields, frozen=True, kw_only=True):
    """Releases a key at a position, optionally to a successor (PROTOCOL 4.6)."""

    topic: Name
    partition: Partition
    epoch: Offset
    position: Offset | None
    successor: Name | None
    reason: Text | None
    tags: Tags | UnsetType = UNSET


class ClaimingMessages(SenderFields, frozen=True, kw_only=True):
    """Requests a range of messages to process at most once (PROTOCOL 4.7)."""

    topic: Name
    partition: Partition
    epoch: Offset
    grantee: Id
    first: Offset
    proposed_last_offset: Offset
    tags: Tags | UnsetType = UNSET


class ForgettingPartition(SenderFields, frozen=True, kw_only=True):
    """Drops a key without an owner, with its granted offsets (PROTOCOL 4.9)."""

    topic: Name
    partition: Partition
    epoch: Offset
    tags: Tags | UnsetType = UNSET


class ReleaseGroup(SenderFields, frozen=True, kw_only=True):
    """Pauses a group until an append time, or ends the pause (PROTOCOL 4.8)."""

    op_id: Id
    msg_expire_time: Offset
    reason: Text | None
    tags: Tags | UnsetType = UNSET


class ScopedTopic(Fields, frozen=True):
    """Partitions of one topic, ascending; all of them if none is listed."""

    topic: Name
    partitions: tuple[Partition, ...]


SCOPE_TOPICS_MAX = 16
SCOPE_PARTITIONS_MAX = 256
"""Maximum number of partitions that a scope lists, over all its topics."""
Scope = Annotated[
    tuple[ScopedTopic, ...], Meta(min_length=1, max_length=SCOPE_TOPICS_MAX)
]
"""Partitions that a pause is limited to (PROTOCOL 4.15); topics ascend."""


class PauseGroup(SenderFields, frozen=True, kw_only=True):
    """Pauses a group or some partitions, now or later (PROTOCOL 4.14, 4.15)."""

    op_id: Id
    begin_time: Offset
    msg_expire_time: Offset
    scope: Scope | None
    reason: Text | None
    tags: Tags | UnsetType = UNSET


class StagedTopic(Fields, frozen=True):
    """The positions to set for partitions of one topic."""

    topic: Name
    topic_id: Id | None
    positions: Annotated[tuple[tuple[Partition, Offset], ...], Meta(min_length=1)]


class StagePosition(SenderFields, frozen=True, kw_only=True):
    """Locks keys of a paused group, with the positions to set (PROTOCOL 8.3)."""

    op_id: Id
    plan_digest: Id
    topics: Annotated[tuple[StagedTopic, ...], Meta(min_length=1)]
    tags: Tags | UnsetType = UNSET


class DecidePosition(SenderFields, frozen=True, kw_only=True):
    """Commits a set position, on the group's home partition (PROTOCOL 8.4)."""

    op_id: Id
    plan_digest: Id
    key_count: Counting
    tags: Tags | UnsetType = UNSET


class ResolvePosition(SenderFields, frozen=True, kw_only=True):
    """Unlocks the keys of a set position, committed or aborted (PROTOCOL 8.5)."""

    op_id: Id
    commit: bool
    decided: Offset | None
    reason: Text | None
    tags: Tags | UnsetType = UNSET


class FencingClient(SenderFields, frozen=True, kw_only=True):
    """Fences one process of a client in its group (PROTOCOL 4.13)."""

    fenced: Name
    fenced_incarnation: Id
    reason: Text | None
    tags: Tags | UnsetType = UNSET


class GroupSettings(SenderFields, frozen=True, kw_only=True):
    """Sets how the members of a group share and hand off partitions (PROTOCOL 9.1).

    None stands for the default of a setting.
    """

    generation: Counting
    policy: Name | None
    planner_version_max: Counting | None
    debounce_ms: Offset | None
    handoff_ms: Counting | None
    handoffs_max: Counting | None
    grace_ms: Offset | None
    reason: Text | None
    tags: Tags | UnsetType = UNSET


class HandoffOffer(SenderFields, frozen=True, kw_only=True):
    """Offers an owned key to a successor, which then warms up (PROTOCOL 9.4).

    Without a successor it withdraws the offer.
    """

    topic: Name
    partition: Partition
    epoch: Offset
    successor: Name | None
    within_ms: Counting
    tags: Tags | UnsetType = UNSET


class HandoffReady(SenderFields, frozen=True, kw_only=True):
    """Reports that the successor of an offer has warmed up (PROTOCOL 9.4)."""

    topic: Name
    partition: Partition
    epoch: Offset
    tags: Tags | UnsetType = UNSET


DRAIN: Literal["drain"] = "drain"
CORDON: Literal["cordon"] = "cordon"
Action = Literal["drain", "cordon"]
"""What a directive asks for (PROTOCOL 9.7)."""


class Directive(SenderFields, frozen=True, kw_only=True):
    """Drains or cordons a client or a host until an append time (PROTOCOL 9.7).

    It names either a client or a host.
    """

    op_id: Id
    client: Name | None
    host: Host | None
    action: Action
    msg_expire_time: Offset
    reason: Text | None
    tags: Tags | UnsetType = UNSET


class PlannedTopic(Fields, frozen=True):
    """A topic of a group, with the number of partitions that the planner found."""

    topic: Name
    partition_total: Counting


class PlannedMember(Fields, frozen=True):
    """The keys that a member should get: numbers of topics, each with partitions."""

    client_id: Name
    keys: tuple[tuple[Sequence, tuple[Partition, ...]], ...]


class Plan(SenderFields, frozen=True, kw_only=True):
    """Names members for the keys that should change hands (PROTOCOL 9.2).

    ``vector`` has, for each coordinating partition, the next offset that the planner
    would have folded, and its estimate of the milliseconds since the last entry.
    """

    follows: Offset
    number: Sequence
    slice_count: Counting
    planner_version: Counting
    vector: tuple[tuple[Offset, Offset], ...]
    input_digest: Id
    topics: tuple[PlannedTopic, ...]
    moves: tuple[PlannedMember, ...]
    tags: Tags | UnsetType = UNSET


class LayoutFence(SenderFields, frozen=True, kw_only=True):
    """Opens a change of the partition count in its partition (PROTOCOL 10.2)."""

    op_id: Id
    from_count: Counting
    config: ConfigFrame
    tags: Tags | UnsetType = UNSET


class ImportedPrevious(Fields, frozen=True):
    """What the last set position of an imported key replaced (PROTOCOL 8.6)."""

    op_id: Id
    position: Next | None
    granted: Next | None


class ImportedKey(Fields, frozen=True, kw_only=True):
    """A key as its source left it, without owner (PROTOCOL 10.4)."""

    group_id: Name
    topic: Name
    partition: Partition
    position: Next | None
    granted: Next | None
    topic_id: Id | None
    retired_topic_ids: Annotated[tuple[Id, ...], Meta(max_length=4)]
    previous: ImportedPrevious | None
    successor: Name | None


class LayoutImport(SenderFields, frozen=True, kw_only=True):
    """Brings final keys of a source to their new partition (PROTOCOL 10.4)."""

    op_id: Id
    source: Partition
    source_offset: Offset
    items: Annotated[
        tuple[ImportedKey, ...], Meta(min_length=1, max_length=IMPORTED_MAX)
    ]
    tags: Tags | UnsetType = UNSET


class LayoutDone(SenderFields, frozen=True, kw_only=True):
    """Declares that all keys of a source are imported here (PROTOCOL 10.5)."""

    op_id: Id
    source: Partition
    source_offset: Offset
    key_count: Sequence
    digest: Id
    tags: Tags | UnsetType = UNSET


class LayoutFinal(SenderFields, frozen=True, kw_only=True):
    """Ends a change of the partition count in its partition (PROTOCOL 10.6)."""

    op_id: Id
    tags: Tags | UnsetType = UNSET


class ImportedSettings(Fields, frozen=True, kw_only=True):
    """The settings of a group as its earlier home has them (PROTOCOL 10.4)."""

    group_id: Name
    generation: Counting
    policy: Name | None
    planner_version_max: Counting | None
    debounce_ms: Offset | None
    handoff_ms: Counting | None
    handoffs_max: Counting | None
    grace_ms: Offset | None


class ImportedDirective(Fields, frozen=True, kw_only=True):
    """A directive in force, as its earlier home has it (PROTOCOL 10.4)."""

    group_id: Name
    op_id: Id
    client_id: Name
    incarnation: Id
    seq: Sequence
    until_ms: Offset
    client: Name | None
    host: Host | None
    action: Action


class DataGrowth(SenderFields, frozen=True, kw_only=True):
    """Announces that a data topic grows, later the ends of its partitions (9.10).

    Attributes:
        topic: The topic.
        topic_id: Kafka's id of the topic, None if unknown.
        old_count: Number of partitions before.
        new_count: Number after, a multiple; ``old_count`` withdraws the growth.
        ends: End of each old partition once every producer knows the new count; None
            in an announcement.
        reason: For people.
    """

    topic: Name
    topic_id: Id | None
    old_count: Annotated[int, Meta(ge=1, le=ENDS_MAX)]
    new_count: GrownCount
    ends: Annotated[tuple[Offset, ...], Meta(min_length=1, max_length=ENDS_MAX)] | None
    reason: Text | None
    tags: Tags | UnsetType = UNSET


class LayoutGroups(SenderFields, frozen=True, kw_only=True):
    """Brings settings and directives of groups to their new home (PROTOCOL 10.4)."""

    op_id: Id
    source: Partition
    source_offset: Offset
    settings: Annotated[tuple[ImportedSettings, ...], Meta(max_length=IMPORTED_MAX)]
    directives: Annotated[tuple[ImportedDirective, ...], Meta(max_length=IMPORTED_MAX)]
    tags: Tags | UnsetType = UNSET


class BatchHeartbeat(SenderFields, frozen=True, kw_only=True):
    """Many heartbeats of one claimant in one record (PROTOCOL 3.6)."""

    beats: Beats
    tags: Tags | UnsetType = UNSET


class Config(Fields, frozen=True, kw_only=True):
    """Settings of the coordination topic, first in each partition (PROTOCOL 2.2)."""

    generation: Counting
    format_id: Id
    era: U32
    cluster_id: ShortText
    heartbeat_interval_ms: Counting
    partition_count: Counting
    feature_level: Counting
    limits: Limits
    tags: Tags | UnsetType = UNSET

    def limit(self, name: str) -> int:
        """Return the limit ``name``, its default if the record leaves it out."""
        value: int | None = getattr(self.limits, name)
        return LIMIT_DEFAULTS[name] if value is None else value


class Member(SenderFields, frozen=True, kw_only=True):
    """Announces a live consumer on its group's home partition; soft state."""

    topics: TopicNames
    host: ShortText
    capacity: Sequence
    load: Sequence
    labels: Labels
    draining: bool
    feature_level_max: Counting
    plan_generation: Sequence | None
    tags: Tags | UnsetType = UNSET


class Reset(SenderFields, frozen=True, kw_only=True):
    """One part of a state that replaces its partition's state (PROTOCOL 7.6)."""

    op_id: Id
    number: Sequence
    part_count: Counting
    size_bytes: Counting
    digest: Id
    data: Data
    tags: Tags | UnsetType = UNSET


class CheckpointBegin(SenderFields, frozen=True, kw_only=True):
    """Starts a checkpoint of the state after this record (PROTOCOL 7.2)."""

    epoch: Offset
    checkpoint_id: Id
    tags: Tags | UnsetType = UNSET


class CheckpointChunk(SenderFields, frozen=True, kw_only=True):
    """A part of a checkpoint's canonical bytes (PROTOCOL 7.2)."""

    epoch: Offset
    checkpoint_id: Id
    number: Sequence
    data: Data
    tags: Tags | UnsetType = UNSET


class CheckpointEnd(SenderFields, frozen=True, kw_only=True):
    """Completes a checkpoint; has its size and digest (PROTOCOL 7.2)."""

    epoch: Offset
    checkpoint_id: Id
    begin_offset: Offset
    begin_leader_epoch: Partition
    part_count: Counting
    size_bytes: Counting
    digest: Id
    tags: Tags | UnsetType = UNSET


Record = (
    Heartbeat
    | ClaimingPartition
    | ReleasingPartition
    | ClaimingMessages
    | ForgettingPartition
    | ReleaseGroup
    | BatchHeartbeat
    | StagePosition
    | DecidePosition
    | ResolvePosition
    | PauseGroup
    | FencingClient
    | GroupSettings
    | HandoffOffer
    | HandoffReady
    | Directive
    | Plan
    | LayoutFence
    | LayoutImport
    | LayoutDone
    | LayoutFinal
    | DataGrowth
    | LayoutGroups
    | Config
    | Reset
    | Member
    | CheckpointBegin
    | CheckpointChunk
    | CheckpointEnd
)


class Kind(NamedTuple):
    """One record type and version of the wire format."""

    number: int
    version: int
    name: str
    record: type[Fields]
    level: int


KINDS = (
    Kind(1, 0, "Heartbeat", Heartbeat, 1),
    Kind(2, 0, "ClaimingPartition", ClaimingPartition, 1),
    Kind(3, 0, "ReleasingPartition", ReleasingPartition, 1),
    Kind(4, 0, "ClaimingMessages", ClaimingMessages, 1),
    Kind(5, 0, "ReleaseGroup", ReleaseGroup, 1),
    Kind(6, 0, "BatchHeartbeat", BatchHeartbeat, 1),
    Kind(7, 0, "StagePosition", StagePosition, 2),
    Kind(8, 0, "DecidePosition", DecidePosition, 2),
    Kind(9, 0, "ResolvePosition", ResolvePosition, 2),
    Kind(10, 0, "PauseGroup", PauseGroup, 2),
    Kind(11, 0, "HandoffOffer", HandoffOffer, 2),
    Kind(12, 0, "HandoffReady", HandoffReady, 2),
    Kind(13, 0, "Config", Config, 1),
    Kind(14, 0, "Reset", Reset, 1),
    Kind(15, 0, "LayoutFence", LayoutFence, 2),
    Kind(16, 0, "LayoutImport", LayoutImport, 2),
    Kind(17, 0, "LayoutDone", LayoutDone, 2),
    Kind(18, 0, "ForgettingPartition", ForgettingPartition, 1),
    Kind(19, 0, "FencingClient", FencingClient, 2),
    Kind(20, 0, "LayoutFinal", LayoutFinal, 2),
    Kind(21, 0, "DataGrowth", DataGrowth, 2),
    Kind(22, 0, "Directive", Directive, 2),
    Kind(23, 0, "GroupSettings", GroupSettings, 2),
    Kind(24, 0, "LayoutGroups", LayoutGroups, 2),
    Kind(128, 0, "Member", Member, 1),
    Kind(129, 0, "Plan", Plan, 2),
    Kind(130, 0, "CheckpointBegin", CheckpointBegin, 1),
    Kind(131, 0, "CheckpointChunk", CheckpointChunk, 1),
    Kind(132, 0, "CheckpointEnd", CheckpointEnd, 1),
)
"""Every kind this release reads, with the feature level that introduced it."""

SECOND_LEVEL = 2
"""The feature level of the kinds marked 2; lowering the heartbeat interval needs it."""

SUPPORTED_LEVEL = 2
"""The highest feature level that this release can follow (PROTOCOL 3.3)."""
