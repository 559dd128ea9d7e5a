"""Plans, and how they are drawn from a seed."""

import attrs

from kafka_marshal.config import Delivery
from simulator.plan import (
    DAMAGE,
    FAULTS,
    FENCES,
    HALT,
    KEEP,
    KEPT,
    LEVEL,
    LEVELS,
    POSITIONS,
    RESET,
    SCHEDULES,
    SEEKS,
    UNFIT_BESIDE_ADMINS,
    chance,
    draw,
)


def test_a_plan_depends_on_its_seed_alone():
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert chance(1, "a").random() == chance(1, "a").random()
    assert chance(1, "a").random() != chance(1, "b").random()


def test_requested_settings_replace_drawn_ones():
    plan = draw(3, delivery=Delivery.AT_MOST_ONCE, faults=("cut",), duration_ms=10**6)
    assert plan.delivery is Delivery.AT_MOST_ONCE
    assert {fault.kind for fault in plan.faults} == {"cut"}
    assert 0 <= plan.faults[0].at_ms <= plan.faults[-1].at_ms < 10**6


def test_kept_states_do_not_change_the_other_faults():
    kept = [draw(seed) for seed in range(40)]
    assert {name for plan in kept for name in plan.kinds} >= set(KEPT)
    for plan in kept:
        apart = {*KEPT, *LEVELS, DAMAGE}
        rest = tuple(name for name in plan.kinds if name not in apart)
        without = draw(plan.seed, faults=rest)
        assert plan.faults[: len(without.faults)] == without.faults
        numbers = [fault.number for fault in plan.faults]
        assert numbers == list(range(1, len(numbers) + 1))


def test_levels_do_not_change_the_other_faults():
    plans = [draw(seed) for seed in range(80)]
    assert {name for plan in plans for name in plan.kinds} >= set(LEVELS)
    for plan in plans:
        apart = {*LEVELS, DAMAGE}
        rest = tuple(name for name in plan.kinds if name not in apart)
        without = draw(plan.seed, faults=rest)
        assert plan.faults[: len(without.faults)] == without.faults
        numbers = [fault.number for fault in plan.faults]
        assert numbers == list(range(1, len(numbers) + 1))


def test_requested_resets_and_levels_are_drawn_beside_seeks():
    for also, kinds in (
        ((SEEKS, RESET, LEVEL), {SEEKS, RESET, LEVEL}),
        ((SEEKS, RESET), {SEEKS, RESET}),
        ((SEEKS,), {SEEKS}),
        ((SEEKS, RESET, LEVEL, POSITIONS), {SEEKS, POSITIONS}),
    ):
        assert {*draw(3, faults=(RESET, LEVEL), also=also).kinds} == kinds


def test_files_are_damaged_only_in_plans_that_keep_states():
    plans = [plan for plan in map(draw, range(80)) if DAMAGE in plan.kinds]
    assert plans
    assert all(KEEP in plan.kinds for plan in plans)
    assert all(len({*plan.kinds}) == len(plan.kinds) for plan in plans)


def test_the_last_config_is_written_late_or_after_the_healing():
    halts = [draw(seed, faults=(HALT,)) for seed in range(40)]
    assert all(len(plan.faults) == 1 for plan in halts)
    late = [plan for plan in halts if plan.during]
    assert 0 < len(late) < len(halts)
    assert all(plan.during[0].at_ms >= plan.duration_ms // 2 for plan in late)
    assert all(plan.after == plan.faults for plan in halts if not plan.during)


def test_a_plan_without_faults_has_none():
    assert draw(3, faults=()).faults == ()
    assert draw(3, faults=("drift",)).faults == ()
    assert draw(3, faults=("drift",)).drift_ppm > 0


def test_a_plan_without_some_faults_keeps_its_clients():
    plan = draw(1, faults=FAULTS)
    kept = plan.keeping({plan.faults[0].number, plan.faults[2].number})
    assert kept.faults == (plan.faults[0], plan.faults[2])
    assert kept.keeping(range(10_000)).clients == plan.clients


def test_set_positions_are_drawn_on_request_without_changing_others():
    for seed in range(40):
        plain = draw(seed)
        assert POSITIONS not in plain.kinds
        plan = draw(seed, also=(POSITIONS,))
        assert not UNFIT_BESIDE_ADMINS & set(plan.kinds)
        assert (plan.h_ms, plan.policy) == (plain.h_ms, plain.policy)
        rest = tuple(kind for kind in plan.kinds if kind not in {POSITIONS, HALT})
        without = draw(seed, faults=rest)
        assert plan.faults[: len(without.faults)] == without.faults
        more = {fault.kind for fault in plan.faults[len(without.faults) :]}
        assert POSITIONS in more
        assert draw(seed, faults=plan.kinds) == plan
        assert draw(seed, faults=(POSITIONS,), also=(POSITIONS,)).kinds == (POSITIONS,)


def test_fences_and_schedules_do_not_change_the_other_faults():
    for seed in range(40):
        plain = draw(seed, faults=("crash",))
        plan = draw(seed, faults=("crash", FENCES, SCHEDULES))
        assert attrs.evolve(plan, kinds=plain.kinds, faults=plain.faults) == plain
        assert plan.faults[: len(plain.faults)] == plain.faults
        more = {fault.kind for fault in plan.faults[len(plain.faults) :]}
        assert more == {FENCES, SCHEDULES}
