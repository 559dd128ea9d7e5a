"""Errors of kafka-python translated to those of the package."""

import re
import ssl

from kafka import errors as kafka_errors

from kafka_marshal.errors import MarshalError
from kafka_marshal.kafka_io import faults
from kafka_marshal.kafka_io.faults import Access, Failure, Fault

__all__ = [
    "Access",
    "AdvertisedAddressError",
    "NoTokenError",
    "fault_of_connection",
    "translate_error",
]

# A TLS alert, read as the length of a response: its first byte is 21.
_ALERT_LENGTH = re.compile(r"Invalid frame length: (\d+)")
_ALERT_TYPE = 21
_WRAPPED = re.compile(r"\[Error (\d+)\]")
_RESPONSE_MESSAGE = re.compile(r"error_message=(['\"])(.+?)\1")

# Part of its producer's error for records that had no response in time.
_EXPIRED = "Expiring "
# Errors of kafka-python itself. The first matching row counts.
_OWN = (
    (faults.FORBIDDEN, (kafka_errors.AuthorizationError,)),
    (faults.NOT_TRUSTED, (ssl.SSLCertVerificationError,)),
    (faults.GONE, (kafka_errors.LogTruncationError,)),
    (faults.UNDECODABLE, (kafka_errors.UnsupportedCodecError, UnicodeDecodeError)),
    (faults.TOO_OLD, (kafka_errors.UnrecognizedBrokerVersion,)),
    (faults.BAD_SETTINGS, (kafka_errors.KafkaConfigurationError,)),
    (faults.WRONG_STATE, (kafka_errors.IllegalStateError,)),
    (faults.UNLISTED, (kafka_errors.UnknownBrokerIdError,)),
    (
        faults.UNREACHABLE,
        (
            kafka_errors.KafkaTimeoutError,
            kafka_errors.KafkaConnectionError,
            kafka_errors.NodeNotReadyError,
            kafka_errors.MetadataEmptyBrokerList,
            kafka_errors.Cancelled,
        ),
    ),
    (faults.OTHER, (Exception,)),
)


class AdvertisedAddressError(kafka_errors.KafkaConnectionError):  # type: ignore[misc]
    """No connection to an address that only the cluster names."""


class NoTokenError(kafka_errors.KafkaConnectionError):  # type: ignore[misc]
    """The provider of tokens failed."""


def fault_of_connection(error: Exception | None) -> Fault | None:
    """Return the family of a failed connection, if the error shows the cause.

    A broker that starts may show any of these faults, so only the last attempt counts.
    """
    if isinstance(error, AdvertisedAddressError):
        return faults.ADVERTISED
    if isinstance(error, NoTokenError):
        return faults.NO_TOKEN
    text = str(error)
    fault = faults.fault_of_text(text)
    if fault is not None:
        return fault
    length = _ALERT_LENGTH.search(text)
    if length is not None and int(length[1]) >> 24 == _ALERT_TYPE:
        return faults.ONLY_TLS
    return faults.NO_TLS if "Handshake failed: [SSL: " in text else None


def _inner_kind(error: Exception) -> type[Exception]:
    """Return the class of an error; kafka-python wraps some as text in its base."""
    if type(error) is kafka_errors.KafkaError:
        found = _WRAPPED.search(str(error))
        if found is not None:
            inner: type[Exception] = kafka_errors.for_code(int(found[1]))
            return inner
    return type(error)


def _without_request(cause: str) -> str:
    """Return a cause without the dump of request and response, but with its message."""
    head, dump, rest = cause.partition(": Request '")
    if not dump:
        return cause
    message = _RESPONSE_MESSAGE.search(rest)
    return head if message is None else f"{head}: {message[2]}"


def translate_error(
    error: Exception,
    *,
    doing: str,
    access: Access,
    addresses: str,
    needs: str | None = None,
) -> MarshalError:
    """Return the error of the package for one of kafka-python, with its cause chained.

    Args:
        error: Raised, or reported for a send. A ``MarshalError`` is returned unchanged.
        doing: The operation, as in "Reading topic x".
        access: Whether it read or wrote.
        addresses: Addresses of the brokers.
        needs: The right that it needs, as in "READ on topic x".
    """
    if isinstance(error, MarshalError):
        return error
    kind = _inner_kind(error)
    fault = faults.BY_CODE.get(getattr(kind, "errno", None))
    if fault is None:
        fault = next(fault for fault, kinds in _OWN if issubclass(kind, kinds))
    if issubclass(kind, kafka_errors.KafkaTimeoutError) and _EXPIRED in str(error):
        fault = faults.UNCONFIRMED
    elif fault in (faults.UNREACHABLE, faults.OTHER):
        fault = fault_of_connection(error) or fault
    cause = _without_request(" ".join(str(error).split()))
    name = type(error).__name__
    cause_text = (
        name
        if not cause
        else cause
        if cause.startswith((name, "[Error"))
        else f"{name}: {cause}"
    )
    failure = Failure(
        doing=doing,
        access=access,
        addresses=addresses,
        needs=needs,
        client="kafka-python",
    )
    return failure.to_error(fault, error=error, cause=cause_text)
