"""Appends of the fake in flight, and the outcomes that their writers see."""

from typing import Protocol

import attrs

from kafka_marshal.errors import CoordinationError, MarshalError
from kafka_marshal.ports import Append, Clock
from kafka_marshal.testing.fakestore import AppendFate


class World(Protocol):
    """What an append needs of its cluster."""

    clock: Clock

    def settle(self) -> None:
        """Apply all changes that are due by now."""
        ...


@attrs.define(order=True, kw_only=True)
class Pending:
    """An append in flight."""

    lands_ms: int
    number: int
    topic: str = attrs.field(order=False)
    partition: int = attrs.field(order=False)
    value: bytes = attrs.field(order=False)
    fate: AppendFate = attrs.field(order=False)
    append: "FakeAppend" = attrs.field(order=False)
    sent_epoch: int = attrs.field(order=False)


class FakeAppend(Append):
    """An append of the fake: its outcome depends on the clock.

    Attributes:
        fails_ms: When it is reported as failed, unless it is committed before.
        is_sure_to_fail: Whether it is reported as failed even if it lands.
        landed: Its offset, and when it was committed.
        refusal: Why it will never land.
    """

    def __init__(self, cluster: World, *, fails_ms: int) -> None:
        self._cluster = cluster
        self.fails_ms = fails_ms
        self.is_sure_to_fail = False
        self.landed: tuple[int, int] | None = None
        self.refusal: MarshalError | None = None

    def _is_acknowledged(self) -> bool:
        if self.landed is None or self.is_sure_to_fail:
            return False
        return self.landed[1] <= min(self.fails_ms, self._cluster.clock.now_ms())

    def _is_failed(self) -> bool:
        return (
            not self._is_acknowledged()
            and self.fails_ms <= self._cluster.clock.now_ms()
        )

    def is_done(self) -> bool:
        """Return whether its writer knows the outcome."""
        self._cluster.settle()
        return self.refusal is not None or self._is_acknowledged() or self._is_failed()

    def offset(self) -> int | None:
        """Return its offset, once it is acknowledged."""
        self._cluster.settle()
        is_told = self.refusal is None and self._is_acknowledged()
        return self.landed[0] if is_told and self.landed is not None else None

    def error(self) -> MarshalError | None:
        """Return why it is reported as failed, None if it is not."""
        self._cluster.settle()
        if self.refusal is not None:
            return self.refusal
        if self._is_failed():
            return CoordinationError(
                "No acknowledgement came in time; the record may land all the same."
            )
        return None
