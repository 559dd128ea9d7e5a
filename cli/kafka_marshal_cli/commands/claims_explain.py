"""``marshal claims explain`` and ``marshal claims history``: the past of one key."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from kafka_marshal import ConfigurationError, CoordinationError, Key, KeyHistory, World
from kafka_marshal.counting import counted
from kafka_marshal.protocol.hashing import RESERVED_TOPICS
from kafka_marshal.protocol.placement import by_partition, place_under
from kafka_marshal_cli import history_presenters, parsing
from kafka_marshal_cli.parsing import Moment
from kafka_marshal_cli.presenters import Row
from kafka_marshal_cli.render import Answer, Section
from kafka_marshal_cli.shared import (
    AT,
    Call,
    Group,
    Partition,
    TopicPartition,
    command,
    note_unknown_group,
    notify,
    wall_ms,
)

app = typer.Typer()

LIMIT_DEFAULT = 100

Limit = Annotated[
    int,
    typer.Option(metavar="N", min=0, help="At most the last N rows; 0 for all."),
]
Since = Annotated[
    str | None,
    typer.Option(
        metavar="OFFSET|TIME",
        help="Only rows from an offset, an ISO time, or a time ago like -1h. Reads "
        "from the newest checkpoint before that.",
    ),
]


def require_exists(call: Call, key: Key) -> None:
    """Refuse an unclaimed key whose data partition does not exist.

    The key passes if the cluster does not answer, or does not show the topic to this
    principal.

    Raises:
        ConfigurationError: The partition does not exist.
    """
    if key.topic in RESERVED_TOPICS:
        return
    try:
        with call.admin() as admin:
            count = admin.partition_count(key.topic)
    except CoordinationError:
        return
    if count is None:
        raise ConfigurationError(
            f"topic {key.topic!r} does not exist, and is not claimed; see: marshal "
            f"claims list --group {key.group_id}",
            setting="TOPIC",
        )
    if key.partition >= count:
        numbers = "0" if count == 1 else f"0 to {count - 1}"
        raise ConfigurationError(
            f"topic {key.topic!r} has {counted(count, 'partition')}, {numbers}, and no "
            f"partition {key.partition}",
            setting="PARTITION",
        )


def _read(call: Call, key: Key, *, at: Moment | None, since: str | None) -> KeyHistory:
    offset: Mapping[int, int] | int | None = None if at is None else at.offset
    if at is not None and at.offsets is not None:
        offset = at.offsets
    first, first_ms = _since(since)
    if at is not None:
        bounds = ((first, at.offset), (first_ms, at.time_ms))
        if any(a is not None and b is not None and a > b for a, b in bounds):
            raise ConfigurationError(
                f"--since is {since}, which is after --at, {at.text}; give an earlier "
                "--since",
                setting="--since",
            )
    found = KeyHistory.open(
        key=key,
        offset=offset,
        time_ms=None if at is None else at.time_ms,
        since_offset=first,
        since_ms=first_ms,
        **call.connection(),
    )
    state = found.world
    if isinstance(offset, Mapping) and state.config and key not in state.keys:
        place = place_under(key, state.config.partition_count)
        if place != state.partition:
            raise ConfigurationError(
                f"--at is {at.text if at else 'now'}, and the key belongs to "
                f"coordinating partition {place}; write {place}:OFFSET, or a time",
                setting="--at",
            )
    if not found.claims_count and not found.refused_count:
        require_exists(call, key)
    return found


def _since(text: str | None) -> tuple[int | None, int | None]:
    """Return offset and time of ``--since``: one of them is None, or both are."""
    if text is None:
        return None, None
    return parsing.moment("--since", text, now_ms=wall_ms())


def _selected(
    rows: Sequence[Row], *, since: str | None, limit: int, ends: tuple[str, str]
) -> list[Row]:
    """Return the last rows since a moment.

    Args:
        rows: All rows, oldest first.
        since: Value of --since.
        limit: Value of --limit.
        ends: Names of the fields with a row's last offset and time; these are None
            while the row is open.
    """
    found, (offset, time_ms) = list(rows), _since(since)
    if since is not None:
        name, first = (ends[1], time_ms) if offset is None else (ends[0], offset)
        found = [row for row in found if row[name] is None or row[name] >= first]
    return found[-limit:] if limit else found


def _show(
    call: Call,
    found: KeyHistory,
    section: Section,
    *,
    at: Moment | None,
    count: int,
) -> None:
    """Answer with the key and the rows shown; ``count`` is the number of all rows."""
    facts = history_presenters.key_facts(found) | {f"{section.name}_count": count}
    call.answer(
        Answer(
            history_presenters.key_as_of(found, at),
            facts,
            (section,),
            history_presenters.shown_facts(facts),
        )
    )
    shown = len(section.rows)
    if shown < count:
        notify(f"{shown} of {count} {section.name} are shown; see --limit and --since")


@app.command("explain", epilog="Example: marshal claims explain billing payments:3")
@command(option_groups=AT)
def explain(
    call: Call,
    *,
    at: Moment | None,
    group: Group,
    topic: TopicPartition,
    partition: Partition = None,
    since: Since = None,
    limit: Limit = LIMIT_DEFAULT,
) -> None:
    """Explain why a partition is owned or free, with the records that made it so.

    The first line is the answer. The events follow, oldest first: claims, releases,
    refusals, and changes by admins. LOG is the coordinating partition and offset of a
    record. Refused records of one client share a row until the next change. If
    retention has deleted the start of the log, the events begin at the first remaining
    checkpoint; with --since, at the newest checkpoint before that moment. The answer
    shows where they begin. --at may also be an offset of the key's coordinating
    partition.

    If a topic has grown, a note names the old partition that a new one waits for.
    """
    key = parsing.key_of(group, topic, partition=partition)
    found = _read(call, key, at=at, since=since)
    rows = [history_presenters.event_row(event) for event in found.events]
    shown = _selected(
        rows, since=since, limit=limit, ends=("last_offset", "last_at_ms")
    )
    section = Section("events", shown, history_presenters.EVENT_COLUMNS)
    _show(call, found, section, at=at, count=found.events_count)
    known = found.world.keys.get(found.key)
    is_new = known is None or (known.owner is None and known.position is None)
    if at is None and is_new:
        world = call.world()
        note_unknown_group(world, group)
        _notify_waiting(world, found.key)


def _notify_waiting(world: World, key: Key) -> None:
    """Note that a new partition of a topic that has grown waits for an old one."""
    from kafka_marshal.admin.growing import waiting

    for each in waiting(by_partition(world.partitions), key.group_id):
        if each.topic != key.topic or key.partition not in each.waiting:
            continue
        end = "its end, which is not known yet"
        if each.end is not None:
            end = f"offset {each.end}"
        notify(
            f"this partition waits until partition {each.partition}, which had its "
            f"keys, is processed to {end}; see: marshal groups grow --topic {key.topic}"
        )


@app.command("history", epilog="Example: marshal claims history billing payments:3")
@command(option_groups=AT)
def history(
    call: Call,
    *,
    at: Moment | None,
    group: Group,
    topic: TopicPartition,
    partition: Partition = None,
    since: Since = None,
    limit: Limit = LIMIT_DEFAULT,
) -> None:
    """List every owner of a partition, from when until when, and why each claim ended.

    AT is an offset in the log and POSITION a position in the data partition: at the
    claim (after FROM), and at its end (after UNTIL). REASON is the reason of the
    release, or of the next owner's claim. The list begins, and --at is written, as
    `marshal claims explain` states.
    """
    key = parsing.key_of(group, topic, partition=partition)
    found = _read(call, key, at=at, since=since)
    rows = [history_presenters.claim_row(interval) for interval in found.claims]
    ends = "until_offset", "until_ms"
    shown = _selected(rows, since=since, limit=limit, ends=ends)
    section = Section("claims", shown, history_presenters.CLAIM_COLUMNS)
    _show(call, found, section, at=at, count=found.claims_count)
    if at is None and not found.claims_count:
        note_unknown_group(call.world(), group)
