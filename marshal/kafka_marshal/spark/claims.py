"""The claims of a query's driver: planning and confirming batches. No Spark here.

Three things must agree: the claims, the checkpoint, and the position in the log. A
batch is planned under valid claims; its offset in the checkpoint contains their tokens;
once Spark has committed it, its end is confirmed to the log.

A restarted query trusts its checkpoint if no other owner was in between: where its new
claim directly follows the one in the checkpoint, it continues exactly there and repeats
an unfinished batch. After another owner the position in the log counts, and an
unfinished range is dropped, because it is that owner's work. A set position counts as
another owner.

Offsets are valid in one log only. If the topic was recreated, or its log ends below a
position, the query ends with an error. With ``failOnDataLoss = false`` it reads the
partition from the log start, so that nothing readable is skipped. Positions in the
coordination log never move back, so until the old position is passed, only the
checkpoint has the position of the query.
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
# A partition that was not queried.
UNKNOWN = LogRange(-1, -1)
# The consequence of a lost position, if that is allowed.
FROM_START = "reading continues at the start of the log"
BY_CLAIM = "reading continues at the position of the next claim"
WITHOUT = "reading continues without it"
DELETED = "its topic was deleted"
NOT_READ = (
    "the checkpoint has it, and the query does not read it: the topic was deleted, or "
    "has fewer partitions, or the options no longer name it"
)
CUT_OFF = (
    "Records were deleted by retention or by hand, the log was cut off, or the topic "
    "was recreated. "
)
GRANTED_ONCE = "at most once, nothing below it is granted again, so reading waits there"


@attrs.frozen(kw_only=True)
class Rules:
    """Rules of planning.

    Attributes:
        is_at_most_once: Whether only grants move positions.
        fails_on_data_loss: Whether lost offsets end the query.
        max_delay_ms: Longest wait for the fewest offsets of a batch.
        outcome_ms: Longest wait for the outcome of claims of an earlier run.
        claims_max: Most partitions to hold, 0 = no limit.
    """

    is_at_most_once: bool
    fails_on_data_loss: bool
    max_delay_ms: int
    outcome_ms: int
    claims_max: int = 0


@attrs.frozen
class Part:
    """A range with its claim."""

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
    # Claims of an earlier run, each with our claim that directly follows it.
    _successors: dict[tuple[TopicPartition, Token], Token] = attrs.field(factory=dict)
    _begun: dict[TopicPartition, tuple[Token, int]] = attrs.field(factory=dict)
    _confirmed: dict[TopicPartition, tuple[Token, int]] = attrs.field(factory=dict)
    _seen: dict[TopicPartition, Token] = attrs.field(factory=dict)
    # Restarted partitions whose mark is in no checkpoint yet.
    _restarted: dict[TopicPartition, Mark] = attrs.field(factory=dict)
    # Last report of each partition, so that nothing is reported twice.
    _reported: dict[TopicPartition, str] = attrs.field(factory=dict)
    _ids: dict[str, str] = attrs.field(factory=dict)
    # Topics that were there, and since when they are not.
    _absent: dict[str, float] = attrs.field(factory=dict)
    # Partitions of the checkpoint that are not read; None until that is known.
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
        """Wait until every partition has an owner by the log.

        Valid claims in the checkpoint are those of an earlier run of this query: wait
        as long as they may last. The same for pending claims, which end by themselves.
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
        """Report once that no partition is held, until one is again.

        A job that only drains does nothing then, and a running one waits.
        """
        held_none, self._holds_none = self._holds_none, not self.ranges.tokens()
        if held_none or not self._holds_none:
            return
        if count := len(self.ranges.partitions()):
            LOGGER.warning(
                "no_partition_held of %d: other members hold them, such as another "
                "source of this query with the same group, or the group is paused or "
                "locked, or claims cannot be renewed, and so the query reads nothing "
                "now; see: marshal groups describe",
                count,
            )

    def without_unread(self, marks: Marks) -> Marks:
        """Return the marks of partitions that are read.

        The first call determines the others: those of the checkpoint that no longer
        exist, or that the options no longer name.

        Raises:
            PositionError: There are some, and that is not allowed.
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
        """Make the current log ends of the held partitions the target of the query.

        A target that followed the claims might never be reached.
        """
        self._target = self.logs.ends(self.ranges.partitions())

    def latest(self, start: Marks, limit: Limit) -> Marks:
        """Plan a batch: return its end, or ``start`` if there is nothing to read.

        Raises:
            PositionError: Offsets are lost, and that is not allowed.
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
        planned = self._start_ranges(
            held, places, spans=spans, ends=limited_ends(spans, most)
        )
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
        # Query ids before the ends: tasks compare ids and so detect later changes.
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
                    continue  # at most once: this claim ends, as its topic did
            if each.is_of_another(topic_id):
                # The topic was recreated, which ends this claim: so of two topics of
                # one name the rows of the later one have the later token.
                continue
            if mark is not None and mark.token == each.token:
                found[partition] = mark._replace(topic_id=mark.topic_id or topic_id)
                continue
            if each.position is None:
                continue  # its start is not known yet
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
        """Query the ids of topics, and note those that have vanished."""
        topics = held | self._absent.keys()
        found = self.logs.topic_ids(topics) if topics else {}
        now = self._now()
        self._absent = {
            topic: self._absent.get(topic, now)
            for topic in topics & self._ids.keys() - found.keys()
        }
        self._ids |= found

    def _report_deleted(self, start: Marks) -> None:
        """Report partitions whose topic stays absent: one broker may lag behind."""
        until = self._now() - SETTLE_MS / MS_PER_S
        topics = {topic for topic, since in self._absent.items() if since <= until}
        for partition, mark in start.items():
            if partition.topic in topics:
                self._report_loss(
                    *(partition, mark.next), why=DELETED, follows=WITHOUT, causes=""
                )

    def _mark(self, partition: TopicPartition, start: Marks) -> Mark | None:
        """Return the mark of a partition: from a restart, else from the checkpoint."""
        mark = start.get(partition)
        restarted = self._restarted.get(partition)
        if restarted is None or (
            mark is not None and mark.restarts >= restarted.restarts
        ):
            self._restarted.pop(partition, None)
            return mark
        return restarted

    def _may_restart(self, mark: Mark, held: HeldRange) -> bool:
        """Return whether reading may restart: no other owner was there since."""
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
        """Return the next offset after an earlier claim of this query.

        It is the mark's only if no other owner was in between.
        """
        assert held.position is not None
        topic_id = self._ids.get(partition.topic, "")
        is_ours = not self.rules.is_at_most_once and _follows(held, mark.token)
        if not is_ours or mark.is_of_other_topic(topic_id):
            return held.position
        self._successors[partition, mark.token] = held.token
        if held.position < mark.next:
            self._commit(partition, held.token, mark.next)
        # The log keeps the position before the restart until it is passed.
        return mark.next if mark.restarts else max(held.position, mark.next)

    def _check_starts(
        self, places: dict[TopicPartition, Mark], new: list[TopicPartition]
    ) -> dict[TopicPartition, Mark]:
        """Move new starts into their logs (PROTOCOL 5.6)."""
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

    def _check_short_logs(
        self, places: dict[TopicPartition, Mark], short: list[TopicPartition]
    ) -> None:
        """Restart partitions whose log ends below the position.

        With ``read_committed`` the readable end may be below it without a loss.
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
        """Report a lost position: raise, or log it once if that is allowed."""
        message = f"position {position} of {partition} is gone: {why}"
        if self.rules.fails_on_data_loss:
            remedy = "Start the query with a new checkpointLocation"
            if there is not UNKNOWN:
                # The group's position is gone, too.
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
                continue  # lost since held() was called
            self._begun[partition] = (token, end)
            planned[partition] = places[partition]._replace(next=end)
        return planned

    # --- tasks

    def parts(self, start: Marks, end: Marks) -> list[Part]:
        """Return the ranges of a batch that this query may read.

        A range of an earlier run is included if our claim directly follows its claim,
        and dropped if the log has another claim in between; wait until the log decides.

        Raises:
            CoordinationError: It did not, within the time that claims may last.
            PositionError: The topic was recreated, and that is not allowed.
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
                    f"the checkpoint has offsets {undecided[0].first} to "
                    f"{undecided[0].end - 1} of {undecided[0].partition} in an "
                    "unfinished batch, and nobody holds that partition now: is the "
                    "group paused, or are its claims limited? See: marshal groups "
                    "describe; then start the query again"
                )
            self.ranges.wait_for_change(WAIT_MS)
        return sorted(found, key=_order)

    def _of_this_topic(self, ranges: list[PlannedRange]) -> list[PlannedRange]:
        """Return the ranges whose topic was not replaced.

        A batch that was just planned has been checked already.
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
        # Secrets after tokens: that of a later claim is useless under this one.
        tokens, secrets = self.ranges.tokens(), self.ranges.secrets()
        # Their batch only begins now, so drained partitions stay for all of it.
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
                continue  # its preceding claim is known once the range may start
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
            "batch_overtaken %s offsets %d to %d: another owner has had the partition "
            "since token %s, and processes them",
            *(planned.partition, planned.first, planned.end - 1, planned.token),
        )

    # --- confirming

    def confirm(self, marks: Marks) -> None:
        """Confirm every batch up to ``marks``, which Spark has committed.

        A claim that has ended is logged and skipped: its next owner starts at the last
        confirmed position.
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
    """Return the mark of a new restart, without offsets yet."""
    return mark._replace(token=token, restarts=mark.restarts + 1, topic_id=topic_id)


def _recreated(mark: Mark, topic_id: str) -> str:
    return (
        f"the topic was deleted and created again since (its id was {mark.topic_id} "
        f"and is {topic_id})"
    )


def _follows(held: HeldRange, token: Token) -> bool:
    """Return whether a claim directly follows that of a token."""
    return held.follows == token.offset and held.token.era == token.era


def _is_pending(claim: LastClaim | None, mark: Mark | None) -> bool:
    """Return whether a claim is pending, or of an earlier run of this query."""
    if claim is None:
        return False
    is_former = mark is not None and claim.is_of(mark.token)
    return claim.may_be_ours or is_former
