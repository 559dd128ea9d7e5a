"""What a state remembers of keys and groups."""

import pytest
from logkit import OP, ident, planned

from kafka_marshal.protocol.items import (
    Layout,
    LayoutSource,
    PlanNote,
    StandingDirective,
)


@pytest.mark.parametrize(
    ("client", "host", "expected"),
    [
        pytest.param("c1", None, True, id="client"),
        pytest.param("c2", None, False, id="another client"),
        pytest.param(None, "m1", True, id="host"),
        pytest.param(None, "m2", False, id="another host"),
    ],
)
def test_a_directive_names_one_client_or_a_host(client, host, expected):
    it = StandingDirective(OP, "admin", ident("admin"), 0, 9, client, host, "drain")
    assert it.names("c1", "m1") is expected


def test_an_unknown_host_is_no_host():
    it = StandingDirective(OP, "admin", ident("admin"), 0, 9, None, "m1", "drain")
    assert not it.names("c1", "")


def test_a_plan_is_whole_once_all_slices_were_read():
    records = (planned(0, count=2), planned(1, count=2, number=1))
    assert not PlanNote(records[:1], 1, 5, 7).is_whole
    assert PlanNote(records, 2, 6, 7).is_whole


def test_a_layout_finds_its_sources():
    one = LayoutSource(1, 0, None)
    layout = Layout(OP, 2, 9, (one, LayoutSource(3, 1, 5)))
    assert layout.source(1) == one
    assert layout.source(2) is None
