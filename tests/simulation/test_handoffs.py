"""Members warm up soon, late or never, or crash meanwhile (9.5): some of many seeds.

Full size: ``PROOF=1``, or ``python -m simulator --also handoffs``.
"""

import pytest
import slices
import variants

from kafka_marshal.engine.warm_fetches import WarmRecords
from kafka_marshal.ports import joined_records
from simulator.campaign import CampaignOptions, run_seeds
from simulator.coverage import HANDED
from simulator.plan import HANDOFFS, MINUTE_MS
from simulator.simulate import SimulationFailed, simulate

# Those of the seeds 0 to 15 with a handoff, or a process that crashes while it warms
# up, in 4 minutes.
CHOSEN = [0, 1, 4, 12, 14]
LAPSED = "handoff_lapsed"  # rare beside other faults
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


def use_all_warm_records(patch):
    """A successor hands out all fetched records, also those below its position."""

    def since(self, _position, *, topic_id, token):
        return joined_records(self.chunks, token)

    patch.setattr(WarmRecords, "since", since)


# Each with a seed that hands a partition over, and the other faults in it.
PLANTED = [
    (variants.go_on_after_a_handoff, 1, ("stop", "late")),
    (use_all_warm_records, 3, ()),
]


def test_the_table_lists_every_variant():
    assert set(BROKEN) == {plant.__name__ for plant, *_ in PLANTED}


@pytest.mark.parametrize(("plant", "seed", "faults"), PLANTED)
def test_a_broken_handoff_is_caught(monkeypatch, plant, seed, faults):
    faults = (HANDOFFS, *faults)
    report = simulate(seed, faults=faults, duration_ms=3 * MINUTE_MS)
    assert report.seen["handed_over_warm"]
    plant(monkeypatch)
    with pytest.raises(SimulationFailed) as caught:
        simulate(seed, faults=faults, duration_ms=3 * MINUTE_MS)
    assert [caught.value.judge, caught.value.invariant] == BROKEN[plant.__name__]
