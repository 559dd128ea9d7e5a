"""Checks and conversions of the arguments that callers pass."""

import sys
from enum import Enum
from typing import NamedTuple

import numpy as np
import pytest
from logkit import release

from kafka_marshal.arguments import (
    FOREVER_MS,
    REASON_CHARS_MAX,
    require_flag,
    require_instance,
    require_text,
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


def test_a_partition_of_another_library_is_converted():
    class Other(NamedTuple):
        topic: str
        partition: int

    found = to_partition(Other("t", 3))
    assert (type(found), found) == (TopicPartition, ("t", 3))


@pytest.mark.parametrize("given", ["t-0", ("t",), ("t", "0"), (0, "t"), None])
def test_a_value_that_is_not_a_partition_is_refused(given):
    with pytest.raises(TypeError, match="give partitions one by one"):
        to_partition(given)


def test_an_integer_of_numpy_becomes_an_int():
    found = to_whole("offset", np.int64(7))
    assert (type(found), found) == (int, 7)


@pytest.mark.parametrize("given", [True, 1.5, np.float64(1), "1", None])
def test_a_value_that_is_not_a_whole_number_is_refused(given):
    for check in (to_whole, to_count):
        with pytest.raises(ConfigurationError, match="a whole number") as raised:
            check("size", given)
        assert raised.value.setting == "size"


def test_a_count_below_its_minimum_is_refused():
    assert to_count("size", 1) == 1
    assert to_count("size", np.int64(0), least=0) == 0
    with pytest.raises(ConfigurationError, match="size must be at least 1"):
        to_count("size", 0)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        *((7, 7), (np.int64(7), 7), (0.5, 1), (-0.5, 0), (np.float64(1.5), 2)),
        *((float("inf"), FOREVER_MS), (float("-inf"), -FOREVER_MS)),
        *((sys.maxsize, FOREVER_MS), (-(10**30), -FOREVER_MS), (1e300, FOREVER_MS)),
    ],
)
def test_times_are_rounded_up_to_whole_milliseconds(given, found):
    assert (type(to_ms("timeout_ms", given)), to_ms("timeout_ms", given)) == (
        int,
        found,
    )


@pytest.mark.parametrize("given", [True, "5s", None, float("nan"), [1]])
def test_a_time_that_is_not_a_number_is_refused(given):
    with pytest.raises(ConfigurationError, match="timeout_ms must be a number"):
        to_ms("timeout_ms", given)


def test_the_minimum_of_a_time_applies_before_rounding():
    """0 often means no limit, so a negative time must not be rounded to 0."""
    assert to_ms("timeout_ms", 0.5, least=0) == 1
    with pytest.raises(ConfigurationError, match="timeout_ms must be at least 0"):
        to_ms("timeout_ms", -0.5, least=0)


def test_a_value_of_another_class_is_refused():
    require_text("topic", "t")
    require_instance("config", {}, kind=dict)
    with pytest.raises(ConfigurationError, match="topic must be a text, not None"):
        require_text("topic", None)
    with pytest.raises(ConfigurationError, match="config must be a dict, not 't'"):
        require_instance("config", "t", kind=dict)


def test_a_flag_must_be_true_or_false():
    require_flag("wait", True)
    require_flag("wait", False)
    for given in ("no", 0, 1, None, np.bool_(False)):
        with pytest.raises(ConfigurationError, match="must be True or False"):
            require_flag("wait", given)


class Word(str, Enum):  # noqa: UP042 - programs have such classes
    """An enumeration of texts."""

    HOME = "worker-1"


def test_texts_of_other_types_become_str():
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
def test_arguments_become_plain_python_values(given, found, types):
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


def test_a_decorated_method_gets_plain_arguments():
    counts, reason, rest = Tool().write(
        np.int64(1), reason=np.str_("why"), topics=[np.str_("t")]
    )
    assert (types_of(counts), type(reason), types_of(rest["topics"])) == (
        {int},
        str,
        {str},
    )
    assert Tool.write.__doc__ == "Return what arrives."


@pytest.mark.parametrize("name", ["execute", "dry_run"])
def test_a_text_does_not_decide_whether_to_write(name):
    """Else ``execute="no"`` would execute."""
    assert Tool().write(**{name: True})[2] == {name: True}
    with pytest.raises(ConfigurationError, match=f"{name} must be True or False"):
        Tool().write(**{name: "no"})


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        ("x" * (REASON_CHARS_MAX + 1), "has 1025 characters.*room for 1024"),
        (5, "must be a text, not 5"),
    ],
)
def test_a_reason_that_is_too_long_or_not_text_is_refused(reason, why):
    with pytest.raises(ConfigurationError, match=why) as raised:
        Tool().write(reason=reason)
    assert raised.value.setting == "reason"


def test_the_longest_accepted_reason_fits_into_a_record():
    reason = "\N{SNOWMAN}" * REASON_CHARS_MAX
    assert Tool().write(reason=reason)[1] == reason
    assert len(encode(release(1, 0, reason=reason))) > REASON_CHARS_MAX
    with pytest.raises(MalformedRecord):
        encode(release(1, 0, reason=reason + "x"))


def test_a_person_must_be_text():
    assert to_person(None) is None
    assert type(to_person(np.str_("ada"))) is str
    with pytest.raises(ConfigurationError, match="person must be a text"):
        to_person(5)


def test_a_seek_offset_outside_the_partition_is_refused():
    place = TopicPartition("t", 0)
    assert [to_offset_in(place, each, log=(3, 5)) for each in (3, 5)] == [3, 5]
    with pytest.raises(PositionError, match=r"offsets 3 to 5.*cannot seek to 6"):
        to_offset_in(place, 6, log=(3, 5))
    with pytest.raises(PositionError, match="t-0 does not exist") as caught:
        to_offset_in(place, 0, log=None)
    assert (caught.value.log_start, caught.value.partition) == (-1, place)
