"""Groups that follow Plans, some of them nonsensical (9.2): some of many seeds.

In some fleets few members may plan, or none. Full size: ``PROOF=1``, or
``python -m simulator --also plans``.
"""

import planvariants
import pytest
import slices
import variants
from enginekit import H, lines, spec, world, write
from logkit import planned, settings
from seedkit import found_by

from kafka_marshal.protocol.records import ClaimingPartition, HandoffOffer, Plan
from simulator.campaign import CampaignOptions, run_seeds
from simulator.coverage import PLANNED
from simulator.plan import MINUTE_MS, PLANS, can_plan
from simulator.simulate import simulate

SEEDS = slices.seeds_of(quick=range(12), full=1_000)
ALONE = (PLANS, "crash", "churn", "stop")


@pytest.mark.slow
def test_every_key_is_owned_whatever_a_plan_assigns():
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


def test_some_seeds_have_few_members_that_may_plan_or_none():
    none = [seed for seed in range(40) if not any(planners(seed))]
    some = [seed for seed in range(40) if 0 < sum(planners(seed)) < 20]
    assert none
    assert some


def planners(seed):
    return [can_plan(seed, start) for start in range(20)]


BROKEN = variants.listed("broken plans")


def test_the_table_lists_every_variant():
    assert list(BROKEN) == [variants.claim_only_what_the_policy_names.__name__]


def test_members_that_claim_only_planned_keys_are_caught(monkeypatch):
    plant = variants.claim_only_what_the_policy_names
    found = found_by(plant, monkeypatch, seed=7, faults=ALONE, minutes=1)
    assert [found.judge, found.invariant] == BROKEN[plant.__name__]


# --- mistakes that only cost moves and records, in members on virtual time


KEYS = 12
WITHIN_MS = 4 * H
COSTS = variants.listed("broken plans of members")


def moves_after_an_old_plan():
    """Return how many claims follow a Plan whose vector precedes all claims."""
    cluster = world(partitions=1, records=(1,) * KEYS)
    write(cluster, settings(policy="planner"))
    nodes = [cluster.node(name, spec=spec()) for name in "ab"]
    cluster.run_until(lambda: {len(node.held) for node in nodes} == {6}, 4 * H)
    plans = [line for line in lines(cluster) if isinstance(line.record, Plan)]
    everything = ("a", 0, range(KEYS))
    write(cluster, planned(len(plans), everything, vector=((0, 0),)))
    begun = len(lines(cluster))
    cluster.run(6 * H)
    found = lines(cluster)[begun:]
    return sum(isinstance(line.record, ClaimingPartition) for line in found)


def offers_to_one_that_never_gets_warm():
    """Return the number of offers in nearly twice the time that one offer lasts."""
    cluster = world(partitions=1, records=(4, 4))
    write(cluster, settings(handoff_ms=WITHIN_MS))
    a = cluster.node("a", spec=spec())
    cluster.run_until(lambda: len(a.held) == 2, 3 * H)
    b = cluster.node("b")
    b.warming.is_held = True
    b.consume(spec(on_warm=lambda *_: None))
    offered = lambda: [  # noqa: E731
        line.record
        for line in lines(cluster)
        if isinstance(line.record, HandoffOffer) and line.record.successor
    ]
    cluster.run_until(offered, 4 * H)
    cluster.run(2 * WITHIN_MS - H)
    return len(offered())


# How to measure the cost of each variant, and the cost without it.
MEASURED = {
    planvariants.follow_entries_after_a_claim: (moves_after_an_old_plan, 0),
    planvariants.offer_a_lapsed_pair_at_once: (offers_to_one_that_never_gets_warm, 1),
}


def test_the_table_lists_every_variant_of_members():
    assert set(COSTS) == {plant.__name__ for plant in MEASURED}


@pytest.mark.parametrize("plant", MEASURED, ids=lambda plant: plant.__name__)
def test_a_broken_member_writes_more_claims_or_offers(monkeypatch, plant):
    measure, expected = MEASURED[plant]
    assert measure() == expected
    plant(monkeypatch)
    assert measure() > expected
