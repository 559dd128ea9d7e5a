"""Every interleaving of a topic's growth with the records of one key (9.10)."""

import pytest
import variants
from growthmodel import (
    GrowthModel,
    add_before_the_announcement,
    begin_without_judging_again,
    count_what_is_taken,
    end_before_producers_know,
    judge_by_what_is_read,
    pass_one_early,
    pass_without_an_end,
)
from search import search

pytestmark = pytest.mark.model


def test_a_growing_topic_keeps_the_order_and_records_of_a_key(record_property):
    model = GrowthModel()
    found = search(model, goal=model.is_over)
    record_property("states", found.states)
    assert found.broken is None, str(found)
    assert found.states > 500


PLANTED = [
    add_before_the_announcement,
    end_before_producers_know,
    begin_without_judging_again,
    judge_by_what_is_read,
    count_what_is_taken,
    pass_without_an_end,
    pass_one_early,
]
BROKEN = variants.listed("broken growths of topics")


def test_the_table_lists_every_variant():
    assert set(BROKEN) == {plant.__name__ for plant in PLANTED}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_broken_growth_breaks_the_listed_rule(monkeypatch, plant):
    plant(monkeypatch)
    found = search(GrowthModel())
    print(found)  # noqa: T201 - the way there, shown with -s
    assert found.broken is not None
    assert found.broken.startswith(BROKEN[plant.__name__][0])
