"""How much of a long test runs: a slice in ``make test``, all in ``make proof``.

Only this module reads the environment:

- ``PROOF=1``: full size, also tests marked ``proof``.
- ``SIMULATION_SEEDS=1000:1200``: other seeds of the simulation.

Time limits, here, in pyproject.toml and in limits.py, only end tests that hang: on a
busy machine a test that computes gets a fraction of a processor. The limit of a test is
``timeout`` in pyproject.toml, in seconds of a quiet machine; no test has its own. A
process that a test waits for has `HANG_S`, in elapsed seconds: on a quiet machine the
limit of the test ends the wait earlier.
"""

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

IS_PROOF = os.environ.get("PROOF") == "1"
HANG_S = 5 * 3_600 if IS_PROOF else 1_500


def slice_of(*, quick: T, full: T) -> T:
    """Return the size for this run."""
    return full if IS_PROOF else quick


def seeds_of(*, quick: Sequence[int], full: int) -> Sequence[int]:
    """Return the seeds of this run: `SIMULATION_SEEDS`, if set; at full size from 0 on.

    Args:
        quick: Those of ``make test``, for example chosen by `tools/choose_seeds.py`.
        full: Their number at full size.
    """
    chosen = os.environ.get("SIMULATION_SEEDS")
    if not chosen:
        return slice_of(quick=quick, full=range(full))
    first, _, end = chosen.partition(":")
    return range(int(first), int(end))


def deselect_proof(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove tests that are marked ``proof``, unless this run has full size.

    A marker with arguments applies only to these values of ``via`` or ``transport``.
    """
    if not IS_PROOF:
        deselect(config, items, _is_for_proof)


def deselect(
    config: pytest.Config,
    items: list[pytest.Item],
    is_out: Callable[[pytest.Item], bool],
) -> None:
    """Remove tests, and report them to pytest as deselected."""
    out = [item for item in items if is_out(item)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


def _is_for_proof(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("proof")
    if marker is None or not marker.args:
        return marker is not None
    params = item.callspec.params  # type: ignore[attr-defined]
    return not {params.get("via"), params.get("transport")}.isdisjoint(marker.args)
