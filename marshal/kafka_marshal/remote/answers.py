"""Answers of a sidecar: the state of the log, its clients, and actions on groups."""

from typing import Any

from kafka_marshal.remote.api import Message


class AsOf(Message, frozen=True, kw_only=True):
    """The moment that an answer describes.

    Attributes:
        time_ms: Wall-clock time of the answer, epoch ms.
        offsets: Next offset of each coordinating partition that was folded.
    """

    time_ms: int
    offsets: dict[str, int]


class WorldNow(Message, frozen=True, kw_only=True):
    """``GET /v1/world``: the world document of all commands (PROTOCOL 3.8)."""

    as_of: AsOf
    schema: int
    partitions: dict[str, dict[str, Any]]


class GroupLine(Message, frozen=True, kw_only=True):
    """One group of ``GET /v1/groups``.

    Attributes:
        group: Its name.
        keys: Number of partitions that it ever claimed and that are not forgotten.
        owned: Number of them that have an owner.
        owners: The owners, by the log.
        is_paused: Whether it is paused.
        pauses: Its pauses, with the fields that ``marshal groups describe`` prints.
    """

    group: str
    keys: int
    owned: int
    owners: tuple[str, ...]
    is_paused: bool
    pauses: tuple[dict[str, Any], ...] = ()


class GroupsNow(Message, frozen=True, kw_only=True):
    """``GET /v1/groups``: every group of the log, by name."""

    as_of: AsOf
    groups: tuple[GroupLine, ...]


class Handoff(Message, frozen=True, kw_only=True):
    """A partition whose successor warms up, or is ready.

    Attributes:
        topic: Data topic.
        partition: Data partition.
        owner: Owner by the log.
        successor: The client_id that it is offered to.
        phase: ``offered``, or ``ready`` once the successor has warmed up.
        since_ms: When it was offered, epoch ms; None if that was not read.
        until_ms: Latest time to become ready, epoch ms.
        from_client: The client of this sidecar that has it, None on another host.
        to_client: The client of this sidecar that warms up, None on another host.
    """

    topic: str
    partition: int
    owner: str
    successor: str
    phase: str
    since_ms: int | None
    until_ms: int
    from_client: str | None = None
    to_client: str | None = None


class GroupNow(Message, frozen=True, kw_only=True):
    """``GET /v1/groups/{group}``: claims and pauses as in the world document.

    Attributes:
        as_of: The moment that the answer describes.
        group: Its name.
        claims: One for each partition.
        pauses: Pauses, also those that begin later.
        handoffs: Open handoffs in the log, and those between clients of this sidecar.
    """

    as_of: AsOf
    group: str
    claims: tuple[dict[str, Any], ...]
    pauses: tuple[dict[str, Any], ...]
    handoffs: tuple[Handoff, ...] = ()


class PlanNow(Message, frozen=True, kw_only=True):
    """``GET /v1/groups/{group}/plan``: as ``marshal plan show -o json`` prints it.

    Attributes:
        as_of: The moment that the answer describes.
        group_id: The group.
        policy: Its policy; members follow Plans only under ``planner``.
        generation: How many Plans (slices) there were; 0 for an unknown group.
        is_known: Whether all slices of the last Plan were read.
        author: client_id that wrote the last Plan.
        offset: Offset of its last slice in the group's coordinating partition.
        planner_version: Version of the planner.
        input_digest: Digest of the planner's input, in hex.
        open_count: Entries that are not done and not void.
        uncovered_count: Partitions that no member can have.
        lag: Lag of all partitions; None, because a sidecar does not look up log ends.
        lag_unknown_count: Partitions of which the lag is unknown.
        members: The live members, with what each holds, will get and will give up.
        keys: Its entries: holder, planned member, and state.
        handoffs: Open handoffs by the log.
        standbys: The members that stand by for partitions, in order.
        uncovered: Partitions that no member can have, and why.
    """

    as_of: AsOf
    group_id: str
    policy: str
    generation: int
    is_known: bool
    author: str | None
    offset: int | None
    planner_version: int | None
    input_digest: str | None
    open_count: int
    uncovered_count: int
    lag: int | None
    lag_unknown_count: int
    members: tuple[dict[str, Any], ...]
    keys: tuple[dict[str, Any], ...]
    handoffs: tuple[dict[str, Any], ...]
    standbys: tuple[dict[str, Any], ...]
    uncovered: tuple[dict[str, Any], ...]


class LocalClient(Message, frozen=True, kw_only=True):
    """One client of this sidecar.

    Attributes:
        group: Its group.
        client: Its name in the group, known to this sidecar only.
        pid: Its process, None over TCP.
        state: The sidecar's view of it in one word: ``ready``, ``silent``...
        beat_age_ms: Time since its last beat, None before the first.
        subscriptions: Names of its subscriptions.
        assigned: Partitions that it holds, as ``topic-partition``.
        lease_until_ms: Latest deadline that the sidecar sent to it, None for none.
        warming: Partitions that it warms up for, as ``topic-partition``.
    """

    group: str
    client: str
    pid: int | None
    state: str
    beat_age_ms: int | None
    subscriptions: tuple[str, ...]
    assigned: tuple[str, ...]
    lease_until_ms: int | None
    warming: tuple[str, ...] = ()


class ClientsNow(Message, frozen=True, kw_only=True):
    """``GET /v1/clients``: the clients registered with this sidecar."""

    as_of: AsOf
    clients: tuple[LocalClient, ...]


class OwnersNow(Message, frozen=True, kw_only=True):
    """``GET /v1/groups/{group}/owners/{topic}``: the owner of each partition."""

    as_of: AsOf
    owners: dict[int, str | None]


class FenceNow(Message, frozen=True, kw_only=True):
    """``GET .../owners/{topic}/{partition}``: the newest claim, for sinks to compare.

    Attributes:
        as_of: The moment that the answer describes.
        token: Token of the newest claim, None if the key was never claimed.
        epoch: Epoch of the newest claim.
        client_id: Owner, None if the claim was released.
        incarnation: Incarnation of the owner.
        position: All offsets below are processed, by the log.
    """

    as_of: AsOf
    token: str | None
    epoch: int | None
    client_id: str | None
    incarnation: str | None
    position: int | None


class Verdict(Message, frozen=True, kw_only=True):
    """``GET /livez``, ``/readyz``, ``/startupz``: 200 if ``ok``, else 503.

    Attributes:
        ok: Whether the check passed.
        state: State of the sidecar, such as ``RUNNING``.
        reasons: Why the check failed, a sentence each; if it passed, the details.
    """

    ok: bool
    state: str
    reasons: tuple[str, ...]


class PauseNow(Message, frozen=True, kw_only=True):
    """``POST /v1/groups/{group}/pause``: the pause that was written.

    Attributes:
        group: The group.
        is_executed: Whether it was written; false for a dry run.
        op_id: Identifies the pause, for ``operation`` of a resume; empty for a dry run.
        begin_ms: When it begins by itself, epoch ms; None if it has begun.
        until_ms: When it ends by itself, epoch ms.
        topics: Topics that it is limited to, like ``orders:0,1``; empty for no limit.
        held: Paused partitions that are not released yet, ``topic-partition``.
    """

    group: str
    is_executed: bool
    op_id: str
    begin_ms: int | None
    until_ms: int
    held: tuple[str, ...]
    topics: tuple[str, ...] = ()


class ResumeNow(Message, frozen=True, kw_only=True):
    """``POST /v1/groups/{group}/resume``.

    Attributes:
        group: The group.
        is_executed: Whether it was written; false for a dry run.
        partitions_count: Coordinating partitions in which a pause was, or would be,
            ended.
    """

    group: str
    is_executed: bool
    partitions_count: int


class ResetRow(Message, frozen=True, kw_only=True):
    """What a reset does, or did, to one partition.

    Attributes:
        topic: Data topic.
        partition: Data partition.
        before: Position before, None without one.
        after: Position after.
        lag_before: Records behind the position before, None without one.
        lag_after: Records behind the position after.
        repeats: Whether records are handed out again despite delivery at most once.
        note: ``clamped``, ``order of keys lost`` (after a growth of the topic),
            ``handed out again``, or None.
    """

    topic: str
    partition: int
    before: int | None
    after: int
    lag_before: int | None
    lag_after: int
    repeats: bool
    note: str | None


class ResetNow(Message, frozen=True, kw_only=True):
    """``POST /v1/groups/{group}/reset``, ``/undo``: the plan, or its result.

    Attributes:
        group: The group.
        op_id: Identifies the plan, and its operation if it is executed.
        undoes: The reset that an undo reverts, else None.
        is_executed: Whether the positions are set; otherwise this is a plan.
        outcome: ``committed`` once executed, None for a plan.
        undo_id: The ``op_id`` to send to undo it, None for a plan.
        mirror_error: Why Kafka's committed offsets were not written, if they were not.
        left_out: Partitions that had no position before, and stay as they are.
        rows: The partitions.
    """

    group: str
    op_id: str
    undoes: str | None
    is_executed: bool
    outcome: str | None
    undo_id: str | None
    mirror_error: str | None
    left_out: tuple[str, ...]
    rows: tuple[ResetRow, ...]


class FinishedReset(Message, frozen=True, kw_only=True):
    """One reset that was finished.

    Attributes:
        op_id: The operation.
        outcome: ``committed``, ``aborted`` or ``unknown``.
        moved_count: Partitions that it set.
    """

    op_id: str
    outcome: str
    moved_count: int


class FinishNow(Message, frozen=True, kw_only=True):
    """``POST /v1/groups/{group}/finish``.

    Attributes:
        group: The group.
        operations: The resets that were open; empty if there were none.
    """

    group: str
    operations: tuple[FinishedReset, ...]


class HistoryNow(Message, frozen=True, kw_only=True):
    """``GET /v1/groups/{group}/history``: what admins did, oldest first.

    Attributes:
        as_of: The moment that the answer describes.
        group: The group.
        actions_count: Number of all actions on the group, also beyond ``limit``.
        records_count: Number of records of admins that were read.
        began_at: Offset at which the history of a coordinating partition begins, if
            retention has deleted the start of its log.
        actions: As in ``marshal groups history -o json``.
    """

    as_of: AsOf
    group: str
    actions_count: int
    records_count: int
    began_at: dict[str, int]
    actions: tuple[dict[str, Any], ...]
