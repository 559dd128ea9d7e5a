"""Sets the positions of a paused group, all or none (PROTOCOL 8.1 to 8.6).

The operation pauses the group, waits until its keys are free, locks them in each
coordinating partition (Stage), commits on the group's home (Decide) and then applies
the positions everywhere (Resolve). The caller stores its plan, with a fixed op_id,
before the first record, so that another process can continue after a crash.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from hashlib import blake2b
from typing import Any

import attrs
import msgspec

from kafka_marshal.admin.finishing import (
    OnProgress,
    ResetProgress,
    ResetResult,
    Resolution,
    require_resolved,
)
from kafka_marshal.admin.pausing import (
    PauseOperation,
    Period,
    Sender,
    held_keys,
    ignore_progress,
)
from kafka_marshal.counting import counted
from kafka_marshal.deadline import Deadline
from kafka_marshal.engine.config_check import require_level
from kafka_marshal.engine.follower import Awaited, Follower
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    DeadlineExceeded,
    GroupPaused,
    MarshalError,
)
from kafka_marshal.ports import Clock
from kafka_marshal.protocol.hashing import coordinating_partition, home_partition
from kafka_marshal.protocol.placement import keys_of
from kafka_marshal.protocol.records import (
    ClaimingPartition,
    Config,
    DecidePosition,
    ReleasingPartition,
    StagedTopic,
    StagePosition,
)
from kafka_marshal.protocol.resolving import COMMITTED, UNDECIDED
from kafka_marshal.protocol.state import KeyState, WorldState
from kafka_marshal.protocol.text import abbreviated
from kafka_marshal.protocol.types import Key, TopicPartition, may_be_same_topic

PLAN_VERSION = 1
STAGE_BYTES_MAX = 40_000
"""Estimated bytes of the positions of one Stage; a frame has at most 48 KiB."""
_TOPIC_BYTES, _POSITION_BYTES = 32, 16


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The position to set for one partition.

    Attributes:
        topic: Data topic.
        topic_id: Kafka's id of the topic, in hex; None if the cluster has none.
        partition: Data partition.
        position: Next offset to process.
    """

    topic: str
    topic_id: str | None
    partition: int
    position: int

    @property
    def id_bytes(self) -> bytes | None:
        """The topic id as the log stores it."""
        return None if self.topic_id is None else bytes.fromhex(self.topic_id)


class PositionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that sets positions, stored before the first record of its operation.

    Attributes:
        version: Version of the file.
        op_id: Identifies the operation, in hex.
        group_id: The group.
        targets: The positions, by topic and partition, each partition once.
        undoes: The operation that this one undoes, in hex, or None.
        left_out: Topic and partition of keys that stay as they are, because the
            positions that they should go back to are unknown.
        allows_reprocess: Whether keys consumed at most once may go back, so that
            records are handed out twice.
        format_id: Format of the coordination topic for which the plan was made, in
            hex; None in plans of earlier releases.
    """

    version: int = PLAN_VERSION
    op_id: str
    group_id: str
    targets: tuple[Target, ...]
    undoes: str | None = None
    left_out: tuple[tuple[str, int], ...] = ()
    allows_reprocess: bool = False
    format_id: str | None = None

    def __post_init__(self) -> None:
        """Check that the plan can be executed.

        Raises:
            ConfigurationError: It has no positions, or names a partition twice.
        """
        if not self.targets:
            raise ConfigurationError(
                f"there is no position to set for group {self.group_id!r}",
                setting="targets",
            )
        if len({self.key(each) for each in self.targets}) < len(self.targets):
            raise ConfigurationError(
                f"a partition has two positions in the plan {self.op_id}",
                setting="targets",
            )

    @property
    def digest(self) -> bytes:
        """The digest of all positions (PROTOCOL 8.3)."""
        ordered = sorted(
            self.targets, key=lambda t: (t.topic, t.topic_id or "", t.partition)
        )
        listed = [[t.topic, t.id_bytes, t.partition, t.position] for t in ordered]
        return blake2b(msgspec.msgpack.encode(listed), digest_size=16).digest()

    def key(self, target: Target) -> Key:
        """Return the key of a target."""
        return Key(self.group_id, target.topic, target.partition)

    def to_bytes(self) -> bytes:
        """Return the plan as a JSON document."""
        return msgspec.json.encode(self)

    @classmethod
    def from_bytes(cls, value: bytes) -> "PositionPlan":
        """Return the plan that ``to_bytes`` wrote.

        Raises:
            ConfigurationError: It is not a plan, or has another version.
        """
        try:
            plan = msgspec.json.decode(value, type=cls)
            bytes.fromhex(plan.op_id)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ConfigurationError(
                f"the file is not a plan of marshal groups reset: {error}",
                setting="plan",
            ) from error
        if plan.version != PLAN_VERSION:
            raise ConfigurationError(
                f"the plan has version {plan.version}, and this release reads "
                f"{PLAN_VERSION}; use the release that wrote it",
                setting="plan",
            )
        return plan


def plan_undo(
    worlds: Iterable[WorldState],
    *,
    group_id: str,
    op_id: str,
    new_op_id: str,
    is_partial: bool = False,
) -> PositionPlan:
    """Return the plan that sets keys back to their positions before an operation.

    Under at most once, that is the larger of position and granted (PROTOCOL 5.6, 8.6).

    Args:
        worlds: All coordinating partitions, folded to their ends.
        group_id: The group.
        op_id: The operation to undo, in hex.
        new_op_id: Identifies the undo, in hex.
        is_partial: Whether to undo only the keys that can still be undone, if a later
            operation, a topic that was created again, or forgetting affects others.

    Raises:
        ClaimRejected: No key of the operation can be undone; or only some can, or
            perhaps only some, and ``is_partial`` is False.
    """
    worlds = list(worlds)
    operation = bytes.fromhex(op_id)
    keys = {
        key: (known.topic_id, before.next_unclaimed())
        for key, known in sorted(keys_of(worlds, group_id).items())
        if (before := known.before(operation))
    }
    targets = tuple(
        Target(
            topic=key.topic,
            topic_id=None if topic_id is None else topic_id.hex(),
            partition=key.partition,
            position=position,
        )
        for key, (topic_id, position) in keys.items()
        if position is not None
    )
    if keys and not targets:
        raise ClaimRejected(
            f"the partitions that operation {op_id} set had no positions before it, so "
            "none can be set back; to have the group start without positions again, "
            f"stop its members, then run: marshal claims forget {group_id} --force",
            reason="unknown_position",
        )
    if not targets:
        raise ClaimRejected(
            f"the log has no earlier positions of operation {op_id} of group "
            f"{group_id!r}: it was not committed, or later operations have set its "
            f"partitions; see: marshal groups history {group_id}",
            reason="unknown_operation",
        )
    if not is_partial:
        _require_every_key(worlds, group_id, op_id, keys.keys())
    return PositionPlan(
        op_id=new_op_id,
        group_id=group_id,
        targets=targets,
        undoes=op_id,
        left_out=tuple(
            (key.topic, key.partition)
            for key, (_, position) in keys.items()
            if position is None
        ),
        format_id=format_of(worlds),
    )


def format_of(worlds: Iterable[WorldState]) -> str | None:
    """Return the format of a coordination topic, in hex; None if it has none."""
    found = (each.config.format_id.hex() for each in worlds if each.config is not None)
    return next(found, None)


def _require_every_key(
    worlds: Sequence[WorldState], group_id: str, op_id: str, keys: AbstractSet[Key]
) -> None:
    count, found = _key_count(worlds, group_id, bytes.fromhex(op_id)), len(keys)
    others = [
        key
        for key, known in sorted(keys_of(worlds, group_id).items())
        if known.previous and key not in keys
    ]
    if count is not None and count != found:
        raise ClaimRejected(
            f"operation {op_id} set {counted(count, 'partition')}, and {found} of "
            "them can be set back: a topic was created again, or keys were forgotten; "
            "partial=True sets back only these",
            reason="partial",
        )
    if count is None and others:
        named = abbreviated(key.topic_partition for key in others)
        raise ClaimRejected(
            f"{found} partitions can be set back to before operation {op_id}, and "
            f"other operations were the last to set {named}; whether it had "
            "set some of these is not known any more; partial=True sets back only "
            "those that can be",
            reason="partial",
        )


def _key_count(worlds: Iterable[WorldState], group_id: str, op_id: bytes) -> int | None:
    """Return how many keys an operation set, None if its verdict was replaced."""
    for world in worlds:
        group = world.groups.get(group_id)
        verdict = None if group is None else group.verdict
        if verdict is not None and verdict.op_id == op_id:
            return verdict.key_count
    return None


def require_allowed(plan: PositionPlan, known: Mapping[Key, KeyState]) -> None:
    """Refuse a plan that no longer fits the keys.

    Raises:
        ClaimRejected: A key consumed at most once would go back, which the plan does
            not allow; or the log no longer has the positions that an undo restores.
    """
    for target in plan.targets:
        key = plan.key(target)
        state = known.get(key)
        if plan.undoes is not None:
            _require_undoable(plan, state, target)
        if state is None or plan.allows_reprocess:
            continue
        if not may_be_same_topic(target.id_bytes, state.topic_id):
            continue  # grants of an earlier topic with this name
        if state.repeats_from(target.position):
            raise ClaimRejected(
                f"{key.topic_partition} is consumed at most once up to offset "
                f"{state.next_unclaimed()}, and {target.position} hands out records "
                "again; nothing is set; allow_reprocess=True allows that",
                reason="reprocess",
            )


def _require_undoable(
    plan: PositionPlan, known: KeyState | None, target: Target
) -> None:
    assert plan.undoes is not None
    before = None if known is None else known.before(bytes.fromhex(plan.undoes))
    if before is None or before.next_unclaimed() != target.position:
        raise ClaimRejected(
            f"{plan.key(target).topic_partition} has changed since operation "
            f"{plan.undoes} set it; nothing is set; plan the undo again",
            reason="changed",
        )


class SetPosition:
    """Executes one plan, or continues it. For one thread.

    The home of the group decides: the operation is committed if and only if its
    DecidePosition was accepted there. If a process dies, keys may stay locked. Then
    ``run`` with the same plan continues the operation, and ``finish`` ends it as the
    home decided.
    """

    def __init__(
        self,
        follower: Follower,
        clock: Clock,
        sender: Sender,
        *,
        plan: PositionPlan,
        config: Config,
        for_ms: int,
        reason: str | None = None,
        on_progress: OnProgress = ignore_progress,
    ) -> None:
        """Prepare the operation; nothing is written yet.

        Args:
            follower: Follows the log, and has read it to its end.
            clock: Local and wall time.
            sender: Sender of the records.
            plan: The plan, stored where a later process finds it.
            config: The Config of all coordinating partitions.
            for_ms: Length of the pause, renewed until the commit.
            reason: Stored in the log, for people.
            on_progress: Called with each step, and as a step progresses.

        Raises:
            ConfigurationError: The topic has a feature level below 2.
        """
        require_level(config, "setting positions")
        self._follower = follower
        self._clock = clock
        self._sender = sender
        self._plan = plan
        self._config = config
        self._on_progress = on_progress
        self._reported: ResetProgress | None = None
        self._op_id = bytes.fromhex(plan.op_id)
        self._group_id = plan.group_id
        count = config.partition_count
        self._home = home_partition(plan.group_id, partition_count=count)
        self._resolution = Resolution(
            follower,
            sender,
            group_id=plan.group_id,
            op_id=plan.op_id,
            config=config,
            reason=reason,
            on_progress=on_progress,
        )
        self._targets: dict[int, list[Target]] = {}
        for target in plan.targets:
            t = coordinating_partition(
                target.topic, target.partition, partition_count=count
            )
            self._targets.setdefault(t, []).append(target)
        self._pause = PauseOperation(
            follower,
            clock,
            sender,
            group_id=plan.group_id,
            partition_count=count,
            period=Period(for_ms=for_ms),
            reason=reason,
            op_id=self._op_id,
        )

    # --- what the log says

    @property
    def outcome(self) -> str:
        """The outcome of the operation; see ``Resolution.outcome``."""
        return self._resolution.outcome

    @property
    def locked(self) -> tuple[Key, ...]:
        """Keys that the operation has locked."""
        return self._resolution.locked

    def _world(self, partition: int) -> WorldState:
        return self._follower.replicas[partition].world

    # --- execution

    def run(self, timeout_ms: int, *, drain_ms: int) -> ResetResult:
        """Execute the plan, or continue it from wherever it is.

        Args:
            timeout_ms: Longest time for the verdicts of each step.
            drain_ms: Longest time until every key of the group is free.

        Raises:
            GroupPaused: Another operation has paused the group, or a key to create.
            ClaimRejected: Another operation has locked keys; the log refuses one of the
                keys; or the plan no longer fits the keys, before the pause or after the
                drain (``require_allowed``). Nothing is set.
            DeadlineExceeded: The group was not drained in time, and nothing is set; or
                the log did not answer, and the operation can be continued.
        """
        self._follower.catch_up(timeout_ms)
        if self.outcome == UNDECIDED and not self.locked:
            require_resolved(self._follower.worlds, self._group_id)
            require_allowed(self._plan, self._known())
            self._create_keys(timeout_ms)
        if self.outcome == UNDECIDED:
            try:
                self._lock_keys(timeout_ms, drain_ms=drain_ms)
                self._decide(timeout_ms)
            except MarshalError as error:
                is_open = isinstance(error, DeadlineExceeded)
                if not is_open or isinstance(error, NotDrained):
                    self._give_up(timeout_ms)
                raise
        return self.finish(timeout_ms)

    def finish(self, timeout_ms: int) -> ResetResult:
        """End the operation as the home decided; an undecided one is aborted.

        Raises:
            DeadlineExceeded: The log did not answer; call it again.
        """
        result = self._resolution.finish(timeout_ms)
        positions = {
            TopicPartition(each.topic, each.partition): each.position
            for each in self._plan.targets
        }
        moved = {
            place: (before, positions.get(place, after))
            for place, (before, after) in result.moved.items()
        }
        return attrs.evolve(result, moved=moved)

    def _known(self) -> dict[Key, KeyState]:
        """Return the keys of the plan that the log knows."""
        found = {}
        for t, targets in self._targets.items():
            keys = self._world(t).keys
            for target in targets:
                key = self._plan.key(target)
                if key in keys:
                    found[key] = keys[key]
        return found

    # --- keys that the log does not know (PROTOCOL 8.3)

    def _create_keys(self, timeout_ms: int) -> None:
        """Claim and release keys that the log lacks, or has only of an earlier topic.

        A Stage creates no keys, because the epoch of a key is the offset of its claim.

        Raises:
            GroupPaused: A pause of some partitions has one of the keys (PROTOCOL 4.15).
        """
        if self._plan.undoes is not None:
            return  # keys have the positions to restore, which a claim may drop
        missing = [
            (t, target)
            for t, targets in self._targets.items()
            for target in targets
            if self._is_missing(t, target)
        ]
        claims = [
            (target, self._follower.append(t, self._claim(t, target)))
            for t, target in missing
        ]
        self._follower.await_all([sent for _, sent in claims], timeout_ms)
        releases = [
            self._follower.append(sent.partition, self._release(target, epoch))
            for target, sent in claims
            if (epoch := _epoch_won(sent)) is not None
        ]
        self._follower.await_all(releases, timeout_ms)
        for target, sent in claims:
            verdict = sent.transition
            if verdict is not None and verdict.reason == "paused":
                self._require_unpaused(sent.partition, target)

    def _require_unpaused(self, partition: int, target: Target) -> None:
        """Refuse a key that a pause of some partitions has.

        A pause of the whole group is judged later.

        Raises:
            GroupPaused: There is such a pause.
        """
        pause = self._world(partition).pause_of(self._plan.key(target))
        if pause is not None and pause.scope is not None:
            raise GroupPaused(
                f"{target.topic}-{target.partition} was never claimed, and is paused "
                f"by operation {pause.op_id.hex()} of {pause.client_id!r}; nothing is "
                f"set; end that first with: marshal groups resume {self._group_id} "
                f"--operation {pause.op_id.hex()}",
                until_ms=pause.until_ms,
                by=pause.client_id,
            )

    def _is_missing(self, partition: int, target: Target) -> bool:
        known = self._world(partition).keys.get(self._plan.key(target))
        return known is None or not may_be_same_topic(target.id_bytes, known.topic_id)

    def _claim(self, partition: int, target: Target) -> ClaimingPartition:
        known = self._world(partition).keys.get(self._plan.key(target))
        return ClaimingPartition(
            **self._sender.fields(self._group_id),
            generation=self._config.generation,
            topic=target.topic,
            partition=target.partition,
            topic_id=target.id_bytes,
            resume_hash=None,
            expected_epoch=None if known is None else known.epoch,
            resume=None,
        )

    def _release(self, target: Target, epoch: int) -> ReleasingPartition:
        return ReleasingPartition(
            **self._sender.fields(self._group_id),
            topic=target.topic,
            partition=target.partition,
            epoch=epoch,
            position=None,
            successor=None,
            reason="position_set",
        )

    # --- pause, drain, stage

    def _lock_keys(self, timeout_ms: int, *, drain_ms: int) -> None:
        self._report("pause", self._config.partition_count)
        self._pause.begin(timeout_ms)
        self._require_one_config()
        if not self._pause.hold_until(self._is_drained, drain_ms):
            raise NotDrained(
                f"group {self._group_id!r} still owns partitions after {drain_ms} ms "
                "of its pause; nothing is set; see: marshal claims list --group "
                f"{self._group_id}"
            )
        require_allowed(self._plan, self._known())
        deadline = Deadline(timeout_ms, self._clock.now_ms)
        waiting = [
            (t, part) for t, targets in self._targets.items() for part in parts(targets)
        ]
        while waiting:
            self._report("lock", len(waiting))
            waiting = self._stage(waiting, deadline.left_ms)

    def _require_one_config(self) -> None:
        """Refuse to continue if partitions accepted the pause under different Configs.

        The pause makes partition 0 refuse a change of the partition count (PROTOCOL
        10.2). A change that partition 0 accepted before may have moved the home.

        Raises:
            ClaimRejected: A partition has another Config than the operation began with.
        """
        for t in range(self._config.partition_count):
            config = self._world(t).config
            if config is None or config.generation != self._config.generation:
                raise ClaimRejected(
                    "the Config of the coordination topic is changing (coordinating "
                    f"partition {t} has another one); nothing is set; when marshal "
                    "topic info shows no change, plan it again",
                    reason="wrong_generation",
                )

    def _is_drained(self) -> bool:
        now_ms = self._clock.now_ms()
        held = held_keys(self._follower, self._group_id, now_ms=now_ms)
        self._report("drain", len(held))
        return not held

    def _report(self, step: str, left_count: int) -> None:
        """Report progress if it has changed."""
        progress = ResetProgress(step=step, left_count=left_count)
        if progress != self._reported:
            self._reported = progress
            self._on_progress(progress)

    def _stage(
        self, waiting: list[tuple[int, tuple[StagedTopic, ...]]], timeout_ms: int
    ) -> list[tuple[int, tuple[StagedTopic, ...]]]:
        """Send Stages; return those to send again.

        A refusal ``held`` means that log time is behind the estimate of it. The
        timestamp of the refused record moves log time (PROTOCOL 4.11).
        """
        sent = [
            (t, part, self._follower.append(t, self._stage_record(part)))
            for t, part in waiting
        ]
        self._await([each for *_, each in sent], timeout_ms)
        again = []
        for t, part, awaited in sent:
            verdict = awaited.transition
            assert verdict is not None
            if awaited.is_accepted:
                continue
            if verdict.reason != "held":
                raise ClaimRejected(
                    f"coordinating partition {t} refuses to lock {verdict.key} for a "
                    f"new position ({verdict.reason}); nothing is set; plan it again",
                    reason=verdict.reason or "unknown",
                )
            again.append((t, part))
        return again

    def _stage_record(self, part: tuple[StagedTopic, ...]) -> StagePosition:
        return StagePosition(
            **self._fields(),
            op_id=self._op_id,
            plan_digest=self._plan.digest,
            topics=part,
        )

    def _fields(self) -> dict[str, Any]:
        undoes = self._plan.undoes
        operation = None if undoes is None else bytes.fromhex(undoes)
        return self._sender.fields(self._group_id, undoes=operation)

    def _await(self, sent: list[Awaited], timeout_ms: int) -> None:
        """Wait for verdicts; renew the pause meanwhile."""

        def have_all() -> bool:
            self._follower.require_folding(sent)
            return all(each.transition is not None for each in sent)

        if not self._pause.hold_until(have_all, max(0, timeout_ms)):
            raise DeadlineExceeded(
                "the coordination log did not respond in time; the operation is "
                "neither committed nor aborted: run it again with its plan"
            )

    # --- commit and resolve

    def _decide(self, timeout_ms: int) -> None:
        self._report("commit", 1)
        record = DecidePosition(
            **self._fields(),
            op_id=self._op_id,
            plan_digest=self._plan.digest,
            key_count=len(self._plan.targets),
        )
        sent = self._follower.append(self._home, record)
        self._await([sent], timeout_ms)
        if self.outcome != COMMITTED:
            verdict = sent.transition
            reason = "unknown" if verdict is None else verdict.reason
            raise ClaimRejected(
                f"the new positions of group {self._group_id!r} were not committed "
                f"({reason}); nothing is set; run it again",
                reason=reason or "unknown",
            )

    def _give_up(self, timeout_ms: int) -> None:
        """Abort after an error, as far as the log answers; the caller raises it."""
        try:
            self.finish(timeout_ms)
        except MarshalError:
            # The pause ends by itself, and ``finish`` can be called again.
            return


class NotDrained(DeadlineExceeded):
    """The group still owns partitions after its time; nothing is set."""


def _epoch_won(sent: Awaited) -> int | None:
    verdict = sent.transition
    return verdict.epoch if verdict is not None and sent.is_accepted else None


def parts(targets: Iterable[Target]) -> Iterator[tuple[StagedTopic, ...]]:
    """Split the positions of one coordinating partition into records that fit."""
    topics: dict[tuple[str, bytes | None], list[tuple[int, int]]] = {}
    size = 0
    for target in sorted(targets, key=lambda t: (t.topic, t.partition)):
        name = (target.topic, target.id_bytes)
        added = _POSITION_BYTES
        if name not in topics:
            added += _TOPIC_BYTES + len(target.topic)
        if topics and size + added > STAGE_BYTES_MAX:
            yield _staged(topics)
            topics, size = {}, 0
            added = _POSITION_BYTES + _TOPIC_BYTES + len(target.topic)
        topics.setdefault(name, []).append((target.partition, target.position))
        size += added
    if topics:
        yield _staged(topics)


def _staged(
    topics: Mapping[tuple[str, bytes | None], list[tuple[int, int]]],
) -> tuple[StagedTopic, ...]:
    return tuple(
        StagedTopic(topic, topic_id, tuple(positions))
        for (topic, topic_id), positions in topics.items()
    )
