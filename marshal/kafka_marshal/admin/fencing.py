"""Fences processes of a client in all coordinating partitions (PROTOCOL 4.13)."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from operator import attrgetter

import attrs

from kafka_marshal.admin.connection import AdminConnection
from kafka_marshal.arguments import require_name, with_plain_arguments
from kafka_marshal.engine.config_check import require_level
from kafka_marshal.engine.replica import Replica
from kafka_marshal.errors import ClaimRejected, ConfigurationError
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP, home_partition
from kafka_marshal.protocol.records import Config, FencingClient
from kafka_marshal.protocol.state import MemberState, WorldState
from kafka_marshal.protocol.types import Key


@attrs.frozen
class OwnedKey:
    """A key of a process, and how long the process may keep it.

    Attributes:
        key: The key.
        remaining_ms: Time until the owner is stale if it stops renewing, by estimate; 0
            if it is stale.
    """

    key: Key
    remaining_ms: int


@attrs.frozen(kw_only=True)
class ClientProcess:
    """One process of a client, as the log knows it.

    Attributes:
        incarnation: Identifies the process, in hex.
        host: Host on which it runs, None if it never announced itself.
        is_announced: Whether it announced itself within two heartbeat intervals.
        owned: Keys that it owns by the log, including those for which it is stale.
        fenced: Offset of its fence, by coordinating partition.
        is_fenced: Whether all coordinating partitions have its fence.
        is_silent: Whether it has neither renewed a key nor announced itself for two
            heartbeat intervals, by the wall clock of this machine. The other attributes
            are by log time, which stands still while no process appends (PROTOCOL
            4.11): if all processes have died together, each is both live and silent.
    """

    incarnation: str
    host: str | None
    is_announced: bool
    owned: tuple[OwnedKey, ...]
    fenced: dict[int, int]
    is_fenced: bool
    is_silent: bool = False

    @property
    def held(self) -> tuple[OwnedKey, ...]:
        """The keys that it owns without being stale, by estimate."""
        return tuple(each for each in self.owned if each.remaining_ms)

    @property
    def is_live(self) -> bool:
        """Whether it holds keys, or has announced itself lately."""
        return self.is_announced or bool(self.held)


@attrs.frozen(kw_only=True)
class FenceResult:
    """Result of a fence.

    Attributes:
        group_id: The group.
        client_id: The client.
        is_changed: Whether a process was fenced that was not fenced before.
        processes: The fenced processes, with the keys that they still own.
    """

    group_id: str
    client_id: str
    is_changed: bool
    processes: tuple[ClientProcess, ...]

    @property
    def held(self) -> tuple[OwnedKey, ...]:
        """The keys that others cannot claim yet, by estimate."""
        return tuple(key for process in self.processes for key in process.held)


def processes_of(
    replicas: Collection[Replica],
    owner: tuple[str, str],
    *,
    now_ms: int,
    wall_ms: int,
) -> tuple[ClientProcess, ...]:
    """Return the processes of a client that own keys, were announced or are fenced.

    Args:
        replicas: Every coordinating partition, folded to its end.
        owner: Group and client.
        now_ms: Local time, to estimate ages.
        wall_ms: Wall time, epoch ms, to find silent processes.
    """
    found: defaultdict[bytes, _Traces] = defaultdict(_Traces)
    for replica in replicas:
        world, log_ms = replica.world, replica.log_ms(now_ms)
        wall_based_ms = world.now_ms + replica.idle_ms(now_ms, wall_ms=wall_ms)
        for key, known in world.keys.items():
            by = known.owner
            if by is not None and (key.group_id, by.client_id) == owner:
                left = OwnedKey(key, known.remaining_ms(log_ms))
                found[by.incarnation].owned.append(left)
                found[by.incarnation].note(
                    is_live=known.remaining_ms(wall_based_ms) > 0
                )
        for (group, name, incarnation), member in world.soft.members.items():
            if (group, name) == owner:
                found[incarnation].host = member.record.host
                found[incarnation].is_announced = _is_recent(member, world, log_ms)
                found[incarnation].note(
                    is_live=_is_recent(member, world, wall_based_ms)
                )
        for (group, name, incarnation), offset in world.fences.items():
            if (group, name) == owner:
                found[incarnation].fenced[world.partition] = offset
    return tuple(
        ClientProcess(
            incarnation=incarnation.hex(),
            host=traces.host,
            is_announced=traces.is_announced,
            owned=tuple(sorted(traces.owned, key=attrgetter("key"))),
            fenced=traces.fenced,
            is_fenced=len(traces.fenced) == len(replicas),
            is_silent=traces.is_silent,
        )
        for incarnation, traces in sorted(found.items())
    )


@attrs.define
class _Traces:
    """Traces of one process in all coordinating partitions."""

    owned: list[OwnedKey] = attrs.field(factory=list)
    host: str | None = None
    is_announced: bool = False
    fenced: dict[int, int] = attrs.field(factory=dict)
    is_silent: bool = True

    def note(self, *, is_live: bool) -> None:
        """Note whether one of its traces shows the process alive."""
        self.is_silent &= not is_live


def _is_recent(member: MemberState, world: WorldState, log_ms: int) -> bool:
    return not member.record.draining and world.is_live(member, log_ms)


def require_fencing(group_id: str, config: Config) -> None:
    """Refuse to fence in the reserved group, or under a level without fences.

    Raises:
        ConfigurationError: It is that group, or the feature level is too low.
    """
    if group_id == CHECKPOINT_GROUP:
        raise ConfigurationError(
            f"group {CHECKPOINT_GROUP!r} owns nothing but checkpoints, whose claims "
            "end by themselves",
            setting="group_id",
        )
    require_level(config, "a fence")


def select(
    processes: Collection[ClientProcess],
    *,
    owner: tuple[str, str],
    incarnations: Collection[str] | None,
) -> list[ClientProcess]:
    """Return the processes to fence: the named ones, else all that may hold a key.

    Args:
        processes: The processes of the client.
        owner: Group and client.
        incarnations: Incarnations of the named processes in hex, or None.

    Raises:
        ClaimRejected: The log knows no such client or process.
    """
    group_id, client_id = owner
    known = {process.incarnation: process for process in processes}
    unknown = [each for each in incarnations or () if each not in known]
    if not known or unknown:
        which = f"process {unknown[0]!r} of client" if unknown else "client"
        raise ClaimRejected(
            f"the log knows no {which} {client_id!r} in group {group_id!r}; the "
            "clients of a sidecar are not in the log: fence the sidecar, or stop the "
            f"client on its host; see: marshal clients list --group {group_id}",
            reason="unknown_client",
        )
    if incarnations is not None:
        return [known[each] for each in incarnations]
    return [process for process in processes if process.owned or process.is_announced]


class Fencing(AdminConnection):
    """Fences of clients, as a part of ``Admin``; for one thread."""

    @with_plain_arguments
    def client_processes(
        self, group_id: str, client_id: str
    ) -> tuple[ClientProcess, ...]:
        """Return the processes of a client that the log knows, fenced ones included."""
        require_name("client_id", client_id)
        require_name("group_id", group_id)
        return self._processes(group_id, client_id, self._settled())

    @with_plain_arguments
    def fence_client(
        self,
        group_id: str,
        client_id: str,
        *,
        incarnations: Collection[str] | None = None,
        reason: str | None = None,
        wait_ms: int = 0,
        dry_run: bool = False,
    ) -> FenceResult:
        """End the claims of a client's processes for good, even if these hang.

        A process that reads its fence stops and releases its keys at once. The keys of
        a process that hangs are free once it is stale, at most two heartbeat intervals
        after the fence. A new process of the client claims as usual. Repeating the call
        is harmless.

        Args:
            group_id: The group.
            client_id: The client.
            incarnations: Only these processes, in hex; by default all that own keys or
                announced themselves lately.
            reason: Stored in the log, for people.
            wait_ms: How long to wait until the processes hold no keys.
            dry_run: Only check: write nothing, do not wait, and return the processes
                that would be fenced and the keys that they hold.

        Raises:
            ClaimRejected: The log knows no such client, or no such process of it.
            ConfigurationError: The topic has a feature level below 2.
            LogUnwritable: A coordinating partition refused the fence.
            DeadlineExceeded: No verdict in time; repeating the call completes it.
        """
        require_name("client_id", client_id)
        require_name("group_id", group_id)
        config = self._settled()
        require_fencing(group_id, config)
        owner = (group_id, client_id)
        chosen = select(
            self._processes(*owner, config), owner=owner, incarnations=incarnations
        )
        is_changed = not all(process.is_fenced for process in chosen)
        if not dry_run:
            count = config.partition_count
            is_changed = self._write_fences(chosen, owner, count=count, reason=reason)
        # A fence drops the announcement, the only record that names the host.
        hosts = {process.incarnation: process.host for process in chosen}

        def result() -> FenceResult:
            found = self._processes(*owner, config)
            return FenceResult(
                group_id=group_id,
                client_id=client_id,
                is_changed=is_changed,
                processes=tuple(
                    attrs.evolve(each, host=each.host or hosts[each.incarnation])
                    for each in found
                    if each.incarnation in hosts
                ),
            )

        if wait_ms and not dry_run:
            self._follow().follow_until(lambda: not result().held, wait_ms)
        return result()

    def _write_fences(
        self,
        processes: Iterable[ClientProcess],
        owner: tuple[str, str],
        *,
        count: int,
        reason: str | None,
    ) -> bool:
        """Write the missing fences: on the group's home first, then elsewhere.

        Returns:
            Whether anything was written.
        """
        group_id, client_id = owner
        home = home_partition(group_id, partition_count=count)
        places = [
            (t, each)
            for each in processes
            for t in range(count)
            if t not in each.fenced
        ]
        for is_home in (True, False):
            sent = self._write(
                *(
                    (t, self._fence(owner, process, reason))
                    for t, process in places
                    if (t == home) is is_home
                )
            )
            for item in sent:
                if not item.is_accepted:
                    raise item.unwritable(
                        f"the fence of client {client_id!r}",
                        left="other partitions may have it; fencing again is harmless",
                    )
        return bool(places)

    def _fence(
        self, owner: tuple[str, str], process: ClientProcess, reason: str | None
    ) -> FencingClient:
        return FencingClient(
            **self._sender.fields(owner[0]),
            fenced=owner[1],
            fenced_incarnation=bytes.fromhex(process.incarnation),
            reason=reason,
        )

    def _processes(
        self, group_id: str, client_id: str, config: Config
    ) -> tuple[ClientProcess, ...]:
        follower, clock = self._follow(), self._clock
        replicas = [follower.replicas[t] for t in range(config.partition_count)]
        owner, now_ms = (group_id, client_id), clock.now_ms()
        return processes_of(replicas, owner, now_ms=now_ms, wall_ms=clock.wall_ms())
