"""``marshal log``: the log as text, replayed, verified and reset."""

from typing import Annotated

import typer

from kafka_marshal.counting import counted
from kafka_marshal.errors import ConfigurationError
from kafka_marshal_cli.lazy import LazyCommand, lazy_group
from kafka_marshal_cli.parsing import Moment
from kafka_marshal_cli.render import Answer, Section, to_json
from kafka_marshal_cli.shared import AT, Call, Execute, command, emit, notify, wall_ms

app = typer.Typer(
    no_args_is_help=True,
    cls=lazy_group(
        LazyCommand(
            "tail",
            "log_tail",
            help="Show the last entries of the log and what each did.",
        ),
        LazyCommand(
            "replay",
            "log_replay",
            help="Fold a dumped log and print the world as one JSON document. Needs no "
            "broker.",
        ),
        LazyCommand(
            "snapshot",
            "log_states",
            help="Write the state of every coordinating partition to a file.",
        ),
        LazyCommand(
            "diff",
            "log_states",
            help="Show the differences of two states of the log, key by key and field "
            "by field.",
        ),
        LazyCommand(
            "verify",
            "log_verify",
            help="Fold the log twice and check the invariants of the protocol.",
        ),
    ),
)


@app.command(
    "dump",
    epilog="Example: marshal log dump --partition 3 --from 100 > partition-3.jsonl",
)
@command(answers=False, option_groups=AT)
def dump(
    call: Call,
    *,
    at: Moment | None,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE", help="Output of `log snapshot` to read instead."
        ),
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(metavar="T", min=0, help="Only this coordinating partition."),
    ] = None,
    from_: Annotated[
        int | None,
        typer.Option("--from", metavar="OFFSET", min=0, help="First offset."),
    ] = None,
    to: Annotated[
        int | None, typer.Option(metavar="OFFSET", min=0, help="Last offset.")
    ] = None,
    skip_record_metadata: Annotated[
        bool,
        typer.Option("--skip-record-metadata", help="Write only the payloads."),
    ] = False,
) -> None:
    """Write the log as text, one JSON object for each entry, up to its present end.

    `marshal log replay` folds the text to the same digests, if it has the log from its
    start. Without record metadata, values that cannot be decoded are omitted.

    With a snapshot FILE, the command needs no broker and writes the world, as `marshal
    log replay` does for the same log.
    """
    from kafka_marshal.protocol.text import entry_to_object, world_to_object

    if file is not None:
        from kafka_marshal_cli.commands.log_states import states_of

        is_range = from_ is not None or to is not None or at is not None
        if is_range or skip_record_metadata:
            raise ConfigurationError(
                "--from, --to, --at and --skip-record-metadata select entries, and a "
                "snapshot has none; leave them out, or leave FILE out to dump the log",
                setting="FILE",
            )
        emit(to_json(world_to_object(states_of(file, partition))))
        return
    _require_range(from_, to)
    moment = None if at is None else at.of_partition(partition)
    with call.scan() if moment is None else call.scan(moment) as scan:
        if partition is not None and partition not in scan.ends:
            raise ConfigurationError(
                f"--partition is {partition}, and the coordination topic has "
                f"{counted(len(scan.ends), 'partition')}; see: marshal topic info",
                setting="--partition",
            )
        scan.select(partition, first=from_ or 0, last=to)
        for number, entry in scan:
            if entry.offset < (from_ or 0):
                continue
            line = entry_to_object(number, entry)
            if not skip_record_metadata:
                emit(to_json(line))
            elif "payload" in line:
                emit(to_json(line["payload"]))


def _require_range(first: int | None, last: int | None) -> None:
    if first is not None and last is not None and first > last:
        raise ConfigurationError(
            f"--from is {first} and --to is {last}, the last offset, so no entry lies "
            "between them; give a larger --to",
            setting="--to",
        )


@app.command(
    "reset", epilog="Example: marshal log reset --partition 3 --checkpoint ID --execute"
)
@command(writes=True)
def reset(
    call: Call,
    *,
    partition: Annotated[
        int, typer.Option(metavar="T", min=0, help="The coordinating partition.")
    ],
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Checkpoint to restore; by default the newest."
        ),
    ] = None,
    execute: Execute = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Reset even if keys of the partition have owners."
        ),
    ] = False,
    allow_reprocess: Annotated[
        bool,
        typer.Option(
            "--allow-reprocess",
            help="Reset even if processed records are repeated.",
        ),
    ] = False,
) -> None:
    """Replace the state of a coordinating partition by that of a checkpoint.

    This is for replicas that disagree, or a log that was manipulated. Afterwards no key
    of the partition has an owner, and for two heartbeat intervals none can be claimed.
    """
    from kafka_marshal_cli import presenters

    with call.admin() as admin:
        plan = admin.reset_state(
            partition,
            checkpoint_id=checkpoint,
            execute=execute,
            allow_held=force,
            allow_reprocess=allow_reprocess,
        )
    found = {
        "partition": plan.partition,
        "checkpoint": plan.checkpoint_id,
        "offset": plan.offset,
        "next_offset": plan.next_offset,
        "is_executed": execute,
        "held": presenters.key_texts(plan.held),
        "repeats_count": plan.repeats_count,
    }
    rows = [
        change.key._asdict()
        | {name: getattr(change, name) for name in change._fields[1:]}
        | {"repeats": change.repeats}
        for change in plan.changes
    ]
    as_of = {"time_ms": wall_ms(), "offsets": {str(partition): plan.next_offset}}
    call.answer(
        Answer(as_of, found, (Section("changes", rows, presenters.RESET_COLUMNS),))
    )
    if not execute:
        notify("nothing was written; --execute replaces the state")
