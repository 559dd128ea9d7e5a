"""The translation of errors of kafka-python."""

import errno
import os
import re

import pytest
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
from kafka_marshal.kafka_io import faults
from kafka_marshal.kafka_io.translate import Access, translate_error

BOTH = (Access.READ, Access.WRITE)


def translated(error, access=Access.READ):
    return translate_error(error, doing="Testing", access=access, addresses="a:1, b:2")


@pytest.mark.parametrize(
    ("kind", "read", "write"),
    [
        (kafka_errors.TopicAuthorizationFailedError, LogUnreadable, LogUnwritable),
        (kafka_errors.ClusterAuthorizationFailedError, LogUnreadable, LogUnwritable),
        (kafka_errors.GroupAuthorizationFailedError, LogUnreadable, LogUnwritable),
        (kafka_errors.SaslAuthenticationFailedError, LogUnreadable, LogUnwritable),
        (kafka_errors.CorruptRecordError, LogUnreadable, LogUnwritable),
        (kafka_errors.UnsupportedVersionError, LogUnreadable, LogUnwritable),
        (kafka_errors.OffsetOutOfRangeError, LogTruncated, LogTruncated),
        (kafka_errors.MessageSizeTooLargeError, LogUnwritable, LogUnwritable),
        (kafka_errors.TopicAlreadyExistsError, TopicMisconfigured, TopicMisconfigured),
        (kafka_errors.PolicyViolationError, TopicMisconfigured, TopicMisconfigured),
        (kafka_errors.KafkaConfigurationError, ConfigurationError, ConfigurationError),
        (kafka_errors.IllegalStateError, InvalidTransition, InvalidTransition),
        (kafka_errors.UnknownMemberIdError, CoordinationError, CoordinationError),
        (kafka_errors.NotEnoughReplicasError, CoordinationError, CoordinationError),
        (kafka_errors.KafkaTimeoutError, CoordinationError, CoordinationError),
        (kafka_errors.UnknownError, CoordinationError, CoordinationError),
        (OSError, CoordinationError, CoordinationError),
    ],
)
def test_each_error_has_its_error_class(kind, read, write):
    error = kind("why")
    for access, wanted in zip(BOTH, (read, write), strict=True):
        made = translated(error, access)
        assert type(made) is wanted
        assert made.__cause__ is error
        assert str(made).startswith("Testing failed: ")
        assert kind.__name__ in str(made)
        assert "why" in str(made)


def test_a_truncation_error_becomes_log_truncated():
    assert type(translated(kafka_errors.LogTruncationError({}))) is LogTruncated


@pytest.mark.parametrize(
    "kind",
    [
        kafka_errors.KafkaTimeoutError,
        kafka_errors.KafkaConnectionError,
        kafka_errors.NodeNotReadyError,
        kafka_errors.RequestTimedOutError,
    ],
)
def test_an_unreachable_cluster_names_the_addresses(kind):
    made = translated(kind())
    assert "no broker answered at a:1, b:2" in str(made)
    assert made.retriable


def test_a_broker_that_is_not_listed_does_not_mean_that_no_broker_answers():
    made = translated(kafka_errors.UnknownBrokerIdError(2))
    assert "does not list a broker that the request is for" in str(made)
    assert made.retriable


def test_an_unconfirmed_record_does_not_mean_that_no_broker_answers():
    """The topic may be deleted, or a partition may have no leader."""
    expired = kafka_errors.KafkaTimeoutError("Expiring 1 record(s) for t-0")
    made = translated(expired, Access.WRITE)
    assert "no broker at a:1, b:2 confirmed it in time" in str(made)
    assert made.retriable


def test_an_error_wrapped_in_text_is_unwrapped():
    wrapped = kafka_errors.KafkaError(
        f"Unexpected: {kafka_errors.ClusterAuthorizationFailedError()}"
    )
    assert type(translated(wrapped, Access.WRITE)) is LogUnwritable
    assert type(translated(kafka_errors.KafkaError("[Error x]"))) is CoordinationError


@pytest.mark.parametrize(
    ("message", "shown"),
    [("None", "AuthorizationFailedError)"), ("'not you'", "FailedError: not you)")],
)
def test_the_message_omits_requests_and_responses(message, shown):
    error = kafka_errors.TopicAuthorizationFailedError(
        "Request 'CreatePartitionsRequest(version=3, topics=[...])' failed with "
        f"response 'CreatePartitionsResponse(error_code=29, error_message={message})'."
    )
    assert shown in str(translated(error))
    assert "Request" not in str(translated(error))


def test_too_many_open_files_are_reported_as_that():
    made = translated(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    assert type(made) is CoordinationError
    assert "has too many open files" in str(made)
    assert "ulimit -n" in str(made)


def test_a_marshal_error_is_returned_unchanged():
    ours = TopicMisconfigured("x")
    assert translated(ours) is ours


@pytest.mark.parametrize("access", BOTH)
def test_every_error_is_translated_and_retriable_ones_stay_so(access):
    """This covers every error class of kafka-python."""
    kinds = [
        kind
        for kind in vars(kafka_errors).values()
        if isinstance(kind, type) and issubclass(kind, kafka_errors.KafkaError)
    ]
    assert len(kinds) > 100
    for kind in kinds:
        error = kind({}) if kind is kafka_errors.LogTruncationError else kind("x")
        made = translated(error, access)
        assert isinstance(made, MarshalError)
        # An error that kafka-python calls retriable must stay retriable.
        if getattr(error, "retriable", False):
            assert made.retriable, kind


def test_a_listener_without_sasl_is_reported_as_that():
    made = translated(kafka_errors.IllegalSaslStateError())
    assert type(made) is LogUnreadable
    assert "the listener at a:1, b:2 does not use SASL" in str(made)
    assert "security_protocol" in str(made)


def test_a_refused_login_names_what_to_check():
    made = translated(kafka_errors.SaslAuthenticationFailedError("x"))
    assert type(made) is LogUnreadable
    assert "failed: the broker refused the login (" in str(made)
    assert "password" in str(made)


def test_fault_messages_are_impersonal():
    known = [each for each in vars(faults).values() if isinstance(each, faults.Fault)]
    assert len(known) > 10
    for fault in known:
        assert not re.search(r"\b(we|us|our)\b", f"{fault.why} {fault.next_step}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[SSL: SSLV3_ALERT_BAD_CERTIFICATE] bad (_ssl.c:1)", "ssl_certfile"),
        ("[SSL: SSLV3_ALERT_CERTIFICATE_UNKNOWN] no (_ssl.c:1)", "ssl_certfile"),
        ("[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] (_ssl.c:1)", "ssl_certfile"),
        ("[SSL: TLSV1_ALERT_UNKNOWN_CA] (_ssl.c:1)", "ssl_certfile"),
        (
            "Handshake failed: [SSL: UNEXPECTED_EOF_WHILE_READING] EOF (_ssl.c:1)",
            "does not use TLS",
        ),
        (
            "Handshake failed: [SSL: WRONG_VERSION_NUMBER] (_ssl.c:1)",
            "does not use TLS",
        ),
        ("Invalid frame length: 352518912", "set security_protocol to SSL"),
        ("Invalid frame length: 1195725856", "no broker answered"),
        ("Connection reset", "no broker answered"),
        ("[Errno 24] Too many open files", "ulimit -n"),
    ],
)
def test_the_text_of_a_failed_connection_shows_the_cause(text, words):
    made = translated(kafka_errors.KafkaConnectionError(text))
    assert type(made) is CoordinationError
    assert words.lower() in str(made).lower()
    assert ("no broker answered" in str(made)) is (words == "no broker answered")
