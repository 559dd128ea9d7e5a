"""A lease in an outage of its coordinating partition: every state (PROTOCOL 5.2).

Leases and verdicts are the product's. Both bounds are exact: an owner that hands out
for a thirtieth of an interval less is interrupted, and a lease that lasts a thirtieth
longer is not safe.
"""

import pytest
import variants
from outagemodel import (
    OutageModel,
    last_a_thirtieth_longer,
    stop_a_thirtieth_early,
    stop_at_one_interval,
)
from search import assert_found, search

pytestmark = [pytest.mark.model, pytest.mark.slow]

SOUND = {"is_sound": True, "units_per_h": 30}
FAULTY = {"is_sound": False, "units_per_h": 10}


@pytest.mark.parametrize("world", [SOUND, FAULTY], ids=["sound", "faulty"])
def test_an_outage_up_to_h_interrupts_no_owner_and_admits_no_second(
    world, record_property
):
    found = search(OutageModel(**world))
    record_property("states", found.states)
    assert found.broken is None, str(found)
    assert found.states > 10_000


PLANTED = [
    (stop_at_one_interval, SOUND),
    (stop_a_thirtieth_early, SOUND),
    (last_a_thirtieth_longer, FAULTY),
]
BROKEN = variants.listed("broken leases in outages")


def test_the_table_lists_every_variant():
    assert set(BROKEN) == {plant.__name__ for plant, _ in PLANTED}


@pytest.mark.parametrize(("plant", "world"), PLANTED)
def test_a_broken_lease_breaks_the_listed_rule(monkeypatch, plant, world):
    plant(monkeypatch)
    assert_found(OutageModel(**world), BROKEN[plant.__name__][0])


def test_an_outage_longer_than_h_interrupts_the_owner():
    """A lease outlasts an outage of one interval, and no longer one."""
    assert_found(OutageModel(**SOUND, outage=31), "L2")
