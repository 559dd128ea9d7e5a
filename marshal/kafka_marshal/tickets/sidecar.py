"""Tickets through the sidecar of this host, which reads the log anyway."""

import os
import time

from kafka_marshal.errors import CoordinationError
from kafka_marshal.protocol.state import ACCEPTED
from kafka_marshal.protocol.types import Key, Owner
from kafka_marshal.remote import paths
from kafka_marshal.remote.answers import FenceNow
from kafka_marshal.remote.api import GrantRequest, GrantResponse
from kafka_marshal.remote.transport import Connection

from .office import ClaimRef, Standing, TicketOffice, Verdict

GRANTEE_BYTES = 16
# A sidecar that is asked for tickets only is told no name.
NAMELESS = "tickets"


class SidecarOffice(TicketOffice):
    """Asks the sidecar; where it was not reached, asks elsewhere instead.

    Another way means another grantee, so it is safe even where the sidecar did
    append the first request. It is taken only where it cannot have, because what
    was granted to the first grantee would be lost.
    """

    def __init__(self, connection: Connection, otherwise: TicketOffice) -> None:
        """Ask over a connection, or else another office."""
        self._connection = connection
        self._otherwise = otherwise

    def ask(
        self, ref: ClaimRef, wanted: tuple[int, int], *, timeout_ms: int
    ) -> Verdict:
        """Ask for offsets; see ``TicketOffice``."""
        first, last = wanted
        # PROTOCOL 6.2: a grantee is one attempt, and drawn anew for each.
        said = GrantRequest(
            client_id=ref.client_id,
            incarnation=ref.incarnation.hex(),
            topic=ref.topic,
            partition=ref.partition,
            epoch=ref.epoch,
            grantee=os.urandom(GRANTEE_BYTES).hex(),
            secret=ref.secret,
            first=first,
            last=last,
            timeout_ms=timeout_ms,
            request=1,
        )
        deadline = time.monotonic() + timeout_ms / 1000
        try:
            found = self._granted(ref, said, timeout_ms=timeout_ms)
        except CoordinationError as error:
            if is_unheard(error):
                return self._otherwise.ask(ref, wanted, timeout_ms=timeout_ms)
            left_ms = int((deadline - time.monotonic()) * 1000)
            if not error.retriable or left_ms <= 0:
                raise
            # Under its number it is the same request: what was granted and not heard
            # is told now. Asked anew it would be lost, so nobody else is asked.
            found = self._granted(ref, said, timeout_ms=left_ms)
        granted = None
        if found.outcome == ACCEPTED and None not in (found.first, found.last):
            assert found.first is not None
            assert found.last is not None
            granted = (found.first, found.last)
        return Verdict(granted, found.reason, found.offset, found.head)

    def _granted(
        self, ref: ClaimRef, said: GrantRequest, *, timeout_ms: int
    ) -> GrantResponse:
        return self._connection.ask(
            "POST",
            paths.GRANTS.format(group=ref.group_id),
            body=said,
            answer=GrantResponse,
            timeout_ms=timeout_ms,
        )

    def newest(self, key: Key, *, timeout_ms: int) -> Standing | None:
        """Return the newest claim of a key; see ``TicketOffice``."""
        path = paths.FENCE.format(
            group=key.group_id, topic=key.topic, partition=key.partition
        )
        try:
            found = self._connection.ask(
                "GET",
                path,
                answer=FenceNow,
                timeout_ms=timeout_ms,
                query={"timeout_ms": str(timeout_ms)},
            )
        except CoordinationError as error:
            if not error.retriable:
                raise
            # Nothing is written by looking.
            return self._otherwise.newest(key, timeout_ms=timeout_ms)
        if found.token is None or found.epoch is None:
            return None
        owner = None
        if found.client_id is not None and found.incarnation is not None:
            owner = Owner(found.client_id, bytes.fromhex(found.incarnation))
        return Standing(found.token, found.epoch, owner)

    def close(self) -> None:
        """Let go of the connection."""
        self._connection.close()
        self._otherwise.close()


def is_unheard(error: CoordinationError) -> bool:
    """Return whether a request that failed surely was not taken.

    Either nobody listened, or who did said that it is not ready.
    """
    import httpx

    cause = error.__cause__
    if isinstance(cause, httpx.HTTPError):
        return isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout)
    return error.retriable and cause is None
