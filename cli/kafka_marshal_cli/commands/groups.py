"""``marshal groups``: describe, pause, resume and adopt groups."""

from typing import Annotated

import typer

from kafka_marshal import ClaimRejected, DeadlineExceeded
from kafka_marshal_cli import parsing, presenters
from kafka_marshal_cli.adoption import adopt as adopt_group
from kafka_marshal_cli.adoption import plan_adoption
from kafka_marshal_cli.render import Answer, Section, instant
from kafka_marshal_cli.shared import Call, command, notify

app = typer.Typer(help="Groups: describe, pause and adopt them.", no_args_is_help=True)

Group = Annotated[str, typer.Argument(metavar="GROUP", help="The group.")]
Reason = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Reason, stored in the log for people."),
]

Execute = Annotated[
    bool,
    typer.Option(
        "--execute/--dry-run",
        help="Set the positions, or only show what would be set.",
    ),
]


@app.command("list", epilog="Example: marshal groups list -o json")
@command()
def list_groups(call: Call) -> None:
    """List every group that the log knows, with its pause if it has one."""
    world = call.formatted_world()
    section = Section("groups", presenters.group_rows(world), presenters.GROUP_COLUMNS)
    call.answer(Answer(presenters.as_of(world), {}, (section,)))


@app.command("describe", epilog="Example: marshal groups describe billing")
@command()
def describe(call: Call, group: Group) -> None:
    """Show a group's pause, members and claims.

    AGE is by log time, which advances with appends only; AGE NOW adds the time since.
    A member is active, leaving, left, fenced (silent for more than two heartbeat
    intervals) or unregistered (it owns claims, and has not announced itself).
    LOG-END-OFFSET and LAG come from the cluster, `-` where they are unknown.
    """
    world = call.formatted_world()
    pauses = presenters.pause_rows(world, group_id=group)
    members = presenters.member_rows(world, group_id=group)
    claims = presenters.claim_rows(world, group_id=group)
    if not (pauses or members or claims):
        raise ClaimRejected(
            f"group {group!r} is not in the log; see: marshal groups list",
            reason="unknown_group",
        )
    sections = (
        Section("pauses", pauses, presenters.PAUSE_COLUMNS),
        Section("members", members, presenters.MEMBER_COLUMNS),
        Section("claims", call.with_lag(claims), presenters.GROUP_CLAIM_COLUMNS),
    )
    call.answer(Answer(presenters.as_of(world), {"group_id": group}, sections))


# An alias: the record that it writes is named ReleaseGroup.
@app.command("release", hidden=True)
@app.command(
    "pause",
    epilog="Example: marshal groups pause billing --for 10m --reason deploy --wait",
)
@command()
def pause(
    call: Call,
    group: Group,
    *,
    for_: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="DURATION",
            help="Length of the pause, like 10m. Renewed as long as this command runs.",
        ),
    ],
    reason: Reason = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait until no client of the group holds a claim: up to --timeout "
            "if given, else as long as the pause.",
        ),
    ] = False,
) -> None:
    """Pause a group: members finish their records and release their claims."""
    for_ms = parsing.duration_ms("--for", for_, is_bare_ms=False)
    wait_ms = 0
    if wait:
        wait_ms = call.timeout_ms if call.is_timeout_given else for_ms
    with call.admin() as admin:
        result = admin.pause_group(group, for_ms=for_ms, reason=reason, wait_ms=wait_ms)
    world = call.world()
    held = presenters.key_texts(result.held)
    found = {
        "group_id": group,
        "op_id": result.op_id,
        "until_ms": result.until_ms,
        "reason": reason,
        "held": held,
    }
    shown = {"until_ms": instant(result.until_ms)}
    call.answer(Answer(presenters.as_of(world), found, (), shown))
    if wait and held:
        raise DeadlineExceeded(
            f"group {group!r} is paused, but {', '.join(held)} was not released within "
            f"{wait_ms} ms; see: marshal groups describe {group}"
        )
    if held:
        notify(f"{len(held)} claims are not released yet; --wait waits for that")


@app.command("resume", epilog="Example: marshal groups resume billing --reason done")
@command()
def resume(call: Call, group: Group, *, reason: Reason = None) -> None:
    """End a group's pause; its members continue where they were."""
    with call.admin() as admin:
        count = admin.resume_group(group, reason=reason)
    found = {"group_id": group, "partitions_count": count, "reason": reason}
    call.answer(Answer(presenters.as_of(call.world()), found))


@app.command(
    "adopt",
    epilog="Example: marshal groups adopt billing --from-group billing-v1 --execute",
)
@command()
def adopt(
    call: Call,
    group: Group,
    *,
    from_group: Annotated[
        str | None,
        typer.Option(
            metavar="GROUP",
            help="Consumer group in Kafka to take over from; by default the one of "
            "the same name.",
        ),
    ] = None,
    from_topic: Annotated[
        str | None,
        typer.Option(
            metavar="TOPIC",
            help="Coordination topic of the Go original, whose last heartbeats count "
            "besides the committed offsets.",
        ),
    ] = None,
    topics: Annotated[
        list[str] | None,
        typer.Option(
            "--topic", metavar="TOPIC", help="Only this data topic. Repeatable."
        ),
    ] = None,
    execute: Execute = False,
) -> None:
    """Start a group where a consumer group of Kafka left off.

    Without --execute nothing is written. The consumers of the old group must be
    stopped; a position that the coordination log already has is kept.
    """
    plan = plan_adoption(
        call.bootstrap_servers,
        group_id=group,
        from_group=from_group,
        from_topic=from_topic,
        topics=topics or (),
        coordination_topic=call.coordination_topic,
        options=call.options,
        transport=call.transport,
        timeout_ms=call.timeout_ms,
    )
    shown = plan
    refusal: ClaimRejected | None = None
    if execute:
        try:
            shown = adopt_group(
                call.bootstrap_servers,
                plan=plan,
                coordination_topic=call.coordination_topic,
                options=call.options,
                transport=call.transport,
                timeout_ms=call.timeout_ms,
            )
        except ClaimRejected as error:
            refusal = error
    found = presenters.adoption_facts(shown, is_executed=execute and refusal is None)
    section = Section(
        "partitions", presenters.adoption_rows(shown), presenters.ADOPTION_COLUMNS
    )
    call.answer(Answer(presenters.as_of(call.world()), found, (section,)))
    if refusal is not None:
        raise refusal
    if not execute:
        notify("nothing was written; --execute sets the positions")
