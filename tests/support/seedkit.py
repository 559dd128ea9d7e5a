"""Broken variants in simulated fleets, for the tests of simulations."""

import pytest

from simulator.plan import MINUTE_MS
from simulator.simulate import SimulationFailed, simulate
from simulator.world import World


class Enough(BaseException):
    """Ends a run at its planned time; the simulator does not catch it."""


def found_by(plant, monkeypatch, *, seed, minutes, **options):
    """Plant a mistake in the run of a seed; return the failure of the run.

    The same run without the mistake must not fail up to that time.
    """
    worlds, plain = [], World.run

    def run():
        simulate(seed, duration_ms=minutes * MINUTE_MS, **options)

    def noted(world, *args, **rest):
        worlds.append(world)
        return plain(world, *args, **rest)

    def limited(world, *_, **__):
        plain(world, worlds[0].now_ms - world.now_ms)
        raise Enough

    with monkeypatch.context() as patch:
        patch.setattr(World, "run", noted)
        plant(patch)
        with pytest.raises(SimulationFailed) as caught:
            run()
    if len(worlds) > 1:  # the run failed after its faults had ended
        run()
    else:
        monkeypatch.setattr(World, "run", limited)
        with pytest.raises(Enough):
            run()
    return caught.value
