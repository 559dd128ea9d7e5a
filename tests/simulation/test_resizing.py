"""The number of coordinating partitions changes, and admins crash meanwhile.

Full size: ``PROOF=1``, or ``python -m simulator --also resize``.
"""

from collections import Counter

import attrs
import msgspec
import pytest
import slices
import variants
from seedkit import found_by

from kafka_marshal.engine import layout_change, placement, session
from kafka_marshal.protocol import layout_reading, layout_steps, lost_changes
from kafka_marshal.protocol.claiming import Claim
from kafka_marshal.protocol.layout import item_of
from kafka_marshal.protocol.state import ACCEPTED
from simulator.campaign import CampaignOptions, run_seeds
from simulator.coverage import RESIZED
from simulator.plan import (
    ABOVE,
    CHECKPOINT,
    FENCES,
    GARBAGE_POLICY,
    HANDOFFS,
    LEVEL,
    MINUTE_MS,
    PLANS,
    POSITIONS,
    RESET,
    RESIZE,
    SCHEDULES,
    SEEKS,
    STANDBYS,
    TRUNCATE,
    draw,
)
from simulator.resizing import DEATHS, Death
from simulator.sidecar.simulate import simulate_hosted
from simulator.simulate import run_plan, simulate

# choose_seeds.py --also resize --minutes 4 --seeds 0:150 --times 2
CHOSEN = [
    6,
    7,
    10,
    13,
    15,
    21,
    28,
    44,
    55,
    59,
    65,
    71,
    73,
    80,
    92,
    98,
    103,
    113,
    116,
    117,
    133,
    137,
    138,
    143,
]
BESIDE = {
    HANDOFFS: [1, 3],
    PLANS: [1, 3],
    FENCES: [3, 5],
    SCHEDULES: [3, 5],
    SEEKS: [1, 4],
    STANDBYS: [1, 3],
    POSITIONS: [1, 3],
    (CHECKPOINT, RESET): [0, 1, 2, 3],
    (ABOVE, LEVEL): [1, 2],
}
"""Seeds, by what else goes wrong."""
SEEDS = slices.seeds_of(quick=CHOSEN, full=1_000)


@pytest.mark.slow
def test_a_key_has_one_owner_while_the_partition_count_changes(record_property):
    summary = run_seeds(SEEDS, CampaignOptions(also=(RESIZE,), minutes=4), jobs=1)
    record_property("seeds", len(SEEDS))
    assert summary.broken == []
    assert {name for name in RESIZED if not summary.seen[name]} == set()


@pytest.mark.slow
@pytest.mark.parametrize(("beside", "seeds"), BESIDE.items(), ids=str)
def test_the_partition_count_changes_beside_other_faults(
    beside, seeds, record_property
):
    others = (beside,) if isinstance(beside, str) else beside
    seeds = slices.seeds_of(quick=seeds, full=300)
    options = CampaignOptions(also=(RESIZE, *others), minutes=2)
    summary = run_seeds(seeds, options, jobs=1)
    record_property("seeds", len(seeds))
    assert summary.broken == []
    assert summary.seen["moved"]
    if RESET in others:
        assert summary.seen["reset"]
    if LEVEL in others:
        assert summary.seen["level_changed"]


# Each seed once showed a fault that is fixed now.
FOUND = [
    pytest.param(1, (POSITIONS,), 2, id="a-pause-that-had-run-out-prevented-a-change"),
    pytest.param(
        1026,
        (POSITIONS,),
        10,
        id="a-pause-lasted-by-the-clock-of-an-admin",
        marks=pytest.mark.proof,
    ),
    pytest.param(726, (), 4, id="retention-deleted-probes-that-members-still-needed"),
    pytest.param(
        30118,
        (POSITIONS,),
        5,
        id="a-start-reads-partitions-without-records",
        marks=pytest.mark.proof,
    ),
    pytest.param(
        40006, (GARBAGE_POLICY,), 5, id="two-claims-of-one-member-had-equal-tokens"
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "beside", "minutes"), FOUND)
def test_known_failures_stay_fixed(seed, beside, minutes):
    also = (RESIZE, *beside)
    assert simulate(seed, also=also, duration_ms=minutes * MINUTE_MS).claims > 0


LOSING = (RESIZE, TRUNCATE, "crash", "cut", "churn")
"""Logs that lose what was read, a change of the count included (PROTOCOL 10.9)."""
# Each seed once showed a fault that is fixed now.
LOST = [
    pytest.param(148151611624530, (), 1, id="nobody-restored-a-change-that-had-ended"),
    pytest.param(
        157406089303427, (), 1, id="nobody-repeated-a-done-of-a-source-that-had-ended"
    ),
    pytest.param(
        45025537079712, (), 2, id="nobody-fenced-a-source-that-others-wait-for"
    ),
    pytest.param(
        64613914508879, ("crash", "cut"), 2, id="a-member-refused-to-start-meanwhile"
    ),
    pytest.param(
        72927555458164,
        ("churn", "failover", "pause", "slow", "stop"),
        1,
        id="a-source-that-was-added-before-was-not-read",
    ),
    pytest.param(
        186358674492321, ("cut", "slow"), 2, id="nor-one-that-lost-its-end-then"
    ),
    pytest.param(
        100298636779317,
        (),
        10,
        id="claimed-where-the-fence-of-an-open-change-is-lost",
        marks=pytest.mark.proof,
    ),
    pytest.param(
        79247518359236,
        ("crash", "cut", "pause", "slow", "stop"),
        4,
        id="resumed-where-the-fence-of-an-open-change-is-lost",
    ),
    pytest.param(
        118801200653828,
        ("churn", "cut", "failover"),
        4,
        id="a-log-went-back-while-a-member-started",
    ),
    pytest.param(
        268399931970465,
        ("slow",),
        2,
        id="nobody-restored-a-change-that-was-lost-as-the-next-began",
    ),
    pytest.param(
        274318049979249, (), 4, id="nobody-restored-what-came-into-use-by-the-change"
    ),
    pytest.param(
        234964724295907, (), 4, id="a-target-waited-for-a-source-in-use-no-more"
    ),
    pytest.param(211056665963429, (), 2, id="claimed-where-several-changes-are-lost"),
    pytest.param(
        65038135595198, ("slow",), 2, id="nobody-restored-two-changes-of-one-count"
    ),
    pytest.param(61026593971326, ("pause",), 1, id="a-partition-stayed-without-config"),
    pytest.param(
        121511221558244, (ABOVE, LEVEL), 4, id="claimed-where-a-config-is-lost"
    ),
    pytest.param(
        39,
        (POSITIONS,),
        10,
        id="waited-for-an-end-that-was-lost",
        marks=pytest.mark.proof,
    ),
    pytest.param(
        145, (POSITIONS,), 10, id="waited-for-what-was-lost-before-it-was-read"
    ),
    pytest.param(
        246644395525538, (ABOVE, LEVEL), 2, id="partition-0-stayed-behind-a-config"
    ),
    pytest.param(
        181398012848814,
        (ABOVE, LEVEL, "crash"),
        4,
        id="began-again-where-only-a-config-is-lost",
        marks=pytest.mark.proof,
    ),
    pytest.param(
        185698852967433, (ABOVE, LEVEL), 1, id="ignored-a-fence-below-its-level"
    ),
    pytest.param(
        101015580171615,
        (ABOVE, LEVEL),
        2,
        id="torn-by-a-config-behind-a-lost-end",
        marks=pytest.mark.proof,
    ),
]


@pytest.mark.slow
def test_a_change_that_a_log_loses_is_restored(record_property):
    seeds = slices.seeds_of(quick=[9, 14, 30], full=300)
    summary = run_seeds(seeds, CampaignOptions(faults=LOSING, minutes=2), jobs=1)
    record_property("seeds", len(seeds))
    assert summary.broken == []
    assert all(summary.seen[name] for name in ("truncated", "moved", "change_restored"))


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "beside", "minutes"), LOST)
def test_seeds_that_failed_to_restore_a_lost_change_pass(seed, beside, minutes):
    faults = tuple(sorted({RESIZE, TRUNCATE, *beside}))
    assert simulate(seed, faults=faults, duration_ms=minutes * MINUTE_MS).claims > 0


PLACES = slices.slice_of(quick=range(0, len(DEATHS), 2), full=range(len(DEATHS)))
KILLS = slices.slice_of(quick=1, full=-(-1_000 // len(DEATHS)))
"""Runs in which an admin dies, for each moment at which it may."""
RUNS_MAX = 12
"""How many runs one of them takes at most: in others members do that step first."""


def dying_at(place, seed):
    """Return a plan in which each admin crashes at one moment, if it reaches that."""
    plan = draw(seed, also=(RESIZE,), duration_ms=2 * MINUTE_MS)
    faults = tuple(
        attrs.evolve(each, size=place) if each.kind == RESIZE else each
        for each in plan.faults
    )
    return attrs.evolve(plan, faults=faults)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_change_whose_admin_is_killed_is_completed_or_given_up(
    place, record_property
):
    """Each run also judges that all keys are usable and that another change works."""
    step, is_after = DEATHS[place]
    name = Death(step, 1, is_after).name
    kills = 0
    for seed in range(KILLS * RUNS_MAX):
        kills += run_plan(dying_at(place, seed)).seen.get(name, 0) > 0
        if kills == KILLS:
            break
    record_property("kills", kills)
    assert kills == KILLS


HOSTED_SEEDS = slices.seeds_of(quick=[1, 3, 5, 8], full=200)
HOSTED_FAULTS = (RESIZE, "death", "crash", "late", "stop", "churn", "hang", "line")


@pytest.mark.slow
@pytest.mark.parametrize("beside", [(), (POSITIONS, HANDOFFS, PLANS, "failover")])
def test_a_change_beside_sidecars_is_completed_or_given_up(beside, record_property):
    seen = Counter()
    for seed in HOSTED_SEEDS:
        seen.update(simulate_hosted(seed, faults=(*HOSTED_FAULTS, *beside)).seen)
    record_property("seeds", len(HOSTED_SEEDS))
    for name in ("moved", "resize_completed", "resize_left", "resize_refused"):
        assert seen[name], name


def test_an_import_is_judged_only_after_its_source_was_read():
    """Once, both were written together, and the simulator read the target first."""
    faults = ("answers", "churn", "copies", "garbage-policy", "handoffs", RESIZE)
    assert simulate_hosted(88369695804328, faults=(*faults, "unwatched")).claims > 0


def test_a_seed_of_sidecars_repeats_byte_for_byte():
    first, second = (
        simulate_hosted(1, faults=HOSTED_FAULTS, rounds=60) for _ in range(2)
    )
    assert first == second


BROKEN = variants.listed("broken members in a change")
WITH_CONFIGS = (ABOVE, LEVEL, RESIZE, TRUNCATE)


def import_what_is_owned(patch):
    """Keys are imported as soon as a change begins, although owners use them."""
    patch.setattr(layout_steps, "is_settled", lambda *_: True)


def import_without_the_position(patch):
    """An import carries neither the position nor the granted offsets."""

    def without(key, known):
        return msgspec.structs.replace(item_of(key, known), position=None, granted=None)

    patch.setattr(layout_steps, "item_of", without)


def keep_what_moves(patch):
    """An owner keeps a key that moves, and relies on heartbeats that do not renew."""
    patch.setattr(session, "is_moving", lambda *_: False)
    original = Claim.on_beat_verdict

    def trusting(self, transition, *, sent_ms, heartbeat_interval_ms):
        if self.is_owned and transition.outcome == ACCEPTED:
            self._renew(sent_ms, self.heartbeat_interval_ms)
            return
        original(
            self,
            transition,
            sent_ms=sent_ms,
            heartbeat_interval_ms=heartbeat_interval_ms,
        )

    patch.setattr(Claim, "on_beat_verdict", trusting)


def forget_a_change_that_has_ended(patch):
    """No member restores an ended change that a partition has lost."""
    patch.setattr(layout_reading, "lost_change", lambda _: None)


def end_without_a_lost_done(patch):
    """No Done is written for a source that has ended the change, if it was lost."""
    patch.setattr(layout_steps, "lost_dones_of", lambda _: ())


def forget_the_change_before(patch):
    """No member restores a change that was lost as the next one began."""
    patch.setattr(layout_steps, "lost_before", lambda _: {})


def claim_where_a_config_is_lost(patch):
    """A key is claimed in a partition that lacks the newest Config."""
    patch.setattr(placement, "unclaimed", lambda *_: frozenset())


def forget_a_config(patch):
    """No member writes a Config again that a partition has lost."""
    for module in (placement, layout_change):
        patch.setattr(module, "lost_configs", lambda *_: {})


def forget_what_was_read(patch):
    """A member forgets a Config that it has read and that all logs have lost."""
    unclaimed, lost_configs = lost_changes.unclaimed, lost_changes.lost_configs
    patch.setattr(placement, "unclaimed", lambda worlds, _: unclaimed(worlds))
    for module in (placement, layout_change):
        patch.setattr(module, "lost_configs", lambda worlds, _: lost_configs(worlds))


VARIANTS = [
    pytest.param(import_what_is_owned, 1, (RESIZE,), 4, id="import-of-owned"),
    pytest.param(import_without_the_position, 0, (RESIZE,), 4, id="no-position"),
    pytest.param(keep_what_moves, 0, (RESIZE,), 4, id="kept"),
    pytest.param(forget_a_change_that_has_ended, 9, LOSING, 2, id="not-restored"),
    pytest.param(
        end_without_a_lost_done, 157406089303427, (RESIZE, TRUNCATE), 1, id="no-done"
    ),
    pytest.param(
        forget_the_change_before,
        156954959976338,
        (RESIZE, TRUNCATE),
        4,
        id="before",
        marks=pytest.mark.proof,
    ),
    pytest.param(
        claim_where_a_config_is_lost, 121511221558244, WITH_CONFIGS, 4, id="claimed"
    ),
    pytest.param(
        forget_a_config, 65038135595198, (RESIZE, "slow", TRUNCATE), 2, id="config"
    ),
    pytest.param(forget_what_was_read, 30, (LEVEL, TRUNCATE), 1, id="not-remembered"),
]


def test_the_table_lists_every_variant():
    assert set(BROKEN) == {each.values[0].__name__ for each in VARIANTS}


@pytest.mark.parametrize(("plant", "seed", "faults", "minutes"), VARIANTS)
def test_a_broken_variant_is_caught(monkeypatch, plant, seed, faults, minutes):
    found = found_by(plant, monkeypatch, seed=seed, faults=faults, minutes=minutes)
    assert [found.judge, found.invariant] == BROKEN[plant.__name__]
