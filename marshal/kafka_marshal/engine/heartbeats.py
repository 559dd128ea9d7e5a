"""Sends heartbeats, one record per coordinating partition (PROTOCOL 4.5)."""

from collections.abc import Container, Iterable, Sequence

from kafka_marshal.ports import FAR_MS
from kafka_marshal.protocol.losses import (
    BatchMark,
    fitting,
    mark_to_tags,
    marks_to_tags,
)
from kafka_marshal.protocol.records import BatchHeartbeat, Heartbeat
from kafka_marshal.protocol.state import Transition

from .claim_index import ClaimIndex
from .context import Context
from .holding import Holding, Rewind
from .outbox import Outbox, Sent

BEATS_PER_RECORD_MAX = 1_000
INTERVALS_PER_H = 3
STEP_MS_MIN = 50  # the margin of a lease covers at least this


class _ClockLead:
    """The least lead of log time over local time at recent own records.

    Two windows of two heartbeat intervals each; the earlier one is dropped when the
    later one is full.
    """

    __slots__ = ("_before_ms", "_least_ms", "_until_ms")

    def __init__(self) -> None:
        self._before_ms = self._least_ms = FAR_MS
        self._until_ms = 0

    def note(self, ahead_ms: int, now_ms: int, *, window_ms: int) -> None:
        """Record the lead of log time at one record."""
        if now_ms >= self._until_ms:
            self._before_ms, self._least_ms = self._least_ms, FAR_MS
            self._until_ms = now_ms + window_ms
        self._least_ms = min(self._least_ms, ahead_ms)

    @property
    def least_ms(self) -> int:
        """The least of both windows."""
        return min(self._before_ms, self._least_ms)


class Heartbeater:
    """Renews all claims, three times per heartbeat interval (PROTOCOL 5.2)."""

    __slots__ = ("_context", "_due_ms", "_leads", "_outbox")

    def __init__(self, context: Context, outbox: Outbox) -> None:
        self._context = context
        self._outbox = outbox
        self._due_ms: dict[int, int] = {}
        self._leads: dict[int, _ClockLead] = {}

    def next_delay_ms(self) -> int:
        """Return a third of the heartbeat interval, with 10 % jitter either way."""
        third_ms = self._context.heartbeat_interval_ms // INTERVALS_PER_H
        jitter_ms = self._context.ports.entropy.below(self._jitter_ms + 1)
        return third_ms - self._jitter_ms // 2 + jitter_ms

    @property
    def _jitter_ms(self) -> int:
        """A fifth of the usual delay: the most that two delays differ by."""
        third_ms = self._context.heartbeat_interval_ms // INTERVALS_PER_H
        return 2 * (third_ms // 10)

    def beat_start(self, holding: Holding, position: int | None) -> None:
        """Send the first heartbeat of a claim that was just won (PROTOCOL 5.1)."""
        partition = holding.coordinator
        holding.first_seq = self._send_one(partition, holding, position)
        now_ms = self._context.now_ms
        self._due_ms.setdefault(partition, now_ms + self.next_delay_ms())

    def beat_due(self, holdings: Iterable[Holding], now_ms: int) -> None:
        """Send the heartbeats that are due, batched by coordinating partition.

        Heartbeats that are due soon are sent at the same time, and stay together from
        then on. One request and one response of each broker, and one round that reads
        them back, cost much less than one of each per coordinating partition.
        """
        # Each won claim has set when its coordinating partition is due.
        if not self._due_ms or now_ms < min(self._due_ms.values()):
            return
        by_partition = self._by_partition(holdings)
        for partition in list(self._due_ms):
            if partition not in by_partition:
                del self._due_ms[partition]
        soon_ms = now_ms + self._jitter_ms
        next_ms = now_ms + self.next_delay_ms()
        for partition, held in by_partition.items():
            if self._due_ms.get(partition, now_ms) <= soon_ms:
                self._send(partition, held)
                self._due_ms[partition] = next_ms

    def beat_soon(self) -> None:
        """Send the heartbeats of all claims in the next round."""
        self._due_ms = dict.fromkeys(self._due_ms, 0)

    def beat_now(self, holdings: Iterable[Holding]) -> list[int]:
        """Send heartbeats for all claims; return the sequence numbers."""
        seqs = []
        for partition, held in self._by_partition(holdings).items():
            seqs.extend(self._send(partition, held))
        return seqs

    def send_rewind(self, holding: Holding) -> None:
        """Set the position of a key in the log, also to a lower one (PROTOCOL 6.6)."""
        partition = holding.coordinator
        before = self._outbox.pending_to(partition)
        seq = self._send_one(partition, holding, holding.position, rewind=True)
        first = seq if holding.rewind is None else holding.rewind.first_seq
        holding.rewind = Rewind((*before, seq), first)

    def confirm_rewind(self, holding: Holding) -> bool:
        """Return whether the log now has the position of a seek; else send it again.

        It is sent again if it never landed, or if an earlier heartbeat landed after it
        and moved the position.
        """
        rewind = holding.rewind
        if rewind is None:
            return False
        if any(self._outbox.is_pending(seq, late=False) for seq in rewind.seqs):
            return False
        world = self._context.replicas[holding.coordinator].world
        known = world.keys[holding.key]
        if known.position != holding.position:
            self.send_rewind(holding)
            return False
        return True

    def may_undo_rewind(self, holding: Holding) -> bool:
        """Return whether a record of this claim from before a seek may still land."""
        assert holding.rewind is not None
        return self._outbox.may_land(
            holding.coordinator,
            first=holding.first_seq,
            before=holding.rewind.first_seq,
        )

    def note_lead(self, partition: int, sent_ms: int) -> None:
        """Record the clock lead at an own claim or heartbeat that was just folded.

        Leases count from these records.

        Args:
            partition: Its coordinating partition.
            sent_ms: Local time at which it was sent.
        """
        lead = self._leads.setdefault(partition, _ClockLead())
        log_ms = self._context.replicas[partition].world.now_ms
        window_ms = 2 * self._context.heartbeat_interval_ms
        lead.note(log_ms - sent_ms, self._context.now_ms, window_ms=window_ms)

    def on_verdicts(
        self,
        sent: Sent,
        beats: Iterable[tuple[int, Transition]],
        *,
        index: ClaimIndex,
    ) -> list[Holding]:
        """Apply the verdicts on heartbeats that were read back, each with its epoch.

        Returns:
            The holdings whose claims ended.
        """
        replica = self._context.replicas[sent.partition]
        self.note_lead(sent.partition, sent.sent_ms)
        ended = []
        for epoch, transition in beats:
            holding = index.of_epoch(sent.partition, epoch)
            if holding is None:
                continue
            holding.claim.on_beat_verdict(
                transition,
                sent_ms=sent.sent_ms,
                heartbeat_interval_ms=replica.renewed_by_ms(transition.key),
            )
            if holding.claim.ending is not None:
                ended.append(holding)
        return ended

    def forget(self, partition: int) -> None:
        """Forget the clock lead of a coordinating partition that is folded again."""
        self._leads.pop(partition, None)
        self._due_ms.pop(partition, None)

    def check_clock(
        self, holdings: Iterable[Holding], partitions: Iterable[int], *, now_ms: int
    ) -> bool:
        """Shorten leases after the clock of a partition leader stepped forward.

        Returns:
            Whether a lease was shortened.
        """
        # A lease counts log time from the fold of its last record, and local time from
        # the sending of that record. If the log leads local time by no more than the
        # least lead at these records, its clock is not ahead of any lease.
        ahead = {
            partition
            for partition in partitions
            if (lead := self._leads.get(partition)) is not None
            and self._context.replicas[partition].world.now_ms - now_ms
            > lead.least_ms + STEP_MS_MIN
        }
        return bool(ahead) and self._shorten_leases(holdings, ahead, now_ms=now_ms)

    def _shorten_leases(
        self, holdings: Iterable[Holding], partitions: Container[int], *, now_ms: int
    ) -> bool:
        surpluses: dict[int, list[int]] = {}
        for holding in holdings:
            if not holding.claim.is_owned:
                continue
            partition = holding.coordinator
            if partition not in partitions:
                continue
            world = self._context.replicas[partition].world
            known = world.keys.get(holding.key)
            # A key that was dropped, because it was forgotten or has moved, was stale.
            age_ms = 2 * holding.claim.heartbeat_interval_ms + 1
            if known is not None:
                age_ms = known.age_ms(world.now_ms)
            surplus_ms = holding.claim.surplus_ms(now_ms, log_elapsed_ms=age_ms)
            if surplus_ms > STEP_MS_MIN:
                holding.claim.shorten(surplus_ms)
                surpluses.setdefault(partition, []).append(surplus_ms)
        for partition, found in surpluses.items():
            fields = {
                "partition": partition,
                "count": len(found),
                "surplus_ms": max(found),
            }
            self._context.observe("clock_step", fields)
        return bool(surpluses)

    def _by_partition(self, holdings: Iterable[Holding]) -> dict[int, list[Holding]]:
        found: dict[int, list[Holding]] = {}
        for holding in holdings:
            if holding.claim.is_owned:
                found.setdefault(holding.coordinator, []).append(holding)
        return found

    def _send(self, partition: int, held: list[Holding]) -> list[int]:
        if len(held) == 1:
            return [self._send_one(partition, held[0], held[0].position)]
        # The limit last read in this partition: a change reaches them one by one.
        config = self._context.replicas[partition].world.config
        config = config or self._context.settled
        most = min(BEATS_PER_RECORD_MAX, config.limit("beats"))
        seqs = []
        for start in range(0, len(held), most):
            chunk = held[start : start + most]
            seqs.append(self._send_batch(partition, chunk))
        return seqs

    def _send_batch(self, partition: int, held: list[Holding]) -> int:
        claimant = self._outbox.claimant
        beats = tuple((h.claim.epoch or 0, h.position) for h in held)
        tags = marks_to_tags(_marks(held))
        seq, _ = self._outbox.send(
            partition,
            lambda seq: BatchHeartbeat(
                **claimant.sender(seq),
                beats=beats,
                tags=tags,
            ),
        )
        return seq

    def _send_one(
        self,
        partition: int,
        holding: Holding,
        position: int | None,
        *,
        rewind: bool = False,
    ) -> int:
        claimant = self._outbox.claimant
        key = holding.key
        seq, _ = self._outbox.send(
            partition,
            lambda seq: Heartbeat(
                **claimant.sender(seq),
                topic=key.topic,
                partition=key.partition,
                epoch=holding.claim.epoch or 0,
                position=position,
                rewind=rewind,
                tags=mark_to_tags(holding.mark, grantee=holding.marked_grantee),
            ),
            key=key,
        )
        return seq


def _marks(held: list[Holding]) -> Sequence[BatchMark]:
    """Return the marks of at-most-once holdings, changed marks first.

    A record has room for a limited number; the next heartbeat sends the rest.
    """
    found = [
        (index, holding.mark, holding.marked_grantee)
        for index, holding in enumerate(held)
        if holding.mark is not None
    ]
    found.sort(key=lambda each: held[each[0]].sent_mark == each[1])
    sent = fitting(found)
    for index, mark, _ in sent:
        held[index].sent_mark = mark
    return sent
