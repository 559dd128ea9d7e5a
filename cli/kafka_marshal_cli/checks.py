"""What the doctor says: one line a check."""

from enum import StrEnum

import attrs


class Result(StrEnum):
    """How a check ended; only ``failed`` makes the whole fail."""

    OK = "ok"
    NOTE = "note"
    FAILED = "failed"
    SKIPPED = "skipped"


@attrs.frozen
class Check:
    """One line of the doctor's.

    Attributes:
        check: What was looked at.
        result: How it ended.
        found: What there is.
        run: What to run to mend it, None where nothing is wrong.
    """

    check: str
    result: Result
    found: str
    run: str | None = None
