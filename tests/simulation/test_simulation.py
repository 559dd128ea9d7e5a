"""A bounded slice of the simulation: some of many seeds, and broken variants.

Full size: ``make sim``, and ``PROOF=1`` for the seeds of this file.

Run other seeds with: SIMULATION_SEEDS=1000:1200 pytest tests/simulation
"""

import gc
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import slices
import variants
from seedkit import found_by

from kafka_marshal.config import Delivery
from kafka_marshal.engine.rebuilding import OwnGrants, Rebuilder
from simulator.campaign import CampaignOptions, run_seeds, shrunk
from simulator.checkers import OPERATIONS
from simulator.coverage import RECREATED, TRUNCATED
from simulator.plan import CONDITIONS, MINUTE_MS, draw
from simulator.simulate import (
    FAULTS,
    RECREATE,
    TRUNCATE,
    SimulationFailed,
    run_plan,
    simulate,
)
from simulator.world import World

# Each situation twice; `make sim` runs many more:
# choose_seeds.py --seeds 0:300 --times 2
CHOSEN = [
    *(10, 22, 67, 68, 109, 116, 133, 138, 146, 162, 182, 191, 202, 224, 239, 252, 266),
    *(294, 296),
]
# And ten that were not chosen.
QUICK = sorted({*CHOSEN, *range(10)})
SEEDS = slices.seeds_of(quick=QUICK, full=500)
AMO = Delivery.AT_MOST_ONCE
# Logs that lose records that were read, and faults that make this harmful.
LOSING = (TRUNCATE, "crash", "stop", "late", "slow", "cut", "churn", "failover")
LOSING_SEEDS = slices.slice_of(quick=range(1000, 1004), full=range(1000, 1100))
# Topics that are deleted and created again, and faults that make this harmful.
RECREATING = (
    RECREATE,
    "crash",
    "stop",
    "late",
    "slow",
    "cut",
    "deaf",
    "churn",
    "pause",
)
RECREATING_SEEDS = slices.slice_of(quick=range(3000, 3004), full=range(3000, 3012))
# Feature levels that change under a fleet, and faults that make this harmful.
HALTING = ("above", "level", "halt", "checkpoint", "crash", "failover", "slow", "deaf")
HALTING_SEEDS = slices.slice_of(quick=range(2000, 2006), full=range(2000, 2100))
HALTED = ("halted", "behind_a_halt", "started_beside_halt", "checkpoint_above")

# Seeds, with their options, that once showed a fault of the product or, where marked,
# of the simulator.
REGRESSIONS = [
    # A key that was taken over from a dead member was released on its behalf.
    (12, {"faults": ("slow", "delay"), "duration_ms": 3 * MINUTE_MS}),
    # Lost grants were not reported: the next owner's grants had passed them.
    (104, {"faults": LOSING, "delivery": AMO, "duration_ms": 4 * MINUTE_MS}),
    # Two claims of one client were accepted, and it used the first.
    (10_430, {}),
    # A refused request of another process was attributed to the owner.
    (224, {}),
    # Offsets that a Reset had discarded were granted to another process, which was
    # judged a repeated grant.
    (1455, {}),
    # A log went back during the search for a state of another log, and was never
    # folded again.
    (104, {"faults": (TRUNCATE, "keep", "crash", "checkpoint")}),
    # A claim of an earlier topic_id followed one of the later, which then no member
    # could claim again.
    (3012, {"faults": RECREATING, "delivery": AMO}),
    # A log lost the change of topic ids, and grants since then were not reported.
    (502, {"faults": (RECREATE, TRUNCATE)}),
    # A Config that was refused everywhere had the era of one not yet written there.
    (70, {}),
    # After more than 64 Configs the tokens of earlier claims changed.
    (47, {}),
    # The only log lost a Config; a member that had read it claimed under an older one.
    (30, {"faults": ("level", TRUNCATE), "duration_ms": MINUTE_MS}),
    (25, {"faults": ("level", TRUNCATE), "duration_ms": MINUTE_MS}),
    # A log that loses records gets no Config to halt at, and none halted (simulator).
    (0, {"faults": ("halt", TRUNCATE), "duration_ms": MINUTE_MS}),
    # A malformed Config counted as a Config (simulator).
    (
        50027,
        {"also": (TRUNCATE, "level"), "delivery": AMO, "duration_ms": 5 * MINUTE_MS},
    ),
    # Offsets that a Reset had discarded were granted again: with the whole log, and
    # with one that had lost the Reset (simulator).
    (50021, {"also": (TRUNCATE,), "delivery": AMO, "duration_ms": 5 * MINUTE_MS}),
    (50017, {"also": (TRUNCATE,), "delivery": AMO, "duration_ms": 5 * MINUTE_MS}),
    # A member that had just been too slow got a key back (simulator).
    (52097, {"duration_ms": 5 * MINUTE_MS}),
]


@pytest.mark.slow
def test_every_invariant_holds_and_every_situation_is_reached():
    summary = run_seeds(SEEDS, CampaignOptions(), jobs=1)
    assert summary.broken == []
    assert not (summary.is_suite or SEEDS == QUICK) or summary.never == ()


@pytest.mark.parametrize(("seed", "options"), REGRESSIONS)
def test_seeds_that_failed_before_pass(seed, options):
    assert simulate(seed, **options).claims > 0


def test_grants_lost_after_a_reset_must_be_reported(monkeypatch):
    """The planted mistake: a process that has read a Reset reports no lost grants."""
    forget, expose, quiet = OwnGrants.forget, Rebuilder._expose, []

    def forget_all(self, is_reset):
        quiet.append(self)
        forget(self, is_reset)

    def expose_some(self, *grants):
        if not any(each is self.grants for each in quiet):
            expose(self, *grants)

    run = partial(
        simulate,
        50000,
        delivery=AMO,
        faults=(TRUNCATE, "reset", "checkpoint", "crash", "failover", "churn"),
        duration_ms=5 * MINUTE_MS,
    )
    assert run().seen["reset"]
    monkeypatch.setattr(OwnGrants, "forget", forget_all)
    monkeypatch.setattr(Rebuilder, "_expose", expose_some)
    with pytest.raises(SimulationFailed, match="nobody reported it"):
        run()


@pytest.mark.slow
def test_every_invariant_holds_where_logs_lose_records():
    summary = run_seeds(LOSING_SEEDS, CampaignOptions(faults=LOSING), jobs=1)
    assert summary.broken == []
    assert all(summary.seen[name] for name in TRUNCATED)


@pytest.mark.slow
@pytest.mark.parametrize("delivery", [Delivery.AT_LEAST_ONCE, AMO])
def test_every_invariant_holds_where_topics_are_recreated(delivery):
    plans = [
        draw(seed, delivery=delivery, faults=RECREATING) for seed in RECREATING_SEEDS
    ]
    seen = Counter()
    for plan in plans:
        seen.update(run_plan(plan).seen)
    assert all(seen[name] for name in RECREATED)


def test_every_invariant_holds_where_a_config_halts_readers():
    summary = run_seeds(
        HALTING_SEEDS, CampaignOptions(faults=HALTING, minutes=4), jobs=1
    )
    assert summary.broken == []
    assert all(summary.seen[name] for name in HALTED)


@pytest.mark.parametrize("seed", [3, 4])
def test_a_seed_repeats_byte_for_byte(seed):
    first, second = (simulate(seed, duration_ms=3 * MINUTE_MS) for _ in range(2))
    assert first == second
    assert len(first.transcript) > 100


ROOT = Path(__file__).resolve().parents[2]
REPEATED = """
from simulator.simulate import simulate

for seed in (47, 70):
    print(simulate(seed, duration_ms=120_000).transcript)
"""


@pytest.mark.slow
def test_hash_seeds_change_no_run():
    found = set()
    for seed in ("0", "4711"):
        done = subprocess.run(
            [sys.executable, "-c", REPEATED],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            timeout=slices.HANG_S,
            check=True,
        )
        found.add(done.stdout)
    assert len(found) == 1
    assert len(found.pop()) > 10_000


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_run_collects_garbage_once_and_only_if_enabled(is_enabled):
    was_enabled = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        gc.collect()
        before_count = gc.get_stats()[0]["collections"]
        simulate(3, duration_ms=MINUTE_MS // 6)
        collections = gc.get_stats()[0]["collections"] - before_count
        assert gc.isenabled() == is_enabled
        assert collections == is_enabled
        assert not is_enabled or not any(
            isinstance(each, World) for each in gc.get_objects()
        )
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_seeds_differ_and_every_fault_is_drawn():
    plans = [draw(seed) for seed in range(80)]
    assert len({plan.faults for plan in plans}) == 80
    assert {kind for plan in plans for kind in plan.kinds} == set(FAULTS)
    struck = {fault.kind for plan in plans for fault in plan.faults}
    assert struck == set(FAULTS) - CONDITIONS


# Each variant, with the seed and the options that show it.
SHORT_MS = 3 * MINUTE_MS
VARIANTS = {
    variants.any_beat_owns: (0, {"faults": ("churn", "late")}),
    variants.renew_in_the_fold: (3, {"faults": ("pause",)}),
    variants.renew_to_an_earlier_end: (14, {"faults": ("level", "stop", "late")}),
    variants.keep_the_last_era_alone: (0, {"faults": ("level",)}),
    variants.renew_on_ack: (0, {"faults": ("pause", "deaf", "stop")}),
    variants.lease_from_read_back: (11, {"faults": ("slow", "delay", "stop", "deaf")}),
    variants.sender_judges: (14, {"faults": ("edge", "stop", "cut")}),
    variants.beat_restarts: (21, {"faults": ("twin", "late", "cut")}),
    variants.grant_again: (0, {"faults": ("delay",), "delivery": AMO}),
    variants.process_without_grant: (0, {"faults": ("late",), "delivery": AMO}),
    variants.grant_by_number: (0, {"faults": ("attempt",), "delivery": AMO}),
    variants.hand_out_after_the_soft_stop: (
        2,
        {"faults": ("cut", "stop"), "delivery": AMO},
    ),
    variants.mark_what_is_handed_out: (11, {"faults": ("crash",), "delivery": AMO}),
    variants.begin_as_if_now: (0, {"faults": ("checkpoint", "keep", "crash")}),
    variants.no_quiet_after_a_reset: (
        8,
        {"faults": ("checkpoint", "reset", "deaf", "stop", "crash")},
    ),
    variants.apply_later_versions: (0, {"faults": ("above",)}),
    variants.apply_above_the_level: (1, {"faults": ("above", "level")}),
    variants.follow_any_config: (0, {"faults": ("halt",)}),
    variants.go_on_halted: (0, {"faults": ("halt",)}),
    variants.begin_behind_a_halt: (2, {"faults": ("halt",)}),
    variants.halt_late: (0, {"faults": ("halt", "crash")}),
    variants.halt_early: (0, {"faults": ("halt", "crash")}),
    variants.believe_any_file: (4, {"faults": ("keep", "damage", "failover")}),
    variants.forget_whose_file: (0, {"faults": ("keep", "damage", "crash")}),
    variants.keep_claims_of_a_deleted_topic: (1, {"faults": (RECREATE, "crash")}),
    variants.fetch_by_name: (0, {"faults": (RECREATE, "crash")}),
    variants.keep_the_position_in_an_earlier_topic: (
        0,
        {"faults": (RECREATE, "crash")},
    ),
}
# Variants that the operations alone show with another seed or other options.
BY_HISTORY = {
    variants.renew_in_the_fold: (0, {"faults": ("pause", "deaf")}),
    variants.renew_on_ack: (3, {"faults": ("pause", "deaf", "stop")}),
    variants.sender_judges: (143, {"faults": ("edge", "stop", "cut", "deaf")}),
    variants.mark_what_is_handed_out: (0, {"faults": ("crash",), "delivery": AMO}),
    variants.keep_the_position_in_an_earlier_topic: (
        3,
        {"faults": (RECREATE, "crash")},
    ),
}
BROKEN = variants.listed("broken variants")


def failure_of(seed, options):
    with pytest.raises(SimulationFailed) as caught:
        simulate(seed, duration_ms=SHORT_MS, **options)
    return caught.value


def test_the_table_lists_every_variant():
    planted = {each.__name__ for each in VARIANTS}
    assert {name for name, row in BROKEN.items() if row[1]} == planted
    by_operations = {name for name, row in BROKEN.items() if row[3]}
    assert {each.__name__ for each in BY_HISTORY} <= by_operations <= planted


@pytest.mark.parametrize("plant", VARIANTS, ids=lambda plant: plant.__name__)
def test_a_broken_variant_is_caught(monkeypatch, plant):
    seed, options = VARIANTS[plant]
    failure = found_by(plant, monkeypatch, seed=seed, minutes=3, **options)
    assert [failure.judge, failure.invariant] == BROKEN[plant.__name__][1:3]
    assert f"python -m simulator --seed {seed} " in str(failure)


@pytest.mark.parametrize(
    "plant",
    [each for each in VARIANTS if BROKEN[each.__name__][3]],
    ids=lambda plant: plant.__name__,
)
def test_the_history_of_operations_alone_shows_the_mistake(monkeypatch, plant):
    seed, options = BY_HISTORY.get(plant) or VARIANTS[plant]
    plant(monkeypatch)
    with pytest.raises(SimulationFailed) as caught:
        simulate(seed, duration_ms=SHORT_MS, by_history=True, **options)
    assert caught.value.judge == OPERATIONS
    assert caught.value.invariant == BROKEN[plant.__name__][3]
    assert "by the history" in str(caught.value)


def test_a_failure_repeats_byte_for_byte_and_shrinks_to_few_faults(monkeypatch):
    variants.sender_judges(monkeypatch)
    failure = failure_of(*VARIANTS[variants.sender_judges])
    assert failure_of(*VARIANTS[variants.sender_judges]).transcript == (
        failure.transcript
    )
    small = shrunk(failure)
    assert 1 <= len(small.faults) < len(failure.plan.faults)
    with pytest.raises(SimulationFailed) as again:
        run_plan(small)
    assert again.value.invariant == failure.invariant
