"""A sidecar daemon around a fake service: real sockets, threads and signals."""

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
from fakeservice import FakeService

from kafka_marshal.observability import NullObserver
from kafka_marshal.remote import paths
from kafka_marshal.sidecar import server
from kafka_marshal.sidecar.config import Settings
from simulator.node import Cluster

INSTANCE = "cd" * 16


def eventually(condition, what):
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.005)
    return found


class World:
    """A daemon's surroundings: a runtime without a cluster, and a fake service.

    Attributes:
        service: The service of the daemon.
        hold: The event that connecting waits for, if set.
        reading: The event that reading the log waits for, if set.
        fault: The error that opening raises, if set.
        done: The calls of the runtime, in order.
    """

    def __init__(self, path):
        self.path = path
        self.service = FakeService()
        self.service.instances["g", "c"] = INSTANCE
        self.hold = None
        self.reading = None
        self.fault = None
        self.topic_fault = None
        self.done = []
        self.observers = []
        self.engine = Cluster().node("c").engine
        self.settings = Settings(socket=path, drain_ms=20_000, state_dir="")

    def open(
        self, connection, observer, *, timeout_ms, on_connected, state_home, **rest
    ):
        self.state_home = state_home
        self.done.append(("open", timeout_ms))
        if self.hold is not None:
            assert self.hold.wait(30)
        if self.fault is not None:
            raise self.fault
        on_connected(self.engine)
        if self.reading is not None:
            assert self.reading.wait(30)
        return SimpleNamespace(
            engine=self.engine,
            observers=SimpleNamespace(add=self.observers.append),
            require_safe_topic=self._require_safe_topic,
            stop=lambda: self.done.append("stop"),
        )

    def observe(self, event):
        for observer in self.observers:
            observer.observe(event)

    def _require_safe_topic(self):
        if self.topic_fault is not None:
            raise self.topic_fault

    def make_service(self, runtime, **given):
        self.given = given
        return self.service

    def client(self):
        # No test here uses certificates, and loading them takes 25 ms.
        transport = httpx.HTTPTransport(uds=str(self.path), verify=False)
        return httpx.Client(transport=transport, base_url="http://sidecar", timeout=30)

    def get(self, place):
        # If it is refused, httpx does not close its socket.
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(self.path)):
                return None
        try:
            with self.client() as client:
                return client.get(place)
        except httpx.TransportError:
            return None

    def wait_ready(self):
        eventually(
            lambda: (found := self.get(paths.INFO)) is not None and found.is_success,
            "it serves",
        )

    def run(self, script):
        """Run the daemon on this thread and a script on another, then send SIGTERM."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(script)
            future.add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGTERM))
            server.run(self.settings, NullObserver())
            future.result(30)


def run_undrained(path):
    """Run a daemon in this process whose clients never release."""
    world = World(path)
    world.service.is_drained = False
    server.Runtime, server.SidecarService = world, world.make_service
    server.run(world.settings, NullObserver())
