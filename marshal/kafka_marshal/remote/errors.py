"""Maps the failures of a sidecar to the errors of this library."""

from kafka_marshal import errors
from kafka_marshal.errors import (
    ClaimLost,
    ClaimRejected,
    ClientFenced,
    ConfigurationError,
    CoordinationError,
    GroupPaused,
    IdentityConflict,
    MarshalError,
    PositionError,
)
from kafka_marshal.remote.api import Failure

_PLAIN = (
    "CoordinationError",
    "DeadlineExceeded",
    "InvalidTransition",
    "LogTruncated",
    "LogUnreadable",
    "LogUnwritable",
    "MalformedRecord",
    "MarshalError",
    "TopicMisconfigured",
    "WrongCluster",
)


class NotRegistered(CoordinationError):
    """The sidecar does not know this process, or has removed it: register again."""


def error_of(failure: Failure) -> MarshalError:
    """Return the error that a failure stands for.

    A failure of unknown kind becomes a ``CoordinationError`` if it is retriable, else
    a plain ``MarshalError``.
    """
    message, reason = failure.message, failure.reason
    match failure.error:
        case "ConfigurationError":
            return ConfigurationError(message, setting=failure.setting or "")
        case "ClaimLost":
            return ClaimLost(
                message,
                winner=failure.holder,
                at_offset=failure.at_offset,
                reason=reason or "",
            )
        case "ClaimRejected":
            return ClaimRejected(
                message,
                holder=failure.holder,
                at_offset=failure.at_offset,
                reason=reason or "held",
            )
        case "IdentityConflict":
            return IdentityConflict(message, holder=failure.holder or "")
        case "ClientFenced":
            return ClientFenced(
                message,
                by=failure.holder or "",
                reason=reason or "",
                at_offset=failure.at_offset,
            )
        case "GroupPaused":
            return GroupPaused(message, until_ms=0, by=failure.holder or "")
        case "PositionError":
            return _position_error(failure)
        case name if name in _PLAIN:
            kind: type[MarshalError] = getattr(errors, name)
            return kind(message)
    return CoordinationError(message) if failure.retriable else MarshalError(message)


def _position_error(failure: Failure) -> PositionError:
    place = None
    if failure.topic is not None and failure.partition is not None:
        place = (failure.topic, failure.partition)
    return PositionError(
        failure.message,
        requested=-1 if failure.requested is None else failure.requested,
        log_start=-1 if failure.log_start is None else failure.log_start,
        log_end=-1 if failure.log_end is None else failure.log_end,
        partition=place,
    )
