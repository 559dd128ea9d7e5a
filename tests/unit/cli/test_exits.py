"""Exit codes and messages of errors, with the command to run next."""

import errno
import inspect

import pytest

from kafka_marshal import errors
from kafka_marshal.errors import (
    ClaimLost,
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
    GroupPaused,
    IdentityConflict,
    InvalidTransition,
    LogTruncated,
    LogUnreadable,
    LogUnwritable,
    MalformedRecord,
    MarshalError,
    PositionError,
    TopicMisconfigured,
    WrongCluster,
)
from kafka_marshal_cli.exits import (
    _TABLE,
    MEANINGS,
    ExitCode,
    exit_code,
    message,
    next_command,
    with_connection,
)

EVERY_ERROR = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, MarshalError)
]


def test_every_error_is_in_the_table_before_its_base_classes():
    kinds = [kind for kind, _, _ in _TABLE]
    assert set(kinds) == set(EVERY_ERROR)
    for index, kind in enumerate(kinds):
        assert not any(issubclass(later, kind) for later in kinds[index + 1 :])


def test_every_exit_code_has_a_meaning():
    assert set(MEANINGS) == set(ExitCode)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("x"), 2),
        (errors.ClaimRejected("x"), 3),
        (GroupPaused("x", until_ms=1), 3),
        (TopicMisconfigured("x"), 3),
        (ClaimLost("x"), 4),
        (IdentityConflict("x", holder="c"), 4),
        (errors.ClientFenced("x"), 4),
        (DeadlineExceeded("x"), 5),
        (CoordinationError("x"), 5),
        (WrongCluster("x"), 6),
        (LogUnreadable("x"), 1),
        (LogUnwritable("x"), 1),
        (LogTruncated("x"), 1),
        (MalformedRecord("x"), 1),
        (PositionError("x", requested=1, log_start=2, log_end=3), 1),
        (MarshalError("x"), 1),
        (InvalidTransition("x"), 70),
        (ZeroDivisionError("x"), 70),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_each_error_has_its_exit_code(error, code):
    assert exit_code(error) == code


def test_a_cause_after_a_colon_is_not_taken_for_a_command():
    error = CoordinationError("no answer; the last attempt ended with: Refused")
    assert message(error).endswith("\nnext: marshal doctor")


def test_an_error_that_names_a_command_is_unchanged():
    error = TopicMisconfigured("not formatted; run: marshal topic format")
    assert next_command(error) is None
    assert message(error) == "not formatted; run: marshal topic format"


@pytest.mark.parametrize(
    "text",
    [
        "no group; see: kafka-consumer-groups --bootstrap-server b:1 --list",
        "too open; run: chmod 700 x",
        "see it with: ls",
        "no pyspark; install the extra: pip install 'kafka-marshal[spark]'",
    ],
)
def test_an_error_that_names_another_program_is_unchanged(text):
    assert message(ConfigurationError(text), command="marshal groups grow") == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none; run: marshal topic format", "run: marshal -b h:1 topic format"),
        ("it; see: marshal log tail\nmore", "see: marshal -b h:1 log tail\nmore"),
        ("it; run: marshal sidecar status", "run: marshal sidecar status"),
        ("name an output of marshal log dump; run: it", "of marshal log dump; run: it"),
        ("give -b x; run: marshal doctor", "run: marshal doctor"),
        ("no kafka-b run: marshal doctor", "run: marshal -b h:1 doctor"),
    ],
)
def test_a_suggested_command_repeats_the_connection_options(text, expected):
    assert with_connection(text, [("-b", "h:1")]).endswith(expected)


def test_a_suggested_help_command_has_no_connection_options():
    text = "wrong\nnext: marshal log dump --help"
    assert with_connection(text, [("-b", "h:1")]) == text


def test_every_property_is_repeated():
    options = [("-C", "a=1"), ("-C", "b=2 3")]
    text = with_connection("marshal doctor", options)
    assert text == "marshal -C a=1 -C 'b=2 3' doctor"
    assert with_connection(text, options) == text


FLAGS = {
    "state_dir": "--state-dir",
    "heartbeat_interval": "--heartbeat-interval",
    "heartbeat": "--heartbeat",
    "bootstrap_server": "--bootstrap-server",
    "token_file": "--token-file",
    "group": "GROUP",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("state_dir '/x/state_dir' fails", "--state-dir '/x/state_dir' fails"),
        ("heartbeat_interval_ms is 9", "--heartbeat-interval is 9"),
        ("changes_ms or heartbeat_ms", "changes_ms or --heartbeat"),
        ("bootstrap_servers is empty", "--bootstrap-server is empty"),
        ("give sidecar_token_file, or", "give --token-file, or"),
        ("group_id 'a b' is wrong", "GROUP 'a b' is wrong"),
        ("Check ssl_cafile.", "Check ssl_cafile."),
        ("'state_dir' and a.state_dir", "'state_dir' and a.state_dir"),
    ],
)
def test_the_message_of_a_wrong_setting_names_the_option(text, expected):
    found = message(ConfigurationError(text), flags=FLAGS)
    assert found.splitlines()[0] == expected
    other = message(CoordinationError(text), flags=FLAGS)
    assert other.splitlines()[0] == text


@pytest.mark.parametrize("kind", [CoordinationError, TopicMisconfigured, MarshalError])
def test_an_error_that_names_no_command_gets_one(kind):
    assert message(kind("broken\n")).startswith("broken\nnext: marshal ")


def test_an_unexpected_exception_is_reported_with_its_type():
    assert message(ZeroDivisionError("division by zero")) == (
        "unexpected ZeroDivisionError: division by zero; --debug shows where\n"
        "next: marshal log verify"
    )


def test_an_error_of_the_operating_system_is_not_a_bug():
    error = OSError(errno.ENOSPC, "No space left on device", "/var/x")
    assert exit_code(error) == ExitCode.FAILED
    text = message(error)
    assert "No space left on device: '/var/x'" in text
    assert text.endswith("next: marshal doctor")
    assert exit_code(BrokenPipeError()) == ExitCode.FAILED


def test_the_message_for_too_many_open_files_names_the_limit():
    text = message(OSError(errno.EMFILE, "Too many open files", "/x/topics.py"))
    assert "Too many open files: '/x/topics.py'; raise the limit" in text
    assert "ulimit -n" in text


def test_a_message_shows_library_arguments_as_options():
    error = errors.ClaimRejected(
        "it goes back; allow_reprocess=True allows that", reason="x"
    )
    assert message(error) == "it goes back; --allow-reprocess allows that"


def test_a_suggested_format_command_names_the_given_topic():
    error = TopicMisconfigured("not formatted; run: marshal topic format")
    wanted = "not formatted; run: marshal topic format --coordination-topic other"
    assert message(error, topic="other") == wanted
    assert message(TopicMisconfigured(wanted), topic="other") == wanted


def test_wrong_usage_suggests_the_help_of_the_command():
    text = message(ConfigurationError("no"), command="marshal claims who")
    assert text == "no\nnext: marshal claims who --help"
