"""The translation of errors of librdkafka."""

import errno
import os

import pytest
from confluent_kafka import KafkaError, KafkaException
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
from kafka_marshal.kafka_io import translate as python_translate
from kafka_marshal.kafka_io.fast.translate import (
    Access,
    is_refusal,
    translate_error,
)

BOTH = (Access.READ, Access.WRITE)
CODES = {
    name: value
    for name, value in vars(KafkaError).items()
    if name.isupper() and isinstance(value, int)
}


def translated(error, access=Access.READ):
    return translate_error(error, doing="Testing", access=access, addresses="a:1, b:2")


@pytest.mark.parametrize(
    ("name", "read", "write"),
    [
        ("TOPIC_AUTHORIZATION_FAILED", LogUnreadable, LogUnwritable),
        ("_AUTHENTICATION", LogUnreadable, LogUnwritable),
        ("_AUTO_OFFSET_RESET", LogTruncated, LogTruncated),
        ("_LOG_TRUNCATION", LogTruncated, LogTruncated),
        ("OFFSET_OUT_OF_RANGE", LogTruncated, LogTruncated),
        ("_BAD_MSG", LogUnreadable, LogUnwritable),
        ("MSG_SIZE_TOO_LARGE", LogUnwritable, LogUnwritable),
        ("UNSUPPORTED_VERSION", LogUnreadable, LogUnwritable),
        ("POLICY_VIOLATION", TopicMisconfigured, TopicMisconfigured),
        ("UNKNOWN_TOPIC_OR_PART", CoordinationError, CoordinationError),
        ("NON_EMPTY_GROUP", CoordinationError, CoordinationError),
        ("NOT_ENOUGH_REPLICAS", CoordinationError, CoordinationError),
        ("_INVALID_ARG", ConfigurationError, ConfigurationError),
        ("_STATE", InvalidTransition, InvalidTransition),
        ("_TRANSPORT", CoordinationError, CoordinationError),
        ("UNKNOWN", CoordinationError, CoordinationError),
    ],
)
def test_each_error_code_has_its_error_class(name, read, write):
    error = KafkaException(KafkaError(CODES[name], "why"))
    for access, wanted in zip(BOTH, (read, write), strict=True):
        made = translated(error, access)
        assert type(made) is wanted
        assert made.__cause__ is error
        assert str(made).startswith("Testing failed: ")
        assert f"({name}: why)" in str(made)


def test_messages_are_the_same_for_both_clients():
    python = python_translate.translate_error(
        kafka_errors.TopicAuthorizationFailedError("t"),
        doing="Testing",
        access=Access.READ,
        addresses="a:1, b:2",
    )
    code = KafkaError.TOPIC_AUTHORIZATION_FAILED
    fast = translated(KafkaException(KafkaError(code, "t")))
    assert type(fast) is type(python)
    assert str(fast).split("(")[0] == str(python).split("(")[0]
    assert str(fast).split(")")[1] == str(python).split(")")[1]


def test_an_unreachable_cluster_names_the_addresses():
    made = translated(KafkaException(KafkaError(CODES["_ALL_BROKERS_DOWN"])))
    assert "no broker answered at a:1, b:2" in str(made)
    assert made.retriable


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("COORDINATOR_LOAD_IN_PROGRESS", "no coordinator"),
        ("COORDINATOR_NOT_AVAILABLE", "no coordinator"),
        ("NOT_COORDINATOR", "no coordinator"),
        ("_DESTROY_BROKER", "does not list a broker"),
    ],
)
def test_the_change_of_a_broker_is_reported_as_that(name, why):
    code = getattr(KafkaError, name, None) or CODES[name]
    made = translated(KafkaException(KafkaError(code)), Access.WRITE)
    assert why in str(made)
    assert made.retriable


def test_an_unconfirmed_record_does_not_mean_that_no_broker_answers():
    """The topic may be deleted, or a partition may have no leader."""
    made = translated(KafkaException(KafkaError(CODES["_MSG_TIMED_OUT"])))
    assert "no broker at a:1, b:2 confirmed it in time" in str(made)
    assert made.retriable


def test_an_invalid_argument_names_librdkafka():
    made = translated(KafkaException(KafkaError(CODES["_INVALID_ARG"], "x")))
    assert "librdkafka does not accept the settings" in str(made)


def test_python_exceptions_are_translated():
    assert type(translated(RuntimeError("Consumer closed"))) is InvalidTransition
    assert type(translated(KafkaException())) is CoordinationError
    for error in (
        BufferError("full"),
        OSError("x"),
        KafkaException(),
        NotImplementedError(),
    ):
        assert type(translated(error)) is CoordinationError


def test_too_many_open_files_are_reported_as_that():
    made = translated(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    assert "has too many open files" in str(made)


def test_a_marshal_error_is_returned_unchanged():
    ours = TopicMisconfigured("x")
    assert translated(ours) is ours


@pytest.mark.parametrize("access", BOTH)
def test_every_error_code_is_translated_and_retriable_ones_stay_so(access):
    """An error that librdkafka calls retriable must stay retriable."""
    assert len(CODES) > 100
    for name, code in CODES.items():
        error = KafkaError(code)
        made = translated(KafkaException(error), access)
        assert isinstance(made, MarshalError)
        if error.retriable():
            assert made.retriable, name


def test_a_listener_without_sasl_is_reported_as_that():
    made = translated(KafkaException(KafkaError(CODES["ILLEGAL_SASL_STATE"], "why")))
    assert type(made) is LogUnreadable
    assert "the listener at a:1, b:2 does not use SASL" in str(made)
    assert "security_protocol" in str(made)


def test_a_listener_without_sasl_is_recognized_by_the_error_text():
    text = KafkaError(CODES["ILLEGAL_SASL_STATE"]).str()
    error = KafkaException(KafkaError(CODES["_AUTHENTICATION"], f"a:1: {text}"))
    assert "does not use SASL" in str(translated(error))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            (
                "SSL handshake failed: Disconnected: SSL connection closed by peer: "
                "connecting to a PLAINTEXT broker listener?"
            ),
            "does not use TLS",
        ),
        (
            (
                "Disconnected while requesting ApiVersion: might be caused by wrong "
                "security.protocol configuration (connecting to a SSL listener?)"
            ),
            "set security_protocol to SSL",
        ),
        (
            (
                "ssl://b:1/bootstrap: Receive failed: error:0A000412:SSL routines::"
                "ssl/tls alert bad certificate: SSL alert number 42"
            ),
            "Set ssl_certfile",
        ),
        (
            (
                "no answer within 7996 ms; the last attempt ended with: b:1/bootstrap: "
                "Failed to create socket: Too many open files (after 0ms)"
            ),
            "ulimit -n",
        ),
    ],
)
def test_a_connection_failure_is_explained_by_its_text(text, words):
    made = translated(KafkaException(KafkaError(CODES["_TIMED_OUT"], text)))
    assert type(made) is CoordinationError
    assert words.lower() in str(made).lower()
    assert "no broker answered" not in str(made)


CUT_OFF = (
    "SASL SCRAM-SHA-512 mechanism handshake failed: Local: Broker transport failure"
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CUT_OFF, "no broker answered"),
        (
            'SASL authentication error: {"status":"invalid_token"}',
            "no token could be obtained",
        ),
        (
            "Failed to acquire SASL OAUTHBEARER token: raised",
            "no token could be obtained",
        ),
    ],
)
def test_a_transient_login_failure_is_retriable(text, words):
    made = translated(KafkaException(KafkaError(CODES["_AUTHENTICATION"], text)))
    assert type(made) is CoordinationError
    assert words in str(made)


def test_an_untrusted_broker_certificate_is_reported_as_that():
    text = "SSL handshake failed: certificate verify failed: unable to get issuer"
    made = translated(KafkaException(KafkaError(CODES["_SSL"], text)))
    assert "certificate of the broker is not trusted" in str(made)
    assert made.retriable


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("_AUTHENTICATION", "why", True),
        ("SASL_AUTHENTICATION_FAILED", "why", True),
        ("_AUTHENTICATION", f"{CUT_OFF} (after 0ms in state DOWN)", False),
        ("_AUTHENTICATION", 'error: {"status":"invalid_token"}', False),
        ("_SSL", "certificate verify failed", True),
        ("_SSL", "ssl/tls alert certificate required", True),
        ("_SSL", "connecting to a PLAINTEXT broker listener?", False),
        ("_TRANSPORT", "why", False),
    ],
)
def test_only_rejected_logins_and_certificates_are_refusals(name, text, expected):
    assert is_refusal(KafkaException(KafkaError(CODES[name], text))) is expected
    assert not is_refusal(ValueError(name))
