"""A flood of hostile records into one fold, in its own process.

    python flood.py RECORDS SEED

The records are those that any writer of the topic could append: noise, repeated and
damaged records, ever new names and processes, operations, batches as large as a frame,
pauses, leader changes, clocks that step. Prints one JSON object: the sizes of the state
and of the process half way and at the end.
"""

import gc
import json
import os
import random
import sys
from pathlib import Path

from logkit import (
    Log,
    all_records,
    batch,
    claim,
    decide,
    fence,
    ident,
    member,
    pause,
    resolve,
)

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.records import (
    SUPPORTED_LEVEL,
    Config,
    StagedTopic,
    StagePosition,
)
from kafka_marshal.protocol.snapshot import digest, to_bytes
from kafka_marshal.protocol.types import Key

LIMITS = {"keys": 500, "groups": 100, "operations": 50, "beats": 200, "locks": 100}
NAMES = 10**9
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
KEEPS = 512
PAUSE_MS = 500
SET_POSITION = ("staged", "decided", "position_set", "unlocked", "resolved")


class Flood:
    """Draws the next entry; keeps only a few earlier ones."""

    def __init__(self, seed: int, log: Log) -> None:
        self.log = log
        self.rng = random.Random(seed)
        # A Config of a later level would halt the fold, and later entries do nothing.
        self.frames = [
            encode(record) for record in all_records() if not isinstance(record, Config)
        ]
        self.seen = list(self.frames)
        self.kinds = (
            self.noise,
            self.replay,
            self.damage,
            self.damage,
            self.new_name,
            self.new_name,
            self.new_member,
            self.new_operation,
            self.stage_of_a_pause,
            self.decide_or_resolve,
            self.many_beats,
            self.new_fence,
        )

    def next(self) -> bytes:
        value = self.rng.choice(self.kinds)()
        self.seen[self.rng.randrange(len(self.seen))] = value[:KEEPS]
        return value

    def noise(self) -> bytes:
        size = self.rng.choice([0, 3, 40, 40, 40, 400])
        return self.rng.randbytes(size)

    def replay(self) -> bytes:
        return self.rng.choice(self.seen)

    def damage(self) -> bytes:
        value = bytearray(self.rng.choice(self.frames))
        for _ in range(self.rng.randint(1, 3)):
            value[self.rng.randrange(len(value))] = self.rng.randrange(256)
        return bytes(value)

    def new_name(self) -> bytes:
        number = self.rng.randrange(NAMES)
        key = Key(f"g{number % 300}", f"t{number}", 0)
        return encode(claim(f"c{number}", key=key, inc=self.rng.randbytes(16)))

    def new_member(self) -> bytes:
        number = self.rng.randrange(NAMES)
        found = member(f"c{number}", group=f"g{number % 300}")
        return encode(found)

    def new_operation(self) -> bytes:
        number = self.rng.randrange(NAMES)
        until = self.log.now_ms + number % PAUSE_MS
        return encode(pause(until, op=ident(f"op{number}"), group=f"g{number % 300}"))

    def stage_of_a_pause(self) -> bytes:
        """Return a Stage of many keys without an owner, in a paused group."""
        paused = [
            (name, group.pause.op_id)
            for name, group in self.log.state.groups.items()
            if group.pause is not None
        ]
        if not paused:
            return self.new_operation()
        group_id, op_id = self.rng.choice(paused)
        now_ms = self.log.state.now_ms
        free = [
            StagedTopic(key.topic, None, ((key.partition, self.rng.randrange(9)),))
            for key, known in self.log.state.keys.items()
            if key.group_id == group_id
            and known.freshness(now_ms) is not Freshness.FRESH
            and not key.topic.startswith("/")
        ]
        unknown = StagedTopic(f"t{self.rng.randrange(NAMES)}", None, ((0, 1),))
        stage = StagePosition(
            client_id="admin",
            group_id=group_id,
            incarnation=ident("admin"),
            seq=1,
            op_id=op_id,
            plan_digest=self.rng.randbytes(16),
            topics=tuple(free) or (unknown,),
        )
        return encode(stage)

    def decide_or_resolve(self) -> bytes:
        """Return a Decide or Resolve of an open operation, or of an unknown one."""
        state = self.log.state
        going_on = list(state.locked)
        going_on += [(n, g.pause.op_id) for n, g in state.groups.items() if g.pause]
        group, op = f"g{self.rng.randrange(300)}", self.rng.randbytes(16)
        if going_on and self.rng.random() < 0.8:
            group, op = self.rng.choice(going_on)
        if self.rng.random() < 0.5:
            return encode(decide(op=op, group=group))
        return encode(resolve(commit=self.rng.random() < 0.5, op=op, group=group))

    def new_fence(self) -> bytes:
        number = self.rng.randrange(NAMES)
        inc = self.rng.randbytes(16)
        return encode(fence(f"c{number}", inc=inc, group=f"g{number % 300}"))

    def many_beats(self) -> bytes:
        beats = [(self.rng.randrange(NAMES), None) for _ in range(300)]
        return encode(batch(*beats, inc=self.rng.randbytes(16)))


def resident_bytes() -> int:
    """Collect garbage; return the resident memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def measured(log: Log) -> dict[str, int]:
    state = log.state
    soft = state.soft
    return {
        "resident_bytes": resident_bytes(),
        "state_bytes": len(to_bytes(state)),
        "keys": len(state.keys),
        "groups": len(state.groups),
        "locks": sum(map(len, state.locked.values())),
        "verdicts": sum(group.verdict is not None for group in state.groups.values()),
        "operations": sum(len(group.over) for group in state.groups.values()),
        "fences": sum(len(group.fences) for group in state.groups.values()),
        "fences_known": len(state.fences),
        "members": len(soft.members),
        "notes": len(soft.notes),
        "counters": len(soft.counters),
        "undecodable": len(soft.undecodable),
        "forgettable": len(state.forgettable),
    }


def main(records: int, seed: int) -> None:
    log = Log(level=SUPPORTED_LEVEL, **LIMITS)
    flood = Flood(seed, log)
    rng = flood.rng
    half, most_locks = {}, 0
    for number in range(records):
        if number == records // 2:
            digest(log.state)
            half = measured(log)
        step_ms = rng.choice([0, 0, 0, 1, 20])
        if rng.random() < 0.001:
            log.leader_epoch += 1
            step_ms = rng.randint(-5_000, 5_000)
        log.append(flood.next(), after=step_ms)
        most_locks = max(most_locks, sum(map(len, log.state.locked.values())))
        log.entries.clear()
    assert log.state.halted is None
    digest(log.state)
    output = {"limits": LIMITS, "half": half, "end": measured(log)}
    counters = log.state.soft.counters
    output["most_locks"] = most_locks
    output["effects"] = {name: counters.get(name, 0) for name in SET_POSITION}
    sys.stdout.write(json.dumps(output))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
