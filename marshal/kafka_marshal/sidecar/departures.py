"""Hands partitions off to other hosts when a group's last client leaves for good.

No other client of the sidecar can take them. So the sidecar drains its own member of
the group by a directive (PROTOCOL 9.7), as at its own end, and members that warm up get
the partitions warm. The client continues meanwhile. What no host has taken by a
deadline is recalled and released. This module uses nothing of ``group``.
"""

from collections.abc import Callable

from kafka_marshal.engine import Context, Session
from kafka_marshal.sidecar.clients import Client
from kafka_marshal.sidecar.lease_table import LeaseTable


class Departure:
    """Drains a group at a sidecar for its last client. Used under the engine's lock.

    The drain ends when that client is gone, or another client here can take over.
    """

    __slots__ = (
        *("_client", "_context", "_handoff_ms", "_is_handed_off", "_session"),
        *("_table", "_until_ms"),
    )

    def __init__(
        self,
        context: Context,
        session: Session,
        *,
        table: LeaseTable,
        handoff_ms: int,
        is_handed_off: Callable[[], bool],
    ) -> None:
        """Begin while no client leaves.

        Args:
            context: State shared by all parts of the engine.
            session: Claims of the sidecar in the group.
            table: Clients and leases.
            handoff_ms: How long the client continues to work; 0: not at all.
            is_handed_off: Returns whether nothing is left that another host could take.
        """
        self._context = context
        self._session = session
        self._table = table
        self._handoff_ms = handoff_ms
        self._is_handed_off = is_handed_off
        self._client: Client | None = None
        self._until_ms = 0

    def holds_back(self, client: Client) -> bool:
        """Return whether a client that leaves, and can wait, continues to work.

        Begins the drain if the client is the last one and the log has directives.
        """
        if client.is_leaving or not self._handoff_ms or self._is_handed_off():
            return False
        if self._client is client or not self._is_alone(client):
            return self._client is client
        # The drain ends by itself if this process dies.
        if not self._session.self_drain.begin(2 * self._handoff_ms):
            return False
        self._client = client
        self._until_ms = self._context.now_ms + self._handoff_ms
        return True

    def due(self, now_ms: int) -> Client | None:
        """Return the client once it must stop; end a drain that is over."""
        client = self._client
        if client is None:
            return None
        is_here = self._table.clients.get(client.client_id) is client
        if not (is_here and self._is_alone(client)):
            self.cancel(client)
        elif now_ms < self._until_ms and not self._is_handed_off():
            return None
        return client if is_here and not client.is_leaving else None

    def cancel(self, client: Client) -> None:
        """End the drain, because the client stays after all, or has gone."""
        if self._client is client:
            self._client = None
            self._session.self_drain.end()

    def pass_on(self) -> None:
        """Leave the drain to the end of the sidecar."""
        self._client = None

    def _is_alone(self, client: Client) -> bool:
        others = self._table.clients.values()
        return not any(
            other is not client and other.specs and not other.is_leaving
            for other in others
        )
