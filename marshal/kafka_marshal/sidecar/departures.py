"""The last client of a sidecar in a group that leaves for good.

Nobody else here can take its partitions, so other hosts do: this member of the group is
drained by a directive (PROTOCOL 9.7), as for the end of the sidecar, and hands them off
warm where they warm up. The client continues meanwhile. What nobody took by a deadline
is recalled, and released. Apart from ``group``, of which it uses nothing.
"""

from collections.abc import Callable

from kafka_marshal.engine import Context, Session
from kafka_marshal.sidecar.clients import Client
from kafka_marshal.sidecar.lease_table import LeaseTable


class Departure:
    """Drains one group of a sidecar for its last client. Used under the engine's lock.

    It is over with the client, or when another client can take the partitions here.
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
        """Begin without a client that leaves.

        Args:
            context: State shared by all parts of the engine.
            session: Claims of the sidecar in the group.
            table: Clients and leases.
            handoff_ms: How long a client continues; 0: not at all.
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
        """Return whether a client that leaves, and can wait, continues meanwhile.

        Begins the drain, where the client is the last one and the log has directives.
        """
        if client.is_leaving or not self._handoff_ms or self._is_handed_off():
            return False
        if self._client is client or not self._is_alone(client):
            return self._client is client
        # It ends by itself if this process dies.
        if not self._session.self_drain.begin(2 * self._handoff_ms):
            return False
        self._client = client
        self._until_ms = self._context.now_ms + self._handoff_ms
        return True

    def due(self, now_ms: int) -> Client | None:
        """Return the client if it is to continue no longer; end what is over."""
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
        """End the drain: the client stays after all, or has gone."""
        if self._client is client:
            self._client = None
            self._session.self_drain.end()

    def pass_on(self) -> None:
        """Leave the drain to the end of the sidecar."""
        self._client = None

    def _is_alone(self, client: Client) -> bool:
        others = self._table.clients.values()
        return not any(
            other is not client and other.wants and not other.is_leaving
            for other in others
        )
