"""Tags in which a member announces how far it has applied the log."""

import msgspec
import pytest
from logkit import member
from msgspec import UNSET
from msgspec.structs import replace

from kafka_marshal.protocol.applied import Applied, applied_of, applied_to_tags
from kafka_marshal.protocol.codec import decode, encode

LARGE = 2**63 - 1


def read_back(announced):
    """Return what is read from the frame of a Member with these tags."""
    record = decode(encode(replace(member(), tags=applied_to_tags(announced))))
    return applied_of(record)


def test_applied_offsets_in_tags_are_read_back():
    announced = Applied(applied={0: 7, 1: LARGE, 2: 0}, began={0: 3, 1: 0, 2: 0})
    assert read_back(announced) == announced


def test_a_partition_of_unknown_progress_is_absent_when_read_back():
    announced = Applied(applied={1: 7, 3: 9}, began={1: 0, 3: 2})
    assert read_back(announced) == announced


def test_without_known_offsets_there_are_no_tags():
    assert applied_to_tags(Applied()) is UNSET
    assert applied_of(member()) == Applied()


def test_tags_that_do_not_fit_drop_began_then_the_last_partitions():
    offsets = dict.fromkeys(range(100), LARGE)
    found = read_back(Applied(applied=offsets, began=offsets))
    assert (found.applied, found.began) == (offsets, {})
    many = dict.fromkeys(range(5_000), LARGE)
    found = read_back(Applied(applied=many, began=many))
    assert found.applied == dict.fromkeys(range(len(found.applied)), LARGE)
    assert len(found.applied) >= 100


@pytest.mark.parametrize(
    "tags",
    [
        *({"applied": 7}, {"applied": {"0": 7}}, {"applied": [-1, None, "7", 1.5]}),
        *({"applied": [True, 2**64 - 1, [7]]}, {"applied": None}, {"other": [7]}),
    ],
)
def test_tags_without_valid_offsets_count_as_absent(tags):
    record = replace(member(), tags=msgspec.msgpack.encode(tags))
    assert applied_of(record) == Applied()


def test_tags_that_are_no_messagepack_count_as_absent():
    assert applied_of(replace(member(), tags=b"\xc1")) == Applied()
