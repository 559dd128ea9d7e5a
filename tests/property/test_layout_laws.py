"""Invariants of logs in which the partition count changes (PROTOCOL 10)."""

import random
from typing import Any

import pytest
from author import Author
from logkit import KEY, Log, claim, imported, layout_fence, layout_import
from naive import Naive

from kafka_marshal.history.actions import ActionLog
from kafka_marshal.history.chain import KeyChain
from kafka_marshal.history.historian import Historian
from kafka_marshal.protocol.log_judge import LogJudge
from kafka_marshal.protocol.losses import LossBook
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import digest, freeze, from_bytes, to_bytes
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.text import object_to_entry
from kafka_marshal.protocol.types import Key

PLACES = ((0, 1), (0, 2), (1, 2), (1, 1), (2, 2), (3, 2))
SEEDS = range(120)
FENCED = "layout_fenced"


def entries_of(seed, count=60):
    """Return the partition and the entries of a random log."""
    rng = random.Random(seed)
    partition, k = rng.choice(PLACES)
    naive, found = Naive(partition), []
    author = Author(rng.choice, naive, k=k, resizes=True)
    for _ in range(count):
        line = author.write()
        naive.apply(line)
        found.append(object_to_entry(line)[1])
    return partition, found


def test_a_snapshot_and_its_tail_equal_the_whole_log():
    """S5, also while a change is open."""
    opened = 0
    for seed in SEEDS:
        partition, entries = entries_of(seed)
        whole, cut = WorldState(partition), None
        for index, entry in enumerate(entries):
            apply(whole, entry)
            if cut is not None:
                apply(cut, entry)
            if index % 7 == seed % 7:
                value = to_bytes(whole)
                cut = from_bytes(value)
                opened += whole.layout is not None
                assert digest(cut) == digest(whole) == freeze(whole).digest()
        assert cut is not None
        assert to_bytes(cut) == to_bytes(whole)
    assert opened > 100


def test_a_fence_discards_earlier_state_of_a_partition_new_in_use():
    """A reader that starts at the fence gets the same state (PROTOCOL 10.2)."""
    begun = 0
    for seed in SEEDS:
        partition, entries = entries_of(seed)
        whole = WorldState(partition)
        for entry in entries:
            fenced = [one for one in apply(whole, entry) if one.effect == FENCED]
            if fenced and partition >= fenced[0].record.from_count:
                late = WorldState(partition)
                apply(late, entry)
                assert to_bytes(late) == to_bytes(whole)
                begun += 1
    assert begun > 20


def test_history_readers_and_the_log_judge_accept_every_log():
    for seed in SEEDS:
        partition, entries = entries_of(seed)
        state = WorldState(partition)
        judge, losses = LogJudge(state), LossBook(partition)
        readers: list[Any] = [
            Historian(sample_ms=100),
            ActionLog(),
            *(KeyChain(Key("g", "t", number)) for number in range(8)),
        ]
        for entry in entries:
            transitions = apply(state, entry)
            for reader in readers:
                reader.take(state, entry, transitions=transitions)
            losses.take(entry, transitions, keys=state.keys)
            losses.open_ones(state)
            found = [each for one in transitions for each in judge.take(one)]
            assert found == []


@pytest.mark.parametrize("seed", [3, 5, 8])
def test_a_seed_writes_the_same_log_again(seed):
    assert entries_of(seed) == entries_of(seed)


def test_an_imported_key_has_no_row_before_its_first_claim():
    log, historian = Log(1, configured=False), Historian(sample_ms=100)
    for record in (layout_fence(2), layout_import(imported(position=5))):
        transitions = log.append(record)
        historian.take(log.state, log.entries[-1], transitions=transitions)
    assert list(historian.open_rows()) == []
    transitions = log.append(claim(generation=2))
    historian.take(log.state, log.entries[-1], transitions=transitions)
    (row,) = historian.open_rows()
    assert (row.key, row.start_position) == (KEY, 5)
