"""Broken variants in simulated fleets, for the tests of simulations."""

import pytest

from simulator.plan import MINUTE_MS
from simulator.simulate import SimulationFailed, simulate


def found_by(plant, monkeypatch, *, seed, faults, minutes):
    """Plant a mistake in a seed that is sound; return the judge and what it found."""
    simulate(seed, faults=faults, duration_ms=minutes * MINUTE_MS)
    plant(monkeypatch)
    with pytest.raises(SimulationFailed) as caught:
        simulate(seed, faults=faults, duration_ms=minutes * MINUTE_MS)
    return [caught.value.judge, caught.value.invariant]
