"""Tracks which Configs processes have read, if logs may lose them (PROTOCOL 10.9).

A claim may get a lower token than an earlier claim of its key in two cases. Either all
logs, or the log of the claim, have lost the Config of the earlier claim, and the sender
had not read that Config when it sent the claim. Or the Config came with a fence that
partition 0 lost before any other partition had it. No other claim may.
"""

from collections.abc import Iterable

from kafka_marshal.protocol.codec import decode
from kafka_marshal.protocol.layout import config_of
from kafka_marshal.protocol.records import ClaimingPartition, LayoutFence
from kafka_marshal.protocol.state import Transition, WorldState
from kafka_marshal.protocol.types import Token
from simulator.node import Node


class Readings:
    """The newest era that each process has read, and had read at each claim."""

    def __init__(self) -> None:
        """Start with nothing read."""
        self._read: dict[bytes, int] = {}
        self._claims: dict[tuple[bytes, int], int] = {}
        # Eras of fences that partition 0 has lost, and no other partition has.
        self._unbegun: set[int] = set()

    def on_lost(self, record: object, others: Iterable[WorldState]) -> None:
        """Note a record that partition 0 has lost.

        Args:
            record: The record.
            others: The other partitions.
        """
        if not isinstance(record, LayoutFence):
            return
        config = config_of(record)
        configs = [each.config for each in others if each.config is not None]
        if all(each.generation < config.generation for each in configs):
            self._unbegun.add(config.era)

    def on_step(self, node: Node) -> None:
        """Note the newest era that a process has read, once it is ready."""
        if not node.engine.is_ready:
            return
        name, replicas = node.owner.incarnation, node.engine.context.replicas
        configs = (each.world.config for each in replicas.values())
        eras = [each.era for each in configs if each is not None]
        self._read[name] = max([self._read.get(name, 0), *eras])

    def on_append(self, node: Node, value: bytes) -> None:
        """Note the era that a process has read when it sends a claim."""
        record = decode(value)
        if isinstance(record, ClaimingPartition):
            self.on_step(node)
            name = record.incarnation
            self._claims[name, record.seq] = self._read.get(name, 0)

    def is_excused(self, transition: Transition, latest: Token | None) -> bool:
        """Return whether the sender of a claim cannot know the Config of a token."""
        record = transition.record
        if latest is None or not isinstance(record, ClaimingPartition):
            return False
        if latest.era in self._unbegun:
            return True
        return self._claims.get((record.incarnation, record.seq), 0) < latest.era
