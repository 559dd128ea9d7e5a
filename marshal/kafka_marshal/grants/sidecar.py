"""Requests grants from the sidecar of this host, which reads the log anyway.

Independent of ``log``: the two share only the interface in ``client``.
"""

from kafka_marshal.clock import SystemEntropy
from kafka_marshal.deadline import Deadline
from kafka_marshal.engine.proxy_grants import draw_grantee
from kafka_marshal.errors import CoordinationError
from kafka_marshal.protocol.granting import GrantVerdict
from kafka_marshal.protocol.types import Key, OffsetRange, Owner
from kafka_marshal.remote import paths
from kafka_marshal.remote.answers import FenceNow
from kafka_marshal.remote.api import GrantRequest, GrantResponse
from kafka_marshal.remote.grants import decode_verdict, encode_request
from kafka_marshal.remote.transport import Connection

from .client import ClaimRef, ClaimState, GrantClient

# Name of a connection that only requests grants, and registers no client.
NAMELESS = "grants"


class SidecarGrantClient(GrantClient):
    """Requests grants from the sidecar, or by a fallback if that is not reached.

    The fallback draws another grantee, so it is safe even if the sidecar has appended
    the first request. It is used only if the sidecar cannot have appended it, because
    a grant to the first grantee would be lost.
    """

    def __init__(self, connection: Connection, fallback: GrantClient) -> None:
        self._connection = connection
        self._fallback = fallback
        self._entropy = SystemEntropy()

    def request(
        self, ref: ClaimRef, wanted: OffsetRange, *, timeout_ms: int
    ) -> GrantVerdict:
        """Make one request; see ``GrantClient``."""
        message = encode_request(
            # PROTOCOL 6.2: a grantee is drawn for each attempt.
            ref.request(wanted, grantee=draw_grantee(self._entropy)),
            secret=bytes.fromhex(ref.secret),
            number=1,
            timeout_ms=timeout_ms,
        )
        deadline = Deadline(timeout_ms)
        try:
            return self._send(ref, message, timeout_ms=timeout_ms)
        except CoordinationError as error:
            if was_not_received(error):
                return self._fallback.request(ref, wanted, timeout_ms=timeout_ms)
            left_ms = deadline.left_ms
            if not error.retriable or not left_ms:
                raise
            # With the same number the sidecar returns the original grant. A request
            # with another grantee would lose it, so do not use the fallback.
            return self._send(ref, message, timeout_ms=left_ms)

    def _send(
        self, ref: ClaimRef, message: GrantRequest, *, timeout_ms: int
    ) -> GrantVerdict:
        response = self._connection.ask(
            "POST",
            paths.GRANTS.format(group=ref.group_id),
            body=message,
            answer=GrantResponse,
            timeout_ms=timeout_ms,
        )
        return decode_verdict(response)

    def newest(self, key: Key, *, timeout_ms: int) -> ClaimState | None:
        """Return the newest claim of a key; see ``GrantClient``."""
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
            # A query appends nothing, so the fallback is always safe.
            return self._fallback.newest(key, timeout_ms=timeout_ms)
        if found.token is None or found.epoch is None:
            return None
        owner = None
        if found.client_id is not None and found.incarnation is not None:
            owner = Owner(found.client_id, bytes.fromhex(found.incarnation))
        return ClaimState(found.token, found.epoch, owner)

    def close(self) -> None:
        """Close the connection and the fallback."""
        self._connection.close()
        self._fallback.close()


def was_not_received(error: CoordinationError) -> bool:
    """Return whether the sidecar certainly did not act on a request that failed.

    Either no process listened, or the sidecar answered that it is not ready.
    """
    from kafka_marshal.remote.exchanges import ExchangeError

    cause = error.__cause__
    if isinstance(cause, ExchangeError):
        return not cause.was_sent
    return error.retriable and cause is None
