"""The sidecar's daemon as a process of its own, and plain HTTP to it."""

import contextlib
import json
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import forked
import httpx
import msgspec
from clikit import MARSHAL
from prometheus_client.parser import text_string_to_metric_families
from waiting import eventually

from kafka_marshal import TopicPartition
from kafka_marshal.remote import api, paths

END_S = 60
# A process that imports, connects and reads the log, on a machine that is busy.
START_MS = 150_000


class Sidecar:
    """One sidecar; it may be started again, with the same identity.

    Attributes:
        domain: The coordination domain that it works in.
        client_id: Its name in the log.
        path: Its Unix socket.
        state_dir: Where it keeps its identity and lease journal.
        process: Its process now.
    """

    def __init__(
        self,
        domain,
        *,
        client_id: str,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.domain = domain
        self.client_id = client_id
        # Short: a socket's path has 107 bytes at most.
        self.folder = Path(tempfile.mkdtemp(prefix="sidecar-"))
        self.path = self.folder / "s.sock"
        self.state_dir = self.folder / "state"
        self._arguments = tuple(arguments)
        self._env = dict(env or {})
        self._log = self.folder / "log"
        self.process: forked.Forked | subprocess.Popen | None = None

    @property
    def address(self) -> str:
        """The value for `Marshal(sidecar=...)`."""
        return f"unix:{self.path}"

    @property
    def log(self) -> str:
        """Everything that all of its processes have logged."""
        return self._log.read_text() if self._log.exists() else ""

    def start(self, *, is_ready: bool = True) -> "Sidecar":
        """Start it, or start it again; by default wait until it is ready."""
        command = [
            *(MARSHAL, "sidecar", "run", "--socket", self.path),
            *("--client-id", self.client_id, "--state-dir", self.state_dir),
            *("--transport", self.domain.transport),
            *self._arguments,
        ]
        env = {
            "MARSHAL_BOOTSTRAP_SERVER": self.domain.servers,
            "MARSHAL_COORDINATION_TOPIC": self.domain.topic,
            "XDG_CONFIG_HOME": str(self.folder / "config"),
        }
        with self._log.open("ab") as log:
            self.process = forked.start(
                command, env=env | self._env, stdout=log, stderr=log
            )
        if is_ready:
            self.wait_ready()
        return self

    def wait_ready(self, timeout_ms: int = START_MS) -> None:
        """Wait until clients may use it."""

        def look() -> bool:
            assert self.process.poll() is None, self.log
            found = self.get(paths.READYZ)
            return found is not None and found.status_code == 200

        eventually(look, "the sidecar is ready", timeout_ms)

    def http(self, **options) -> httpx.Client:
        """Return a client of its own connection."""
        # Certificates are of no use here, and loading them takes 25 ms.
        transport = httpx.HTTPTransport(uds=str(self.path), verify=False)
        return httpx.Client(
            transport=transport, base_url="http://sidecar", timeout=30, **options
        )

    def get(self, place: str) -> httpx.Response | None:
        """Return an answer, None where nobody answers."""
        try:
            with self.http() as client:
                return client.get(place)
        except httpx.TransportError:
            return None

    def assigned(self, group_id: str) -> dict[TopicPartition, str]:
        """Return the client that has each partition of a group."""
        with self.http() as client:
            found = client.get(paths.CLIENTS).raise_for_status()
        return {
            TopicPartition(topic, int(number)): each["client"]
            for each in found.json()["clients"]
            if each["group"] == group_id
            for topic, _, number in (p.rpartition("-") for p in each["assigned"])
        }

    def answered(self, route: str) -> float:
        """Return how many requests of a kind it has answered."""
        text = self.get(paths.METRICS).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "marshal_sidecar_requests_total"
            and (sample.labels["route"], sample.labels["status"]) == (route, "200")
        )

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.process.kill()
        self.process.wait(END_S)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def stop(self) -> int:
        """Have it shut down in order; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_S)

    def close(self) -> None:
        """End it and remove its files."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(END_S)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def start_sidecar(
    domain,
    *,
    client_id: str = "host-1",
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    is_ready: bool = True,
) -> Iterator[Sidecar]:
    """A sidecar in a domain, ended with the block."""
    found = Sidecar(domain, client_id=client_id, arguments=arguments, env=env)
    try:
        yield found.start(is_ready=is_ready)
    finally:
        found.close()


class PlainClient:
    """A client in a few lines of plain HTTP: no part of the library is used.

    Attributes:
        frames: Every event that came, oldest first: its id and its document.
        has: Its partitions by its events: place to the ``assigned`` event.
        deadlines: Those of the last heartbeat, place to document.
    """

    def __init__(self, sidecar, group: str, client: str, *, beat_ms: int = 100) -> None:
        self.sidecar = sidecar
        self.instance = secrets.token_hex(16)
        self.base = paths.CLIENT.format(group=group, client=client)
        self.beat_ms = beat_ms
        self.frames: list[tuple[str, dict]] = []
        self.has: dict[tuple[str, int], dict] = {}
        self.deadlines: dict[tuple[str, int], dict] = {}
        self.http = sidecar.http(headers={api.INSTANCE_HEADER: self.instance})
        self._stream: httpx.Response | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._beating: threading.Thread | None = None

    def register(self) -> httpx.Response:
        body = {"instance": self.instance, "beat_ms": self.beat_ms}
        return self.http.put(self.base, json=body)

    def subscribe(self, *topics: str, name: str = "1", **wants) -> httpx.Response:
        place = f"{self.base}/subscriptions/{name}"
        return self.http.put(place, json={"topics": topics, **wants})

    def beat(self, *progress: dict, **more) -> httpx.Response:
        body = {"progress": progress, **more}
        response = self.http.post(self.base + "/beat", json=body)
        if response.is_success:
            self.deadlines = {
                (each["topic"], each["partition"]): each
                for each in response.json()["deadlines"]
            }
        return response

    def keep_beating(self) -> None:
        """Send heartbeats in the background, over a connection of its own."""
        self._beating = threading.Thread(target=self._beat_on, daemon=True)
        self._beating.start()

    def _beat_on(self) -> None:
        headers = {api.INSTANCE_HEADER: self.instance}
        with self.sidecar.http(headers=headers) as client:
            while not self._ended.wait(self.beat_ms / 1000):
                # Try again until the sidecar is back.
                with contextlib.suppress(httpx.TransportError):
                    client.post(self.base + "/beat", json={})

    def progress(self, of: tuple[str, int], position: int, **more) -> dict:
        """Return the progress to report of a partition that it has."""
        topic, partition = of
        epoch = self.has[of]["epoch"]
        found = {"topic": topic, "partition": partition, "epoch": epoch}
        return found | {"position": position, **more}

    def release(self, *returned: dict, timeout_ms: int = 0) -> httpx.Response:
        body = {"returned": returned, "timeout_ms": timeout_ms}
        response = self.http.post(self.base + "/released", json=body)
        if response.is_success:
            # The sidecar sends no event for a release that the client confirmed.
            for each in returned:
                had = self.has.get(place(each))
                # A later claim of it may have been assigned meanwhile.
                if had is not None and had["epoch"] == each["epoch"]:
                    self.has.pop(place(each), None)
        return response

    def leave(self, **request) -> httpx.Response:
        return self.http.request("DELETE", self.base, json=request)

    # --- events

    def listen(self, after: str | None = None) -> None:
        """Read events in the background, by default all, or those after an id."""
        headers = {api.INSTANCE_HEADER: self.instance}
        if after is not None:
            headers[api.EVENT_ID_HEADER] = after
        client = self.sidecar.http(headers=headers)
        request = client.build_request("GET", self.base + "/events")
        response = client.send(request, stream=True)
        assert response.status_code == 200, response.read()
        self._stream = response
        self._thread = threading.Thread(
            target=self._read, args=(client, response), daemon=True
        )
        self._thread.start()

    def _read(self, client: httpx.Client, response: httpx.Response) -> None:
        fields: dict[str, str] = {}
        try:
            with contextlib.closing(client), contextlib.closing(response):
                for line in response.iter_lines():
                    if line and not line.startswith(":"):
                        name, _, value = line.partition(": ")
                        fields[name] = value
                    elif fields.get("data"):
                        self._take(fields["id"], fields)
                        fields = {}
        except httpx.HTTPError:
            pass  # it was ended from either side

    def _take(self, frame_id: str, fields: dict[str, str]) -> None:
        body = json.loads(fields["data"])
        assert body["type"] == fields["event"]
        msgspec.convert(body, api.EventBody)  # as the library reads it
        match body["type"]:
            case "snapshot":
                self.has = {place(each): each for each in body["assigned"]}
            case "assigned":
                self.has[place(body)] = body
            case "lost":
                self.has.pop(place(body), None)
        self.frames.append((frame_id, body))

    def events(self, kind: str) -> list[dict]:
        """Return the events of one kind that came."""
        return [body for _, body in self.frames if body["type"] == kind]

    def wait_event(self, kind: str, count: int = 1) -> dict:
        """Wait for so many events of a kind; return the last of these."""
        eventually(lambda: len(self.events(kind)) >= count, f"{count} of {kind}")
        return self.events(kind)[count - 1]

    def wait_has(self, count: int) -> None:
        """Wait until it has so many partitions."""
        eventually(lambda: len(self.has) == count, f"{count} partitions")

    def hang_up(self) -> None:
        """Cut the stream of events; the client stays registered."""
        stream, self._stream = self._stream, None
        if stream is not None:
            network = stream.extensions["network_stream"]
            with contextlib.suppress(OSError):  # the other end was first
                network.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            self._thread.join(END_S)
            assert not self._thread.is_alive()

    def close(self) -> None:
        """Close all connections without notifying the sidecar."""
        self._ended.set()
        if self._beating is not None:
            self._beating.join(END_S)
        self.hang_up()
        self.http.close()


def place(body: dict) -> tuple[str, int]:
    """Return which partition an event or a progress is of."""
    return body["topic"], body["partition"]
