"""What callers give is checked before anything is done with it."""

from enum import Enum
from typing import NamedTuple

import numpy as np
import pytest
from logkit import release

from kafka_marshal.arguments import (
    FOREVER_MS,
    REASON_CHARS_MAX,
    require_flag,
    to_count,
    to_ms,
    to_name,
    to_offset_in,
    to_partition,
    to_person,
    to_plain,
    to_text,
    to_whole,
    with_plain_arguments,
)
from kafka_marshal.errors import ConfigurationError, MalformedRecord, PositionError
from kafka_marshal.protocol.codec import encode
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


def types_of(value):
    if isinstance(value, dict):
        return {*map(type, value), *map(type, value.values())}
    return {*map(type, value)} if isinstance(value, list | tuple | set) else type(value)


@pytest.mark.parametrize(
    ("given", "found", "types"),
    [
        (np.int64(7), 7, int),
        (np.str_("t"), "t", str),
        ([np.str_("t")], ["t"], {str}),
        ((np.int32(1),), (1,), {int}),
        ({np.str_("t")}, {"t"}, {str}),
        ({np.str_("span"): np.int64(5)}, {"span": 5}, {str, int}),
        (True, True, bool),
        (None, None, type(None)),
        (1.5, 1.5, float),
    ],
)
def test_arguments_become_python_s(given, found, types):
    plain = to_plain(given)
    assert plain == found
    assert types_of(plain) == types


def test_other_arguments_stay_as_they_are():
    for given in (TopicPartition("t", 0), np.array([1, 2]), print, object()):
        assert to_plain(given) is given


class Tool:
    @with_plain_arguments
    def write(self, *counts, reason=None, **rest):
        """Return what arrives."""
        return counts, reason, rest


def test_a_method_gets_plain_arguments():
    counts, reason, rest = Tool().write(
        np.int64(1), reason=np.str_("why"), topics=[np.str_("t")]
    )
    assert (types_of(counts), type(reason), types_of(rest["topics"])) == (
        {int},
        str,
        {str},
    )
    assert Tool.write.__doc__ == "Return what arrives."


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        ("x" * (REASON_CHARS_MAX + 1), "has 1025 characters.*room for 1024"),
        (5, "must be a text, not 5"),
    ],
)
def test_a_reason_that_no_record_has_room_for_is_refused_at_the_call(reason, why):
    with pytest.raises(ConfigurationError, match=why) as raised:
        Tool().write(reason=reason)
    assert raised.value.setting == "reason"


def test_the_longest_reason_is_one_of_records():
    reason = "\N{SNOWMAN}" * REASON_CHARS_MAX
    assert Tool().write(reason=reason)[1] == reason
    assert len(encode(release(1, 0, reason=reason))) > REASON_CHARS_MAX
    with pytest.raises(MalformedRecord):
        encode(release(1, 0, reason=reason + "x"))


def test_a_person_is_a_text():
    assert to_person(None) is None
    assert type(to_person(np.str_("ada"))) is str
    with pytest.raises(ConfigurationError, match="person must be a text"):
        to_person(5)


def test_an_offset_to_seek_to_is_one_that_the_log_has_or_ends_at():
    place = TopicPartition("t", 0)
    assert [to_offset_in(place, each, log=(3, 5)) for each in (3, 5)] == [3, 5]
    with pytest.raises(PositionError, match=r"offsets 3 to 5.*cannot seek to 6"):
        to_offset_in(place, 6, log=(3, 5))
    with pytest.raises(PositionError, match="t-0 does not exist") as caught:
        to_offset_in(place, 0, log=None)
    assert (caught.value.log_start, caught.value.partition) == (-1, place)
