"""Spreads the partitions of a group over racks and hosts, by a Plan (PROTOCOL 9.2).

Planners never move a partition only to spread a group. An admin may ask for it: this
writes a Plan as any planner does, and the log decides whether it is the next Plan.
"""

from collections.abc import Sequence

import attrs

from kafka_marshal.admin.connection import AdminConnection
from kafka_marshal.arguments import with_plain_arguments
from kafka_marshal.engine.follower import Awaited
from kafka_marshal.errors import ClaimRejected
from kafka_marshal.protocol.group_plan import PLANNER_VERSION, Move, Uncovered
from kafka_marshal.protocol.hashing import key_partition
from kafka_marshal.protocol.plans import Reading, digest_of, situation_of, slices_of
from kafka_marshal.protocol.records import Plan
from kafka_marshal.protocol.settings import FAIR, PLANNER
from kafka_marshal.protocol.spreading import spread
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key

# How often a Plan is made and written, if other Plans come first.
ATTEMPTS_MAX = 5


@attrs.frozen(kw_only=True)
class Rebalance:
    """A Plan that spreads a group, and whether it was written.

    Attributes:
        group_id: The group.
        follows: Generation of the Plan in force when this one was made.
        moves: Partitions that move; ``source`` is None for a free partition.
        uncovered: Partitions that no member can have.
        is_needed: Whether these moves differ from those of the Plan in force.
        is_written: Whether the log accepted it as the next Plan.
    """

    group_id: str
    follows: int
    moves: tuple[Move, ...]
    uncovered: tuple[Uncovered, ...]
    is_needed: bool
    is_written: bool = False


def _is_overtaken(sent: Awaited) -> bool:
    return sent.transition is not None and sent.transition.reason == "plan_overtaken"


def _partition_of(key: Key, partition_count: int) -> int:
    return key_partition(*key.topic_partition, partition_count=partition_count)


def _require_rest(worlds: Sequence[WorldState]) -> None:
    if any(each.layout is not None for each in worlds):
        raise ClaimRejected(
            "the number of coordinating partitions is being changed, and nobody plans "
            "meanwhile; see: marshal topic info",
            reason="busy",
        )


def _require_planned(policy: str | None, group_id: str) -> None:
    if policy != PLANNER:
        raise ClaimRejected(
            f"group {group_id} has policy {policy or FAIR!r}, and its members do not "
            f"follow plans; run: marshal groups set {group_id} --policy planner "
            "--execute",
            reason="not_planned",
        )


class Rebalancing(AdminConnection):
    """Spreads groups, as a part of ``Admin``; for one thread."""

    @with_plain_arguments
    def spread_group(self, group_id: str, *, execute: bool = False) -> Rebalance:
        """Move partitions of a group so that racks and hosts share topics equally.

        The members' numbers of partitions stay equal, and no more partitions move than
        necessary. Members follow the Plan like any other, and planners do not undo it.

        Args:
            group_id: The group; its policy must be ``planner``.
            execute: Whether to write the Plan.

        Raises:
            ClaimRejected: The group has another policy; or a Plan of its planners came
                first in every attempt; or the number of coordinating partitions is
                being changed.
            LogUnwritable: The log has no room for another group.
            DeadlineExceeded: No verdict in time; the record may still be appended.
        """
        for _ in range(ATTEMPTS_MAX):
            self._follow().catch_up(self._timeout_ms)
            found, records = self._spread(group_id, has_records=execute)
            if not records:
                return found
            sent = self._write(*records)
            if all(each.is_accepted for each in sent):
                return attrs.evolve(found, is_written=True)
            refused = next(each for each in sent if not each.is_accepted)
            if not _is_overtaken(refused):
                raise refused.unwritable(f"the plan of group {group_id!r}")
        raise ClaimRejected(
            f"{ATTEMPTS_MAX} plans of group {group_id} were overtaken by those of its "
            "planners, as happens while members join or leave; try again, or see: "
            f"marshal plan show {group_id}",
            reason="plan_overtaken",
        )

    def _spread(
        self, group_id: str, *, has_records: bool
    ) -> tuple[Rebalance, list[tuple[int, Plan]]]:
        """Return the moves, and the records that order them if any are missing."""
        worlds = tuple(self._follow().worlds)
        _require_rest(worlds)
        reading = Reading(
            group_id=group_id,
            worlds=worlds,
            elapsed_ms=self._elapsed_ms(),
            counts={},
            partition_of=lambda key: _partition_of(key, reading.config.partition_count),
        )
        home = worlds[reading.home]
        _require_planned(home.settings_of(group_id).policy, group_id)
        states = reading.members()
        topics = {topic for each in states.values() for topic in each.record.topics}
        counts = {topic: self.partition_count(topic) for topic in sorted(topics)}
        known = {topic: count for topic, count in counts.items() if count is not None}
        reading = attrs.evolve(reading, counts=known)
        situation = situation_of(reading, states)
        result = spread(situation.given)
        entries = situation.entries(result)
        follows = home.plan_generation(group_id)
        found = Rebalance(
            group_id=group_id,
            follows=follows,
            moves=tuple(
                Move(key, situation.holders[key], to)
                for key, to in sorted(entries.items())
            ),
            uncovered=result.uncovered,
            is_needed=entries != situation.standing,
        )
        if not has_records or not found.is_needed:
            return found, []
        slices = slices_of(situation.counts, entries, vector=reading.vector)
        digest = digest_of(situation.given, is_spread=True)
        records = [
            Plan(
                **self._sender.fields(group_id),
                follows=follows + number,
                number=number,
                slice_count=len(slices),
                planner_version=PLANNER_VERSION,
                vector=reading.vector,
                input_digest=digest,
                topics=each.topics,
                moves=each.moves,
            )
            for number, each in enumerate(slices)
        ]
        return found, [(reading.home, record) for record in records]

    def _elapsed_ms(self) -> tuple[int, ...]:
        """Return the time since the last entry of each coordinating partition."""
        now_ms, wall_ms = self._clock.now_ms(), self._clock.wall_ms()
        return tuple(
            max(0, each.idle_ms(now_ms, wall_ms=wall_ms))
            for each in self._follow().replicas.values()
        )
