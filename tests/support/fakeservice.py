"""A sidecar's service without a cluster, for tests of the HTTP application."""

import threading
from collections import deque
from types import SimpleNamespace

from kafka_marshal.clock import SystemClock
from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import ClaimLost, IdentityConflict
from kafka_marshal.remote import api
from kafka_marshal.remote.answers import AsOf, FenceNow, Handoff, LocalClient, OwnersNow
from kafka_marshal.sidecar.http_errors import GONE, UNKNOWN

INCARNATION = "ab" * 16
SNAPSHOT = api.Snapshot(
    assigned=(), releasing=(), paused=api.Paused(is_paused=False), subscriptions=()
)
RING = 64


def assigned(partition: int = 0) -> api.Assignment:
    return api.Assignment(
        subscription="s",
        topic="orders",
        partition=partition,
        epoch=17,
        token="0.2.17",
        client_id="host-a",
        incarnation=INCARNATION,
        secret="5e" * 16,
        position=None,
        is_anchored=False,
        soft_until_ms=5_000,
        hard_until_ms=9_000,
    )


class FakeEventReader:
    """A buffer of frames; after an overflow it starts again with a snapshot."""

    def __init__(self, after: str | None) -> None:
        self.on_news = None
        self.after = after
        self.is_closed = False
        self.taken = 0
        self._number = 0
        self._lock = threading.Lock()
        self._ring: deque[api.Frame] = deque()
        self.push(SNAPSHOT)

    def push(self, body: api.EventBody) -> None:
        with self._lock:
            if len(self._ring) >= RING:
                self._ring.clear()
                self._append(SNAPSHOT)
            self._append(body)
        if self.on_news is not None:
            self.on_news()

    def _append(self, body: api.EventBody) -> None:
        self._number += 1
        frame_id = api.frame_id(INCARNATION, self._number, t=0, offset=0)
        self._ring.append(api.Frame(frame_id, body))

    def take(self) -> list[api.Frame]:
        with self._lock:
            found = list(self._ring)
            self._ring.clear()
            self.taken += len(found)
        return found

    def close(self) -> None:
        self.is_closed = True


class FakeService:
    """Records every call and returns a plausible response.

    Attributes:
        calls: All calls, with name and arguments.
        fault: The error that the next calls raise, if set.
        hold: The event that calls wait for, if set.
        instances: Registered processes.
        is_slow: Whether heartbeats and grants need a thread, not the quick path.
        begun: Grants begun on the quick path.
        verdict: The verdict that these grants have at once.
    """

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.idle_count = 0
        self.fault: BaseException | None = None
        self.hold: threading.Event | None = None
        self.feeds: list[FakeEventReader] = []
        self.instances: dict[tuple[str, str], str] = {}
        self.gone: set[tuple[str, str]] = set()
        self.is_drained = self.is_handed_off = True
        self.is_slow = False
        self.begun: list[SimpleNamespace] = []
        self.verdict: object = None
        self.clock = SystemClock()

    def restore(self, *, timeout_ms) -> int:
        self._record("restore", timeout_ms)
        return 2

    def close_idle(self) -> None:
        self.idle_count += 1

    def start_drain(self) -> None:
        self._record("start_drain")

    def close(self, *, timeout_ms) -> None:
        self._record("close", timeout_ms)

    def _record(self, *call: object) -> None:
        self.calls.append(call)
        if self.hold is not None:
            assert self.hold.wait(30)
        if self.fault is not None:
            raise self.fault

    def _known(self, who) -> None:
        name = (who.group_id, who.client_id)
        if name in self.gone:
            raise ClaimLost("it is gone; register again", reason=GONE)
        if name not in self.instances:
            raise ClaimLost("no client of that name; register first", reason=UNKNOWN)
        if self.instances[name] != who.instance:
            raise IdentityConflict("another process", holder=who.client_id)

    def info(self) -> api.Info:
        self._record("info")
        return api.Info(
            level=api.API_LEVEL,
            version="1",
            state="RUNNING",
            client_id="host-a",
            incarnation=INCARNATION,
            boot_id="b",
            cluster_id="c",
            coordination_topic="__marshal",
            bootstrap_servers=("localhost:9092",),
            heartbeat_interval_ms=1_000,
            client_beat_ms_max=333,
            span=1_000,
            now_ms=5,
        )

    def register(
        self, group_id, client_id, *, registration, peer
    ) -> api.RegisterResponse:
        self._record("register", group_id, client_id, registration, peer)
        known = self.instances.get((group_id, client_id))
        self.instances[group_id, client_id] = registration.instance
        return api.RegisterResponse(
            info=self.info(), was_known=known == registration.instance
        )

    def subscribe(self, who, name, *, spec) -> api.SubscribeResponse:
        self._record("subscribe", who, name, spec)
        self._known(who)
        return api.SubscribeResponse(
            topics=dict.fromkeys(spec.topics, 3), counts_topics=True
        )

    def unsubscribe(self, who, name, *, release, keep) -> None:
        self._record("unsubscribe", who, name, release, keep)
        self._known(who)

    def claim(self, who, topic, *, partition, request=None) -> None:
        self._record("claim", who, topic, partition)
        self._known(who)

    def unclaim(self, who, topic, *, partition, request=None) -> None:
        self._record("unclaim", who, topic, partition)
        self._known(who)

    def beat(self, who, beat) -> api.HeartbeatResponse:
        self._record("beat", who, beat)
        self._known(who)
        deadline = api.Lease(
            topic="t", partition=0, epoch=1, soft_until_ms=1, hard_until_ms=2
        )
        return api.HeartbeatResponse(deadlines=(deadline,), now_ms=6)

    def beat_at_once(self, who, beat) -> api.HeartbeatResponse | None:
        if self.is_slow:
            return None
        self._record("beat_at_once", who, beat)
        self._known(who)
        return self.beat(who, beat)

    def release(self, who, request) -> None:
        self._record("release", who, request)
        self._known(who)

    def ready(self, who, report) -> None:
        self._record("ready", who, report)
        self._known(who)

    def children(self, who, request) -> None:
        self._record("children", who, request)
        self._known(who)

    def leave(self, who, request) -> api.LeaveResponse:
        self._record("leave", who, request)
        self._known(who)
        return api.LeaveResponse(action="shutdown_now")

    def feed(self, who, after) -> FakeEventReader:
        self._record("feed", who, after)
        self._known(who)
        self.feeds.append(FakeEventReader(after))
        return self.feeds[-1]

    def grant(self, group_id, ask) -> api.GrantResponse:
        self._record("grant", group_id, ask)
        return api.GrantResponse(
            outcome="accepted",
            reason=None,
            first=ask.first,
            last=ask.last,
            head=ask.last + 1,
            offset=4711,
        )

    def deadline(self, timeout_ms) -> Deadline:
        return Deadline(timeout_ms, self.clock.now_ms)

    def grant_at_once(self, group_id, ask, *, on_verdict):
        """Begin a grant; a test sets its verdict."""
        if self.is_slow:
            return None
        self._record("grant_at_once", group_id, ask)
        begun = SimpleNamespace(ask=ask, verdict=self.verdict, on_verdict=on_verdict)
        self.begun.append(begun)
        return begun

    def await_grant(self, pending, deadline) -> api.GrantResponse:
        self._record("await_grant", deadline)
        return self.grant("g", pending.ask)

    def world(self, *, timeout_ms) -> tuple[dict, list[dict]]:
        self._record("world", timeout_ms)
        return WORLD, PAUSES

    def owners(self, group_id, topic, *, timeout_ms) -> OwnersNow:
        self._record("owners", group_id, topic, timeout_ms)
        return OwnersNow(as_of=FENCE.as_of, owners={0: "host-b", 2: None})

    def catch_up(self, keys, *, timeout_ms) -> None:
        self._record("catch_up", keys, timeout_ms)

    def fence(self, key) -> FenceNow:
        return FENCE

    def start_handoff(self, *, for_ms) -> None:
        self._record("start_handoff", for_ms)

    def refusals(self) -> dict[tuple[str, str], int]:
        return {("ready", "late"): 1}

    def plan(self, group_id, *, timeout_ms):
        self._record("plan", group_id, timeout_ms)
        return {1: 5, 0: 12}, {
            "group_id": group_id,
            "policy": "planner",
            "generation": 3,
            "is_known": False,
            "author": None,
            "offset": None,
            "planner_version": None,
            "input_digest": None,
            "open_count": 0,
            "uncovered_count": 0,
            "lag": None,
            "lag_unknown_count": 0,
            "members": [],
            "keys": [],
            "handoffs": [],
            "standbys": [],
            "uncovered": [],
        }

    def handoffs(self, group_id) -> list[Handoff]:
        return HANDOFFS if group_id == "billing" else []

    def clients(self) -> list[LocalClient]:
        self._record("clients")
        return [
            LocalClient(
                group="g",
                client="c",
                pid=7,
                state="ready",
                beat_age_ms=None,
                subscriptions=("s",),
                assigned=("orders-0",),
                lease_until_ms=9_000,
                warming=("orders-1",),
            )
        ]


def claim_object(group: str, partition: int, *, owner: str | None) -> dict:
    return {
        "group_id": group,
        "topic": "orders",
        "partition": partition,
        "owner": owner and {"client_id": owner, "incarnation": INCARNATION},
        "epoch": 17,
        "token": "0.2.17",
        "position": 100 + partition,
        "granted": None,
        "freshness": "fresh",
        "age_ms": 5,
        "locked_by": None,
    }


_PAUSE = {"group_id": "halted", "op_id": "00" * 16, "client_id": "me", "until_ms": 9}
HANDOFFS = [
    Handoff(
        topic="orders",
        partition=0,
        owner="host-a",
        successor="host-b",
        phase="offered",
        since_ms=None,
        until_ms=9,
        from_client="c",
    )
]
PAUSES = [
    _PAUSE
    | {"state": "paused", "person": "ada", "reason": "deploy", "begin_ms": 5}
    | {"topics": [], "partitions_count": 2, "renewed_by": None}
]
WORLD = {
    "schema": 1,
    "partitions": {
        "0": {
            "next_offset": 12,
            "claims": [
                claim_object("billing", 1, owner="host-a"),
                claim_object("billing", 0, owner="host-b"),
            ],
            "pauses": [_PAUSE],
        },
        "1": {
            "next_offset": 5,
            "claims": [claim_object("billing", 2, owner=None)],
            "pauses": [_PAUSE],
        },
    },
}
FENCE = FenceNow(
    as_of=AsOf(time_ms=1_700_000_000_000, offsets={"0": 12, "1": 5}),
    token="0.2.17",
    epoch=17,
    client_id="host-a",
    incarnation=INCARNATION,
    position=101,
)
