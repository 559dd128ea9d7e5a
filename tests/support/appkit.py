"""The HTTP application in front of a fake service, without sockets."""

import asyncio
import os

import httpx
import msgspec
from fakeservice import INCARNATION

from kafka_marshal.remote import api, paths
from kafka_marshal.sidecar import requests
from kafka_marshal.sidecar.health import Verdict
from kafka_marshal.sidecar.http_app import App, AppContext
from kafka_marshal.sidecar.process_monitor import Caller, Peer
from kafka_marshal.sidecar.requests import Connection

OURS = Peer(77, os.geteuid(), 5)
INSTANCE = "cd" * 16
HEADERS = {api.INSTANCE_HEADER: INSTANCE}
CLIENT = paths.CLIENT.format(group="g", client="c")
WHO = Caller("g", "c", INSTANCE)
TOKEN = b"0123456789abcdef"


class Healthy:
    verdict = Verdict(ok=True, state="RUNNING", reasons=("serving",))

    def live(self):
        return self.verdict

    ready = started = live


class Wire:
    """An application, and requests to it over given connections."""

    def __init__(self, service, **serving):
        self.service = service
        self.serving = AppContext(health=Healthy(), service=service, **serving)
        self.app = App(self.serving)

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
# Route: method, path, body, and the call of the service.
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
        {"standings": [RETURNED]},
        ("beat", WHO, api.HeartbeatRequest(standings=(api.Progress(**RETURNED),))),
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
    "world": ("GET", paths.WORLD + "?timeout_ms=7", None, ("world", 7)),
    "groups": ("GET", paths.GROUPS, None, ("world", requests.TIMEOUT_MS_DEFAULT)),
    "group": ("GET", "/v1/groups/billing?timeout_ms=7", None, ("world", 7)),
    "owners": (
        "GET",
        "/v1/groups/billing/owners/orders?timeout_ms=7",
        None,
        ("world", 7),
    ),
    "fence": (
        "GET",
        "/v1/groups/billing/owners/orders/1?timeout_ms=7",
        None,
        ("world", 7),
    ),
    "clients": ("GET", paths.CLIENTS, None, ("clients",)),
    "livez": ("GET", paths.LIVEZ, None, None),
    "readyz": ("GET", paths.READYZ, None, None),
    "startupz": ("GET", paths.STARTUPZ, None, None),
    "openapi": ("GET", paths.OPENAPI, None, None),
}
