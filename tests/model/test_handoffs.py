"""Every state of small worlds in which a key is handed to a warm successor (9.4, 9.5).

The fold is the product's. ``make model`` searches the larger world.
"""

import pytest
import variants
from handoffmodel import (
    DRAIN_FOR_AN_EARLIER_PROCESS,
    GO_ON_AFTER_THE_RELEASE,
    WORK_ON_READY,
    HandoffModel,
    keep_the_offer_of_a_claim,
    ready_for_any_epoch,
    refuse_claims_of_what_is_offered,
    release_any_epoch,
    stuck,
)
from search import assert_found, search
from slices import slice_of

pytestmark = [pytest.mark.model, pytest.mark.slow]

CALM = {"crashes": False}
WORLDS = {"crashes": {}}
LARGER_WORLDS = WORLDS | {"pauses": {"crashes": False, "pauses": True}}


@pytest.mark.parametrize("world", slice_of(quick=WORLDS, full=LARGER_WORLDS))
def test_a_key_has_one_holder_and_drains_only_for_a_warm_successor(
    world, record_property
):
    found = search(HandoffModel(**LARGER_WORLDS[world]))
    record_property("states", found.states)
    assert found.broken is None, str(found)
    assert found.states > 10_000


@pytest.mark.parametrize("world", slice_of(quick={"calm": CALM}, full=LARGER_WORLDS))
def test_a_key_can_always_get_an_owner(world):
    """Faults end; the other client may be silent for ever, or ready for the key."""
    found = stuck(HandoffModel(**(LARGER_WORLDS | {"calm": CALM})[world]))
    assert found is None


PLANTED = {
    release_any_epoch: "S4",
    ready_for_any_epoch: "9.5",
    keep_the_offer_of_a_claim: "9.4",
}
MISTAKES = {
    WORK_ON_READY: "S4",
    GO_ON_AFTER_THE_RELEASE: "S4",
    DRAIN_FOR_AN_EARLIER_PROCESS: "9.5",
}
BROKEN = variants.listed("broken handoffs")
STUCK = refuse_claims_of_what_is_offered


def test_the_table_lists_every_variant():
    planted = {plant.__name__: rule for plant, rule in PLANTED.items()}
    planted |= MISTAKES | {STUCK.__name__: "L"}
    assert {name: row[0] for name, row in BROKEN.items()} == planted


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_broken_fold_breaks_the_listed_rule(monkeypatch, plant):
    plant(monkeypatch)
    assert_found(HandoffModel(), PLANTED[plant])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_broken_client_breaks_the_listed_rule(mistake):
    assert_found(HandoffModel(mistake=mistake), MISTAKES[mistake])


def test_an_offer_that_refuses_claims_blocks_the_key(monkeypatch):
    STUCK(monkeypatch)
    found = stuck(HandoffModel(**CALM))
    assert found is not None
    assert found[0] == "L"
