"""Members warm up soon, late, never, or die at it (PROTOCOL 9.5): some of many seeds.

Full size: ``PROOF=1``, or ``python -m simulator --also handoffs``.
"""

import pytest
import slices
import variants

from simulator.campaign import CampaignOptions, run_seeds
from simulator.coverage import HANDED
from simulator.plan import HANDOFFS, MINUTE_MS
from simulator.simulate import SimulationFailed, simulate

# Of the seeds 0 to 11, those that hand over or lose a process at it, in 4 minutes.
CHOSEN = [0, 1, 3, 4, 11]
LAPSED = "handoff_lapsed"  # seldom, where much else goes wrong
SEEDS = slices.seeds_of(quick=CHOSEN, full=1_000)


@pytest.mark.slow
def test_every_key_is_owned_however_members_warm_up():
    options = CampaignOptions(also=(HANDOFFS,), minutes=4)
    summary = run_seeds(SEEDS, options, jobs=1)
    assert summary.broken == []
    assert {name for name in HANDED if not summary.seen[name]} <= {LAPSED}


def test_an_offer_to_a_member_that_never_gets_warm_lapses():
    report = simulate(1, faults=(HANDOFFS,), duration_ms=8 * MINUTE_MS)
    assert report.seen[LAPSED]
    assert report.seen["handed_over_warm"]


def test_a_seed_repeats_byte_for_byte():
    first, second = (
        simulate(14, also=(HANDOFFS,), duration_ms=2 * MINUTE_MS) for _ in range(2)
    )
    assert first == second
    assert first.seen["successor_died_warming"]


BROKEN = variants.listed("broken handoffs of fleets")


def test_the_table_lists_every_variant():
    assert list(BROKEN) == [variants.go_on_after_a_handoff.__name__]


def test_an_owner_that_goes_on_after_a_handoff_is_caught(monkeypatch):
    faults = (HANDOFFS, "stop", "late")
    report = simulate(1, faults=faults, duration_ms=3 * MINUTE_MS)
    assert report.seen["handed_over_warm"]
    plant = variants.go_on_after_a_handoff
    plant(monkeypatch)
    with pytest.raises(SimulationFailed) as caught:
        simulate(1, faults=faults, duration_ms=3 * MINUTE_MS)
    assert [caught.value.judge, caught.value.invariant] == BROKEN[plant.__name__][1:]
