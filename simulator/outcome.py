"""Outcomes of seeded runs: a report, or a failure with the way to repeat it."""

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from simulator.checkers import HandOuts, LogWatcher, Violation

TRANSCRIPT_TAIL = 60
UNEXPECTED = "error"
"""The invariant of a run that raised an error other than a ``Violation``."""


class RunFailed(AssertionError):
    """A run broke an invariant; the message shows how to repeat it.

    Attributes:
        seed: Repeats the run.
        invariant: The broken invariant, such as ``S4`` or ``liveness``.
        judge: The judge that found it; see ``Violation``.
        finding: What happened, in a line.
        transcript: Everything that happened, one line each.
    """

    def __init__(
        self, seed: int, violation: Violation, *, repeat: str, transcript: Sequence[str]
    ) -> None:
        tail = "\n".join(transcript[-TRANSCRIPT_TAIL:])
        super().__init__(
            f"seed {seed}: {violation}\n{repeat}\nthe last steps were:\n{tail}"
        )
        self.seed = seed
        self.invariant = violation.invariant
        self.judge = violation.judge
        self.finding = str(violation)
        self.transcript = transcript


def violation_of(error: Exception) -> Violation:
    """Return what a run broke; for an unexpected error, its last line and place."""
    if isinstance(error, Violation):
        return error
    line = traceback.format_exception_only(error)[-1].strip()
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno}"
    return Violation(UNEXPECTED, f"{line} ({where}, in {frame.name})")


@attrs.frozen(kw_only=True)
class Report:
    """The report of a run in which all invariants held.

    Attributes:
        seed: Its seed.
        faults: The kinds of faults that existed.
        virtual_ms: Duration in virtual time.
        handed: Number of records handed out.
        duplicates: Number of these that had been handed out before.
        claims: Number of claims and resumes that were accepted.
        seen: How often each situation was reached, by name.
        transcript: Everything that happened, one line each.
    """

    seed: int
    faults: tuple[str, ...]
    virtual_ms: int
    handed: int
    duplicates: int
    claims: int
    seen: Mapping[str, int]
    transcript: tuple[str, ...]

    @classmethod
    def of(
        cls,
        seed: int,
        faults: Sequence[str],
        *,
        virtual_ms: int,
        hand_outs: HandOuts,
        watcher: LogWatcher,
        seen: Mapping[str, int],
        transcript: Sequence[str],
    ) -> "Report":
        """Sum up a run from its judges."""
        return cls(
            seed=seed,
            faults=tuple(faults),
            virtual_ms=virtual_ms,
            handed=hand_outs.count,
            duplicates=hand_outs.duplicate_count,
            claims=watcher.claims,
            seen=dict(sorted(seen.items())),
            transcript=tuple(transcript),
        )
