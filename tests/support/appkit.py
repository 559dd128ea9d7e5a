"""The HTTP application over a fake service, without sockets."""

import asyncio
import os
import threading

import httpx
import msgspec
from fakeservice import INCARNATION

from kafka_marshal.remote import answers, api, paths
from kafka_marshal.sidecar import requests
from kafka_marshal.sidecar.group_actions import LIMIT_DEFAULT, ActionRunner
from kafka_marshal.sidecar.health import State, View
from kafka_marshal.sidecar.http_app import App
from kafka_marshal.sidecar.process_monitor import Caller, Peer
from kafka_marshal.sidecar.requests import Connection

OURS = Peer(77, os.geteuid(), 5)
INSTANCE = "cd" * 16
HEADERS = {api.INSTANCE_HEADER: INSTANCE}
CLIENT = paths.CLIENT.format(group="g", client="c")
WHO = Caller("g", "c", INSTANCE)
TOKEN = b"0123456789abcdef"
OP_ID = "0a" * 16


class Healthy:
    state, reason = State.RUNNING, "serving"
    found = View(
        now_ms=0, state=State.RUNNING, reason="serving", since_ms=0, is_replayed=True
    )

    def view(self):
        return self.found


class FakeActions:
    """Actions on groups that add their calls to those of a service."""

    def __init__(self, service):
        self.service = service
        self.runner = ActionRunner()
        self.entered = threading.Event()

    def _record(self, *call):
        if self.service is not None:
            self.service.calls.append(call)
            self.entered.set()
            if self.service.hold is not None:
                assert self.service.hold.wait(30)
            if self.service.fault is not None:
                raise self.service.fault

    def pause(self, group, request, *, timeout_ms):
        self._record("pause", group, request, timeout_ms)
        return answers.PauseNow(
            group=group,
            is_executed=True,
            op_id=OP_ID,
            begin_ms=None,
            until_ms=9,
            held=("orders-0",),
        )

    def resume(self, group, request, *, timeout_ms):
        self._record("resume", group, request, timeout_ms)
        return answers.ResumeNow(group=group, is_executed=True, partitions_count=2)

    def reset(self, group, request, *, timeout_ms):
        self._record("reset", group, request, timeout_ms)
        return reset_now(group)

    def undo(self, group, request, *, timeout_ms):
        self._record("undo", group, request, timeout_ms)
        return reset_now(group)

    def finish(self, group, request, *, timeout_ms):
        self._record("finish", group, request, timeout_ms)
        done = answers.FinishedReset(op_id=OP_ID, outcome="aborted", moved_count=0)
        return answers.FinishNow(group=group, operations=(done,))

    def history(self, group, *, limit, timeout_ms):
        self._record("history", group, limit, timeout_ms)
        return answers.HistoryNow(
            as_of=answers.AsOf(time_ms=1, offsets={"0": 2}),
            group=group,
            actions_count=1,
            records_count=3,
            began_at={},
            actions=({"kind": "pause"},),
        )


def reset_now(group):
    row = answers.ResetRow(
        topic="orders",
        partition=0,
        before=None,
        after=3,
        lag_before=None,
        lag_after=7,
        repeats=False,
        note=None,
    )
    return answers.ResetNow(
        group=group,
        op_id=OP_ID,
        undoes=None,
        is_executed=False,
        outcome=None,
        undo_id=None,
        mirror_error=None,
        left_out=(),
        rows=(row,),
    )


class Wire:
    """Sends requests to an application over given connections."""

    def __init__(self, service, **serving):
        self.service = service
        serving.setdefault("actions", FakeActions(service))
        own = {"states": Healthy(), "metrics": lambda: (b"", "text/plain")}
        self.app = App(service=service, **own | serving)

    def connect(self, connection=None):
        connection = connection or Connection(OURS, is_local=True)

        async def with_connection(scope, receive, send):
            scope["state"] = {requests.CONNECTION: connection}
            await self.app(scope, receive, send)

        transport = httpx.ASGITransport(with_connection, raise_app_exceptions=False)
        base = "http://sidecar" if connection.is_local else "http://127.0.0.1:7070"
        return httpx.AsyncClient(transport=transport, base_url=base)

    def request(self, method, path, *, connection=None, **options):
        async def main():
            async with self.connect(connection) as client:
                return await client.request(method, path, **options)

        return asyncio.run(main())


def failure(response):
    assert response.headers["content-type"] == "application/json"
    return msgspec.json.decode(response.content, type=api.Failure)


RETURNED = {"topic": "orders", "partition": 3, "epoch": 17, "position": 5}
GRANT = {
    "client_id": "host-a",
    "incarnation": INCARNATION,
    "topic": "orders",
    "partition": 3,
    "epoch": 17,
    "grantee": "ef" * 16,
    "secret": "5e" * 16,
    "first": 5,
    "last": 9,
    "timeout_ms": 100,
}
# Routes: method, path, body, and the expected call of the service.
REQUESTS = {
    "info": ("GET", paths.INFO, None, ("info",)),
    "register": (
        "PUT",
        CLIENT,
        {"instance": INSTANCE, "beat_ms": 100},
        (
            "register",
            "g",
            "c",
            api.RegisterRequest(instance=INSTANCE, beat_ms=100),
            OURS,
        ),
    ),
    "leave": (
        "DELETE",
        CLIENT,
        {"reason": "downscale", "timeout_ms": 5},
        ("leave", WHO, api.LeaveRequest(reason="downscale", timeout_ms=5)),
    ),
    "beat": (
        "POST",
        CLIENT + "/beat",
        {"progress": [RETURNED]},
        ("beat", WHO, api.HeartbeatRequest(progress=(api.Progress(**RETURNED),))),
    ),
    "ready": (
        "POST",
        CLIENT + "/ready",
        {"topic": "t", "partition": 0, "epoch": 3},
        ("ready", WHO, api.ReadyRequest(topic="t", partition=0, epoch=3)),
    ),
    "released": (
        "POST",
        CLIENT + "/released",
        {"returned": [RETURNED]},
        ("release", WHO, api.ReleaseRequest(returned=(api.Release(**RETURNED),))),
    ),
    "children": (
        "PUT",
        CLIENT + "/children",
        {"pids": [7, 8]},
        ("children", WHO, api.Children(pids=(7, 8))),
    ),
    "subscribe": (
        "PUT",
        CLIENT + "/subscriptions/s",
        {"topics": ["orders"], "claims_max": 4},
        ("subscribe", WHO, "s", api.SubscriptionSpec(topics=("orders",), claims_max=4)),
    ),
    "unsubscribe": (
        "POST",
        CLIENT + "/subscriptions/s/end?keep=true",
        {"returned": []},
        ("unsubscribe", WHO, "s", api.ReleaseRequest(returned=()), True),
    ),
    "claim": ("PUT", CLIENT + "/claims/orders/3", None, ("claim", WHO, "orders", 3)),
    "unclaim": (
        "DELETE",
        CLIENT + "/claims/orders/3",
        None,
        ("unclaim", WHO, "orders", 3),
    ),
    "grant": (
        "POST",
        "/v1/groups/billing/grants",
        GRANT,
        ("grant", "billing", api.GrantRequest(**GRANT)),
    ),
    "pause": (
        "POST",
        "/v1/groups/billing/pause?timeout_ms=7",
        {"for_ms": 60_000, "wait": True, "reason": "deploy", "person": "ann"},
        (
            "pause",
            "billing",
            api.PauseRequest(for_ms=60_000, wait=True, reason="deploy", person="ann"),
            7,
        ),
    ),
    "resume": (
        "POST",
        "/v1/groups/billing/resume",
        {"operation": OP_ID},
        ("resume", "billing", api.ResumeRequest(operation=OP_ID), None),
    ),
    "reset": (
        "POST",
        "/v1/groups/billing/reset",
        {"topics": ["orders:0"], "shift_by": -5, "execute": True},
        (
            "reset",
            "billing",
            api.ResetRequest(topics=("orders:0",), shift_by=-5, execute=True),
            None,
        ),
    ),
    "undo": (
        "POST",
        "/v1/groups/billing/undo",
        {"op_id": OP_ID},
        ("undo", "billing", api.UndoRequest(op_id=OP_ID), None),
    ),
    "finish": (
        "POST",
        "/v1/groups/billing/finish?timeout_ms=0",
        None,
        ("finish", "billing", api.FinishRequest(), 1),
    ),
    "history": (
        "GET",
        "/v1/groups/billing/history",
        None,
        ("history", "billing", LIMIT_DEFAULT, None),
    ),
    "world": ("GET", paths.WORLD + "?timeout_ms=7", None, ("world", 7)),
    "groups": ("GET", paths.GROUPS, None, ("world", requests.TIMEOUT_MS_DEFAULT)),
    "group": ("GET", "/v1/groups/billing?timeout_ms=7", None, ("world", 7)),
    "plan": (
        "GET",
        "/v1/groups/billing/plan?timeout_ms=7",
        None,
        ("plan", "billing", 7),
    ),
    "owners": (
        "GET",
        "/v1/groups/billing/owners/orders?timeout_ms=7",
        None,
        ("owners", "billing", "orders", 7),
    ),
    "fence": (
        "GET",
        "/v1/groups/billing/owners/orders/1?timeout_ms=7",
        None,
        ("catch_up", [("billing", "orders", 1)], 7),
    ),
    "clients": ("GET", paths.CLIENTS, None, ("clients",)),
    "livez": ("GET", paths.LIVEZ, None, None),
    "readyz": ("GET", paths.READYZ, None, None),
    "startupz": ("GET", paths.STARTUPZ, None, None),
    "openapi": ("GET", paths.OPENAPI, None, None),
}
