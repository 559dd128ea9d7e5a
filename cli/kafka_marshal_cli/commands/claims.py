"""``marshal claims``: the owners of partitions."""

from typing import Annotated

import typer

from kafka_marshal import ConfigurationError, CoordinationError, Key
from kafka_marshal.protocol.hashing import RESERVED_TOPICS
from kafka_marshal_cli import parsing, presenters
from kafka_marshal_cli.commands import claims_watch
from kafka_marshal_cli.render import Answer, Section, duration, instant
from kafka_marshal_cli.shared import Call, command, notify, wall_ms

app = typer.Typer(
    help="Claims: which client holds which partition.", no_args_is_help=True
)
app.command("watch", epilog="Example: marshal claims watch --group billing")(
    claims_watch.watch
)


@app.command("list", epilog="Example: marshal claims list --group billing")
@command()
def list_claims(
    call: Call,
    *,
    group: Annotated[
        str | None, typer.Option(metavar="GROUP", help="Only this group.")
    ] = None,
    topic: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="Only this topic.")
    ] = None,
) -> None:
    """List every claim with its owner, age, position, lag, token and reason.

    LOG-END-OFFSET and LAG come from the cluster, `-` where they are unknown.
    """
    world = call.formatted_world()
    rows = call.with_lag(presenters.claim_rows(world, group_id=group, topic=topic))
    section = Section("claims", rows, presenters.CLAIM_REASON_COLUMNS)
    call.answer(Answer(presenters.as_of(world), {}, (section,)))


def _require_exists(call: Call, key: Key) -> None:
    """Refuse an unclaimed key whose data partition does not exist.

    The check passes if the cluster does not answer or does not show the topic.

    Raises:
        ConfigurationError: There is no such partition.
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
        raise ConfigurationError(
            f"topic {key.topic!r} has {count} partitions, 0 to {count - 1}, and no "
            f"partition {key.partition}",
            setting="PARTITION",
        )


@app.command(
    "who",
    epilog="Example: marshal claims who billing payments 3 --at 2026-01-31T12:00:00Z",
)
@command()
def who(
    call: Call,
    *,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The group.")],
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The data topic.")],
    partition: Annotated[
        int, typer.Argument(metavar="PARTITION", min=0, help="The data partition.")
    ],
    at: Annotated[
        str | None,
        typer.Option(
            metavar="OFFSET|TIME",
            help="As of an offset of the key's coordinating partition (that record "
            "included), of an ISO time, or of a time ago like -5m.",
        ),
    ] = None,
) -> None:
    """Show the owner of one partition, now or in the past.

    If retention has deleted the start of the log, the past is known from the first
    checkpoint on; for earlier moments the command ends with 1.
    """
    key = Key(group, topic, partition)
    world = call.world()
    if not any(key in state.keys for state in world.partitions):
        _require_exists(call, key)
    place = presenters.partition_of(key, world.config().partition_count)
    if at is not None:
        offset, time_ms = parsing.moment("--at", at, now_ms=wall_ms())
        end = world.partitions[place].next_offset
        if offset is not None and offset >= end:
            raise ConfigurationError(
                f"--at is {offset}, and coordinating partition {place} ends at {end}; "
                "see: marshal topic info",
                setting="--at",
            )
        offsets = None if offset is None else {place: offset}
        world = call.world(offset=offsets, time_ms=time_ms)
        world.require_known([place])
    state = world.partitions[place]
    found = {
        **key._asdict(),
        "coordinating_partition": place,
        "at_offset": state.next_offset - 1 if state.next_offset else None,
        "at_log_time_ms": state.log_time_ms,
        "is_claimed": key in state.keys,
    }
    shown = {}
    if state.log_time_ms is not None:
        shown["at_log_time_ms"] = instant(state.log_time_ms)
    if key in state.keys:
        row = presenters.claim_row(world, key, state=state)
        found |= row
        shown["why"] = presenters.why_text(row)
        if row["owner"] is not None:
            shown["owner"] = row["owner"]["client_id"]
            for name in ("age_ms", "age_estimate_ms"):
                shown[name] = duration(row[name])
    else:
        found["owner"] = None
        shown["owner"] = "nobody, the partition was not claimed then"
    call.answer(Answer(presenters.as_of(world), found, (), shown))


@app.command(
    "forget", epilog="Example: marshal claims forget billing --topic gone --execute"
)
@command()
def forget(
    call: Call,
    *,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The group.")],
    topic: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="Only this data topic.")
    ] = None,
    execute: Annotated[
        bool,
        typer.Option("--execute/--dry-run", help="Make the change, or only show it."),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also for topics that exist; their records are repeated."
        ),
    ] = False,
) -> None:
    """Drop claims of a group without an owner, with positions and granted offsets.

    For topics that were deleted: granted offsets (at most once) stay for ever
    otherwise. Claims with an owner stay. Without --execute nothing is written.
    """
    with call.admin() as admin:
        plan = admin.forget_keys(
            group, topic=topic, execute=execute, allow_existing=force
        )
    rows = [{**key._asdict(), "epoch": epoch} for key, epoch in plan.keys]
    found = {
        "group_id": group,
        "is_executed": execute,
        "held_count": len(plan.held),
        "existing_topics": list(plan.existing),
    }
    shown = {"existing_topics": ", ".join(plan.existing) or "none"}
    as_of = {"time_ms": wall_ms(), "offsets": {}}
    sections = (Section("forgotten", rows, presenters.FORGOTTEN_COLUMNS),)
    call.answer(Answer(as_of, found, sections, shown))
    if plan.existing:
        notify(
            f"marshal: kept claims of topics that exist: {', '.join(plan.existing)}; "
            "--force drops these as well, and their records are repeated"
        )
    if not execute:
        notify("nothing was written; --execute drops them")
