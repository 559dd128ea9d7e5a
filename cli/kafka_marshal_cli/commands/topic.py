"""``marshal topic``: format, check and change the coordination topic."""

import secrets
from typing import Annotated, Any

import attrs
import typer

from kafka_marshal import LogUnreadable, TopicMisconfigured, World, WrongCluster
from kafka_marshal.admin.formatting import (
    HEARTBEAT_MS_DEFAULT,
    PARTITIONS_DEFAULT,
    Format,
    TopicReport,
)
from kafka_marshal.admin.resizing import ResizePlan, wait_text
from kafka_marshal.clock import duration
from kafka_marshal.defaults import format_command
from kafka_marshal.protocol.layout import is_final, moving_keys
from kafka_marshal.protocol.layout_reading import LayoutProgress, progress_of, read
from kafka_marshal.protocol.layout_steps import next_steps
from kafka_marshal.protocol.placement import by_partition, leading
from kafka_marshal.protocol.records import LIMIT_DEFAULTS, Config
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.text import record_to_object
from kafka_marshal_cli import parsing, presenters
from kafka_marshal_cli.exits import ExitCode
from kafka_marshal_cli.parsing import Moment
from kafka_marshal_cli.render import Answer, Section, plain
from kafka_marshal_cli.shared import AT, Call, Execute, command, emit, notify

app = typer.Typer(no_args_is_help=True)


@app.command(
    "format",
    epilog="Example: marshal topic format --partitions 8 --heartbeat-interval 60s",
)
@command(writes=True)
def format_topic(
    call: Call,
    *,
    partitions: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Coordinating partitions; `topic resize` changes them. By default "
            f"{PARTITIONS_DEFAULT}.",
        ),
    ] = None,
    heartbeat_interval: Annotated[
        str | None,
        typer.Option(
            metavar="MS",
            help="Heartbeat interval; `topic alter` changes it. By default "
            f"{duration(HEARTBEAT_MS_DEFAULT)}.",
        ),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help=f"Limit other than the default: {', '.join(LIMIT_DEFAULTS)}.",
        ),
    ] = None,
    ignore_formatted: Annotated[
        bool,
        typer.Option(
            "--ignore-formatted", help="Succeed if the topic is already formatted."
        ),
    ] = False,
) -> None:
    """Create and format the coordination topic, or complete a torn format."""
    given = {}
    if partitions is not None:
        given["partition_count"] = partitions
    if heartbeat_interval is not None:
        option = "--heartbeat-interval"
        given["heartbeat_interval_ms"] = parsing.duration_ms(option, heartbeat_interval)
    wanted = Format(
        partition_count=given.get("partition_count", PARTITIONS_DEFAULT),
        heartbeat_interval_ms=given.get("heartbeat_interval_ms", HEARTBEAT_MS_DEFAULT),
        limits=parsing.counts("--limit", limit or ()),
    )
    with call.admin() as admin:
        config = admin.format_topic(wanted, ignore_formatted=ignore_formatted)
    for name, value in given.items():
        actual = getattr(config, name)
        if value != actual:
            notify(
                f"note: the topic was already formatted with {name} {actual}, not "
                f"{value}"
            )
    world = call.world()
    call.answer(Answer(presenters.as_of(world), config_facts(call, config)))


def config_facts(call: Call, config: Config) -> dict[str, Any]:
    """Return the settings of a Config."""
    limits = record_to_object(config)["data"]["limits"]
    return {
        "topic": call.coordination_topic,
        "cluster_id": config.cluster_id,
        "format_id": config.format_id.hex(),
        "generation": config.generation,
        "feature_level": config.feature_level,
        "era": config.era,
        "partition_count": config.partition_count,
        "heartbeat_interval_ms": config.heartbeat_interval_ms,
        "limits": {name: config.limit(name) for name in limits},
    }


@app.command("upgrade", epilog="Example: marshal topic upgrade --execute")
@command(writes=True)
def upgrade(
    call: Call,
    *,
    execute: Execute = False,
    ignore_members: Annotated[
        bool,
        typer.Option(
            "--ignore-members",
            help="Upgrade even if live members are too old, and stop.",
        ),
    ] = False,
) -> None:
    """Raise the feature level of the coordination topic to that of this release.

    Members of an older release stop at the new Config.
    """
    with call.admin() as admin:
        plan = admin.upgrade_topic(execute=execute, ignore_members=ignore_members)
    found = {
        "topic": call.coordination_topic,
        "feature_level": plan.level,
        "feature_level_then": plan.level_then,
        "generation_then": plan.config.generation,
        "partitions": list(plan.partitions),
        "members_too_old": list(plan.too_old),
        "is_executed": execute,
    }
    call.answer(Answer(presenters.as_of(call.world()), found))
    if not plan.partitions:
        notify("the topic already has that level")
    elif not execute:
        notify("nothing was written; --execute writes it")


@app.command(
    "alter",
    epilog="Example: marshal topic alter --heartbeat 10s --limit keys=200000 --execute",
)
@command(writes=True)
def alter(
    call: Call,
    *,
    heartbeat: Annotated[
        str | None,
        typer.Option(metavar="MS", help="The new interval."),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help=f"New value of a limit: {', '.join(LIMIT_DEFAULTS)}.",
        ),
    ] = None,
    execute: Execute = False,
) -> None:
    """Change the heartbeat interval or limits while members run.

    Members follow at once. If the interval is reduced, takeovers keep the old pace for
    two of the old intervals. What already exceeds a new limit stays; more is refused.
    If interrupted, run the command again.
    """
    interval_ms = None
    if heartbeat is not None:
        interval_ms = parsing.duration_ms("--heartbeat", heartbeat)
    with call.admin() as admin:
        plan = admin.alter_topic(
            heartbeat_interval_ms=interval_ms,
            limits=parsing.counts("--limit", limit or ()),
            execute=execute,
        )
    found = {
        "topic": call.coordination_topic,
        "generation": plan.before.generation,
        "generation_then": plan.config.generation,
        "changes": {
            name: {"before": before, "then": then}
            for name, (before, then) in plan.changes.items()
        },
        "partitions": list(plan.partitions),
        "forgotten_count": plan.forgotten_count,
        "exceeded": [attrs.asdict(each) for each in plan.exceeded],
        "is_executed": execute,
    }
    shown: dict[str, str] = {
        "changes": ", ".join(
            f"{name} {before} -> {then}"
            for name, (before, then) in plan.changes.items()
        )
        or "none",
        "exceeded": ", ".join(
            f"{each.limit} of partition {each.partition}: {each.count}"
            for each in plan.exceeded
        )
        or "none",
    }
    call.answer(Answer(presenters.as_of(call.world()), found, (), shown))
    if "heartbeat_interval_ms" in plan.changes:
        notify(
            "note: a client that sets heartbeat_interval_ms to the old value does not "
            "start any more"
        )
    if not plan.partitions:
        notify("the topic already has these values")
    elif not execute:
        notify("nothing was written; --execute writes it")


@app.command("resize", epilog="Example: marshal topic resize --partitions 16 --execute")
@command(writes=True)
def resize(
    call: Call,
    *,
    partitions: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="New number: a multiple or divisor of the present one.",
        ),
    ],
    execute: Execute = False,
    ignore_members: Annotated[
        bool,
        typer.Option(
            "--ignore-members",
            help="Resize even if live members cannot follow, and claim nothing more.",
        ),
    ] = False,
) -> None:
    """Change the number of coordinating partitions while members run.

    Owners release keys that move, and claim them again in the new partition. If
    interrupted, run the command again with the same number, on any machine. The default
    of --timeout is long enough for keys whose owners have died.
    """
    with call.admin() as admin:
        plan = admin.resize_topic(
            partitions,
            execute=execute,
            ignore_members=ignore_members,
            timeout_ms=call.timeout_ms if call.is_timeout_given else None,
            on_progress=show_progress,
        )
    found = resize_facts(call, plan) | {"is_executed": execute}
    section = Section("moves", found.pop("moves"), presenters.MOVE_COLUMNS)
    texts = {"obstacles": "; ".join(found["obstacles"].values()) or "none"}
    call.answer(Answer(presenters.as_of(call.world()), found, (section,), texts))
    if not plan.is_needed:
        notify(f"the topic has {partitions} coordinating partitions already")
    elif not execute:
        for each in plan.obstacles:
            notify(f"marshal: {each.text}")
        notify("nothing was written; --execute writes it")


def resize_facts(call: Call, plan: ResizePlan) -> presenters.Row:
    """Return the facts about a change of the number of coordinating partitions."""
    change = plan.change
    return {
        "topic": call.coordination_topic,
        "from_count": plan.from_count,
        "to_count": plan.to_count,
        "continues": None if change is None else change.op_id.hex(),
        "added_count": plan.added_count,
        "moving_count": plan.moving_count,
        "held_count": sum(each.held_count for each in plan.moves),
        "dead_owner_ms": plan.dead_owner_ms,
        "members_left_behind": ["/".join(name) for name in plan.lagging],
        "obstacles": {each.reason: each.text for each in plan.obstacles},
        "moves": [attrs.asdict(each) for each in plan.moves],
    }


def show_progress(progress: LayoutProgress) -> None:
    """Write the progress of a change to stderr."""
    notify(
        f"fences {progress.fenced_count}/{progress.partition_count}, "
        f"moving {progress.moving_count}, drained {progress.final_count}, "
        f"imported {progress.imported_count}, "
        f"done {progress.done_count}/{progress.pair_count}, "
        f"ended {progress.ended_count}/{progress.partition_count}"
    )


@app.command("info", epilog="Example: marshal topic info -b broker-1:9092 -o json")
@command(option_groups=AT)
def info(call: Call, *, at: Moment | None) -> None:
    """Show settings, format and state; fail with a list of all problems.

    With --at, the Config and the state of that moment are shown. The settings of the
    topic in Kafka at that moment are not known.
    """
    if at is not None:
        call.answer(_past_answer(call, at))
        return
    with call.admin() as admin:
        report = admin.report_topic()
    if not report.topic.exists:
        raise TopicMisconfigured(
            f"topic {call.coordination_topic} does not exist on cluster "
            f"{report.cluster.cluster_id}; check --coordination-topic, or for a new "
            f"topic run: {format_command(call.coordination_topic)}",
            problems=report.problems,
        )
    world = call.world()
    code, problems = judge(report, world)
    call.answer(topic_answer(call, report, world=world, problems=problems))
    if report.note is not None:
        notify(
            "note: the settings of the topic were not checked, this principal may not "
            f"read them (DESCRIBE_CONFIGS): {report.note}"
        )
    for problem in problems:
        notify(f"marshal: {call.coordination_topic}: {problem}")
    if problems:
        is_refused = code == ExitCode.REFUSED
        notify(_remedy(call, world) if is_refused else "next: marshal doctor")
        raise typer.Exit(code)


def _past_answer(call: Call, at: Moment) -> Answer:
    """Return the answer for a moment: the Config and the state."""
    world = call.world(at)
    world.require_known()
    first = leading(by_partition(world.partitions))
    config = None if first is None else first.config
    found: presenters.Row = {
        "topic": call.coordination_topic,
        "cluster_id": world.cluster_id,
    }
    if config is not None:
        found = config_facts(call, config)
    found |= {"is_formatted": config is not None}
    as_of = presenters.as_of(world, at)
    return Answer(as_of, found, _sections(world), _shown_config(found, config))


def _remedy(call: Call, world: World) -> str:
    run = format_command(call.coordination_topic)
    if world.partitions[0].config is None:
        return f"next: check --coordination-topic; for a new one: {run}"
    return f"next: marshal doctor for settings, {run} for torn_format"


def judge(report: TopicReport, world: World) -> tuple[ExitCode, tuple[str, ...]]:
    """Return the exit code and all problems of the topic."""
    problems = list(report.problems)
    code = ExitCode.REFUSED if problems else ExitCode.OK
    try:
        world.config()
    except WrongCluster as error:
        code = ExitCode.WRONG_CLUSTER
        problems += error.problems
    except TopicMisconfigured as error:
        code = ExitCode.REFUSED
        problems += error.problems
    except LogUnreadable as error:
        code = ExitCode.FAILED
        problems.append(str(error))
    for state in world.partitions:
        if state.halted is not None:
            code = code or ExitCode.REFUSED
            problems.append(
                f"partition {state.partition} needs feature level "
                f"{state.halted.feature_level} from offset {state.halted.offset} on: "
                "upgrade kafka-marshal"
            )
        if state.soft.counters.get("timestamp_type"):
            code = code or ExitCode.REFUSED
            problems.append(
                f"partition {state.partition} has records that were not dated by the "
                "broker (CreateTime) and did not move log time"
            )
    return code, tuple(problems)


def topic_answer(
    call: Call, report: TopicReport, *, world: World, problems: tuple[str, ...]
) -> Answer:
    """Return the settings, format and state of the topic."""
    config = world.partitions[0].config
    settled = (
        {"topic": call.coordination_topic, "cluster_id": report.cluster.cluster_id}
        if config is None
        else config_facts(call, config)
    )
    found = {
        **settled,
        "is_formatted": config is not None,
        "kafka_partitions": report.topic.partition_count,
        "replication": report.topic.replication,
        "settings": dict(sorted(report.topic.configs.items())),
        "problems": list(problems),
        "change": change_facts(world),
    }
    shown = {"problems": "; ".join(problems) or "none", **_shown_config(found, config)}
    return Answer(presenters.as_of(world), found, _sections(world), shown)


def _sections(world: World) -> tuple[Section, ...]:
    """Return the partitions, an open change of their count, growths of data topics."""
    partitions = Section(
        "partitions", _partition_rows(world), presenters.PARTITION_COLUMNS
    )
    moved = layout_rows(world)
    grown = presenters.growth_rows(
        each for state in world.partitions for each in state.growths
    )
    others = (
        Section("layout", moved, presenters.LAYOUT_COLUMNS),
        Section("growths", grown, presenters.GROWTH_COLUMNS),
    )
    return (partitions, *(each for each in others if each.rows))


def change_facts(world: World) -> presenters.Row | None:
    """Return the progress of the open change of the count; None without a change."""
    reading = read(
        by_partition(world.partitions),
        unread=world.log_start_missing,
        elapsed_ms={
            state.partition: world.elapsed_ms(state.partition)
            for state in world.partitions
        },
    )
    if reading is None:
        return None
    change, progress, steps = reading.change, progress_of(reading), next_steps(reading)
    return {
        "op_id": change.op_id.hex(),
        "from_count": change.from_count,
        "to_count": change.to_count,
        "is_over": steps.is_over,
        "is_torn": steps.is_torn,
        **attrs.asdict(progress),
        "lagging": ["/".join(name) for name in progress.lagging],
        "waits": [wait_text(wait) for wait in steps.waits],
    }


def layout_rows(world: World) -> list[presenters.Row]:
    """Return a row for each partition that an open change of the count has reached."""
    return [
        {
            "partition": state.partition,
            "op_id": state.layout.op_id.hex(),
            "from_count": state.layout.from_count,
            "to_count": state.config.partition_count,
            "moving_count": len(moving := moving_keys(state)),
            "final_count": sum(is_final(state, key) for key in moving),
            "imported_count": sum(s.imported_count for s in state.layout.sources),
            "done": [
                s.partition for s in state.layout.sources if s.done_ms is not None
            ],
            "not_done": [
                s.partition for s in state.layout.sources if s.done_ms is None
            ],
        }
        for state in world.partitions
        if state.layout is not None and state.config is not None
    ]


def _partition_rows(world: World) -> list[presenters.Row]:
    return [
        {
            "partition": state.partition,
            "next_offset": state.next_offset,
            "generation": None if state.config is None else state.config.generation,
            "claims_count": len(state.keys),
            "digest": digest(state),
        }
        for state in world.partitions
    ]


def _shown_config(found: presenters.Row, config: Config | None) -> dict[str, str]:
    """Return texts for people, for some facts of a Config."""
    if config is None:
        return {}
    ms = config.heartbeat_interval_ms
    return {
        "heartbeat_interval_ms": f"{ms} ({duration(ms)})",
        "limits": plain(found["limits"]),
    }


@app.command("random-id", epilog="Example: marshal topic random-id")
@command(connects=False, waits=False, answers=False)
def random_id(call: Call) -> None:
    """Print a random id of 16 bytes in hex, like format ids."""
    del call
    emit(secrets.token_hex(16))
