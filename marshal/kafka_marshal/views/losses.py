"""Offsets that were granted at most once and never processed, read from the log."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kafka_marshal.defaults import COORDINATION_TOPIC, SERVERS
from kafka_marshal.protocol.losses import LIVE, Loss, LossBook
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.views.log_scan import TIMEOUT_MS, LogScan, require_restored
from kafka_marshal.views.past import Since
from kafka_marshal.views.world import World


class Losses:
    """Offsets that were granted at most once and never processed.

    An owner records its progress in the log when the application polls again or closes
    in order (PROTOCOL 6.3). Offsets granted beyond that progress are listed: after a
    crash up to ``max_granted_batches`` times ``max_poll_records`` records. The
    application may have processed some of them since its process last wrote to the log.

    If retention has deleted the start of the log, the list begins at the first
    remaining checkpoint: earlier grants are not listed.

    Attributes:
        lost: Losses of claims that have ended, or whose owner is stale; in the order
            in which the claims ended, those of stale owners last.
        at_risk: Offsets of live claims that a crash of their owners would lose now.
        world: The world at the end of reading.
        began_at: Where reading began in coordinating partitions whose earlier entries
            retention has deleted; offsets granted in these are not listed.
    """

    def __init__(
        self,
        lost: Sequence[Loss],
        at_risk: Sequence[Loss],
        *,
        world: World,
        began_at: Mapping[int, int] | None = None,
    ) -> None:
        self.lost = tuple(lost)
        self.at_risk = tuple(at_risk)
        self.world = world
        self.began_at = dict(began_at or {})

    @classmethod
    def open(
        cls,
        bootstrap_servers: str | Sequence[str] = SERVERS,
        *,
        group_id: str | None = None,
        topic: str | None = None,
        time_ms: int | None = None,
        since_ms: int | None = None,
        coordination_topic: str = COORDINATION_TOPIC,
        options: Mapping[str, Any] | None = None,
        transport: str = "auto",
        timeout_ms: int = TIMEOUT_MS,
    ) -> "Losses":
        """Read the log to its end and return the losses.

        Args:
            bootstrap_servers: Addresses of the cluster.
            group_id: Only this group.
            topic: Only this data topic.
            time_ms: As of this time, see ``World.at``; by default now.
            since_ms: Only losses of claims that ended after this time, epoch ms. The
                log is read from the newest checkpoint that is before this time and
                before each claim that was open then, because a checkpoint does not have
                all grants of its open claims. None for all losses: the whole log is
                read.
            coordination_topic: Name of the coordination topic.
            options: Security and connection options.
            transport: ``auto``, ``fast`` or ``kafka-python``; see ``Marshal``.
            timeout_ms: Longest time of the call.

        Raises:
            TopicMisconfigured: There is no such topic.
            DeadlineExceeded: The log was not read in time.
        """
        with LogScan(
            bootstrap_servers,
            coordination_topic=coordination_topic,
            options=options,
            transport=transport,
            timeout_ms=timeout_ms,
        ) as scan:
            return cls.of(
                scan,
                group_id=group_id,
                topic=topic,
                time_ms=time_ms,
                since_ms=since_ms,
            )

    @classmethod
    def of(
        cls,
        scan: LogScan,
        *,
        group_id: str | None = None,
        topic: str | None = None,
        time_ms: int | None = None,
        since_ms: int | None = None,
    ) -> "Losses":
        """Return the losses in the log of a scan; see ``open``.

        Raises:
            LogUnreadable: The state of a partition is unknown: its log has lost its
                start, and has no checkpoint.
        """
        if time_ms is not None:
            scan.until(time_ms=time_ms)
        since = None
        if since_ms is not None:
            wanted = _BeforeOpenClaims(group_id, topic)
            since = Since(time_ms=since_ms, fits=wanted)
        restored = require_restored(scan.restore(since=since))
        worlds = {number: at.world for number, at in restored.items()}
        by_partition = {
            number: LossBook(number, group_id=group_id, topic=topic, begun=world)
            for number, world in worlds.items()
        }
        began_at = {
            number: at.world.next_offset
            for number, at in restored.items()
            if at.source is not None and not (since and since.is_after(at.world))
        }
        lost: list[Loss] = []
        for number, entry in scan:
            state = worlds[number]
            transitions = apply(state, entry)
            ended = by_partition[number].take(entry, transitions, keys=state.keys)
            lost += (each for each in ended if each.at_ms >= (since_ms or 0))
        elapsed = {
            number: max(0, scan.read_at_ms - world.append_time_ms)
            if time_ms is None
            else 0
            for number, world in worlds.items()
        }
        lost.sort(key=lambda loss: (loss.at_ms, loss.partition, loss.at_offset))
        at_risk: list[Loss] = []
        for loss in _open_losses(by_partition, worlds, elapsed=elapsed):
            (at_risk if loss.ending == LIVE else lost).append(loss)
        world = World(
            list(worlds.values()),
            elapsed,
            cluster_id=scan.cluster_id,
            read_at_ms=scan.read_at_ms,
            notes=scan.prefix.notes,
            is_past=time_ms is not None,
        )
        return cls(lost, at_risk, world=world, began_at=began_at)


class _BeforeOpenClaims:
    """Selects checkpoints before each claim that is open at the newest checkpoint.

    Call it with states of checkpoints, the newest of each partition first.
    """

    def __init__(self, group_id: str | None, topic: str | None) -> None:
        self._group_id = group_id
        self._topic = topic
        self._firsts: dict[int, int] = {}

    def __call__(self, world: WorldState) -> bool:
        epochs = (
            known.epoch
            for key, known in world.keys.items()
            if known.owner is not None
            and self._group_id in {None, key.group_id}
            and self._topic in {None, key.topic}
        )
        first = self._firsts.setdefault(
            world.partition, min(epochs, default=world.next_offset)
        )
        return world.next_offset <= first


def _open_losses(
    by_partition: Mapping[int, LossBook],
    worlds: Mapping[int, WorldState],
    *,
    elapsed: Mapping[int, int],
) -> Iterable[Loss]:
    for number, book in by_partition.items():
        yield from book.open_ones(worlds[number], elapsed_ms=elapsed[number])
