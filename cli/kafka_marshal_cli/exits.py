"""The exit code of each error, and the command to run next."""

import re
import shlex
from collections.abc import Mapping, Sequence
from enum import IntEnum

from kafka_marshal.defaults import COORDINATION_TOPIC, format_command
from kafka_marshal.errors import (
    OPEN_FILES,
    RAISE_OPEN_FILES,
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
    LogTruncated,
    LogUnreadable,
    LogUnwritable,
    MalformedRecord,
    MarshalError,
    PositionError,
    ProtocolError,
    TopicMisconfigured,
    UnknownTopicId,
    WrongCluster,
)


class ExitCode(IntEnum):
    """Exit codes of the command; scripts may rely on them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    LOST = 4
    TIMEOUT = 5
    WRONG_CLUSTER = 6
    BROKEN = 70
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.OK: "done, even if the reader of the output closed the pipe",
    ExitCode.FAILED: "failed: access denied, an unreadable log or topic, a failed "
    "check, a failed process of `consume --exec`",
    ExitCode.USAGE: "wrong usage or an impossible setting; nothing was sent",
    ExitCode.REFUSED: "refused in the present state: held, paused, busy, already "
    "formatted; a coordination topic that is missing, unformatted, torn or "
    "misconfigured; a log that needs a newer release",
    ExitCode.LOST: "a claim was lost, the client was fenced, or another live process "
    "has its client id",
    ExitCode.TIMEOUT: "no answer in time, or no broker reached",
    ExitCode.WRONG_CLUSTER: "the coordination topic was formatted for another cluster",
    ExitCode.BROKEN: "an invariant is broken: a bug, or a log that was manipulated",
    ExitCode.INTERRUPTED: "interrupted from the keyboard (`consume`, `broker run` and "
    "`demo` end in order)",
}

# From specific to general: the first match counts.
_TABLE: tuple[tuple[type[MarshalError], ExitCode, str], ...] = (
    (ConfigurationError, ExitCode.USAGE, "{failed} --help"),
    (MalformedRecord, ExitCode.FAILED, "marshal log verify"),
    (InvalidTransition, ExitCode.BROKEN, "marshal log verify"),
    (ProtocolError, ExitCode.BROKEN, "marshal log verify"),
    (ClaimRejected, ExitCode.REFUSED, "marshal claims list"),
    (ClaimLost, ExitCode.LOST, "marshal claims list"),
    (IdentityConflict, ExitCode.LOST, "marshal clients list"),
    (ClientFenced, ExitCode.LOST, "marshal clients list"),
    (GroupPaused, ExitCode.REFUSED, "marshal groups list"),
    (ClaimError, ExitCode.REFUSED, "marshal claims list"),
    (PositionError, ExitCode.FAILED, "marshal claims list"),
    (DeadlineExceeded, ExitCode.TIMEOUT, "marshal doctor"),
    (WrongCluster, ExitCode.WRONG_CLUSTER, "marshal cluster id"),
    (TopicMisconfigured, ExitCode.REFUSED, "marshal topic info"),
    (LogUnreadable, ExitCode.FAILED, "marshal doctor"),
    (LogUnwritable, ExitCode.FAILED, "marshal doctor"),
    (LogTruncated, ExitCode.FAILED, "marshal log verify"),
    (UnknownTopicId, ExitCode.TIMEOUT, "marshal doctor"),
    (CoordinationError, ExitCode.TIMEOUT, "marshal doctor"),
    (MarshalError, ExitCode.FAILED, "marshal doctor"),
)
_COMMAND_IN_TEXT = re.compile(
    r"\bmarshal [a-z]|\b(run|see): \S|\bit with: \S|\bpip install '"
)
_FORMAT_IN_TEXT = re.compile(r"\bmarshal topic format\b(?! --coordination-topic)")
_ARGUMENT_IN_TEXT = re.compile(r"\b([a-z_]+)=True\b")
"""An argument in a message of the library or the sidecar, to be shown as a flag."""
_SETTING_IN_TEXT = re.compile(r"(?<![\w'\"/.=-])[a-z]+(?:_[a-z]+)+(?![\w'\"/=-])")
_FLAG_NAMES = {
    "bootstrap_servers": "bootstrap_server",
    "group_id": "group",
    "heartbeat_interval_ms": "heartbeat",
    "client_id": "client",
    "partition_count": "partitions",
    "sidecar_token_file": "token_file",
}
"""Settings of the library whose options have another name, besides those in ms."""
_CONNECTS = re.compile(
    r"(?:(?<=: )|^)marshal(?= (cluster|topic|groups|claims|clients|plan|grants|log|"
    r"doctor|shell|consume|config show)\b)(?!.* --help$)",
    re.MULTILINE,
)
"""A command in a message that connects to the cluster."""


def exit_code(error: BaseException) -> ExitCode:
    """Return the exit code of an error."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    for kind, code, _ in _TABLE:
        if isinstance(error, kind):
            return code
    return ExitCode.FAILED if isinstance(error, OSError) else ExitCode.BROKEN


def next_command(error: BaseException, failed: str = "marshal") -> str | None:
    """Return the command to run next; None if the message names a command or flag.

    Args:
        error: The error.
        failed: The command that failed; running its help may be the advice.
    """
    text = str(error)
    if _COMMAND_IN_TEXT.search(text) or _ARGUMENT_IN_TEXT.search(text):
        return None
    for kind, _, command in _TABLE:
        if isinstance(error, kind):
            return command.format(failed=failed)
    return "marshal doctor" if isinstance(error, OSError) else "marshal log verify"


def message(
    error: BaseException,
    *,
    topic: str = COORDINATION_TOPIC,
    command: str = "marshal",
    flags: Mapping[str, str] | None = None,
) -> str:
    """Return the message of an error: what happened, why, and what to run next.

    The message is not escaped, and parts of it may come from the log.

    Args:
        error: The error.
        topic: The coordination topic. It is added to commands in the message that
            would format another topic.
        command: The command that failed.
        flags: How options and arguments of the command are written, by name: the
            message of a wrong setting has them instead of the library's names.
    """
    text = str(error).strip()
    if isinstance(error, MarshalError):
        text = _ARGUMENT_IN_TEXT.sub(_flag, text)
        if isinstance(error, ConfigurationError):
            text = _with_flags(text, flags or {})
        text = _FORMAT_IN_TEXT.sub(lambda _: format_command(topic), text)
    elif isinstance(error, OSError):
        # For example a full disk: not a problem of the log, and not a bug.
        remedy = "--debug shows where"
        if error.errno in OPEN_FILES:
            remedy = RAISE_OPEN_FILES
        text = f"the operating system refused: {text}; {remedy}"
    else:
        text = f"unexpected {type(error).__name__}: {text}; --debug shows where"
    run = next_command(error, command)
    return text if run is None else f"{text}\nnext: {run}"


def with_connection(text: str, connection: Sequence[tuple[str, str]]) -> str:
    """Return a message with connection options in each command that needs them.

    Args:
        text: The message.
        connection: Connection options of the command line, with their values: with
            them, commands in the message reach the same cluster.
    """
    options = "".join(
        f" {name} {shlex.quote(value)}"
        for name, value in connection
        if not re.search(rf"(?<!\S){name} ", text)
    )
    return _CONNECTS.sub(lambda found: found[0] + options, text)


def _with_flags(text: str, flags: Mapping[str, str]) -> str:
    """Return a message with the options of a command instead of settings."""

    def flag(found: re.Match[str]) -> str:
        name = found[0]
        names = name, name.removesuffix("_ms"), _FLAG_NAMES.get(name, "")
        return next((flags[each] for each in names if each in flags), name)

    return _SETTING_IN_TEXT.sub(flag, text)


def _flag(argument: re.Match[str]) -> str:
    return "--" + argument[1].replace("_", "-")
