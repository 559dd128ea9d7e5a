"""Client registration: groups, clients, restarts and replacements."""

import errno
import socket
from collections import Counter
from functools import partial
from itertools import zip_longest
from pathlib import Path

from kafka_marshal.admin.formatting import HEARTBEAT_MS_LONGEST
from kafka_marshal.config import Membership
from kafka_marshal.deadline import Deadline
from kafka_marshal.engine import Session, Subscription
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
from kafka_marshal.sidecar.clients import Client
from kafka_marshal.sidecar.events import EventBuffer
from kafka_marshal.sidecar.group import DIED, LEFT, SILENT, LocalGroup
from kafka_marshal.sidecar.lease_journal import FILE_NAME, JournaledClient, LeaseJournal
from kafka_marshal.sidecar.lease_table import SharedSubscription, UnexpiredLease
from kafka_marshal.sidecar.process_monitor import Caller, DeathWatch, Peer
from kafka_marshal.subscribing import new_subscription

GROUPS_MAX = 1_000
CLIENTS_MAX = 10_000
_FULL = {errno.ENOSPC, errno.EDQUOT}


class ClientRegistry:
    """The groups of one sidecar and their clients.

    Used under the engine's lock, except ``restore`` and ``subscribe``, which look up
    topics and take the lock themselves.

    Args:
        runtime: The engine with its connections.
        client_id: Name of this sidecar in the log.
        state_dir: Directory of identities and journals; None keeps neither.
        watch: Reports the death of clients' processes.
        boot_id: Id of the boot that local times belong to.
        member: Labels and role of the sidecar as a member of its groups.
        handoff_ms: How long a group's last client continues to work when it leaves.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        client_id: str,
        state_dir: Path | None,
        watch: DeathWatch,
        boot_id: str,
        member: Membership,
        handoff_ms: int = 0,
    ) -> None:
        self.groups: dict[str, LocalGroup] = {}
        self.refusals: Counter[tuple[str, str]] = Counter()
        self.incarnation = runtime.ports.entropy.random_bytes(16).hex()
        self._runtime = runtime
        self._engine = runtime.engine
        self._context = runtime.engine.context
        self._client_id = client_id
        self._state_dir = state_dir
        self._watch = watch
        self._boot_id = boot_id
        self._member = member
        self._handoff_ms = handoff_ms
        # A full disk is reported once.
        self._is_disk_full = False

    # --- groups

    def restore(self, *, timeout_ms: int) -> int:
        """Restore groups and clients from the journals; return how many clients."""
        if self._state_dir is None:
            return 0
        deadline = Deadline(timeout_ms, self._context.ports.clock.now_ms)
        home = self._state_dir / self._context.settled.format_id.hex()
        paths = sorted(home.glob(f"g=*/c={self._client_id}/{FILE_NAME}"))
        found = [path.parent for path in paths if self._must_restore(path.parent)]
        for folder in found[:GROUPS_MAX]:
            group_id = folder.parent.name.removeprefix("g=")
            with self._engine.changed:
                group = self.open_group(group_id, restore_clients=True)
                clients = list(group.table.clients.values())
            for client in clients:
                for name, spec in list(client.specs.items()):
                    left_ms = max(1, deadline.left_ms)
                    self._resubscribe(
                        group, client, name=name, spec=spec, left_ms=left_ms
                    )
        with self._engine.changed:
            return sum(len(group.table.clients) for group in self.groups.values())

    def _must_restore(self, folder: Path) -> bool:
        """Return whether a group's journal has clients to restore, or is damaged.

        The others are read once a client registers. Directories of groups are never
        removed, so most of them may be of groups that nobody uses any more.
        """
        journal = LeaseJournal(folder, boot_id=self._boot_id)
        clients = journal.load()
        return journal.is_damaged or any(map(_is_restored, clients))

    def _resubscribe(
        self,
        group: LocalGroup,
        client: Client,
        *,
        name: str,
        spec: api.SubscriptionSpec,
        left_ms: int,
    ) -> None:
        """Restore a subscription of a client of the previous process."""
        try:
            self.subscribe(group, client, name=name, spec=spec, timeout_ms=left_ms)
        except MarshalError as error:
            # The client subscribes again once it is back; no claim is resumed before.
            self._context.observe(
                "subscription_not_restored",
                {"client": client.client_id, "error": error},
            )
            with self._engine.changed:
                client.specs.pop(name, None)

    def open_group(self, group_id: str, *, restore_clients: bool = False) -> LocalGroup:
        """Return a group, opened if necessary.

        Unexpired leases of its journal are always kept. Its clients are restored only
        on request, because their topics must be looked up then; otherwise they register
        again.

        Raises:
            IdentityConflict: Another sidecar of this name runs on this machine.
            ConfigurationError: The state directory cannot be used.
            CoordinationError: Its disk is full, or too many groups are in use.
        """
        group = self.groups.get(group_id)
        if group is not None and group.failure is None:
            return group
        if group is not None:
            self.close(group)
        if len(self.groups) >= GROUPS_MAX:
            raise CoordinationError(
                f"{GROUPS_MAX} groups are in use at this sidecar, the most; end the "
                "clients of some"
            )
        identity, folder = self._take_identity(group_id)
        journal = LeaseJournal(folder, boot_id=self._boot_id)
        journaled = journal.load()
        if journal.is_damaged:
            # Without the journal no claim may be resumed (PROTOCOL 12).
            self._context.observe("lease_journal_damaged", {"group": group_id})
            identity = None if identity is None else identity.forget()
        entropy = self._runtime.ports.entropy
        owner = Owner(self._client_id, entropy.random_bytes(16))
        claimant = Claimant(owner, group_id, master=entropy.random_bytes(32))
        if identity is not None:
            self._remember(identity, claimant)
        session = Session(
            self._context,
            claimant,
            host=socket.gethostname(),
            lives=() if identity is None else identity.lives,
            can_plan=self._member.can_plan,
            labels=self._member.labels,
        )
        group = LocalGroup(
            self._context,
            session,
            journal=journal,
            identity=identity,
            refusals=self.refusals,
            restarts=self._member.restarts,
            handoff_ms=0 if self._member.restarts else self._handoff_ms,
        )
        self._engine.add_session(session)
        self.groups[group_id] = group
        for each in journaled:
            self._restore_unexpired(group, each)
            if restore_clients and _is_restored(each):
                self._restore_client(group, each)
        return group

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
            raise self._unusable(error, group_id) from error
        self._is_disk_full = False
        return identity, identity.folder

    def _remember(self, identity: Identity, claimant: Claimant) -> None:
        """Store a new incarnation; if that fails, make the next process resume none."""
        group_id = claimant.group_id
        try:
            identity.remember(claimant.owner.incarnation, master=claimant.master)
        except OSError as error:
            try:
                # Nor may it resume an earlier one: if its journal was damaged, the
                # journal of this process lacks deadlines of its clients.
                identity.erase()
            except OSError as worse:
                identity.close()
                raise self._unusable(worse, group_id) from worse
            self._report(error, group_id)

    def _report(self, error: OSError, group_id: str) -> None:
        fields = {"group": group_id, "error": error}
        self._context.observe("identity_unavailable", fields)

    def _unusable(self, error: OSError, group_id: str) -> MarshalError:
        """Return the error for an unusable directory; a full disk is temporary."""
        what = f"state_dir {str(self._state_dir)!r} cannot be used: {error}"
        if error.errno not in _FULL:
            return ConfigurationError(
                f"{what}; name a writable directory", setting="state_dir"
            )
        if not self._is_disk_full:
            self._report(error, group_id)
        self._is_disk_full = True
        return CoordinationError(f"{what}; free some space there")

    def _restore_unexpired(self, group: LocalGroup, journaled: JournaledClient) -> None:
        """Reserve the keys that a client of the previous process may still use."""
        now_ms = self._context.now_ms
        # The present interval may be lower than the one that the deadlines are of.
        latest_ms = now_ms + 2 * HEARTBEAT_MS_LONGEST
        for key in journaled.keys:
            until_ms = min(key.until_ms, latest_ms)
            if now_ms < until_ms:
                group.table.unexpired[Key(group.group_id, key.topic, key.partition)] = (
                    UnexpiredLease(
                        client_id=journaled.client_id,
                        instance=journaled.instance,
                        epoch=key.epoch,
                        until_ms=until_ms,
                    )
                )

    def _restore_client(self, group: LocalGroup, journaled: JournaledClient) -> None:
        """Restore a client as away, until its first request."""
        client = self._new_client(
            group,
            journaled.client_id,
            api.RegisterRequest(instance=journaled.instance, beat_ms=journaled.beat_ms),
            peer=Peer(journaled.pid, None, journaled.started),
            children=journaled.children,
        )
        client.mark_away(self._context.now_ms)
        client.specs = dict(journaled.specs)
        client.generation = journaled.generation
        # Earlier releases wrote no numbers of requests.
        claims = zip_longest(journaled.claims, journaled.claim_requests)
        for (topic, partition), request in claims:
            key = Key(group.group_id, topic, partition)
            client.accept_claim_request(key, request, is_on=True)
            group.add_single_claim(client, key)

    def close_idle(self) -> None:
        """Leave the groups that nobody has used for a heartbeat interval."""
        for group in list(self.groups.values()):
            if group.failure is None and group.is_idle(self._context.now_ms):
                group.session.begin_close(release=True)
                self.close(group)

    def close(self, group: LocalGroup) -> None:
        """Stop driving a group."""
        group.finish_journal()
        self._engine.remove_session(group.session)
        if group.identity is not None:
            group.identity.close()
        self.groups.pop(group.group_id, None)

    # --- clients

    def register(
        self,
        group_id: str,
        client_id: str,
        *,
        registration: api.RegisterRequest,
        peer: Peer,
    ) -> bool:
        """Register a process; return whether it was registered already.

        Raises:
            IdentityConflict: Another process of that name is alive.
            CoordinationError: The limit of clients or groups is reached.
        """
        group = self.open_group(group_id)
        client = group.table.clients.get(client_id)
        was_known = client is not None and client.instance == registration.instance
        if client is not None and was_known:
            self._reconnect(group, client, registration, peer=peer)
        else:
            if client is not None:
                self._replace(group, client)
            self._new_client(group, client_id, registration, peer=peer)
        self._engine.act(group.session)
        return was_known

    def note_contact(self, who: Caller) -> None:
        """Record that a client is alive. Needs no lock.

        While the engine is busy, for example with thousands of partitions, heartbeats
        may be refused. Their client does not count as silent, and keeps its leases.
        """
        group = self.groups.get(who.group_id)
        client = None if group is None else group.table.clients.get(who.client_id)
        if client is not None and client.instance == who.instance:
            client.seen_ms = self._context.now_ms

    def _new_client(
        self,
        group: LocalGroup,
        client_id: str,
        registration: api.RegisterRequest,
        *,
        peer: Peer,
        children: tuple[int, ...] = (),
    ) -> Client:
        before = group.table.clients.get(client_id)
        count = sum(len(other.table.clients) for other in self.groups.values())
        if before is None and count >= CLIENTS_MAX:
            raise CoordinationError(
                f"{CLIENTS_MAX} clients are registered at this sidecar, the most; end "
                "some"
            )
        client = Client(
            client_id=client_id,
            instance=registration.instance,
            beat_ms=registration.beat_ms,
            peer=peer,
            events=EventBuffer(
                self.incarnation,
                snapshot=lambda: group.snapshot(client),
                begin=self._context.now_ms,
            ),
            seen_ms=self._context.now_ms,
            children=children,
        )
        if before is not None:
            # The place was reserved for this process, so no partition moves.
            client.specs = before.specs
            before.close()
        group.add(client)
        self._watch_process(group, client)
        return client

    def _reconnect(
        self,
        group: LocalGroup,
        client: Client,
        registration: api.RegisterRequest,
        *,
        peer: Peer,
    ) -> None:
        client.seen_ms = self._context.now_ms
        client.beat_ms = registration.beat_ms
        group.stay(client)
        client.reserved_until_ms = None
        if (peer.pid, peer.started) != (client.peer.pid, client.peer.started):
            client.peer = peer
            # The new process numbers its requests from the start.
            client.claim_requests.clear()
            if client.watched is not None:
                # Their ids may be those of other processes by now.
                client.children = client.watched.without_dead(client.children)
                client.watched.close()
            self._watch_process(group, client)
        for shared in list(group.table.subscriptions):
            group.reconcile(shared)

    def _replace(self, group: LocalGroup, client: Client) -> None:
        """Remove a client so that another process of its name can register.

        Raises:
            IdentityConflict: Its process is not known dead, and may still use a key.
        """
        now_ms = self._context.now_ms
        if client.reserved_until_ms is not None:
            return  # it announced a restart
        has_nothing = not client.leases and not group.table.has_unexpired(client)
        if client.is_leaving and has_nothing:
            group.evict(client, reason=LEFT)  # before the next round does
            return
        until = [lease.sent_until_ms for lease in client.leases.values()]
        until += [
            unexpired.until_ms
            for unexpired in group.table.unexpired.values()
            if unexpired.is_of(client)
        ]
        is_dead = client.watched is not None and client.watched.is_dead
        is_silent = client.is_away(now_ms) and now_ms >= max(until, default=0)
        if is_dead or is_silent:
            self._evict(group, client, reason=DIED if is_dead else SILENT)
            return
        process = (
            "a process" if client.peer.pid is None else f"process {client.peer.pid}"
        )
        raise IdentityConflict(
            f"client {client.client_id!r} of group {group.group_id!r} is registered at "
            f"this sidecar by {process} of this host, which is not known to be dead; "
            "stop it, or use another client_id",
            holder=client.client_id,
            host=socket.gethostname(),
            age_ms=now_ms - client.seen_ms,
        )

    def _watch_process(self, group: LocalGroup, client: Client) -> None:
        peer = client.peer
        if peer.pid is None or peer.started is None:
            client.watched = None
            return
        # The children from the start: a client whose own process is dead already would
        # be evicted before they are added.
        client.watched = self._watch.watch(
            peer.pid,
            peer.started,
            children=client.children,
            on_dead=partial(self._on_dead, group, client),
        )

    def _on_dead(self, group: LocalGroup, client: Client) -> None:
        """Evict a client whose process and children are dead."""
        with self._engine.changed:
            is_here = group.table.clients.get(client.client_id) is client
            # While this waited for the lock, another process may have continued.
            if is_here and client.watched is not None and client.watched.is_dead:
                self._evict(group, client, reason=DIED)
                self._engine.act(group.session)

    def _evict(self, group: LocalGroup, client: Client, *, reason: str) -> None:
        if client.reserved_until_ms is not None:
            return  # it announced a restart
        fields = client.fields(group.group_id) | {"reason": reason}
        if reason == SILENT:
            self._context.observe("client_silent", fields)
        else:
            self._context.observe("client_gone", fields)
        group.evict(client, reason=reason)

    # --- subscriptions

    def subscribe(
        self,
        group: LocalGroup,
        client: Client,
        *,
        name: str,
        spec: api.SubscriptionSpec,
        timeout_ms: int,
    ) -> SharedSubscription:
        """Add a client to a subscription; looks up topics without the lock.

        Raises:
            ConfigurationError: A setting is invalid, or differs from that of other
                clients.
            InvalidTransition: The client has ended the subscription meanwhile.
            LogUnreadable: A topic does not exist.
        """
        config, request = spec.config(), object()
        with self._engine.changed:
            shared = self._find_subscription(group, client, name=name, spec=spec)
            if shared is not None:
                return shared
            client.lookups[request] = name
        try:
            subscription = new_subscription(
                config,
                self._runtime.ports.data,
                group_id=group.group_id,
                coordination_topic=self._runtime.description.name,
                timeout_ms=timeout_ms,
            )
            with self._engine.changed:
                group.find(client.client_id, client.instance)
                if request not in client.lookups:
                    raise InvalidTransition(
                        f"subscription {name!r} of client {client.client_id!r} was "
                        "ended while its topics were looked up; subscribe again"
                    )
                shared = self._find_subscription(group, client, name=name, spec=spec)
                if shared is None:
                    shared = self._add_subscription(group, spec, subscription)
                    group.add_subscriber(shared, client, name=name, spec=spec)
                return shared
        finally:
            with self._engine.changed:
                client.lookups.pop(request, None)

    def _find_subscription(
        self,
        group: LocalGroup,
        client: Client,
        *,
        name: str,
        spec: api.SubscriptionSpec,
    ) -> SharedSubscription | None:
        present = group.table.subscription_of(client, name)
        if present is not None and not present.is_for(spec):
            raise ConfigurationError(
                f"subscription {name!r} of client {client.client_id!r} consumes other "
                "topics; end it first, or use another name",
                setting="topics",
            )
        for shared in group.table.subscriptions:
            if shared.is_for(spec):
                group.add_subscriber(shared, client, name=name, spec=spec)
                return shared
        return None

    def _add_subscription(
        self, group: LocalGroup, spec: api.SubscriptionSpec, subscription: Subscription
    ) -> SharedSubscription:
        try:
            return group.add_subscription(spec, subscription)
        except InvalidTransition as error:
            raise ConfigurationError(
                f"{error} (clients of one sidecar share one subscription for topics "
                "that overlap)",
                setting="topics",
            ) from error


def _is_restored(journaled: JournaledClient) -> bool:
    """Return whether a restart restores a client: it has more than old deadlines."""
    return bool(journaled.specs or journaled.claims)
