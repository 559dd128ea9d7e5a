"""Which keys of its group a pause has (PROTOCOL 4.15)."""

import pytest
from logkit import KEY, OP, ident, scope_of

from kafka_marshal.protocol.pauses import Scheduled, is_in_scope

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
def test_without_a_scope_it_has_all_keys_but_the_planner(topic, expected):
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
