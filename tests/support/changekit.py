"""A change of the partition count over all coordinating partitions, step by step.

The logs are those of ``logkit``. Records of an admin and of members are appended in the
order that the protocol requires (PROTOCOL 10), so that tests can stop at any step. The
product's functions place the keys.
"""

import msgspec
from logkit import (
    OP,
    Log,
    claim,
    layout_done,
    layout_fence,
    layout_final,
    layout_import,
    release,
)
from pastkit import patch_open
from pastlogs import cluster_of

from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.layout import (
    digest_of,
    is_final,
    item_of,
    moving_keys,
    place_of,
)
from kafka_marshal.protocol.types import Key

LEVEL = 2


def group_at(home, count, *, to_home=None, to_count=None):
    """Return a group with these homes under both counts."""
    for number in range(10_000):
        name = f"g{number}"
        if home_partition(name, partition_count=count) != home:
            continue
        if to_count and home_partition(name, partition_count=to_count) != to_home:
            continue
        return name
    raise AssertionError("no such group")


class Change:
    """The logs of all partitions during a change of the count.

    Attributes:
        logs: One log for each partition that either count uses, and for spare ones.
    """

    def __init__(self, before=2, after=4, *, spare=0, **settings):
        self.before, self.after, self.op = before, after, OP
        self.generation, self.settings = 1, settings
        self.logs = [
            Log(t, k=before, level=LEVEL, **settings)
            if t < before
            else Log(t, configured=False)
            for t in range(max(before, after) + spare)
        ]

    @property
    def states(self):
        return [log.state for log in self.logs]

    def place(self, key, count=None):
        """Return the log of a key under a count, by default under the old one."""
        return self.logs[place_of(key, partition_count=count or self.before)]

    def target(self, key):
        return self.place(key, self.after)

    def moving(self, count=1, group="g"):
        """Return keys that move, of several partitions."""
        return self._keys(count, group, moves=True)

    def staying(self, count=1, group="g"):
        """Return keys that do not move."""
        return self._keys(count, group, moves=False)

    def _keys(self, count, group, *, moves):
        found = []
        number = 0
        while len(found) < count:
            key = Key(group, "t", number)
            if (self.place(key) is not self.target(key)) == moves:
                found.append(key)
            number += 1
        return found

    def claimed(self, *keys, client="c1"):
        """Claim keys in their old partitions; return their epochs."""
        return [
            self.place(key).claimed(client, key=key, generation=self.generation)
            for key in keys
        ]

    def released(self, *keys, client="c1", position=None, **named):
        """Release keys in their old partitions."""
        for key in keys:
            log = self.place(key)
            gone = release(
                log.key(key).epoch, position, client=client, key=key, **named
            )
            assert log.outcome_of(gone) == "released"

    def tick(self, after):
        """Let log time pass in every partition with a Config."""
        for log in self.logs:
            log.append(b"", after=after)

    # --- the records of the change

    def fence(self, *partitions):
        """Fence these partitions, by default all, partition 0 first."""
        settings = dict(self.settings)
        record = layout_fence(
            self.after,
            self.before,
            generation=self.generation + 1,
            era=self.generation + 1,
            op=self.op,
            level=LEVEL,
            **settings,
        )
        for t in partitions or range(max(self.before, self.after)):
            assert self.logs[t].outcome_of(record) == "layout_fenced"

    def items(self, key):
        return item_of(key, self.place(key).key(key))

    def imported(self, *keys):
        """Import keys, one record each; by default all keys that are final."""
        every = keys or [
            key
            for log in self.logs
            if log.state.layout is not None
            for key in moving_keys(log.state)
            if is_final(log.state, key)
        ]
        for key in every:
            log, target = self.place(key), self.target(key)
            assert is_final(log.state, key)
            item = layout_import(
                self.items(key), source=log.state.partition, op=self.op
            )
            assert target.outcome_of(item) in {"imported", "known"}

    def done(self):
        """Append the Done of every source to every target."""
        for log in self.logs:
            layout = log.state.layout
            for source in () if layout is None else layout.sources:
                if source.done_ms is not None:
                    continue
                state = self.logs[source.partition].state
                keys = [key for key in moving_keys(state) if self.target(key) is log]
                items = [item_of(key, state.keys[key]) for key in keys]
                record = layout_done(len(keys), source=source.partition, op=self.op)
                record = msgspec.structs.replace(record, digest=digest_of(items))
                assert log.outcome_of(record) == "layout_done"

    def final(self, *partitions):
        """End the change in these partitions, by default all, partition 0 first."""
        for t in partitions or range(max(self.before, self.after)):
            if self.logs[t].state.layout is not None:
                assert self.logs[t].outcome_of(layout_final(self.op)) == "layout_final"
        if not partitions:
            self.generation += 1

    def reclaimed(self, *keys, client="c2"):
        """Claim keys in their new partitions; return their epochs."""
        found = []
        for key in keys:
            log = self.target(key)
            generation = log.state.config.generation
            record = claim(client, key=key, generation=generation)
            transition = log.one(record)
            assert transition.effect == "claimed", transition
            found.append(transition.epoch)
        return found

    def whole(self):
        """Do the whole change; keys must be released or stale."""
        self.fence()
        self.whole_after_fence()

    def whole_after_fence(self):
        """Do all steps after the fences."""
        self.imported()
        self.done()
        self.final()


def opened(patch, change):
    """Let views open the current logs of a change; return the cluster."""
    kafka = cluster_of(*change.logs)

    def open_log(*_, **__):
        log = kafka.coordination_log()
        log.cluster_id = "cluster"
        return log

    patch_open(patch, open_log)
    return kafka
