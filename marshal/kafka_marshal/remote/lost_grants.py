"""Finds offsets granted at most once whose answers were lost (PROTOCOL 6.2).

A request without an answer may have been granted, to this process: then no other one
processes these offsets. Later answers show it: the next grant begins beyond them, a
refusal has a first offset that is not granted, or the next claim begins there.
"""

import attrs

from kafka_marshal.protocol.granting import GrantVerdict, Refusal, refusal_of
from kafka_marshal.protocol.types import OffsetRange


@attrs.frozen
class _Gap:
    """Offsets that the log has granted and no answer so far.

    Attributes:
        offsets: The offsets.
        after: Number of the last request that may have been granted them.
    """

    offsets: OffsetRange
    after: int


@attrs.define(eq=False, kw_only=True)
class GrantAccount:
    """The grants under one claim, as far as this process knows. Under the lock.

    Only this process requests offsets under the claim. So everything that the log
    grants under it was granted to this process.

    Attributes:
        epoch: The claim.
        set_by: The operation that set the position last before it, None if unknown.
        end: Everything below was granted before the claim, to requests with an answer,
            or is in ``gaps`` or reported.
        asked_end: End of the requests that were given up without an answer, and that
            no later grant covers.
        gaps: Offsets that only requests in flight can still account for.
        next_position: Where the next claim of the key began, if nobody else had the
            key in between; None if that is not known.
    """

    epoch: int
    set_by: str | None
    end: int
    asked_end: int = 0
    gaps: list[_Gap] = attrs.field(factory=list)
    next_position: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether a request was given up that may have been granted."""
        return self.asked_end > self.end

    def on_verdict(self, verdict: GrantVerdict, *, after: int) -> None:
        """Record an answer.

        Args:
            verdict: The answer.
            after: Number of the last request in flight, or of the one that is answered.
        """
        granted = verdict.granted
        if granted is None and refusal_of(verdict.reason) not in {
            Refusal.TAKEN,
            Refusal.LATER,
        }:
            return  # the claim is over: others may have been granted what follows
        limit = verdict.head if granted is None else granted.first
        if limit is not None and limit > self.end:
            self.gaps.append(_Gap(OffsetRange(self.end, limit), after))
            self.end = limit
        if granted is not None:
            self.gaps = [
                _Gap(rest, gap.after)
                for gap in self.gaps
                for rest in _without(gap.offsets, granted)
            ]
            self.end = max(self.end, granted.end)
            self.asked_end = 0

    def on_no_answer(self, asked: OffsetRange) -> None:
        """Record that a request was given up."""
        self.asked_end = max(self.asked_end, asked.end)

    def on_next_claim(
        self, position: int, *, follows: int | None, set_by: str | None
    ) -> None:
        """Record the next claim of the key in this process.

        Args:
            position: Where it begins.
            follows: Claim before it, by the log.
            set_by: The operation that set the position last before it.
        """
        is_same = set_by is not None and set_by == self.set_by
        if follows == self.epoch and is_same:
            self.next_position = position

    def take_lost(self, *, through: int, is_last: bool) -> list[OffsetRange]:
        """Return offsets that are lost, once.

        Args:
            through: Requests up to this number are answered or given up.
            is_last: Whether no request is in flight.
        """
        lost = [gap.offsets for gap in self.gaps if gap.after <= through]
        self.gaps = [gap for gap in self.gaps if gap.after > through]
        position = self.next_position
        if is_last and position is not None:
            end = min(position, self.asked_end)
            if end > self.end:
                lost.append(OffsetRange(self.end, end))
            self.asked_end = 0
        return lost


def _without(offsets: OffsetRange, granted: OffsetRange) -> list[OffsetRange]:
    """Return what a grant leaves of a range."""
    parts = [
        OffsetRange(offsets.first, min(offsets.end, granted.first)),
        OffsetRange(max(offsets.first, granted.end), offsets.end),
    ]
    return [each for each in parts if each.end > each.first]
