"""A keyed topic that grows from one partition to two (PROTOCOL 9.10), as a small world.

A producer writes the records of one record key, to the old partition until it knows the
new count. An owner processes the old partition. A member claims the new partition when
it exists, looks up the end of coordinating partition 0, reads up to there, and judges
again whether it may begin. The product folds coordinating partition 0, and judges
whether a source has passed its end.
"""

from typing import NamedTuple

from logkit import growth

from kafka_marshal.protocol import growths
from kafka_marshal.protocol.state import KeyState
from kafka_marshal.protocol.types import Key

ORDER = "9.10: the order of a key"
RECORDS = 3
SOURCE, NEW = Key("g", "t", 0), Key("g", "t", 1)
AWAY, CLAIMED, LOOKED, BEGUN = range(4)


class World(NamedTuple):
    """One state of the small world.

    Attributes:
        ends: The DataGrowth records in partition 0, in log order: None for the
            announcement, then the end of the old partition.
        is_added: Whether the new partition exists.
        knows: Whether the producer knows the new count.
        written: Number of records of the key that are written.
        old: Their numbers in the old partition, in log order.
        new: Those in the new partition.
        granted: Records of the old partition that its owner was granted.
        processed: Those of them that it has processed: its position.
        stage: The stage of the claim of the new partition.
        read: Records of partition 0 that the member has read.
        until: Records that it must read before it judges again.
        begun: Processed records of the new partition.
        last: Number of the key's last processed record.
    """

    ends: tuple[int | None, ...] = ()
    is_added: bool = False
    knows: bool = False
    written: int = 0
    old: tuple[int, ...] = ()
    new: tuple[int, ...] = ()
    granted: int = 0
    processed: int = 0
    stage: int = AWAY
    read: int = 0
    until: int = 0
    begun: int = 0
    last: int = -1


class GrowthModel:
    """The steps and rules of the world; planted mistakes replace its methods."""

    def start(self):
        return World()

    def broken(self, world):
        return ORDER if world.last == RECORDS + 1 else None

    def is_over(self, world):
        is_read = world.processed == len(world.old) and world.begun == len(world.new)
        return is_read and world.written == RECORDS and world.stage == BEGUN

    def steps(self, world):
        yield from self.admin(world)
        yield from self.producer(world)
        yield from self.owner(world)
        yield from self.member(world)

    # --- the steps

    def admin(self, world):
        """Announce, add the partition, wait for the producer, write the end."""
        if not world.ends:
            yield "the growth is announced", world._replace(ends=(None,))
        if self.may_add(world) and not world.is_added:
            yield "the partition is added", world._replace(is_added=True)
        if world.is_added and len(world.ends) == 1 and self.may_end(world):
            end = len(world.old)
            yield f"the end is {end}", world._replace(ends=(*world.ends, end))

    def producer(self, world):
        if world.is_added and not world.knows:
            yield "the producer learns the count", world._replace(knows=True)
        if world.written < RECORDS:
            place = "new" if world.knows else "old"
            log = (*getattr(world, place), world.written)
            after = world._replace(**{place: log}, written=world.written + 1)
            yield f"a record goes to the {place} partition", after

    def owner(self, world):
        if world.granted < len(world.old):
            yield "the owner takes one", world._replace(granted=world.granted + 1)
        if world.processed < world.granted:
            number = world.old[world.processed]
            after = world._replace(processed=world.processed + 1)
            yield f"{number} of the old one is processed", self.follow(after, number)

    def member(self, world):
        if world.read < len(world.ends):
            yield "the member reads partition 0", world._replace(read=world.read + 1)
        if world.stage == AWAY and world.is_added and self.may_begin(world):
            yield "it claims the new partition", world._replace(stage=CLAIMED)
        if world.stage == CLAIMED:
            until = self.end_to_read(world)
            yield "it looks up the end", world._replace(stage=LOOKED, until=until)
        if world.stage == LOOKED and world.read >= world.until:
            is_open = self.judges_again(world)
            after = world._replace(stage=BEGUN if is_open else AWAY, until=0)
            yield "it begins" if is_open else "it releases", after
        if world.stage == BEGUN and world.begun < len(world.new):
            number = world.new[world.begun]
            after = world._replace(begun=world.begun + 1)
            yield f"{number} of the new one is processed", self.follow(after, number)

    # --- the rules

    def may_add(self, world):
        return bool(world.ends)

    def may_end(self, world):
        return world.knows

    def end_to_read(self, world):
        return len(world.ends)

    def judges_again(self, world):
        return self.may_begin(world)

    def position(self, world):
        return world.processed

    def may_begin(self, world):
        """Return whether the member may begin, by the records that it has read."""
        state = ()
        for offset, end in enumerate(world.ends[: world.read]):
            record = growth(2, 1, ends=None if end is None else (end,))
            assert growths.judge(state, record) is None
            state = growths.with_growth(state, record, offset=offset)
        found = growths.growth_of(state, NEW, topic_id=None)
        if found is None:
            return True
        known = KeyState(
            owner=None,
            epoch=1,
            epoch_leader_epoch=0,
            renewed_ms=0,
            heartbeat_interval_ms=1,
            active_ms=0,
            position=self.position(world),
        )
        return growths.source_of(found, NEW).has_passed(known, topic_id=None)

    @staticmethod
    def follow(world, number):
        """Record a processed number; a number below an earlier one breaks the order."""
        last = number if number > world.last else RECORDS + 1
        return world._replace(last=last)


# --- mistakes


def add_before_the_announcement(patch):
    """The partition is added although the growth may not be announced."""
    patch.setattr(GrowthModel, "may_add", lambda *_: True)


def end_before_producers_know(patch):
    """The end is looked up while a producer still uses the old count."""
    patch.setattr(GrowthModel, "may_end", lambda *_: True)


def begin_without_judging_again(patch):
    """A member begins after its claim, without judging again."""
    patch.setattr(GrowthModel, "judges_again", lambda *_: True)


def judge_by_what_is_read(patch):
    """A claimant judges again without reading partition 0 to its end."""
    patch.setattr(GrowthModel, "end_to_read", lambda *_: 0)


def count_what_is_taken(patch):
    """A source has passed its end once its owner was granted the records."""
    patch.setattr(GrowthModel, "position", lambda _, world: world.granted)


def pass_without_an_end(patch):
    """The new partition does not wait for a growth that is only announced."""
    plain = growths.Source.has_passed

    def has_passed(self, known, *, topic_id):
        return self.end is None or plain(self, known, topic_id=topic_id)

    patch.setattr(growths.Source, "has_passed", has_passed)


def pass_one_early(patch):
    """A source has passed its end one record before it."""
    plain = growths.Source.has_passed

    def has_passed(self, known, *, topic_id):
        early = self if self.end is None else self._replace(end=self.end - 1)
        return plain(early, known, topic_id=topic_id)

    patch.setattr(growths.Source, "has_passed", has_passed)
