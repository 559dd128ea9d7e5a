"""The world, the folded state of the coordination log, now or at a past moment.

Nothing here writes, or joins a group. A view of now is never older than its request.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kafka_marshal.arguments import require_key, to_ms, to_plain, to_whole
from kafka_marshal.clock import SystemClock
from kafka_marshal.deadline import Deadline
from kafka_marshal.defaults import COORDINATION_TOPIC, SERVERS
from kafka_marshal.engine.checkpoint_reader import (
    FirstKnown,
    kept_in,
)
from kafka_marshal.engine.config_check import (
    agreed_config,
    require_cluster,
    unformatted,
)
from kafka_marshal.engine.follower import Follower
from kafka_marshal.engine.pause_notes import (
    PauseName,
    PauseNote,
    directive_rows,
    pause_rows,
)
from kafka_marshal.errors import (
    ConfigurationError,
    LogUnreadable,
)
from kafka_marshal.identity import home_of
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.transport import open_coordination_log
from kafka_marshal.protocol.applied import applied_of
from kafka_marshal.protocol.handoffs import offered_since_ms, phase_of
from kafka_marshal.protocol.layout import used_count
from kafka_marshal.protocol.lease import Freshness, freshness
from kafka_marshal.protocol.placement import (
    by_partition,
    homes_of,
    leading,
    partition_of,
    place_under,
    progress_of,
    standing_keys,
    standing_of,
    target_of,
)
from kafka_marshal.protocol.records import Config
from kafka_marshal.protocol.settings import NO_SETTINGS, Settings
from kafka_marshal.protocol.state import (
    KeyState,
    MemberName,
    MemberState,
    WorldState,
)
from kafka_marshal.protocol.text import world_to_object
from kafka_marshal.protocol.types import Key
from kafka_marshal.snapshots import (
    SnapshotFolder,
    keep_read,
    open_store,
    read_to_end,
)
from kafka_marshal.views.log_scan import TIMEOUT_MS, unknown_text
from kafka_marshal.views.past import (
    PastReader,
    Prefix,
)

if TYPE_CHECKING:
    from kafka_marshal.kafka_io.topiclog import TopicLog

CLOSE_MS = 5_000
# After reading this many entries, store the state, to shorten the next start.
KEEP_ENTRIES_MIN = 20_000


class World:
    """The world as of one moment, read-only.

    Attributes:
        partitions: States of the coordinating partitions of the view, in order: all
            partitions, unless the moment is an offset, or the view is of a single key.
        cluster_id: Cluster of the log, None if unknown.
        topic_id: Id of the coordination topic, None if brokers have no ids.
        read_at_ms: Wall time of reading, epoch ms; estimates are as of then.
        notes: Reason, person and begin of pauses, by group and op_id. States do not
            have these, so they are collected while the log is read.
        log_start_missing: Partitions whose logs begin above offset 0 without a
            complete checkpoint before the moment of this view: their state is unknown,
            and ``partitions`` has an incomplete one.
        unused: Partitions of that kind that are not in use, for example after a change
            of the partition count that was given up. Nothing needs their state.
        known_from: First moment with a known state, for each partition whose state is
            unknown; partitions without any checkpoint are absent.
        is_past: Whether this is a view of the past: nothing in it is estimated.
        is_partial: Whether the view has only some of the coordinating partitions.
    """

    def __init__(
        self,
        partitions: Sequence[WorldState],
        elapsed: Mapping[int, int],
        *,
        cluster_id: str | None = None,
        topic_id: bytes | None = None,
        read_at_ms: int = 0,
        notes: Mapping[PauseName, PauseNote] | None = None,
        log_start_missing: Sequence[int] = (),
        known_from: Mapping[int, FirstKnown] | None = None,
        is_past: bool = False,
        is_partial: bool = False,
        partition_count: int | None = None,
    ) -> None:
        self.partitions = tuple(partitions)
        self.cluster_id = cluster_id
        self.topic_id = topic_id
        self.read_at_ms = read_at_ms
        self.notes = dict(notes or {})
        count = _used_count(partitions, log_start_missing)
        self.log_start_missing = tuple(
            t for t in log_start_missing if count is None or t < count
        )
        self.unused = tuple(
            t for t in log_start_missing if count is not None and t >= count
        )
        self.known_from = dict(known_from or {})
        self.is_past = is_past
        self.is_partial = is_partial
        self._elapsed = elapsed
        self._partition_count = partition_count

    def pauses(self, group_id: str | None = None) -> list[dict[str, Any]]:
        """Return the pauses of one group or all, as ``marshal groups`` prints them.

        Person, reason and begin are None if the log no longer has them.
        """
        return pause_rows(
            self.partitions,
            self.notes,
            elapsed_ms=self.elapsed_ms,
            group_id=group_id,
        )

    def settings(self, group_id: str) -> Settings:
        """Return the settings of a group; generation 0 if none were ever written.

        Raises: as ``config``.
        """
        self._require_agreement()
        worlds = self._worlds()
        found = (
            worlds[home].settings_of(group_id)
            for home in homes_of(worlds, group_id)
            if home in worlds
        )
        # A new home has no settings before the first that are written there.
        return next((each for each in found if each.generation), NO_SETTINGS)

    def directives(self, group_id: str | None = None) -> list[dict[str, Any]]:
        """Return every drain and cordon, as ``marshal groups describe`` prints them.

        For one group, include those that apply to all groups, which have no
        ``group_id``.
        """
        return directive_rows(
            self.partitions,
            self.notes,
            elapsed_ms=self.elapsed_ms,
            group_id=group_id,
        )

    def pauser_of(self, group_id: str, op_id: str) -> str | None:
        """Return the person who began a pause, by its op_id in hex, or None."""
        note = self.notes.get((group_id, bytes.fromhex(op_id)))
        return None if note is None else note.person

    @classmethod
    def open(
        cls,
        bootstrap_servers: str | Sequence[str] = SERVERS,
        *,
        coordination_topic: str = COORDINATION_TOPIC,
        options: Mapping[str, Any] | None = None,
        transport: str = "auto",
        state_dir: str | Path | None = None,
        timeout_ms: int = TIMEOUT_MS,
    ) -> "World":
        """Read the log to its end and return the world now."""
        return cls.at(
            bootstrap_servers,
            coordination_topic=coordination_topic,
            options=options,
            transport=transport,
            state_dir=state_dir,
            timeout_ms=timeout_ms,
        )

    @classmethod
    def at(
        cls,
        bootstrap_servers: str | Sequence[str] = SERVERS,
        *,
        offset: Mapping[int, int] | int | None = None,
        time_ms: int | None = None,
        key: Key | None = None,
        has_members: bool = False,
        coordination_topic: str = COORDINATION_TOPIC,
        options: Mapping[str, Any] | None = None,
        transport: str = "auto",
        state_dir: str | Path | None = None,
        timeout_ms: int = TIMEOUT_MS,
    ) -> "World":
        """Return the world as of an offset or a time, by default now.

        In each partition, a view of the past begins at the newest checkpoint that is
        complete before the moment, and reads no further than the moment. Without such
        a checkpoint it begins at the log start; if retention has deleted that, the
        partition is in ``log_start_missing``.

        Args:
            bootstrap_servers: Addresses of the cluster.
            offset: Per coordinating partition, the last offset to fold; partitions
                without one are not read. With ``key``, may be a single number, the
                last offset in the coordinating partition of the key.
            time_ms: Fold the entries before the first one that was appended later
                than this, in epoch ms.
            key: Read only the coordinating partition of this key, or both partitions
                while it moves from one to another.
            has_members: Whether a view of the past has all members that were not
                silent for more than two heartbeat intervals. Checkpoints have no
                members, so the view then begins at a checkpoint that is old enough.
            coordination_topic: Name of the coordination topic.
            options: Security and connection options.
            transport: ``auto``, ``fast`` or ``kafka-python``; see ``Marshal``.
            state_dir: Directory of stored states, which shorten views of now; None for
                the user's directory, ``""`` for no stored states.
            timeout_ms: Longest time of the call.

        Raises:
            TopicMisconfigured: There is no such topic.
            ConfigurationError: The moment is in the future, is an offset without its
                coordinating partition, or is both an offset and a time.
            DeadlineExceeded: The log was not read in time.
            TypeError: ``key`` is no ``Key``.
        """
        settings = ConnectionConfig(
            bootstrap_servers,
            coordination_topic=coordination_topic,
            options=options,
            transport=transport,
        )
        offset, timeout_ms = to_plain(offset), to_ms("timeout_ms", timeout_ms)
        _require_moment(offset, time_ms, key)
        log = open_coordination_log(
            settings, heartbeat_interval_ms=None, timeout_ms=timeout_ms, follows=False
        )
        try:
            if offset is None and time_ms is None:
                return cls._now(log, home=home_of(state_dir), timeout_ms=timeout_ms)
            moment = offset, time_ms, key
            return cls._past(
                log, moment, has_members=has_members, timeout_ms=timeout_ms
            )
        finally:
            log.close(CLOSE_MS)

    @classmethod
    def _now(cls, log: "TopicLog", *, home: Path | None, timeout_ms: int) -> "World":
        store = open_store(home, log.cluster_id, topic_id=log.topic_id)
        follower, prefix, read_at_ms = _read(log, store=store, timeout_ms=timeout_ms)
        return cls(
            follower.worlds,
            {
                t: max(0, read_at_ms - replica.world.append_time_ms)
                for t, replica in follower.replicas.items()
            },
            cluster_id=log.cluster_id,
            topic_id=log.topic_id,
            read_at_ms=read_at_ms,
            notes=prefix.notes,
            log_start_missing=follower.log_start_missing,
        )

    @classmethod
    def _past(
        cls,
        log: "TopicLog",
        moment: tuple[Mapping[int, int] | int | None, int | None, Key | None],
        *,
        has_members: bool,
        timeout_ms: int,
    ) -> "World":
        offset, time_ms, key = moment
        clock, count = SystemClock(), None
        if isinstance(offset, int):
            assert key is not None
            now = PastReader(
                log, Prefix(None, None), clock=clock, timeout_ms=timeout_ms
            )
            place = now.partition_of(key)
            offset = {place: offset}
        prefix = Prefix(offset, time_ms)
        reader = PastReader(log, prefix, clock=clock, timeout_ms=timeout_ms)
        if key is None or offset is not None:
            included = filter(prefix.is_included, reader.ends)
            worlds = reader.read(included, has_members=has_members)
        else:
            worlds = reader.read_key(key, has_members=has_members)
        if key is not None and leading(worlds) is None:
            count = reader.first_count()
        return cls(
            list(worlds.values()),
            {},
            cluster_id=log.cluster_id,
            topic_id=log.topic_id,
            read_at_ms=clock.wall_ms(),
            notes=prefix.notes,
            log_start_missing=sorted(reader.missing),
            known_from=reader.known_from() if reader.missing else None,
            is_past=True,
            is_partial=worlds.keys() != reader.ends.keys(),
            partition_count=count,
        )

    def require_known(self, partitions: Iterable[int] | None = None) -> None:
        """Raise if the state of partitions is unknown (``log_start_missing``).

        Args:
            partitions: The coordinating partitions; None for all.

        Raises:
            LogUnreadable: The state of one of them is unknown.
        """
        wanted = self.log_start_missing if partitions is None else partitions
        unknown = sorted(set(self.log_start_missing).intersection(wanted))
        if unknown:
            raise LogUnreadable(unknown_text(unknown, self.known_from))

    def partition_of(self, key: Key) -> int:
        """Return the coordinating partition of a key (PROTOCOL 2.3).

        While the partition count changes, it is the partition that knows the key
        (PROTOCOL 10): the new one once that has imported the key, else the old one.

        Raises: as ``config``.
        """
        self._require_agreement()
        found = partition_of(self._worlds(), key)
        if found is None and self._partition_count is not None:
            # The moment is before the first Config.
            found = place_under(key, self._partition_count)
        if found is None:
            raise unformatted(self.partitions)
        return found

    def state_of(self, key: Key) -> WorldState | None:
        """Return the state of the partition that knows a key, None if none does."""
        return standing_of(self._worlds(), key)

    def moving_to(self, key: Key) -> tuple[int, str] | None:
        """Return the partition to which a key moves, and its progress, or None.

        The progress is ``draining`` while its owner may still release the key, and then
        ``final``: the new partition imports the key, and clients claim it there.
        """
        worlds, state = self._worlds(), self.state_of(key)
        progress = None if state is None else progress_of(worlds, key, state=state)
        if state is None or progress is None:
            return None
        target = target_of(state, key)
        assert target is not None
        return target, progress

    def standing(self) -> dict[Key, WorldState]:
        """Return every key with its coordinating partition; see ``partition_of``."""
        return standing_keys(self._worlds())

    def _worlds(self) -> dict[int, WorldState]:
        return by_partition(self.partitions)

    def _require_agreement(self) -> None:
        if self._partition_count is None:
            self.config()

    def config(self) -> Config:
        """Return the Config that all coordinating partitions of the view agree on.

        Raises:
            WrongCluster: The topic was formatted for another cluster.
            TopicMisconfigured: The topic is not formatted, or not completely.
            LogUnreadable: The state of a partition is unknown (``log_start_missing``).
        """
        self.require_known()
        if self.is_partial:
            found = leading(self._worlds())
            if found is None or found.config is None:
                raise unformatted(self.partitions)
            require_cluster(found.config, self.cluster_id)
            return found.config
        return agreed_config(self._worlds(), cluster_id=self.cluster_id)

    def to_object(self) -> dict[str, Any]:
        """Return the world as the JSON document that commands print (PROTOCOL 3.8)."""
        return world_to_object(self.partitions)

    def claims(self, group_id: str | None = None) -> list[tuple[Key, KeyState]]:
        """Return the known keys of one group or of all, sorted, owned or not."""
        return sorted(
            (
                (key, world.keys[key])
                for key, world in self.standing().items()
                if group_id is None or key.group_id == group_id
            ),
            key=lambda row: row[0],
        )

    def members(
        self, group_id: str | None = None
    ) -> list[tuple[WorldState, MemberState]]:
        """Return the last announcement of each process, with its home's state.

        Sorted by group, client and process. While the partition count changes, members
        announce themselves on both homes of their group; the more recent announcement
        counts.
        """
        found: dict[MemberName, tuple[int, WorldState, MemberState]] = {}
        for state in self.partitions:
            now_ms = state.now_ms + self.elapsed_ms(state.partition)
            for name, member in state.soft.members.items():
                silent_ms = now_ms - member.seen_ms
                is_newer = name not in found or silent_ms < found[name][0]
                if group_id in {None, name[0]} and is_newer:
                    found[name] = silent_ms, state, member
        return [(state, member) for _, (_, state, member) in sorted(found.items())]

    def log_lags(self, member: MemberState) -> dict[int, int]:
        """Return how far a member's last announcement is behind the end of this view.

        Returns:
            The number of entries that the member had not applied, by coordinating
            partition. Partitions that the member, or this view, does not know are
            absent. The number includes entries written since the announcement, which
            is up to a third of a heartbeat interval old if the member is healthy.
        """
        applied = applied_of(member.record).applied
        return {
            state.partition: max(0, state.next_offset - applied[state.partition])
            for state in self.partitions
            if state.partition in applied
        }

    def handoffs(self, group_id: str | None = None) -> list[dict[str, Any]]:
        """Return every open offer of a key to a successor that warms up.

        Fields are those of ``marshal groups describe``, in order of the key. ``phase``
        is ``offered``, or ``ready`` once the successor has warmed up. ``since_ms`` and
        ``until_ms`` are log times; ``since_ms`` is None if the offer was not read.
        """
        found = []
        for key, world in self.standing().items():
            known = world.keys[key]
            log_ms = world.now_ms + self.elapsed_ms(world.partition)
            phase = phase_of(known, log_ms)
            if phase is None or group_id not in {None, key.group_id}:
                continue
            assert known.owner is not None  # only an owner offers
            assert known.offer is not None
            row = {
                "owner": known.owner.client_id,
                "successor": known.offer.successor,
                "phase": phase,
                "since_ms": offered_since_ms(world, key),
                "until_ms": known.offer.until_ms,
            }
            found.append((key, row))
        found.sort(key=lambda pair: pair[0])
        return [{**key._asdict(), **row} for key, row in found]

    def elapsed_ms(self, partition: int) -> int:
        """Return an estimate of the time since a partition's last entry, for display.

        It uses local time and the wall clock; in a view of the past it is 0.
        """
        return max(0, self._elapsed.get(partition, 0))

    def estimated_age_ms(self, world: WorldState, known: KeyState) -> int:
        """Return the age of a key's last renewal, plus time since the last entry."""
        return known.age_ms(world.now_ms) + self.elapsed_ms(world.partition)

    def estimated_freshness(self, world: WorldState, known: KeyState) -> Freshness:
        """Return the freshness by the estimated age; log time may show it fresher."""
        age_ms = self.estimated_age_ms(world, known)
        return freshness(age_ms, known.heartbeat_interval_ms)


def _used_count(
    partitions: Iterable[WorldState], missing: Collection[int]
) -> int | None:
    """Return the number of partitions in use, None if partition 0 does not show it."""
    for state in partitions:
        if state.partition == 0 and 0 not in missing:
            return used_count(state)
    return None


def _require_moment(
    offset: Mapping[int, int] | int | None, time_ms: int | None, key: Key | None
) -> None:
    if offset is not None and time_ms is not None:
        raise ConfigurationError(
            "a moment is either an offset or a time, not both", setting="offset"
        )
    if time_ms is not None:
        to_whole("time_ms", time_ms)
    if key is not None:
        require_key(key)
    if isinstance(offset, int) and key is None:
        raise ConfigurationError(
            f"the moment is offset {offset}, and each coordinating partition has "
            "its own offsets; name the partition as well, or a time",
            setting="offset",
        )


def _read(
    log: "TopicLog", *, store: SnapshotFolder | None, timeout_ms: int
) -> tuple[Follower, Prefix, int]:
    """Read the log to its end, from stored states if there are any.

    Returns:
        The reader, the reasons of pauses, and the wall time when reading to the end
        began, epoch ms.
    """
    clock, prefix = SystemClock(), Prefix(None, None)
    follower = Follower(log, clock, sources=kept_in(store))
    deadline = Deadline(timeout_ms)
    follower.begin(timeout_ms)
    if follower.is_pause_unknown and not any(log.start_offsets(timeout_ms).values()):
        # The reason of a pause is only in the log.
        log.read_from(log.start_offsets(timeout_ms))
        follower = Follower(log, clock)
    prefix.begin(follower.began_notes)
    read_at_ms = clock.wall_ms()
    read_to_end(follower, store, timeout_ms=deadline.left_ms, note=prefix.note)
    if store is not None:
        keep_read(follower, store, entries_min=KEEP_ENTRIES_MIN)
    return follower, prefix, read_at_ms
