"""Fleets in which admins fence processes and schedule pauses: a slice of many seeds.

Full size: ``PROOF=1``, or ``python -m simulator --also fences,schedules``.
"""

from collections import Counter

import pytest
import slices
import variants
from seedkit import found_by

from simulator.campaign import CampaignOptions, run_seeds
from simulator.coverage import FENCED, SCHEDULED
from simulator.plan import FENCES, HANDOFFS, MINUTE_MS, SCHEDULES
from simulator.sidecar.simulate import simulate_hosted
from simulator.simulate import simulate

# choose_seeds.py --seeds 0:160 --also fences,schedules --minutes 4 --times 2
CHOSEN = [10, 11, 13, 30, 44, 59, 67, 91, 100, 109, 151]
SEEDS = slices.seeds_of(quick=CHOSEN, full=1_000)
WITH_BOTH = CampaignOptions(also=(FENCES, SCHEDULES), minutes=4)


@pytest.mark.slow
def test_fenced_processes_are_replaced_and_scheduled_pauses_begin():
    summary = run_seeds(SEEDS, WITH_BOTH, jobs=1)
    assert summary.broken == []
    wanted = {*FENCED, *SCHEDULED}
    assert {name for name in wanted if not summary.seen[name]} == set()


def test_a_seed_repeats_byte_for_byte():
    first, second = (
        simulate(7, also=(FENCES, SCHEDULES), duration_ms=2 * MINUTE_MS)
        for _ in range(2)
    )
    assert first == second
    assert any("is fenced" in line for line in first.transcript)
    assert any("is scheduled" in line for line in first.transcript)


# Once, in seed 19, a client whose stream of events was broken did not end.
HOSTED_SEEDS = slices.seeds_of(quick=[2, 19, 30], full=200)
HOSTED_FAULTS = (FENCES, "death", "stop", "late", "crash")


@pytest.mark.slow
@pytest.mark.parametrize(
    "beside", [(), (HANDOFFS, "pause", "churn", "line", "answers")]
)
def test_members_of_sidecars_are_fenced_and_replaced(beside, record_property):
    seen = Counter()
    for seed in HOSTED_SEEDS:
        seen.update(simulate_hosted(seed, faults=(*HOSTED_FAULTS, *beside)).seen)
    record_property("seeds", len(HOSTED_SEEDS))
    for name in ("fenced_live", "fence_repeated", "fence_noticed"):
        assert seen[name], name


BROKEN = variants.listed("broken fences and scheduled pauses")
BEFORE = (FENCES, "late", "stop")
VARIANTS = [
    pytest.param(variants.renew_a_fenced_client, 3, BEFORE, id="renew"),
    pytest.param(
        variants.claim_as_a_fenced_client, 22, (*BEFORE, "copies", "crash"), id="claim"
    ),
    pytest.param(variants.hand_out_though_fenced, 1, (FENCES,), id="hand-out"),
    pytest.param(variants.never_begin, 0, (SCHEDULES,), id="never-begin"),
    pytest.param(
        variants.begin_over_another_operation, 3, (SCHEDULES,), id="begin-over"
    ),
]


def test_the_table_lists_every_variant():
    assert set(BROKEN) == {each.values[0].__name__ for each in VARIANTS}


@pytest.mark.parametrize(("plant", "seed", "faults"), VARIANTS)
def test_a_broken_variant_is_caught(monkeypatch, plant, seed, faults):
    found = found_by(plant, monkeypatch, seed=seed, faults=faults, minutes=3)
    assert [found.judge, found.invariant] == BROKEN[plant.__name__]
