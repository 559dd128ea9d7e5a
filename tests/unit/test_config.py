"""Checks of the settings of a consumer."""

import pickle
import re

import numpy as np
import pytest

from kafka_marshal.arguments import FOREVER_MS
from kafka_marshal.config import (
    LEAST,
    OPTIONAL,
    TOPICS_MAX,
    Callbacks,
    ConsumerConfig,
    Delivery,
    OffsetReset,
    checked_labels,
    topic_pattern,
)
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.types import PARTITION_MAX, TopicPartition


def refused(**settings):
    with pytest.raises(ConfigurationError) as caught:
        ConsumerConfig(**settings)
    return caught.value


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        pytest.param({}, "topics", id="neither"),
        pytest.param({"topics": ("t",), "pattern": "t"}, "topics", id="both"),
        pytest.param({"topics": ("a b",)}, "topics", id="bad-name"),
        pytest.param({"topics": (["a", "b"],)}, "topics", id="a-list"),
        pytest.param({"topics": (b"a",)}, "topics", id="bytes-name"),
        pytest.param(
            {"topics": tuple(f"t{n}" for n in range(TOPICS_MAX + 1))},
            "topics",
            id="many",
        ),
        pytest.param({"pattern": "("}, "pattern", id="pattern"),
        pytest.param({"pattern": 7}, "pattern", id="no-pattern"),
        pytest.param({"pattern": re.compile(b"t")}, "pattern", id="bytes"),
        pytest.param({"pattern": re.compile("t", re.VERBOSE)}, "pattern", id="verbose"),
        pytest.param({"pattern": "(a{1,1000}){1,1000}"}, "pattern", id="large"),
        pytest.param({"pattern": r"(\w{200}|\pL{200}){4}"}, "pattern", id="huge"),
    ],
)
def test_invalid_topics_and_patterns_are_refused(settings, setting):
    assert refused(**settings).setting == setting


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("isolation_level", "dirty"),
        ("auto_offset_reset", "late"),
        ("delivery", "exactly"),
        ("delivery", None),
    ],
)
def test_unknown_values_of_enumerated_settings_are_refused(setting, value):
    error = refused(topics=("t",), **{setting: value})
    assert error.setting == setting
    assert repr(value) in str(error)


@pytest.mark.parametrize(("setting", "least"), LEAST.items())
def test_numbers_below_their_minimum_are_refused(setting, least):
    assert getattr(ConsumerConfig(topics=("t",), **{setting: least}), setting) == least
    error = refused(topics=("t",), **{setting: least - 1})
    assert error.setting == setting
    assert str(error).startswith(f"{setting} must be ")


@pytest.mark.parametrize("setting", LEAST)
def test_numbers_of_numpy_become_int(setting):
    """Others can be neither written to the log nor sent to a sidecar."""
    config = ConsumerConfig(topics=("t",), **{setting: np.int64(7)})
    found = getattr(config, setting)
    assert (type(found), found) == (int, 7)


def test_texts_of_numpy_become_str():
    config = ConsumerConfig(
        topics=(np.str_("t"),),
        policy=np.str_("greedy"),
        auto_offset_reset=OffsetReset.LATEST,
        isolation_level=np.str_("read_committed"),
    )
    texts = [*config.topics, config.policy, config.auto_offset_reset]
    texts += [config.isolation_level, ConsumerConfig(pattern=np.str_("t")).pattern]
    assert texts == ["t", "greedy", "latest", "read_committed", "t"]
    assert {type(text) for text in texts} == {str}
    labels = checked_labels({np.str_("rack"): np.str_("r1")})
    assert [type(each) for pair in labels.items() for each in pair] == [str, str]


def test_an_infinite_timeout_becomes_forever_ms():
    """Infinity is the default of kafka-python, and its way to disable the timeout."""
    config = ConsumerConfig(topics=("t",), consumer_timeout_ms=float("inf"))
    assert config.consumer_timeout_ms == FOREVER_MS


@pytest.mark.parametrize("setting", ["claims_max", "standbys"])
@pytest.mark.parametrize("value", [2**31, 2**70])
def test_more_partitions_than_a_topic_can_have_fit_into_records(setting, value):
    """An engine that cannot encode its Member record stops, with all its claims."""
    config = ConsumerConfig(topics=("t",), **{setting: value})
    assert getattr(config, setting) == PARTITION_MAX


@pytest.mark.parametrize("setting", LEAST)
def test_only_optional_numbers_may_be_none(setting):
    if setting in OPTIONAL:
        assert (
            getattr(ConsumerConfig(topics=("t",), **{setting: None}), setting) is None
        )
    else:
        assert refused(topics=("t",), **{setting: None}).setting == setting


@pytest.mark.parametrize("value", ["no", 0, None])
def test_a_flag_must_be_true_or_false(value):
    error = refused(topics=("t",), release_behind=value)
    assert error.setting == "release_behind"
    assert f"True or False, not {value!r}" in str(error)


@pytest.mark.parametrize("setting", LEAST)
@pytest.mark.parametrize("value", ["5", [5], True])
def test_numbers_of_another_type_are_refused(setting, value):
    error = refused(topics=("t",), **{setting: value})
    assert error.setting == setting
    assert repr(value) in str(error)


@pytest.mark.parametrize("pattern", [r"(a)\1", "a(?=b)", "(?<!a)b", "(?P<n>a)(?P=n)"])
def test_a_pattern_without_linear_time_is_refused(pattern):
    error = refused(pattern=pattern)
    assert error.setting == "pattern"
    assert "syntax of RE2" in str(error)


def test_flags_of_a_compiled_pattern_become_text():
    pattern = re.compile(r"ORDERS-.*", re.IGNORECASE | re.ASCII)
    config = ConsumerConfig(pattern=pattern)
    assert config.pattern == "(?i)ORDERS-.*"
    assert topic_pattern(config.pattern)("orders-a")


@pytest.mark.parametrize("delivery", Delivery)
def test_a_delivery_guarantee_may_be_given_as_text(delivery):
    config = ConsumerConfig(topics=("t",), delivery=delivery.value)
    assert config.delivery is delivery
    assert config.is_at_most_once == (delivery is Delivery.AT_MOST_ONCE)


def test_internal_topics_and_the_coordination_topic_never_match():
    assert ConsumerConfig(topics=("t",)).matches("log") is None
    matches = ConsumerConfig(pattern=".*").matches("log")
    names = ("orders", "__internal", "log")
    assert [name for name in names if matches(name)] == ["orders"]


def test_settings_can_be_pickled():
    starts = {TopicPartition("t", 0): 5}
    config = ConsumerConfig(topics=("t",), starts=starts, delivery="amo")
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("setting", [n for n in LEAST if not n.endswith("_ms")])
def test_a_fractional_count_is_refused(setting):
    assert "whole number" in str(refused(topics=("t",), **{setting: 1.5}))


@pytest.mark.parametrize("name", ["on_claimed", "on_lost", "on_warm", "on_standby"])
def test_callbacks_must_be_plain_functions(name):
    async def later(*_):
        pass

    for given, text in (("x", "must be a function"), (later, "coroutine function")):
        callbacks = Callbacks(**{name: given})
        with pytest.raises(ConfigurationError, match=text) as raised:
            callbacks.require_fit(counts_topics=False)
        assert raised.value.setting == name


def test_on_topics_needs_a_policy_that_counts_topics():
    Callbacks().require_fit(counts_topics=False)
    callbacks = Callbacks(on_topics=print)
    callbacks.require_fit(counts_topics=True)
    with pytest.raises(ConfigurationError) as caught:
        callbacks.require_fit(counts_topics=False)
    assert caught.value.setting == "on_topics"


def test_standbys_and_their_callback_need_each_other():
    callbacks = Callbacks(on_standby=print)
    callbacks.require_fit(counts_topics=False, standbys=1)
    for each, count, counts_topics in (
        (callbacks, 0, False),
        (Callbacks(), 1, False),
        (callbacks, 1, True),
    ):
        with pytest.raises(ConfigurationError) as caught:
            each.require_fit(counts_topics=counts_topics, standbys=count)
        assert caught.value.setting == "standbys"


@pytest.mark.parametrize("labels", [{"rack": 5}, {5: "r"}, ["rack"], "rack=r1"])
def test_labels_must_be_a_dict_of_texts(labels):
    with pytest.raises(ConfigurationError, match="dict of texts") as caught:
        checked_labels(labels)
    assert caught.value.setting == "labels"
