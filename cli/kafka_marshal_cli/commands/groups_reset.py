"""``marshal groups reset``, ``undo`` and ``finish``: change positions of a group."""

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from kafka_marshal import (
    Admin,
    ConfigurationError,
    PositionError,
    PositionSpec,
    World,
)
from kafka_marshal.admin.finishing import ResetProgress, ResetResult
from kafka_marshal.admin.group_reset import (
    PLANS_FOLDER,
    PartitionReset,
    ResetPlan,
    read_plan,
    read_positions,
    stored_plan,
    write_plan,
)
from kafka_marshal.counting import counted
from kafka_marshal.identity import state_home
from kafka_marshal.protocol.hashing import coordinating_partition
from kafka_marshal.protocol.text import abbreviated
from kafka_marshal_cli import parsing, presenters
from kafka_marshal_cli.parsing import Moment
from kafka_marshal_cli.render import Answer, Section
from kafka_marshal_cli.shared import (
    Call,
    Execute,
    Group,
    OptionGroup,
    Output,
    Reason,
    command,
    emit,
    notify,
    wall_ms,
)

app = typer.Typer()

_rule: Any = partial(typer.Option, rich_help_panel="New positions (one of them)")
PROGRESS_S = 1.0
STDIN = Path("/dev/stdin")
STORED_PLAN = (
    "--continue executes a stored plan, which other options cannot change; to use "
    "them, omit --continue and plan again"
)
STEPS = {
    "pause": "pausing the group in {} coordinating partitions",
    "drain": "waiting until {} partitions are released",
    "lock": "locking the partitions, {} records",
    "commit": "committing",
    "resolve": "recording the outcome in {} coordinating partitions",
}

AllowReprocess = Annotated[
    bool,
    typer.Option(
        "--allow-reprocess",
        help="Allow partitions consumed at most once to go back, so records are "
        "handed out again.",
    ),
]
Topics = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        metavar="TOPIC[:P,P...]",
        help="A topic, or some partitions of it. Repeatable.",
    ),
]
Continued = Annotated[
    Path | None,
    typer.Option(
        "--continue",
        metavar="FILE",
        help="Execute a stored plan; nothing is done twice.",
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="New file for the plan, for --continue; by default in the state directory "
        "until the operation ends.",
    ),
]


@attrs.frozen(kw_only=True)
class Rules:
    """Rules for new positions; a command takes one of them."""

    to_earliest: Annotated[bool, _rule("--to-earliest", help="The log start.")] = False
    to_latest: Annotated[bool, _rule("--to-latest", help="The log end.")] = False
    to_current: Annotated[
        bool,
        _rule("--to-current", help="The present position, or the log end without one."),
    ] = False
    to_offset: Annotated[int | None, _rule(metavar="OFFSET", help="This offset.")] = (
        None
    )
    shift_by: Annotated[
        int | None, _rule(metavar="COUNT", help="This many records forward, or back.")
    ] = None
    to_datetime: Annotated[
        str | None,
        _rule(
            metavar="TIME",
            help="First record at or after a time, like 2026-01-31T12:00:00Z; UTC "
            "without a zone.",
        ),
    ] = None
    by_duration: Annotated[
        str | None,
        _rule(
            metavar="DURATION",
            help="As --to-datetime, this long ago: PT10M, P1DT2H or 10m.",
        ),
    ] = None
    to_fence: Annotated[
        str | None,
        _rule(
            metavar="TIME|T:OFFSET,...",
            help="Where the group was at a moment of the log, as for --at, or "
            "like 3:100,5:80.",
        ),
    ] = None
    from_file: Annotated[
        Path | None,
        _rule(
            metavar="FILE",
            help="Lines of topic,partition,offset, as --export writes them, or a plan; "
            "- for stdin.",
        ),
    ] = None

    def spec(self) -> PositionSpec | Moment | None:
        """Return the rule, or the moment of ``--to-fence``; None without a rule.

        Raises:
            ConfigurationError: Several rules were given, or one is invalid.
        """
        chosen = {
            name: value
            for name, value in attrs.asdict(self).items()
            if value is not None and value is not False
        }
        if len(chosen) > 1:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in chosen)
            raise ConfigurationError(f"{flags}: give one of them", setting="positions")
        for name, value in chosen.items():
            if name == "from_file":
                path = STDIN if str(value) == "-" else value
                return PositionSpec.from_offsets(read_positions(path))
            if name == "to_fence":
                return parsing.past_moment("--to-fence", value, now_ms=wall_ms())
            if name == "to_datetime":
                at_ms = parsing.datetime_ms("--to-datetime", value)
                return PositionSpec.of(name, at_ms)
            if name == "by_duration":
                ago_ms = parsing.iso_duration_ms("--by-duration", value)
                return PositionSpec.of(name, max(0, wall_ms() - ago_ms))
            return PositionSpec.of(name, value)
        return None


SPEC = OptionGroup.of(Rules, Rules.spec)


@app.command(
    "reset",
    epilog="Example: marshal groups reset billing --all-topics --by-duration PT1H",
)
@command(writes=True, option_groups={"spec": SPEC})
def reset(
    call: Call,
    group: Group,
    *,
    spec: PositionSpec | Moment | None,
    topics: Topics = None,
    all_topics: Annotated[
        bool, typer.Option("--all-topics", help="All topics of the group.")
    ] = False,
    execute: Execute = False,
    clamp: Annotated[
        bool,
        typer.Option(
            "--clamp",
            help="Replace a position outside its log by the nearest one; else it is "
            "refused.",
        ),
    ] = False,
    allow_reprocess: AllowReprocess = False,
    reason: Reason = None,
    plan_file: PlanFile = None,
    continued: Continued = None,
    export: Annotated[
        bool,
        typer.Option("--export", help="Print positions for --from-file."),
    ] = False,
) -> None:
    """Set a running group to new positions, all partitions or none.

    Without --execute the plan is shown and nothing is written to the log. With it, the
    group is paused, releases its partitions, and continues from the new positions.
    `marshal groups undo` sets the group back. If this command dies, --continue resumes
    its plan, or `marshal groups finish` or a member ends the reset.
    """
    then: World | None = None
    if isinstance(spec, Moment):
        then = call.formatted_world(spec)
        spec = PositionSpec.to_fence(then.partitions, group)
    with call.admin() as admin:
        if continued is not None:
            others = (spec, topics, all_topics, clamp, allow_reprocess, plan_file)
            _refuse(any(others), STORED_PLAN)
            plan = admin.describe_plan(read_plan(continued))
            other = plan.group_id
            _refuse(other != group, f"the plan in {continued} is for group {other!r}")
        else:
            try:
                plan = admin.plan_reset(
                    group,
                    _require_spec(spec),
                    topics=_topics(topics, spec=spec, is_all=all_topics),
                    clamp=clamp,
                    allow_reprocess=allow_reprocess,
                )
            except PositionError as error:  # of the request, not of the log
                see = f"see the positions: marshal groups describe {group}"
                raise ConfigurationError(f"{error}; {see}") from error
            _require_named(then, plan)
        _show(
            call,
            admin,
            plan,
            execute=execute,
            reason=reason,
            plan_file=continued or plan_file,
            export=export,
        )


@app.command("undo", epilog="Example: marshal groups undo ID --execute")
@command(writes=True)
def undo(
    call: Call,
    operation: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="The operation, as `history` lists it.",
        ),
    ],
    *,
    execute: Execute = False,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial",
            help="Undo even if some partitions cannot be set back.",
        ),
    ] = False,
    allow_reprocess: AllowReprocess = False,
    reason: Reason = None,
    plan_file: PlanFile = None,
) -> None:
    """Set a group back to where it was before a reset.

    An undo can be undone, too. Partitions that had no position before the reset stay as
    they are, and are listed.
    """
    with call.admin() as admin:
        plan = admin.plan_undo(
            operation, partial=partial, allow_reprocess=allow_reprocess
        )
        _show(
            call,
            admin,
            plan,
            execute=execute,
            reason=reason,
            plan_file=plan_file,
            export=False,
        )


@app.command("finish", epilog="Example: marshal groups finish billing")
@command(writes=True)
def finish(call: Call, group: Group, *, reason: Reason = None) -> None:
    """Complete or abort a reset whose command died, as the log decided.

    A committed reset is applied everywhere. Any other reset is aborted, even if its
    command still runs, and sets nothing. Members do this by themselves once the pause
    of the reset is over.
    """
    with call.admin() as admin:
        results = admin.finish(group, reason=reason, on_progress=Printer())
    rows = [
        {
            "op_id": each.op_id,
            "outcome": each.outcome,
            "moved_count": len(each.moved),
        }
        for each in results
    ]
    section = Section("operations", rows, presenters.FINISHED_COLUMNS)
    world = call.world()
    call.answer(Answer(presenters.as_of(world), {"group_id": group}, (section,)))
    if not rows:
        text = f"group {group!r} has no reset to finish"
        # The command of a reset may have died before it locked anything.
        pauses = (each.active_pause(group) for each in world.partitions)
        if any(pause and pause.until_ms > wall_ms() for pause in pauses):
            text += (
                f", and is paused; to end the pause, run: marshal groups resume {group}"
            )
        notify(text)


def _refuse(is_wrong: object, text: str) -> None:
    if is_wrong:
        raise ConfigurationError(
            f"{text}; see: marshal groups reset --help", setting="--continue"
        )


def _require_named(then: World | None, plan: ResetPlan) -> None:
    """Refuse a plan without the partitions whose offsets ``--to-fence`` lacks."""
    if then is None or not then.is_partial:
        return
    count, known = then.config().partition_count, {w.partition for w in then.partitions}
    for topic, number in plan.positions.left_out:
        home = coordinating_partition(topic, number, partition_count=count)
        if home not in known:
            raise ConfigurationError(
                f"--to-fence names no offset of coordinating partition {home}, which "
                f"{topic}-{number} is in; write a time, or an offset of each, like "
                "0:100,1:120; or choose partitions of the named ones with --topic",
                setting="--to-fence",
            )


def _require_spec(spec: PositionSpec | None) -> PositionSpec:
    if spec is None:
        raise ConfigurationError(
            "name the new positions, like --to-earliest; see: marshal groups reset "
            "--help",
            setting="positions",
        )
    return spec


def _topics(
    topics: list[str] | None, *, spec: PositionSpec | None, is_all: bool
) -> list[str] | None:
    has_own = spec is not None and bool(spec.offsets)
    if has_own and (topics or is_all):
        raise ConfigurationError(
            "--from-file names its partitions; leave out --topic and --all-topics",
            setting="--topic",
        )
    if bool(topics) == is_all and not has_own:
        raise ConfigurationError(
            "give --topic TOPIC, or --all-topics for every topic of the group",
            setting="--topic",
        )
    return topics or None


# --- showing and executing


class Printer:
    """Writes progress to stderr: a line for each step, then one a second."""

    def __init__(self) -> None:
        self._step = ""
        self._at_s = 0.0

    def __call__(self, progress: ResetProgress) -> None:
        """Show progress, unless this step was shown less than a second ago."""
        now_s = time.monotonic()
        is_new = progress.step != self._step
        if not progress.left_count or not (is_new or now_s - self._at_s >= PROGRESS_S):
            return
        self._step, self._at_s = progress.step, now_s
        notify(STEPS[progress.step].format(progress.left_count))


def _show(
    call: Call,
    admin: Admin,
    plan: ResetPlan,
    *,
    execute: bool,
    reason: str | None,
    plan_file: Path | None,
    export: bool,
) -> None:
    result = None
    for topic, partition in plan.positions.left_out:
        notify(
            f"{topic}-{partition} had no position at that moment; its position is not "
            "changed"
        )
    if execute:
        file = plan_file or state_home() / PLANS_FOLDER / f"{plan.op_id}.json"
        is_kept = plan_file is not None
        with stored_plan(plan, file, on_open=_on_open, is_kept=is_kept):
            result = admin.execute(
                plan,
                plan_file=file,
                reason=reason,
                drain_ms=call.timeout_ms if call.is_timeout_given else None,
                on_progress=Printer(),
            )
    elif plan_file is not None:
        write_plan(plan_file, plan.positions)
    if export and call.output is Output.TABLE:
        emit(plan.to_csv().rstrip("\n"))
    else:
        call.answer(answer(call, plan, result=result))
    _advise(plan, result)


def _on_open(_: BaseException, command: str) -> None:
    notify(f"the operation may be open; continue it with: {command}")


def answer(call: Call, plan: ResetPlan, *, result: ResetResult | None) -> Answer:
    """Return the answer for a plan, and for its execution if there was one."""
    facts = {
        "group_id": plan.group_id,
        "op_id": plan.op_id,
        "undoes": plan.positions.undoes,
        "is_executed": result is not None,
        "outcome": None if result is None else result.outcome,
        "mirror_error": None if result is None else result.mirror_error,
        "left_out": [list(each) for each in plan.positions.left_out],
    }
    rows = [_row(each) for each in plan.executed(result)]
    section = Section("partitions", rows, presenters.POSITION_COLUMNS)
    world = call.world()
    shown = {}
    if plan.positions.left_out:
        named = (f"{topic}-{number}" for topic, number in plan.positions.left_out)
        shown["left_out"] = ", ".join(named)
    return Answer(presenters.as_of(world), facts, (section,), shown)


def _row(row: PartitionReset) -> dict[str, Any]:
    return {
        "topic": row.partition.topic,
        "partition": row.partition.partition,
        "before": row.before,
        "after": row.after,
        "log_start_offset": row.log_range.start,
        "log_end_offset": row.log_range.end,
        "lag_before": row.lag_before,
        "lag_after": row.lag_after,
        "repeats": row.repeats,
        "note": row.note,
    }


def _advise(plan: ResetPlan, result: ResetResult | None) -> None:
    if plan.unordered:
        notify(
            f"keys lose their order in {abbreviated(plan.unordered)}: new partitions "
            "begin before the old ones that had their keys reach the end that these "
            "had when the topic grew; see: marshal groups grow --topic "
            f"{plan.unordered[0].topic}"
        )
    if result is None:
        notify("nothing was written to the log; --execute sets the positions")
        if plan.repeats_count and not plan.positions.allows_reprocess:
            text = counted(plan.repeats_count, "partition is", many="partitions are")
            notify(
                f"{text} consumed at most once and would go back: --execute needs "
                "--allow-reprocess"
            )
        return
    if result.mirror_error is not None:
        notify(f"Kafka's committed offsets were not written: {result.mirror_error}")
    result.require_committed()
    if any(before is not None for before, _ in result.moved.values()):
        notify(f"undo it with: marshal groups undo {result.op_id} --execute")
