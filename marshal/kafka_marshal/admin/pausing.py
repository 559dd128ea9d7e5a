"""Pauses a group in all coordinating partitions and renews it (PROTOCOL 8.1)."""

import getpass
import os
import re
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import attrs

from kafka_marshal.arguments import to_whole
from kafka_marshal.clock import duration, instant
from kafka_marshal.deadline import Deadline
from kafka_marshal.engine.config_check import require_level
from kafka_marshal.engine.follower import Awaited, Follower
from kafka_marshal.engine.kept_states import POLL_MS
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    DeadlineExceeded,
    GroupPaused,
    LogUnwritable,
)
from kafka_marshal.ports import Clock
from kafka_marshal.protocol.codec import OP_ID_BYTES, is_scope, person_to_tags
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.items import Pause, is_in_scope
from kafka_marshal.protocol.judging import PAUSE_AHEAD_MS_MAX
from kafka_marshal.protocol.records import (
    SCOPE_PARTITIONS_MAX,
    SCOPE_TOPICS_MAX,
    Config,
    PauseGroup,
    ReleaseGroup,
    Scope,
    ScopedTopic,
)
from kafka_marshal.protocol.state import (
    SCHEDULED_MAX,
    SCOPED_MAX,
)
from kafka_marshal.protocol.types import Key

RENEWALS_PER_PAUSE = 3
EXPIRED_MAX = 5
"""Maximum records to one partition in a row that expire before they are appended."""
HOST_CHARS_MAX = 255
_TOPIC = re.compile(r"(?P<topic>[^:]+)(:(?P<numbers>\d{1,10}(,\d{1,10})*))?", re.ASCII)
ENDED = 0
"""Expiry of a record that ends a pause."""


def ignore_progress(_progress: object) -> None:
    """Ignore the progress of an operation."""


def current_person() -> str | None:
    """Return the person who runs this process; None if the machine does not know.

    ``MARSHAL_AS``, else the name of the user.
    """
    chosen = os.environ.get("MARSHAL_AS")
    if chosen is not None:
        return chosen or None
    try:
        return getpass.getuser() or None
    except (ImportError, KeyError, OSError):  # a container's user may have no name
        return None


class Sender:
    """The sender of records about groups, which numbers its records.

    Attributes:
        client_id: Name of the sender in the log.
        tags: Tags of each record, which name the person.
        host: Name of the sender's machine.
    """

    def __init__(self, client_id: str, person: str | None = None) -> None:
        """Begin a new incarnation.

        Args:
            client_id: Name of the sender in the log.
            person: Name of the person for whom it writes, None for none.
        """
        self.client_id = client_id
        self.tags = person_to_tags(person)
        self.host = socket.gethostname()[:HOST_CHARS_MAX]
        self._person = person
        self._incarnation = secrets.token_bytes(16)
        self._seq = 0

    def new_op_id(self) -> bytes:
        """Return a random id for a new operation."""
        return secrets.token_bytes(OP_ID_BYTES)

    def fields(self, group_id: str, *, undoes: bytes | None = None) -> dict[str, Any]:
        """Return the leading fields of the next record about a group.

        Args:
            group_id: The group.
            undoes: op_id of the operation that the record helps to undo, None for none.
        """
        self._seq += 1
        tags = self.tags
        if undoes is not None:
            tags = person_to_tags(self._person, undoes=undoes)
        return {
            "client_id": self.client_id,
            "group_id": group_id,
            "incarnation": self._incarnation,
            "seq": self._seq,
            "tags": tags,
        }

    def record(
        self, group_id: str, op_id: bytes, *, expire_ms: int, reason: str | None
    ) -> ReleaseGroup:
        """Return the next record, which pauses a group until ``expire_ms``."""
        return ReleaseGroup(
            **self.fields(group_id),
            op_id=op_id,
            msg_expire_time=expire_ms,
            reason=reason,
        )


@attrs.frozen(kw_only=True)
class Period:
    """When a pause begins and ends.

    Attributes:
        for_ms: Length of the pause, and of each renewal.
        until_ms: Fixed end in epoch ms, which renewals do not move; None if the pause
            ends ``for_ms`` after its last record.
        begin_ms: Begin in epoch ms of a pause that begins by itself; None for a pause
            that begins with its record.
    """

    for_ms: int
    until_ms: int | None = None
    begin_ms: int | None = None


def period_of(
    config: Config,
    for_ms: int | None,
    *,
    until_ms: int | None,
    begin_ms: int | None,
    wall_ms: int,
) -> Period:
    """Return when a pause begins and ends, checked against the log's limits.

    Raises:
        ConfigurationError: The period is invalid, or needs feature level 2.
    """
    if (for_ms is None) == (until_ms is None):
        raise ConfigurationError(
            "a pause has either a length (for_ms) or an end (until_ms)",
            setting="for_ms",
        )
    given = {"for_ms": for_ms, "until_ms": until_ms, "begin_ms": begin_ms}
    for name, value in given.items():
        if value is not None:
            to_whole(name, value)
    since_ms = wall_ms if begin_ms is None else begin_ms
    length_ms = for_ms if until_ms is None else until_ms - since_ms
    longest_ms = config.limit("max_pause_ms")
    if until_ms is not None and until_ms <= since_ms:
        raise ConfigurationError(
            f"a pause from {instant(since_ms)} on cannot end at {instant(until_ms)}",
            setting="until_ms",
        )
    if length_ms is None or not 0 < length_ms <= longest_ms:
        given_text = duration(length_ms or 0)
        raise ConfigurationError(
            f"a pause lasts 1ms to {duration(longest_ms)}, not {given_text}",
            setting="for_ms" if until_ms is None else "until_ms",
        )
    if begin_ms is None:
        return Period(for_ms=length_ms, until_ms=until_ms)
    if not wall_ms < begin_ms <= wall_ms + PAUSE_AHEAD_MS_MAX:
        raise ConfigurationError(
            "a scheduled pause must begin within the next 30 days; without a begin it "
            "begins at once",
            setting="begin_ms",
        )
    require_level(config, "a scheduled pause")
    end_ms = begin_ms + length_ms
    return Period(for_ms=length_ms, until_ms=end_ms, begin_ms=begin_ms)


def parse_topics(texts: Iterable[object]) -> dict[str, frozenset[int] | None]:
    """Parse texts like ``topic`` or ``topic:0,1``; return partitions by topic.

    The value is None for all partitions of a topic.

    Raises:
        ConfigurationError: A text has neither form, or ``texts`` is a single text.
    """
    if isinstance(texts, str):
        raise ConfigurationError(
            f"topics must be a list, like [{texts!r}], not the text {texts!r}",
            setting="topics",
        )
    found: dict[str, frozenset[int] | None] = {}
    for text in texts:
        match = _TOPIC.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ConfigurationError(
                f"{text!r} is not a topic, or like topic:0,1", setting="topics"
            )
        topic, numbers = match["topic"], match["numbers"]
        known = found.get(topic, frozenset())
        if numbers is None or known is None:
            found[topic] = None
        else:
            found[topic] = known | {int(each) for each in numbers.split(",")}
    return found


def scope_of_topics(
    config: Config, wanted: Mapping[str, Iterable[int] | None]
) -> Scope:
    """Return the scope of a pause, checked against the limits (PROTOCOL 4.15).

    Args:
        config: The Config in force.
        wanted: Partitions by topic, None for all partitions of the topic.

    Raises:
        ConfigurationError: The scope is invalid, or needs feature level 2.
    """
    require_level(config, "a pause of some topics")
    scope = tuple(
        ScopedTopic(topic, tuple(sorted(set(numbers or ()))))
        for topic, numbers in sorted(wanted.items())
    )
    if not 0 < len(scope) <= SCOPE_TOPICS_MAX or not is_scope(scope):
        raise ConfigurationError(
            f"a pause names 1 to {SCOPE_TOPICS_MAX} topics with up to "
            f"{SCOPE_PARTITIONS_MAX} partitions in all; name fewer, or whole topics",
            setting="topics",
        )
    return scope


@attrs.frozen
class PauseResult:
    """Result of a pause, or of its end.

    Attributes:
        op_id: Identifies the operation, in hex; empty for a dry run.
        until_ms: Log time at which the pause ends in the last partition.
        begin_ms: Log time at which it begins by itself; None if it has begun.
        held: Paused keys that still have an owner that is not stale.
        topics: Topics that the pause is limited to, like ``orders:0,1``; empty for the
            whole group.
    """

    op_id: str
    until_ms: int
    held: tuple[Key, ...]
    begin_ms: int | None = None
    topics: tuple[str, ...] = ()


class PauseOperation:
    """One pause of a group, renewed while its caller waits.

    For one thread. If the process dies, the pause ends by itself, at most its length
    after the last renewal. A pause that begins later needs no renewal.

    Attributes:
        op_id: Identifies the operation.
    """

    def __init__(
        self,
        follower: Follower,
        clock: Clock,
        sender: Sender,
        *,
        group_id: str,
        partition_count: int,
        period: Period,
        reason: str | None = None,
        op_id: bytes | None = None,
        scope: Scope | None = None,
    ) -> None:
        """Prepare a pause; ``begin`` writes it.

        Args:
            follower: Follows the log, and has read it to its end.
            clock: Local and wall time.
            sender: Sender of the records.
            group_id: The group.
            partition_count: Number of coordinating partitions.
            period: When the pause begins and ends.
            reason: Stored in the log, for people.
            op_id: The operation that the pause belongs to; by default a new one.
            scope: Partitions that it is limited to; None for the whole group.
        """
        self.op_id = secrets.token_bytes(16) if op_id is None else op_id
        self._follower = follower
        self._clock = clock
        self._sender = sender
        self._group_id = group_id
        self._period = period
        self._reason = reason
        self._scope = scope
        self._home = home_partition(group_id, partition_count=partition_count)
        self._others = [t for t in range(partition_count) if t != self._home]
        self._open: dict[int, Awaited] = {}
        self._paused: set[int] = set()
        self._expired: Counter[int] = Counter()
        self._due_ms = 0

    def planned_end_ms(self) -> int:
        """Return the end of the pause, epoch ms, if it began now; write nothing.

        Raises:
            GroupPaused: Another operation has paused the whole group now.
        """
        world = self._follower.replicas[self._home].world
        pause = world.active_pause(self._group_id)
        is_of_all = self._scope is None and self._period.begin_ms is None
        if is_of_all and pause is not None:
            raise _held_by_another(self._group_id, pause, "busy")
        now_ms = max(self._clock.wall_ms(), world.append_time_ms)
        return self._period.until_ms or now_ms + self._period.for_ms

    def end_ms(self) -> int:
        """Return when the pause ends everywhere, epoch ms; now if it has ended."""
        if self._period.until_ms is not None:
            return self._period.until_ms
        return max(self.ends_ms, default=self._clock.wall_ms())

    def begin(self, timeout_ms: int) -> None:
        """Pause the group, or schedule the pause: at its home first, then elsewhere.

        Of two concurrent operations, the one that the home partition accepts wins; the
        other writes nothing else. If another partition refuses, the pause is ended.

        Raises:
            GroupPaused: Another operation has paused the group.
            ClaimRejected: The pause was ended, or expired, before it was complete.
            LogUnwritable: A partition refuses the operation.
            DeadlineExceeded: Not all partitions answered within ``timeout_ms``.
        """
        self._due_ms = self._next_due_ms()
        for partitions in ([self._home], self._others):
            for t in partitions:
                self._send(t)
            is_paused = partial(self._paused.issuperset, partitions)
            if not self.hold_until(is_paused, timeout_ms):
                raise DeadlineExceeded(
                    f"not every coordinating partition accepted the pause of group "
                    f"{self._group_id!r} within {timeout_ms} ms; it ends by itself, or "
                    f"with: marshal groups resume {self._group_id}"
                )

    def hold_until(self, is_done: Callable[[], bool], timeout_ms: int) -> bool:
        """Renew the pause until ``is_done``; return False after ``timeout_ms``.

        Raises:
            ClaimRejected: Another operation ended the pause, or it expired.
            LogUnwritable: A partition refuses the pause.
        """
        deadline = Deadline(timeout_ms, self._clock.now_ms)
        while True:
            self._handle_verdicts(timeout_ms)
            if is_done():
                return True
            if deadline.is_over:
                return False
            if self._clock.now_ms() >= self._due_ms and self._period.begin_ms is None:
                self._renew()
            self._follower.step(min(POLL_MS, deadline.left_ms))

    @property
    def ends_ms(self) -> list[int]:
        """Ends of the pause in the coordinating partitions where it lasts."""
        worlds = self._follower.worlds
        groups = (world.groups.get(self._group_id) for world in worlds)
        pauses = (group.lasting(self.op_id) for group in groups if group is not None)
        return [pause.until_ms for pause in pauses if pause is not None]

    def _next_due_ms(self) -> int:
        return self._clock.now_ms() + self._period.for_ms // RENEWALS_PER_PAUSE

    def _renew(self) -> None:
        """Renew the pause in every partition without a record in flight."""
        self._due_ms = self._next_due_ms()
        for t in sorted(self._paused | self._open.keys()):
            awaited = self._open.get(t)
            if awaited is None or awaited.append.error() is not None:
                self._send(t)

    def _send(self, partition: int) -> None:
        world, period = self._follower.replicas[partition].world, self._period
        until_ms = period.until_ms
        if until_ms is None:
            now_ms = max(self._clock.wall_ms(), world.append_time_ms)
            until_ms = now_ms + period.for_ms
        if period.begin_ms is None and self._scope is None:
            self._open[partition] = self._write(partition, until_ms)
            return
        record = PauseGroup(
            **self._sender.fields(self._group_id),
            op_id=self.op_id,
            begin_time=period.begin_ms or 0,
            msg_expire_time=until_ms,
            scope=self._scope,
            reason=self._reason,
        )
        self._open[partition] = self._follower.append(partition, record)

    def _write(self, partition: int, expire_ms: int) -> Awaited:
        record = self._sender.record(
            self._group_id, self.op_id, expire_ms=expire_ms, reason=self._reason
        )
        return self._follower.append(partition, record)

    def _handle_verdicts(self, timeout_ms: int) -> None:
        self._follower.require_folding(self._open.values())
        for t, awaited in list(self._open.items()):
            verdict = awaited.transition
            if verdict is None:
                continue
            del self._open[t]
            if awaited.is_accepted:
                self._paused.add(t)
                self._expired[t] = 0
            elif verdict.reason == "expired" and self._may_repeat(t):
                self._send(t)  # the append took longer than the pause lasts
            else:
                self._paused.discard(t)
                error = refusal(self._follower, awaited, group_id=self._group_id)
                self._undo(timeout_ms)
                raise error

    def _may_repeat(self, partition: int) -> bool:
        """Return whether to send a record again that was late; count it."""
        self._expired[partition] += 1
        is_fixed = self._period.until_ms is not None
        return not is_fixed and self._expired[partition] < EXPIRED_MAX

    def _undo(self, timeout_ms: int) -> None:
        """End the pause, in the home partition last: until then no other can begin."""
        left = self._paused | self._open.keys()
        self._open = {}
        for partitions in (left - {self._home}, left & {self._home}):
            sent = [self._write(t, ENDED) for t in sorted(partitions)]
            self._follower.await_all(sent, timeout_ms)


def refusal(
    follower: Follower, awaited: Awaited, *, group_id: str
) -> GroupPaused | ClaimRejected | LogUnwritable:
    """Return the error for a record about a group that was refused."""
    verdict, world = awaited.transition, follower.replicas[awaited.partition].world
    reason = "unknown" if verdict is None else verdict.reason
    group = world.groups.get(group_id)
    record = None if verdict is None else verdict.record
    is_scoped = isinstance(record, PauseGroup) and record.scope is not None
    if (
        reason == "limits"
        and is_scoped
        and len(world.scopes)
        and not (group and len(group.scheduled) >= SCHEDULED_MAX)
    ):
        return ClaimRejected(
            f"group {group_id!r} has {SCOPED_MAX} pauses of some topics, the most of a "
            "group, or all groups together have the most that the log keeps; end one "
            f"with: marshal groups resume {group_id} --operation ID",
            reason="limits",
        )
    if reason == "limits" and group and len(group.scheduled) >= SCHEDULED_MAX:
        return ClaimRejected(
            f"group {group_id!r} has {SCHEDULED_MAX} scheduled pauses, and no more can "
            f"be scheduled; cancel one with: marshal groups resume {group_id} "
            "--operation ID",
            reason="limits",
        )
    if reason == "expired":
        return ClaimRejected(
            f"the end of the pause of group {group_id!r} has passed; choose a later "
            "one, or a longer pause, or check the clock of this host",
            reason="expired",
        )
    if reason == "busy" and world.layout is not None and world.config is not None:
        count = world.config.partition_count
        return ClaimRejected(
            f"group {group_id!r} cannot be paused while the number of coordinating "
            f"partitions changes to {count}; complete that first: marshal topic resize "
            f"--partitions {count} --execute",
            reason="busy",
        )
    pause = None if is_scoped else world.active_pause(group_id)
    if pause is not None:
        return _held_by_another(group_id, pause, reason)
    if reason == "op_over":
        return ClaimRejected(
            f"the pause of group {group_id!r} is over in coordinating partition "
            f"{awaited.partition}: another operation ended it, or a renewal took "
            "longer than it lasts; pause the group again, for longer",
            reason="op_over",
        )
    return awaited.unwritable(f"the operation on group {group_id!r}")


def _held_by_another(group_id: str, pause: Pause, reason: str | None) -> GroupPaused:
    return GroupPaused(
        f"group {group_id!r} is paused by another operation of "
        f"{pause.client_id!r} until {instant(pause.until_ms)}, or longer if that one "
        f"renews it ({reason}); wait until it is over, or end it with: marshal groups "
        f"resume {group_id}",
        until_ms=pause.until_ms,
        by=pause.client_id,
    )


def held_keys(
    follower: Follower, group_id: str, *, now_ms: int, scope: Scope | None = None
) -> tuple[Key, ...]:
    """Return the keys of a group with an owner that is not stale, by estimate.

    Args:
        follower: Follows the log.
        group_id: The group.
        now_ms: Local time.
        scope: Only these partitions; None for all.
    """
    found = (
        key
        for replica in follower.replicas.values()
        for key, _ in replica.held(now_ms)
        if key.group_id == group_id and (scope is None or is_in_scope(scope, key))
    )
    return tuple(sorted(found))


def ending(
    follower: Follower, group_id: str, *, op_id: bytes | None, wall_ms: int
) -> dict[int, tuple[bytes, ...]]:
    """Return, by partition, the pauses that end when a group is resumed.

    These are the pauses in force, and scheduled pauses that are due. If there are none,
    it is the only scheduled pause.

    Args:
        follower: Follows the log, and has read it to its end.
        group_id: The group.
        op_id: The operation to end; None for the pauses above.
        wall_ms: Wall time, in epoch ms.

    Raises:
        ClaimRejected: There is no such pause, or several are scheduled and none is due.
    """
    lasting: dict[int, list[bytes]] = {}
    later: dict[int, list[bytes]] = {}
    for world in follower.worlds:
        group = world.groups.get(group_id)
        if group is None:
            continue
        for pause in group.pauses:
            lasting.setdefault(world.partition, []).append(pause.op_id)
        now_ms = max(wall_ms, world.append_time_ms)
        for each in group.scheduled:
            found = lasting if each.begin_ms <= now_ms else later
            found.setdefault(world.partition, []).append(each.op_id)
    chosen: dict[int, tuple[bytes, ...]]
    if op_id is not None:
        every = [*lasting.items(), *later.items()]
        chosen = {t: (op_id,) for t, op_ids in every if op_id in op_ids}
    else:
        chosen = {t: tuple(op_ids) for t, op_ids in (lasting or later).items()}
        if not lasting:
            _require_one(group_id, {one for ops in chosen.values() for one in ops})
    if not chosen:
        raise ClaimRejected(
            f"group {group_id!r} is not paused{' by that operation' if op_id else ''}; "
            f"see: marshal groups {'describe ' + group_id if op_id else 'list'}",
            reason="not_paused",
        )
    return chosen


def _require_one(group_id: str, scheduled: set[bytes]) -> None:
    if len(scheduled) > 1:
        names = ", ".join(sorted(op_id.hex() for op_id in scheduled))
        raise ClaimRejected(
            f"group {group_id!r} is not paused now and has {len(scheduled)} scheduled "
            f"pauses: {names}; choose one with: marshal groups resume {group_id} "
            "--operation ID",
            reason="ambiguous",
        )


def op_id_of(text: str) -> bytes:
    """Return the id of an operation from its 32 hex digits.

    Raises:
        ConfigurationError: The text has another form.
    """
    try:
        found = bytes.fromhex(text)
    except (TypeError, ValueError):
        found = b""
    if len(found) != OP_ID_BYTES:
        raise ConfigurationError(
            f"operation is {text!r}; write its 32 hex digits, as marshal groups "
            "history shows them",
            setting="operation",
        )
    return found


def in_order(partitions: Iterable[int], *, home: int) -> list[int]:
    """Return partitions in the order in which a pause ends: home last."""
    return sorted(partitions, key=lambda t: (t == home, t))
