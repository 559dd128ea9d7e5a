"""Rows and facts out of a world: what the commands show. Pure functions."""

from collections.abc import Iterable, Mapping
from typing import Any

from kafka_marshal import Key, TopicPartition, World
from kafka_marshal.adoption import AdoptionPlan
from kafka_marshal.protocol.freshness import Freshness
from kafka_marshal.protocol.hashing import RESERVED_TOPICS, coordinating_partition
from kafka_marshal.protocol.losses import Loss
from kafka_marshal.protocol.state import KeyNote, MemberState, WorldState
from kafka_marshal.protocol.world import claim_to_object

Row = dict[str, Any]


def as_of(world: World) -> Row:
    """Return what an answer is true for: next offsets, and when they were read."""
    return {
        "time_ms": world.read_at_ms,
        "offsets": {str(w.partition): w.next_offset for w in world.partitions},
    }


def claim_row(world: World, key: Key, *, state: WorldState) -> Row:
    """Return one claim: as PROTOCOL 3.8 has it, with estimates beside the log's age."""
    known = state.keys[key]
    row = claim_to_object(state, key, known=known)
    estimate_ms = freshness_now = None
    if known.owner is not None:
        estimate_ms = world.estimated_age_ms(state, known)
        freshness_now = world.estimated_freshness(state, known).value
    return {
        **row,
        "age_estimate_ms": estimate_ms,
        "freshness_estimate": freshness_now,
        "coordinating_partition": state.partition,
        "why": _why(state.soft.notes.get(key), is_owned=known.owner is not None),
    }


def _why(note: KeyNote | None, *, is_owned: bool) -> Row | None:
    """Return what moved a key last; readers of a snapshot may not know."""
    if note is None:
        return None
    return {
        "change": "claimed" if is_owned else "released",
        "client_id": note.client_id,
        "offset": note.offset,
        "reason": note.reason,
    }


def claim_rows(
    world: World, *, group_id: str | None = None, topic: str | None = None
) -> list[Row]:
    """Return every claim, of a group or a topic where named, in order.

    What the protocol claims for itself, such as the writing of checkpoints, is told
    where its group or topic is named.
    """
    rows = [
        (key, claim_row(world, key, state=state))
        for state in world.partitions
        for key in state.keys
        if is_wanted(key, group_id=group_id, topic=topic)
    ]
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def data_partitions(rows: Iterable[Row]) -> set[TopicPartition]:
    """Return the data partitions that claims are of."""
    return {
        TopicPartition(row["topic"], row["partition"])
        for row in rows
        if row["topic"] not in RESERVED_TOPICS
    }


def with_lag(rows: Iterable[Row], ends: Mapping[TopicPartition, int]) -> list[Row]:
    """Return claims with the end of their log, and how far it is ahead.

    Args:
        rows: Claims.
        ends: Next offset to be written, by partition; None is said where it is absent.
    """
    found = []
    for row in rows:
        end = ends.get(TopicPartition(row["topic"], row["partition"]))
        position = row["position"]
        is_known = end is not None and position is not None
        lag = max(0, end - position) if is_known else None
        found.append({**row, "log_end_offset": end, "lag": lag})
    return found


def is_wanted(key: Key, *, group_id: str | None, topic: str | None) -> bool:
    """Return whether a claim is to be told of, where a group or topic may be named."""
    if group_id is None and topic is None:
        return key.topic not in RESERVED_TOPICS
    return group_id in {None, key.group_id} and topic in {None, key.topic}


def pause_rows(world: World, *, group_id: str | None = None) -> list[Row]:
    """Return every pause, with who, why and until when."""
    found: dict[tuple[str, bytes], Row] = {}
    for state in world.partitions:
        for name in sorted(state.groups):
            pause = state.active_pause(name)
            if pause is None or group_id not in {None, name}:
                continue
            row = found.setdefault(
                (name, pause.op_id),
                {
                    "group_id": name,
                    "op_id": pause.op_id.hex(),
                    "client_id": pause.client_id,
                    "reason": world.reasons.get((name, pause.op_id)),
                    "until_ms": pause.until_ms,
                    "partitions_count": 0,
                },
            )
            row["until_ms"] = max(row["until_ms"], pause.until_ms)
            row["partitions_count"] += 1
    return [row for _, row in sorted(found.items())]


def member_rows(world: World, *, group_id: str | None = None) -> list[Row]:
    """Return every client that the log knows, with its state.

    ``active`` has announced itself within 2H; ``leaving`` has announced its
    end, and ``left`` did so longer ago; ``fenced`` announced itself once and is
    silent for longer without a word;
    ``unregistered`` owns something without ever having announced itself.
    """
    held: dict[tuple[str, str, str], int] = {}
    for row in claim_rows(world, group_id=group_id):
        owner = row["owner"]
        if owner is not None:
            name = (row["group_id"], owner["client_id"], owner["incarnation"])
            held[name] = held.get(name, 0) + 1
    rows: dict[tuple[str, str, str], Row] = {}
    for state in world.partitions:
        for member in state.soft.members.values():
            record = member.record
            if group_id in {None, record.group_id}:
                name = (record.group_id, record.client_id, record.incarnation.hex())
                rows[name] = _member_row(world, state, member)
    for name in held:
        rows.setdefault(name, _unregistered(*name))
    return [
        {**row, "claims_count": held.get(name, 0)} for name, row in sorted(rows.items())
    ]


def _member_row(world: World, state: WorldState, member: MemberState) -> Row:
    record = member.record
    silent_ms = state.now_ms - member.seen_ms + world.elapsed_ms(state.partition)
    config = state.config
    limit_ms = 0 if config is None else 2 * config.heartbeat_interval_ms
    told, gone = ("leaving", "left") if record.draining else ("active", "fenced")
    return {
        "group_id": record.group_id,
        "client_id": record.client_id,
        "incarnation": record.incarnation.hex(),
        "state": told if silent_ms <= limit_ms else gone,
        "host": record.host,
        "topics": list(record.topics),
        "silent_estimate_ms": silent_ms,
    }


def _unregistered(group_id: str, client_id: str, incarnation: str) -> Row:
    return {
        "group_id": group_id,
        "client_id": client_id,
        "incarnation": incarnation,
        "state": "unregistered",
        "host": None,
        "topics": [],
        "silent_estimate_ms": None,
    }


def group_rows(world: World) -> list[Row]:
    """Return every group that the log knows."""
    rows: dict[str, Row] = {}

    def row_of(name: str) -> Row:
        return rows.setdefault(
            name,
            {
                "group_id": name,
                "members_count": 0,
                "claims_count": 0,
                "owned_count": 0,
                "paused_until_ms": None,
                "paused_by": None,
                "pause_reason": None,
            },
        )

    for claim in claim_rows(world):
        row = row_of(claim["group_id"])
        row["claims_count"] += 1
        is_stale = claim["freshness_estimate"] == Freshness.STALE.value
        row["owned_count"] += claim["owner"] is not None and not is_stale
    for member in member_rows(world):
        row_of(member["group_id"])["members_count"] += member["state"] == "active"
    for pause in pause_rows(world):
        row_of(pause["group_id"]).update(
            paused_until_ms=pause["until_ms"],
            paused_by=pause["client_id"],
            pause_reason=pause["reason"],
        )
    return [row for _, row in sorted(rows.items())]


def key_texts(keys: Iterable[Key]) -> list[str]:
    """Return keys as ``topic-partition``."""
    return [str(key.topic_partition) for key in keys]


def partition_of(key: Key, partition_count: int) -> int:
    """Return the coordinating partition that judges a key (PROTOCOL 2.3)."""
    if key.topic in RESERVED_TOPICS:
        return key.partition
    return coordinating_partition(
        key.topic, key.partition, partition_count=partition_count
    )


def is_known(world: World, group_id: str) -> bool:
    """Return whether the log knows a group at all."""
    return any(row["group_id"] == group_id for row in group_rows(world))


def adoption_facts(plan: AdoptionPlan, *, is_executed: bool) -> dict[str, Any]:
    """Return what is true of a whole adoption."""
    return {
        "group_id": plan.group_id,
        "from_group": plan.from_group,
        "from_topic": plan.from_topic,
        "is_source_active": plan.is_source_active,
        "is_executed": is_executed,
        "unreadable_count": plan.unreadable_count,
    }


def adoption_rows(plan: AdoptionPlan) -> list[dict[str, Any]]:
    """Return one row per partition of an adoption."""
    return [
        {
            "topic": step.partition.topic,
            "partition": step.partition.partition,
            "action": step.action.value,
            "source": step.source,
            "offset": step.offset,
            "before": step.before,
            "position": step.position,
            "lag": step.lag,
            "note": step.note,
        }
        for step in plan.steps
    ]


def loss_row(loss: Loss) -> Row:
    """Return what one claim was granted at most once and is not done with."""
    return {
        **loss.key._asdict(),
        "owner": {
            "client_id": loss.owner.client_id,
            "incarnation": loss.owner.incarnation.hex(),
        },
        "epoch": loss.epoch,
        "ranges": [{"first": first, "last": last} for first, last in loss.ranges],
        "offsets_count": loss.count,
        "mark": loss.mark,
        "ending": loss.ending,
        "reason": loss.reason,
        "winner": loss.winner,
        "coordinating_partition": loss.partition,
        "at_offset": loss.at_offset,
        "at_ms": loss.at_ms,
    }
