"""Families of Kafka's faults: the error class, and the words of the message.

Each client library has its own names for the same faults. Their tables refer to these
families, so that messages are the same for every transport.
"""

import os
import re
import signal
from collections.abc import Mapping
from enum import Enum
from types import CodeType
from typing import Any

import attrs

from kafka_marshal.errors import (
    OPEN_FILES,
    RAISE_OPEN_FILES,
    ClaimLost,
    ConfigurationError,
    CoordinationError,
    InvalidTransition,
    LogTruncated,
    LogUnreadable,
    LogUnwritable,
    MarshalError,
    TopicMisconfigured,
)
from kafka_marshal.kafka_io.settings import BOTH_NAMES


class Access(Enum):
    """Whether the failed call read or wrote; selects the error class."""

    READ = "read"
    WRITE = "write"


@attrs.frozen(kw_only=True)
class Fault:
    """One family of faults.

    Attributes:
        read: Error class for reads.
        write: Error class for writes.
        why: Cause; may contain ``{addresses}`` and ``{client}``.
        next_step: Remedy; may contain ``{needs}``.
    """

    read: type[MarshalError]
    write: type[MarshalError]
    why: str
    next_step: str


def _fault(
    to: type[MarshalError] | tuple[type[MarshalError], type[MarshalError]],
    *,
    why: str,
    next_step: str,
) -> Fault:
    read, write = to if isinstance(to, tuple) else (to, to)
    return Fault(read=read, write=write, why=why, next_step=next_step)


FORBIDDEN = _fault(
    (LogUnreadable, LogUnwritable),
    why="this principal is not authorized",
    next_step="Have an admin grant {needs}; SECURITY.md lists the rights of each role.",
)
NOT_AUTHENTICATED = _fault(
    (LogUnreadable, LogUnwritable),
    why="the broker refused the login",
    next_step="Check security_protocol, sasl_mechanism, user name and password.",
)
NO_LOGIN = _fault(
    (LogUnreadable, LogUnwritable),
    why="the listener at {addresses} does not use SASL",
    next_step="Use the port of a SASL listener; where the cluster has none, set "
    "security_protocol to PLAINTEXT or SSL and leave out the sasl options.",
)
NO_TOKEN = _fault(
    CoordinationError,  # retriable: the server of tokens may be back soon
    why="no token could be obtained, or the broker does not accept it",
    next_step="Check sasl_oauth_token_provider, or the sasl.oauthbearer options, and "
    "the token endpoint.",
)
NO_TLS = _fault(
    CoordinationError,  # retriable: a broker that starts behaves like this, too
    why="the listener at {addresses} does not use TLS",
    next_step="Use the port of a TLS listener; where the cluster has none, set "
    "security_protocol to PLAINTEXT or SASL_PLAINTEXT.",
)
ONLY_TLS = _fault(
    CoordinationError,
    why="the listener at {addresses} closes connections without TLS",
    next_step="Set security_protocol to SSL or SASL_SSL, or use the port of a listener "
    "without TLS.",
)
NOT_TRUSTED = _fault(
    CoordinationError,  # retriable: an expired certificate gets renewed
    why="the certificate of the broker is not trusted",
    next_step="Check ssl_cafile (ssl.ca.location), that the address is a name in the "
    "certificate, and that it has not expired.",
)
CERTIFICATE_REFUSED = _fault(
    CoordinationError,  # retriable, as above
    why="the broker does not accept the certificate of this client, or requires one "
    "and received none",
    next_step=f"Set {BOTH_NAMES['ssl_certfile']} to a certificate that the brokers "
    f"trust and that has not expired, and {BOTH_NAMES['ssl_keyfile']} to its key.",
)
GONE = _fault(
    LogTruncated,
    why="the log no longer has records that it had",
    next_step="Read the log again from its start.",
)
REFUSED_RECORD = _fault(
    LogUnwritable,
    why="the broker refuses records of this kind or size",
    # A compacted topic refuses records without a key, so all records of this package,
    # and its cleaner deletes existing ones. A retry would write to a log that loses
    # records.
    next_step="Run: marshal doctor, which names the settings of the topic to repair: "
    "cleanup.policy (delete, as a compacted topic takes no records without a key), "
    "max.message.bytes, timestamps. Then start again.",
)
UNDECODABLE = _fault(
    (LogUnreadable, LogUnwritable),
    why="a record cannot be decoded",
    next_step="Find it with kafka-dump-log, and delete records up to it.",
)
TOO_OLD = _fault(
    (LogUnreadable, LogUnwritable),
    why="the broker is too old for this request",
    next_step="Use brokers of Apache Kafka 3.1 or later.",
)
REFUSED_TOPIC = _fault(
    TopicMisconfigured,
    why="the cluster does not accept the topic as requested",
    next_step="Compare the request with what the cluster allows.",
)
NO_SUCH_TOPIC = _fault(
    CoordinationError,
    why="the topic or partition does not exist, or this principal cannot describe it",
    next_step="Check its name, that it was created, and the rights of this principal.",
)
GROUP_IN_USE = _fault(
    CoordinationError,
    why="the Kafka consumer group has active members of its own",
    next_step="Stop the consumers that subscribe with this group_id.",
)
TOO_FEW_REPLICAS = _fault(
    CoordinationError,
    why="too few replicas are in sync",
    next_step="Bring the missing brokers back.",
)
BAD_SETTINGS = _fault(
    ConfigurationError,
    why="{client} does not accept the settings",
    next_step="Correct the connection options.",
)
WRONG_STATE = _fault(
    InvalidTransition,
    why="the client is closed or was called in the wrong state",
    next_step="Open a new one.",
)
UNREACHABLE = _fault(
    CoordinationError,
    why="no broker answered at {addresses}",
    next_step="Check the addresses, the network, that the brokers run, their limits of "
    "connections (max.connections.per.ip; a member has up to 8 to a broker), and "
    "security_protocol: a SASL or TLS listener does not answer clients that do not "
    "use it.",
)
UNLISTED = _fault(
    CoordinationError,
    why="the cluster at {addresses} does not list a broker that the request is for",
    next_step="Check that all brokers run; one that starts is listed a moment later.",
)
ADVERTISED = _fault(
    CoordinationError,
    why="a broker at {addresses} answered, but no connection can be made to an address "
    "that the cluster advertises",
    next_step="Check that its broker runs, and that this machine can resolve and reach "
    "what advertised.listeners of the broker names.",
)
UNCONFIRMED = _fault(
    CoordinationError,
    why="no broker at {addresses} confirmed it in time",
    next_step="Check that the brokers answer, that the topic exists, and that its "
    "partitions have leaders, with: marshal doctor",
)
NO_LEADER = _fault(
    CoordinationError,
    why="partitions have no leader, or the brokers do not know them yet",
    next_step="Try again soon if the topic is new; else bring the missing brokers "
    "back.",
)
NO_COORDINATOR = _fault(
    CoordinationError,
    why="no coordinator of the group or the transaction is ready: its broker starts, "
    "stops or fails over",
    next_step="Try again soon; if it continues, bring the missing brokers back.",
)
NO_OPEN_FILES = _fault(
    CoordinationError,  # retriable: other parts of the process may close some
    why="this process or its machine has too many open files",
    next_step=f"If it needs that many (see lsof), {RAISE_OPEN_FILES} and start it "
    "again.",
)
OTHER = _fault(
    CoordinationError,
    why="Kafka reported an error",
    next_step="If it continues, look at the brokers' logs.",
)


# Error codes of Kafka's protocol, which every client library has; others are unknown.
BY_CODE: Mapping[int | None, Fault] = {
    29: FORBIDDEN,  # TOPIC_AUTHORIZATION_FAILED
    30: FORBIDDEN,  # GROUP_AUTHORIZATION_FAILED
    31: FORBIDDEN,  # CLUSTER_AUTHORIZATION_FAILED
    53: FORBIDDEN,  # TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    65: FORBIDDEN,  # DELEGATION_TOKEN_AUTHORIZATION_FAILED
    33: NOT_AUTHENTICATED,  # UNSUPPORTED_SASL_MECHANISM
    54: NOT_AUTHENTICATED,  # SECURITY_DISABLED
    58: NOT_AUTHENTICATED,  # SASL_AUTHENTICATION_FAILED
    34: NO_LOGIN,  # ILLEGAL_SASL_STATE
    1: GONE,  # OFFSET_OUT_OF_RANGE
    10: REFUSED_RECORD,  # MSG_SIZE_TOO_LARGE
    18: REFUSED_RECORD,  # RECORD_LIST_TOO_LARGE
    32: REFUSED_RECORD,  # INVALID_TIMESTAMP
    87: REFUSED_RECORD,  # INVALID_RECORD
    2: UNDECODABLE,  # INVALID_MSG
    76: UNDECODABLE,  # UNSUPPORTED_COMPRESSION_TYPE
    35: TOO_OLD,  # UNSUPPORTED_VERSION
    43: TOO_OLD,  # UNSUPPORTED_FOR_MESSAGE_FORMAT
    17: REFUSED_TOPIC,  # TOPIC_EXCEPTION
    36: REFUSED_TOPIC,  # TOPIC_ALREADY_EXISTS
    37: REFUSED_TOPIC,  # INVALID_PARTITIONS
    38: REFUSED_TOPIC,  # INVALID_REPLICATION_FACTOR
    39: REFUSED_TOPIC,  # INVALID_REPLICA_ASSIGNMENT
    40: REFUSED_TOPIC,  # INVALID_CONFIG
    44: REFUSED_TOPIC,  # POLICY_VIOLATION
    3: NO_SUCH_TOPIC,  # UNKNOWN_TOPIC_OR_PART
    100: NO_SUCH_TOPIC,  # UNKNOWN_TOPIC_ID
    5: NO_LEADER,  # LEADER_NOT_AVAILABLE
    14: NO_COORDINATOR,  # COORDINATOR_LOAD_IN_PROGRESS
    15: NO_COORDINATOR,  # COORDINATOR_NOT_AVAILABLE
    16: NO_COORDINATOR,  # NOT_COORDINATOR
    22: GROUP_IN_USE,  # ILLEGAL_GENERATION
    25: GROUP_IN_USE,  # UNKNOWN_MEMBER_ID
    27: GROUP_IN_USE,  # REBALANCE_IN_PROGRESS
    68: GROUP_IN_USE,  # NON_EMPTY_GROUP
    82: GROUP_IN_USE,  # FENCED_INSTANCE_ID
    110: GROUP_IN_USE,  # FENCED_MEMBER_EPOCH
    113: GROUP_IN_USE,  # STALE_MEMBER_EPOCH
    19: TOO_FEW_REPLICAS,  # NOT_ENOUGH_REPLICAS
    20: TOO_FEW_REPLICAS,  # NOT_ENOUGH_REPLICAS_AFTER_APPEND
    7: UNREACHABLE,  # REQUEST_TIMED_OUT
    8: UNREACHABLE,  # BROKER_NOT_AVAILABLE
    13: UNREACHABLE,  # NETWORK_EXCEPTION
}


# OpenSSL's texts for alerts by which a broker refuses the certificate of a client.
_CERTIFICATE_ALERT = re.compile(
    r"alert[ _](?:(?:bad|unsupported|no)[ _]certificate|certificate[ _]\w+|"
    r"unknown[ _]ca|access[ _]denied)",
    re.IGNORECASE,
)


def is_certificate_refused(text: str) -> bool:
    """Return whether OpenSSL's text means that a broker refused our certificate."""
    return _CERTIFICATE_ALERT.search(text) is not None


_NO_OPEN_FILES = tuple(map(os.strerror, OPEN_FILES))


def fault_of_text(text: str) -> Fault | None:
    """Return the family that the text of an error shows, for every client library."""
    if is_certificate_refused(text):
        return CERTIFICATE_REFUSED
    return NO_OPEN_FILES if any(each in text for each in _NO_OPEN_FILES) else None


_NEEDS = {Access.READ: "READ on the topic", Access.WRITE: "WRITE on the topic"}


def required_right(access: Access, *topics: str) -> str:
    """Return the right that reading or writing the records of topics needs."""
    names = ", ".join(sorted(topics))
    return f"{access.name} on topic{'s' * (len(topics) > 1)} {names}"


@attrs.frozen(kw_only=True)
class Failure:
    """A failed call, for the message.

    Attributes:
        doing: The operation, as in "Reading topic x".
        access: Whether it read or wrote.
        addresses: Addresses of the brokers.
        needs: The right that it needs, as in "READ on topic x".
        client: The client library.
    """

    doing: str
    access: Access
    addresses: str
    needs: str | None = None
    client: str = "the client library"

    def to_error(self, fault: Fault, *, error: Exception, cause: str) -> MarshalError:
        """Return the error for a fault, with its cause chained.

        Args:
            fault: Family of the cause.
            error: The cause.
            cause: The cause in words.
        """
        kind = fault.read if self.access is Access.READ else fault.write
        why = fault.why.format(addresses=self.addresses, client=self.client)
        needs = self.needs or _NEEDS[self.access]
        next_step = fault.next_step.format(needs=needs)
        made = kind(f"{self.doing} failed: {why} ({cause}). {next_step}")
        made.__cause__ = error
        return made


def fenced_error(doing: str) -> ClaimLost:
    """Return the error for a transactional producer that a later one has fenced."""
    return ClaimLost(
        f"{doing} failed: a later producer has this transactional id, and the broker "
        "refuses this one",
        reason="fenced",
    )


def refused_error(doing: str, name: object) -> LogUnwritable:
    """Return the error for a record that a data topic refuses."""
    return LogUnwritable(
        f"{doing} failed: the topic refuses a record ({name}): it is larger than "
        "max.message.bytes of the topic, or has no key and the topic is compacted; "
        "write other records, or change the topic with kafka-configs"
    )


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception came from outside the code that it ended.

    For example Ctrl-C, an exit, or any exception that a signal handler raised.
    """
    if not isinstance(error, Exception):
        return True
    codes = {_code_of(signal.getsignal(each)) for each in signal.valid_signals()}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    """Return the code of a signal handler, None if it has none in Python."""
    if not callable(handler):
        return None  # the system's default action
    handler = getattr(handler, "func", handler)  # of a partial
    handler = getattr(handler, "__func__", handler)  # of a method
    if not hasattr(handler, "__code__"):
        handler = type(handler).__call__
    return getattr(handler, "__code__", None)


def forked_error(doing: str) -> MarshalError:
    """Return the error for a connection that a forked child uses (PROTOCOL 1.7)."""
    return InvalidTransition(
        f"{doing} failed: the connection was opened by the parent process, and a "
        "forked child must not use it. Open a new one in this process."
    )
