"""What a state remembers of keys and groups."""

import pytest
from logkit import KEY, OP, ident, planned, scope_of

from kafka_marshal.protocol.items import (
    ERAS_MAX,
    Layout,
    LayoutSource,
    PlanNote,
    Scheduled,
    StandingDirective,
    end_era,
    era_at,
    is_in_scope,
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
def test_a_directive_names_its_client_or_all_members_of_its_host(
    client, host, expected
):
    it = StandingDirective(OP, "admin", ident("admin"), 0, 9, client, host, "drain")
    assert it.names("c1", "m1") is expected


def test_a_directive_of_a_host_names_no_member_of_unknown_host():
    it = StandingDirective(OP, "admin", ident("admin"), 0, 9, None, "m1", "drain")
    assert not it.names("c1", "")


def test_a_plan_is_whole_once_all_slices_were_read():
    records = (planned(0, count=2), planned(1, count=2, number=1))
    assert not PlanNote(records[:1], 1, 5, 7).is_whole
    assert PlanNote(records, 2, 6, 7).is_whole


def test_a_layout_returns_a_source_by_its_partition():
    one = LayoutSource(1, 0, None)
    layout = Layout(OP, 2, 9, (one, LayoutSource(3, 1, 5)))
    assert layout.source(1) == one
    assert layout.source(2) is None


SCOPE = scope_of({"s": (), "t": (0, 3)})


@pytest.mark.parametrize(
    ("topic", "partition", "expected"),
    [
        pytest.param("t", 0, True, id="first partition"),
        pytest.param("t", 3, True, id="last partition"),
        pytest.param("t", 1, False, id="partition between them"),
        pytest.param("s", 99, True, id="any partition of a whole topic"),
        pytest.param("u", 0, False, id="another topic"),
        pytest.param("/planner", 0, False, id="planner"),
    ],
)
def test_a_scope_has_its_partitions_and_whole_topics(topic, partition, expected):
    key = KEY._replace(topic=topic, partition=partition)
    assert is_in_scope(SCOPE, key) is expected


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        pytest.param("t", True, id="data"),
        pytest.param("/checkpoint", True, id="checkpoint"),
        pytest.param("/planner", False, id="planner"),
    ],
)
def test_a_pause_without_a_scope_has_all_keys_but_the_planner(topic, expected):
    assert is_in_scope(None, KEY._replace(topic=topic)) is expected


def test_scheduled_pauses_are_ordered_by_begin_and_operation():
    def scheduled(begin_ms, op_id, scope=None):
        return Scheduled(begin_ms, op_id, "admin", ident("admin"), 0, 9, scope)

    first, second, third = (
        scheduled(1, ident("z"), SCOPE),
        scheduled(2, OP),
        scheduled(2, ident("z"), SCOPE),
    )
    assert sorted([third, second, first]) == [first, second, third]


FULL = tuple((10 * n, n) for n in range(1, ERAS_MAX + 1))
NEXT = (10 * (ERAS_MAX + 1), ERAS_MAX + 1)


def test_an_offset_has_the_era_that_ends_behind_it():
    eras = ((10, 1), (20, 2))
    found = [era_at(eras, offset) for offset in (1, 9, 10, 19, 20, 30)]
    assert found == [1, 1, 2, 2, None, None]
    assert era_at((), 1) is None


def test_all_eras_are_kept_below_the_limit():
    assert end_era((), (10, 1), epochs=iter(())) == ((10, 1),)
    epochs = iter(range(1_000))
    assert end_era(FULL[:-1], FULL[-1], epochs=epochs) == FULL
    assert next(epochs) == 0


@pytest.mark.parametrize(
    ("epochs", "dropped"),
    [
        pytest.param((), 0, id="no-claim"),
        pytest.param((9_999,), 0, id="claims-of-the-present-era"),
        pytest.param((9, 10, 25), 3, id="claims-of-the-oldest"),
        pytest.param((19, 5), 2, id="in-any-order"),
        pytest.param(range(10 * ERAS_MAX), ERAS_MAX, id="all-but-the-last"),
        pytest.param(range(10 * ERAS_MAX + 10), 0, id="claims-of-all"),
    ],
)
def test_the_oldest_era_without_a_claim_is_dropped(epochs, dropped):
    eras = [*FULL, NEXT]
    del eras[dropped]
    assert end_era(FULL, NEXT, epochs=epochs) == tuple(eras)


def test_an_epoch_of_a_dropped_era_gets_the_next_era():
    eras = end_era(FULL, NEXT, epochs=[5])
    assert era_at(eras, 5) == 1
    assert era_at(eras, 15) == 3
