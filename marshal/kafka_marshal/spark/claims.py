"""Plans and confirms the batches of a query, in its driver. Calls nothing of Spark.

Three things must agree: the claims, Spark's checkpoint, and the positions in the
coordination log. A batch is planned under valid claims, and its offset in the
checkpoint contains their tokens. Once Spark has committed the batch, its end is
confirmed to the coordination log.

A restarted query trusts its checkpoint for a partition if its new claim directly
follows the claim in the checkpoint: it continues exactly there, and repeats an
unfinished batch. If another owner was in between, it starts at the position in the
coordination log, and drops an unfinished range: the position decides who processes it.
A position that an admin has set counts as another owner, and so does a move of the key
to another coordinating partition, where no claim follows those before.

An offset means nothing in another log. If the topic was recreated, or its log ends
below the position, the query ends with an error. With ``failOnDataLoss = false`` it
reads the partition from the log start, so that nothing readable is skipped. Positions
in the coordination log never move back: until reading has passed the old position, only
the checkpoint has the position of the query.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

import attrs

from kafka_marshal.engine.replica import LastClaim
from kafka_marshal.errors import ClaimLost, CoordinationError, PositionError
from kafka_marshal.ports import LogRange
from kafka_marshal.protocol.types import OffsetRange, Owner, Token, TopicPartition
from kafka_marshal.ranges import HeldRange, RangeConsumer
from kafka_marshal.spark.planning import (
    Limit,
    Mark,
    Marks,
    PlannedRange,
    limited_ends,
    planned_ranges,
)

if TYPE_CHECKING:
    from kafka_marshal.spark.query import Cluster

LOGGER = logging.getLogger("kafka_marshal")
WAIT_MS = 100
IDLE_MS = 20
SETTLE_MS = 10_000
SEND_MS = 1_000
LOOK_MS_MAX = 30_000
MS_PER_S = 1_000
# Offsets of a partition that was not queried.
UNKNOWN = LogRange(-1, -1)
# What follows a lost position, with ``failOnDataLoss = false``.
FROM_START = "reading continues at the start of the log"
BY_CLAIM = "reading continues at the position of the next claim"
WITHOUT = "reading continues without it"
DELETED = "its topic was deleted"
NOT_READ = (
    "the checkpoint has this partition, but the query does not read it: the topic was "
    "deleted, or has fewer partitions, or the options no longer name it"
)
CUT_OFF = (
    "Records were deleted by retention or by hand, the log was cut off, or the topic "
    "was recreated. "
)
GRANTED_ONCE = (
    "with delivery = amo no offset below the position is granted again, so the query "
    "waits until the log has passed it"
)


@attrs.frozen(kw_only=True)
class Rules:
    """Rules of planning.

    Attributes:
        is_at_most_once: Whether delivery is at most once: only grants move positions.
        fails_on_data_loss: Whether lost offsets end the query.
        max_delay_ms: Longest wait for ``minOffsetsPerTrigger``.
        outcome_ms: Longest wait until claims of an earlier run are resumed or have
            ended.
        claims_max: Most partitions to hold, 0 = no limit.
    """

    is_at_most_once: bool
    fails_on_data_loss: bool
    max_delay_ms: int
    outcome_ms: int
    claims_max: int = 0


@attrs.frozen
class Part:
    """A planned range, with the owner and the secret of its claim."""

    planned: PlannedRange
    owner: Owner
    secret: str = attrs.field(repr=False)


@attrs.define(eq=False, kw_only=True)
class Claims:
    """The claims of one query. For one thread.

    Attributes:
        ranges: Claimed ranges.
        logs: Logs of the data partitions.
        rules: Rules of planning.
    """

    ranges: RangeConsumer
    logs: "Cluster"
    rules: Rules
    _now: Callable[[], float] = time.monotonic
    # Claims of an earlier run, each with this run's claim that directly follows it.
    _successors: dict[tuple[TopicPartition, Token], Token] = attrs.field(factory=dict)
    _begun: dict[TopicPartition, tuple[Token, int]] = attrs.field(factory=dict)
    _confirmed: dict[TopicPartition, tuple[Token, int]] = attrs.field(factory=dict)
    _seen: dict[TopicPartition, Token] = attrs.field(factory=dict)
    # Marks of partitions restarted at the log start, until they are in a checkpoint.
    _restarted: dict[TopicPartition, Mark] = attrs.field(factory=dict)
    # Last reported loss of each partition, so that no loss is logged twice.
    _reported: dict[TopicPartition, str] = attrs.field(factory=dict)
    _ids: dict[str, str] = attrs.field(factory=dict)
    # Topics that have vanished, and the time of ``_now`` at which each was missed.
    _absent: dict[str, float] = attrs.field(factory=dict)
    # Partitions in the checkpoint that the query does not read; None until known.
    _unread: AbstractSet[TopicPartition] | None = None
    _target: Mapping[TopicPartition, int] | None = None
    _pinned: AbstractSet[TopicPartition] | None = None
    _is_settled: bool = False
    _holds_none: bool = False
    _owner: Owner | None = None
    _sent_at: float = 0.0
    _batch_at: float | None = None
    ends: dict[TopicPartition, int] = attrs.field(factory=dict)

    # --- planning

    def await_claims(self, marks: Marks) -> None:
        """Wait until every partition has an owner in the log, within limits.

        Partitions without owner are waited for up to ``SETTLE_MS``, unless this query
        holds ``claims_max``. Pending claims, and claims of an earlier run that no claim
        has followed, are waited for up to ``outcome_ms``, as long as they may last.
        """
        until = self._now() + SETTLE_MS / MS_PER_S
        outcome_due = self._now() + self.rules.outcome_ms / MS_PER_S
        while True:
            held = self.ranges.tokens()
            known = self.ranges.last_claims(LOOK_MS_MAX)
            missing = [p for p in self.ranges.partitions() if p not in held]
            free = [p for p in missing if p not in known or known[p].owner is None]
            coming = self.ranges.pending() or [
                p for p in missing if _is_pending(known.get(p), marks.get(p))
            ]
            now = self._now()
            is_full = 0 < self.rules.claims_max <= len(held)
            is_growing = bool(free) and not is_full
            if not (is_growing and now < until) and not (coming and now < outcome_due):
                return
            self.ranges.wait_for_change(WAIT_MS)

    def _report_nothing_held(self) -> None:
        """Log once that no partition is held, and again only after one was held.

        Meanwhile a query with ``availableNow`` reads nothing and ends; others wait.
        """
        held_none, self._holds_none = self._holds_none, not self.ranges.tokens()
        if held_none or not self._holds_none:
            return
        if count := len(self.ranges.partitions()):
            LOGGER.warning(
                "no_partition_held: the query holds 0 of %d partitions and reads "
                "nothing now. Other members hold them (for example another source of "
                "this query with the same group), or the group is paused or locked, "
                "or claims cannot be renewed; see: marshal groups describe",
                count,
            )

    def without_unread(self, marks: Marks) -> Marks:
        """Return the marks of partitions that the query reads.

        The first call with marks determines the other partitions: they no longer exist,
        or the options no longer name them.

        Raises:
            PositionError: There are other partitions, and ``failOnDataLoss`` is set.
        """
        if self._unread is None and marks:
            self._unread = marks.keys() - set(self.logs.partitions())
            for partition in sorted(self._unread):
                self._report_loss(
                    *(partition, marks[partition].next),
                    why=NOT_READ,
                    follows=WITHOUT,
                    causes="",
                )
        unread = self._unread or ()
        return {p: mark for p, mark in marks.items() if p not in unread}

    def fix_target(self) -> None:
        """End the query at the current log ends (``availableNow``).

        It reads only partitions that it holds when it first plans: with later claims
        the target might never be reached.
        """
        self._target = self.logs.ends(self.ranges.partitions())

    def latest(self, start: Marks, limit: Limit) -> Marks:
        """Plan a batch: return its end, or ``start`` if there is nothing to read.

        Raises:
            PositionError: Offsets are lost, and ``failOnDataLoss`` is set.
            CoordinationError: The engine failed, or the cluster did not answer.
        """
        if not self._is_settled:
            self._is_settled = True
            self.await_claims(start)
        self._report_nothing_held()
        self.confirm(start)
        self._return_unused()
        held = self.ranges.held()
        if self._target is not None:
            if self._pinned is None:
                self._pinned = held.keys() & self._target.keys()
            held = {p: h for p, h in held.items() if p in self._pinned}
        places = self._positions(start, held)
        spans = self._spans(places)
        total = sum(span.count for span in spans.values())
        if not total or self._should_wait(total, limit):
            if self._target is None:
                self.ranges.wait_for_change(IDLE_MS)
            return start
        most = total if limit.most is None else limit.most
        ends = self._limited(places, spans, most)
        planned = self._start_ranges(held, places, spans=spans, ends=ends)
        if not planned:
            return start
        self._batch_at = self._now()
        return start | planned

    def _positions(
        self, start: Marks, held: Mapping[TopicPartition, HeldRange]
    ) -> dict[TopicPartition, Mark]:
        """Return the mark of each partition under its current claim."""
        found: dict[TopicPartition, Mark] = {}
        new, restarting = [], []
        # Topic ids before log ends: tasks compare the ids, and so detect a topic that
        # is recreated after this.
        self._renew_ids({p.topic for p in held})
        self._report_deleted(start)
        for partition, each in held.items():
            self._owner = each.owner
            if partition.topic in self._absent:
                continue
            mark = self._mark(partition, start)
            topic_id = self._ids.get(partition.topic) or each.topic_id
            if mark is not None and mark.is_of_other_topic(topic_id):
                may_restart = self._may_restart(mark, each)
                self._report_loss(
                    *(partition, mark.next),
                    why=_recreated(mark, topic_id),
                    follows=FROM_START if may_restart else BY_CLAIM,
                )
                if may_restart and not each.is_of_another(topic_id):
                    found[partition] = _restart(mark, each.token, topic_id)
                    restarting.append(partition)
                    continue
                if mark.token == each.token:
                    continue  # at most once: the claim ends with its topic
            if each.is_of_another(topic_id):
                # The topic was recreated, so this claim ends. Rows of the new topic are
                # read under the next claim, and so have a larger token.
                continue
            if mark is not None and mark.token == each.token:
                found[partition] = mark._replace(topic_id=mark.topic_id or topic_id)
                continue
            if each.position is None:
                continue  # its start position is not known yet
            position, restarts = each.position, 0
            if mark is not None:
                restarts = mark.restarts
                position = self._inherited(partition, mark, each)
            found[partition] = Mark(
                token=each.token,
                begin=position,
                next=position,
                restarts=restarts,
                topic_id=topic_id,
            )
            if self._seen.get(partition) != each.token:
                new.append(partition)
        self._restart_all(found, restarting)
        return self._check_starts(found, new)

    def _renew_ids(self, held: AbstractSet[str]) -> None:
        """Look up the ids of topics, and note topics that have vanished."""
        topics = held | self._absent.keys()
        found = self.logs.topic_ids(topics) if topics else {}
        now = self._now()
        self._absent = {
            topic: self._absent.get(topic, now)
            for topic in topics & self._ids.keys() - found.keys()
        }
        self._ids |= found

    def _report_deleted(self, start: Marks) -> None:
        """Report partitions whose topic was missing for ``SETTLE_MS``.

        If it is missing for less, the broker that was asked may lag behind.
        """
        until = self._now() - SETTLE_MS / MS_PER_S
        topics = {topic for topic, since in self._absent.items() if since <= until}
        for partition, mark in start.items():
            if partition.topic in topics:
                self._report_loss(
                    *(partition, mark.next), why=DELETED, follows=WITHOUT, causes=""
                )

    def _mark(self, partition: TopicPartition, start: Marks) -> Mark | None:
        """Return the mark of a restart if no checkpoint has it, else the one there."""
        mark = start.get(partition)
        restarted = self._restarted.get(partition)
        if restarted is None or (
            mark is not None and mark.restarts >= restarted.restarts
        ):
            self._restarted.pop(partition, None)
            return mark
        return restarted

    def _may_restart(self, mark: Mark, held: HeldRange) -> bool:
        """Return whether this query may read the partition again from its log start.

        Not at most once, and not if another owner was there since the mark.
        """
        if self.rules.is_at_most_once:
            return False
        return mark.token == held.token or _follows(held, mark.token)

    def _restart_all(
        self, places: dict[TopicPartition, Mark], restarting: list[TopicPartition]
    ) -> None:
        """Restart these partitions at their log starts; drop those that are deleted."""
        starts = self.logs.starts(restarting) if restarting else {}
        for partition in restarting:
            mark, first = places.pop(partition), starts.get(partition)
            if first is None:
                continue
            mark = mark._replace(begin=first, next=first)
            places[partition] = self._restarted[partition] = mark
            self._seen[partition] = mark.token

    def _inherited(self, partition: TopicPartition, mark: Mark, held: HeldRange) -> int:
        """Return the offset to continue at after an earlier claim of this query.

        It is that of the mark if no other owner was in between, else the position in
        the coordination log.
        """
        assert held.position is not None
        topic_id = self._ids.get(partition.topic, "")
        is_ours = not self.rules.is_at_most_once and _follows(held, mark.token)
        if not is_ours or mark.is_of_other_topic(topic_id):
            return held.position
        self._successors[partition, mark.token] = held.token
        if held.position < mark.next:
            self._commit(partition, held.token, mark.next)
        # After a restart at the log start, the coordination log keeps the old position
        # until reading has passed it.
        return mark.next if mark.restarts else max(held.position, mark.next)

    def _check_starts(
        self, places: dict[TopicPartition, Mark], new: list[TopicPartition]
    ) -> dict[TopicPartition, Mark]:
        """Raise starts to the log start, if below (PROTOCOL 5.6)."""
        starts = self.logs.starts(new) if new else {}
        for partition, log_start in starts.items():
            mark = places[partition]
            if mark.next < log_start:
                self._report_loss(
                    *(partition, mark.next),
                    why=f"its log begins at {log_start}",
                    follows=FROM_START,
                    there=LogRange(log_start, -1),
                )
                places[partition] = mark._replace(begin=log_start, next=log_start)
            self._seen[partition] = mark.token
        return places

    def _spans(
        self, places: dict[TopicPartition, Mark]
    ) -> dict[TopicPartition, OffsetRange]:
        ends = self.logs.ends(list(places)) if places else {}
        self.ends = dict(ends)
        self._check_short_logs(
            places, [p for p, end in ends.items() if places[p].next > end]
        )
        spans = {}
        for partition, end in ends.items():
            if partition not in places:
                continue
            first = places[partition].next
            if self._target is not None:
                end = min(end, self._target[partition])  # noqa: PLW2901
            if first < end:
                spans[partition] = OffsetRange(first, end)
        return spans

    def _limited(
        self,
        places: dict[TopicPartition, Mark],
        spans: Mapping[TopicPartition, OffsetRange],
        most: int,
    ) -> dict[TopicPartition, int]:
        """Return the end of each partition in a batch of about ``most`` offsets.

        Offsets below the log start do not count: a query that is slower than retention
        would plan batches without records.
        """
        if sum(span.count for span in spans.values()) <= most:
            return {partition: span.end for partition, span in spans.items()}
        self._check_starts(places, list(spans))
        left, passed = {}, {}
        for partition, span in spans.items():
            mark = places[partition]
            if mark.next < span.end:
                left[partition] = OffsetRange(mark.next, span.end)
            else:  # the rest was deleted: pass it, and read nothing
                passed[partition] = span.end
                places[partition] = mark._replace(begin=span.end, next=span.end)
        return passed | limited_ends(left, most)

    def _check_short_logs(
        self, places: dict[TopicPartition, Mark], short: list[TopicPartition]
    ) -> None:
        """Restart partitions whose log ends below the position.

        With ``read_committed`` the readable end may be below the position without a
        loss; the log end may not.
        """
        restarting = []
        for partition, there in (self.logs.ranges(short) if short else {}).items():
            mark = places[partition]
            if mark.next <= there.end:
                continue
            is_at_most_once = self.rules.is_at_most_once
            self._report_loss(
                *(partition, mark.next),
                why=f"its log ends at {there.end}",
                follows=GRANTED_ONCE if is_at_most_once else FROM_START,
                there=there,
            )
            if not is_at_most_once:
                places[partition] = _restart(mark, mark.token, mark.topic_id)
                restarting.append(partition)
        self._restart_all(places, restarting)

    def _report_loss(
        self,
        partition: TopicPartition,
        position: int,
        *,
        why: str,
        follows: str,
        there: LogRange = UNKNOWN,
        causes: str = CUT_OFF,
    ) -> None:
        """Raise for a lost position; log it once with ``failOnDataLoss = false``."""
        message = f"position {position} of {partition} cannot be read: {why}"
        if self.rules.fails_on_data_loss:
            remedy = "Start the query with a new checkpointLocation"
            if there is not UNKNOWN:
                # The group's position is outside this log, too.
                place = f"{partition.topic}:{partition.partition}"
                remedy = (
                    f"Run marshal groups reset GROUP --topic {place} --to-earliest "
                    "--execute and start the query again"
                )
            raise PositionError(
                f"{message}. {causes}{remedy}, or set failOnDataLoss to false to "
                "continue with what can be read",
                partition=partition,
                requested=position,
                log_start=there.start,
                log_end=there.end,
            )
        if self._reported.get(partition) != message:
            self._reported[partition] = message
            LOGGER.warning("position_jumped %s; %s", message, follows)

    def _should_wait(self, total: int, limit: Limit) -> bool:
        if limit.least is None or total >= limit.least or self._target is not None:
            return False
        if self._batch_at is None:
            return False  # as in Spark's own source, the first batch of a run
        waited_ms = (self._now() - self._batch_at) * MS_PER_S
        return waited_ms < self.rules.max_delay_ms

    def _start_ranges(
        self,
        held: Mapping[TopicPartition, HeldRange],
        places: Mapping[TopicPartition, Mark],
        *,
        spans: Mapping[TopicPartition, OffsetRange],
        ends: Mapping[TopicPartition, int],
    ) -> Marks:
        planned = {}
        for partition, span in spans.items():
            end = ends[partition]
            token = held[partition].token
            if end <= span.first:
                continue
            try:
                self.ranges.begin(partition, token, first=span.first, end=end)
            except ClaimLost:
                continue  # the claim was lost since held() was called
            self._begun[partition] = (token, end)
            planned[partition] = places[partition]._replace(next=end)
        return planned

    # --- tasks

    def parts(self, start: Marks, end: Marks) -> list[Part]:
        """Return the ranges of a batch that this query may read.

        A range of an earlier run is included if this query's claim directly follows the
        range's claim, and dropped if the log has another claim in between. Waits until
        the log shows one of the two.

        Raises:
            CoordinationError: The log showed neither within ``outcome_ms``.
            PositionError: The topic was recreated, and ``failOnDataLoss`` is set.
        """
        undecided = self._of_this_topic(planned_ranges(start, end))
        found: list[Part] = []
        until = self._now() + self.rules.outcome_ms / MS_PER_S
        while undecided:
            undecided = self._decide(undecided, found)
            if not undecided:
                break
            if self._now() >= until:
                raise CoordinationError(
                    "the unfinished batch of the checkpoint (offsets "
                    f"{undecided[0].first} to {undecided[0].end - 1} of "
                    f"{undecided[0].partition}) cannot continue, because no member "
                    "holds this partition; check with marshal groups describe whether "
                    "the group is paused or its claims are limited, then start the "
                    "query again"
                )
            self.ranges.wait_for_change(WAIT_MS)
        return sorted(found, key=_order)

    def _of_this_topic(self, ranges: list[PlannedRange]) -> list[PlannedRange]:
        """Return the ranges whose topic was not recreated.

        Looks up only topics without a known id: ``latest`` has checked a batch that it
        has just planned.
        """
        topics = {each.partition.topic for each in ranges}
        self._ids |= self.logs.topic_ids(topics - self._ids.keys())
        found = []
        for each in ranges:
            topic_id = self._ids.get(each.partition.topic, "")
            mark = Mark(
                token=_token(each),
                begin=each.first,
                next=each.end,
                restarts=0,
                topic_id=each.topic_id,
            )
            if mark.is_of_other_topic(topic_id):
                self._report_loss(
                    *(each.partition, each.first),
                    why=_recreated(mark, topic_id),
                    follows=BY_CLAIM,
                )
            else:
                found.append(each)
        return found

    def _decide(
        self, undecided: Iterable[PlannedRange], found: list[Part]
    ) -> list[PlannedRange]:
        # Tokens first: if a claim follows meanwhile, the secret is that of the later
        # claim, and useless with the earlier token.
        tokens, secrets = self.ranges.tokens(), self.ranges.secrets()
        # No poll: the batch only begins now, so drained partitions stay until it ends.
        held = self.ranges.held(is_poll=False)
        left = []
        for each in undecided:
            now = held.get(each.partition)
            successor = self._successors.get((each.partition, _token(each)))
            token = tokens.get(each.partition)
            if token is not None and token in {each.token, successor}:
                if now is not None:
                    self._owner = now.owner
                assert self._owner is not None
                secret = secrets.get(each.partition, "")
                found.append(Part(attrs.evolve(each, token=token), self._owner, secret))
            elif now is not None and _follows(now, _token(each)):
                if self._inherit(each, now):
                    part = attrs.evolve(each, token=now.token)
                    found.append(Part(part, now.owner, now.secret))
                else:
                    left.append(each)
            elif now is None:
                left.append(each)
            else:
                self._drop(each)
        if not left:
            return left
        claims = self.ranges.last_claims(LOOK_MS_MAX)
        for each in list(left):
            known = claims.get(each.partition)
            is_ours = each.partition in self.ranges.tokens()
            if known is None or known.may_be_ours or is_ours:
                continue  # held() will show which claim was before it
            if not known.is_of(_token(each)):
                self._drop(each)
                left.remove(each)
        return left

    def _inherit(self, planned: PlannedRange, held: HeldRange) -> bool:
        """Take over a range of an earlier run; return whether it may start."""
        partition, token = planned.partition, held.token
        try:
            self.ranges.begin(partition, token, first=planned.first, end=planned.end)
        except ClaimLost:
            return False
        self._successors[partition, _token(planned)] = token
        self._begun[partition] = (token, planned.end)
        return True

    def _drop(self, planned: PlannedRange) -> None:
        LOGGER.warning(
            "batch_overtaken %s offsets %d to %d, which this batch omits: since the "
            "claim of token %s the partition was claimed again (by another member, or "
            "by a run of this query that ended before its first batch), its position "
            "was set, or it moved to another coordinating partition; its owner, which "
            "may be this query, continues at the position in the log",
            *(planned.partition, planned.first, planned.end - 1, planned.token),
        )

    # --- confirming

    def confirm(self, marks: Marks) -> None:
        """Confirm every batch up to ``marks``, which Spark has committed, to the log.

        A partition whose claim has ended is logged and skipped: its next owner starts
        at the last confirmed position.
        """
        has_news = False
        tokens = self.ranges.tokens()
        for partition, mark in marks.items():
            token = self._successors.get((partition, mark.token), mark.token)
            done = (token, mark.next)
            if self._confirmed.get(partition) == done:
                continue
            if tokens.get(partition) == token:
                has_news |= self._commit(partition, token, mark.next)
            elif self._begun.get(partition, (None,))[0] == token:
                LOGGER.warning(
                    "batch_unconfirmed %s below %d: the claim of token %s has ended, "
                    "and its next owner may process the batch again",
                    *(partition, mark.next, token),
                )
                self._begun.pop(partition)
        now = self._now()
        if has_news and (now - self._sent_at) * MS_PER_S >= SEND_MS:
            self._sent_at = now
            self.ranges.send()

    def _commit(self, partition: TopicPartition, token: Token, end: int) -> bool:
        try:
            self.ranges.commit(partition, token, end=end)
        except ClaimLost:
            return False
        self._confirmed[partition] = (token, end)
        self._begun.pop(partition, None)
        return True

    def _return_unused(self) -> None:
        """Give back ranges that were planned for a batch that Spark did not start."""
        tokens = self.ranges.tokens()
        begun, self._begun = self._begun, {}
        for partition, (token, _) in begun.items():
            if tokens.get(partition) == token:
                self.ranges.give_back(partition, token)


def _token(planned: PlannedRange) -> Token:
    assert planned.token is not None
    return planned.token


def _order(part: Part) -> tuple[TopicPartition, Token | None, int]:
    return part.planned.partition, part.planned.token, part.planned.first


def _restart(mark: Mark, token: Token, topic_id: str) -> Mark:
    """Return the mark of one more restart; the caller sets its offsets."""
    return mark._replace(token=token, restarts=mark.restarts + 1, topic_id=topic_id)


def _recreated(mark: Mark, topic_id: str) -> str:
    return (
        f"the topic was deleted and created again since (its id was {mark.topic_id} "
        f"and is {topic_id})"
    )


def _follows(held: HeldRange, token: Token) -> bool:
    """Return whether a claim directly follows the claim with this token."""
    return held.follows == token.offset and held.token.era == token.era


def _is_pending(claim: LastClaim | None, mark: Mark | None) -> bool:
    """Return whether a claim may be pending, or is one of an earlier run."""
    if claim is None:
        return False
    is_former = mark is not None and claim.is_of(mark.token)
    return claim.may_be_ours or is_former
