"""Who comes and goes: groups opened, clients registered, expected back, buried."""

import socket
from functools import partial
from pathlib import Path

from kafka_marshal.engine import Subscription
from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    IdentityConflict,
    InvalidTransition,
    MarshalError,
)
from kafka_marshal.identity import Identity
from kafka_marshal.protocol.claiming import Claimant
from kafka_marshal.protocol.types import Key, Owner
from kafka_marshal.remote import api
from kafka_marshal.runtime import Runtime
from kafka_marshal.sidecar.assignment import (
    SharedSubscription,
    UnexpiredLease,
    settings_of,
    start_rule_of,
)
from kafka_marshal.sidecar.clients import Client
from kafka_marshal.sidecar.events import EventBuffer
from kafka_marshal.sidecar.group import DIED, LEFT, SILENT, LocalGroup
from kafka_marshal.sidecar.hosting import HostSession
from kafka_marshal.sidecar.lease_journal import FILE_NAME, JournaledClient, LeaseJournal
from kafka_marshal.sidecar.process_monitor import DeathWatch, Peer

GROUPS_MAX = 1_000
CLIENTS_MAX = 10_000


class ClientRegistry:
    """The groups of one sidecar and their clients.

    Called under the engine's lock, but for ``recover`` and ``enroll``, which look
    topics up and take it themselves.

    Args:
        runtime: The engine with its connections.
        client_id: Name of this sidecar in the log.
        state_dir: Where identities and promises are kept, None for nowhere.
        watch: Tells when a client's process is dead.
        boot_id: Which boot local times belong to.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        client_id: str,
        state_dir: Path | None,
        watch: DeathWatch,
        boot_id: str,
    ) -> None:
        self.hosts: dict[str, LocalGroup] = {}
        self.incarnation = runtime.ports.entropy.random_bytes(16).hex()
        self._runtime = runtime
        self._engine = runtime.engine
        self._context = runtime.engine.context
        self._client_id = client_id
        self._state_dir = state_dir
        self._watch = watch
        self._boot_id = boot_id

    # --- groups

    def recover(self, *, timeout_ms: int) -> int:
        """Take up what was promised; see ``Hub.recover``."""
        if self._state_dir is None:
            return 0
        deadline_ms = self._context.now_ms + timeout_ms
        home = self._state_dir / self._context.settled.format_id.hex()
        found = sorted(home.glob(f"g=*/c={self._client_id}/{FILE_NAME}"))
        for path in found[:GROUPS_MAX]:
            group_id = path.parent.parent.name.removeprefix("g=")
            with self._engine.changed:
                host = self.open(group_id, expects_clients=True)
                clients = list(host.books.clients.values())
            for client in clients:
                for name, wants in list(client.wants.items()):
                    left_ms = max(1, deadline_ms - self._context.now_ms)
                    self._restore(host, client, name=name, wants=wants, left_ms=left_ms)
        with self._engine.changed:
            return sum(len(host.books.clients) for host in self.hosts.values())

    def _restore(
        self,
        host: LocalGroup,
        client: Client,
        *,
        name: str,
        wants: api.Wants,
        left_ms: int,
    ) -> None:
        """Pursue again what a client of an earlier life wanted."""
        try:
            self.enroll(host, client, name=name, wants=wants, timeout_ms=left_ms)
        except MarshalError as error:
            # It says so itself once it is back; until then nothing is resumed.
            self._context.observe(
                "subscription_not_restored",
                {"client": client.client_id, "error": error},
            )
            with self._engine.changed:
                client.wants.pop(name, None)

    def open(self, group_id: str, *, expects_clients: bool = False) -> LocalGroup:
        """Return a group, opened where nobody was here before.

        What was promised in it is kept in any case. Its clients are only expected
        back where what they consume is looked up as well: else they say so anew.

        Raises:
            IdentityConflict: Another sidecar of this name runs on this machine.
            ConfigurationError: The state directory cannot be used.
        """
        host = self.hosts.get(group_id)
        if host is not None and host.failure is None:
            return host
        if host is not None:
            self.close(host)
        if len(self.hosts) >= GROUPS_MAX:
            raise CoordinationError(
                f"{GROUPS_MAX} groups are in use at this sidecar; end some of them"
            )
        identity, folder = self._take_identity(group_id)
        promises = LeaseJournal(folder, boot_id=self._boot_id)
        promised = promises.load()
        if promises.is_damaged:
            # Who cannot know what was promised resumes nothing (PROTOCOL 12).
            self._context.observe("lease_journal_damaged", {"group": group_id})
            identity = None if identity is None else identity.forget()
        entropy = self._runtime.ports.entropy
        owner = Owner(self._client_id, entropy.random_bytes(16))
        master = entropy.random_bytes(32)
        session = HostSession(
            self._context,
            Claimant(owner, group_id, master=master),
            host=socket.gethostname(),
            lives=() if identity is None else identity.lives,
        )
        host = LocalGroup(self._context, session, promises=promises, identity=identity)
        self._engine.add_session(session)
        if identity is not None:
            identity.remember(owner.incarnation, master=master)
        self.hosts[group_id] = host
        for each in promised:
            self._keep(host, each)
            if expects_clients and (each.wants or each.claims):
                self._expect(host, each)
        return host

    def _take_identity(self, group_id: str) -> tuple[Identity | None, Path | None]:
        if self._state_dir is None:
            return None, None
        try:
            identity = Identity.take(
                self._state_dir,
                domain=self._context.settled.format_id.hex(),
                group_id=group_id,
                client_id=self._client_id,
            )
        except OSError as error:
            raise ConfigurationError(
                f"state_dir {str(self._state_dir)!r} cannot be used: {error}; name a "
                "writable directory",
                setting="state_dir",
            ) from error
        return identity, identity.folder

    def _keep(self, host: LocalGroup, promised: JournaledClient) -> None:
        """Keep what a client was promised from all others."""
        now_ms = self._context.now_ms
        latest_ms = now_ms + 2 * self._context.heartbeat_interval_ms
        for key in promised.keys:
            until_ms = min(key.until_ms, latest_ms)
            if now_ms < until_ms:
                host.books.reserves[Key(host.group_id, key.topic, key.partition)] = (
                    UnexpiredLease(
                        promised.client_id, promised.instance, key.epoch, until_ms
                    )
                )

    def _expect(self, host: LocalGroup, promised: JournaledClient) -> None:
        """Take up a client of an earlier life, silent until it is heard of."""
        client = self._new_client(
            host,
            promised.client_id,
            api.Registration(instance=promised.instance, beat_ms=promised.beat_ms),
            peer=Peer(promised.pid, None, promised.started),
        )
        client.note_absence(self._context.now_ms)
        client.wants = dict(promised.wants)
        self.set_children(client, promised.children)
        for topic, partition in promised.claims:
            host.want(client, Key(host.group_id, topic, partition))

    def close_idle(self) -> None:
        """Leave the groups that nobody has used for an H."""
        for host in list(self.hosts.values()):
            if host.failure is None and host.is_idle(self._context.now_ms):
                host.session.begin_close(release=True)
                self.close(host)

    def close(self, host: LocalGroup) -> None:
        """Stop driving a group."""
        self._engine.remove_session(host.session)
        if host.identity is not None:
            host.identity.close()
        self.hosts.pop(host.group_id, None)

    # --- clients

    def register(
        self, group_id: str, client_id: str, *, said: api.Registration, peer: Peer
    ) -> bool:
        """Take a process in; return whether it was here before.

        Raises:
            IdentityConflict: Another process of that name is alive.
            CoordinationError: There are too many.
        """
        self.close_idle()
        host = self.open(group_id)
        client = host.books.clients.get(client_id)
        was_known = client is not None and client.instance == said.instance
        if client is not None and was_known:
            self._welcome_back(host, client, said, peer=peer)
        else:
            if client is not None:
                self._succeed(host, client)
            self._new_client(host, client_id, said, peer=peer)
        self._engine.act(host.session)
        return was_known

    def _new_client(
        self, host: LocalGroup, client_id: str, said: api.Registration, *, peer: Peer
    ) -> Client:
        count = sum(len(other.books.clients) for other in self.hosts.values())
        if count >= CLIENTS_MAX:
            raise CoordinationError(
                f"{CLIENTS_MAX} clients are registered at this sidecar; end some"
            )
        before = host.books.clients.get(client_id)
        client = Client(
            client_id,
            said.instance,
            said.beat_ms,
            peer,
            EventBuffer(
                self.incarnation,
                snapshot=lambda: host.snapshot(client),
                begin=self._context.now_ms,
            ),
            self._context.now_ms,
        )
        if before is not None:
            # Its place was kept for this process: nothing moves.
            client.wants = before.wants
            before.ring.close()
        host.add(client)
        self._watch_process(host, client)
        return client

    def _welcome_back(
        self, host: LocalGroup, client: Client, said: api.Registration, *, peer: Peer
    ) -> None:
        client.seen_ms = self._context.now_ms
        client.beat_ms = said.beat_ms
        client.is_leaving = False
        client.kept_until_ms = None
        if (peer.pid, peer.started) != (client.peer.pid, client.peer.started):
            client.peer = peer
            if client.watched is not None:
                client.watched.close()
            self._watch_process(host, client)
        for pool in list(host.books.pools):
            host.settle(pool)

    def _succeed(self, host: LocalGroup, client: Client) -> None:
        """Make room for another process of a client's name.

        Raises:
            IdentityConflict: The one before it is alive, by all that is known.
        """
        now_ms = self._context.now_ms
        if client.kept_until_ms is not None:
            return  # it said that it would be back
        has_nothing = not client.loans and not host.books.is_promised(client)
        if client.is_leaving and has_nothing:
            host.bury(client, reason=LEFT)  # the next round would have
            return
        promised = [loan.told_ms for loan in client.loans.values()]
        promised += [
            reserve.until_ms
            for reserve in host.books.reserves.values()
            if reserve.instance == client.instance
        ]
        is_dead = client.watched is not None and client.watched.is_dead
        is_silent = client.is_away(now_ms) and now_ms >= max(promised, default=0)
        if is_dead or is_silent:
            self._bury(host, client, reason=DIED if is_dead else SILENT)
            return
        who = "a process" if client.peer.pid is None else f"process {client.peer.pid}"
        raise IdentityConflict(
            f"client {client.client_id!r} of group {host.group_id!r} is {who} of this "
            "host that is registered at this sidecar and not known dead; stop it, or "
            "use another client_id",
            holder=client.client_id,
            host=socket.gethostname(),
            age_ms=now_ms - client.seen_ms,
        )

    def _watch_process(self, host: LocalGroup, client: Client) -> None:
        peer = client.peer
        if peer.pid is None or peer.started is None:
            client.watched = None
            return
        client.watched = self._watch.watch(
            peer.pid, peer.started, on_dead=partial(self._on_dead, host, client)
        )

    def _on_dead(self, host: LocalGroup, client: Client) -> None:
        """Take that a client's process and its children are known dead."""
        with self._engine.changed:
            if host.books.clients.get(client.client_id) is client:
                self._bury(host, client, reason=DIED)
                self._engine.act(host.session)

    def _bury(self, host: LocalGroup, client: Client, *, reason: str) -> None:
        if client.kept_until_ms is not None:
            return  # it said that it would end, and be back
        fields = {
            "group": host.group_id,
            "client": client.client_id,
            "pid": client.peer.pid,
            "partitions": len(client.loans),
            "reason": reason,
        }
        self._context.observe("client_gone", fields)
        host.bury(client, reason=reason)

    def set_children(self, client: Client, pids: tuple[int, ...]) -> None:
        """Have these processes, and no others, count as the client's own."""
        client.children = pids
        if client.watched is not None:
            client.watched.replace(pids)

    # --- wishes

    def enroll(
        self,
        host: LocalGroup,
        client: Client,
        *,
        name: str,
        wants: api.Wants,
        timeout_ms: int,
    ) -> SharedSubscription:
        """Have a client take part in what it wants; looks up without the lock.

        Raises:
            ConfigurationError: A setting is impossible, or not that of others.
            LogUnreadable: A topic does not exist.
        """
        settings = settings_of(wants)
        with self._engine.changed:
            pool = self._find_pool(host, client, name=name, wants=wants)
            if pool is not None:
                return pool
        subscription = settings.subscription(
            host.group_id,
            self._runtime.ports.data,
            coordination_topic=self._runtime.description.name,
            timeout_ms=timeout_ms,
        )
        subscription.start_rule = start_rule_of(wants)
        with self._engine.changed:
            host.find(client.client_id, client.instance)
            pool = self._find_pool(host, client, name=name, wants=wants)
            if pool is None:
                pool = self._add_pool(host, wants, subscription)
                host.join_pool(pool, client, name=name, wants=wants)
            return pool

    def _find_pool(
        self, host: LocalGroup, client: Client, *, name: str, wants: api.Wants
    ) -> SharedSubscription | None:
        present = host.books.pool_of(client, name)
        if present is not None and not present.is_for(wants):
            raise ConfigurationError(
                f"subscription {name!r} of client {client.client_id!r} consumes other "
                "topics; end it first, or use another name",
                setting="topics",
            )
        for pool in host.books.pools:
            if pool.is_for(wants):
                host.join_pool(pool, client, name=name, wants=wants)
                return pool
        return None

    def _add_pool(
        self, host: LocalGroup, wants: api.Wants, subscription: Subscription
    ) -> SharedSubscription:
        try:
            return host.add_pool(wants, subscription)
        except InvalidTransition as error:
            raise ConfigurationError(
                f"{error} (clients of one sidecar share one subscription for topics "
                "that overlap)",
                setting="topics",
            ) from error
