"""How much of a long test runs: a slice in ``make test``, all in ``make proof``.

Only this module reads the environment:

- ``PROOF=1``: full size.
- ``SIMULATION_SEEDS=1000:1200``: other seeds of the simulation.
"""

import os
from typing import TypeVar

T = TypeVar("T")

IS_PROOF = os.environ.get("PROOF") == "1"


def slice_of(*, quick: T, full: T) -> T:
    """Return the size of this run."""
    return full if IS_PROOF else quick


def seeds_of(*, quick: int, full: int) -> range:
    """Return the seeds of this run, from 0 unless the environment has others."""
    chosen = os.environ.get("SIMULATION_SEEDS")
    if not chosen:
        return range(slice_of(quick=quick, full=full))
    first, _, end = chosen.partition(":")
    return range(int(first), int(end))
