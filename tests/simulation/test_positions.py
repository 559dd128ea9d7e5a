"""Admins set positions of running groups, and crash meanwhile: some of many seeds.

Full size: ``PROOF=1``, or ``python -m simulator --also positions --seeds 0:1000``.
"""

from collections import Counter

import pytest
import slices
import variants
from seedkit import found_by

from kafka_marshal.config import Delivery
from kafka_marshal.engine.rebuilding import OwnGrants, Rebuilder
from simulator.campaign import CampaignOptions, run_seeds
from simulator.coverage import SET
from simulator.plan import MINUTE_MS, POSITIONS, RECREATE, TRUNCATE
from simulator.sidecar.simulate import simulate_hosted
from simulator.simulate import simulate

# choose_seeds.py --seeds 0:200 --also positions --minutes 5 --times 2
CHOSEN = [22, 28, 30, 55, 68, 78, 116, 126, 151, 158, 174, 182, 185]
SEEDS = slices.seeds_of(quick=CHOSEN, full=1_000)
WITH_POSITIONS = CampaignOptions(also=(POSITIONS,), minutes=5)
# Situations that a few dozen seeds need not reach.
SELDOM = {"stage_held", "decide_refused"}


@pytest.mark.slow
def test_every_operation_moves_all_its_keys_or_none():
    summary = run_seeds(SEEDS, WITH_POSITIONS, jobs=1)
    assert summary.broken == []
    wanted = set(SET) if summary.is_suite else set(SET) - SELDOM
    assert {name for name in wanted if not summary.seen[name]} == set()


KILLS = slices.slice_of(quick=3, full=1_000)
DIED = [name for name in SET if name.startswith("admin_died")]


def test_admins_killed_at_any_step_leave_no_mixed_positions():
    """The judges fail a run with mixed positions, or with an undo that is not exact."""
    faults, seen = (POSITIONS, "crash", "late", "stop"), Counter()
    for seed in range(1_000, 1_000 + 2 * KILLS):
        seen.update(simulate(seed, faults=faults, duration_ms=3 * MINUTE_MS).seen)
        if sum(seen[name] for name in DIED) >= KILLS:
            break
    assert sum(seen[name] for name in DIED) >= KILLS
    if slices.IS_PROOF:
        assert {name for name in (*DIED, "set_undone") if not seen[name]} == set()


@pytest.mark.parametrize("delivery", list(Delivery))
def test_setting_positions_of_a_recreated_topic_breaks_no_rule(delivery):
    faults = (POSITIONS, RECREATE, "crash", "late", "stop")
    for seed in range(slices.slice_of(quick=3, full=100)):
        simulate(seed, delivery=delivery, faults=faults, duration_ms=3 * MINUTE_MS)


# In each seed a log loses a set position, or grants before one (PROTOCOL 7.5).
LOST = [
    pytest.param(107987328198425, ("failover", "stop"), 4, id="several-at-most-once"),
    pytest.param(196459536769894, (), 2, id="at-most-once"),
    pytest.param(44495460054662, (), 2, id="at-least-once"),
    pytest.param(156075421870508, (), 4, id="lost-grants-of-a-released-key"),
    pytest.param(186358674492321, ("cut", "slow"), 2, id="set-again-by-its-lock"),
    pytest.param(48, (), 3, id="a-lost-key-begins-at-the-committed-offset"),
]


@pytest.mark.parametrize(("seed", "beside", "minutes"), LOST)
def test_the_loss_of_a_set_position_breaks_no_rule(seed, beside, minutes):
    faults = tuple(sorted({POSITIONS, TRUNCATE, *beside}))
    assert simulate(seed, faults=faults, duration_ms=minutes * MINUTE_MS).claims > 0


HOSTED = slices.slice_of(quick=4, full=100)


def test_admins_set_positions_of_a_group_that_uses_sidecars():
    ended = Counter()
    for seed in range(HOSTED):
        faults = (POSITIONS, "death", "crash", "late", "stop", "churn")
        ended.update(simulate_hosted(seed, faults=faults).seen)
    assert all(ended[f"admin {how}"] for how in ("dies", "ends", "gives up"))


def test_a_seed_repeats_byte_for_byte():
    first, second = (
        simulate(7, also=(POSITIONS,), duration_ms=2 * MINUTE_MS) for _ in range(2)
    )
    assert first == second
    assert any("begins with" in line for line in first.transcript)


BROKEN = variants.listed("broken set positions of fleets")
LATE = (POSITIONS, "late", "copies", "crash", "stop")
PAUSED = (POSITIONS, "pause", "cut", "churn", "delay")
LOSING = (POSITIONS, TRUNCATE)


def report_no_lost_grants(patch):
    """A process reports none of its grants that the log has lost."""
    patch.setattr(Rebuilder, "_expose", lambda *_: None)


def forget_released_grants(patch):
    """A process does not report lost grants of keys that it had released."""
    patch.setattr(OwnGrants, "take", lambda *_: None)


def rely_on_a_lock(patch):
    """No process reports lost grants where the lock of a set position remains."""
    patch.setattr(Rebuilder, "_expose_locked", lambda *_: None)


VARIANTS = [
    pytest.param(variants.leave_it_to_the_admin, 1, (POSITIONS,), id="no-members"),
    pytest.param(variants.resolve_without_the_home, 4, LATE, id="without-the-home"),
    pytest.param(variants.keep_granted, 0, PAUSED, id="keep-granted"),
    pytest.param(variants.drop_the_verdict_with_the_pause, 20, LATE, id="drop-verdict"),
    pytest.param(variants.resolve_any_lock, 3, LATE, id="resolve-any-lock"),
    pytest.param(variants.resolve_one_key, 1, LATE, id="resolve-one-key"),
    pytest.param(variants.resolve_one_key, 1, LOSING, id="resolve-one-key-of-a-loss"),
    pytest.param(report_no_lost_grants, 0, LOSING, id="no-report"),
    pytest.param(forget_released_grants, 70, (*LOSING, "pause"), id="forget-grants"),
    pytest.param(rely_on_a_lock, 198, LOSING, id="rely-on-lock"),
]


def test_the_table_lists_every_variant():
    planted = {each.values[0].__name__ for each in VARIANTS}
    assert {name for name, row in BROKEN.items() if row[0] != "unit"} == planted


@pytest.mark.parametrize(("plant", "seed", "faults"), VARIANTS)
def test_a_broken_variant_is_caught(monkeypatch, plant, seed, faults):
    found = found_by(plant, monkeypatch, seed=seed, faults=faults, minutes=3)
    assert [found.judge, found.invariant] == BROKEN[plant.__name__]
