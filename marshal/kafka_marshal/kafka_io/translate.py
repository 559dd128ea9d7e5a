"""What kafka-python raises, told in our own errors. One table does it all."""

import re
from enum import Enum

import attrs
from kafka import errors as kafka_errors

from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    InvalidTransition,
    LogTruncated,
    LogUnreadable,
    LogUnwritable,
    MarshalError,
    TopicMisconfigured,
)

_WRAPPED = re.compile(r"\[Error (\d+)\]")


class Access(Enum):
    """Whether the failed call read or wrote: the same refusal differs."""

    READ = "read"
    WRITE = "write"


@attrs.frozen
class _Row:
    """What one family of kafka-python errors becomes."""

    kinds: tuple[type[Exception], ...]
    read: type[MarshalError]
    write: type[MarshalError]
    why: str
    next_step: str


def _row(
    *kinds: type[Exception],
    to: type[MarshalError] | tuple[type[MarshalError], type[MarshalError]],
    why: str,
    next_step: str,
) -> _Row:
    read, write = to if isinstance(to, tuple) else (to, to)
    return _Row(kinds=kinds, read=read, write=write, why=why, next_step=next_step)


# The first row that fits counts, so special errors stand above their bases.
_TABLE = (
    _row(
        kafka_errors.AuthorizationError,
        to=(LogUnreadable, LogUnwritable),
        why="this principal is not allowed to",
        next_step="Have an admin grant it: READ and DESCRIBE to read, WRITE to write.",
    ),
    _row(
        kafka_errors.SaslAuthenticationFailedError,
        kafka_errors.UnsupportedSaslMechanismError,
        kafka_errors.IllegalSaslStateError,
        kafka_errors.SecurityDisabledError,
        to=(LogUnreadable, LogUnwritable),
        why="the broker did not accept who we say we are",
        next_step="Check security_protocol, sasl_mechanism, user name and password.",
    ),
    _row(
        kafka_errors.LogTruncationError,
        kafka_errors.OffsetOutOfRangeError,
        to=LogTruncated,
        why="records that existed are gone",
        next_step="Read the log anew from its start.",
    ),
    _row(
        kafka_errors.MessageSizeTooLargeError,
        kafka_errors.RecordListTooLargeError,
        kafka_errors.InvalidRecordError,
        kafka_errors.InvalidTimestampError,
        to=LogUnwritable,
        why="the broker refuses a record like this",
        next_step="Compare max.message.bytes and the timestamp settings of the topic.",
    ),
    _row(
        kafka_errors.CorruptRecordError,
        kafka_errors.UnsupportedCodecError,
        kafka_errors.UnsupportedCompressionTypeError,
        UnicodeDecodeError,
        to=(LogUnreadable, LogUnwritable),
        why="a record cannot be decoded",
        next_step="Find it with kafka-dump-log, and delete records up to it.",
    ),
    _row(
        kafka_errors.UnsupportedVersionError,
        kafka_errors.UnrecognizedBrokerVersion,
        kafka_errors.UnsupportedForMessageFormatError,
        to=(LogUnreadable, LogUnwritable),
        why="the broker is too old for this",
        next_step="Use brokers of Apache Kafka 2.8 or later.",
    ),
    _row(
        kafka_errors.TopicAlreadyExistsError,
        kafka_errors.InvalidTopicError,
        kafka_errors.InvalidPartitionsError,
        kafka_errors.InvalidReplicationFactorError,
        kafka_errors.InvalidReplicationAssignmentError,
        kafka_errors.InvalidConfigurationError,
        kafka_errors.PolicyViolationError,
        to=TopicMisconfigured,
        why="the cluster does not accept the topic as asked for",
        next_step="Compare what was asked for with what the cluster allows.",
    ),
    _row(
        kafka_errors.UnknownTopicOrPartitionError,
        kafka_errors.UnknownTopicIdError,
        to=CoordinationError,
        why="the topic or partition does not exist (or may not be seen)",
        next_step="Check its name, and that it was created.",
    ),
    _row(
        kafka_errors.UnknownMemberIdError,
        kafka_errors.NonEmptyGroupError,
        kafka_errors.IllegalGenerationError,
        kafka_errors.RebalanceInProgressError,
        kafka_errors.FencedInstanceIdError,
        kafka_errors.StaleMemberEpochError,
        kafka_errors.FencedMemberEpochError,
        to=CoordinationError,
        why="the Kafka consumer group has active members of its own",
        next_step="Stop the consumers that subscribe with this group_id.",
    ),
    _row(
        kafka_errors.NotEnoughReplicasError,
        kafka_errors.NotEnoughReplicasAfterAppendError,
        to=CoordinationError,
        why="too few replicas are in sync",
        next_step="Bring the missing brokers back.",
    ),
    _row(
        kafka_errors.KafkaConfigurationError,
        to=ConfigurationError,
        why="kafka-python does not accept the settings",
        next_step="Correct the connection options.",
    ),
    _row(
        kafka_errors.IllegalStateError,
        to=InvalidTransition,
        why="the client is closed or was used out of turn",
        next_step="Open a new one.",
    ),
    _row(
        kafka_errors.KafkaTimeoutError,
        kafka_errors.KafkaConnectionError,
        kafka_errors.NodeNotReadyError,
        kafka_errors.RequestTimedOutError,
        kafka_errors.NetworkExceptionError,
        kafka_errors.BrokerNotAvailableError,
        kafka_errors.MetadataEmptyBrokerList,
        kafka_errors.UnknownBrokerIdError,
        kafka_errors.Cancelled,
        to=CoordinationError,
        why="no broker answered at {addresses}",
        next_step="Check the addresses, the network and that the brokers run.",
    ),
    _row(
        Exception,
        to=CoordinationError,
        why="Kafka reported a fault",
        next_step="If it does not pass, look at the brokers' logs.",
    ),
)


def _inner_kind(error: Exception) -> type[Exception]:
    """Return an error's kind; kafka-python wraps some as text in its base class."""
    if type(error) is kafka_errors.KafkaError:
        found = _WRAPPED.search(str(error))
        if found is not None:
            inner: type[Exception] = kafka_errors.for_code(int(found[1]))
            return inner
    return type(error)


def translated(
    error: Exception, *, doing: str, access: Access, addresses: str
) -> MarshalError:
    """Return our error for one of kafka-python's, with the cause chained.

    Args:
        error: What kafka-python raised, or reported of a send.
        doing: What was tried, as in "Reading topic x".
        access: Whether that read or wrote.
        addresses: The brokers' addresses, for the message.

    Returns:
        An error of ours to raise; one that is ours already comes back as it is.
    """
    if isinstance(error, MarshalError):
        return error
    kind_raised = _inner_kind(error)
    row = next(row for row in _TABLE if issubclass(kind_raised, row.kinds))
    kind = row.read if access is Access.READ else row.write
    why = row.why.format(addresses=addresses)
    said = " ".join(str(error).split())
    name = type(error).__name__
    told = (
        name
        if not said
        else said
        if said.startswith((name, "[Error"))
        else f"{name}: {said}"
    )
    made = kind(f"{doing} failed: {why} ({told}). {row.next_step}")
    made.__cause__ = error
    return made
