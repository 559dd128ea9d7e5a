"""Views of the world document, for whoever only looks, and of verdicts. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from kafka_marshal.engine.tickets import Verdict
from kafka_marshal.remote import api
from kafka_marshal.remote.looking import (
    AsOf,
    FenceNow,
    GroupLine,
    GroupNow,
    GroupsNow,
    OwnersNow,
    WorldNow,
)

World = Mapping[str, Any]
Item = dict[str, Any]


def as_of(world: World, wall_ms: int) -> AsOf:
    """Return which moment a world document is of."""
    offsets = {t: part["next_offset"] for t, part in world["partitions"].items()}
    return AsOf(time_ms=wall_ms, offsets=offsets)


def world_now(world: World, wall_ms: int) -> WorldNow:
    """Return the whole document."""
    return WorldNow(
        as_of=as_of(world, wall_ms),
        schema=world["schema"],
        partitions=world["partitions"],
    )


def groups_now(world: World, wall_ms: int) -> GroupsNow:
    """Return a line for each group that has keys or is paused."""
    keys: dict[str, list[Item]] = {}
    for claim in _claims(world):
        keys.setdefault(claim["group_id"], []).append(claim)
    paused = {pause["group_id"] for pause in _pauses(world)}
    lines = []
    for group in sorted(paused | set(keys)):
        owners = [name for name in map(_owner, keys.get(group, ())) if name is not None]
        lines.append(
            GroupLine(
                group=group,
                keys=len(keys.get(group, ())),
                owned=len(owners),
                owners=tuple(sorted(set(owners))),
                is_paused=group in paused,
            )
        )
    return GroupsNow(as_of=as_of(world, wall_ms), groups=tuple(lines))


def group_now(world: World, group: str, *, wall_ms: int) -> GroupNow:
    """Return the claims and pauses of one group; of one that never was, none."""
    claims = [claim for claim in _claims(world) if claim["group_id"] == group]
    return GroupNow(
        as_of=as_of(world, wall_ms),
        group=group,
        claims=tuple(sorted(claims, key=lambda c: (c["topic"], c["partition"]))),
        pauses=tuple(p for p in _pauses(world) if p["group_id"] == group),
    )


def owners_now(world: World, group: str, *, topic: str, wall_ms: int) -> OwnersNow:
    """Return who owns each partition of a topic that was ever claimed."""
    owners = {
        claim["partition"]: _owner(claim)
        for claim in _claims(world)
        if (claim["group_id"], claim["topic"]) == (group, topic)
    }
    return OwnersNow(as_of=as_of(world, wall_ms), owners=dict(sorted(owners.items())))


def fence_now(
    world: World, group: str, *, topic: str, partition: int, wall_ms: int
) -> FenceNow:
    """Return the newest claim of a partition; nothing where there never was one."""
    key = (group, topic, partition)
    for claim in _claims(world):
        if (claim["group_id"], claim["topic"], claim["partition"]) == key:
            owner = claim["owner"] or {}
            return FenceNow(
                as_of=as_of(world, wall_ms),
                token=claim["token"],
                epoch=claim["epoch"],
                client_id=owner.get("client_id"),
                incarnation=owner.get("incarnation"),
                position=claim["position"],
            )
    return FenceNow(
        as_of=as_of(world, wall_ms),
        token=None,
        epoch=None,
        client_id=None,
        incarnation=None,
        position=None,
    )


def _claims(world: World) -> Iterator[Item]:
    for part in world["partitions"].values():
        yield from part["claims"]


def _pauses(world: World) -> list[Item]:
    """Return each pause once: every coordinating partition tells of it."""
    found: dict[tuple[str, str], Item] = {}
    for part in world["partitions"].values():
        for pause in part["pauses"]:
            found.setdefault((pause["group_id"], pause["op_id"]), pause)
    return list(found.values())


def _owner(claim: Item) -> str | None:
    owner = claim["owner"]
    return None if owner is None else str(owner["client_id"])


def granted_now(verdict: Verdict) -> api.Granted:
    """Return the fold's verdict as a client is told it."""
    first, last = verdict.granted or (None, None)
    return api.Granted(
        outcome=verdict.outcome,
        reason=verdict.reason,
        first=first,
        last=last,
        head=verdict.head,
        offset=verdict.offset,
    )
