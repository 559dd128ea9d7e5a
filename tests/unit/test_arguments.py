"""What callers give is checked before anything is done with it."""

from enum import Enum
from typing import NamedTuple

import numpy as np
import pytest

from kafka_marshal.arguments import (
    FOREVER_MS,
    require_flag,
    to_count,
    to_ms,
    to_name,
    to_partition,
    to_text,
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
    for check in (to_whole, to_count):
        with pytest.raises(ConfigurationError, match="a whole number") as raised:
            check("size", given)
        assert raised.value.setting == "size"


def test_a_count_has_a_least_value():
    assert to_count("size", 1) == 1
    assert to_count("size", np.int64(0), least=0) == 0
    with pytest.raises(ConfigurationError, match="size must be at least 1"):
        to_count("size", 0)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        *((7, 7), (np.int64(7), 7), (0.5, 1), (-0.5, 0), (np.float64(1.5), 2)),
        *((float("inf"), FOREVER_MS), (float("-inf"), -FOREVER_MS)),
    ],
)
def test_a_time_is_in_whole_milliseconds(given, found):
    assert (type(to_ms("timeout_ms", given)), to_ms("timeout_ms", given)) == (
        int,
        found,
    )


@pytest.mark.parametrize("given", [True, "5s", None, float("nan"), [1]])
def test_what_is_no_time(given):
    with pytest.raises(ConfigurationError, match="timeout_ms must be a number"):
        to_ms("timeout_ms", given)


def test_a_time_has_a_least_value_before_it_is_rounded():
    """As 0 often means no limit, a negative one must not become it."""
    assert to_ms("timeout_ms", 0.5, least=0) == 1
    with pytest.raises(ConfigurationError, match="timeout_ms must be at least 0"):
        to_ms("timeout_ms", -0.5, least=0)


def test_a_flag_is_no_text_and_no_number():
    require_flag("wait", True)
    require_flag("wait", False)
    for given in ("no", 0, 1, None, np.bool_(False)):
        with pytest.raises(ConfigurationError, match="must be True or False"):
            require_flag("wait", given)


class Word(str, Enum):  # noqa: UP042 - what programs have
    """An enumeration of texts."""

    HOME = "worker-1"


def test_texts_are_python_s():
    for given in (np.str_("worker-1"), Word.HOME, "worker-1"):
        found = to_text(given)
        assert (type(found), found) == (str, "worker-1")
        assert type(to_name("client_id", given)) is str
    with pytest.raises(ConfigurationError, match="no valid name"):
        to_name("client_id", b"worker-1")
