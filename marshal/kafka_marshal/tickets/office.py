"""What is asked of an office, and what it answers."""

from typing import Protocol

import attrs

from kafka_marshal.protocol.types import Key, Owner


@attrs.frozen
class ClaimRef:
    """A claim as whoever works for its owner has to know it; can be pickled.

    Attributes:
        group_id: Group.
        client_id: Owner in the log.
        incarnation: Its process start.
        topic: Data topic.
        partition: Data partition.
        epoch: Epoch of the claim.
        token: Its fencing token, dotted.
    """

    group_id: str
    client_id: str
    incarnation: bytes
    topic: str
    partition: int
    epoch: int
    token: str

    @property
    def key(self) -> Key:
        """The key that is claimed."""
        return Key(self.group_id, self.topic, self.partition)

    @property
    def owner(self) -> Owner:
        """The claimant."""
        return Owner(self.client_id, self.incarnation)


@attrs.frozen
class Verdict:
    """What the log says to one request.

    Attributes:
        granted: First and last offset that are this grantee's; None = nothing.
        reason: Why not, such as ``nothing_left`` or ``not_owner``.
        offset: Log offset of the request; None where none was needed, because
            the log had ended the claim before.
    """

    granted: tuple[int, int] | None
    reason: str | None
    offset: int | None


@attrs.frozen
class Standing:
    """The newest claim of a key.

    Attributes:
        token: Its fencing token, dotted.
        epoch: Its epoch.
        owner: Who holds it; None where it was released.
    """

    token: str
    epoch: int
    owner: Owner | None


class TicketOffice(Protocol):
    """Where the tasks of one process ask. Thread-safe; one request at a time."""

    def spend(
        self, ref: ClaimRef, first: int, last: int, *, timeout_ms: int
    ) -> list[tuple[int, int]]:
        """Ask for offsets once, as a grantee that never asked before.

        Returns:
            The range that this call, and no other ever, may process, both ends
            inclusive; nothing where somebody else was granted it, or the claim is
            over. A range may begin below ``first``, where nobody was granted what
            lies before it, and above; it ends at ``last``, or below where the log
            grants less at a time.

        Raises:
            DeadlineExceeded: No verdict in time. Whether the range was granted is
                unknown: nothing of it may be processed, by this call's caller
                neither. Another call may be granted it if this one was not.
            MarshalError: The log or the sidecar cannot be used; the same holds.
        """
        if not 0 <= first <= last:
            return []
        verdict = self.ask(ref, (first, last), timeout_ms=timeout_ms)
        return [] if verdict.granted is None else [verdict.granted]

    def ask(
        self, ref: ClaimRef, wanted: tuple[int, int], *, timeout_ms: int
    ) -> Verdict:
        """Do what ``spend`` does, and tell why nothing was granted."""
        ...

    def is_current(self, ref: ClaimRef, *, timeout_ms: int) -> bool:
        """Return whether the claim stands, by a fold not older than the call.

        It may end the moment after: what must not be written twice needs a sink
        that compares tokens, or a grant.

        Raises:
            DeadlineExceeded: The log was not read to its end in time.
            MarshalError: The log or the sidecar cannot be used.
        """
        found = self.newest(ref.key, timeout_ms=timeout_ms)
        return (
            found is not None and found.owner == ref.owner and found.epoch == ref.epoch
        )

    def newest(self, key: Key, *, timeout_ms: int) -> Standing | None:
        """Return the newest claim of a key, by a fold not older than the call.

        None where there never was one. Raises as ``is_current``.
        """
        ...

    def close(self) -> None:
        """Let go of every connection. Idempotent."""
        ...
