"""Start positions of claims that were won: from the log, a commit or the data log."""

from collections.abc import Callable
from itertools import islice

from kafka_marshal.config import Delivery
from kafka_marshal.engine.awaited_ends import AwaitedEnds
from kafka_marshal.engine.context import GROWTH, Context, awaited
from kafka_marshal.engine.heartbeats import Heartbeater
from kafka_marshal.engine.holding import (
    Found,
    Holding,
    Lookup,
    StartLookup,
    StartRule,
)
from kafka_marshal.engine.interfaces import PARTITIONS_NAMED_MAX
from kafka_marshal.errors import CoordinationError, PositionError
from kafka_marshal.ports import LogRange, Pending
from kafka_marshal.protocol.claiming import Claimant, Phase
from kafka_marshal.protocol.state import KeyState
from kafka_marshal.protocol.types import Key, TopicPartition

LOOKUP_MS_MAX = 10_000
LOOKUP_RETRY_MS = 500
REQUESTS_MAX = 8
REQUEST_PARTITIONS_MAX = 1_000


class StartPositions:
    """Finds the start positions of claims that were won and starts their use.

    Claims that are won in one round share their requests, one for each topic: a member
    that wins a thousand partitions asks the cluster twice, not two thousand times.

    Args:
        context: State shared by all parts of one engine.
        beater: Sends the first heartbeats.
        claimant: The client.
        release: Releases a partition that waits for another one (PROTOCOL 9.10).
    """

    __slots__ = (
        "_claimant",
        "_context",
        "_failed",
        "_heartbeater",
        "_queued",
        "_release",
    )

    def __init__(
        self,
        context: Context,
        beater: Heartbeater,
        claimant: Claimant,
        *,
        release: Callable[..., None],
    ) -> None:
        self._release = release
        self._context = context
        self._heartbeater = beater
        self._claimant = claimant
        # In the order of the claims; those that ended meanwhile are left out later.
        self._queued: dict[Key, Holding] = {}
        # Partitions by topic and error, until they are reported.
        self._failed: dict[tuple[str, str], list[int]] = {}

    def begin(self, holding: Holding, known: KeyState) -> None:
        """Send the first heartbeat; start at the position in the log, if any."""
        is_amo = holding.delivery is Delivery.AT_MOST_ONCE
        position = known.next_unclaimed() if is_amo else known.position
        # PROTOCOL 5.1: this heartbeat is the owner's first record, before any fetch.
        self._heartbeater.beat_start(holding, position)
        holding.lookup_error = ""
        if position is not None or not holding.start_rule.is_needed:
            holding.begin(position, grantee=self._claimant.owner.incarnation)
            return
        self._queue(holding)

    def drive(self, holding: Holding, now_ms: int) -> bool:
        """Finish a start whose look-up is complete; return whether there was one.

        Raises:
            PositionError: There is no position and `offset_reset` is ``none``.
        """
        lookup = holding.lookup
        if holding.claim.phase is not Phase.STARTING or lookup is None:
            return False
        self._send_queued()
        if not lookup.done():
            return False
        found = lookup.outcome()
        if isinstance(found, PositionError):
            raise found
        if not isinstance(found, Lookup):
            if now_ms >= holding.lookup_at_ms:
                self._note_failure(holding, str(found))
                self._queue(holding)
            return False
        growths = found.growths
        if growths is not None and not growths.are_reached(self._context.folded):
            return False
        holding.lookup = None
        if awaited(self._context, holding.key, topic_id=holding.topic_id) is not None:
            self._release(holding, reason=GROWTH)
            return False
        position = _choose(holding, found)
        self._heartbeater.beat_start(holding, position)
        holding.begin(position, grantee=self._claimant.owner.incarnation)
        return True

    def _note_failure(self, holding: Holding, error: str) -> None:
        """Note the error of a partition, unless it was reported."""
        if holding.lookup_error != error:
            holding.lookup_error = error
            alike = self._failed.setdefault((holding.key.topic, error), [])
            alike.append(holding.key.partition)

    def report_failures(self) -> None:
        """Report the look-ups that failed in this round, each error of a topic once."""
        for (topic, error), partitions in self._failed.items():
            fields = {
                "group": self._claimant.group_id,
                "topic": topic,
                "count": len(partitions),
                "partitions": partitions[:PARTITIONS_NAMED_MAX],
                "error": error,
            }
            self._context.observe("start_lookup_failed", fields)
        self._failed.clear()

    def _queue(self, holding: Holding) -> None:
        world = self._context.replicas[holding.coordinator].world
        known = world.keys.get(holding.key)
        # PROTOCOL 5.6: commits of an earlier topic of this name do not count.
        may_use_commit = known is not None and not known.retired_topic_ids
        holding.lookup = StartLookup(
            holding.key.topic_partition, may_use_commit=may_use_commit
        )
        self._queued[holding.key] = holding

    def _send_queued(self) -> None:
        """Request the queued positions while few requests are pending."""
        # The limit is for all sessions: more would fill the queue of look-ups.
        under_way = self._context.start_requests
        under_way[:] = [one for one in under_way if not one.done()]
        while self._queued and len(under_way) < REQUESTS_MAX:
            kind = _kind(next(iter(self._queued.values())))
            alike = (one for one in self._queued.values() if _kind(one) == kind)
            chosen = list(islice(alike, REQUEST_PARTITIONS_MAX))
            for holding in chosen:
                del self._queued[holding.key]
            starting = [h for h in chosen if h.claim.phase is Phase.STARTING]
            if starting:
                under_way.append(self._request(starting))

    def _request(self, holdings: list[Holding]) -> Pending[Found]:
        ports = self._context.ports
        data, log = ports.data, ports.log
        folded = self._context.folded.get(0, 0)
        # These keys need the end of partition 0; for a key there its claim is that end.
        elsewhere = {h.key.topic_partition for h in holdings if h.coordinator != 0}
        group_id, _, isolation_level = _kind(holdings[0])
        lookups = [h.lookup for h in holdings if h.lookup is not None]
        rules = {h.key.topic_partition: h.start_rule for h in holdings}
        committing = [one.partition for one in lookups if one.may_use_commit]
        growths = AwaitedEnds(ports)

        def find() -> Found:
            ranges = data.ranges(
                list(rules), LOOKUP_MS_MAX, isolation_level=isolation_level
            )
            asked = [partition for partition in committing if partition in ranges]
            commits = (
                data.committed(group_id, asked, timeout_ms=LOOKUP_MS_MAX)
                if asked
                else {}
            )
            if elsewhere:
                end = log.end_offsets(LOOKUP_MS_MAX)[0]
                if end < folded:
                    raise CoordinationError(
                        "the leader of coordinating partition 0 reports an end below "
                        "what was read before"
                    )
                growths.add({0: end})
            return {
                partition: _found(
                    partition,
                    rule,
                    ranges.get(partition),
                    commits.get(partition),
                    group_id=group_id,
                    growths=growths if partition in elsewhere else None,
                )
                for partition, rule in rules.items()
            }

        request = ports.background.submit(find)
        for lookup in lookups:
            lookup.request = request
        for holding in holdings:
            holding.lookup_at_ms = self._context.now_ms + LOOKUP_RETRY_MS
        return request


def _kind(holding: Holding) -> tuple[str, str, str]:
    """Return what the partitions of a request have in common.

    A request has one topic: if the process may not read it, other requests succeed.
    """
    key = holding.key
    return key.group_id, key.topic, holding.start_rule.isolation_level


def _found(
    partition: TopicPartition,
    rule: StartRule,
    log_range: LogRange | None,
    committed: int | None,
    *,
    group_id: str,
    growths: AwaitedEnds | None,
) -> Lookup | Exception:
    if log_range is None:
        return CoordinationError("the partition does not exist")
    must_exist = rule.offset_reset == "none" and partition not in rule.offsets
    if committed is None and must_exist:
        return _no_position(partition, log_range, group_id=group_id)
    return Lookup(committed, log_range, growths)


def _choose(holding: Holding, found: Lookup) -> int:
    if found.committed is not None:
        return found.committed
    wanted = holding.start_rule.offsets.get(holding.key.topic_partition)
    if wanted is not None:
        return wanted
    if holding.start_rule.offset_reset == "latest":
        return found.log_range.end
    return found.log_range.start


def _no_position(
    partition: TopicPartition, log_range: LogRange, *, group_id: str
) -> PositionError:
    return PositionError(
        f"{partition} has no position and auto_offset_reset is 'none'; choose "
        "'earliest' or 'latest', or set the topic's positions with: marshal groups "
        f"reset {group_id} --topic {partition.topic} --to-earliest",
        requested=-1,
        log_start=log_range.start,
        log_end=log_range.end,
        partition=(partition.topic, partition.partition),
    )
