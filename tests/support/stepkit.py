"""The logs of an open change, and the records that a reader of all writes next."""

import msgspec
from logkit import H, Log, ident, layout_fence, member

from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.layout import place_of
from kafka_marshal.protocol.layout_reading import read
from kafka_marshal.protocol.layout_steps import (
    FINAL_AFTER_MS,
    done_of,
    fence_of,
    final_of,
    groups_import_of,
    import_of,
    next_steps,
)
from kafka_marshal.protocol.types import Key

OTHER = ident("other")
SENDER = {
    "client_id": "admin",
    "group_id": "marshal",
    "incarnation": ident("admin"),
    "seq": 1,
}


def key_of(before, after, *, group="g", skip=0):
    """Return a key in these partitions under count 2 and under count 4."""
    every = (
        key
        for key in (Key(group, "t", n) for n in range(999))
        if place_of(key, partition_count=2) == before
        and place_of(key, partition_count=4) == after
    )
    return [key for key, _ in zip(every, range(skip + 1), strict=False)][skip]


class Change:
    """Four logs, for a change from two partitions to four or back."""

    def __init__(self, before=2, after=4, *, h=H):
        self.before, self.after, self.h = before, after, h
        self.logs = {
            t: Log(t, configured=t < before, **self.settings(before)) for t in range(4)
        }

    def settings(self, count):
        return {"k": count, "level": 2, "h": self.h}

    def record(self, **changes):
        settings = {"h": self.h} | changes
        return layout_fence(self.after, self.before, **settings)

    def fence(self, *partitions):
        for t in partitions or range(4):
            assert self.logs[t].outcome_of(self.record()) == "layout_fenced"
        return self

    @property
    def worlds(self):
        return {t: log.state for t, log in self.logs.items()}

    def read(self, **more):
        return read(self.worlds, **more)

    def steps(self, *, wanted=(), **more):
        return next_steps(self.read(**more), wanted=wanted)

    def write(self, steps=None):
        """Append the next records; return the outcomes."""
        steps = steps or self.steps()
        change, found = steps.change, []
        records = [
            (t, fence_of(change, sender=SENDER))
            for t in steps.fences + steps.repeat_fences
        ]
        records += [(t, fence_of(lost, sender=SENDER)) for t, lost in steps.earlier]
        records += [
            (i.target, import_of(change, i, sender=SENDER)) for i in steps.imports
        ]
        records += [
            (g.target, groups_import_of(change, g, sender=SENDER)) for g in steps.groups
        ]
        records += [(d.target, done_of(change, d, sender=SENDER)) for d in steps.dones]
        records += [(f.partition, final_of(f, sender=SENDER)) for f in steps.finals]
        for t, record in records:
            found += [
                each.effect or each.reason for each in self.logs[t].append(record)
            ]
        return found

    def move_time(self, t, ms):
        self.logs[t].append(b"", after=ms)


def held(change, key, client="c1"):
    """Claim a key in its old partition; return the epoch."""
    t = place_of(key, partition_count=change.before)
    return change.logs[t].claimed(client, key=key)


def finished(change):
    """Append all fences and imports."""
    change.fence()
    change.write()
    return change


def over(before=2, after=4):
    """Return a change that has ended in all partitions."""
    change = finished(Change(before, after))
    change.move_time(0, FINAL_AFTER_MS)
    change.write()
    change.write()
    assert change.read() is None
    return change


def announce(change, client, generation, *, at=None, seq=0, group="g", dead=False):
    record = member(client, group=group, seq=seq)
    labels = {} if generation is None else {"layout": str(generation)}
    record = msgspec.structs.replace(record, labels=labels)
    home = home_partition(group, partition_count=change.after) if at is None else at
    outcome = change.logs[home].outcome_of(record, after=3 * H if dead else 0)
    assert outcome == "member"
