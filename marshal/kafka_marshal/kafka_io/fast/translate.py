"""Errors of confluent-kafka translated to those of the package."""

import re
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from kafka_marshal.errors import MarshalError
from kafka_marshal.kafka_io import faults
from kafka_marshal.kafka_io.faults import Access, Failure, Fault

__all__ = ["Access", "translate_error"]

# Errors of librdkafka itself: names of ``KafkaError`` by family.
_NAMES: Mapping[Fault, str] = {
    faults.NOT_AUTHENTICATED: "_AUTHENTICATION _SSL",
    faults.GONE: "_AUTO_OFFSET_RESET _LOG_TRUNCATION",
    faults.UNDECODABLE: "_BAD_COMPRESSION _BAD_MSG",
    faults.TOO_OLD: "_UNSUPPORTED_FEATURE",
    faults.NO_SUCH_TOPIC: "_UNKNOWN_PARTITION _UNKNOWN_TOPIC",
    faults.TOO_FEW_REPLICAS: "_ISR_INSUFF",
    faults.BAD_SETTINGS: "_INVALID_ARG _NOT_CONFIGURED",
    faults.WRONG_STATE: "_STATE _DESTROY",
    faults.UNCONFIRMED: "_MSG_TIMED_OUT",
    faults.UNLISTED: "_DESTROY_BROKER",
    faults.UNREACHABLE: (
        "_ALL_BROKERS_DOWN _RESOLVE _TIMED_OUT _TIMED_OUT_QUEUE "
        "_TRANSPORT _UNKNOWN_BROKER _WAIT_COORD"
    ),
}
_FAULTS: Mapping[int | None, Fault] = {
    **faults.BY_CODE,
    **{
        getattr(KafkaError, name): fault
        for fault, names in _NAMES.items()
        for name in names.split()
    },
}


_SSL = KafkaError._SSL  # noqa: SLF001 - its public name
_AUTHENTICATION = KafkaError._AUTHENTICATION  # noqa: SLF001 - its public name
# OpenSSL's text, also for a certificate of another host.
_UNTRUSTED = "certificate verify failed"
# librdkafka reports a login that was cut off, because the broker ended, as refused.
_CUT_OFF = "Local: Broker transport failure"
# Errors about tokens: another token may be accepted, perhaps once its server is back.
_OF_TOKENS = ("OAUTHBEARER", '"status":"invalid_token"')
# librdkafka reports the response of a port without logins as text only.
_NO_LOGIN = KafkaError(KafkaError.ILLEGAL_SASL_STATE).str()

_CERTIFICATE_FAULTS = (faults.NOT_TRUSTED, faults.CERTIFICATE_REFUSED)
# librdkafka's guesses, in the text of a timeout or of a lost connection.
GUESS_NO_TLS = "connecting to a PLAINTEXT broker listener?"
GUESS_ONLY_TLS = "connecting to a SSL listener?"
_BY_GUESS = {GUESS_NO_TLS: faults.NO_TLS, GUESS_ONLY_TLS: faults.ONLY_TLS}


_GUESSED = re.compile(
    r": might be caused by .*?(?= \(after |$)|: connecting to a PLAINTEXT .*listener\?"
)
"""librdkafka's guesses, with the words around them."""


def without_guess(error: Any) -> Any:
    """Return a ``KafkaError`` without a guess that the listener does not match."""
    text = error.str()
    plain = _GUESSED.sub("", text)
    return error if plain == text else KafkaError(error.code(), plain)


def cause_of(error: BaseException | None) -> Any:
    """Return the ``KafkaError`` inside an exception, or None."""
    if isinstance(error, KafkaException) and error.args:
        inner = error.args[0]
        return inner if isinstance(inner, KafkaError) else None
    return None


def _fault_of(inner: Any) -> Fault:
    """Return the family of a ``KafkaError``, by its text where codes are too coarse."""
    if inner.code() == _SSL and _UNTRUSTED in inner.str():
        return faults.NOT_TRUSTED
    if inner.code() == _AUTHENTICATION:
        return _fault_of_login(inner.str())
    fault = _FAULTS.get(inner.code(), faults.OTHER)
    if inner.code() == _SSL or fault is faults.UNREACHABLE:
        found = faults.fault_of_text(inner.str())
        if found is not None:
            return found
        for guess, family in _BY_GUESS.items():
            if guess in inner.str():
                return family
    return fault


def _fault_of_login(text: str) -> Fault:
    if _CUT_OFF in text:
        return faults.UNREACHABLE
    if any(each in text for each in _OF_TOKENS):
        return faults.NO_TOKEN
    return faults.NO_LOGIN if _NO_LOGIN in text else faults.NOT_AUTHENTICATED


def is_login_refused(inner: Any) -> bool:
    """Return whether a ``KafkaError`` is the refusal of a login, which is permanent."""
    is_login = inner.code() in {_AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED}
    return is_login and _fault_of(inner) in (
        faults.NOT_AUTHENTICATED,
        faults.NO_LOGIN,
    )


def is_refusal(error: Exception) -> bool:
    """Return whether an error of a connection is a refusal, which retries repeat."""
    inner = cause_of(error)
    if inner is None:
        return False
    return is_login_refused(inner) or _fault_of(inner) in _CERTIFICATE_FAULTS


def no_token_error(error: Exception, *, addresses: str) -> MarshalError:
    """Return the error for a client without a token, with its cause chained."""
    failure = Failure(doing="Making a client", access=Access.READ, addresses=addresses)
    cause = f"{type(error).__name__}: {error}"
    return failure.to_error(faults.NO_TOKEN, error=error, cause=cause)


def translate_error(
    error: Exception,
    *,
    doing: str,
    access: Access,
    addresses: str,
    needs: str | None = None,
) -> MarshalError:
    """Return the error of the package for one of confluent-kafka, cause chained.

    Args:
        error: The exception; wrap a reported ``KafkaError`` in a ``KafkaException``. A
            ``MarshalError`` is returned unchanged.
        doing: The operation, as in "Reading topic x".
        access: Whether it read or wrote.
        addresses: Addresses of the brokers.
        needs: The right that it needs, as in "READ on topic x".
    """
    if isinstance(error, MarshalError):
        return error
    inner = cause_of(error)
    if inner is not None:
        fault = _fault_of(inner)
        cause = f"{inner.name()}: {' '.join(inner.str().split())}"
    else:
        # A closed client raises a bare RuntimeError.
        is_closed = type(error) is RuntimeError
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
        fault = faults.WRONG_STATE if is_closed else faults.OTHER
        if isinstance(error, OSError):
            fault = faults.fault_of_text(cause) or fault
    failure = Failure(
        doing=doing,
        access=access,
        addresses=addresses,
        needs=needs,
        client="librdkafka",
    )
    return failure.to_error(fault, error=error, cause=cause)
