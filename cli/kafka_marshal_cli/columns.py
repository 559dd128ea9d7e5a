"""Which columns the tables of the commands have."""

from typing import Any

from kafka_marshal_cli.render import NOTHING, Column, column, duration, instant, plain


def _owner(row: Any) -> str:  # noqa: ANN401 - a JSON object
    owner = row["owner"]
    return NOTHING if owner is None else str(owner["client_id"])


def _age(row: Any) -> str:  # noqa: ANN401 - a JSON object
    """Return the estimated age; a tilde says that it is one."""
    age_ms, estimate_ms = row["age_ms"], row["age_estimate_ms"]
    return NOTHING if age_ms is None else f"~{duration(estimate_ms)}"


def why_text(row: Any) -> str:  # noqa: ANN401 - a JSON object
    """Return why the key is where it is, and who let it go where nobody has it."""
    why = row["why"]
    if why is None:
        return NOTHING
    reason = why["reason"] or NOTHING
    is_free = why["change"] == "released"
    return f"{reason} (released by {why['client_id']})" if is_free else str(reason)


CLAIMS = (
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
CLAIMS_OF_A_GROUP = CLAIMS[1:]
CLAIMS_WITH_WHY = (*CLAIMS, Column("WHY", why_text))

GROUPS = (
    column("GROUP", "group_id"),
    column("MEMBERS", "members_count"),
    column("OWNED", "owned_count"),
    column("CLAIMS", "claims_count"),
    column("PAUSED UNTIL", "paused_until_ms", as_text=instant),
    column("BY", "paused_by"),
    column("REASON", "pause_reason"),
)

CLIENTS = (
    column("GROUP", "group_id"),
    column("CLIENT", "client_id"),
    column("STATE", "state"),
    column("HOST", "host"),
    column("CLAIMS", "claims_count"),
    column("SILENT", "silent_estimate_ms", as_text=lambda ms: f"~{duration(ms)}"),
    Column("INCARNATION", lambda row: str(row["incarnation"])[:8]),
    Column("TOPICS", lambda row: ", ".join(row["topics"]) or NOTHING),
)
MEMBERS = CLIENTS[1:]

PAUSES = (
    column("UNTIL", "until_ms", as_text=instant),
    column("BY", "client_id"),
    column("REASON", "reason"),
    column("OPERATION", "op_id"),
)

PARTITIONS = (
    Column("PARTITION", lambda row: str(row["partition"]), is_number=True),
    column("NEXT", "next_offset"),
    column("GENERATION", "generation"),
    column("CLAIMS", "claims_count"),
    column("DIGEST", "digest"),
)

RESET = (
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
FORGOTTEN = (
    column("GROUP", "group_id"),
    column("TOPIC", "topic"),
    column("PARTITION", "partition"),
    column("EPOCH", "epoch"),
)
KEPT = (PARTITIONS[0], PARTITIONS[1], PARTITIONS[3], PARTITIONS[4])

DIFFERENCES = (
    Column("PARTITION", lambda row: str(row["partition"]), is_number=True),
    column("WHAT", "what"),
    column("NAME", "name"),
    column("FIELD", "field"),
    column("ONE", "one", as_text=str),
    column("OTHER", "other", as_text=str),
)

VERIFIED = (
    Column("PARTITION", lambda row: str(row["partition"]), is_number=True),
    column("RESULT", "result"),
    column("FROM", "begin_offset"),
    column("ENTRIES", "entries_count"),
    column("NEXT", "next_offset"),
    column("SNAPSHOT AT", "snapshot_offset"),
    column("UNDECODABLE", "undecodable_count"),
    column("DIGEST", "digest"),
)

CHECKS = (
    column("CHECK", "check"),
    column("RESULT", "result"),
    column("FOUND", "found"),
    column("RUN", "run"),
)


def _number(header: str, key: str) -> Column:
    return Column(header, lambda row: plain(row[key]), is_number=True)


ADOPTION = (
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


LOSSES = (
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
