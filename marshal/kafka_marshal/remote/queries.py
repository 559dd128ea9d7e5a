"""Queries of a client to its sidecar: claims, owners, the world document."""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from kafka_marshal.engine.replica import Glance, LastClaim
from kafka_marshal.errors import MarshalError
from kafka_marshal.protocol.types import Key, Token, TopicPartition
from kafka_marshal.remote import api, paths
from kafka_marshal.remote.answers import ClientsNow, GroupNow, OwnersNow, WorldNow
from kafka_marshal.remote.transport import Connection

ASK_MS_MAX = 5_000

T = TypeVar("T", bound=msgspec.Struct)


class SidecarQueries:
    """Sends the queries of one client.

    Args:
        connection: To the sidecar.
        info: Returns the latest ``GET /v1/info`` of the sidecar.
    """

    def __init__(self, connection: Connection, info: Callable[[], api.Info]) -> None:
        self._connection = connection
        self._info = info

    def glance(self, key: Key) -> Glance | None:
        """Return the state of a key by the log, None if it is not known."""
        try:
            found = self._group(ASK_MS_MAX)
        except MarshalError:
            return None
        for claim in found.claims:
            if (claim["topic"], claim["partition"]) == (key.topic, key.partition):
                owner = claim["owner"] or {}
                holder = owner.get("client_id")
                if holder == self._info().client_id:
                    holder = self._neighbour(key) or holder
                return Glance(
                    holder=holder,
                    freshness=claim["freshness"],
                    age_ms=claim["age_ms"],
                    position=claim["position"],
                )
        return None

    def last_claims(self, timeout_ms: int) -> dict[TopicPartition, LastClaim]:
        """Return the newest claim of each key of the group, as of this call or later.

        The log names the sidecar as the owner of the claims of all its clients. A
        claim that is subleased to no other client may belong to this one, even before
        its ``assigned`` event arrives.
        """
        rows = [
            (
                TopicPartition(claim["topic"], claim["partition"]),
                claim["owner"] and claim["owner"]["client_id"],
                claim["epoch"],
                claim.get("token"),
            )
            for claim in self._group(timeout_ms).claims
        ]
        sidecar = self._info().client_id
        is_owner = any(owner == sidecar for _, owner, *_ in rows)
        subleased = self._subleased_to_others() if is_owner else set()
        return {
            place: LastClaim(
                owner,
                epoch,
                may_be_ours=owner == sidecar and str(place) not in subleased,
                token=None if token is None else Token.parse(token),
            )
            for place, owner, epoch, token in rows
        }

    def world(self, timeout_ms: int) -> dict[str, Any]:
        """Return the world as plain data, as of this call or later."""
        found = self._query(paths.WORLD, WorldNow, timeout_ms=timeout_ms)
        return {"schema": found.schema, "partitions": found.partitions}

    def owners(self, topic: str, timeout_ms: int) -> dict[TopicPartition, str | None]:
        """Return the owner of each partition of a topic that was ever claimed."""
        path = self._connection.path(paths.OWNERS, {"topic": topic})
        found = self._query(path, OwnersNow, timeout_ms=timeout_ms)
        return {TopicPartition(topic, n): who for n, who in found.owners.items()}

    def _group(self, timeout_ms: int) -> GroupNow:
        path = self._connection.path(paths.GROUP)
        return self._query(path, GroupNow, timeout_ms=timeout_ms)

    def _query(self, path: str, answer: type[T], *, timeout_ms: int) -> T:
        """Send a query that the sidecar answers from a fold not older than the call."""
        wait_ms = min(timeout_ms, api.WAIT_MS_MAX)
        return self._connection.ask(
            "GET",
            path,
            answer=answer,
            timeout_ms=wait_ms,
            query={"timeout_ms": str(wait_ms)},
        )

    def _neighbour(self, key: Key) -> str | None:
        """Return the client of the same sidecar that holds a key, None if not known."""
        try:
            found = self._connection.ask("GET", paths.CLIENTS, answer=ClientsNow)
        except MarshalError:
            return None
        place = str(key.topic_partition)
        for each in found.clients:
            if each.group == key.group_id and place in each.assigned:
                return each.client
        return None

    def _subleased_to_others(self) -> set[str]:
        """Return the partitions of other clients of the group at the same sidecar."""
        found = self._connection.ask("GET", paths.CLIENTS, answer=ClientsNow)
        own = self._connection
        return {
            place
            for each in found.clients
            if each.group == own.group_id and each.client != own.client_id
            for place in each.assigned
        }
