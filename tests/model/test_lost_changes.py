"""Every way of a key that stays where a log loses a change (PROTOCOL 10.9)."""

import pytest
import variants
from lostchangemodel import (
    LostChangeModel,
    claim_where_a_change_that_has_ended_is_lost,
    claim_where_the_fence_is_lost,
    leave_what_is_lost,
)
from search import search

pytestmark = pytest.mark.model


def test_tokens_grow_although_a_change_is_lost(record_property):
    model = LostChangeModel()
    found = search(model, goal=model.is_over)
    record_property("states", found.states)
    assert found.broken is None, str(found)
    assert found.states > 1_000


PLANTED = [
    claim_where_the_fence_is_lost,
    claim_where_a_change_that_has_ended_is_lost,
    leave_what_is_lost,
]
BROKEN = variants.listed("broken members where a change is lost")


def test_the_table_lists_every_variant():
    assert set(BROKEN) == {plant.__name__ for plant in PLANTED}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_broken_member_is_found(monkeypatch, plant):
    plant(monkeypatch)
    model = LostChangeModel()
    found = search(model, goal=model.is_over)
    print(found)  # noqa: T201 - the way there, shown with -s
    assert found.broken is not None
    assert found.broken.startswith(BROKEN[plant.__name__][0])
