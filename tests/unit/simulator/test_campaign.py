"""Runs of many seeds, and their summary."""

import pytest
import variants

from simulator import campaign
from simulator.campaign import (
    SUITE_SEEDS_MIN,
    Broken,
    CampaignOptions,
    Outcome,
    Summary,
    judge,
    run_seeds,
)
from simulator.coverage import FENCED, SCHEDULED, SET, SITUATIONS
from simulator.plan import FENCES, POSITIONS, SCHEDULES
from simulator.world import World

AMO_SEED = 0  # delivers at most once
SHORT = CampaignOptions(faults=("crash",), minutes=1)


def summary_of(count, *, seen=(), broken=None, options=None):
    summary = Summary(build="1.0", options=options or CampaignOptions())
    for _ in range(count):
        summary.add(
            Outcome(
                broken=broken,
                seen=dict.fromkeys(seen, 1),
                faults={"crash": 2},
                virtual_ms=600_000,
                cpu_ms=500,
            )
        )
    return summary


def test_two_processes_reach_the_same_summary_as_one():
    alone, shared = (run_seeds(range(2), SHORT, jobs=jobs) for jobs in (1, 2))
    assert alone.held
    assert alone.seen == shared.seen
    assert (alone.seed_count, alone.virtual_ms) == (2, shared.virtual_ms)


def test_the_summary_adds_up_its_seeds():
    summary = summary_of(4)
    assert (summary.seeds_per_minute, summary.virtual_ms) == (120, 2_400_000)
    assert summary.faults == {"crash": 8}


def test_a_suite_that_never_reaches_a_situation_does_not_hold():
    *most, last = SITUATIONS
    assert summary_of(SUITE_SEEDS_MIN, seen=SITUATIONS).held
    missing = summary_of(SUITE_SEEDS_MIN, seen=most)
    assert (missing.held, missing.never) == (False, (last,))


@pytest.mark.parametrize(
    "summary",
    [
        pytest.param(summary_of(SUITE_SEEDS_MIN - 1), id="few-seeds"),
        pytest.param(summary_of(SUITE_SEEDS_MIN, options=SHORT), id="few-faults"),
    ],
)
def test_a_run_smaller_than_a_suite_may_miss_situations(summary):
    assert summary.never
    assert summary.held


def test_a_summary_with_a_broken_seed_does_not_hold():
    assert not summary_of(
        1, broken=Broken(seed=7, invariant="S4", message="two", faults=(1,))
    ).held


def test_a_failure_is_reported_with_the_faults_that_cause_it(monkeypatch):
    variants.grant_again(monkeypatch)
    whole = judge(AMO_SEED, CampaignOptions(minutes=1)).broken
    small = judge(AMO_SEED, CampaignOptions(minutes=1, shrinks=True)).broken
    assert {(each.seed, each.invariant) for each in (whole, small)} == {
        (AMO_SEED, "S3")
    }
    assert set(small.faults) <= set(whole.faults)
    assert small.message


def test_a_seed_that_raises_an_error_is_broken_and_others_still_run(monkeypatch):
    check = World.check_leases

    def fail(self, nodes):
        if self.plan.seed == 1:
            raise IndexError("list index out of range")
        check(self, nodes)

    monkeypatch.setattr(World, "check_leases", fail)
    options = CampaignOptions(faults=("crash",), minutes=1, shrinks=True)
    summary = run_seeds(range(3), options, jobs=1)
    (broken,) = summary.broken
    assert (summary.seed_count, broken.seed, broken.invariant) == (3, 1, "error")
    message = broken.message
    assert message.startswith("error: IndexError: list index out of range (test_")
    assert message.endswith("in fail)")


def test_a_plan_keeps_the_requested_options():
    faults = campaign.CampaignOptions(faults=("crash",), minutes=60).plan(1).faults
    kept = (
        campaign.CampaignOptions(faults=("crash",), minutes=60, only=(2,))
        .plan(1)
        .faults
    )
    assert kept == faults[1:2]


def test_a_suite_with_set_positions_requires_their_situations():
    options = CampaignOptions(also=(POSITIONS,))
    assert POSITIONS in options.plan(1).kinds
    assert summary_of(SUITE_SEEDS_MIN, seen=SET, options=options).held
    assert summary_of(SUITE_SEEDS_MIN, options=options).never == tuple(SET)


def test_a_suite_with_fences_and_schedules_requires_their_situations():
    options = CampaignOptions(also=(FENCES, SCHEDULES))
    assert {FENCES, SCHEDULES} <= {*options.plan(1).kinds}
    never = summary_of(SUITE_SEEDS_MIN, options=options).never
    assert never == (*FENCED, *SCHEDULED)
