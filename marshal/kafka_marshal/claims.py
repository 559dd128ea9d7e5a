"""Claims without consumption, for applications that fetch by other means."""

import operator
import os
from collections.abc import Callable
from types import TracebackType
from typing import Self, SupportsIndex

from kafka_marshal.arguments import to_ms
from kafka_marshal.closing import unless_finalizing
from kafka_marshal.deadline import Deadline
from kafka_marshal.engine import Holding
from kafka_marshal.engine.holdings import ClaimSession
from kafka_marshal.engine.interfaces import ClaimContext, ClaimEngine
from kafka_marshal.engine.replica import Glance
from kafka_marshal.engine.waits import WAIT_SLICE_MS
from kafka_marshal.errors import (
    ClaimLost,
    ClaimRejected,
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
    InvalidTransition,
)
from kafka_marshal.protocol.claiming import Phase
from kafka_marshal.protocol.delivery import AtLeastOnce
from kafka_marshal.protocol.types import OFFSET_MAX, Key, Token, TopicPartition

RELEASE_MS_MAX = 10_000
SEEK_MS_MAX = 10_000
LOOKUP_MS_MAX = 10_000


class HeldClaim:
    """One data partition held by this process; ``Marshal.claim`` returns it.

    The engine renews it in the background. Call ``check`` before every piece of work,
    and pass ``token`` to the system that stores the result.
    """

    def __init__(
        self,
        engine: ClaimEngine,
        session: ClaimSession,
        *,
        holding: Holding,
        glance: Callable[[Key], Glance | None],
    ) -> None:
        self._engine = engine
        self._glance = glance
        self._session = session
        self._holding = holding
        self._clock = engine.context.ports.clock
        self._pid = os.getpid()

    def __repr__(self) -> str:
        """Return the partition, group, client and state; never waits."""
        claim = self._holding.claim
        ending = claim.ending
        state = claim.phase.value if ending is None else f"ended: {ending.reason}"
        return (
            f"<HeldClaim {self.partition} group_id={self._holding.key.group_id!r} "
            f"client_id={claim.claimant.owner.client_id!r} token={claim.token} {state}>"
        )

    @property
    def partition(self) -> TopicPartition:
        """The data partition."""
        return self._holding.key.topic_partition

    @property
    def token(self) -> Token:
        """The fencing token of the claim."""
        token = self._holding.claim.token
        if token is None:
            raise InvalidTransition(f"{self.partition} is not held yet")
        return token

    @property
    def position(self) -> int | None:
        """Next offset to process, as last set; None if it was never set."""
        return self._holding.position

    def is_valid(self) -> bool:
        """Return whether new work may begin now."""
        same = os.getpid() == self._pid
        return same and self._holding.may_work(self._clock.now_ms())

    def check(self) -> Token:
        """Return the token if new work may begin now.

        Raises:
            ClaimLost: The claim ended, or its lease is about to expire.
            InvalidTransition: Called in a forked child (PROTOCOL 1.7).
        """
        if os.getpid() != self._pid:
            raise InvalidTransition(
                "this claim belongs to the parent process; open a Marshal after the "
                "fork and claim there"
            )
        if not self.is_valid():
            ending = self._holding.claim.ending
            reason = "lease_expiring" if ending is None else ending.reason
            raise ClaimLost(
                f"the claim of {self.partition} is no longer held ({reason}); stop "
                "working on it and claim it again",
                winner=None if ending is None else ending.winner,
                at_offset=None if ending is None else ending.at_offset,
                reason=reason,
            )
        return self.token

    def set_position(self, position: int) -> None:
        """Set the next offset to process.

        The next heartbeat carries it. A lower position than before has no effect: to go
        back, use ``seek``.

        Raises:
            ConfigurationError: The position is not an offset.
            ClaimLost: See ``check``.
        """
        position = _offset(position)
        self.check()
        with self._engine.changed:
            progress = self._holding.progress
            if isinstance(progress, AtLeastOnce):
                progress.position = max(position, progress.position or 0)

    def seek(self, position: int, *, timeout_ms: int = SEEK_MS_MAX) -> None:
        """Set the next offset to process, also a lower one; wait for the log.

        Returns once any later owner would start there (PROTOCOL 6.6).

        Raises:
            ConfigurationError: The position is not an offset.
            ClaimLost: The claim ended; the position may not have changed. If the
                reason is ``seek_unconfirmed``, claim the partition again and seek.
            DeadlineExceeded: The log did not confirm the seek in time, but still may.
        """
        position = _offset(position)
        self.check()
        deadline = Deadline(to_ms("timeout_ms", timeout_ms), self._clock.now_ms)
        with self._engine.changed:
            self._session.seek(self._holding, position)
            while self._holding.rewind is not None and self.is_valid():
                self._wait(deadline, "confirmed at the new position")
        self.check()

    @unless_finalizing
    def release(self, *, timeout_ms: int = RELEASE_MS_MAX) -> None:
        """Release the partition at its position. Idempotent.

        Raises:
            DeadlineExceeded: The release was not read back in time, or the sidecar no
                longer runs. The partition may still be released.
        """
        if os.getpid() != self._pid:
            return
        deadline = Deadline(to_ms("timeout_ms", timeout_ms), self._clock.now_ms)
        with self._engine.changed:
            if self._holding.claim.phase is not Phase.ENDED:
                self._session.unwant(self._holding)
            while self._session.leaving_count and self._engine.failure is None:
                try:
                    self._session.require_reachable()
                except CoordinationError as error:
                    raise DeadlineExceeded(
                        f"the claim of {self.partition} was not released: {error}"
                    ) from error
                self._wait(deadline, "released")

    def wait_held(self, timeout_ms: int) -> None:
        """Wait until the claim is won.

        Raises:
            ClaimRejected: The claim was not won in time; the error names the owner and
                the reason.
        """
        deadline = Deadline(timeout_ms, self._clock.now_ms)
        with self._engine.changed:
            while self._holding.claim.phase is not Phase.HELD:
                failure = self._engine.failure or self._session.failure
                if failure is not None:
                    raise failure
                if self._holding.claim.phase is Phase.ENDED:
                    # The client was closed, so nothing contends for the key any more.
                    break
                try:
                    self._wait(deadline, "won")
                except DeadlineExceeded:
                    self._session.unwant(self._holding)
                    break
                except BaseException:
                    # For example Ctrl-C: the claim would be won later, for nobody.
                    self._session.unwant(self._holding)
                    raise
            else:
                return
        raise self._rejected()

    def _wait(self, deadline: Deadline, what: str) -> None:
        left_ms = deadline.require_ms(
            lambda: DeadlineExceeded(f"the claim of {self.partition} was not {what}")
        )
        self._engine.changed.wait(min(left_ms, WAIT_SLICE_MS) / 1000)

    def _rejected(self) -> ClaimRejected:
        key = self._holding.key
        refusal = self._holding.claim.refusal
        seen = self._glance(key) or Glance(None)
        reason = "held" if refusal is None else (refusal.reason or "held")
        if self._engine.context.is_key_paused(key):
            reason = "paused"
        if seen.holder is not None:
            why = f" ({reason}): it is held by {seen.holder!r} ({seen.freshness})"
        elif reason == "paused":
            why = " (paused): it has no owner, and claims of it are paused"
        elif refusal is not None:
            why = f" ({reason}): it has no owner; the claim was refused"
        else:
            why = ": it has no owner; the log did not confirm the claim"
        return ClaimRejected(
            f"{self.partition} was not claimed in time{why}; see: marshal claims who "
            f"{key.group_id} {key.topic} {key.partition}",
            holder=seen.holder,
            freshness=seen.freshness,
            at_offset=None if refusal is None else refusal.offset,
            reason=reason,
        )

    def __enter__(self) -> Self:
        """Return the claim itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the claim."""
        self.release()


def _offset(position: SupportsIndex) -> int:
    """Return a position as an ``int``, also an integer of a library such as NumPy."""
    try:
        offset = operator.index(position)
    except TypeError:
        offset = -1
    if not 0 <= offset <= OFFSET_MAX:
        raise ConfigurationError(
            f"position is {position!r}, which is not an offset; give a number from 0",
            setting="position",
        )
    return offset


def note_unknown_partition(context: ClaimContext, partition: TopicPartition) -> None:
    """Look a partition up in the background; report one that does not exist.

    Such a partition can be claimed before it is created. Nothing is reported if the
    cluster does not answer, or refuses the look-up.
    """

    def look() -> None:
        found = context.ports.data.describe([partition.topic], LOOKUP_MS_MAX)
        info = found.get(partition.topic)
        count = 0 if info is None else info.partition_count
        if partition.partition >= count:
            context.observe(
                "partition_unknown",
                {"partition": partition, "partition_count": count},
            )

    context.ports.background.submit(look)
