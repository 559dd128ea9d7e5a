"""Compare what simulated fleets do before and after a change of structure.

    python tools/simulation_digests.py write FILE [--direct 0:2000] [--sidecar 0:500]
    python tools/simulation_digests.py compare FILE
    python tools/simulation_digests.py transcript {direct,sidecar} SEED

``write`` runs the seeds and stores a digest of each transcript. ``compare`` runs the
same seeds again and lists those whose transcripts differ; the exit status is 1 if any
does. A seed that breaks a rule has a transcript like any other, with the rule as its
last line. ``transcript`` prints one run, to be compared with ``diff`` between two
checkouts. Both files are JSON and can be compared by hand.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from simulator.outcome import Report, RunFailed
from simulator.sidecar.simulate import simulate_hosted
from simulator.simulate import simulate

RUNS: Mapping[str, Callable[[int], Report]] = {
    "direct": simulate,
    "sidecar": simulate_hosted,
}
SEEDS = {"direct": "0:2000", "sidecar": "0:500"}
LISTED_MAX = 20


def transcript(via: str, seed: int) -> Sequence[str]:
    """Run one seed and return its transcript, with the line of a failure, if any."""
    try:
        return RUNS[via](seed).transcript
    except RunFailed as failed:
        return (*failed.transcript, f"broke {failed.invariant}: {failed.finding}")


def digest(job: tuple[str, int]) -> str:
    """Run one seed and return the digest of its transcript, in hex."""
    text = "\n".join(transcript(*job))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def digests(ranges: Mapping[str, str], *, jobs: int) -> dict[str, dict[str, str]]:
    """Run ranges of seeds, such as ``{"direct": "0:100"}``, in several processes."""
    wanted = [(via, seed) for via, text in ranges.items() for seed in _seeds(text)]
    with ProcessPoolExecutor(jobs) as pool:
        found = pool.map(digest, wanted, chunksize=4)
        reported: dict[str, dict[str, str]] = {via: {} for via in ranges}
        for (via, seed), each in zip(wanted, found, strict=True):
            reported[via][str(seed)] = each
    return reported


def differences(
    before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]
) -> list[tuple[str, int]]:
    """Return the seeds whose digests differ."""
    return [
        (via, int(seed))
        for via, seeds in before.items()
        for seed, each in seeds.items()
        if after[via][seed] != each
    ]


def write(file: Path, ranges: Mapping[str, str], *, jobs: int) -> None:
    """Store the digests of these seeds."""
    document = {"seeds": dict(ranges), "digests": digests(ranges, jobs=jobs)}
    file.write_text(json.dumps(document, indent=1) + "\n")


def compare(file: Path, *, jobs: int) -> int:
    """Run the seeds of a file again and list differences; return an exit status."""
    document = json.loads(file.read_text())
    after = digests(document["seeds"], jobs=jobs)
    changed = differences(document["digests"], after)
    count = sum(len(seeds) for seeds in after.values())
    print(f"{count - len(changed)} of {count} transcripts are identical")
    for via, seed in changed[:LISTED_MAX]:
        print(f"differs: {Path(__file__).name} transcript {via} {seed}")
    return 1 if changed else 0


def _seeds(text: str) -> range:
    first, _, end = text.partition(":")
    return range(int(first), int(end))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands; return an exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="store digests")
    writing.add_argument("file", type=Path)
    for via, seeds in SEEDS.items():
        writing.add_argument(f"--{via}", default=seeds, metavar="FIRST:END")
    comparing = commands.add_parser("compare", help="compare with stored digests")
    comparing.add_argument("file", type=Path)
    one = commands.add_parser("transcript", help="print one run")
    one.add_argument("via", choices=tuple(RUNS))
    one.add_argument("seed", type=int)
    options = parser.parse_args(arguments)
    if options.command == "write":
        ranges = {via: getattr(options, via) for via in SEEDS}
        write(options.file, ranges, jobs=options.jobs)
    elif options.command == "compare":
        return compare(options.file, jobs=options.jobs)
    else:
        print("\n".join(transcript(options.via, options.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
