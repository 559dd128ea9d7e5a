"""Every state of small worlds, with the product's fold and claims (PROTOCOL 11).

``make model`` searches the larger worlds. A rule that no search breaks holds in every
reachable state; for one that is broken, the search prints the shortest trace.
"""

import pytest
import variants
from grantmodel import GrantModel
from leasemodel import LeaseModel
from search import search
from slices import slice_of

pytestmark = [pytest.mark.model, pytest.mark.slow]

ALTERED = (1_000, 2_000)
LEASES = {
    "crashes": {},
    "twins": {"twins": True, "gives_up": False},
    "failovers": {"failovers": True, "crashes": False, "gives_up": False},
}
GRANTS = {
    "copies": {"in_flight": 1},
    "tasks": {"in_flight": 1, "tasks": True, "copies": False},
    "pipelined": {"copies": False, "crashes": False},
}
LARGER_LEASES = {
    "failovers": {"failovers": True},
    "intervals": {"intervals": ALTERED, "crashes": False, "gives_up": False},
    "fences": {"fences": True, "resumes": True},
    "fences-and-pauses": {"fences": True, "pauses": True, "crashes": False},
    "half-ticks": {"ticks_per_h": 2, "crashes": False},
    "pauses": {"pauses": True},
    "resumes": {"resumes": True},
    "twins": {"twins": True},
    "two-in-flight": {"in_flight": 2, "crashes": False},
    "two-unread": {"unread": 2},
}
LARGER_GRANTS = {
    "three-offsets": {"offsets": 3, "in_flight": 1},
    "two-in-flight": {"copies": False},
    "pipelined-after-a-beat": {"copies": False, "crashes": False, "beats": True},
    "pipelined-three-offsets": {"copies": False, "crashes": False, "offsets": 3},
    "copies-and-tasks": {"in_flight": 1, "tasks": True},
}
LEASES = slice_of(quick=LEASES, full=LARGER_LEASES)
GRANTS = slice_of(quick=GRANTS, full=LARGER_GRANTS)


@pytest.mark.parametrize("world", LEASES)
def test_a_key_has_at_most_one_holder_at_a_time(world, record_property):
    """S4, and with it S1 and S7."""
    found = search(LeaseModel(**LEASES[world]))
    record_property("states", found.states)
    assert found.broken is None, str(found)
    assert found.states > 1_000


@pytest.mark.parametrize("world", GRANTS)
def test_no_offset_is_processed_twice(world, record_property):
    """S3, S10 and no gap between grants (6.3), for any clocks."""
    found = search(GrantModel(**GRANTS[world]))
    record_property("states", found.states)
    assert found.broken is None, str(found)
    assert found.states > 1_000


CALM = {"crashes": False, "gives_up": False}
BROKEN_LEASES = [
    # A mistake planted in the product, and one in the modelled client.
    pytest.param(variants.any_beat_owns, {}, "S1", id="no-epoch-check-on-beats"),
    pytest.param(
        variants.renew_while_paused, {"pauses": True} | CALM, "S4", id="renew-in-pause"
    ),
    pytest.param(
        variants.renew_while_paused,
        {"fences": True} | CALM,
        "S4",
        id="renew-a-fenced-one",
        marks=pytest.mark.proof,
    ),
    pytest.param(
        None, {"acknowledged": True, "pauses": True} | CALM, "S4", id="on-ack"
    ),
    pytest.param(
        variants.renew_to_an_earlier_end,
        {"intervals": ALTERED} | CALM,
        "S4",
        id="renewal-shortens",
        marks=pytest.mark.proof,
    ),
    pytest.param(
        None,
        {"by_newest_h": True, "intervals": ALTERED} | CALM,
        "S4",
        id="lease-by-newest-H",
    ),
    pytest.param(None, {"from_read_back": True}, "S4", id="lease-from-read-back"),
    pytest.param(
        variants.sender_judges, {"judged_by_sender": True}, "S4", id="sender-judges"
    ),
    pytest.param(
        variants.beat_restarts,
        {"bare_restart": True, "twins": True},
        "S4",
        id="bare-heartbeat-restarts",
    ),
]
BROKEN_GRANTS = [
    pytest.param(variants.grant_again, {}, "S3", id="h-1"),
    pytest.param(
        variants.process_without_grant, {"gapless": False}, "S3", id="without-the-grant"
    ),
    pytest.param(variants.grant_by_number, {"tasks": True}, "S3", id="by-number"),
    pytest.param(variants.pipeline_without_anchor, {}, "6.3", id="without-anchor"),
]


def test_the_table_lists_every_variant_of_small_worlds():
    found = {}
    for plant, _, rule in (each.values for each in (*BROKEN_LEASES, *BROKEN_GRANTS)):
        if plant is not None:
            found[plant.__name__] = rule  # type: ignore[attr-defined]
    rows = variants.listed("broken variants").items()
    assert {name: row[0] for name, row in rows if row[0]} == found


@pytest.mark.parametrize(("plant", "options", "invariant"), BROKEN_LEASES)
def test_a_broken_lease_breaks_its_invariant(monkeypatch, plant, options, invariant):
    if plant is not None:
        plant(monkeypatch)
    found = search(LeaseModel(**options))
    print(found)  # noqa: T201 - the way there, shown with -s
    assert found.broken is not None
    assert found.broken.startswith(invariant)
    assert found.trace


@pytest.mark.parametrize(("plant", "options", "clause"), BROKEN_GRANTS)
def test_a_broken_grant_breaks_its_clause(monkeypatch, plant, options, clause):
    plant(monkeypatch)
    found = search(GrantModel(**options))
    print(found)  # noqa: T201 - the way there, shown with -s
    assert found.broken is not None
    assert found.broken.startswith(clause)
    assert found.trace
