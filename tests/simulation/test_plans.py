"""Groups that follow Plans, some of them nonsense (PROTOCOL 9.2): some of many seeds.

In a part of the worlds few members may plan, or none. Full size: ``PROOF=1``, or
``python -m simulator --also plans``.
"""

import pytest
import slices
import variants

from simulator.campaign import CampaignOptions, run_seeds
from simulator.coverage import PLANNED
from simulator.plan import MINUTE_MS, PLANS, can_plan
from simulator.simulate import SimulationFailed, simulate

SEEDS = slices.seeds_of(quick=range(20), full=1_000)
ALONE = (PLANS, "crash", "churn", "stop")


@pytest.mark.slow
def test_every_key_is_owned_whatever_plans_name():
    options = CampaignOptions(also=(PLANS,), minutes=3)
    summary = run_seeds(SEEDS, options, jobs=1)
    assert summary.broken == []
    assert [name for name in PLANNED if not summary.seen[name]] == []


def test_a_seed_repeats_byte_for_byte():
    first, second = (
        simulate(2, also=(PLANS,), duration_ms=MINUTE_MS) for _ in range(2)
    )
    assert first == second
    assert first.seen["planned"]


def test_there_are_worlds_without_any_planner():
    none = [seed for seed in range(40) if not any(planners(seed))]
    some = [seed for seed in range(40) if 0 < sum(planners(seed)) < 20]
    assert none
    assert some


def planners(seed):
    return [can_plan(seed, start) for start in range(20)]


BROKEN = variants.listed("broken plans")


def test_the_table_lists_every_variant():
    assert list(BROKEN) == [variants.claim_only_what_the_policy_names.__name__]


def test_coverage_left_to_plans_is_caught(monkeypatch):
    simulate(7, faults=ALONE, duration_ms=MINUTE_MS)
    plant = variants.claim_only_what_the_policy_names
    plant(monkeypatch)
    with pytest.raises(SimulationFailed) as caught:
        simulate(7, faults=ALONE, duration_ms=MINUTE_MS)
    assert [caught.value.judge, caught.value.invariant] == BROKEN[plant.__name__][1:]
