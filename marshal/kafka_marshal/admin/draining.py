"""Drains and cordons clients and hosts (PROTOCOL 9.7)."""

from collections.abc import Callable, Collection, Iterable, Mapping

import attrs

from kafka_marshal.admin.connection import AdminConnection
from kafka_marshal.admin.pausing import ENDED, HOST_CHARS_MAX, op_id_of
from kafka_marshal.arguments import (
    require_name,
    require_text,
    to_whole,
    with_plain_arguments,
)
from kafka_marshal.clock import duration
from kafka_marshal.engine.config_check import require_level
from kafka_marshal.engine.follower import Awaited
from kafka_marshal.engine.replica import Replica
from kafka_marshal.errors import ClaimRejected, ConfigurationError, DeadlineExceeded
from kafka_marshal.protocol.hashing import (
    CHECKPOINT_GROUP,
    RESERVED_TOPICS,
    home_partition,
)
from kafka_marshal.protocol.items import StandingDirective
from kafka_marshal.protocol.records import (
    CORDON,
    DRAIN,
    Action,
    Config,
    Directive,
)
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key


@attrs.frozen(kw_only=True)
class Subject:
    """The members that a directive names: one client, or all members on a host.

    Attributes:
        group_id: Only members of this group; None for all groups.
        client_id: The client, or None.
        host: The host, or None.
    """

    group_id: str | None = None
    client_id: str | None = None
    host: str | None = None

    def __str__(self) -> str:
        """Return the subject as text for messages."""
        what = f"client {self.client_id!r}" if self.client_id else f"host {self.host!r}"
        return what if self.group_id is None else f"{what} in group {self.group_id!r}"

    @property
    def written_to(self) -> str:
        """The group in the directive's records."""
        return self.group_id or CHECKPOINT_GROUP

    def is_named_by(self, group_id: str, directive: StandingDirective) -> bool:
        """Return whether a directive of a group names this subject.

        If the subject has no group, the directive may be of any group.
        """
        is_same = (directive.client, directive.host) == (self.client_id, self.host)
        return is_same and self.group_id in {None, group_id}

    def homes(self, partition_count: int) -> list[int]:
        """Return the coordinating partitions that the directive's records go to."""
        if self.group_id is None:
            return [*range(partition_count)]
        return [home_partition(self.group_id, partition_count=partition_count)]


@attrs.frozen(kw_only=True)
class DirectiveResult:
    """Result of a drain or a cordon.

    Attributes:
        operation: Id of the operation, in hex; with it the directive can be ended
            early, or completed by a repeated call. Empty for a dry run without one.
        action: ``drain`` or ``cordon``.
        subject: The members that the directive names.
        until_ms: End of the directive, epoch ms.
        members: Group and client_id of each live member that it names. Empty if the
            record itself showed that all are dead, in a log that no other process
            writes to.
        held: Keys that these members own without being stale, by estimate.
    """

    operation: str
    action: Action
    subject: Subject
    until_ms: int
    members: tuple[tuple[str, str], ...]
    held: tuple[Key, ...]


def check_subject(subject: Subject, config: Config) -> None:
    """Refuse a subject that no directive can name, or a level without directives.

    Raises:
        ConfigurationError: The subject is invalid, or the feature level too low.
    """
    if (subject.client_id is None) == (subject.host is None):
        raise ConfigurationError(
            "name either a client, or a host for all members on it",
            setting="client_id",
        )
    for setting in ("client_id", "group_id"):
        name = getattr(subject, setting)
        if name is not None:
            require_name(setting, name)
    if subject.host is not None:
        require_text("host", subject.host)
        if not 0 < len(subject.host) <= HOST_CHARS_MAX:
            raise ConfigurationError(
                f"a host has 1 to {HOST_CHARS_MAX} characters", setting="host"
            )
    if subject.group_id == CHECKPOINT_GROUP:
        raise ConfigurationError(
            f"group {CHECKPOINT_GROUP!r} has no members; leave the group out to name "
            "those of all groups",
            setting="group_id",
        )
    require_level(config, "a drain or cordon")


def check_length(for_ms: int, config: Config) -> None:
    """Refuse a length that no directive can have.

    Raises:
        ConfigurationError: It is below 1 ms or above ``max_pause_ms``.
    """
    to_whole("for_ms", for_ms)
    longest_ms = config.limit("max_pause_ms")
    if not 0 < for_ms <= longest_ms:
        raise ConfigurationError(
            f"a drain or cordon lasts 1ms to {duration(longest_ms)}, not "
            f"{duration(for_ms)}",
            setting="for_ms",
        )


def members_of(
    replicas: Collection[Replica], subject: Subject, *, now_ms: int
) -> tuple[tuple[str, str], ...]:
    """Return group and client of the live members that a directive names.

    Args:
        replicas: Every coordinating partition, folded to its end.
        subject: The members that the directive names.
        now_ms: Local time, to estimate ages.
    """
    found = set()
    for replica in replicas:
        world = replica.world
        log_ms = replica.log_ms(now_ms)
        for member in world.soft.members.values():
            record = member.record
            is_live = not record.draining and world.is_live(member, log_ms)
            is_named = (
                record.client_id == subject.client_id
                if subject.host is None
                else record.host == subject.host
            )
            if is_live and is_named and subject.group_id in {None, record.group_id}:
                found.add((record.group_id, record.client_id))
    return tuple(sorted(found))


def held_by(
    replicas: Iterable[Replica],
    members: Collection[tuple[str, str]],
    *,
    now_ms: int,
) -> tuple[Key, ...]:
    """Return the keys that members own without being stale, by estimate."""
    found = []
    for replica in replicas:
        for key, known in replica.held(now_ms):
            owner = known.owner
            is_named = owner and (key.group_id, owner.client_id) in members
            if is_named and key.topic not in RESERVED_TOPICS:  # it may stay the planner
                found.append(key)
    return tuple(sorted(found))


_WHY = {
    "op_over": "that operation is over; leave --operation out to begin another one",
    "busy": "that operation was begun with other arguments; repeat it with the same "
    "ones",
    "expired": "its end had passed when the log recorded it; choose a longer time, or "
    "check the clock of this host",
    "importing": "directives are being moved to other coordinating partitions; see: "
    "marshal topic info, then repeat it",
    "limits": "there are too many directives; list them with: marshal clients list; "
    "end one with: marshal clients uncordon NAME",
}


def _refusal(item: Awaited, op_id: bytes) -> Exception:
    reason = None if item.transition is None else item.transition.reason
    if reason in _WHY:
        return ClaimRejected(
            f"operation {op_id.hex()} was refused ({reason}): {_WHY[reason]}",
            reason=reason,
        )
    return item.unwritable("the directive", left="other partitions may have it")


def standing_in(world: WorldState) -> list[tuple[str, StandingDirective]]:
    """Return the directives in force in a coordinating partition, with their groups."""
    return [
        (group_id, each)
        for group_id in sorted({group_id for group_id, _ in world.directed})
        for each in world.groups[group_id].directives
    ]


class Draining(AdminConnection):
    """Drains and cordons, as a part of ``Admin``; for one thread."""

    @with_plain_arguments
    def drain(
        self,
        client_id: str | None = None,
        *,
        host: str | None = None,
        group_id: str | None = None,
        for_ms: int,
        operation: str | None = None,
        reason: str | None = None,
        wait_ms: int = 0,
        on_progress: Callable[[int], None] | None = None,
        dry_run: bool = False,
    ) -> DirectiveResult:
        """Make a client, or all members on a host, hand off their partitions.

        They hand off each partition that another member can take, and keep the rest.
        Until the drain ends they also take no new partitions. The drain is a request to
        the members: the log refuses no claim because of it.

        Args:
            client_id: The client; None with ``host``.
            host: The host that the members announce; None with ``client_id``.
            group_id: Only members of this group; None for all groups.
            for_ms: How long the drain lasts, at most ``max_pause_ms``.
            operation: Id of an operation to complete or to extend, in hex.
            reason: Stored in the log, for people.
            wait_ms: How long to wait until the members hold no keys.
            on_progress: Called on this thread with the number of keys that the members
                hold, at first and when it changes, while waiting.
            dry_run: Only check: write nothing, do not wait, and return the members that
                the drain would name and the keys that they hold.

        Raises:
            ConfigurationError: A name or the length is not valid, or the topic has a
                feature level below 2.
            ClaimRejected: No live member matches; or the operation is over, or was
                begun with other arguments.
            LogUnwritable: A coordinating partition refused the drain.
            DeadlineExceeded: No verdict in time. The message has the operation's id;
                repeat the call with it to complete the drain.
        """
        subject = Subject(group_id=group_id, client_id=client_id, host=host)
        result = self._direct(
            subject,
            DRAIN,
            for_ms=for_ms,
            operation=operation,
            reason=reason,
            dry_run=dry_run,
        )
        if dry_run or not wait_ms:
            return result
        reported: int | None = None

        def is_done() -> bool:
            nonlocal reported
            count = len(self._held_by(result.members))
            if on_progress is not None and count != reported:
                on_progress(count)
            reported = count
            return not count

        self._follow().follow_until(is_done, wait_ms)
        return attrs.evolve(result, held=self._held_by(result.members))

    @with_plain_arguments
    def cordon(
        self,
        client_id: str | None = None,
        *,
        host: str | None = None,
        group_id: str | None = None,
        for_ms: int,
        operation: str | None = None,
        reason: str | None = None,
        dry_run: bool = False,
    ) -> DirectiveResult:
        """Keep a client, or all members on a host, from taking more partitions.

        They keep the partitions within their share. Arguments and errors are those of
        ``drain``.
        """
        subject = Subject(group_id=group_id, client_id=client_id, host=host)
        return self._direct(
            subject,
            CORDON,
            for_ms=for_ms,
            operation=operation,
            reason=reason,
            dry_run=dry_run,
        )

    @with_plain_arguments
    def uncordon(
        self,
        client_id: str | None = None,
        *,
        host: str | None = None,
        group_id: str | None = None,
        operation: str | None = None,
        reason: str | None = None,
        dry_run: bool = False,
    ) -> int:
        """End drains and cordons; return the number of partitions in which they ended.

        Args:
            client_id: The client that they name; None with ``host`` or ``operation``.
            host: The host that they name; None with ``client_id`` or ``operation``.
            group_id: End them only in this group; None for all groups.
            operation: Id in hex of the only operation to end; None for all operations
                that name the client or the host.
            reason: Stored in the log, for people.
            dry_run: Only check, and return in how many partitions they would end.

        Raises:
            ConfigurationError: There is neither a client, a host nor an operation.
            ClaimRejected: No such drain or cordon is in force.
            LogUnwritable: A coordinating partition refused the end.
            DeadlineExceeded: No verdict in time; repeating the call completes it.
        """
        op_id = None if operation is None else op_id_of(operation)
        subject = None
        if client_id is not None or host is not None or op_id is None:
            subject = Subject(group_id=group_id, client_id=client_id, host=host)
        config = self._settled()
        if subject is not None:
            check_subject(subject, config)
        ended = [
            (world.partition, group_id, each)
            for world in self._follow().worlds
            for group_id, each in standing_in(world)
            if (subject is None or subject.is_named_by(group_id, each))
            and op_id in {None, each.op_id}
        ]
        if not ended:
            what = str(subject) if op_id is None else f"operation {op_id.hex()}"
            raise ClaimRejected(
                f"no drain or cordon of {what} is in force; see: marshal clients list",
                reason="not_directed",
            )
        if not dry_run:
            self._end(ended, reason)
        return len({partition for partition, *_ in ended})

    def _end(
        self,
        directives: Iterable[tuple[int, str, StandingDirective]],
        reason: str | None,
    ) -> None:
        """End directives, each in its coordinating partition and group."""
        sent = self._write(
            *(
                (
                    t,
                    Directive(
                        **self._sender.fields(group_id),
                        op_id=each.op_id,
                        client=each.client,
                        host=each.host,
                        action=each.action,
                        msg_expire_time=ENDED,
                        reason=reason,
                    ),
                )
                for t, group_id, each in directives
            )
        )
        for item in sent:
            verdict = item.transition
            is_over = verdict is not None and verdict.reason == "op_over"
            if not item.is_accepted and not is_over:
                raise item.unwritable("the end of the directive")

    def _direct(
        self,
        subject: Subject,
        action: Action,
        *,
        for_ms: int,
        operation: str | None,
        reason: str | None,
        dry_run: bool,
    ) -> DirectiveResult:
        config = self._settled()
        check_subject(subject, config)
        check_length(for_ms, config)
        follower = self._follow()
        replicas = follower.replicas.values()
        op_id = None if operation is None else op_id_of(operation)
        members = members_of(replicas, subject, now_ms=self._clock.now_ms())
        if not members and op_id is None:
            raise ClaimRejected(
                f"no live member matches {subject}; see: marshal clients list",
                reason="unknown_client",
            )
        wall_ms = self._clock.wall_ms()
        ends_ms = {
            t: max(wall_ms, follower.replicas[t].world.append_time_ms) + for_ms
            for t in subject.homes(config.partition_count)
        }
        if not dry_run:
            op_id = op_id or self._sender.new_op_id()
            records = {
                t: Directive(
                    **self._sender.fields(subject.written_to),
                    op_id=op_id,
                    client=subject.client_id,
                    host=subject.host,
                    action=action,
                    msg_expire_time=end_ms,
                    reason=reason,
                )
                for t, end_ms in ends_ms.items()
            }
            self._begin(records, op_id)
            # Only records move log time. In a log that no other process writes to,
            # these records are the first that show who is dead (PROTOCOL 4.11).
            members = members_of(replicas, subject, now_ms=self._clock.now_ms())
        return DirectiveResult(
            operation="" if op_id is None else op_id.hex(),
            action=action,
            subject=subject,
            until_ms=max(ends_ms.values()),
            members=members,
            held=self._held_by(members),
        )

    def _begin(self, records: Mapping[int, Directive], op_id: bytes) -> None:
        """Write a directive to its coordinating partitions."""
        try:
            sent = self._write(*records.items())
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"{error}; to complete it, repeat it with the operation {op_id.hex()}"
            ) from error
        for item in sent:
            if not item.is_accepted:
                raise _refusal(item, op_id)

    def _held_by(self, members: Collection[tuple[str, str]]) -> tuple[Key, ...]:
        replicas = self._follow().replicas.values()
        return held_by(replicas, members, now_ms=self._clock.now_ms())
