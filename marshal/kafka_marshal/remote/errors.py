"""What a sidecar could not do, as the errors that this library raises anyhow."""

from kafka_marshal import errors
from kafka_marshal.errors import (
    ClaimLost,
    ClaimRejected,
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
    """The sidecar does not know this process, or knows it no more: register anew."""


def error_of(said: Failure) -> MarshalError:
    """Return the error that a failure stands for.

    One that this release does not know is a ``CoordinationError`` where the same
    request may succeed later, else a plain ``MarshalError``.
    """
    message, reason = said.message, said.reason
    match said.error:
        case "ConfigurationError":
            return ConfigurationError(message, setting=said.setting or "")
        case "ClaimLost":
            return ClaimLost(
                message,
                winner=said.holder,
                at_offset=said.at_offset,
                reason=reason or "",
            )
        case "ClaimRejected":
            return ClaimRejected(
                message,
                holder=said.holder,
                at_offset=said.at_offset,
                reason=reason or "held",
            )
        case "IdentityConflict":
            return IdentityConflict(message, holder=said.holder or "")
        case "GroupPaused":
            return GroupPaused(message, until_ms=0, by=said.holder or "")
        case "PositionError":
            return _position_error(said)
        case name if name in _PLAIN:
            kind: type[MarshalError] = getattr(errors, name)
            return kind(message)
    return CoordinationError(message) if said.retriable else MarshalError(message)


def _position_error(said: Failure) -> PositionError:
    place = None
    if said.topic is not None and said.partition is not None:
        place = (said.topic, said.partition)
    return PositionError(
        said.message,
        requested=-1 if said.requested is None else said.requested,
        log_start=-1 if said.log_start is None else said.log_start,
        log_end=-1 if said.log_end is None else said.log_end,
        partition=place,
    )
