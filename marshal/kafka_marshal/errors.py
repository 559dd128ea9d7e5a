"""Every exception that kafka-marshal raises, and what each one carries.

::

    MarshalError                        retriable = False
    ├─ ConfigurationError (ValueError)  found before any IO
    ├─ ProtocolError
    │  ├─ InvalidTransition             a state machine was misused: a bug
    │  └─ MalformedRecord               codec only
    ├─ ClaimError
    │  ├─ ClaimRejected                 the claim was refused; names the holder
    │  ├─ ClaimLost                     the claim is gone: stop processing at once
    │  ├─ IdentityConflict              another live process uses our client_id
    │  └─ GroupPaused                   an admin paused the group
    ├─ PositionError                    an offset outside the log
    ├─ DeadlineExceeded (TimeoutError)  a wait reached its deadline
    └─ CoordinationError                retriable = True
       ├─ UnknownTopicId                a data topic of this id is not there
       ├─ LogUnreadable                 retriable = False
       ├─ LogUnwritable                 retriable = False
       ├─ TopicMisconfigured            retriable = False
       │  └─ WrongCluster               formatted for another cluster
       └─ LogTruncated                  retriable = False: rebuild from the start

A lost race is an ordinary outcome, so the core never raises for one: it
returns a verdict, and only the public library turns verdicts into exceptions.
Messages say what happened, why, and what to run next; the values stand in
attributes so that callers need not parse text.
"""

from typing import ClassVar


class MarshalError(Exception):
    """Base of every error raised by this library."""

    retriable: ClassVar[bool] = False


class ConfigurationError(MarshalError, ValueError):
    """A setting is impossible; found before any IO took place.

    Attributes:
        setting: Name of the offending setting, or an empty string.
    """

    def __init__(self, message: str, *, setting: str = "") -> None:
        super().__init__(message)
        self.setting = setting


class ProtocolError(MarshalError):
    """The rules of the protocol were broken by the caller or by bytes."""


class InvalidTransition(ProtocolError):
    """A state machine was driven in a way it does not allow; its state is kept."""


class MalformedRecord(ProtocolError):
    """Bytes or values that the codec does not accept.

    ``apply`` never lets this out: it becomes an undecodable transition.
    """


class ClaimError(MarshalError):
    """Something about a claim prevents the work that was asked for."""


class ClaimRejected(ClaimError):
    """A claim was refused by the log.

    Attributes:
        holder: client_id of the current owner, or None.
        freshness: ``fresh``, ``unknown``, ``stale`` or None without an owner.
        at_offset: Log offset of the refusal, or None when refused locally.
        reason: The protocol's reason, such as ``held`` or ``paused``.
    """

    def __init__(
        self,
        message: str,
        *,
        holder: str | None = None,
        freshness: str | None = None,
        at_offset: int | None = None,
        reason: str = "held",
    ) -> None:
        super().__init__(message)
        self.holder = holder
        self.freshness = freshness
        self.at_offset = at_offset
        self.reason = reason


class ClaimLost(ClaimError):
    """A claim is gone; whoever processes under it must stop at once.

    Attributes:
        winner: client_id of the new owner, or None when unknown.
        at_offset: Log offset of the record that ended the claim, or None.
        reason: Why it ended, such as ``lease_expired`` or ``taken_over``.
    """

    def __init__(
        self,
        message: str,
        *,
        winner: str | None = None,
        at_offset: int | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(message)
        self.winner = winner
        self.at_offset = at_offset
        self.reason = reason


class IdentityConflict(ClaimError):
    """Another live process uses the same client_id in the same group.

    Attributes:
        holder: client_id that is in use twice.
        host: Host of the other process where known, else an empty string.
        age_ms: Age of the other process's last sign of life, or None.
    """

    def __init__(
        self, message: str, *, holder: str, host: str = "", age_ms: int | None = None
    ) -> None:
        super().__init__(message)
        self.holder = holder
        self.host = host
        self.age_ms = age_ms


class GroupPaused(ClaimError):
    """The group is paused by an admin operation.

    Attributes:
        until_ms: Log time at which the pause ends, in epoch milliseconds.
        by: client_id of the admin that paused it.
    """

    def __init__(self, message: str, *, until_ms: int, by: str = "") -> None:
        super().__init__(message)
        self.until_ms = until_ms
        self.by = by


class PositionError(MarshalError):
    """A position lies outside the data partition's log.

    Attributes:
        requested: The offset that was asked for.
        log_start: First offset that exists, or -1 where it could not be asked.
        log_end: Next offset that will be written, or -1 the same way.
        partition: Topic and partition that the position is of, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        requested: int,
        log_start: int,
        log_end: int,
        partition: tuple[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.requested = requested
        self.log_start = log_start
        self.log_end = log_end
        self.partition = partition


class DeadlineExceeded(MarshalError, TimeoutError):
    """A wait reached its deadline; what was awaited may still happen."""


class CoordinationError(MarshalError):
    """Kafka did not do what was asked; the cause is chained."""

    retriable: ClassVar[bool] = True


class UnknownTopicId(CoordinationError):
    """A data topic of this id cannot be fetched: there is another one of its name.

    Or none, or the broker that was asked does not know the topic yet.

    Attributes:
        partition: Topic and partition that were fetched.
    """

    def __init__(self, message: str, *, partition: tuple[str, int]) -> None:
        super().__init__(message)
        self.partition = partition


class LogUnreadable(CoordinationError):
    """The coordination log cannot be read as it is; trying again will not help."""

    retriable: ClassVar[bool] = False


class LogUnwritable(CoordinationError):
    """The coordination log refuses our records; trying again will not help."""

    retriable: ClassVar[bool] = False


class TopicMisconfigured(CoordinationError):
    """The coordination topic is missing, unformatted, torn or wrongly set.

    Attributes:
        problems: One line per finding, in the order they were found.
    """

    retriable: ClassVar[bool] = False

    def __init__(self, message: str, *, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


class WrongCluster(TopicMisconfigured):
    """The coordination topic was formatted for another cluster than this one."""


class LogTruncated(CoordinationError):
    """Offset or leader epoch went back: what we knew is gone, refold it all.

    Attributes:
        partition: Coordinating partition that it is about, or None if unknown.
    """

    retriable: ClassVar[bool] = False

    def __init__(self, message: str, *, partition: int | None = None) -> None:
        super().__init__(message)
        self.partition = partition
