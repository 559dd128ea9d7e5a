"""Errors of confluent-kafka translated to those of the package, by one table."""

from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from kafka_marshal.errors import MarshalError
from kafka_marshal.kafka_io import faults
from kafka_marshal.kafka_io.faults import Access, Failure, Fault

__all__ = ["Access", "translate_error"]

_ROWS: tuple[tuple[Fault, tuple[int, ...]], ...] = (
    (
        faults.FORBIDDEN,
        (
            KafkaError.CLUSTER_AUTHORIZATION_FAILED,
            KafkaError.DELEGATION_TOKEN_AUTHORIZATION_FAILED,
            KafkaError.GROUP_AUTHORIZATION_FAILED,
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ),
    ),
    (
        faults.NOT_AUTHENTICATED,
        (
            KafkaError._AUTHENTICATION,  # noqa: SLF001 - its public names
            KafkaError._SSL,  # noqa: SLF001
            KafkaError.SASL_AUTHENTICATION_FAILED,
            KafkaError.SECURITY_DISABLED,
            KafkaError.UNSUPPORTED_SASL_MECHANISM,
        ),
    ),
    (
        faults.NO_LOGIN,
        (KafkaError.ILLEGAL_SASL_STATE,),
    ),
    (
        faults.GONE,
        (
            KafkaError._AUTO_OFFSET_RESET,  # noqa: SLF001
            KafkaError._LOG_TRUNCATION,  # noqa: SLF001
            KafkaError.OFFSET_OUT_OF_RANGE,
        ),
    ),
    (
        faults.REFUSED_RECORD,
        (
            KafkaError.INVALID_RECORD,
            KafkaError.INVALID_TIMESTAMP,
            KafkaError.MSG_SIZE_TOO_LARGE,
            KafkaError.RECORD_LIST_TOO_LARGE,
        ),
    ),
    (
        faults.UNDECODABLE,
        (
            KafkaError._BAD_COMPRESSION,  # noqa: SLF001
            KafkaError._BAD_MSG,  # noqa: SLF001
            KafkaError.INVALID_MSG,
            KafkaError.UNSUPPORTED_COMPRESSION_TYPE,
        ),
    ),
    (
        faults.TOO_OLD,
        (
            KafkaError._UNSUPPORTED_FEATURE,  # noqa: SLF001
            KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
            KafkaError.UNSUPPORTED_VERSION,
        ),
    ),
    (
        faults.REFUSED_TOPIC,
        (
            KafkaError.INVALID_CONFIG,
            KafkaError.INVALID_PARTITIONS,
            KafkaError.INVALID_REPLICATION_FACTOR,
            KafkaError.INVALID_REPLICA_ASSIGNMENT,
            KafkaError.POLICY_VIOLATION,
            KafkaError.TOPIC_ALREADY_EXISTS,
            KafkaError.TOPIC_EXCEPTION,
        ),
    ),
    (
        faults.NO_SUCH_TOPIC,
        (
            KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
            KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001
            KafkaError.UNKNOWN_TOPIC_ID,
            KafkaError.UNKNOWN_TOPIC_OR_PART,
        ),
    ),
    (
        faults.GROUP_IN_USE,
        (
            KafkaError.FENCED_INSTANCE_ID,
            KafkaError.FENCED_MEMBER_EPOCH,
            KafkaError.ILLEGAL_GENERATION,
            KafkaError.NON_EMPTY_GROUP,
            KafkaError.REBALANCE_IN_PROGRESS,
            KafkaError.STALE_MEMBER_EPOCH,
            KafkaError.UNKNOWN_MEMBER_ID,
        ),
    ),
    (
        faults.TOO_FEW_REPLICAS,
        (
            KafkaError._ISR_INSUFF,  # noqa: SLF001
            KafkaError.NOT_ENOUGH_REPLICAS,
            KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        ),
    ),
    (
        faults.BAD_SETTINGS,
        (
            KafkaError._INVALID_ARG,  # noqa: SLF001
            KafkaError._NOT_CONFIGURED,  # noqa: SLF001
        ),
    ),
    (
        faults.OUT_OF_TURN,
        (
            KafkaError._STATE,  # noqa: SLF001
            KafkaError._DESTROY,  # noqa: SLF001
        ),
    ),
    (
        faults.UNREACHABLE,
        (
            KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
            KafkaError._MSG_TIMED_OUT,  # noqa: SLF001
            KafkaError._RESOLVE,  # noqa: SLF001
            KafkaError._TIMED_OUT,  # noqa: SLF001
            KafkaError._TIMED_OUT_QUEUE,  # noqa: SLF001
            KafkaError._TRANSPORT,  # noqa: SLF001
            KafkaError._UNKNOWN_BROKER,  # noqa: SLF001
            KafkaError._WAIT_COORD,  # noqa: SLF001
            KafkaError.BROKER_NOT_AVAILABLE,
            KafkaError.NETWORK_EXCEPTION,
            KafkaError.REQUEST_TIMED_OUT,
        ),
    ),
)
_FAULTS: Mapping[int, Fault] = {code: fault for fault, codes in _ROWS for code in codes}


def cause_of(error: Exception) -> Any:
    """Return the ``KafkaError`` inside an exception, or None."""
    if isinstance(error, KafkaException) and error.args:
        inner = error.args[0]
        return inner if isinstance(inner, KafkaError) else None
    return None


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
        fault = _FAULTS.get(inner.code(), faults.OTHER)
        cause = f"{inner.name()}: {' '.join(inner.str().split())}"
    else:
        # A closed client raises a bare RuntimeError.
        is_closed = type(error) is RuntimeError
        fault = faults.OUT_OF_TURN if is_closed else faults.OTHER
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
    failure = Failure(
        doing=doing,
        access=access,
        addresses=addresses,
        needs=needs,
        client="librdkafka",
    )
    return failure.to_error(fault, error=error, cause=cause)
