"""What callers give is checked before anything is done with it."""

from typing import NamedTuple

import numpy as np
import pytest

from kafka_marshal.arguments import (
    require_count,
    require_number,
    to_partition,
    to_whole,
)
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.types import TopicPartition


def test_a_partition_of_another_library_is_one():
    class Other(NamedTuple):
        topic: str
        partition: int

    found = to_partition(Other("t", 3))
    assert (type(found), found) == (TopicPartition, ("t", 3))


@pytest.mark.parametrize("given", ["t-0", ("t",), ("t", "0"), (0, "t"), None])
def test_what_is_no_partition(given):
    with pytest.raises(TypeError, match="give partitions one by one"):
        to_partition(given)


def test_whole_numbers_are_python_s():
    found = to_whole("offset", np.int64(7))
    assert (type(found), found) == (int, 7)


@pytest.mark.parametrize("given", [True, 1.5, np.float64(1), "1", None])
def test_what_is_no_whole_number(given):
    for check in (to_whole, require_count):
        with pytest.raises(ConfigurationError, match="a whole number") as raised:
            check("size", given)
        assert raised.value.setting == "size"


def test_a_count_has_a_least_value():
    require_count("size", 1)
    require_count("size", 0, least=0)
    with pytest.raises(ConfigurationError, match="size must be at least 1"):
        require_count("size", 0)


@pytest.mark.parametrize("given", [True, "5s", None])
def test_what_is_no_number(given):
    require_number("timeout_ms", 0.5)
    with pytest.raises(ConfigurationError, match="timeout_ms must be a number"):
        require_number("timeout_ms", given)
