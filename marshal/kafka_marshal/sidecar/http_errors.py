"""Converts exceptions to HTTP errors: a status, and a ``Failure`` as the body."""

import attrs

from kafka_marshal.errors import (
    ClaimError,
    ClaimLost,
    ClaimRejected,
    ClientFenced,
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
    GroupPaused,
    IdentityConflict,
    InvalidTransition,
    MalformedRecord,
    MarshalError,
    PositionError,
)
from kafka_marshal.remote.api import Failure

RETRY_AFTER_S = 1
MESSAGE_CHARS_MAX = 2_000
SHUTTING_DOWN = "the sidecar is shutting down; retry until it is back"
GONE = "gone"
"""Reason of a ``ClaimLost``: this process is no longer registered."""
UNKNOWN = "unknown"
"""Reason of a ``ClaimLost``: no client of that name is registered."""
WRONG_SECRET = "wrong_secret"  # noqa: S105 - a reason
"""Reason of a ``ClaimRejected``: the request lacks the claim's secret."""

# From special to general: the first match counts.
_STATUS: tuple[tuple[type[MarshalError], int], ...] = (
    (ConfigurationError, 400),
    (MalformedRecord, 400),
    (GroupPaused, 423),
    (IdentityConflict, 409),
    (ClaimRejected, 409),
    (ClaimError, 409),
    (InvalidTransition, 409),
    (PositionError, 409),
    (DeadlineExceeded, 504),
)
_OF_REASON = {GONE: 410, UNKNOWN: 404, WRONG_SECRET: 403}


@attrs.frozen
class HttpError(Exception):
    """An HTTP error response: a status, and the body."""

    status: int
    failure: Failure

    def __str__(self) -> str:
        """Return the message."""
        return self.failure.message


def http_error(
    status: int,
    message: str,
    *,
    error: type[MarshalError] = ConfigurationError,
    setting: str | None = None,
) -> HttpError:
    """Return an error response with a message."""
    failure = Failure(
        error=error.__name__,
        message=message[:MESSAGE_CHARS_MAX],
        retriable=error.retriable,
        setting=setting,
    )
    return HttpError(status, failure)


def unavailable(message: str) -> HttpError:
    """Return a 503 response: the client should retry soon."""
    return http_error(503, message, error=CoordinationError)


def to_http_error(error: BaseException) -> HttpError:
    """Return the response for any exception."""
    if isinstance(error, HttpError):
        return error
    if not isinstance(error, MarshalError):
        return http_error(
            500,
            f"the sidecar failed on an internal error ({type(error).__name__}); see "
            "its log",
            error=MarshalError,
        )
    holder = getattr(error, "holder", None) or getattr(error, "winner", None)
    if isinstance(error, GroupPaused | ClientFenced):
        holder = error.by or None
    topic, partition = getattr(error, "partition", None) or (None, None)
    failure = Failure(
        error=type(error).__name__,
        message=str(error)[:MESSAGE_CHARS_MAX],
        retriable=error.retriable,
        setting=getattr(error, "setting", None) or None,
        reason=getattr(error, "reason", None) or None,
        holder=holder,
        at_offset=getattr(error, "at_offset", None),
        requested=getattr(error, "requested", None),
        log_start=getattr(error, "log_start", None),
        log_end=getattr(error, "log_end", None),
        topic=topic,
        partition=partition,
    )
    return HttpError(status_of(error), failure)


def status_of(error: MarshalError) -> int:
    """Return the status for an error.

    A failure of Kafka is 503 if retrying may help, else 502: the sidecar itself works,
    and another request would fail in the same way.
    """
    if isinstance(error, ClaimLost | ClaimRejected) and error.reason in _OF_REASON:
        return _OF_REASON[error.reason]
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return status
    if isinstance(error, CoordinationError):
        return 503 if error.retriable else 502
    return 500
