"""The exceptions of kafka-marshal, with their attributes.

::

    MarshalError                        retriable = False
    ├─ ConfigurationError (ValueError)  raised before any IO
    ├─ ProtocolError
    │  ├─ InvalidTransition             a state machine was misused: a bug
    │  └─ MalformedRecord               codec only
    ├─ ClaimError
    │  ├─ ClaimRejected                 the claim was refused; names the holder
    │  ├─ ClaimLost                     the claim has ended: stop processing at once
    │  ├─ IdentityConflict              another live process uses this client_id
    │  ├─ ClientFenced                  an admin fenced this process
    │  └─ GroupPaused                   an admin paused the group
    ├─ PositionError                    an offset outside the log
    ├─ DeadlineExceeded (TimeoutError)  a wait reached its deadline
    └─ CoordinationError                retriable = True
       ├─ UnknownTopicId                no data topic with this id is known
       ├─ LogUnreadable                 retriable = False
       ├─ LogUnwritable                 retriable = False
       ├─ TopicMisconfigured            retriable = False
       │  └─ WrongCluster               formatted for another cluster
       └─ LogTruncated                  retriable = False: rebuild from the start

Losing a race for a claim is normal: the core returns a verdict, and only the public
library turns verdicts into exceptions. Messages state what happened, why, and which
command to run next. Attributes have the values, so that callers need not parse text.
"""

import errno
from collections.abc import Callable
from typing import Any, ClassVar

OPEN_FILES = {errno.EMFILE, errno.ENFILE}
"""Error codes of an operating system that cannot open another file or connection."""
RAISE_OPEN_FILES = "raise the limit of open files (ulimit -n, LimitNOFILE= of systemd)"
"""What to do after such an error, for messages."""


class MarshalError(Exception):
    """Base of every error raised by this library. Can be pickled, with attributes."""

    retriable: ClassVar[bool] = False

    def __reduce__(self) -> tuple[Callable[..., "MarshalError"], tuple[Any, ...]]:
        # Exception's own calls the class without the attributes, which may be required.
        return _again, (type(self), self.args, vars(self))


def _again(
    kind: type[MarshalError], args: tuple[object, ...], attributes: dict[str, object]
) -> MarshalError:
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error


class ConfigurationError(MarshalError, ValueError):
    """A setting is invalid; raised before any IO.

    Attributes:
        setting: Name of the offending setting, or an empty string.
    """

    def __init__(self, message: str, *, setting: str = "") -> None:
        super().__init__(message)
        self.setting = setting


class ProtocolError(MarshalError):
    """The caller, or encoded bytes, broke the rules of the protocol."""


class InvalidTransition(ProtocolError):
    """An operation is not allowed in the current state; the state is unchanged."""


class MalformedRecord(ProtocolError):
    """Bytes or values that the codec does not accept.

    ``apply`` never raises it: it returns an undecodable transition instead.
    """


class ClaimError(MarshalError):
    """The state of a claim, client or group prevents the requested work."""


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
    """A claim has ended; processing under it must stop at once.

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
        host: Host of the other process if known, else an empty string.
        age_ms: Age of the other process's last record, or None.
    """

    def __init__(
        self, message: str, *, holder: str, host: str = "", age_ms: int | None = None
    ) -> None:
        super().__init__(message)
        self.holder = holder
        self.host = host
        self.age_ms = age_ms


class ClientFenced(ClaimError):
    """An admin fenced this process, which can claim nothing any more.

    Attributes:
        by: Person or, if not named, client_id that fenced it; empty if unknown.
        reason: The reason that the admin gave, or an empty string.
        at_offset: Log offset of the fence, or of a refusal that shows it; or None.
    """

    def __init__(
        self,
        message: str,
        *,
        by: str = "",
        reason: str = "",
        at_offset: int | None = None,
    ) -> None:
        super().__init__(message)
        self.by = by
        self.reason = reason
        self.at_offset = at_offset


class GroupPaused(ClaimError):
    """An admin has paused the group.

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
        requested: The requested offset.
        log_start: First offset that exists, or -1 if unknown.
        log_end: Next offset that will be written, or -1 if unknown.
        partition: Topic and partition of the position, or None.
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
    """A wait reached its deadline; the awaited event may still happen."""


class CoordinationError(MarshalError):
    """An operation of Kafka failed; the cause is chained."""

    retriable: ClassVar[bool] = True


class UnknownTopicId(CoordinationError):
    """A data topic with this id cannot be fetched.

    No topic, or another one, has the topic's name, or the broker does not know the id
    yet.

    Attributes:
        partition: Topic and partition that were fetched.
    """

    def __init__(self, message: str, *, partition: tuple[str, int]) -> None:
        super().__init__(message)
        self.partition = partition


class LogUnreadable(CoordinationError):
    """The coordination log or a data topic cannot be read; retries do not help."""

    retriable: ClassVar[bool] = False


class LogUnwritable(CoordinationError):
    """The cluster or the log refuses a write of this process; retries do not help."""

    retriable: ClassVar[bool] = False


class TopicMisconfigured(CoordinationError):
    """The coordination topic is missing, unformatted, torn or misconfigured.

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
    """The log's offset or leader epoch went back: the folded state is invalid.

    Fold the log again.

    Attributes:
        partition: The coordinating partition, or None if unknown.
    """

    retriable: ClassVar[bool] = False

    def __init__(self, message: str, *, partition: int | None = None) -> None:
        super().__init__(message)
        self.partition = partition
