"""Interface of a grant client, with its requests and verdicts."""

import time
from typing import Protocol

import attrs

from kafka_marshal.clock import SystemClock
from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import CoordinationError, DeadlineExceeded
from kafka_marshal.ports import Clock
from kafka_marshal.protocol.granting import (
    GrantRequest,
    GrantVerdict,
    Refusal,
    refusal_of,
)
from kafka_marshal.protocol.types import Key, OffsetRange, Owner, Token

PAUSED_MS = 500
"""How long to wait, while the group is paused, before the next request."""


@attrs.frozen(kw_only=True)
class ClaimRef:
    """A claim, as described to processes that work for its owner; can be pickled.

    Attributes:
        group_id: Group.
        client_id: Owner in the log.
        incarnation: Incarnation of the owner's process.
        topic: Data topic.
        partition: Data partition.
        epoch: Epoch of the claim.
        token: Its fencing token, dotted.
        secret: Sent to a sidecar with each request, in hex.
    """

    group_id: str
    client_id: str
    incarnation: bytes
    topic: str
    partition: int
    epoch: int
    token: str
    secret: str = attrs.field(repr=False)

    @property
    def key(self) -> Key:
        """The key that is claimed."""
        return Key(self.group_id, self.topic, self.partition)

    @property
    def owner(self) -> Owner:
        """The claimant."""
        return Owner(self.client_id, self.incarnation)

    def request(self, wanted: OffsetRange, *, grantee: bytes) -> GrantRequest:
        """Return a request under this claim for some offsets."""
        return GrantRequest(
            key=self.key,
            owner=self.owner,
            epoch=self.epoch,
            grantee=grantee,
            first=wanted.first,
            last=wanted.last,
            token=Token.parse(self.token),
        )


@attrs.frozen
class ClaimState:
    """The newest claim of a key.

    Attributes:
        token: Its fencing token, dotted.
        epoch: Its epoch.
        owner: Its owner; None if it was released.
    """

    token: str
    epoch: int
    owner: Owner | None


_NOT_GRANTED = frozenset({Refusal.TAKEN, Refusal.OVER})
# The key moves, or has moved, to another coordinating partition: nothing more is
# granted under this claim, and the owner claims the key again there (PROTOCOL 10.3).
_MOVED = frozenset({"moving", "retired", "wrong_partition"})


class GrantClient(Protocol):
    """Requests grants for the tasks of one process. Thread-safe; one call at a time.

    Attributes:
        clock: Local time, for the deadlines of requests.
    """

    clock: Clock = SystemClock()

    def acquire(
        self, ref: ClaimRef, wanted: OffsetRange, *, timeout_ms: int
    ) -> OffsetRange | None:
        """Request offsets once, with a new grantee.

        Args:
            ref: The claim.
            wanted: Offsets wanted.
            timeout_ms: How long to wait for a verdict that grants or denies them.

        Returns:
            The range that only the caller may ever process; None if it was granted
            to another grantee, or the claim has ended. The range may begin below the
            wanted one, if the offsets before it were not granted, or above; it ends
            with the wanted one, or below if the log grants less at a time.

        Raises:
            DeadlineExceeded: No verdict in time, or the group was paused all the
                time. Whether the range was granted is unknown, so the caller must not
                process it. If it was not, a later call may be granted it.
            MarshalError: The log or the sidecar cannot be used. As above, the caller
                must not process the range.
        """
        if not 0 <= wanted.first < wanted.end:
            return None
        deadline = Deadline(timeout_ms, self.clock.now_ms)
        left_ms = timeout_ms
        while True:
            verdict = self.request(ref, wanted, timeout_ms=left_ms)
            if verdict.granted is not None:
                return verdict.granted
            refusal = refusal_of(verdict.reason, last=wanted.last, head=verdict.head)
            if refusal in _NOT_GRANTED or verdict.reason in _MOVED:
                return None
            if refusal is Refusal.UNEXPECTED:
                raise CoordinationError(
                    f"the log judged the request for offsets {wanted.first} to "
                    f"{wanted.last} of {ref.topic}-{ref.partition} as "
                    f"{verdict.reason!r}, so the Config of the coordination topic has "
                    "changed; check it with: marshal topic info, and run the task again"
                )
            if verdict.reason == "paused":
                self._rest(min(PAUSED_MS, deadline.left_ms))
            left_ms = deadline.left_ms
            if not left_ms:
                raise DeadlineExceeded(
                    f"offsets {wanted.first} to {wanted.last} of {ref.topic}-"
                    f"{ref.partition} were not granted within {timeout_ms} ms "
                    f"({verdict.reason}), and may be granted later; if group "
                    f"{ref.group_id!r} is paused, run: marshal groups resume"
                )

    def request(
        self, ref: ClaimRef, wanted: OffsetRange, *, timeout_ms: int
    ) -> GrantVerdict:
        """Make one request, and return the verdict.

        The Config's ``span`` may shorten the request: then less is granted than
        wanted, and ``nothing_left`` does not apply to offsets from the verdict's head.

        Raises:
            DeadlineExceeded: As ``acquire``.
            MarshalError: As ``acquire``.
        """
        ...

    def _rest(self, rest_ms: int) -> None:
        """Wait before the next request."""
        time.sleep(rest_ms / 1000)

    def is_current(self, ref: ClaimRef, *, timeout_ms: int) -> bool:
        """Return whether the claim is current, by a fold not older than the call.

        The claim may end right after: output that must not be written twice needs a
        sink that compares tokens, or a grant.

        Raises:
            DeadlineExceeded: The log was not read to its end in time.
            MarshalError: The log or the sidecar cannot be used.
        """
        found = self.newest(ref.key, timeout_ms=timeout_ms)
        # In another coordinating partition an equal epoch is another claim.
        return (
            found is not None
            and found.owner == ref.owner
            and (found.epoch, found.token) == (ref.epoch, ref.token)
        )

    def newest(self, key: Key, *, timeout_ms: int) -> ClaimState | None:
        """Return the newest claim of a key, by a fold not older than the call.

        None if the key was never claimed. Raises as ``is_current``.
        """
        ...

    def close(self) -> None:
        """Close every connection. Idempotent."""
        ...
