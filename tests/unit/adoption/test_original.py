import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_marshal.adoption.original import merged, read_group
from kafka_marshal.protocol.types import TopicPartition

PLACE = TopicPartition("orders", 3)
NOW_S = 1_480_000_000


def line(kind, offset=None, *, group="billing", at_s=NOW_S, part=3):
    text = f"{kind}/1/{at_s}/ab12/worker-1/{group}/orders/{part}"
    return (text if offset is None else f"{text}/{offset}").encode()


def test_the_last_record_of_a_partition_counts():
    group = read_group(
        [
            line("ClaimingPartition"),
            line("Heartbeat", 10),
            line("Heartbeat", 25),
            line("ClaimingMessages", 30),
            line("Heartbeat", 99, group="reports"),
            line("Heartbeat", 7, part=4),
        ],
        "billing",
    )
    assert group.offsets == {PLACE: 25, TopicPartition("orders", 4): 7}
    assert group.unreadable_count == 0


def test_a_release_counts_too_and_ends_the_claim():
    group = read_group(
        [line("Heartbeat", 10), line("ReleasingPartition", 12)], "billing"
    )
    assert group.offsets == {PLACE: 12}
    assert not group.is_active(NOW_S)


@pytest.mark.parametrize(
    ("silent_s", "is_active"), [(0, True), (119, True), (120, False), (86_400, False)]
)
def test_a_group_works_until_it_was_silent_for_two_intervals(silent_s, is_active):
    group = read_group([line("Heartbeat", 10)], "billing")
    assert group.is_active(NOW_S + silent_s) is is_active


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(None, id="tombstone"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff\xfe", id="not-text"),
        pytest.param(b"\x01\x01\x00\x99", id="our-own-records"),
        pytest.param(line("Heartbeat"), id="no-offset"),
        pytest.param(line("Heartbeat", "1/2"), id="too-many-fields"),
        pytest.param(line("Heartbeat", -5), id="negative"),
        pytest.param(line("Heartbeat", "1_0"), id="underscore"),
        pytest.param(line("Heartbeat", "\u0661"), id="other-digits"),
        pytest.param(line("Heartbeat", 2**63), id="too-large"),
        pytest.param(line("Heartbeat", 5, part="x"), id="no-partition"),
        pytest.param(line("Heartbeat", 5, at_s="soon"), id="no-time"),
        pytest.param(line("Nonsense", 5), id="unknown"),
        pytest.param(line("Heartbeat", 5, group="a/b"), id="slash-in-a-name"),
    ],
)
def test_what_is_no_record_is_counted_and_changes_nothing(value):
    group = read_group([line("Heartbeat", 10), value], "billing")
    assert group.unreadable_count == 1
    assert group.offsets == {PLACE: 10}


@given(st.lists(st.binary(max_size=80)))
def test_no_bytes_stop_the_reader(values):
    assert read_group(values, "billing").unreadable_count <= len(values)


def test_a_claim_of_another_group_is_not_ours():
    assert read_group([line("Heartbeat", 10, group="x")], "billing").offsets == {}


def test_coordinating_partitions_add_up():
    whole = merged(
        [
            read_group([line("Heartbeat", 10), b"?"], "billing"),
            read_group([line("ReleasingPartition", 4, part=1), b"?"], "billing"),
        ]
    )
    assert whole.offsets == {PLACE: 10, TopicPartition("orders", 1): 4}
    assert whole.unreadable_count == 2
    assert whole.is_active(NOW_S)
