"""Folds a random log twice, with the product and with its naive twin."""

from collections import Counter

import msgspec
from author import Author
from naive import ANYTHING, Naive

from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import to_bytes
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.text import (
    object_to_entry,
    state_to_object,
    transition_to_object,
)

ENTRIES = 60


def compare(pick, *, partition=0, k=1, entries=ENTRIES, may_halt=False):
    """Write a log and fold it twice; return the transitions' names."""
    naive = Naive(partition)
    state = WorldState(partition)
    author = Author(pick, naive, k=k, may_halt=may_halt)
    names, soft = Counter(), Counter()
    for _ in range(entries):
        line = author.write()
        expected = naive.apply(line)
        transitions = apply(state, object_to_entry(line)[1])
        documents = [transition_to_object(partition, one) for one in transitions]
        counts = Counter(one["effect"] or one["reason"] for one in documents)
        if expected == ANYTHING:
            soft += counts
        else:
            assert documents == expected, line
            names += counts
        assert hard_part(state) == naive.world(), line
        if state.halted is None:
            assert operations(state) == naive.operations(), line
    assert Counter(naive.counters) + soft == Counter(state.soft.counters)
    return names


def hard_part(state):
    document = state_to_object(state)
    return {
        name: document[name]
        for name in (
            *("next_offset", "leader_epoch", "log_time_ms"),
            *("config", "claims", "pauses"),
        )
    }


def operations(state):
    """Return what section 8 keeps, read from the canonical bytes (PROTOCOL 4)."""
    _, _, keys, groups, _ = msgspec.msgpack.decode(to_bytes(state))
    named = {tuple(item[1:4]): item for item in keys}
    return {
        "locks": {key: shown(item[-3]) for key, item in named.items() if item[-3]},
        "previous": {key: shown(item[-2]) for key, item in named.items() if item[-2]},
        "over": {item[1]: [shown(note) for note in item[3]] for item in groups},
        "verdicts": {item[1]: shown(item[4][0][1]) for item in groups if len(item) > 4},
    }


def shown(values):
    return [value.hex() if isinstance(value, bytes) else value for value in values]
