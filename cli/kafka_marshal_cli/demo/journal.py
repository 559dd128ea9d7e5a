"""The journal of a worker, one line at a time.

A line goes to the operating system in one write before the record is committed, so
a SIGKILL loses nothing that was written. At worst it cuts the last line, which then
does not count. The worker imports only this part of the demo.
"""

import os
import time
from pathlib import Path

import msgspec

from kafka_marshal import MarshalError

NS_PER_MS = 1_000_000
READY = "ready"
BATCH = "batch"
RECORD = "record"
CLAIMED = "claimed"
LOST = "lost"
END = "end"


def monotonic_ms() -> int:
    """Return the machine's monotonic clock in milliseconds."""
    return time.monotonic_ns() // NS_PER_MS


class Line(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One line of a journal.

    Attributes:
        at: When, in milliseconds of the machine's monotonic clock, which all
            processes of this machine share.
        kind: ``ready``, ``batch``, ``record``, ``claimed``, ``lost`` or ``end``.
        partition: Data partition, -1 if there is none.
        offset: Offset of the record, or of the first of the batch.
        last: Offset of the last record of a batch.
        token: Fencing token of the records.
        note: Text of the record, or the reason of a loss.
    """

    kind: str
    at: int = msgspec.field(default_factory=monotonic_ms)
    partition: int = -1
    offset: int = -1
    last: int = -1
    token: str = ""
    note: str = ""


class BadJournal(MarshalError):
    """A journal has a complete line that no worker writes."""


class JournalWriter:
    """Appends lines to a journal. Used by one thread of one worker."""

    def __init__(self, path: Path) -> None:
        """Open the file; create it if it does not exist."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)

    def write(self, line: Line) -> None:
        """Write one line; the operating system has it when the call returns."""
        os.write(self._file, msgspec.json.encode(line) + b"\n")


class JournalReader:
    """Reads a journal while it grows.

    Attributes:
        path: The file; it need not exist yet.
        lines: Every complete line so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Line] = []
        self._decoder = msgspec.json.Decoder(Line)
        self._offset = 0

    def read(self) -> list[Line]:
        """Return the lines that were added since the last call.

        Raises:
            BadJournal: A complete line is not one of a journal.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        # A line without its end is not written yet, or was cut by a kill.
        whole = text[: text.rfind(b"\n") + 1]
        try:
            found = self._decoder.decode_lines(whole)
        except msgspec.MsgspecError as error:
            raise BadJournal(f"{self.path.name} is damaged: {error}") from error
        self._offset += len(whole)
        self.lines.extend(found)
        return found
