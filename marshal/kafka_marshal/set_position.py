"""Sets the positions of a paused group, all or none (PROTOCOL 8.1 to 8.5).

The operation pauses the group, waits until its keys are free, locks them in each
coordinating partition (Stage), commits on the group's home (Decide) and then applies
the positions everywhere (Resolve). The caller stores its plan, with a fixed op_id,
before the first record, so that another process can continue after a crash.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b

import attrs
import msgspec

from kafka_marshal.engine.follower import Awaited, Follower
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    DeadlineExceeded,
    MarshalError,
)
from kafka_marshal.pausing import PauseOperation, Sender, held_keys
from kafka_marshal.ports import Clock
from kafka_marshal.protocol.hashing import coordinating_partition, home_partition
from kafka_marshal.protocol.records import (
    POSITION_LEVEL,
    ClaimingPartition,
    Config,
    DecidePosition,
    ReleasingPartition,
    ResolvePosition,
    StagedTopic,
    StagePosition,
)
from kafka_marshal.protocol.state import ACCEPTED, KeyState, WorldState
from kafka_marshal.protocol.types import Key

PLAN_VERSION = 1
STAGE_BYTES_MAX = 40_000
"""Estimated bytes of the positions of one Stage; a frame has at most 48 KiB."""
_TOPIC_BYTES, _POSITION_BYTES = 32, 16
COMMITTED, ABORTED, UNDECIDED = "committed", "aborted", "undecided"


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
        """The topic id as it stands in the log."""
        return None if self.topic_id is None else bytes.fromhex(self.topic_id)


class PositionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A set position, as it is stored before its first record.

    Attributes:
        version: Version of the file.
        op_id: Identifies the operation, in hex.
        group_id: The group.
        targets: The positions, by topic and partition, each partition once.
    """

    version: int = PLAN_VERSION
    op_id: str
    group_id: str
    targets: tuple[Target, ...]

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
            ConfigurationError: It is no plan, or one of a later version.
        """
        try:
            plan = msgspec.json.decode(value, type=cls)
            bytes.fromhex(plan.op_id)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ConfigurationError(
                f"the file is no plan of a set position: {error}", setting="plan"
            ) from error
        if plan.version != PLAN_VERSION:
            raise ConfigurationError(
                f"the plan has version {plan.version}, and this release reads "
                f"{PLAN_VERSION}; use the release that wrote it",
                setting="plan",
            )
        return plan


@attrs.frozen(kw_only=True)
class PositionResult:
    """Result of a set position.

    Attributes:
        op_id: Identifies the operation, in hex.
        outcome: ``committed`` or ``aborted``.
        moved: The keys that were set, with the positions before and after; empty if
            another process resolved the operation first.
    """

    op_id: str
    outcome: str
    moved: Mapping[Key, tuple[int | None, int]]


Check = Callable[[Mapping[Key, KeyState]], None]
"""Called with the keys of a plan once they are drained; raises to give up."""


class SetPosition:
    """Executes one plan, or continues it. For one thread.

    The home of the group decides: the operation is committed if and only if its
    DecidePosition was accepted there. A process that dies leaves keys locked at worst;
    ``run`` with the same plan continues, and ``finish`` ends it as the home decided.
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

        Raises:
            ConfigurationError: The topic has a feature level below 2.
        """
        if config.feature_level < POSITION_LEVEL:
            raise ConfigurationError(
                f"the coordination topic has feature level {config.feature_level}, and "
                f"positions can be set from level {POSITION_LEVEL} on; run: marshal "
                "topic upgrade",
                setting="coordination_topic",
            )
        self._follower = follower
        self._clock = clock
        self._sender = sender
        self._plan = plan
        self._config = config
        self._reason = reason
        self._op_id = bytes.fromhex(plan.op_id)
        self._group_id = plan.group_id
        count = config.partition_count
        self._home = home_partition(plan.group_id, partition_count=count)
        self._others = [t for t in range(count) if t != self._home]
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
            for_ms=for_ms,
            reason=reason,
            op_id=self._op_id,
        )

    # --- what the log says

    @property
    def outcome(self) -> str:
        """``committed``, ``aborted`` or ``undecided``, as of the home's last entry."""
        group = self._world(self._home).groups.get(self._group_id)
        verdict = None if group is None else group.verdict
        if verdict is not None and verdict.op_id == self._op_id:
            return COMMITTED
        is_over = group is not None and group.is_over(self._op_id)
        return ABORTED if is_over else UNDECIDED

    @property
    def locked(self) -> tuple[Key, ...]:
        """Keys that the operation has locked."""
        name = (self._group_id, self._op_id)
        return tuple(
            key for world in self._follower.worlds for key in world.locked.get(name, ())
        )

    def _world(self, partition: int) -> WorldState:
        return self._follower.replicas[partition].world

    # --- execution

    def run(
        self, timeout_ms: int, *, check: Check | None = None, drain_ms: int
    ) -> PositionResult:
        """Execute the plan, or continue it from wherever it is.

        Args:
            timeout_ms: Longest time for the verdicts of each step.
            check: Called once the keys are drained, before any is locked; what it
                raises ends the operation, and nothing is set.
            drain_ms: Longest time until every key of the group is free.

        Raises:
            GroupPaused: Another operation holds the group.
            ClaimRejected: Another operation has locked keys, or the log refuses one of
                the keys; nothing is set.
            DeadlineExceeded: The group was not drained in time, and nothing is set; or
                the log did not answer, and the operation can be continued.
        """
        self._follower.catch_up(timeout_ms)
        if self.outcome == UNDECIDED and not self.locked:
            self._require_free()
            self._create_keys(timeout_ms)
        if self.outcome == UNDECIDED:
            try:
                self._lock_keys(timeout_ms, check=check, drain_ms=drain_ms)
                self._decide(timeout_ms)
            except MarshalError as error:
                is_open = isinstance(error, DeadlineExceeded)
                if not is_open or isinstance(error, _NotDrained):
                    self._give_up(timeout_ms)
                raise
        return self.finish(timeout_ms)

    def finish(self, timeout_ms: int) -> PositionResult:
        """End the operation as the home decided; an undecided one is aborted.

        Raises:
            DeadlineExceeded: The log did not answer; call it again.
        """
        self._follower.catch_up(timeout_ms)
        if self.outcome == UNDECIDED:
            self._resolve([self._home], timeout_ms, commit=False)
        is_commit = self.outcome == COMMITTED
        before = self._positions()
        self._resolve(self._others, timeout_ms, commit=is_commit)
        self._resolve([self._home], timeout_ms, commit=is_commit)
        after = self._positions()
        moved = {
            key: (before[key], position)
            for key, position in after.items()
            if is_commit and position is not None and position != before.get(key)
        }
        outcome = COMMITTED if is_commit else ABORTED
        return PositionResult(op_id=self._plan.op_id, outcome=outcome, moved=moved)

    def _positions(self) -> dict[Key, int | None]:
        return {key: known.position for key, known in self._known().items()}

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

    def _require_free(self) -> None:
        """Check that no other operation of the group is unresolved."""
        other = next(
            (
                op_id
                for world in self._follower.worlds
                for group_id, op_id in world.locked
                if group_id == self._group_id
            ),
            None,
        )
        group = self._world(self._home).groups.get(self._group_id)
        if group is not None and group.unresolved is not None:
            other = group.unresolved.op_id
        if other is not None:
            raise ClaimRejected(
                f"operation {other.hex()} has set positions of group "
                f"{self._group_id!r} and is not resolved in every partition; wait "
                "until it is, or run it again with its plan",
                reason="busy",
            )

    # --- keys that the log does not know (PROTOCOL 8.3)

    def _create_keys(self, timeout_ms: int) -> None:
        """Claim and release keys that were never claimed, or only of an earlier topic.

        A Stage makes no keys: the epoch of a key is the offset of its claim.
        """
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

    def _is_missing(self, partition: int, target: Target) -> bool:
        known = self._world(partition).keys.get(self._plan.key(target))
        if known is None:
            return True
        names_topic = None not in {target.id_bytes, known.topic_id}
        return names_topic and target.id_bytes != known.topic_id

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

    def _lock_keys(
        self, timeout_ms: int, *, check: Check | None, drain_ms: int
    ) -> None:
        self._pause.begin(timeout_ms)
        if not self._pause.hold_until(self._is_drained, drain_ms):
            raise _NotDrained(
                f"group {self._group_id!r} still owns partitions after {drain_ms} ms "
                "of its pause; nothing is set; see: marshal claims list --group "
                f"{self._group_id}"
            )
        if check is not None:
            check(self._known())
        deadline_ms = self._clock.now_ms() + timeout_ms
        waiting = [
            (t, part) for t, targets in self._targets.items() for part in parts(targets)
        ]
        while waiting:
            waiting = self._stage(waiting, deadline_ms - self._clock.now_ms())

    def _is_drained(self) -> bool:
        now_ms = self._clock.now_ms()
        return not held_keys(self._follower, self._group_id, now_ms=now_ms)

    def _stage(
        self, waiting: list[tuple[int, tuple[StagedTopic, ...]]], timeout_ms: int
    ) -> list[tuple[int, tuple[StagedTopic, ...]]]:
        """Send Stages; return those to send again.

        ``held`` means that log time is behind the estimate; the timestamp of the
        refused record moves it (PROTOCOL 4.11).
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
            if verdict.outcome == ACCEPTED:
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
            **self._sender.fields(self._group_id),
            op_id=self._op_id,
            plan_digest=self._plan.digest,
            topics=part,
        )

    def _await(self, sent: list[Awaited], timeout_ms: int) -> None:
        """Wait for verdicts, and renew the pause meanwhile."""

        def have_all() -> bool:
            self._follower.require_folding(sent)
            return all(each.transition is not None for each in sent)

        if not self._pause.hold_until(have_all, max(0, timeout_ms)):
            raise DeadlineExceeded(
                "the coordination log did not answer in time; the operation is neither "
                "committed nor given up: run it again with its plan"
            )

    # --- commit and resolve

    def _decide(self, timeout_ms: int) -> None:
        record = DecidePosition(
            **self._sender.fields(self._group_id),
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
                f"the set position of group {self._group_id!r} was not committed "
                f"({reason}); nothing is set; run it again",
                reason=reason or "unknown",
            )

    def _give_up(self, timeout_ms: int) -> None:
        """Abort after an error, as far as the log answers; the error is reported."""
        try:
            self.finish(timeout_ms)
        except MarshalError:
            # The pause ends by itself, and ``finish`` can be called again.
            return

    def _resolve(
        self, partitions: Iterable[int], timeout_ms: int, *, commit: bool
    ) -> None:
        sent = [
            self._follower.append(t, self._resolve_record(commit=commit))
            for t in partitions
        ]
        self._follower.await_all(sent, timeout_ms)

    def _resolve_record(self, *, commit: bool) -> ResolvePosition:
        group = self._world(self._home).groups.get(self._group_id)
        verdict = None if group is None else group.verdict
        return ResolvePosition(
            **self._sender.fields(self._group_id),
            op_id=self._op_id,
            commit=commit,
            decided=verdict.offset if commit and verdict is not None else None,
            reason=self._reason,
        )


class _NotDrained(DeadlineExceeded):
    """The group still owns partitions."""


def _epoch_won(sent: Awaited) -> int | None:
    verdict = sent.transition
    is_won = verdict is not None and verdict.outcome == ACCEPTED
    return verdict.epoch if is_won and verdict is not None else None


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
