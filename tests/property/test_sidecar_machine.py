"""A sidecar, its clients and a rival on another host, driven at random.

At every instant at most one of them may use a key by its own deadlines, and no two
processes ever use one token (PROTOCOL 12; docs/ARCHITECTURE.md, The sidecar).
"""

import contextlib
import tempfile
from pathlib import Path

from enginekit import spec, world
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from sidecarkit import BEAT_MS, Local, Machine

from kafka_marshal.errors import (
    ClaimLost,
    ClaimRejected,
    CoordinationError,
    IdentityConflict,
    LogUnwritable,
)
from kafka_marshal.remote import api
from kafka_marshal.sidecar.grants import numbered_request

# Errors of a client whose process, or whose whole group, is no longer registered.
LOST = (ClaimLost, LogUnwritable)
NAMES = ("a", "b")
KEYS = 3
H_MS = 1_500
STEP_MS = 20
WHO = st.sampled_from(NAMES)
AFTER = st.sampled_from([0, 20, 100, 400, 1_000])
WHILE = st.sampled_from([100, 600, H_MS, 3 * H_MS])
REASON = st.sampled_from(["shutdown", "restart", "downscale"])


def warm(partition, position, from_client):
    """Warm up at once."""


class Sidecars(RuleBasedStateMachine):
    """The processes, and which may use a key by the deadlines sent to them."""

    @initialize(warms=st.sets(WHO))
    def begin(self, warms):
        self.warms = warms
        self.folder = tempfile.TemporaryDirectory()
        self.cluster = world(partitions=2, records=[3] * KEYS, h=H_MS)
        self.machine = Machine(self.cluster, state_dir=Path(self.folder.name))
        self.is_up = True
        self.clients = {}
        self.pids = 0
        self.users = {}
        self.subscribed = set()
        self.rival = None
        for name in NAMES:
            self.start(name)

    def start(self, name):
        self.pids += 1
        with contextlib.suppress(IdentityConflict):
            self.clients[name] = Local(self.machine, name, pid=self.pids)
            self.subscribe(name)

    def subscribe(self, name):
        # A sidecar that is cut off from the cluster cannot look up topics.
        client = self.clients[name]
        with contextlib.suppress(CoordinationError):
            client.subscribe(warms=name in self.warms)
            self.subscribed.add(client)

    def teardown(self):
        """End all faults, and require that every key is used again (11, L6)."""
        if not hasattr(self, "folder"):
            return
        for name in NAMES:
            if name not in self.clients:
                self.start(name)
        for _ in range(8 * H_MS // 200):
            self.pass_time(200, NAMES)
            used = [client.valid for client in self.clients.values()]
            if self.rival is not None:
                used.append(set(self.rival.held))
            if len(set().union(*used)) == KEYS:
                break
        else:
            raise AssertionError(f"not all is used again: {used}")
        self.folder.cleanup()

    def watch(self):
        """Check which process may use which key now."""
        holders = {}
        for client in self.clients.values():
            for key in client.valid:
                holders.setdefault(key, []).append(client.name)
                user = self.users.setdefault((key, client.tokens[key]), client.instance)
                assert user == client.instance, f"a token of {key} has two users"
        if self.rival is not None:
            for key, holding in self.rival.held.items():
                if holding.claim.is_owned:
                    holders.setdefault(key, []).append("rival")
        for key, names in holders.items():
            assert len(names) == 1, f"{key} is used by {names}"

    def pass_time(self, duration_ms, living=()):
        for _ in range(duration_ms // STEP_MS):
            self.cluster.run(STEP_MS)
            self.watch()
            for name in living:
                self.live(name)
                self.watch()

    def live(self, name):
        """Run one round of a client, as far as the sidecar answers."""
        client = self.clients.get(name)
        if client is None or not self.is_up:
            return
        try:
            client.live()
            is_lost = client.failure is not None
            if client not in self.subscribed and not is_lost:
                self.subscribe(name)
        except LOST:
            is_lost = True
        if is_lost:
            self.subscribed.discard(client)
            with contextlib.suppress(IdentityConflict):
                client.register()
                self.subscribe(name)

    # --- faults and actions; afterwards all clients run for ``after_ms``

    @rule(after_ms=AFTER)
    def nothing(self, after_ms):
        self.pass_time(after_ms, NAMES)

    @rule(name=WHO, duration_ms=WHILE, after_ms=AFTER)
    def one_is_silent(self, name, duration_ms, after_ms):
        self.pass_time(duration_ms, [other for other in NAMES if other != name])
        self.pass_time(after_ms, NAMES)

    @rule(name=WHO, duration_ms=WHILE, after_ms=AFTER)
    def one_only_beats(self, name, duration_ms, after_ms):
        """A client sends heartbeats, but reads no events and releases nothing."""
        for _ in range(duration_ms // BEAT_MS):
            self.pass_time(BEAT_MS, [other for other in NAMES if other != name])
            if self.is_up and name in self.clients:
                with contextlib.suppress(*LOST):
                    self.clients[name].beat()
        self.pass_time(after_ms, NAMES)

    @rule(name=WHO, other=WHO, is_known=st.booleans(), after_ms=AFTER)
    def one_is_ready(self, name, other, is_known, after_ms):
        """A client reports ready for keys that ``other`` warms up for, or holds."""
        client, asked = self.clients.get(name), self.clients.get(other)
        if self.is_up and client is not None and asked is not None:
            offers = asked.warm if is_known else asked.held
            for key in sorted(offers):
                epoch = asked.warm[key].epoch if is_known else asked.held[key][0]
                with contextlib.suppress(*LOST, ClaimRejected):
                    client.ready(key, epoch=epoch)
        self.pass_time(after_ms, NAMES)

    @rule(name=WHO, after_ms=AFTER)
    def one_releases_something(self, name, after_ms):
        client = self.clients.get(name)
        if self.is_up and client is not None and client.held:
            with contextlib.suppress(*LOST):
                client.give_back(min(client.held))
        self.pass_time(after_ms, NAMES)

    @rule(name=WHO, other=WHO, is_own=st.booleans(), after_ms=AFTER)
    def one_requests_offsets(self, name, other, is_own, after_ms):
        """Only a request with the secret of a claim is granted offsets of it."""
        client, holder = self.clients.get(name), self.clients.get(other)
        is_there = client is not None and holder is not None
        if self.is_up and is_there and holder.held:
            key = min(holder.held)
            secrets = (client if is_own else holder).secrets
            self.ask_for(key, holder, secret=secrets.get(key, "00" * 16))
        self.pass_time(after_ms, NAMES)

    def ask_for(self, key, holder, *, secret):
        owner = self.machine.service.groups[0].session.claimant.owner
        ask = api.GrantRequest(
            client_id=owner.client_id,
            incarnation=owner.incarnation.hex(),
            topic=key.topic,
            partition=key.partition,
            epoch=holder.held[key][0],
            grantee="7a" * 16,
            secret=secret,
            first=0,
            last=2,
            timeout_ms=0,
        )
        try:
            self.machine.service.begin_grant(numbered_request("g", ask))
        except ClaimRejected:
            assert secret != holder.secrets[key]
        except LOST:
            pass
        except CoordinationError:
            pass  # the log is not read up to the claim
        else:
            known = self.machine.node.engine.context.replica_of(key).world.keys[key]
            is_current = known.epoch == ask.epoch and known.owner == owner
            assert not is_current or secret == holder.secrets[key]

    @rule(name=WHO, dead_ms=AFTER, after_ms=AFTER)
    def one_dies_and_is_started_again(self, name, dead_ms, after_ms):
        client = self.clients.pop(name, None)
        if client is not None:
            self.machine.watch.kill(client.pid)
        self.pass_time(dead_ms, NAMES)
        if self.is_up:
            self.start(name)
        self.pass_time(after_ms, NAMES)

    @rule(name=WHO, reason=REASON, is_thorough=st.booleans(), after_ms=AFTER)
    def one_leaves(self, name, reason, is_thorough, after_ms):
        client = self.clients.get(name)
        if not self.is_up or client is None:
            return
        client.take()
        returned = ()
        if is_thorough or reason == "restart":
            returned = tuple(client.returned(key) for key in sorted(client.held))
            client.held.clear()
            client.leaving.clear()
        leaving = api.LeaveRequest(
            returned=returned, release=reason != "restart", reason=reason
        )
        with contextlib.suppress(*LOST):
            self.machine.service.leave(client.who, leaving)
        if reason == "restart":
            del self.clients[name]
            self.pass_time(after_ms, NAMES)
            self.start(name)
        self.pass_time(after_ms, NAMES)

    @rule(name=WHO, keep=st.booleans(), after_ms=AFTER)
    def one_subscribes_again(self, name, keep, after_ms):
        client = self.clients.get(name)
        if self.is_up and client is not None:
            none = api.ReleaseRequest(returned=())
            with contextlib.suppress(*LOST):
                self.machine.service.unsubscribe(
                    client.who, "s", release=none, keep=keep
                )
                self.pass_time(after_ms, NAMES)
                self.subscribe(name)
        self.pass_time(after_ms, NAMES)

    @rule(down_ms=WHILE, after_ms=AFTER)
    def the_sidecar_crashes(self, down_ms, after_ms):
        self.machine.crash()
        self.is_up = False
        self.pass_time(down_ms, NAMES)
        self.machine.start()
        self.is_up = True
        self.pass_time(after_ms)
        for client in self.clients.values():
            with contextlib.suppress(IdentityConflict):
                client.register()
                self.subscribe(client.name)
        self.pass_time(after_ms, NAMES)

    @rule(duration_ms=WHILE, after_ms=AFTER)
    def the_sidecar_is_stopped_for_a_while(self, duration_ms, after_ms):
        self.cluster.nodes.remove(self.machine.node)
        self.pass_time(duration_ms)
        self.cluster.nodes.append(self.machine.node)
        self.pass_time(after_ms, NAMES)

    @rule(duration_ms=WHILE, after_ms=AFTER)
    def the_sidecar_is_cut_off_for_a_while(self, duration_ms, after_ms):
        self.machine.node.cut(is_cut=True)
        self.pass_time(duration_ms, NAMES)
        self.machine.node.cut(is_cut=False)
        self.pass_time(after_ms, NAMES)

    @rule(after_ms=AFTER)
    def the_session_fails(self, after_ms):
        for host in self.machine.service.groups:
            if host.session.failure is None:
                host.session.fail(LogUnwritable("a test"))
        self.pass_time(after_ms, NAMES)

    @rule(after_ms=AFTER)
    def the_rival_comes_or_goes(self, after_ms):
        if self.rival is None:
            self.rival = self.cluster.node("rival", spec=spec(on_warm=warm))
        else:
            self.cluster.crash(self.rival)
            self.rival = None
        self.pass_time(after_ms, NAMES)

    @invariant()
    def nothing_is_broken(self):
        if hasattr(self, "cluster"):
            self.watch()
            assert self.machine.node.engine.failure is None


TestSidecars = Sidecars.TestCase
# An example takes up to a second, so shrinking a failing one takes minutes.
TestSidecars.settings = settings(
    max_examples=15, stateful_step_count=15, phases=[Phase.generate]
)
