"""Choose few seeds of the simulator that reach every situation.

    python tools/choose_seeds.py [--seeds 0:300] [--also positions] [--minutes 5]

Runs the seeds, and prints a selection that takes little processor time. In it each
fault, and each situation that a suite must reach, occurs ``--times`` times: if a change
of the product makes some seeds miss one, other seeds still reach it. The list goes
into ``CHOSEN`` of a test file in ``tests/simulation``, which `make test` runs.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from simulator.campaign import CampaignOptions, Summary, judge

TIMES = 3


def choose(
    reached: Mapping[int, Collection[str]], cost: Mapping[int, float], *, times: int
) -> list[int]:
    """Return seeds that reach each name ``times`` times, or as often as all seeds do.

    Adds in turn the seed that reaches most missing names for its cost.

    Args:
        reached: Names of the situations and faults that each seed reaches.
        cost: Cost of each seed, in any unit.
        times: How many of the returned seeds must reach each name.
    """
    all_names = Counter(name for names in reached.values() for name in names)
    wanted = Counter({name: min(times, count) for name, count in all_names.items()})
    left, chosen = set(reached), []
    while +wanted:
        best = max(
            sorted(left),
            key=lambda seed: sum(wanted[n] > 0 for n in reached[seed]) / cost[seed],
        )
        left.remove(best)
        chosen.append(best)
        wanted.subtract(dict.fromkeys(reached[best], 1))
    return sorted(chosen)


def main(arguments: list[str]) -> int:
    """Run the seeds and print the chosen ones; return an exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", default="0:300", metavar="FIRST:END")
    parser.add_argument("--also", default="", metavar="NAME,...")
    parser.add_argument("--minutes", type=int, default=10)
    parser.add_argument("--times", type=int, default=TIMES)
    asked = parser.parse_args(arguments)
    first, _, end = asked.seeds.partition(":")
    also = tuple(filter(None, asked.also.split(",")))
    options = CampaignOptions(also=also, minutes=asked.minutes)
    found = {seed: judge(seed, options) for seed in range(int(first), int(end))}
    broken = [seed for seed, outcome in found.items() if outcome.broken]
    if broken:
        print(f"these seeds broke a rule: {broken}", file=sys.stderr)
        return 1
    asked_for = Summary(build="", options=options).situations
    chosen = choose(
        {
            seed: {*asked_for.keys() & each.seen.keys(), *each.faults}
            for seed, each in found.items()
        },
        {seed: max(1, each.cpu_ms) for seed, each in found.items()},
        times=asked.times,
    )
    took_ms = sum(found[seed].cpu_ms for seed in chosen)
    print(chosen)
    print(f"{len(chosen)} seeds, {took_ms / 1000:.1f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
