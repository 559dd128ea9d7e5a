"""The fold and its naive twin agree on each entry of random logs."""

import random
from collections import Counter

import pytest
from author import picker
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import murmur3
from nonsense import Nonsense
from slices import slice_of
from twins import compare, compare_resized

from kafka_marshal.protocol.hashing import coordinating_partition

# How often a slice, and the full size, must at least reach each outcome.
OFTEN = slice_of(quick=10, full=100)
RARELY = slice_of(quick=3, full=20)


@given(st.binary(min_size=500, max_size=500))
@settings(max_examples=150)
def test_twins_agree_on_logs_that_hypothesis_can_shrink(choices):
    compare(picker(choices), entries=30)


SEEN = [
    *("claimed", "resumed", "renewed", "position_only", "released", "granted"),
    *("paused", "unpaused", "configured", "no_config", "wrong_generation"),
    *("wrong_partition", "limits", "handoff", "duplicate", "held", "cas"),
    *("old_topic", "resume_mismatch", "resume_not_fresh", "not_owner", "old_epoch"),
    *("nothing_left", "span", "op_over", "busy", "old_seq", "expired", "config"),
    *("level", "staged", "decided", "position_set", "unlocked", "resolved", "locked"),
    *("not_paused", "unknown_key", "plan_mismatch", "undecided"),
    *("resolve_contradicts", "undecodable", "scheduled", "begun"),
    *("offered", "offer_withdrawn", "ready", "no_offer", "not_successor", "late"),
]


@pytest.mark.parametrize(
    ("partition", "k"), [pytest.param(0, 1, id="K=1"), pytest.param(1, 2, id="K=2")]
)
def test_twins_agree_on_random_logs_with_every_outcome(partition, k):
    names = Counter()
    for seed in range(slice_of(quick=300, full=3_000)):
        rng = random.Random(seed)
        names += compare(rng.choice, partition=partition, k=k)
    rare = {name: names[name] for name in SEEN if names[name] < OFTEN}
    assert not rare, "the author no longer goes there"


RESIZED = [
    *("layout_fenced", "imported", "layout_done", "layout_final", "moving"),
    *("importing", "layout", "done", "known", "incomplete", "retired"),
    *("busy", "config", "position_only", "not_owner", "group_imported"),
]


def test_twins_agree_on_changes_of_the_partition_count():
    """PROTOCOL 10, in sources and targets, for larger and smaller counts."""
    names = Counter()
    for seed in range(slice_of(quick=600, full=6_000)):
        names += compare_resized(seed)
    rare = {name: names[name] for name in RESIZED if names[name] < OFTEN}
    assert not rare, "the author no longer goes there"


GROWN = ["growing", "grown", "growth_withdrawn", "growth", "known", "busy", "limits"]


def test_twins_agree_on_growths_of_data_topics():
    """PROTOCOL 9.10, also in a partition that is not partition 0."""
    names = Counter()
    for seed in range(slice_of(quick=200, full=2_000)):
        rng = random.Random(seed)
        partition = 1 if seed % 8 == 0 else 0
        names += compare(rng.choice, partition=partition, k=2, grows=True)
    rare = {name: names[name] for name in GROWN if names[name] < OFTEN}
    assert not rare, "the author no longer goes there"


NONSENSE = [
    *("staged", "resolved", "layout_fenced", "imported", "group_imported"),
    *("scheduled", "offered", "directed", "planned", "fenced", "resolve_contradicts"),
]


def test_twins_agree_on_valid_records_of_a_hostile_process():
    """Records of every type, by a process that knows the log (``nonsense``)."""
    names = Counter()
    for seed in range(slice_of(quick=250, full=2_500)):
        rng = random.Random(seed)
        partition, k = rng.choice(((0, 1), (0, 2), (1, 2), (1, 1), (3, 2)))
        kinds = {"resizes": rng.random() < 0.7, "grows": rng.random() < 0.3}
        names += compare(rng.choice, partition=partition, k=k, writes=Nonsense, **kinds)
    rare = {name: names[name] for name in NONSENSE if names[name] < RARELY}
    assert not rare, "nonsense no longer goes there"


def test_twins_agree_on_configs_that_halt_a_reader():
    halts = 0
    for seed in range(200):
        rng = random.Random(seed)
        halts += compare(rng.choice, may_halt=True)["halted"]
    assert halts > 20


@given(st.text(max_size=20), st.integers(0, 2**31 - 1))
def test_the_hash_of_the_twin_equals_that_of_the_product(topic, partition):
    try:
        name = topic.encode() + b"\0" + str(partition).encode()
    except UnicodeEncodeError:
        return
    whole = coordinating_partition(topic, partition, partition_count=2**32)
    assert whole == murmur3(name)
