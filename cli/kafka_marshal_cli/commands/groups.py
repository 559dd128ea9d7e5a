"""``marshal groups``: describe, pause, resume, reset and adopt groups."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kafka_marshal import (
    ClaimRejected,
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
)
from kafka_marshal.clock import instant
from kafka_marshal.counting import counted
from kafka_marshal.protocol.placement import by_partition
from kafka_marshal.protocol.settings import TUNABLES
from kafka_marshal_cli import parsing, presenters
from kafka_marshal_cli.lazy import LazyCommand, lazy_group
from kafka_marshal_cli.parsing import Moment
from kafka_marshal_cli.render import Answer, Section
from kafka_marshal_cli.shared import (
    AT,
    Call,
    Execute,
    Group,
    Reason,
    WriteNothing,
    command,
    note_clock_ahead,
    note_unknown_group,
    notify,
    unknown_group,
    wall_ms,
)

if TYPE_CHECKING:
    from kafka_marshal import Admin, World
    from kafka_marshal.admin.pausing import PauseResult

app = typer.Typer(
    no_args_is_help=True,
    cls=lazy_group(
        LazyCommand(
            "reset",
            "groups_reset",
            help="Set a running group to new positions, all partitions or none.",
        ),
        LazyCommand(
            "undo",
            "groups_reset",
            help="Set a group back to where it was before a reset.",
        ),
        LazyCommand(
            "finish",
            "groups_reset",
            help="Complete or abort a reset whose command died, as the log decided.",
        ),
        LazyCommand(
            "history",
            "groups_history",
            help="List what admins did: who, when, why, and what became of it.",
        ),
        LazyCommand(
            "grow",
            "groups_grow",
            help="Add partitions to a keyed data topic; groups keep the order of each "
            "key.",
        ),
    ),
)


For = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="DURATION",
        help="Length of the pause, like 10m; renewed while this command runs.",
    ),
]
Until = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="End of the pause instead: a time like 2026-01-31T12:00:00Z, or 2h from "
        "now.",
    ),
]
Begin = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Start of the pause, like --until, up to 30 days ahead; by default now.",
    ),
]

DEFAULT = "default"


@app.command("list", epilog="Example: marshal groups list -o json")
@command(option_groups=AT)
def list_groups(call: Call, *, at: Moment | None) -> None:
    """List every group that the log knows, with its pause if it has one.

    LOCKED counts partitions that an open reset has locked.
    """
    world = call.formatted_world(at, has_members=True)
    rows = presenters.group_rows(world)
    section = Section("groups", rows, presenters.group_columns(rows))
    call.answer(Answer(presenters.as_of(world, at), {}, (section,)))


@app.command("describe", epilog="Example: marshal groups describe billing")
@command(option_groups=AT)
def describe(call: Call, group: Group, *, at: Moment | None) -> None:
    """Show a group's settings, pauses, directives, resets, members and claims.

    AGE is by log time, which advances only with appends; AGE NOW adds the time since. A
    member is active, leaving, left, silent (for more than two heartbeat intervals),
    fenced (by an admin) or unregistered (it owns claims, and has not announced itself).
    DIRECTIVES drain or cordon a client, or all clients on a host. HANDOFFS are
    partitions offered to a successor, which warms up until UNTIL by log time at most.
    STANDBYS take over a partition if its owner dies, in this order. UNCOVERED are
    claimable partitions that no live member can claim: the group has `no members`, no
    member subscribes to the topic (`topics`), or the members that do are full
    (`limits`). WAITING are new partitions of topics that have grown, in the row of the
    old partition that they wait for. LOG-END-OFFSET and LAG are looked up in the
    cluster; `-` means unknown. With --at these columns and AGE NOW are omitted, and
    silent clients may be missing.
    """
    from kafka_marshal.views.plan import standby_rows

    world = call.formatted_world(at, has_members=True)
    pauses = world.pauses(group)
    operations = presenters.operation_rows(world, group_id=group)
    members = presenters.member_rows(world, group_id=group)
    claims = presenters.claim_rows(world, group_id=group)
    settings = presenters.settings_rows(world.settings(group))
    if not (pauses or members or claims or settings):
        raise unknown_group(group)
    claims = call.with_lag(claims) if at is None else presenters.with_lag(claims, {})
    columns = presenters.claim_columns(
        rows=claims, is_past=world.is_past, has_group=False
    )
    uncovered = _uncovered(call, world, group)
    directives = world.directives(group)
    columns_of_members = presenters.client_columns(members, has_group=False)
    sections = (
        Section("settings", settings, presenters.SETTINGS_COLUMNS),
        Section("pauses", pauses, presenters.pause_columns(pauses)),
        Section("directives", directives, presenters.DIRECTIVE_COLUMNS),
        Section("operations", operations, presenters.OPERATION_COLUMNS),
        Section("members", members, columns_of_members, presenters.CLIENTS_LESS),
        Section("handoffs", world.handoffs(group), presenters.HANDOFF_COLUMNS),
        Section("standbys", standby_rows(world, group), presenters.STANDBY_COLUMNS),
        Section("uncovered", uncovered, presenters.UNCOVERED_COLUMNS),
        *_waiting(world, group),
        Section("claims", claims, columns, presenters.CLAIMS_LESS),
    )
    call.answer(Answer(presenters.as_of(world, at), {"group_id": group}, sections))


def _waiting(world: "World", group: str) -> list[Section]:
    """Return a section of old partitions that new ones wait for; [] without any."""
    from kafka_marshal.admin.growing import waiting

    rows = presenters.growth_source_rows(waiting(by_partition(world.partitions), group))
    _, *columns = presenters.GROWTH_SOURCE_COLUMNS
    return [Section("waiting", rows, columns)] if rows else []


def _uncovered(call: Call, world: "World", group: str) -> list[presenters.Row]:
    """Return the keys that no member can claim.

    For the past, partition counts are guessed from the keys that were ever claimed.
    """
    from kafka_marshal.protocol.plans import guessed_counts
    from kafka_marshal.views.plan_simulation import closed_topics, uncovered_now

    topics = closed_topics(world, group)
    counts: dict[str, int] = {}
    if world.is_past:
        counts = guessed_counts(key.topic_partition for key, _ in world.claims(group))
    elif topics:
        counts = call.partition_counts(topics)
    found = uncovered_now(world, group, partition_counts=counts)
    return presenters.uncovered_rows(found)


# `release` is an alias of `pause`, which writes the record ReleaseGroup.
@app.command("release", hidden=True)
@app.command(
    "pause",
    epilog="Example: marshal groups pause billing --for 10m --reason deploy --wait",
)
@command(writes=True)
def pause(
    call: Call,
    group: Group,
    *,
    for_: For = None,
    until: Until = None,
    begin: Begin = None,
    topics: Annotated[
        list[str] | None,
        typer.Option(
            "--topic",
            metavar="TOPIC[:P,P...]",
            help="Only this topic, or some partitions of it. Repeatable.",
        ),
    ] = None,
    reason: Reason = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait until no client holds a claim: up to --timeout if given, else "
            "as long as the pause.",
        ),
    ] = False,
    dry_run: WriteNothing = False,
) -> None:
    """Pause a group or some topics: members finish records and release claims."""
    now_ms = wall_ms()
    for_ms, until_ms = _length(for_, until=until, now_ms=now_ms)
    begin_ms = None
    if begin is not None:
        begin_ms = parsing.upcoming_ms("--begin", begin, now_ms=now_ms)
    wait_ms = 0
    if wait:
        length_ms = for_ms or (until_ms or 0) - now_ms
        wait_ms = call.timeout_ms if call.is_timeout_given else max(1, length_ms)
    with call.admin() as admin:
        result = admin.pause_group(
            group,
            for_ms=for_ms,
            until_ms=until_ms,
            begin_ms=begin_ms,
            topics=topics or None,
            reason=reason,
            wait_ms=wait_ms,
            dry_run=dry_run,
        )
        _note_unknown_topics(admin, result.topics)
    held = presenters.key_texts(result.held)
    world = call.world()
    _answer_pause(call, world, result, group=group, reason=reason, dry_run=dry_run)
    if dry_run:
        notify(f"nothing was written; {counted(len(held), 'claim')} would be released")
        return
    if for_ms is not None and begin_ms is None:
        note_clock_ahead(world, written_ms=result.until_ms - for_ms)
    if wait and held:
        raise DeadlineExceeded(
            f"group {group!r} is paused, but {', '.join(held)} was not released within "
            f"{wait_ms} ms; see: marshal groups describe {group}"
        )
    if held and result.begin_ms is None:
        text = counted(len(held), "claim is", many="claims are")
        notify(f"{text} not released yet; --wait waits for that")


def _answer_pause(
    call: Call,
    world: "World",
    result: "PauseResult",
    *,
    group: str,
    reason: str | None,
    dry_run: bool,
) -> None:
    found = {
        "group_id": group,
        "op_id": result.op_id or None,
        "begin_ms": result.begin_ms,
        "until_ms": result.until_ms,
        "topics": list(result.topics),
        "reason": reason,
        "held": presenters.key_texts(result.held),
        "is_executed": not dry_run,
    }
    shown = {"until_ms": instant(result.until_ms)}
    if result.begin_ms is not None:
        shown["begin_ms"] = instant(result.begin_ms)
    call.answer(Answer(presenters.as_of(world), found, (), shown))
    note_unknown_group(world, group)


def _note_unknown_topics(admin: "Admin", scope: Sequence[str]) -> None:
    """Notify if paused topics or partitions do not exist: they may be misspelt."""
    for text in scope:
        topic, _, numbers = text.partition(":")
        try:
            count = admin.partition_count(topic) or 0
        except CoordinationError:
            continue  # no answer, or this principal lacks DESCRIBE
        if not count:
            notify(f"topic {topic!r} does not exist; its pause has no effect now")
        elif numbers and max(map(int, numbers.split(","))) >= count:
            notify(
                f"topic {topic!r} has the partitions 0 to {count - 1}; the pause of "
                f"{text} has no effect on others"
            )


def _length(
    for_: str | None, *, until: str | None, now_ms: int
) -> tuple[int | None, int | None]:
    """Return the length of a pause and its end; one of them is None."""
    if (for_ is None) == (until is None):
        raise ConfigurationError(
            "give either --for, the length of the pause, or --until, its end",
            setting="--for",
        )
    if until is not None:
        return None, parsing.upcoming_ms("--until", until, now_ms=now_ms)
    return parsing.duration_ms("--for", for_ or "", is_bare_ms=False), None


@app.command("resume", epilog="Example: marshal groups resume billing --reason done")
@command(writes=True)
def resume(
    call: Call,
    group: Group,
    *,
    operation: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Only this pause, even a scheduled one."),
    ] = None,
    reason: Reason = None,
    dry_run: WriteNothing = False,
) -> None:
    """End a group's pauses, or one of them; members continue where they were.

    If the group is not paused and has only one scheduled pause, that one is canceled.
    """
    with call.admin() as admin:
        count = admin.resume_group(
            group, operation=operation, reason=reason, dry_run=dry_run
        )
    world = call.world()
    found = {
        "group_id": group,
        "partitions_count": count,
        "reason": reason,
        "is_executed": not dry_run,
    }
    call.answer(Answer(presenters.as_of(world), found))
    note_unknown_group(world, group)
    if dry_run:
        notify(
            f"nothing was written; pauses would end in {count} coordinating partitions"
        )


def _tunable(name: str, what: str) -> Any:  # noqa: ANN401 - what typer returns
    text = f"{what}; {TUNABLES[name].default} by default."
    return typer.Option("--" + name.replace("_", "-"), metavar="N", help=text)


Policy = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="`planner`: members follow plans that one of them writes; `fair`, the "
        "default: each member follows its consumer's policy.",
    ),
]
DebounceMs = Annotated[
    str | None,
    _tunable(
        "debounce_ms",
        "Milliseconds that members must stay the same before partitions move",
    ),
]
HandoffMs = Annotated[
    str | None,
    _tunable("handoff_ms", "Milliseconds that a successor may take to warm up"),
]
HandoffsMax = Annotated[
    str | None,
    _tunable(
        "handoffs_max",
        "Maximum partitions that a member offers, or warms up for, at a time",
    ),
]
GraceMs = Annotated[
    str | None,
    _tunable(
        "grace_ms",
        "Milliseconds that a partition waits for a member that restarts, under "
        "`planner`",
    ),
]


def _changes(
    policy: str | None, handoffs_max: str | None, *, times: Mapping[str, str | None]
) -> dict[str, int | str | None]:
    """Return the settings to change; those in ``times`` are durations."""
    changes: dict[str, int | str | None] = {}
    if policy is not None:
        changes["policy"] = None if policy == DEFAULT else policy
    for name, text in times.items():
        if text is not None:
            option = "--" + name.replace("_", "-")
            is_default = text == DEFAULT
            changes[name] = None if is_default else parsing.duration_ms(option, text)
    if handoffs_max is not None:
        is_default, option = handoffs_max == DEFAULT, "--handoffs-max"
        number = None if is_default else parsing.whole_number(option, handoffs_max)
        changes["handoffs_max"] = number
    if not changes:
        raise ConfigurationError(
            "give a setting to change, like --handoff-ms 600000", setting="--handoff-ms"
        )
    return changes


@app.command(
    "set",
    epilog="Example: marshal groups set billing --handoff-ms 600000 --execute",
)
@command(writes=True)
def set_(
    call: Call,
    group: Group,
    *,
    policy: Policy = None,
    debounce_ms: DebounceMs = None,
    handoff_ms: HandoffMs = None,
    handoffs_max: HandoffsMax = None,
    grace_ms: GraceMs = None,
    reason: Reason = None,
    execute: Execute = False,
) -> None:
    """Change how a group's members share and hand off partitions.

    Settings that are not given stay. The value `default` restores a default.
    """
    changes = _changes(
        policy,
        handoffs_max,
        times={
            "debounce_ms": debounce_ms,
            "handoff_ms": handoff_ms,
            "grace_ms": grace_ms,
        },
    )
    with call.admin() as admin:
        change = admin.set_group(group, changes, reason=reason, execute=execute)
    found = {
        "group_id": group,
        "generation": change.before.generation,
        "generation_then": change.after.generation,
        "is_changed": change.is_changed,
        "is_executed": execute and change.is_changed,
    }
    rows = presenters.settings_rows(change.after, before=change.before)
    sections = (Section("settings", rows, presenters.SETTINGS_CHANGE_COLUMNS),)
    world = call.world()
    call.answer(Answer(presenters.as_of(world), found, sections))
    note_unknown_group(world, group)
    if not change.is_changed:
        notify("nothing was written; the group has these settings already")
    elif not execute:
        notify("nothing was written; --execute writes it")


@app.command(
    "adopt",
    epilog="Example: marshal groups adopt billing --from-group billing-v1 --execute",
)
@command(writes=True)
def adopt(
    call: Call,
    group: Group,
    *,
    from_group: Annotated[
        str | None,
        typer.Option(
            metavar="GROUP",
            help="Consumer group to take over from; by default the same name.",
        ),
    ] = None,
    from_topic: Annotated[
        str | None,
        typer.Option(
            metavar="TOPIC",
            help="Coordination topic of the Go original; its heartbeats count, too.",
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

    Stop the old consumers first. A position that the coordination log already has is
    kept. `marshal claims explain` shows who adopted a partition.
    """
    from kafka_marshal_cli import adoption

    connection = call.connection()
    timeout_ms = connection.pop("timeout_ms")
    plan = adoption.plan_adoption(
        connection,
        group_id=group,
        from_group=from_group,
        from_topic=from_topic,
        topics=topics or (),
        timeout_ms=timeout_ms,
    )
    shown = plan
    refusal: ClaimRejected | None = None
    if execute:
        try:
            shown = adoption.adopt(
                connection, plan, person=call.person, timeout_ms=timeout_ms
            )
        except ClaimRejected as error:
            refusal = error
    found = presenters.adoption_facts(shown, is_executed=execute and refusal is None)
    rows = presenters.adoption_rows(shown)
    section = Section("partitions", rows, presenters.ADOPTION_COLUMNS)
    call.answer(Answer(presenters.as_of(call.world()), found, (section,)))
    if refusal is not None:
        raise refusal
    if not execute and plan.is_source_active:
        notify(
            f"nothing was written; stop the consumers of group {plan.from_group!r}, "
            "which are active, before --execute"
        )
    elif not execute:
        notify("nothing was written; --execute sets the positions")
