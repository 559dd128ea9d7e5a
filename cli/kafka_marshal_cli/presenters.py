"""Rows and table columns for the answers of commands. Pure functions."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kafka_marshal.clock import duration, instant
from kafka_marshal.protocol.applied import Applied, applied_of
from kafka_marshal.protocol.handoffs import offered_since_ms, phase_of
from kafka_marshal.protocol.hashing import RESERVED_TOPICS
from kafka_marshal.protocol.labels import own_labels
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.losses import Loss
from kafka_marshal.protocol.settings import FAIR, TUNABLES, Settings
from kafka_marshal.protocol.state import KeyNote, KeyState, MemberState, WorldState
from kafka_marshal.protocol.text import claim_to_object, offer_to_object
from kafka_marshal.protocol.types import Key, TopicPartition, lag_of
from kafka_marshal_cli.parsing import Moment
from kafka_marshal_cli.render import (
    NOTHING,
    Column,
    column,
    log_place,
    plain,
)

if TYPE_CHECKING:
    from kafka_marshal import Record, World
    from kafka_marshal.admin.growing import SourceReport
    from kafka_marshal.protocol.group_plan import Uncovered
    from kafka_marshal.protocol.items import Growth
    from kafka_marshal_cli.adoption import AdoptionPlan

Row = dict[str, Any]
IMPORTED = "imported"


def as_of(world: "World", at: Moment | None = None) -> Row:
    """Return the state that an answer describes: next offsets and time of reading.

    For a view of the past, ``at`` is its moment.
    """
    found = {
        "time_ms": world.read_at_ms,
        "offsets": {str(w.partition): w.next_offset for w in world.partitions},
    }
    return found if at is None else {**found, "at": at.text}


def claim_row(world: "World", key: Key, *, state: WorldState) -> Row:
    """Return one claim in the form of PROTOCOL 3.8, with estimates of its age.

    In a view of the past the estimates are None.
    """
    known = state.keys[key]
    row = claim_to_object(state, key, known=known)
    estimate_ms = freshness_now = None
    if known.owner is not None and not world.is_past:
        estimate_ms = world.estimated_age_ms(state, known)
        freshness_now = world.estimated_freshness(state, known).value
    return {
        **row,
        "offer": _offer(world, key, state=state),
        "age_estimate_ms": estimate_ms,
        "freshness_estimate": freshness_now,
        "coordinating_partition": state.partition,
        "moving": _moving(world, key, state=state),
        "why": _why(state.soft.notes.get(key), known),
    }


def _moving(world: "World", key: Key, *, state: WorldState) -> Row | None:
    """Return where a key moves, and the state of the move; None if it stays."""
    found = None if state.layout is None else world.moving_to(key)
    return None if found is None else {"to": found[0], "state": found[1]}


def _offer(world: "World", key: Key, *, state: WorldState) -> Row | None:
    """Return the offer of a key with its phase, None if none is open."""
    known = state.keys[key]
    phase = phase_of(known, state.now_ms + world.elapsed_ms(state.partition))
    if known.offer is None or phase is None:
        return None
    since_ms = offered_since_ms(state, key)
    return {**offer_to_object(known.offer), "phase": phase, "since_ms": since_ms}


def _why(note: KeyNote | None, known: KeyState) -> Row | None:
    """Return the last change of a key; None if the snapshot read has no note of it."""
    if note is None and known.epoch == 0:
        # PROTOCOL 10.4: nobody has claimed the key since it moved here.
        return {"change": IMPORTED, "client_id": None, "offset": None, "reason": None}
    if note is None:
        return None
    return {
        "change": "released" if known.owner is None else "claimed",
        "client_id": note.client_id,
        "offset": note.offset,
        "reason": note.reason,
    }


def claim_rows(
    world: "World", *, group_id: str | None = None, topic: str | None = None
) -> list[Row]:
    """Return all claims, or those of a group or topic, in order.

    The protocol's own claims, such as that of the checkpoint writer, are included only
    if their group or topic is given.
    """
    rows = [
        (key, claim_row(world, key, state=state))
        for key, state in world.standing().items()
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
        ends: Next offset by partition; the lag of all other partitions is None.
    """
    found = []
    for row in rows:
        end = ends.get(TopicPartition(row["topic"], row["partition"]))
        is_owned = row["freshness_estimate"] not in {None, Freshness.STALE.value}
        lag = lag_of(row["position"], end, is_owned=is_owned)
        found.append({**row, "log_end_offset": end, "lag": lag})
    return found


def is_selected(key: Key, *, group_id: str | None, topic: str | None) -> bool:
    """Return whether a claim belongs to the group and topic that are given."""
    if group_id is None and topic is None:
        return key.topic not in RESERVED_TOPICS
    return group_id in {None, key.group_id} and topic in {None, key.topic}


def operation_rows(world: "World", *, group_id: str | None = None) -> list[Row]:
    """Return every unresolved set position, with the command that ends it.

    The client that began it is known while its pause lasts; afterwards anyone may end
    it.
    """
    from kafka_marshal.admin.finishing import open_operations

    return [
        {
            "group_id": each.group_id,
            "op_id": each.op_id,
            "state": "committed" if each.is_committed else "undecided",
            "locked_count": len(each.locked),
            "client_id": each.client_id,
            "person": world.pauser_of(each.group_id, each.op_id),
            "command": f"marshal groups finish {each.group_id}",
        }
        for each in open_operations(world.partitions, group_id)
    ]


def uncovered_rows(found: Iterable["Uncovered"]) -> list[Row]:
    """Return keys that no member can claim, with the reason."""
    return [{**each.key._asdict(), "reason": each.reason} for each in found]


def growth_rows(growths: Iterable["Growth"]) -> list[Row]:
    """Return the growths of data topics.

    In state ``announced``, nobody claims a new partition. In state ``ended``, a new
    partition is claimed once the old partition that had its keys is processed to its
    recorded end.
    """
    return [
        {
            "topic": each.topic,
            "topic_id": None if each.topic_id is None else each.topic_id.hex(),
            "from_count": each.old_count,
            "to_count": each.new_count,
            "state": "announced" if each.ends is None else "ended",
            "announced_offset": each.offset,
            "end_offsets": None if each.ends is None else list(each.ends),
        }
        for each in growths
    ]


def growth_source_rows(sources: Iterable["SourceReport"]) -> list[Row]:
    """Return the old partitions of growths, and the new ones that wait for them."""
    return [
        {
            "group_id": each.group_id,
            "topic": each.topic,
            "partition": each.partition,
            "position": each.position,
            "end_offset": each.end,
            "lag": each.lag,
            "waiting": list(each.waiting),
        }
        for each in sources
    ]


def member_rows(world: "World", *, group_id: str | None = None) -> list[Row]:
    """Return every client in the log, with its state.

    ``active``: announced itself within two heartbeat intervals; ``leaving``:
    announced its end within that time; ``left``: announced its end earlier;
    ``silent``: announced nothing for longer, not even its end; ``fenced``: an admin
    fenced it, and it still owns a claim; ``unregistered``: owns a claim and never
    announced itself.
    """
    held: dict[tuple[str, str, str], int] = {}
    for row in claim_rows(world, group_id=group_id):
        owner = row["owner"]
        if owner is not None:
            name = (row["group_id"], owner["client_id"], owner["incarnation"])
            held[name] = held.get(name, 0) + 1
    rows: dict[tuple[str, str, str], Row] = {}
    for state, member in world.members(group_id):
        record = member.record
        name = (record.group_id, record.client_id, record.incarnation.hex())
        rows[name] = member_row(world, member, state=state)
    for name in held:
        rows.setdefault(name, _unregistered(*name))
    for state in world.partitions:
        for group, client_id, incarnation in state.fences:
            fenced = (group, client_id, incarnation.hex())
            if fenced in rows:
                rows[fenced]["state"] = "fenced"
    return [
        {**row, "claims_count": held.get(name, 0)} for name, row in sorted(rows.items())
    ]


def member_row(world: "World", member: MemberState, *, state: WorldState) -> Row:
    """Return one client of the log, with its state; see ``member_rows``."""
    record = member.record
    silent_ms = state.now_ms - member.seen_ms + world.elapsed_ms(state.partition)
    config = state.config
    limit_ms = 0 if config is None else 2 * config.heartbeat_interval_ms
    recent, late = ("leaving", "left") if record.draining else ("active", "silent")
    status = recent if silent_ms <= limit_ms else late
    log = applied_of(record)
    # A client that has left does not read the log, so its lag means nothing.
    lags = {} if status == "left" else world.log_lags(member)
    return {
        "group_id": record.group_id,
        "client_id": record.client_id,
        "incarnation": record.incarnation.hex(),
        "state": status,
        "host": record.host,
        "directive": state.action_for(
            (record.group_id, record.client_id), host=record.host
        ),
        "topics": list(record.topics),
        "labels": record.labels,
        "silent_estimate_ms": silent_ms,
        "log_lag": max(lags.values(), default=None),
        "log_read_count": _read_count(log),
        "applied_offsets": {str(t): at for t, at in log.applied.items()},
        "began_offsets": {str(t): at for t, at in log.began.items()},
    }


def _unregistered(group_id: str, client_id: str, incarnation: str) -> Row:
    return {
        "group_id": group_id,
        "client_id": client_id,
        "incarnation": incarnation,
        "state": "unregistered",
        "host": None,
        "directive": None,
        "topics": [],
        "labels": {},
        "silent_estimate_ms": None,
        "log_lag": None,
        "log_read_count": None,
        "applied_offsets": {},
        "began_offsets": {},
    }


def _read_count(log: Applied) -> int | None:
    """Return how many entries a member has read after the states that it began at."""
    partitions = log.applied.keys() & log.began.keys()
    if not partitions:
        return None
    return sum(max(0, log.applied[t] - log.began[t]) for t in partitions)


def group_rows(world: "World") -> list[Row]:
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
                "paused_from_ms": None,
                "paused_until_ms": None,
                "paused_by": None,
                "pause_person": None,
                "pause_reason": None,
                "paused_topics": [],
                "locked_count": 0,
                "locked_by": None,
                "next_pause": None,
            },
        )

    for claim in claim_rows(world):
        row = row_of(claim["group_id"])
        row["claims_count"] += 1
        freshness = claim["freshness_estimate"] or claim["freshness"]
        is_stale = freshness == Freshness.STALE.value
        row["owned_count"] += claim["owner"] is not None and not is_stale
    for member in member_rows(world):
        row_of(member["group_id"])["members_count"] += member["state"] == "active"
    # A pause of the whole group comes last, and replaces pauses of topics.
    pauses = world.pauses()
    pauses.sort(key=lambda each: (not each["topics"], each["begin_ms"] or 0))
    for pause in pauses:
        row = row_of(pause["group_id"])
        if pause["state"] == "paused":
            topics = {*row["paused_topics"], *pause["topics"]}
            row.update(
                paused_topics=sorted(topics) if pause["topics"] else [],
                paused_from_ms=pause["begin_ms"],
                paused_until_ms=pause["until_ms"],
                paused_by=pause["client_id"],
                pause_person=pause["person"],
                pause_reason=pause["reason"],
            )
        elif row["next_pause"] is None:
            row["next_pause"] = pause
    for operation in operation_rows(world):
        row = row_of(operation["group_id"])
        row["locked_count"] += operation["locked_count"]
        row["locked_by"] = operation["op_id"]
    return [row for _, row in sorted(rows.items())]


def group_columns(rows: Iterable[Row]) -> tuple[Column, ...]:
    """Return the columns of groups; topics and locks only if a group has some."""
    rows = list(rows)
    is_locked = any(row["locked_by"] is not None for row in rows)
    is_scoped = any(row["paused_topics"] for row in rows)
    return (
        GROUP_COLUMNS
        + (SCOPE_COLUMNS if is_scoped else ())
        + (LOCK_COLUMNS if is_locked else ())
    )


def pause_columns(rows: Iterable[Row]) -> tuple[Column, ...]:
    """Return the columns of pauses; topics and renewers only if a pause has some."""
    rows = list(rows)
    is_scoped = any(row["topics"] for row in rows)
    is_renewed = any(row["renewed_by"] for row in rows)
    return (
        PAUSE_COLUMNS
        + (PAUSE_TOPICS if is_scoped else ())
        + (PAUSE_RENEWED if is_renewed else ())
    )


CLIENTS_LESS = ("LOG READ", "LOG LAG", "INCARNATION")
"""Like ``CLAIMS_LESS``, for clients."""


def client_columns(rows: Iterable[Row], *, has_group: bool) -> tuple[Column, ...]:
    """Return the columns of clients; omit optional ones that are empty for all."""
    rows = list(rows)
    has_lag = any(row["log_lag"] is not None for row in rows)
    is_directed = any(row["directive"] for row in rows)
    is_labeled = any(own_labels(row["labels"]) for row in rows)
    return (
        (CLIENT_COLUMNS if has_group else CLIENT_COLUMNS[1:])
        + (CLIENT_LOG if has_lag else ())
        + ((CLIENT_DIRECTIVE,) if is_directed else ())
        + ((CLIENT_LABELS,) if is_labeled else ())
    )


def key_texts(keys: Iterable[Key]) -> list[str]:
    """Return keys as ``topic-partition``."""
    return [str(key.topic_partition) for key in keys]


def settings_rows(settings: Settings, before: Settings | None = None) -> list[Row]:
    """Return the settings of a group as members use them; empty if none were written.

    Args:
        settings: The settings.
        before: Settings to compare with, for another column.
    """
    if not settings.generation:
        return []
    policy: Row = {"name": "policy", "value": settings.policy or FAIR, "default": FAIR}
    if before is not None:
        policy["before"] = before.policy or FAIR
    rows: list[Row] = [policy]
    for name, tunable in TUNABLES.items():
        row = {"name": name, "value": settings.value(name), "default": tunable.default}
        rows.append(row if before is None else row | {"before": before.value(name)})
    return rows


def is_known(world: "World", group_id: str) -> bool:
    """Return whether a group is in the log."""
    return any(row["group_id"] == group_id for row in group_rows(world))


def adoption_facts(plan: "AdoptionPlan", *, is_executed: bool) -> dict[str, Any]:
    """Return the facts of a whole adoption."""
    return {
        "group_id": plan.group_id,
        "from_group": plan.from_group,
        "from_topic": plan.from_topic,
        "is_source_active": plan.is_source_active,
        "is_executed": is_executed,
        "unreadable_count": plan.unreadable_count,
    }


def adoption_rows(plan: "AdoptionPlan") -> list[dict[str, Any]]:
    """Return one row per partition of an adoption."""
    return [
        {
            **step.partition._asdict(),
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
    """Return the granted but unprocessed offsets of one claim (at most once)."""
    return {
        **loss.key._asdict(),
        "owner": {
            "client_id": loss.owner.client_id,
            "incarnation": loss.owner.incarnation.hex(),
        },
        "epoch": loss.epoch,
        "ranges": [{"first": each.first, "last": each.last} for each in loss.ranges],
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


def _handoff(row: Any) -> str:  # noqa: ANN401 - a JSON object
    offer = row["offer"]
    return NOTHING if offer is None else f"{offer['phase']}: {offer['successor']}"


def moving_text(row: Any) -> str:  # noqa: ANN401 - a JSON object
    """Return the state of a key's move, and its new partition."""
    moving = row["moving"]
    return NOTHING if moving is None else f"{moving['state']}, to {moving['to']}"


def _age(row: Any) -> str:  # noqa: ANN401 - a JSON object
    """Return the estimated age, with a tilde."""
    age_ms, estimate_ms = row["age_ms"], row["age_estimate_ms"]
    return NOTHING if age_ms is None else f"~{duration(estimate_ms)}"


def why_text(row: Any) -> str:  # noqa: ANN401 - a JSON object
    """Return the reason of the last change, and who released a free key."""
    why = row["why"]
    if why is None:
        return NOTHING
    if why["change"] == IMPORTED:
        return IMPORTED
    reason = why["reason"] or NOTHING
    is_free = why["change"] == "released"
    return f"{reason} (released by {why['client_id']})" if is_free else str(reason)


def _next_pause(row: Any) -> str:  # noqa: ANN401 - a JSON object
    pause = row["next_pause"]
    if pause is None:
        return NOTHING
    reason = "" if pause["reason"] is None else f": {pause['reason']}"
    who = pause["person"] or pause["client_id"]
    return f"{instant(pause['begin_ms'])} by {who}{reason}"


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
CLAIMS_LESS = ("GRANTED", "AGE", "LOG-END-OFFSET", "TOKEN", "AGE NOW", "WHY")
"""Titles of the columns to omit first on a narrow terminal."""
_WHY = Column("WHY", why_text)
_HANDOFF = Column("HANDOFF", _handoff)
_MOVING = Column("MOVING", moving_text)
# Columns about now, from the clock of this host and the present data log ends.
_ESTIMATED = frozenset({"AGE NOW", "LOG-END-OFFSET", "LAG"})


def claim_columns(
    *,
    rows: Iterable[Row] = (),
    is_past: bool = False,
    has_group: bool = True,
    has_why: bool = False,
    has_handoff: bool = False,
) -> tuple[Column, ...]:
    """Return the columns of claims.

    Args:
        rows: The claims; if some of them move, there is a column for it.
        is_past: Whether to omit estimates about now.
        has_group: Whether the group is a column.
        has_why: Whether the reason of the last change is a column.
        has_handoff: Whether the offer to a successor is a column.
    """
    columns: tuple[Column, ...] = CLAIM_COLUMNS if has_group else CLAIM_COLUMNS[1:]
    if is_past:
        log_time = column("STATE", "freshness")
        columns = tuple(
            log_time if each.header == "STATE" else each
            for each in columns
            if each.header not in _ESTIMATED
        )
    columns = (*columns, _HANDOFF) if has_handoff else columns
    is_moving = any(row["moving"] for row in rows)
    columns = (*columns, _MOVING) if is_moving else columns
    return (*columns, _WHY) if has_why else columns


GROUP_COLUMNS = (
    column("GROUP", "group_id"),
    column("MEMBERS", "members_count"),
    column("OWNED", "owned_count"),
    column("CLAIMS", "claims_count"),
    column("PAUSED FROM", "paused_from_ms", as_text=instant),
    column("PAUSED UNTIL", "paused_until_ms", as_text=instant),
    Column("BY", lambda row: plain(row["pause_person"] or row["paused_by"])),
    column("REASON", "pause_reason"),
    Column("NEXT PAUSE", _next_pause),
)

HANDOFF_COLUMNS = (
    column("TOPIC", "topic"),
    Column("PARTITION", lambda row: str(row["partition"]), is_number=True),
    column("OWNER", "owner"),
    column("SUCCESSOR", "successor"),
    column("PHASE", "phase"),
    column("SINCE", "since_ms", as_text=instant),
    column("UNTIL", "until_ms", as_text=instant),
)

STANDBY_COLUMNS = (
    column("TOPIC", "topic"),
    Column("PARTITION", lambda row: str(row["partition"]), is_number=True),
    column("STANDBYS", "standbys"),
)

SCOPE_COLUMNS = (column("PAUSED TOPICS", "paused_topics", as_text=" ".join),)

LOCK_COLUMNS = (
    column("LOCKED", "locked_count"),
    column("BY OPERATION", "locked_by"),
)

CLIENT_COLUMNS = (
    column("GROUP", "group_id"),
    column("CLIENT", "client_id"),
    column("STATE", "state"),
    column("HOST", "host"),
    column("CLAIMS", "claims_count"),
    column("SILENT", "silent_estimate_ms", as_text=lambda ms: f"~{duration(ms)}"),
    Column("INCARNATION", lambda row: str(row["incarnation"])[:8]),
    column("TOPICS", "topics"),
)
CLIENT_LOG = (column("LOG LAG", "log_lag"), column("LOG READ", "log_read_count"))
CLIENT_DIRECTIVE = column("DIRECTIVE", "directive")
CLIENT_LABELS = Column("LABELS", lambda row: plain(own_labels(row["labels"])))

SETTINGS_COLUMNS = (
    column("SETTING", "name"),
    column("VALUE", "value"),
    column("DEFAULT", "default"),
)
SETTINGS_CHANGE_COLUMNS = (*SETTINGS_COLUMNS, column("BEFORE", "before"))

PAUSE_COLUMNS = (
    column("STATE", "state"),
    column("FROM", "begin_ms", as_text=instant),
    column("UNTIL", "until_ms", as_text=instant),
    column("BY", "person"),
    column("CLIENT", "client_id"),
    column("REASON", "reason"),
    column("OPERATION", "op_id"),
)

PAUSE_TOPICS = (
    column("TOPICS", "topics", as_text=lambda topics: " ".join(topics) or "all"),
)

PAUSE_RENEWED = (column("RENEWED BY", "renewed_by"),)


def _numbers(numbers: Sequence[int]) -> str:
    """Return partitions for people; ``-`` for none."""
    return ",".join(map(str, numbers)) or "-"


PARTITION_COLUMNS = (
    Column("PARTITION", lambda row: str(row["partition"]), is_number=True),
    column("NEXT", "next_offset"),
    column("GENERATION", "generation"),
    column("CLAIMS", "claims_count"),
    column("DIGEST", "digest"),
)

LAYOUT_COLUMNS = (
    PARTITION_COLUMNS[0],
    column("FROM", "from_count"),
    column("TO", "to_count"),
    column("MOVING", "moving_count"),
    column("FINAL", "final_count"),
    column("IMPORTED", "imported_count"),
    Column("DONE", lambda row: _numbers(row["done"])),
    Column("NOT DONE", lambda row: _numbers(row["not_done"])),
)

GROWTH_COLUMNS = (
    column("TOPIC", "topic"),
    column("FROM", "from_count"),
    column("TO", "to_count"),
    column("STATE", "state"),
)

GROWTH_SOURCE_COLUMNS = (
    column("GROUP", "group_id"),
    column("TOPIC", "topic"),
    Column("PARTITION", lambda row: str(row["partition"]), is_number=True),
    column("POSITION", "position"),
    column("END", "end_offset"),
    column("LAG", "lag"),
    Column("WAITING", lambda row: _numbers(row["waiting"])),
)

MOVE_COLUMNS = (
    column("FROM PARTITION", "source"),
    column("TO PARTITION", "target"),
    column("KEYS", "key_count"),
    column("HELD", "held_count"),
)

KEY_COLUMNS = (
    column("GROUP", "group_id"),
    column("TOPIC", "topic"),
    column("PARTITION", "partition"),
)
RESET_COLUMNS = (
    *KEY_COLUMNS,
    column("CHANGE", "change"),
    column("POSITION", "position"),
    column("POSITION AFTER", "position_then"),
    column("GRANTED", "granted"),
    column("GRANTED AFTER", "granted_then"),
    column("REPEATS", "repeats"),
)
FENCED_COLUMNS = (
    column("INCARNATION", "incarnation"),
    column("HOST", "host"),
    column("FENCED", "is_fenced"),
    column("HELD", "held_count"),
)
DIRECTIVE_COLUMNS = (
    column("ACTION", "action"),
    column("CLIENT", "client"),
    column("HOST", "host"),
    Column("GROUP", lambda row: row["group_id"] or "all"),
    column("UNTIL", "until_ms", as_text=instant),
    Column("BY", lambda row: plain(row["person"] or row["client_id"])),
    column("REASON", "reason"),
    column("OPERATION", "op_id"),
)
STILL_HELD_COLUMNS = (
    column("TOPIC", "topic"),
    column("PARTITION", "partition"),
    column("FREE IN", "remaining_ms", as_text=duration),
)
FORGOTTEN_COLUMNS = (*KEY_COLUMNS, column("EPOCH", "epoch"))
SNAPSHOT_COLUMNS = PARTITION_COLUMNS[:2] + PARTITION_COLUMNS[3:]

DIFFERENCE_COLUMNS = (
    Column("PARTITION", lambda row: str(row["partition"]), is_number=True),
    column("WHAT", "what"),
    column("NAME", "name"),
    column("FIELD", "field"),
    column("ONE", "one"),
    column("OTHER", "other"),
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
    # Empty rather than `-`, which would be far to the right of most texts.
    Column("RUN", lambda row: row["run"] or ""),
)


def _number(header: str, key: str) -> Column:
    return Column(header, lambda row: plain(row[key]), is_number=True)


POSITION_COLUMNS = (
    column("TOPIC", "topic"),
    Column("PARTITION", lambda row: str(row["partition"]), is_number=True),
    _number("BEFORE", "before"),
    _number("AFTER", "after"),
    _number("LAG BEFORE", "lag_before"),
    _number("LAG AFTER", "lag_after"),
    column("NOTE", "note"),
)

FINISHED_COLUMNS = (
    column("OPERATION", "op_id"),
    column("OUTCOME", "outcome"),
    column("MOVED", "moved_count"),
)

UNCOVERED_COLUMNS = (
    column("TOPIC", "topic"),
    Column("PARTITION", lambda row: str(row["partition"]), is_number=True),
    column("REASON", "reason"),
)
OPERATION_COLUMNS = (
    column("OPERATION", "op_id"),
    column("STATE", "state"),
    column("LOCKED", "locked_count"),
    column("BY", "person"),
    column("CLIENT", "client_id"),
    column("END WITH", "command"),
)

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
    return log_place(row["coordinating_partition"], row["at_offset"])


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


def record_object(record: "Record", handed_out_ms: int) -> dict[str, Any]:
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
