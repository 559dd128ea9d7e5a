"""What one record did: the fold's only output (PROTOCOL 3.8)."""

import msgspec

from kafka_marshal.protocol.records import Record
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key, LogEntry

ACCEPTED = "accepted"
REFUSED = "refused"
IGNORED = "ignored"
UNDECODABLE = "undecodable"
HALTED = "halted"
SKIPPED = "skipped"

Detail = dict[str, int]


class Transition(msgspec.Struct, frozen=True, gc=False):
    """What one record did to one key, group or to nothing.

    Attributes:
        offset: Offset of the entry.
        outcome: accepted, refused, ignored, undecodable, skipped or halted.
        effect: What an accepted record did, else None.
        reason: Why any other did nothing: the name of its counter, else None.
        key: The key it is about, None where there is none.
        epoch: The key's epoch after the record, None without a key.
        detail: Figures for the sender: time left or the granted range.
        record: The record itself, None where there is none.
    """

    offset: int
    outcome: str
    effect: str | None
    reason: str | None
    key: Key | None
    epoch: int | None
    detail: Detail | None
    record: Record | None


Transitions = tuple[Transition, ...]


class Step(msgspec.Struct, gc=False):
    """One record being folded: what the rationalizer's parts hand around.

    Its methods count the outcome and make the transition.
    """

    state: WorldState
    entry: LogEntry
    record: Record | None

    def accepted(
        self, effect: str, key: Key | None = None, *, detail: Detail | None = None
    ) -> Transition:
        """Return that the record took effect."""
        count(self.state, effect)
        return self._make(ACCEPTED, (effect, None), key=key, detail=detail)

    def refused(
        self, reason: str, key: Key | None = None, *, detail: Detail | None = None
    ) -> Transition:
        """Return that a request was turned down."""
        count(self.state, reason)
        return self._make(REFUSED, (None, reason), key=key, detail=detail)

    def ignored(self, reason: str, key: Key | None = None) -> Transition:
        """Return that the record means nothing here."""
        count(self.state, reason)
        return self._make(IGNORED, (None, reason), key=key)

    def undecodable(self) -> Transition:
        """Return that the value is no record."""
        count(self.state, UNDECODABLE)
        return self._make(UNDECODABLE, (None, UNDECODABLE))

    def skipped(self) -> Transition:
        """Return that the record is of a checkpoint, which changes nothing."""
        count(self.state, SKIPPED)
        return self._make(SKIPPED, (None, None))

    def halted(self) -> Transition:
        """Return that this reader can go no further."""
        count(self.state, HALTED)
        return self._make(HALTED, (None, HALTED))

    def _make(
        self,
        outcome: str,
        why: tuple[str | None, str | None],
        *,
        key: Key | None = None,
        detail: Detail | None = None,
    ) -> Transition:
        known = None if key is None else self.state.keys.get(key)
        epoch = None if known is None else known.epoch
        effect, reason = why
        offset = self.entry.offset
        return Transition(
            offset, outcome, effect, reason, key, epoch, detail, self.record
        )


def count(state: WorldState, name: str, *, times: int = 1) -> None:
    """Add to a counter of the state's soft part; nothing makes none."""
    if times:
        counters = state.soft.counters
        counters[name] = counters.get(name, 0) + times
