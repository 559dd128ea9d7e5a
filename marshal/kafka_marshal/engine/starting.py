"""Finds where a claim just won starts, and sends its first beat (PROTOCOL 5.6)."""

from kafka_marshal.errors import CoordinationError, PositionError
from kafka_marshal.ports import LogRange
from kafka_marshal.protocol.claiming import Claimant, Phase
from kafka_marshal.protocol.state import KeyState
from kafka_marshal.protocol.types import TopicPartition

from .beats import Beater
from .context import Context
from .holding import Delivery, Holding, Lookup

LOOKUP_MS_MAX = 10_000
LOOKUP_RETRY_MS = 500


class Starter:
    """Takes a holding from won to held."""

    __slots__ = ("_beater", "_claimant", "_context")

    def __init__(self, context: Context, beater: Beater, claimant: Claimant) -> None:
        self._context = context
        self._beater = beater
        self._claimant = claimant

    def begin(self, holding: Holding, known: KeyState) -> None:
        """Beat at once; start at the world's position where it has one."""
        is_amo = holding.delivery is Delivery.AT_MOST_ONCE
        position = known.next_unclaimed() if is_amo else known.position
        # PROTOCOL 5.1: this beat is the owner's first record, before any fetch.
        self._beater.beat_start(holding, position)
        if position is not None or not holding.start_rule.is_needed:
            holding.begin(position, grantee=self._claimant.owner.incarnation)
            return
        self._look_up(holding)

    def drive(self, holding: Holding, now_ms: int) -> bool:
        """Finish a start whose look-up has ended; return whether it did.

        Raises:
            PositionError: There is no position, and none may be assumed.
        """
        lookup = holding.lookup
        if holding.claim.phase is not Phase.STARTING or lookup is None:
            return False
        if not lookup.done():
            return False
        error = lookup.exception()
        if isinstance(error, PositionError):
            raise error
        if error is not None:
            if now_ms >= holding.lookup_at_ms:
                fields = {"key": holding.key, "error": error}
                self._context.observe("start_lookup_failed", fields)
                self._look_up(holding)
            return False
        holding.lookup = None
        position = self._choose(holding, lookup.result(0))
        self._beater.beat_start(holding, position)
        holding.begin(position, grantee=self._claimant.owner.incarnation)
        return True

    def _choose(self, holding: Holding, found: Lookup) -> int:
        if found.committed is not None:
            return found.committed
        wanted = holding.start_rule.offsets.get(holding.key.topic_partition)
        if wanted is not None:
            return wanted
        if holding.start_rule.offset_reset == "latest":
            return found.log_range.end
        return found.log_range.start

    def _look_up(self, holding: Holding) -> None:
        data = self._context.ports.data
        group_id = holding.key.group_id
        known = self._context.replica_of(holding.key).world.keys[holding.key]
        # PROTOCOL 5.6: commits of an earlier topic of this name mean nothing.
        may_use_commit = not known.retired_topic_ids
        partition = holding.key.topic_partition
        rule = holding.start_rule
        must_exist = rule.offset_reset == "none" and partition not in rule.offsets
        holding.lookup_at_ms = self._context.now_ms + LOOKUP_RETRY_MS

        def find() -> Lookup:
            log_range = data.ranges(
                [partition], LOOKUP_MS_MAX, isolation_level=rule.isolation_level
            ).get(partition)
            if log_range is None:
                raise CoordinationError(f"{partition} does not exist.")
            committed = None
            if may_use_commit:
                offsets = data.committed(
                    group_id, [partition], timeout_ms=LOOKUP_MS_MAX
                )
                committed = offsets.get(partition)
            if committed is None and must_exist:
                raise _no_position(partition, log_range)
            return Lookup(committed, log_range)

        holding.lookup = self._context.ports.background.submit(find)


def _no_position(partition: TopicPartition, log_range: LogRange) -> PositionError:
    return PositionError(
        f"{partition} has no position and auto_offset_reset is 'none'; set one with "
        "a committed offset, or choose 'earliest' or 'latest'",
        requested=-1,
        log_start=log_range.start,
        log_end=log_range.end,
        partition=(partition.topic, partition.partition),
    )
