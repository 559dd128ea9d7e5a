"""The data topic grows, and admins die meanwhile: a slice of many seeds.

Full size: ``PROOF=1``, or ``python -m simulator --also growth``.
"""

import pytest
import slices
import variants
from seedkit import found_by

from kafka_marshal.engine import context, start_positions
from kafka_marshal.protocol.growths import Source
from simulator.campaign import CampaignOptions, run_seeds
from simulator.coverage import GREW
from simulator.plan import GROWTH, MINUTE_MS, RECREATE, RESIZE, TRUNCATE
from simulator.simulate import simulate

# Seed 14 alone reaches every situation.
SEEDS = slices.seeds_of(quick=[7, 9, 14], full=1_000)


@pytest.mark.slow
def test_new_partitions_wait_for_the_old_ones():
    summary = run_seeds(SEEDS, CampaignOptions(also=(GROWTH,), minutes=3), jobs=1)
    assert summary.broken == []
    assert {name for name in GREW if not summary.seen[name]} == set()


@pytest.mark.slow
@pytest.mark.parametrize("beside", [RESIZE, RECREATE, TRUNCATE])
def test_a_topic_grows_beside_other_faults(beside):
    seeds = slices.seeds_of(quick=[3], full=300)
    options = CampaignOptions(also=(GROWTH, beside), minutes=2)
    summary = run_seeds(seeds, options, jobs=1)
    assert summary.broken == []
    assert summary.seen["growth_ended"]


def test_a_seed_repeats_byte_for_byte():
    first, second = (
        simulate(2, also=(GROWTH,), duration_ms=2 * MINUTE_MS) for _ in range(2)
    )
    assert first == second
    assert any("the growth from" in line for line in first.transcript)


BROKEN = variants.listed("broken growths of fleets")


def begin_at_once(patch):
    """A member claims a new partition, whatever is left in the old one."""
    patch.setattr(context, "awaited_source", lambda *_, **__: None)


def wait_only_for_the_ends(patch):
    """A new partition waits for the ends, and not for the group's position."""
    patch.setattr(Source, "has_passed", lambda self, *_, **__: self.end is not None)


def begin_without_the_look_up(patch):
    """A member begins what it has won, although it has not read all growths."""
    patch.setattr(start_positions, "awaited", lambda *_, **__: None)


def wait_for_ever(patch):
    """A new partition waits, even if the old one has reached its end."""
    patch.setattr(Source, "has_passed", lambda *_, **__: False)


VARIANTS = [
    pytest.param(begin_at_once, 4, (GROWTH,), 3, id="at-once"),
    pytest.param(
        wait_only_for_the_ends, 3, (GROWTH, "stop", "crash", "cut"), 3, id="ends"
    ),
    pytest.param(
        begin_without_the_look_up, 7, (GROWTH, "deaf", "delay", "late"), 3, id="look-up"
    ),
    pytest.param(wait_for_ever, 1, (GROWTH,), 2, id="for-ever"),
]


def test_the_table_lists_every_variant():
    assert set(BROKEN) == {each.values[0].__name__ for each in VARIANTS}


@pytest.mark.parametrize(("plant", "seed", "faults", "minutes"), VARIANTS)
def test_a_broken_variant_is_caught(monkeypatch, plant, seed, faults, minutes):
    found = found_by(plant, monkeypatch, seed=seed, faults=faults, minutes=minutes)
    assert [found.judge, found.invariant] == BROKEN[plant.__name__]
