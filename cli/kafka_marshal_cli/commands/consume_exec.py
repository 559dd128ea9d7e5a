"""The options of ``marshal consume --exec``."""

import shlex
import shutil
from collections.abc import Mapping
from typing import Annotated, Any

import attrs
import typer

from kafka_marshal import ConfigurationError
from kafka_marshal_cli import parsing
from kafka_marshal_cli.exec_pipe import ExecFormat, ExecMode, ExecOptions, OnError
from kafka_marshal_cli.shared import Gathered

PANEL = "A process for each record or batch"
RETRIES_DEFAULT = 3
GRACE_DEFAULT = "5s"


@attrs.frozen
class Asked:
    """What was asked for; ``consume`` adds what it knows itself."""

    options: ExecOptions

    def of(
        self, *, at_most_once: bool, batch_max: int, records_max: int, group: str
    ) -> ExecOptions:
        """Return the options of a run.

        Raises:
            ConfigurationError: They do not go together.
        """
        asked = self.options
        if at_most_once and asked.retries_max:
            raise ConfigurationError(
                "at most once nothing is tried again: leave out --retries and "
                "--on-error retry, or use --delivery alo",
                setting="--retries",
            )
        if at_most_once and asked.workers > 1:
            raise ConfigurationError(
                "at most once there is one process at a time: leave out --workers, "
                "or use --delivery alo",
                setting="--workers",
            )
        return attrs.evolve(
            asked,
            at_most_once=at_most_once,
            batch_max=batch_max,
            records_max=records_max,
            env={"MARSHAL_GROUP": group},
        )


Option = Any  # what typer.Option returns has no public name


def _option(name: str, help_: str, *, metavar: str | None = None) -> Option:
    return typer.Option(name, metavar=metavar, help=help_, rich_help_panel=PANEL)


_OPTIONS: dict[str, tuple[Any, Any]] = {
    "exec_": (
        Annotated[
            str | None,
            _option(
                "--exec",
                "Run this for each record, which it reads from stdin; exit code 0 "
                "means processed, and commits. Words are split as in a shell.",
                metavar="CMD",
            ),
        ],
        None,
    ),
    "exec_mode": (
        Annotated[
            ExecMode,
            _option("--exec-mode", "For each record, or each batch of a partition."),
        ],
        ExecMode.RECORD,
    ),
    "exec_format": (
        Annotated[
            ExecFormat | None,
            _option(
                "--exec-format",
                "What it reads: bare values, or JSON lines as printed without --exec. "
                "By default values of records, JSON lines of batches.",
            ),
        ],
        None,
    ),
    "exec_shell": (
        Annotated[
            bool, _option("--exec-shell", "CMD is a line for /bin/sh, pipes and all.")
        ],
        False,
    ),
    "exec_timeout": (
        Annotated[
            str | None,
            _option(
                "--exec-timeout",
                "A process that takes longer is ended and has failed.",
                metavar="MS",
            ),
        ],
        None,
    ),
    "exec_grace": (
        Annotated[
            str,
            _option(
                "--exec-grace",
                "How long a process that is told to end (TERM) may take before it is "
                "killed.",
                metavar="MS",
            ),
        ],
        GRACE_DEFAULT,
    ),
    "on_error": (
        Annotated[
            OnError,
            _option(
                "--on-error",
                "When a process fails: stop with 1 and commit nothing; retry, then "
                "stop; or skip it, committed, with a line on stderr.",
            ),
        ],
        OnError.STOP,
    ),
    "retries": (
        Annotated[
            int | None,
            typer.Option(
                min=0,
                metavar="N",
                help="Tries after the first, with pauses from 0.5 s doubled up to "
                f"30 s. By default {RETRIES_DEFAULT} with --on-error retry, else 0.",
                rich_help_panel=PANEL,
            ),
        ],
        None,
    ),
    "workers": (
        Annotated[
            int,
            typer.Option(
                min=1,
                help="Most processes at a time; one for each partition at most, so "
                "its order is kept.",
                rich_help_panel=PANEL,
            ),
        ],
        1,
    ),
}


def asked_for(given: Mapping[str, Any]) -> Asked | None:
    """Return what was asked for, None without ``--exec``.

    Raises:
        ConfigurationError: The command does not exist, or an option that needs
            ``--exec`` was given without it.
    """
    text = given["exec_"]
    if text is None:
        for name, (_, default) in _OPTIONS.items():
            if given[name] != default:
                option = "--" + name.replace("_", "-")
                raise ConfigurationError(f"{option} needs --exec CMD", setting=option)
        return None
    mode, form = given["exec_mode"], given["exec_format"]
    is_batch = mode is ExecMode.BATCH
    default_form = ExecFormat.JSONL if is_batch else ExecFormat.VALUE
    retries = given["retries"]
    if retries is None:
        retries = RETRIES_DEFAULT if given["on_error"] is OnError.RETRY else 0
    timeout = given["exec_timeout"]
    return Asked(
        ExecOptions(
            ["/bin/sh", "-c", text] if given["exec_shell"] else _words(text),
            mode=mode,
            format=form or default_form,
            on_error=given["on_error"],
            retries_max=retries,
            timeout_ms=None
            if timeout is None
            else parsing.duration_ms("--exec-timeout", timeout),
            grace_ms=parsing.duration_ms("--exec-grace", given["exec_grace"]),
            workers=given["workers"],
        )
    )


def _words(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(
            f"--exec is {text!r}: {error}; quote it as for a shell", setting="--exec"
        ) from error
    if not words:
        raise ConfigurationError("--exec names no command", setting="--exec")
    if shutil.which(words[0]) is None:
        raise ConfigurationError(
            f"--exec: there is no program {words[0]!r} to run; for a shell's own "
            "words add --exec-shell",
            setting="--exec",
        )
    return words


EXEC = Gathered(_OPTIONS, asked_for)
