"""A key that stays, where its log loses Configs or fences: every state (10.9)."""

import pytest
import variants
from lostchangemodel import (
    HISTORIES,
    LostChangeModel,
    claim_where_a_config_is_lost,
    claim_where_the_fence_is_lost,
    forget_a_config,
    forget_the_change_before,
    leave_what_is_lost,
)
from lostconfigmodel import LostConfigModel, forget_what_was_read
from search import search

pytestmark = pytest.mark.model


@pytest.mark.parametrize("history", HISTORIES)
def test_tokens_grow_whichever_records_a_log_loses(history, record_property):
    model = LostChangeModel(history)
    found = search(model, goal=model.is_over)
    record_property("states", found.states)
    assert found.broken is None, str(found)
    assert found.states > 1_000


def test_tokens_grow_though_the_only_log_loses_a_config(record_property):
    model = LostConfigModel()
    found = search(model, goal=model.is_over)
    record_property("states", found.states)
    assert found.broken is None, str(found)
    assert found.states > 1_000


PLANTED = [
    (claim_where_the_fence_is_lost, "a change"),
    (claim_where_a_config_is_lost, "a change"),
    (claim_where_a_config_is_lost, "settings"),
    (leave_what_is_lost, "a change"),
    (forget_the_change_before, "two changes"),
    (forget_a_config, "settings"),
]
BROKEN = variants.listed("broken members where a change is lost")


def test_the_table_lists_every_variant():
    planted = {plant.__name__ for plant, _ in PLANTED}
    assert set(BROKEN) == {*planted, forget_what_was_read.__name__}


@pytest.mark.parametrize(
    ("plant", "model"),
    [
        *((plant, LostChangeModel(history)) for plant, history in PLANTED),
        (forget_what_was_read, LostConfigModel()),
    ],
)
def test_a_broken_member_breaks_the_listed_rule(monkeypatch, plant, model):
    plant(monkeypatch)
    found = search(model, goal=model.is_over)
    print(found)  # noqa: T201 - the way there, shown with -s
    assert found.broken is not None
    assert found.broken.startswith(BROKEN[plant.__name__][0])
