"""Rows and table columns of what the commands show. Pure functions."""

import base64
from collections.abc import Iterable, Mapping
from typing import Any

from kafka_marshal import Key, Record, TopicPartition, World
from kafka_marshal.protocol.hashing import RESERVED_TOPICS, coordinating_partition
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.losses import Loss
from kafka_marshal.protocol.state import KeyNote, MemberState, WorldState
from kafka_marshal.protocol.text import claim_to_object
from kafka_marshal_cli.adoption import AdoptionPlan
from kafka_marshal_cli.render import NOTHING, Column, column, duration, instant, plain

Row = dict[str, Any]


def as_of(world: World) -> Row:
    """Return the state that an answer describes: next offsets and time of reading."""
    return {
        "time_ms": world.read_at_ms,
        "offsets": {str(w.partition): w.next_offset for w in world.partitions},
    }


def claim_row(world: World, key: Key, *, state: WorldState) -> Row:
    """Return one claim in the form of PROTOCOL 3.8, with estimates of its age."""
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
    """Return the last change of a key; None if a snapshot did not have it."""
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
    """Return every claim, of a group or topic if given, in order.

    The protocol's own claims, such as that of the checkpoint writer, are included only
    if their group or topic is given.
    """
    rows = [
        (key, claim_row(world, key, state=state))
        for state in world.partitions
        for key in state.keys
        if is_selected(key, group_id=group_id, topic=topic)
    ]
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def data_partitions(rows: Iterable[Row]) -> set[TopicPartition]:
    """Return the data partitions of claims."""
    return {
        TopicPartition(row["topic"], row["partition"])
        for row in rows
        if row["topic"] not in RESERVED_TOPICS
    }


def with_lag(rows: Iterable[Row], ends: Mapping[TopicPartition, int]) -> list[Row]:
    """Return claims with the end of their log and their lag.

    Args:
        rows: Claims.
        ends: Next offset of each partition; the lag of others is None.
    """
    found = []
    for row in rows:
        end = ends.get(TopicPartition(row["topic"], row["partition"]))
        position = row["position"]
        is_known = end is not None and position is not None
        lag = max(0, end - position) if is_known else None
        found.append({**row, "log_end_offset": end, "lag": lag})
    return found


def is_selected(key: Key, *, group_id: str | None, topic: str | None) -> bool:
    """Return whether a claim is of the group and topic, if given."""
    if group_id is None and topic is None:
        return key.topic not in RESERVED_TOPICS
    return group_id in {None, key.group_id} and topic in {None, key.topic}


def pause_rows(world: World, *, group_id: str | None = None) -> list[Row]:
    """Return every pause, with client, reason and end."""
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
    """Return every client in the log, with its state.

    ``active``: announced itself within two heartbeat intervals; ``leaving``:
    announced its end within that time; ``left``: announced its end earlier;
    ``fenced``: silent for longer without announcing its end; ``unregistered``: owns a
    claim and never announced itself.
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
    recent, late = ("leaving", "left") if record.draining else ("active", "fenced")
    return {
        "group_id": record.group_id,
        "client_id": record.client_id,
        "incarnation": record.incarnation.hex(),
        "state": recent if silent_ms <= limit_ms else late,
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
    """Return every group in the log."""
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
    """Return whether a group is in the log."""
    return any(row["group_id"] == group_id for row in group_rows(world))


def adoption_facts(plan: AdoptionPlan, *, is_executed: bool) -> dict[str, Any]:
    """Return the facts of a whole adoption."""
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
    """Return the granted and unprocessed offsets of one claim (at most once)."""
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


# --- columns of the tables


def _owner(row: Any) -> str:  # noqa: ANN401 - a JSON object
    owner = row["owner"]
    return NOTHING if owner is None else str(owner["client_id"])


def _age(row: Any) -> str:  # noqa: ANN401 - a JSON object
    """Return the estimated age, with a tilde."""
    age_ms, estimate_ms = row["age_ms"], row["age_estimate_ms"]
    return NOTHING if age_ms is None else f"~{duration(estimate_ms)}"


def why_text(row: Any) -> str:  # noqa: ANN401 - a JSON object
    """Return the reason of the last change, and who released a free key."""
    why = row["why"]
    if why is None:
        return NOTHING
    reason = why["reason"] or NOTHING
    is_free = why["change"] == "released"
    return f"{reason} (released by {why['client_id']})" if is_free else str(reason)


CLAIM_COLUMNS = (
    column("GROUP", "group_id"),
    column("TOPIC", "topic"),
    Column("PARTITION", lambda row: str(row["partition"]), is_number=True),
    Column("OWNER", _owner),
    column("STATE", "freshness_estimate"),
    column("AGE", "age_ms", as_text=duration),
    Column("AGE NOW", _age, is_number=True),
    column("CURRENT-OFFSET", "position"),
    column("LOG-END-OFFSET", "log_end_offset"),
    column("LAG", "lag"),
    column("GRANTED", "granted"),
    column("TOKEN", "token"),
)
GROUP_CLAIM_COLUMNS = CLAIM_COLUMNS[1:]
CLAIM_REASON_COLUMNS = (*CLAIM_COLUMNS, Column("WHY", why_text))

GROUP_COLUMNS = (
    column("GROUP", "group_id"),
    column("MEMBERS", "members_count"),
    column("OWNED", "owned_count"),
    column("CLAIMS", "claims_count"),
    column("PAUSED UNTIL", "paused_until_ms", as_text=instant),
    column("BY", "paused_by"),
    column("REASON", "pause_reason"),
)

CLIENT_COLUMNS = (
    column("GROUP", "group_id"),
    column("CLIENT", "client_id"),
    column("STATE", "state"),
    column("HOST", "host"),
    column("CLAIMS", "claims_count"),
    column("SILENT", "silent_estimate_ms", as_text=lambda ms: f"~{duration(ms)}"),
    Column("INCARNATION", lambda row: str(row["incarnation"])[:8]),
    Column("TOPICS", lambda row: ", ".join(row["topics"]) or NOTHING),
)
MEMBER_COLUMNS = CLIENT_COLUMNS[1:]

PAUSE_COLUMNS = (
    column("UNTIL", "until_ms", as_text=instant),
    column("BY", "client_id"),
    column("REASON", "reason"),
    column("OPERATION", "op_id"),
)

PARTITION_COLUMNS = (
    Column("PARTITION", lambda row: str(row["partition"]), is_number=True),
    column("NEXT", "next_offset"),
    column("GENERATION", "generation"),
    column("CLAIMS", "claims_count"),
    column("DIGEST", "digest"),
)

RESET_COLUMNS = (
    column("GROUP", "group_id"),
    column("TOPIC", "topic"),
    column("PARTITION", "partition"),
    column("CHANGE", "change"),
    column("POSITION", "position"),
    column("THEN", "position_then"),
    column("GRANTED", "granted"),
    column("THEN", "granted_then"),
    column("REPEATS", "repeats"),
)
FORGOTTEN_COLUMNS = (
    column("GROUP", "group_id"),
    column("TOPIC", "topic"),
    column("PARTITION", "partition"),
    column("EPOCH", "epoch"),
)
SNAPSHOT_COLUMNS = (
    PARTITION_COLUMNS[0],
    PARTITION_COLUMNS[1],
    PARTITION_COLUMNS[3],
    PARTITION_COLUMNS[4],
)

DIFFERENCE_COLUMNS = (
    Column("PARTITION", lambda row: str(row["partition"]), is_number=True),
    column("WHAT", "what"),
    column("NAME", "name"),
    column("FIELD", "field"),
    column("ONE", "one", as_text=str),
    column("OTHER", "other", as_text=str),
)

VERIFY_COLUMNS = (
    Column("PARTITION", lambda row: str(row["partition"]), is_number=True),
    column("RESULT", "result"),
    column("FROM", "begin_offset"),
    column("ENTRIES", "entries_count"),
    column("NEXT", "next_offset"),
    column("SNAPSHOT AT", "snapshot_offset"),
    column("UNDECODABLE", "undecodable_count"),
    column("DIGEST", "digest"),
)

CHECK_COLUMNS = (
    column("CHECK", "check"),
    column("RESULT", "result"),
    column("FOUND", "found"),
    column("RUN", "run"),
)


def _number(header: str, key: str) -> Column:
    return Column(header, lambda row: plain(row[key]), is_number=True)


ADOPTION_COLUMNS = (
    column("TOPIC", "topic"),
    Column("PARTITION", lambda row: str(row["partition"]), is_number=True),
    column("ACTION", "action"),
    column("OFFSET", "offset"),
    column("FROM", "source"),
    _number("BEFORE", "before"),
    column("POSITION", "position"),
    _number("LAG", "lag"),
    column("NOTE", "note"),
)


def _ranges(row: Any) -> str:  # noqa: ANN401 - a JSON object
    return ", ".join(f"{each['first']}..{each['last']}" for each in row["ranges"])


def _ending(row: Any) -> str:  # noqa: ANN401 - a JSON object
    why = row["reason"] if row["winner"] is None else f"by {row['winner']}"
    return row["ending"] if why is None else f"{row['ending']} ({why})"


def _place(row: Any) -> str:  # noqa: ANN401 - a JSON object
    return f"{row['coordinating_partition']}/{row['at_offset']}"


LOSS_COLUMNS = (
    column("TOPIC", "topic"),
    Column("PARTITION", lambda row: str(row["partition"]), is_number=True),
    Column("OFFSETS", _ranges),
    column("COUNT", "offsets_count"),
    Column("OWNER", _owner),
    column("EPOCH", "epoch"),
    column("MARK", "mark"),
    Column("ENDING", _ending),
    Column("LOG", _place),
    column("AT", "at_ms", as_text=instant),
)


# --- records of data topics


def record_object(record: Record, handed_out_ms: int) -> dict[str, Any]:
    """Return the JSON object of a record."""
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "token": None if record.token is None else str(record.token),
        "timestamp": record.timestamp_ms,
        "handed_out_ms": handed_out_ms,
        **_text("key", record.key),
        **_text("value", record.value),
    }


def _text(name: str, value: bytes | None) -> dict[str, str | None]:
    if value is None:
        return {name: None}
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}
