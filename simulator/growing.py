"""Data topics that grow, and admins that die meanwhile (PROTOCOL 9.10).

Each record key belongs to one data partition. Until the producer of a key knows the new
number of partitions, it sends to the old partition that had the key.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial

import attrs

from kafka_marshal.config import Delivery
from kafka_marshal.ports import Record
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.items import Growth
from kafka_marshal.protocol.records import DataGrowth, ReleasingPartition
from kafka_marshal.protocol.types import Key, TopicPartition
from simulator.base import GROUP, TOPIC
from simulator.checkers import Folded, Violation
from simulator.pauses import ADMIN
from simulator.plan import POSITIONS, SEEKS, Fault, chance
from simulator.world import World

DIES, WITHDRAWS = 0.4, 0.1
FACTORS = (2, 2, 3)
PARTITIONS_MAX = 12
NAMED_MAX = 5
FIRST = 0
"""The coordinating partition that has all growths."""


@attrs.define(eq=False, kw_only=True)
class Grown:
    """A growth of the data topic, as its admins and producers know it.

    Attributes:
        topic_id: Id of the topic.
        old: Number of partitions before.
        new: Number of partitions after.
        rng: Draws the times of its steps.
        ends: Ends of the old partitions, once all producers know the new number.
        known: New partitions whose producers know the new number.
        is_left: Whether its admin has died.
        is_withdrawn: Whether an admin has withdrawn it.
        is_over: Whether nothing is left to do.
    """

    topic_id: bytes
    old: int
    new: int
    rng: random.Random
    ends: tuple[int, ...] | None = None
    known: set[int] = attrs.field(factory=set)
    is_left: bool = False
    is_withdrawn: bool = False
    is_over: bool = False


Step = Callable[[Grown], None]


class Growths:
    """Lets admins add partitions to the data topic, as faults of a plan."""

    def __init__(self, world: World) -> None:
        """Start without growths."""
        self._world = world
        self._growths: list[Grown] = []
        # New partitions that had records before they could begin, and that have begun.
        self._waited: set[tuple[bytes, int]] = set()
        self._begun: set[tuple[bytes, int]] = set()
        world.route, world.check_order = self._route, self._check_order

    def strike(self, fault: Fault) -> None:
        """Begin a growth, or continue or withdraw one that an admin has left."""
        world = self._world
        if world.topic_id is None:
            return
        rng = chance(world.plan.seed, f"growth/{fault.number}")
        growth = self._open()
        if growth is None:
            old = len(world.places)
            new = old * rng.choice(FACTORS)
            if new <= PARTITIONS_MAX:
                growth = Grown(topic_id=world.topic_id, old=old, new=new, rng=rng)
                self._growths.append(growth)
                world.trace(f"an admin begins the growth from {old} to {new}")
                self._announce(growth)
        elif growth.is_left and rng.random() < WITHDRAWS:
            growth.is_withdrawn = True
            world.coverage.note("growth_withdrawn")
            world.trace(f"an admin withdraws the growth from {growth.old}")
            self._withdraw(growth)
        elif growth.is_left:
            growth.is_left = False
            world.coverage.note("growth_continued")
            world.trace(f"an admin continues the growth from {growth.old}")
            self._announce(growth)

    def heal(self) -> None:
        """Let an admin end each growth of the present topic."""
        # A growth that was withdrawn may have been begun again.
        last = {(each.topic_id, each.old): each for each in self._growths}
        for growth in last.values():
            growth.is_left = growth.is_over = False
            if growth.is_withdrawn:
                self._withdraw(growth)
            else:
                self._announce(growth)

    def are_over(self) -> bool:
        """Return whether no growth of the present topic is left to end."""
        return all(growth.is_over for growth in self._growths)

    def on_fold(self, folded: Folded) -> None:
        """Count the effects of growths."""
        record, effect = folded.transition.record, folded.transition.effect
        if not self._growths:
            return
        if isinstance(record, DataGrowth) and effect in {"growing", "grown"}:
            note = "growth_announced" if effect == "growing" else "growth_ended"
            self._world.coverage.note(note)
        elif isinstance(record, DataGrowth) and effect == "growth_withdrawn":
            self._on_withdrawn(record)
        elif isinstance(record, ReleasingPartition) and record.reason == "growth":
            self._world.coverage.note("growth_released")

    def _on_withdrawn(self, record: DataGrowth) -> None:
        """Note a withdrawal, which may be a copy of an earlier one."""
        for growth in self._growths[::-1]:
            if (growth.topic_id, growth.old) == (record.topic_id, record.old_count):
                growth.is_withdrawn = True
                return

    # --- what an admin does, one step after the other

    def _announce(self, growth: Grown) -> None:
        """Announce a growth until it is accepted, then add the partitions."""
        if self._is_ended(growth):
            return
        is_known, is_next = self._known(growth) is not None, self._is_next(growth)
        if is_known and is_next:
            self._next(growth, self._add)
        elif not is_known and self._is_overtaken(growth):
            growth.is_over = True  # the log has lost it, but not the one after it
        else:
            if is_next:
                self._write(growth, ends=None)
            self._later(growth, self._announce, self._world.plan.h_ms // 4)

    def _add(self, growth: Grown) -> None:
        """Add the partitions; producers learn of it one after the other."""
        world = self._world
        if self._is_ended(growth):
            return
        if len(world.places) < growth.new:
            world.add_places(growth.new - growth.old)
            world.trace(f"the topic has {growth.new} partitions now")
        longest_ms = 2 * world.plan.h_ms
        for number in range(growth.old, growth.new):
            learn_ms = world.now_ms + growth.rng.randint(1, longest_ms)
            world.loop.at(learn_ms, partial(growth.known.add, number))
        at_ms = longest_ms + growth.rng.randint(1, world.plan.h_ms)
        self._next(growth, self._end, least_ms=at_ms)

    def _end(self, growth: Grown) -> None:
        """Write the ends of the old partitions until they are accepted."""
        if self._is_ended(growth):
            return
        known = self._known(growth)
        if known is None:
            self._announce(growth)  # its log has lost it
            return
        if known.ends is not None:
            growth.is_over = True
            self._world.trace(f"the growth from {growth.old} has ended")
            return
        if growth.ends is None:
            kafka = self._world.cluster.kafka
            places = [TopicPartition(TOPIC, number) for number in range(growth.old)]
            growth.ends = tuple(kafka.log(place).end for place in places)
        self._write(growth, ends=growth.ends)
        self._later(growth, self._end, self._world.plan.h_ms // 4)

    def _withdraw(self, growth: Grown) -> None:
        if self._is_ended(growth):
            return
        if self._known(growth) is None:
            growth.is_over = True
            return
        self._write(growth, ends=None, is_withdrawn=True)
        self._later(growth, self._withdraw, self._world.plan.h_ms // 4)

    def _is_ended(self, growth: Grown) -> bool:
        """Return whether nobody works on a growth: its topic or its admin is gone."""
        if growth.topic_id != self._world.topic_id:
            growth.is_over = True
        return growth.is_over or growth.is_left

    def _next(self, growth: Grown, step: Step, *, least_ms: int = 0) -> None:
        """Take the next step later, unless the admin dies before."""
        world = self._world
        if not world.is_healed and growth.rng.random() < DIES:
            growth.is_left = True
            world.coverage.note("growth_left")
            world.trace(f"the admin of the growth from {growth.old} dies")
            return
        longest_ms = 1 if world.is_healed else 2 * world.plan.h_ms
        self._later(growth, step, least_ms + growth.rng.randint(1, longest_ms))

    def _later(self, growth: Grown, step: Step, wait_ms: int) -> None:
        self._world.loop.at(self._world.now_ms + wait_ms, partial(step, growth))

    def _write(
        self, growth: Grown, *, ends: tuple[int, ...] | None, is_withdrawn: bool = False
    ) -> None:
        record = DataGrowth(
            client_id=ADMIN.client_id,
            group_id=GROUP,
            incarnation=ADMIN.incarnation,
            seq=1,
            topic=TOPIC,
            topic_id=growth.topic_id,
            old_count=growth.old,
            new_count=growth.old if is_withdrawn else growth.new,
            ends=ends,
            reason=None,
        )
        cluster = self._world.cluster
        cluster.kafka.produce(cluster.place(FIRST), encode(record))

    # --- what it leads to

    def _open(self) -> Grown | None:
        """Return the growth of the present topic that has not ended, if any."""
        return next((each for each in self._growths if not each.is_over), None)

    def _known(self, growth: Grown) -> Growth | None:
        """Return a growth as the log knows it."""
        for each in self._world.watcher.worlds[FIRST].growths:
            if (each.topic_id, each.old_count) == (growth.topic_id, growth.old):
                return each
        return None

    def _is_next(self, growth: Grown) -> bool:
        """Return whether each earlier growth of its topic is over."""
        earlier = self._growths[: self._growths.index(growth)]
        return all(each.is_over or each.topic_id != growth.topic_id for each in earlier)

    def _is_overtaken(self, growth: Grown) -> bool:
        """Return whether the log knows a later growth of its topic."""
        return any(
            each.topic_id == growth.topic_id and growth.old < each.old_count
            for each in self._world.watcher.worlds[FIRST].growths
        )

    def _added_by(self, topic_id: bytes | None, number: int) -> Grown | None:
        """Return the growth that has added a partition of a topic, if any."""
        for each in self._growths[::-1]:
            if each.topic_id == topic_id and each.old <= number < each.new:
                return each
        return None

    def _route(self, place: TopicPartition) -> TopicPartition:
        """Return where the producer of a record key sends it now."""
        growth = self._added_by(self._world.topic_id, place.partition)
        if growth is None:
            return place
        if place.partition not in growth.known:
            # The old partition may itself be one of an earlier growth, which has ended.
            return place._replace(partition=place.partition % growth.old)
        place_id = growth.topic_id, place.partition
        if self._source_lacks(growth, place.partition) != []:
            self._waited.add(place_id)
        return place

    def _source_lacks(self, growth: Grown, number: int) -> list[int] | None:
        """Return the offsets for which a new partition waits; None without ends."""
        if growth.ends is None:
            return None
        number %= growth.old
        key, wanted = Key(GROUP, TOPIC, number), range(growth.ends[number])
        if self._world.plan.delivery is Delivery.AT_LEAST_ONCE:
            return sorted({*wanted} - self._world.processed(key))
        states = [each.keys.get(key) for each in self._world.watcher.worlds]
        heads = [each.position or 0 for each in states if each is not None]
        return [*wanted[max(heads, default=0) :]]

    def _check_order(self, key: Key, records: Sequence[Record]) -> None:
        """9.10: demand that earlier records of the same record keys are processed.

        Raises:
            Violation: A new partition begins before its growth has ended, or before
                the old partition was processed up to its end.
        """
        growth = self._added_by(records[0].value, key.partition)
        kinds = set(self._world.plan.kinds)
        if growth is None or growth.is_withdrawn or POSITIONS in kinds:
            return
        lacks = self._source_lacks(growth, key.partition)
        if lacks is None:
            raise Violation("9.10", f"{key} is handed out before the growth has ended")
        if lacks and SEEKS not in kinds:
            text = f"{key} is handed out, and its old partition has left"
            raise Violation("9.10", f"{text}: {lacks[:NAMED_MAX]}")
        place_id = growth.topic_id, key.partition
        if place_id not in self._begun:
            self._begun.add(place_id)
            waited = place_id in self._waited
            self._world.coverage.note("grown_waited" if waited else "grown_begun")
