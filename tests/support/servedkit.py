"""The HTTP server of a sidecar in a thread, on real sockets, with a fake service."""

import asyncio
import contextlib
import socket
import threading

import httpx
import msgspec
from appkit import INSTANCE, Healthy
from fakeservice import FakeService
from slowness import until

from kafka_marshal.errors import CoordinationError
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.remote import api
from kafka_marshal.sidecar.group_actions import GroupActions
from kafka_marshal.sidecar.http_app import App
from kafka_marshal.sidecar.requests import make_server
from kafka_marshal.sidecar.sockets import open_tcp, open_unix

TOKEN = b"0123456789abcdef"
REQUEST = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"


def unreachable(*_, **__):
    """Stand in for an admin of a cluster that does not respond."""
    raise CoordinationError("no broker answered")


class Served:
    """A server in a thread, over a Unix socket and over TCP."""

    def __init__(self, path, connections_max=64, gid=None):
        self.service = FakeService()
        self.service.instances["g", "c"] = INSTANCE
        self.path = path
        self._place = open_unix(path, gid=gid)
        self._tcp = open_tcp("127.0.0.1", 0)
        self.port = self._tcp.getsockname()[1]
        self.app = App(
            states=Healthy(),
            metrics=lambda: (b"", "text/plain"),
            service=self.service,
            token=TOKEN,
            socket_gid=gid,
            keep_alive_s=0.05,
            actions=GroupActions(
                ConnectionConfig("broker:9092"),
                client_id="c",
                state_dir=None,
                admin=unreachable,
                history=unreachable,
            ),
        )
        self.server = make_server(
            self.app, connections_max=connections_max, socket_gid=gid
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        eventually(lambda: self.server.started)

    def _run(self):
        sockets = [self._place.listening, self._tcp]
        asyncio.run(self.server.serve(sockets=sockets))

    @property
    def connection_count(self):
        return len(self.server.server_state.connections)

    def connect(self):
        found = socket.socket(socket.AF_UNIX)
        found.settimeout(30)
        found.connect(str(self.path))
        return found

    def client(self):
        # No test here uses certificates, and loading them takes 25 ms.
        transport = httpx.HTTPTransport(uds=str(self.path), verify=False)
        return httpx.Client(transport=transport, base_url="http://sidecar", timeout=30)

    def close(self):
        loop = self.server.servers[0].get_loop()
        loop.call_soon_threadsafe(self.server.end)
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._place.close()
        self._tcp.close()
        self.app.close()


def eventually(condition):
    until(condition, pause_s=0.005)


def read(connection):
    """Return all bytes until the other end closes."""
    found = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65_536):
            found += piece
    return bytes(found)


def failure_of(response):
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    return msgspec.json.decode(body, type=api.Failure)
