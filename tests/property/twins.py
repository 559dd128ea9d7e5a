"""Folds a random log twice, with the product and with its naive twin."""

import random
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


def compare(
    pick,
    *,
    partition=0,
    k=1,
    entries=ENTRIES,
    may_halt=False,
    writes=Author,
    **kinds,
):
    """Write a log and fold it twice; return how often each outcome occurred."""
    naive = Naive(partition)
    state = WorldState(partition)
    author = writes(pick, naive, k=k, may_halt=may_halt, **kinds)
    names, soft = Counter(), Counter()
    for _ in range(entries):
        line = author.write()
        waiting = {op for group in naive.scheduled.values() for op in group}
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
        begun = {pause["op_id"] for pause in naive.pauses.values()} & waiting
        has_own = line.get("payload", {}).get("type") in {"ReleaseGroup", "PauseGroup"}
        names["begun"] += len(begun) if not has_own else 0
    assert Counter(naive.counters) + soft == Counter(state.soft.counters)
    return names


def compare_resized(seed):
    """Compare a log of a source or a target of changes of the partition count."""
    rng = random.Random(seed)
    partition, k = rng.choice(((0, 1), (0, 2), (1, 2), (1, 1), (2, 2), (3, 2)))
    return compare(
        rng.choice, partition=partition, k=k, resizes=True, may_halt=seed % 9 == 0
    )


def hard_part(state):
    document = state_to_object(state)
    return {
        name: document.get(name)
        for name in (
            *("next_offset", "leader_epoch", "log_time_ms"),
            *(
                "config",
                "claims",
                "pauses",
                "scheduled",
                "fences",
                "directives",
                *("settings", "plans"),
                "layout",
                "growths",
            ),
        )
    }


def operations(state):
    """Return the state of 4.13, 8 and 9.4 in the canonical bytes (PROTOCOL 4)."""
    _, _, keys, groups, _ = msgspec.msgpack.decode(to_bytes(state))
    named = {tuple(item[1:4]): item for item in keys}
    return {
        "locks": {key: shown(item[15]) for key, item in named.items() if item[15]},
        "previous": {key: shown(item[16]) for key, item in named.items() if item[16]},
        "offers": {
            key: shown(offer)
            for key, item in named.items()
            for [_, offer] in (item[18] if len(item) > 18 else [])
        },
        "over": {item[1]: [shown(note) for note in item[3]] for item in groups},
        "verdicts": {name: shown(verdict) for name, verdict in more(groups, 1)},
        "schedules": {name: [*map(shown, each)] for name, each in more(groups, 2)},
        "scoped": {name: [*map(shown, each)] for name, each in more(groups, 4)},
        "fences": {name: [*map(shown, fences)] for name, fences in more(groups, 3)},
        "directives": {name: [*map(shown, each)] for name, each in more(groups, 5)},
        "settings": {name: shown(settings) for name, settings in more(groups, 6)},
        "plans": {name: shown(planned) for name, planned in more(groups, 7)},
    }


def more(groups, number):
    """Yield the groups whose optional elements include one with this number."""
    for item in groups:
        for mark, value in item[4] if len(item) > 4 else ():
            if mark == number:
                yield item[1], value


def shown(values):
    if isinstance(values, list):
        return list(map(shown, values))
    return values.hex() if isinstance(values, bytes) else values
