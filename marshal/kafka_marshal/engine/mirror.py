"""Mirrors positions to the group's committed offsets in Kafka (PROTOCOL 5.7).

For lag tools, on a best-effort basis: only the log is authoritative. Offsets that other
processes commit are reported and overwritten, and no claim waits for a mirror. That is
why it is a module of its own: no other part of the engine depends on it.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from kafka_marshal.errors import CoordinationError, MarshalError
from kafka_marshal.ports import DataLog, Pending
from kafka_marshal.protocol.claiming import Claim, Claimant
from kafka_marshal.protocol.types import Key, TopicPartition

from .context import Context
from .holding import Holding

MIRROR_MS_MAX = 2_000
MIRROR_RETRY_MS = 10_000
CHECKS_PER_H = 30  # checks for moved positions; after news, each visits all held keys


class _Written(NamedTuple):
    """A position, and the epoch of its claim."""

    epoch: int
    position: int


class Mirror:
    """Mirrors one session's positions.

    Writes are coalesced, one at a time, and at most three per heartbeat interval.
    """

    __slots__ = (
        "_call",
        "_claimant",
        "_claims",
        "_context",
        "_due_ms",
        "_has_failed",
        "_is_off",
        "_seen",
        "_sending",
        "_written",
    )

    def __init__(self, context: Context, claimant: Claimant) -> None:
        self._context = context
        self._claimant = claimant
        self._call: Pending[Mapping[TopicPartition, int | None]] | None = None
        self._claims: dict[Key, Claim] = {}
        self._sending: dict[Key, _Written] = {}
        self._written: dict[Key, _Written] = {}
        # How far each partition was folded when there was nothing to write.
        self._seen: object = None
        self._due_ms = 0
        self._has_failed = False
        self._is_off = False

    @property
    def is_behind(self) -> bool:
        """Whether a write is due or in progress."""
        can = not self._is_off and not self._has_failed
        return can and (self._call is not None or bool(self._wanted()))

    def hurry(self) -> None:
        """Write the remaining positions in the next round."""
        self._due_ms = 0

    def follow(self, holding: Holding) -> None:
        """Mirror a key until another member owns it."""
        if holding.start_rule.is_needed:
            self._claims[holding.key] = holding.claim
            self._seen = None

    def drive(self, now_ms: int) -> None:
        """Write moved positions if a write is due and none is outstanding."""
        if self._call is not None:
            if not self._call.done():
                return
            self._on_response(self._call, now_ms)
            self._call = None
        if self._is_off or now_ms < self._due_ms:
            return
        since_ms = self._context.now_ms
        self._sending = self._wanted()
        between_ms = self._context.heartbeat_interval_ms // CHECKS_PER_H
        self._due_ms = max(now_ms + between_ms, self._context.next_check_ms(since_ms))
        if self._sending:
            self._due_ms = now_ms + self._context.heartbeat_interval_ms // 3
            data, group_id = self._context.ports.data, self._claimant.group_id
            wanted = {
                key.topic_partition: each.position
                for key, each in self._sending.items()
            }
            work = partial(_replace, data, group_id, wanted)
            self._call = self._context.ports.background.submit(work)

    def _wanted(self) -> dict[Key, _Written]:
        """Return positions to write; forget keys that others own."""
        replicas = self._context.replicas.values()
        # Only records move positions; a state that is replaced counts as a change.
        seen = [(each.world.next_offset, each.changes.end) for each in replicas]
        if seen == self._seen:
            return {}
        owner, partition_of = self._claimant.owner, self._context.partition_of
        states = {t: each.world.keys for t, each in self._context.replicas.items()}
        wanted, now_ms = {}, self._context.now_ms
        for key, claim in list(self._claims.items()):
            known = states[partition_of(key)].get(key)
            if known is None or (known.owner is not None and known.owner != owner):
                self._forget(key)  # the next owner mirrors it
                continue
            if known.owner is not None and not claim.is_valid(now_ms):
                continue  # there may be a next owner, in records not read yet
            position = known.next_unclaimed()
            if position is None:
                continue
            before = self._written.get(key)
            if before != (known.epoch, position):
                wanted[key] = _Written(known.epoch, position)
            elif known.owner is None:
                self._forget(key)
        self._seen = None if wanted else seen
        return wanted

    def _forget(self, key: Key) -> None:
        self._claims.pop(key, None)
        self._written.pop(key, None)

    def _on_response(
        self, call: Pending[Mapping[TopicPartition, int | None]], now_ms: int
    ) -> None:
        self._seen = None
        error = call.exception(0)
        if error is not None:
            self._due_ms = now_ms + MIRROR_RETRY_MS
            self._is_off = isinstance(error, MarshalError) and not error.retriable
            if not self._has_failed:
                self._context.observe("mirror_failed", {"error": error})
            self._has_failed = True
            for key in self._sending:  # the write may still succeed
                self._written.pop(key, None)
            return
        self._has_failed = False
        committed = call.result(0)
        for key, sent in self._sending.items():
            partition = key.topic_partition
            if partition not in committed:  # its topic was deleted
                known = self._context.replica_of(key).world.keys.get(key)
                if known is None or known.owner is None:
                    self._forget(key)
                continue
            before, found = self._written.get(key), committed[partition]
            self._written[key] = sent
            if before is None or before.epoch != sent.epoch:
                continue  # others owned it meanwhile
            # An admin that set the position commits it, too, before this client does.
            # Kafka drops offsets with their topic: that is no commit either.
            if found not in {before.position, sent.position, None}:
                fields = {
                    "partition": partition,
                    "expected": before.position,
                    "found": found,
                }
                self._context.observe("mirror_drift", fields)


def _replace(
    data: DataLog, group_id: str, wanted: Mapping[TopicPartition, int]
) -> Mapping[TopicPartition, int | None]:
    """Commit offsets and return the previous ones, of partitions that exist."""
    found = data.committed(group_id, list(wanted), timeout_ms=MIRROR_MS_MAX)
    try:
        data.commit(group_id, wanted, timeout_ms=MIRROR_MS_MAX)
    except CoordinationError:
        there = data.ends(list(wanted), MIRROR_MS_MAX)
        if len(there) == len(wanted):
            raise
        wanted = {place: wanted[place] for place in there}
        data.commit(group_id, wanted, timeout_ms=MIRROR_MS_MAX)
    return {place: found[place] for place in wanted}
