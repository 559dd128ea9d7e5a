"""The command line of the simulator: which seeds to run, and how to answer."""

import os
from typing import Annotated, Any

import attrs
import typer

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.types import whole_number
from kafka_marshal_cli.exits import ExitCode
from kafka_marshal_cli.render import Answer, Section, column, escape
from kafka_marshal_cli.shared import Call, command, emit, notify
from simulator.campaign import (
    Broken,
    CampaignOptions,
    Summary,
    run_seeds,
    shrunk,
)
from simulator.simulate import (
    ASKED_FOR,
    FAULTS,
    PROGRAM,
    SimulationFailed,
    run_plan,
)

SEEDS_MAX = 1_000_000

app = typer.Typer(
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Seeds = Annotated[
    str,
    typer.Option("--seeds", metavar="FIRST:END", help="Seeds to run, END excluded."),
]
Seed = Annotated[
    int | None, typer.Option("--seed", min=0, help="One seed, instead of several.")
]
Faults = Annotated[
    str,
    typer.Option(
        "--faults",
        metavar="NAME,...",
        help="Kinds of faults; by default drawn from the seed. "
        f"Of: {', '.join((*FAULTS, *ASKED_FOR))}.",
    ),
]
Also = Annotated[
    str,
    typer.Option(
        "--also",
        metavar="NAME,...",
        help="Further kinds of faults, as with --faults.",
    ),
]
Only = Annotated[
    str,
    typer.Option(
        "--only",
        metavar="NUMBER,...",
        help="With --seed: the faults that strike, by number; by default all.",
    ),
]
Minutes = Annotated[
    int,
    typer.Option("--minutes", min=1, max=1_440, help="Simulated minutes of faults."),
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", min=1, max=256, help="Processes; by default one a CPU."),
]
Shrink = Annotated[
    bool, typer.Option("--shrink", help="Shrink each failure to few faults.")
]
Transcript = Annotated[
    bool, typer.Option("--transcript", help="With --seed: print everything it did.")
]


@app.command(epilog=f"Example: {PROGRAM} --seeds 0:100 --faults crash,stop,failover")
@command(connects=False, waits=False)
def sim(
    call: Call,
    *,
    seeds: Seeds = "0:100",
    seed: Seed = None,
    faults: Faults = "",
    also: Also = "",
    only: Only = "",
    minutes: Minutes = 10,
    jobs: Jobs = None,
    shrink: Shrink = False,
    transcript: Transcript = False,
) -> None:
    """Simulate whole fleets under faults drawn from seeds; needs no broker.

    The production engine runs on virtual time. Safety is checked after every
    step, then everything is healed and liveness is demanded. Exit code 0 if every
    rule held; 1 if one did not, or if 200 seeds or more with all faults never
    reached a situation that matters. A seed repeats its run, byte for byte.
    """
    options = CampaignOptions(
        faults=_faults_of(faults, setting="--faults"),
        also=_faults_of(also, setting="--also") or (),
        minutes=minutes,
        only=_numbers_of(only, seed),
        shrinks=shrink,
    )
    if transcript:
        if seed is None:
            raise ConfigurationError(
                "--transcript needs --seed", setting="--transcript"
            )
        _print_transcript(options, seed)
        return
    chosen = _seeds_of(seeds) if seed is None else range(seed, seed + 1)
    count = min(len(chosen), jobs or os.cpu_count() or 1)
    summary = run_seeds(chosen, options, jobs=count)
    call.answer(_answer(summary))
    if not summary.held:
        raise typer.Exit(ExitCode.FAILED)


def _seeds_of(text: str) -> range:
    first, _, end = text.partition(":")
    least, most = whole_number(first), whole_number(end)
    if least is None or most is None or not 0 < most - least <= SEEDS_MAX:
        raise ConfigurationError(
            f"--seeds {text!r} is no range such as 0:100, of 1 to {SEEDS_MAX} seeds",
            setting="--seeds",
        )
    return range(least, most)


def _faults_of(text: str, *, setting: str) -> tuple[str, ...] | None:
    if not text:
        return None
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in {*FAULTS, *ASKED_FOR}]
    if unknown:
        raise ConfigurationError(
            f"{setting} does not know {', '.join(unknown)}; it knows "
            f"{', '.join((*FAULTS, *ASKED_FOR))}",
            setting=setting,
        )
    return names


def _numbers_of(text: str, seed: int | None) -> tuple[int, ...] | None:
    if not text:
        return None
    numbers = [whole_number(name) for name in text.split(",")]
    found = tuple(each for each in numbers if each is not None)
    if seed is None or len(found) < len(numbers):
        raise ConfigurationError(
            "--only takes numbers of faults, such as 3,7, and needs --seed",
            setting="--only",
        )
    return found


def _print_transcript(options: CampaignOptions, seed: int) -> None:
    try:
        lines, failure = run_plan(options.plan(seed)).transcript, None
    except SimulationFailed as failed:
        if options.shrinks:
            kept = [fault.number for fault in shrunk(failed).faults]
            failed = _again(attrs.evolve(options, only=tuple(kept)), seed) or failed
        lines, failure = tuple(failed.transcript), failed
    for line in lines:
        emit(escape(line))
    if failure is not None:
        notify(escape(failure.finding))
        raise typer.Exit(ExitCode.FAILED)


def _again(options: CampaignOptions, seed: int) -> SimulationFailed | None:
    try:
        run_plan(options.plan(seed))
    except SimulationFailed as failed:
        return failed
    return None


def _answer(summary: Summary) -> Answer:
    options = summary.options
    facts = {
        "build": summary.build,
        "held": summary.held,
        "seeds": summary.seed_count,
        "broken": len(summary.broken),
        "simulated_minutes": summary.virtual_ms // 60_000,
        "seconds": round(summary.wall_ms / 1000, 1),
        "cpu_seconds": round(summary.cpu_ms / 1000, 1),
        "seeds_per_minute_and_core": round(summary.seeds_per_minute, 1),
        "never_reached": list(summary.never) if summary.is_suite else [],
    }
    sections = [
        Section("broken_seeds", [_row_of(each, options) for each in summary.broken],
                [column("SEED", "seed"), column("RULE", "invariant"),
                 column("WHAT", "message"), column("REPEAT WITH", "repeat")]),
        Section("situations", [{"situation": name, "count": summary.seen[name],
                                "meaning": meaning}
                               for name, meaning in summary.situations.items()],
                [column("SITUATION", "situation"), column("COUNT", "count"),
                 column("MEANING", "meaning")]),
        Section("faults", [{"fault": name, "count": count}
                           for name, count in sorted(summary.faults.items())],
                [column("FAULT", "fault"), column("COUNT", "count")]),
    ]  # fmt: skip
    return Answer({}, facts, sections)


def _row_of(broken: Broken, options: CampaignOptions) -> dict[str, Any]:
    words = [f"{PROGRAM} --seed {broken.seed} --minutes {options.minutes} --transcript"]
    if options.faults is not None:
        words.append(f"--faults {','.join(options.faults)}")
    if options.also:
        words.append(f"--also {','.join(options.also)}")
    if options.shrinks and broken.faults:
        words.append(f"--only {','.join(map(str, broken.faults))}")
    return {
        "seed": broken.seed,
        "invariant": broken.invariant,
        "message": broken.message,
        "faults": list(broken.faults),
        "repeat": " ".join(words),
    }
