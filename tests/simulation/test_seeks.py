"""Members seek in their own claims, and crash meanwhile: a slice of many seeds.

Full size: ``PROOF=1``, or ``python -m simulator --also seeks``.
"""

from collections import Counter

import pytest
import slices
import variants
from seedkit import found_by

from kafka_marshal.config import Delivery
from kafka_marshal.engine import heartbeats
from simulator.campaign import CampaignOptions, run_seeds
from simulator.coverage import SOUGHT
from simulator.plan import (
    CHECKPOINT,
    MINUTE_MS,
    POSITIONS,
    RECREATE,
    RESET,
    RESIZE,
    SEEKS,
    TRUNCATE,
)
from simulator.sidecar.simulate import simulate_hosted
from simulator.simulate import SimulationFailed, simulate
from simulator.world import World

# Seed 30: a release carries the position of a seek that its owner never read back.
CHOSEN = [0, 1, 6, 15, 22, 24, 29, 30]
SEEDS = slices.seeds_of(quick=CHOSEN, full=1_000)


@pytest.mark.slow
def test_records_from_a_sought_position_on_are_processed_again():
    summary = run_seeds(SEEDS, CampaignOptions(also=(SEEKS,), minutes=4), jobs=1)
    assert summary.broken == []
    assert {name for name in SOUGHT if not summary.seen[name]} == set()


def test_an_admin_overrides_the_position_of_a_seek():
    faults = ("pause", "crash", "late", "stop", "copies", "delay", SEEKS, POSITIONS)
    report = simulate(1003, faults=faults, duration_ms=4 * MINUTE_MS)
    assert report.seen["seek_overtaken"]


@pytest.mark.parametrize("seed", [50043, 50051])
def test_a_reset_undoes_the_seek_of_an_owner(seed):
    """The position moves forward again, past the records that the seek went back to."""
    report = simulate(
        seed,
        delivery=Delivery.AT_LEAST_ONCE,
        also=(SEEKS, RESET, CHECKPOINT),
        duration_ms=5 * MINUTE_MS,
    )
    assert report.seen["reset"]


# Seed 10: two seeks of a client one after the other, of which the log has both.
HOSTED_SEEDS = slices.seeds_of(quick=[3, 10, 22], full=200)
HOSTED_FAULTS = (SEEKS, "death", "stop", "late", "crash", "line", "hang")


@pytest.mark.slow
def test_clients_of_sidecars_seek(record_property):
    seen = Counter()
    for seed in HOSTED_SEEDS:
        delivery = Delivery.AT_LEAST_ONCE
        seen.update(simulate_hosted(seed, faults=HOSTED_FAULTS, delivery=delivery).seen)
    record_property("seeds", len(HOSTED_SEEDS))
    for name in ("sought_back", "sought_forward", "seek_confirmed"):
        assert seen[name], name


def test_clients_of_sidecars_cannot_seek_at_most_once():
    seeks = {"faults": (SEEKS,), "delivery": Delivery.AT_MOST_ONCE, "rounds": 60}
    assert simulate_hosted(1, **seeks).seen["seek_refused"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [40000, 40031])
def test_an_owner_seeks_while_its_topic_is_deleted_or_recreated(seed):
    report = simulate(seed, also=(SEEKS, RECREATE), duration_ms=5 * MINUTE_MS)
    assert report.seen["recreated"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "beside"), [(30004, (TRUNCATE, RESIZE)), (30006, (TRUNCATE,))]
)
def test_records_skipped_by_a_seek_are_not_missed_after_a_truncation(seed, beside):
    report = simulate(seed, also=(*beside, SEEKS), duration_ms=5 * MINUTE_MS)
    assert report.seen["sought_forward"]


def test_no_process_repeats_a_beat_from_before_a_confirmed_seek():
    """Once, a process wrote such a heartbeat again."""
    report = simulate(
        52197,
        delivery=Delivery.AT_LEAST_ONCE,
        also=(SEEKS, RESET, CHECKPOINT),
        duration_ms=5 * MINUTE_MS,
    )
    assert report.seen["sought_back"]


def test_unprocessed_records_that_no_seek_skipped_are_reported(monkeypatch):
    process = World.on_processed

    def forget_some(self, name, key, *, record):
        if record.offset % 5:
            process(self, name, key, record=record)

    monkeypatch.setattr(World, "on_processed", forget_some)
    with pytest.raises(SimulationFailed, match="never processed") as caught:
        simulate(30006, also=(TRUNCATE, SEEKS), duration_ms=MINUTE_MS)
    assert caught.value.invariant == "6.1"
    missed = caught.value.finding.split("[")[1].rstrip("]").split(", ")
    assert {int(each) % 5 for each in missed} == {0}


BROKEN = variants.listed("broken seeks")


def seek_without_rewind(patch):
    """A seek sends a heartbeat without ``rewind``, and does not wait for it."""

    def send_rewind(self, holding):
        partition = self._context.partition_of(holding.key)
        self._send_one(partition, holding, holding.position)

    patch.setattr(heartbeats.Heartbeater, "send_rewind", send_rewind)


def confirm_what_may_be_undone(patch):
    """A seek counts as confirmed while an earlier record of its claim may land."""
    patch.setattr(heartbeats.Heartbeater, "may_undo_rewind", lambda *_: False)


LATE = (SEEKS, "late", "copies", "crash", "stop")
WIDE = (*LATE, "delay", "pause", "failover")
VARIANTS = [
    pytest.param(seek_without_rewind, 1, LATE, 3, id="no-rewind"),
    pytest.param(confirm_what_may_be_undone, 10, WIDE, 4, id="confirmed-too-soon"),
]


def test_the_table_lists_every_variant():
    assert set(BROKEN) == {each.values[0].__name__ for each in VARIANTS}


@pytest.mark.parametrize(("plant", "seed", "faults", "minutes"), VARIANTS)
def test_a_broken_variant_is_caught(monkeypatch, plant, seed, faults, minutes):
    found = found_by(plant, monkeypatch, seed=seed, faults=faults, minutes=minutes)
    assert [found.judge, found.invariant] == BROKEN[plant.__name__]
