"""Garbage policies cost balance and time, never safety or coverage (PROTOCOL 9.6).

Full size: ``PROOF=1``, or ``python -m simulator --also garbage-policy``.
"""

import pytest
import slices
import variants

from simulator.campaign import CampaignOptions, run_seeds
from simulator.outcome import RunFailed
from simulator.plan import GARBAGE_POLICY, MINUTE_MS
from simulator.sidecar.simulate import simulate_hosted
from simulator.simulate import simulate

SEEDS = slices.seeds_of(quick=range(10), full=1_000)
HOSTED_SEEDS = slices.seeds_of(quick=range(4), full=100)
HOSTED = ("death", "crash", "churn", "stop", GARBAGE_POLICY)
ALONE = (GARBAGE_POLICY,)


@pytest.mark.slow
def test_every_key_is_owned_under_garbage_policies():
    options = CampaignOptions(also=(GARBAGE_POLICY,), minutes=3)
    assert run_seeds(SEEDS, options, jobs=1).broken == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", HOSTED_SEEDS)
def test_every_key_of_sidecars_is_owned_under_a_garbage_policy(seed):
    assert simulate_hosted(seed, faults=HOSTED, rounds=60).claims > 0


def direct():
    simulate(2, faults=ALONE, duration_ms=MINUTE_MS)


def hosted():
    simulate_hosted(2, faults=ALONE, rounds=20)


BROKEN = variants.listed("broken coverage")
RUNS = [pytest.param(direct, id="direct"), pytest.param(hosted, id="sidecar")]


def test_the_table_lists_every_variant():
    assert list(BROKEN) == [variants.claim_only_what_the_policy_names.__name__]


@pytest.mark.parametrize("run", RUNS)
def test_members_that_claim_only_policy_keys_are_caught(monkeypatch, run):
    run()
    plant = variants.claim_only_what_the_policy_names
    plant(monkeypatch)
    with pytest.raises(RunFailed) as caught:
        run()
    assert [caught.value.judge, caught.value.invariant] == BROKEN[plant.__name__]
