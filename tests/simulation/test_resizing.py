"""The number of coordinating partitions changes, and admins die at it.

Full size: ``PROOF=1``, or ``python -m simulator --also resize``.
"""

import msgspec
import pytest
import slices
import variants

from kafka_marshal.engine import session
from kafka_marshal.protocol import layout_steps
from kafka_marshal.protocol.claiming import Claim
from kafka_marshal.protocol.layout import item_of
from kafka_marshal.protocol.state import ACCEPTED
from simulator.campaign import CampaignOptions, run_seeds
from simulator.coverage import RESIZED
from simulator.plan import (
    FENCES,
    HANDOFFS,
    MINUTE_MS,
    PLANS,
    POSITIONS,
    RESIZE,
    SCHEDULES,
    SEEKS,
    STANDBYS,
)
from simulator.simulate import SimulationFailed, simulate

CHOSEN = [7, 10, 13, 14, 21, 22, 23, 28, 35, 38]
BESIDE = {
    HANDOFFS: [1, 3],
    PLANS: [1, 3],
    FENCES: [3, 5],
    SCHEDULES: [3, 5],
    SEEKS: [1, 4],
    STANDBYS: [1, 3],
    POSITIONS: [1, 3],
}
"""Seeds, by what else goes wrong."""
SEEDS = slices.seeds_of(quick=CHOSEN, full=1_000)


@pytest.mark.slow
def test_a_key_has_one_owner_whatever_its_partition():
    summary = run_seeds(SEEDS, CampaignOptions(also=(RESIZE,), minutes=4), jobs=1)
    assert summary.broken == []
    assert {name for name in RESIZED if not summary.seen[name]} == set()


@pytest.mark.slow
@pytest.mark.parametrize(("beside", "seeds"), BESIDE.items())
def test_a_change_fits_beside_what_else_goes_wrong(beside, seeds):
    seeds = slices.seeds_of(quick=seeds, full=300)
    summary = run_seeds(
        seeds, CampaignOptions(also=(RESIZE, beside), minutes=2), jobs=1
    )
    assert summary.broken == []
    assert summary.seen["moved"]


BROKEN = variants.listed("broken members in a change")


def import_what_is_owned(patch):
    """Keys are imported as soon as they move, though their owners use them."""
    patch.setattr(layout_steps, "is_settled", lambda *_: True)


def import_without_the_position(patch):
    """An import does not carry the position, nor what was granted."""

    def without(key, known):
        return msgspec.structs.replace(item_of(key, known), position=None, granted=None)

    patch.setattr(layout_steps, "item_of", without)


def keep_what_moves(patch):
    """An owner keeps a key that moves, and relies on heartbeats that renew nothing."""
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


VARIANTS = [
    pytest.param(import_what_is_owned, 1, (RESIZE,), 4, id="import-of-owned"),
    pytest.param(import_without_the_position, 0, (RESIZE,), 4, id="no-position"),
    pytest.param(keep_what_moves, 0, (RESIZE,), 4, id="kept"),
]


def test_the_table_lists_every_variant():
    assert list(BROKEN) == [each.values[0].__name__ for each in VARIANTS]


@pytest.mark.parametrize(("plant", "seed", "faults", "minutes"), VARIANTS)
def test_a_broken_variant_is_caught(monkeypatch, plant, seed, faults, minutes):
    simulate(seed, faults=faults, duration_ms=minutes * MINUTE_MS)
    plant(monkeypatch)
    with pytest.raises(SimulationFailed) as caught:
        simulate(seed, faults=faults, duration_ms=minutes * MINUTE_MS)
    assert [caught.value.judge, caught.value.invariant] == BROKEN[plant.__name__][1:]
