"""Writes checkpoints when they are due, one process at a time (PROTOCOL 7.2).

The key ``/checkpoint`` of a coordinating partition is claimed for one checkpoint and
released after it, with the same claim steps as any other key. All members see all
checkpoints, so a fleet writes as few of them as a single process.
"""

from collections.abc import Callable, Iterator

import attrs

from kafka_marshal.defaults import CHECKPOINT_INTERVAL_MS
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.gc_pause import uncollected
from kafka_marshal.protocol.checkpoints import checkpoint_key, is_writer, parts_of
from kafka_marshal.protocol.claiming import Claim, Claimant, estimate
from kafka_marshal.protocol.records import (
    CheckpointBegin,
    CheckpointChunk,
    CheckpointEnd,
    ClaimingPartition,
    Heartbeat,
    Record,
    ReleasingPartition,
)
from kafka_marshal.protocol.snapshot import digest, freeze
from kafka_marshal.protocol.state import Transition

from .context import Context
from .heartbeats import INTERVALS_PER_H
from .outbox import Outbox, Sent
from .replica import Replica

INTERVAL_MS_MIN = 1_000
ENTRIES_DEFAULT = 50_000
# Checkpoints of many keys are large. To keep them a small part of the log, each step
# adds the configured number of entries between two checkpoints, up to a limit.
KEYS_PER_STEP = 5_000
STEPS_MAX = 4
# Interval in an idle coordinating partition: retention also deletes checkpoints.
IDLE_MS = 24 * 3_600_000
# The writers spread their claims randomly over a tenth of the interval.
JITTER_PART = 10
# Most chunks in flight, of 47 KiB each: a heartbeat may have to wait for all of them.
UNDER_WAY_MAX = 4


def checked_interval_ms(interval_ms: int, *, setting: str) -> int:
    """Return a configured checkpoint interval if it is valid; 0 means never.

    Raises:
        ConfigurationError: It is negative or too short.
    """
    if interval_ms == 0 or interval_ms >= INTERVAL_MS_MIN:
        return interval_ms
    raise ConfigurationError(
        f"{setting} must be 0 (none) or at least {INTERVAL_MS_MIN} ms, "
        f"not {interval_ms}",
        setting=setting,
    )


@attrs.frozen
class CheckpointRule:
    """When a coordinating partition is due for a checkpoint.

    Attributes:
        interval_ms: Local time since the last checkpoint, or since the start of this
            process; 0 = never write any.
        entries: Entries since the last checkpoint, with up to 5,000 keys; twice as
            many with up to 10,000, at most four times as many.
    """

    interval_ms: int = CHECKPOINT_INTERVAL_MS
    entries: int = ENTRIES_DEFAULT

    def entries_of(self, key_count: int) -> int:
        """Return the entries from a checkpoint to the next with this many keys."""
        return self.entries * min(1 + key_count // KEYS_PER_STEP, STEPS_MAX)


@attrs.define(eq=False, kw_only=True)
class _Work:
    """A checkpoint being written.

    Attributes:
        claim: The claim that it is written under.
        checkpoint_id: Its id.
        beat_at_ms: Local time of the next heartbeat.
        begin: Offset and leader epoch of its Begin, None before that is read back.
        digest_hex: Digest of its state.
        size_bytes: Size of the parts sent so far.
        parts: Parts of its state still to be sent; None before the state was frozen.
        sent_count: Number of parts sent.
        pending: Local send time of each record not read back yet, by ``seq``.
        is_ending: Whether its End was sent.
    """

    claim: Claim
    checkpoint_id: bytes
    beat_at_ms: int = 0
    begin: tuple[int, int] | None = None
    digest_hex: str = ""
    size_bytes: int = 0
    parts: Iterator[bytes] | None = None
    sent_count: int = 0
    pending: dict[int, int] = attrs.field(factory=dict)
    is_ending: bool = False


@attrs.define(eq=False, kw_only=True)
class _Schedule:
    """Checkpoint schedule of one coordinating partition.

    Attributes:
        partition: Number of the coordinating partition.
        since_ms: Local time from which the interval counts.
        last_offset: Offset of the last checkpoint seen, None before the first.
        try_at_ms: Local time of the claim, None while nothing is due.
        work: The checkpoint being written.
    """

    partition: int
    since_ms: int
    last_offset: int | None = None
    try_at_ms: int | None = None
    work: _Work | None = None


class Checkpointer:
    """Writes checkpoints for an engine, which drives it once a round under its lock.

    Attributes:
        claimant: Claims the reserved keys.
        rule: When to write.
    """

    def __init__(
        self, context: Context, claimant: Claimant, rule: CheckpointRule
    ) -> None:
        self.claimant = claimant
        self.rule = rule
        self._context = context
        self._outbox = Outbox(context, claimant)
        now_ms = context.now_ms
        self._schedules = [
            _Schedule(partition=t, since_ms=now_ms) for t in sorted(context.replicas)
        ]

    def drive(self, now_ms: int) -> None:
        """Write the checkpoints that are due, a few chunks per round."""
        if not self.rule.interval_ms:
            return
        self._outbox.refusal()  # discards the outcomes of appends
        for t in range(len(self._schedules), len(self._context.replicas)):
            # Added while the partition count changes.
            self._schedules.append(_Schedule(partition=t, since_ms=now_ms))
        for schedule in self._schedules:
            replica = self._context.replicas[schedule.partition]
            if schedule.partition in self._context.rebuilding:
                schedule.work, schedule.try_at_ms = None, None
            elif schedule.work is not None:
                self._continue(schedule, schedule.work, now_ms)
            elif self._is_due(schedule, replica, now_ms):
                self._claim(schedule, replica, now_ms)
            else:
                schedule.try_at_ms = None

    # --- when

    def _is_due(self, schedule: _Schedule, replica: Replica, now_ms: int) -> bool:
        watch = replica.checkpoints
        if watch.last_offset != schedule.last_offset:
            schedule.last_offset, schedule.since_ms = watch.last_offset, now_ms
        last = (
            replica.began_at - 1
            if schedule.last_offset is None
            else schedule.last_offset
        )
        log_start = self._context.log_starts.get(schedule.partition, 0)
        if log_start > 0 and last < log_start:
            return True  # retention deleted the last checkpoint: no process could start
        elapsed_ms = now_ms - schedule.since_ms
        # A process that has just started does not know the age of the last checkpoint.
        is_known = schedule.last_offset is not None and elapsed_ms < IDLE_MS
        if is_known and not watch.news_count:
            return False
        if elapsed_ms >= self.rule.interval_ms:
            return True
        world = replica.world
        entries = world.next_offset - (schedule.last_offset or 0)
        return entries >= self.rule.entries_of(len(world.keys))

    def _claim(self, schedule: _Schedule, replica: Replica, now_ms: int) -> None:
        jitter_ms = self.rule.interval_ms // JITTER_PART
        if schedule.try_at_ms is None:
            schedule.try_at_ms = now_ms + self._context.ports.entropy.below(
                jitter_ms + 1
            )
        if now_ms < schedule.try_at_ms:
            return
        owner, elapsed_ms = self.claimant.owner, replica.elapsed_ms(now_ms)
        key = checkpoint_key(schedule.partition)
        guess = estimate(replica.world, key, elapsed_ms=elapsed_ms, claimant=owner)
        claim = Claim(self.claimant, key)
        if guess.wait_ms != 0:
            # Another member is writing one. If it fails, any member may try again.
            wait_ms = (guess.wait_ms or 0) + self._context.ports.entropy.below(
                jitter_ms + 1
            )
            schedule.try_at_ms = now_ms + wait_ms
            return
        schedule.try_at_ms = None
        random_id = self._context.ports.entropy.random_bytes(16)
        schedule.work = _Work(claim=claim, checkpoint_id=random_id)
        generation = (replica.world.config or self._context.settled).generation
        seq, sent_ms = self._outbox.send(
            schedule.partition, lambda seq: claim.claim_record(seq, generation), key=key
        )
        claim.claim_sent(seq, sent_ms)
        schedule.work.pending[seq] = sent_ms

    # --- writing

    def _continue(self, schedule: _Schedule, work: _Work, now_ms: int) -> None:
        heartbeat_ms = self._context.heartbeat_interval_ms
        oldest_ms = min(work.pending.values(), default=now_ms)
        is_over = work.claim.check_lease(now_ms) or work.claim.ending is not None
        if is_over or now_ms - oldest_ms > heartbeat_ms:
            # Sending stops after half a heartbeat interval, so a record that is older
            # than one interval never arrived.
            self._end(schedule, work)
            return
        if work.claim.is_owned and now_ms >= work.beat_at_ms:
            self._beat(schedule, work, now_ms)
        # PROTOCOL 5.2: checked as before a hand-out, though only time is at risk.
        while work.claim.may_hand_out(now_ms) and self._write_next(
            schedule, work, now_ms
        ):
            pass

    def _beat(self, schedule: _Schedule, work: _Work, now_ms: int) -> None:
        third_ms = self._context.heartbeat_interval_ms // INTERVALS_PER_H
        work.beat_at_ms = now_ms + third_ms
        key, epoch = work.claim.key, self._epoch(work)
        self._outbox.send(
            schedule.partition,
            lambda seq: Heartbeat(
                **self.claimant.sender(seq),
                topic=key.topic,
                partition=key.partition,
                epoch=epoch,
                position=None,
                rewind=False,
            ),
            key=key,
        )

    def _write_next(self, schedule: _Schedule, work: _Work, now_ms: int) -> bool:
        """Send the next record of a checkpoint; return whether another may follow."""
        if len(work.pending) >= UNDER_WAY_MAX or work.is_ending:
            return False
        sender = self.claimant.sender
        epoch, checkpoint_id = self._epoch(work), work.checkpoint_id
        if work.parts is None:
            if work.pending:
                return False
            self._send(
                schedule,
                work,
                now_ms,
                lambda seq: CheckpointBegin(
                    **sender(seq), epoch=epoch, checkpoint_id=checkpoint_id
                ),
            )
            return False
        number, data = work.sent_count, next(work.parts, None)
        if data is not None:
            work.sent_count += 1
            work.size_bytes += len(data)
            self._send(
                schedule,
                work,
                now_ms,
                lambda seq: CheckpointChunk(
                    **sender(seq),
                    epoch=epoch,
                    checkpoint_id=checkpoint_id,
                    number=number,
                    data=data,
                ),
            )
            return True
        if work.pending or work.begin is None:
            return False  # every chunk must be in the log before the End
        count, begin = work.sent_count, work.begin
        checksum = bytes.fromhex(work.digest_hex)
        self._send(
            schedule,
            work,
            now_ms,
            lambda seq: CheckpointEnd(
                **sender(seq),
                epoch=epoch,
                checkpoint_id=checkpoint_id,
                begin_offset=begin[0],
                begin_leader_epoch=begin[1],
                part_count=count,
                size_bytes=work.size_bytes,
                digest=checksum,
            ),
        )
        work.is_ending = True
        return False

    def _epoch(self, work: _Work) -> int:
        assert work.claim.epoch is not None
        return work.claim.epoch

    def _send(
        self,
        schedule: _Schedule,
        work: _Work,
        now_ms: int,
        make: Callable[[int], Record],
    ) -> None:
        seq, _ = self._outbox.send(schedule.partition, make, key=work.claim.key)
        work.pending[seq] = now_ms

    def _end(self, schedule: _Schedule, work: _Work) -> None:
        """Release the key, whether or not the checkpoint is complete."""
        schedule.work = None
        if work.claim.epoch is not None:
            self._release(schedule.partition, work.claim.epoch)

    def _release(self, partition: int, epoch: int) -> None:
        key = checkpoint_key(partition)
        self._outbox.send(
            partition,
            lambda seq: ReleasingPartition(
                **self.claimant.sender(seq),
                topic=key.topic,
                partition=key.partition,
                epoch=epoch,
                position=None,
                successor=None,
                reason="checkpointed",
            ),
            key=key,
        )

    # --- verdicts

    def on_own(
        self, partition: int, transitions: tuple[Transition, ...], *, now_ms: int
    ) -> None:
        """Handle the verdict on an own record that was read back."""
        first = transitions[0]
        record = first.record
        schedule = self._schedules[partition]
        assert record is not None
        seq = int(getattr(record, "seq", 0))
        sent, work = self._outbox.read_back(seq), schedule.work
        is_pending = work is not None and work.pending.pop(seq, None) is not None
        if isinstance(record, ClaimingPartition):
            self._on_claim(schedule, first, seq=seq, now_ms=now_ms)
        elif work is None:
            return
        elif isinstance(record, Heartbeat) and sent is not None:
            self._on_beat(work, first, sent)
        elif is_pending:
            self._on_written(schedule, work, first)

    def _on_claim(
        self, schedule: _Schedule, verdict: Transition, *, seq: int, now_ms: int
    ) -> None:
        replica, work = self._context.replicas[schedule.partition], schedule.work
        is_ours = False
        if work is not None:
            is_ours = work.claim.on_claim_verdict(
                verdict,
                seq=seq,
                now_ms=now_ms,
                heartbeat_interval_ms=replica.heartbeat_interval_ms,
                token=replica.world.token(work.claim.key),
            )
        if is_ours and work is not None:
            work.claim.start(None)
        elif verdict.effect in {"claimed", "resumed"}:
            self._release(schedule.partition, verdict.offset)  # PROTOCOL 5.3: a ghost
        elif work is not None and work.claim.epoch is None:
            schedule.work = None  # another member was faster and writes this one

    def _on_beat(self, work: _Work, verdict: Transition, sent: Sent) -> None:
        interval_ms = self._context.replicas[sent.partition].renewed_by_ms(verdict.key)
        work.claim.on_beat_verdict(
            verdict, sent_ms=sent.sent_ms, heartbeat_interval_ms=interval_ms
        )

    def _on_written(
        self, schedule: _Schedule, work: _Work, transition: Transition
    ) -> None:
        record: Record | None = transition.record
        world = self._context.replicas[schedule.partition].world
        if isinstance(record, CheckpointBegin):
            if not is_writer(world, record) or world.leader_epoch is None:
                self._end(schedule, work)
                return
            # Every reader has the same state at this offset. It is encoded part by
            # part: all at once would hold the engine's lock too long.
            work.begin = (transition.offset, world.leader_epoch)
            work.digest_hex = digest(world)
            with uncollected():
                frozen = freeze(world)
            work.parts = parts_of(frozen.pieces())
        elif isinstance(record, CheckpointEnd):
            fields = {
                "partition": schedule.partition,
                "offset": record.begin_offset,
                "size_bytes": work.size_bytes,
            }
            self._context.observe("checkpoint_written", fields)
            self._end(schedule, work)
