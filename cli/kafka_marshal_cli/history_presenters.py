"""Rows and table columns for the history of one key, and for actions of admins."""

from typing import Any

from kafka_marshal import KeyHistory
from kafka_marshal.clock import instant
from kafka_marshal.history.chain import KeyEvent
from kafka_marshal.history.rows import Interval
from kafka_marshal.history.rows import Moment as LogMoment
from kafka_marshal.history.wording import text_of
from kafka_marshal_cli.parsing import Moment
from kafka_marshal_cli.presenters import Row
from kafka_marshal_cli.render import Column, column, log_place, plain


def key_as_of(found: KeyHistory, at: Moment | None) -> Row:
    """Return the state that an answer about one key describes: offset and time."""
    world = found.world
    as_of = {
        "time_ms": found.read_at_ms,
        "offsets": {str(world.partition): world.next_offset},
    }
    return as_of if at is None else {**as_of, "at": at.text}


def key_facts(found: KeyHistory) -> Row:
    """Return the facts about a key: its state, and the reason of that state."""
    world, known = found.world, found.world.keys.get(found.key)
    owner = None if known is None else known.owner
    return {
        "why": found.why,
        **found.key._asdict(),
        "coordinating_partition": world.partition,
        "at_offset": world.next_offset - 1 if world.next_offset else None,
        "at_log_time_ms": world.log_time_ms,
        "state": found.state,
        "owner": None
        if owner is None
        else {"client_id": owner.client_id, "incarnation": owner.incarnation.hex()},
        "token": _token(world.token(found.key)),
        "position": None if known is None else known.position,
        "began_at": found.began_at,
    }


def shown_facts(facts: Row) -> dict[str, str]:
    """Return the texts of facts that people see in another form than in JSON."""
    shown = {}
    if facts["at_log_time_ms"] is not None:
        shown["at_log_time_ms"] = instant(facts["at_log_time_ms"])
    if facts["owner"] is not None:
        shown["owner"] = facts["owner"]["client_id"]
    if facts["began_at"] is None:
        shown["began_at"] = "the log's start"
    else:
        shown["began_at"] = (
            f"the checkpoint at offset {facts['began_at'] - 1}; earlier records are "
            "not shown"
        )
    return shown


def _token(token: object) -> str | None:
    return None if token is None else str(token)


def event_row(event: KeyEvent) -> Row:
    """Return one event of a key."""
    is_one = event.last_offset is None
    return {
        "what": event.what,
        "coordinating_partition": event.partition,
        "offset": event.offset,
        "at_ms": event.at_ms,
        "record": event.record,
        "client_id": event.client_id,
        "incarnation": None if event.incarnation is None else event.incarnation.hex(),
        "person": event.person,
        "reason": event.reason,
        "owner_before": event.owner,
        "token": _token(event.token),
        "position": event.position,
        "position_before": event.before,
        "until_ms": event.until_ms,
        "op_id": None if event.op_id is None else event.op_id.hex(),
        "successor": event.successor,
        "records_count": event.count,
        "renewed_by": event.renewed_by,
        "last_offset": event.offset if is_one else event.last_offset,
        "last_at_ms": event.at_ms if is_one else event.last_ms,
        "text": text_of(event),
    }


def claim_row(interval: Interval) -> Row:
    """Return one claim of a key: owner, token, begin, end, and how it ended."""
    return {
        "owner": {
            "client_id": interval.client_id,
            "incarnation": interval.incarnation.hex(),
        },
        "token": str(interval.token),
        "effect": interval.effect,
        "why": interval.why,
        **_moment("from", interval.start),
        "from_position": interval.start_position,
        **_moment("until", interval.end),
        "until_position": interval.position,
        "renewals_count": interval.beats_count,
        "renewed_offset": interval.renewed_offset,
        "ending": interval.ending,
        "ended_by": interval.ended_by,
        "reason": interval.reason,
    }


def _moment(name: str, moment: LogMoment | None) -> Row:
    return {
        f"{name}_offset": None if moment is None else moment.offset,
        f"{name}_ms": None if moment is None else moment.append_ms,
    }


# --- columns of the tables


def _place(row: Any) -> str:  # noqa: ANN401 - a JSON object
    return log_place(row["coordinating_partition"], row["offset"])


def _ending(row: Any) -> str:  # noqa: ANN401 - a JSON object
    by = row["ended_by"]
    is_own = by in {None, row["owner"]["client_id"]}
    return str(row["ending"]) + ("" if is_own else f" (by {by})")


EVENT_COLUMNS = (
    Column("LOG", _place),
    column("AT", "at_ms", as_text=instant),
    column("WHAT", "what"),
    column("TEXT", "text"),
)
ACTION_COLUMNS = (
    column("AT", "at_ms", as_text=instant),
    Column("LOG", _place),
    column("ACTION", "kind"),
    column("GROUP", "group_id"),
    Column("BY", lambda row: plain(row["person"] or row["client_id"])),
    column("REASON", "reason"),
    column("OUTCOME", "text"),
    # The id that `groups undo` and `groups resume --operation` take.
    column("OPERATION", "op_id"),
)
CLAIM_COLUMNS = (
    Column("OWNER", lambda row: str(row["owner"]["client_id"])),
    column("TOKEN", "token"),
    column("FROM", "from_ms", as_text=instant),
    column("AT", "from_offset"),
    column("POSITION", "from_position"),
    column("WHY", "why"),
    column("UNTIL", "until_ms", as_text=instant),
    column("AT", "until_offset"),
    column("POSITION", "until_position"),
    Column("ENDING", _ending),
    column("REASON", "reason"),
)
