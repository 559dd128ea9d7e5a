"""Answers of a sidecar to read-only requests: the log's world, and its clients."""

from typing import Any

from kafka_marshal.remote.api import Message


class AsOf(Message, frozen=True, kw_only=True):
    """The moment that an answer is of.

    Attributes:
        time_ms: Wall-clock time of the answer, epoch ms.
        offsets: Next offset of each coordinating partition that was folded.
    """

    time_ms: int
    offsets: dict[str, int]


class WorldNow(Message, frozen=True, kw_only=True):
    """``GET /v1/world``: the world document of all commands (PROTOCOL 3.8)."""

    as_of: AsOf
    schema: int
    partitions: dict[str, dict[str, Any]]


class GroupLine(Message, frozen=True, kw_only=True):
    """One group of ``GET /v1/groups``.

    Attributes:
        group: Its name.
        keys: Number of partitions that it ever claimed and that are not forgotten.
        owned: Number of them that have an owner.
        owners: Owners of any of them, by the log.
        is_paused: Whether it is paused.
    """

    group: str
    keys: int
    owned: int
    owners: tuple[str, ...]
    is_paused: bool


class GroupsNow(Message, frozen=True, kw_only=True):
    """``GET /v1/groups``: every group of the log, by name."""

    as_of: AsOf
    groups: tuple[GroupLine, ...]


class GroupNow(Message, frozen=True, kw_only=True):
    """``GET /v1/groups/{group}``: claims and pauses as in the world document."""

    as_of: AsOf
    group: str
    claims: tuple[dict[str, Any], ...]
    pauses: tuple[dict[str, Any], ...]


class LocalClient(Message, frozen=True, kw_only=True):
    """One client of this sidecar.

    Attributes:
        group: Its group.
        client: Its name in the group, known to this sidecar only.
        pid: Its process, None over TCP.
        state: The sidecar's view of it in one word: ``ready``, ``silent``...
        beat_age_ms: Time since its last beat, None before the first.
        subscriptions: Names of its subscriptions.
        assigned: Partitions that it holds, as ``topic-partition``.
        lease_until_ms: Latest deadline that the sidecar sent to it, None for none.
    """

    group: str
    client: str
    pid: int | None
    state: str
    beat_age_ms: int | None
    subscriptions: tuple[str, ...]
    assigned: tuple[str, ...]
    lease_until_ms: int | None


class ClientsNow(Message, frozen=True, kw_only=True):
    """``GET /v1/clients``: the clients registered with this sidecar."""

    as_of: AsOf
    clients: tuple[LocalClient, ...]


class OwnersNow(Message, frozen=True, kw_only=True):
    """``GET /v1/groups/{group}/owners/{topic}``: the owner of each partition."""

    as_of: AsOf
    owners: dict[int, str | None]


class FenceNow(Message, frozen=True, kw_only=True):
    """``GET .../owners/{topic}/{partition}``: the newest claim, for sinks to compare.

    Attributes:
        as_of: The moment that the answer is of.
        token: Token of the newest claim, None if the key was never claimed.
        epoch: Epoch of the newest claim.
        client_id: Owner, None if the claim was released.
        incarnation: Its process start.
        position: All offsets below are processed, by the log.
    """

    as_of: AsOf
    token: str | None
    epoch: int | None
    client_id: str | None
    incarnation: str | None
    position: int | None


class Verdict(Message, frozen=True, kw_only=True):
    """``GET /livez``, ``/readyz``, ``/startupz``: 200 if ``ok``, else 503.

    Attributes:
        ok: Whether the check passed.
        state: State of the sidecar, such as ``RUNNING``.
        reasons: Why the check failed, a sentence each; if it passed, the details.
    """

    ok: bool
    state: str
    reasons: tuple[str, ...]
