"""Kept states for tests, and a source that returns given states."""

import attrs

from kafka_marshal.engine.kept_states import KeptState
from kafka_marshal.protocol.snapshot import digest, to_bytes


class Shelf:
    """A source of kept states that returns given states."""

    def __init__(self, *states):
        self.states = {state.partition: state for state in states}
        self.asked = []
        self.discarded = []

    def find(self, wanted, *, log, timeout_ms):
        self.asked.append(sorted(wanted))
        return {t: each for t, each in self.states.items() if t in wanted}

    def discard(self, state):
        self.discarded.append(state.partition)


def kept(world, **changes) -> KeptState:
    made = KeptState(
        partition=world.partition,
        offset=world.next_offset,
        leader_epoch=world.leader_epoch,
        digest=digest(world),
        state=to_bytes(world),
        source="a test",
    )
    return attrs.evolve(made, **changes)
