"""Configs of other levels in a simulated world, as an admin writes them.

Each is read back, and written again until it is accepted: a failover may lose it.
"""

from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from kafka_marshal.defaults import COORDINATION_TOPIC
from kafka_marshal.engine.config_check import require_newest, require_no_change
from kafka_marshal.errors import ClaimRejected
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.records import SUPPORTED_LEVEL, Config
from simulator.plan import Fault, chance
from simulator.world import World

BELOW = 1
ABOVE = SUPPORTED_LEVEL + 1
PERCENT = 100
FAR = 10**6
H_DIVISORS = (1, 1, 2, 4)
"""Divisors of the plan's interval, which is the longest and bounds all waits."""
OTHER_FORMAT = b"another format.."


class Configs:
    """Writes Configs: some for all, some to be refused, and a last one that halts."""

    def __init__(self, world: World) -> None:
        """Begin with the Config that the topic was formatted with."""
        self._world = world
        self._last = world.cluster.config
        self._wanted: dict[int, list[Config]] = {
            number: [] for number in range(world.plan.coordinators)
        }

    @property
    def is_over(self) -> bool:
        """Whether a Config that no process here can follow has been written."""
        return self._last.feature_level > SUPPORTED_LEVEL

    def strike(self, fault: Fault) -> None:
        """Write a Config that halts no process: one for all, or one that is refused."""
        if self.is_over:
            return
        if fault.size >= PERCENT * 2 // 3:
            self._write_misfit(fault)
            return
        level = BELOW if fault.size < PERCENT // 3 else SUPPORTED_LEVEL
        self._change(level, fault, numbers=list(self._wanted))

    def halt(self, fault: Fault) -> Sequence[int]:
        """Write a Config above all levels, perhaps not to each partition.

        Writes none if logs lose records that were read, for then no reader must halt.

        Returns:
            The coordinating partitions that get it.
        """
        if self.is_over or self._world.is_truncating:
            return ()
        first = fault.who % len(self._wanted)
        dies_early = fault.size % 2 == 1
        numbers = [first] if dies_early else list(self._wanted)
        self._change(ABOVE, fault, numbers=numbers)
        return numbers

    def _change(self, level: int, fault: Fault, *, numbers: Sequence[int]) -> None:
        world, before = self._world, self._last
        draw = chance(world.plan.seed, f"interval/{fault.number}")
        h_ms = world.plan.h_ms // draw.choice(H_DIVISORS)
        config = self._last = _next(before, level=level, h_ms=h_ms)
        world.levels.wrote(config)
        world.trace(
            f"an admin writes level {level}, interval {config.heartbeat_interval_ms} ms"
        )
        rng = chance(world.plan.seed, f"config/{fault.number}")
        longest_ms = rng.choice([world.plan.h_ms // 8, 2 * world.plan.h_ms])
        for number in numbers:
            self._wanted[number].append(config)
            late_ms = rng.randint(0, longest_ms)
            world.loop.at(world.now_ms + late_ms, partial(self._drive, number))

    def are_over(self) -> bool:
        """Return whether each partition has the last Config to be written."""
        return all(
            not wanted or self._world.levels.config(number) == wanted[-1]
            for number, wanted in self._wanted.items()
        )

    def heal(self) -> None:
        """Write a Config with the plan's interval, if another one is in force."""
        world, last = self._world, self._last
        if self.is_over or last.heartbeat_interval_ms == world.plan.h_ms:
            return
        h_ms = world.plan.h_ms
        self._last = _next(last, level=last.feature_level, h_ms=h_ms)
        world.levels.wrote(self._last)
        world.trace(f"an admin writes interval {h_ms} ms again")
        for number, wanted in self._wanted.items():
            wanted.append(self._last)
            world.loop.at(world.now_ms, partial(self._drive, number))

    def _drive(self, number: int) -> None:
        """Write the next Config, until all are accepted."""
        world, known = self._world, self._world.levels.config(number)
        generation = 0 if known is None else known.generation
        ahead = [each for each in self._wanted[number] if each.generation > generation]
        if ahead:
            place = world.cluster.place(number)
            offset = world.cluster.kafka.produce(place, encode(ahead[0]))
            level = ahead[0].feature_level
            world.trace(f"a Config of level {level} is written at {number}/{offset}")
        if ahead or world.is_truncating:
            again_ms = world.now_ms + world.plan.h_ms // 4
            world.loop.at(again_ms, partial(self._drive, number))

    def _write_misfit(self, fault: Fault) -> None:
        """Write a Config above all levels that every partition refuses."""
        world, last = self._world, self._last
        fit = replace(
            last,
            generation=last.generation + 1,
            era=last.era + 1,
            feature_level=ABOVE,
        )
        # It must be refused also by a partition that lags, and if written again.
        number = fault.who % len(self._wanted)
        # Only partition 0 demands the very next generation (PROTOCOL 4.12), and only
        # there the last era is never higher than the one in force.
        misfits = (
            replace(fit, generation=1 if number else last.generation + FAR),
            replace(fit, generation=1),
            replace(fit, era=1 if number else last.era),
            replace(fit, era=2**32 - 1),
            replace(fit, format_id=OTHER_FORMAT),
            replace(fit, cluster_id="another"),
            replace(fit, partition_count=last.partition_count + 1),
        )
        misfit = misfits[fault.size % len(misfits)]
        place = world.cluster.place(number)
        offset = world.cluster.kafka.produce(place, encode(misfit))
        world.trace(f"a Config that counts nowhere is written at {number}/{offset}")


class OrderedConfigs(Configs):
    """Writes Configs while the number of partitions may change.

    As the tools do, it writes each Config to partition 0 first, following the Config
    that partition 0 has by then. Other partitions get what partition 0 has accepted.
    """

    def __init__(self, world: World) -> None:
        """Begin with the Config that the topic was formatted with."""
        super().__init__(world)
        # Level and interval of the next Configs, and the first of these once written.
        self._asked: list[tuple[int, int]] = []
        self._sent: Config | None = None
        self._newest: Config | None = None

    def strike(self, fault: Fault) -> None:
        """Write a Config that halts no process: one for all, or one that is refused."""
        config = self._world.levels.config(0)
        if config is None:
            return  # its log has lost the first one
        self._last = config
        super().strike(fault)

    def are_over(self) -> bool:
        """Return whether each partition has the last Config to be written."""
        return not self._asked and not self._behind()

    def heal(self) -> None:
        """Write a Config with the plan's interval and all features, if it is not so."""
        world, config = self._world, self._world.levels.config(0)
        wanted = SUPPORTED_LEVEL, world.plan.h_ms
        if config is None:
            return
        if self._asked or wanted != (
            config.feature_level,
            config.heartbeat_interval_ms,
        ):
            self._asked.append(wanted)
            self._drive_first()

    def _change(self, level: int, fault: Fault, *, numbers: Sequence[int]) -> None:
        del numbers
        world = self._world
        draw = chance(world.plan.seed, f"interval/{fault.number}")
        if world.is_truncating:
            # No tool lowers the level, and below it lost records of a change stay lost.
            level = SUPPORTED_LEVEL
        self._asked.append((level, world.plan.h_ms // draw.choice(H_DIVISORS)))
        world.trace(f"an admin is to write level {level}")
        self._drive_first()

    def _write_misfit(self, fault: Fault) -> None:
        """Write it if the partition has the Config of partition 0: so it is refused."""
        number = fault.who % len(self._wanted)
        if self._world.levels.config(number) == self._last:
            super()._write_misfit(fault)

    def _drive_first(self) -> None:
        """Write the next Config to partition 0, until it is accepted."""
        world, book = self._world, self._world.levels.book(0)
        if self._sent in book:
            self._newest, self._sent = self._sent, None
            self._asked.pop(0)
            self._drive_others()
        if not self._asked:
            return
        if self._must_wait():
            world.loop.at(world.now_ms + world.plan.h_ms // 4, self._drive_first)
            return
        last = book[-1]
        if self._sent is None or self._sent.generation <= last.generation:
            level, h_ms = self._asked[0]
            self._sent = _next(last, level=level, h_ms=h_ms)
            world.levels.wrote(self._sent)
        offset = world.cluster.kafka.produce(world.cluster.place(0), encode(self._sent))
        world.trace(f"a Config of level {self._sent.feature_level} is at 0/{offset}")
        world.loop.at(world.now_ms + world.plan.h_ms // 4, self._drive_first)

    def _must_wait(self) -> bool:
        """Return whether tools write nothing now, because a log has lost records."""
        worlds = dict(enumerate(self._world.watcher.worlds))
        if not self._world.is_truncating:
            return False
        if worlds[0].config is None:
            return True
        try:
            require_newest(worlds, COORDINATION_TOPIC)
            require_no_change(worlds)
        except ClaimRejected:
            return True
        return False

    def _behind(self) -> list[int]:
        """Return the partitions in use that are behind the newest Config."""
        newest, levels = self._newest, self._world.levels
        first = levels.config(0)
        if newest is None:
            return []
        count = newest.partition_count
        if self._world.is_truncating and first is not None:
            count = min(count, first.partition_count)  # others are not in use any more
        return [
            number
            for number in range(1, count)
            if (known := levels.config(number)) is not None
            and known.generation < newest.generation
            and known.partition_count == newest.partition_count
        ]

    def _drive_others(self) -> None:
        """Write the newest Config to each other partition, until it is accepted."""
        world, newest, behind = self._world, self._newest, self._behind()
        if newest is None or not behind:
            return
        for number in () if self._must_wait() else behind:
            place = world.cluster.place(number)
            offset = world.cluster.kafka.produce(place, encode(newest))
            level = newest.feature_level
            world.trace(f"a Config of level {level} is at {number}/{offset}")
        world.loop.at(world.now_ms + world.plan.h_ms // 4, self._drive_others)


def configs_of(world: World) -> Configs:
    """Return the writer of a world's Configs."""
    is_moving = world.is_resizing and world.levels.is_active
    return OrderedConfigs(world) if is_moving else Configs(world)


def _next(before: Config, *, level: int, h_ms: int) -> Config:
    return replace(
        before,
        generation=before.generation + 1,
        era=before.era + 1,
        feature_level=level,
        heartbeat_interval_ms=h_ms,
    )
