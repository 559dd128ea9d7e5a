"""The sidecar's own log on stderr: text or JSON.

The engine's thread renews leases and must not wait for a slow reader of stderr. So
lines pass through a bounded queue, and lines that do not fit are dropped and counted.
Nor does the end of the process wait for a reader that is stuck.
"""

import atexit
import copy
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from logging.handlers import QueueHandler
from typing import TYPE_CHECKING, Any, Literal, TextIO

import attrs

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.observability import LoggingObserver
from kafka_marshal.observability.logs import LOGGER_NAME, StructuredObserver
from kafka_marshal.ports import Observer

if TYPE_CHECKING:
    import structlog

LINES_MAX = 10_000
# How long the end waits for room in the queue, and then for the last line.
END_S = 2.0
_LEVELS = {
    LOGGER_NAME: logging.INFO,
    "kafka": logging.ERROR,
    # Warnings of uvicorn are about invalid requests, which get a response.
    "uvicorn.error": logging.ERROR,
    "asyncio": logging.WARNING,
}
_TEXT = "%(asctime)s %(levelname)s %(message)s"
# Loggers of Kafka's client libraries, which log every attempt to connect.
CLIENTS = ("kafka", "kafka_marshal.librdkafka")
PAUSE_S_MIN, PAUSE_S_MAX = 60.0, 3_600.0


@attrs.define
class _Pause:
    """When a library's next line may pass, by the monotonic clock in seconds."""

    pause_s: float = 0.0
    due_s: float = 0.0
    last_s: float = 0.0
    skipped_count: int = 0


class RepeatFilter:
    """Thins out the lines of Kafka's client libraries. Thread-safe.

    While brokers are down, a library logs every attempt to connect, several a second.
    The first line of each library passes, then one after 60 s, 120 s and so on up to an
    hour, with the number of suppressed lines; after 60 s without a line the next line
    passes at once. Tracebacks of these lines are dropped.

    Args:
        now_s: The clock, in seconds.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._pauses: dict[str, _Pause] = {}

    def passed(self, record: logging.LogRecord) -> logging.LogRecord | None:
        """Return the line to write, None to drop it."""
        name = record.name
        client = next(
            (c for c in CLIENTS if name == c or name.startswith(c + ".")), None
        )
        if client is None:
            return record
        now_s = self._now_s()
        with self._lock:
            pause = self._pauses.get(client)
            if pause is None or now_s - pause.last_s >= PAUSE_S_MIN:
                pause = self._pauses[client] = _Pause(last_s=now_s)
            pause.last_s = now_s
            if now_s < pause.due_s:
                pause.skipped_count += 1
                return None
            count, waited_s = pause.skipped_count, pause.pause_s
            longer_s = max(PAUSE_S_MIN, 2 * pause.pause_s)
            pause.pause_s = min(longer_s, PAUSE_S_MAX)
            pause.due_s, pause.skipped_count = now_s + pause.pause_s, 0
        # A copy, because other handlers have the same record.
        found = copy.copy(record)
        found.exc_info = found.exc_text = None
        if count:
            more = (
                f"{count} more lines of this Kafka client dropped in {waited_s:.0f} s"
            )
            found.msg, found.args = f"{record.getMessage()} ({more})", None
        return found


Lines = queue.Queue[logging.LogRecord | None]
"""Lines to write; None ends the writer."""


class _Dropping(QueueHandler):
    """Queues lines; once there is room again, reports how many were dropped."""

    def __init__(self, lines: Lines) -> None:
        super().__init__(lines)
        self.dropped_count = 0
        self._repeats = RepeatFilter()

    def emit(self, record: logging.LogRecord) -> None:
        passed = self._repeats.passed(record)
        if passed is not None:
            super().emit(passed)

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            if self.dropped_count:
                self.queue.put_nowait(self._dropped_record())
                self.dropped_count = 0
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped_count += 1

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        # The record stays as it is: the writer's thread formats it.
        return record

    def _dropped_record(self) -> logging.LogRecord:
        return logging.LogRecord(
            name=LOGGER_NAME,
            level=logging.WARNING,
            pathname=__file__,
            lineno=0,
            msg="the sidecar dropped %d log lines: the reader of its log is too slow",
            args=(self.dropped_count,),
            exc_info=None,
        )


class _Writer:
    """Writes queued lines on a thread of its own.

    It takes no lock of a handler or of ``sys.stderr``: while its reader is stuck, the
    thread would keep the lock, and Python waits for both as the process exits.
    """

    def __init__(
        self,
        lines: Lines,
        formatter: logging.Formatter,
        write: Callable[[str], object],
    ) -> None:
        self._lines = lines
        self._formatter = formatter
        self._write = write
        self._thread = threading.Thread(
            target=self._run, name="sidecar-log", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Write what is queued; lines for which the reader is too slow are lost."""
        with suppress(queue.Full):
            self._lines.put(None, timeout=END_S)
        self._thread.join(END_S)

    def _run(self) -> None:
        while (record := self._lines.get()) is not None:
            with suppress(OSError):  # nobody reads stderr any more
                self._write(self._text(record) + "\n")

    def _text(self, record: logging.LogRecord) -> str:
        try:
            return self._formatter.format(record)
        except Exception as error:  # noqa: BLE001 - such as arguments that do not fit
            return f"a line of {record.name} cannot be formatted: {error!r}"


def _write_to(number: int, encoding: str, text: str) -> None:
    data = text.encode(encoding, "backslashreplace")
    while data:
        data = data[os.write(number, data) :]


def _stderr() -> Callable[[str], object]:
    """Return a function that writes to stderr, if there is one."""
    stream: TextIO | None = sys.stderr
    if stream is None:
        return lambda _: None
    try:
        return partial(_write_to, stream.fileno(), stream.encoding)
    except OSError:  # it has no file
        return stream.write


def start_logging(
    form: Literal["text", "json"], stream: TextIO | None = None
) -> tuple[Observer, Callable[[], None]]:
    """Start the sidecar's log.

    Returns:
        The observer of engine events, and a function that flushes and ends the log.

    Raises:
        ConfigurationError: The extra for JSON is not installed.
    """
    formatter = logging.Formatter(_TEXT)
    observer: Observer = LoggingObserver()
    if form == "json":
        formatter = _json_formatter()
        observer = StructuredObserver(_structlog_logger())
    lines = Lines(LINES_MAX)
    writer = _Writer(lines, formatter, _stderr() if stream is None else stream.write)
    dropping = _Dropping(lines)
    before = {
        name: (logging.getLogger(name).level, logging.getLogger(name).propagate)
        for name in _LEVELS
    }
    for name, level in _LEVELS.items():
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = False
        logger.addHandler(dropping)

    def stop() -> None:
        atexit.unregister(stop)
        for name, (level, propagates) in before.items():
            logger = logging.getLogger(name)
            logger.removeHandler(dropping)
            logger.setLevel(level)
            logger.propagate = propagates
        writer.end()

    atexit.register(stop)
    return observer, stop


def _json_formatter() -> logging.Formatter:
    try:
        import structlog
    except ImportError as error:
        raise ConfigurationError(
            "log-format json needs the extra 'sidecar'; run: pip install "
            f"'kafka-marshal[sidecar]' ({error})",
            setting="log-format",
        ) from error
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    formatter: logging.Formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
    )
    return formatter


def _structlog_logger() -> "structlog.stdlib.BoundLogger":
    import structlog

    found: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(LOGGER_NAME),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
    )
    return found
