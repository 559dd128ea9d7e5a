"""A sidecar in memory for a real HTTP client; the test sets its responses."""

import queue
import threading

import httpx
import msgspec

from kafka_marshal.clock import SystemClock
from kafka_marshal.remote import api, paths
from kafka_marshal.remote.answers import AsOf, GroupNow, OwnersNow, WorldNow
from kafka_marshal.remote.exchanges import Answer, ExchangeError
from kafka_marshal.remote.transport import Address, Connection

INCARNATION = "ab" * 16
INSTANCE = "1f" * 16
H = 1_000
WAIT_S = 60
AS_OF = AsOf(time_ms=1, offsets={})
EMPTY = api.Snapshot(
    assigned=(), releasing=(), paused=api.Paused(is_paused=False), subscriptions=()
)


class FakeStream(httpx.SyncByteStream):
    """One open stream of events."""

    def __init__(self, incarnation):
        self.after = None
        self._incarnation = incarnation
        self._chunks = queue.Queue()
        self._numbers = iter(range(1, 10_000))

    def push(self, body):
        number = next(self._numbers)
        frame_id = api.frame_id(self._incarnation, number, t=0, offset=0)
        kind = body.__struct_config__.tag
        data = msgspec.json.encode(body).decode()
        self.push_raw(f"id: {frame_id}\nevent: {kind}\ndata: {data}\n\n")

    def push_raw(self, text):
        self._chunks.put(text.encode())

    def end(self, error=None):
        self._chunks.put(error)

    def __iter__(self):
        while True:
            chunk = self._chunks.get(timeout=WAIT_S)
            if isinstance(chunk, Exception):
                raise chunk
            if chunk is None:
                return
            yield chunk

    def close(self):
        self.end()


class FakeSidecar(httpx.BaseTransport):
    """Responds to requests; a test may replace responses.

    Attributes:
        asked: All requests, as method, path and body.
        answers: Other responses, by method and last part of the path, each used once:
            a message, a ``Failure`` with its status, or an exception.
        is_dead: Whether no request gets a response.
        is_known: Whether the client is registered.
    """

    def __init__(self):
        self.clock = SystemClock()
        self.asked = []
        self.answers = {}
        self.is_dead = False
        self.is_known = True
        self.incarnation = INCARNATION
        self.info_rest = {}
        self.streams = queue.Queue()
        self.deadlines = ()
        self._lock = threading.Lock()

    def info(self):
        fields = {
            "level": api.API_LEVEL,
            "version": "1",
            "state": "RUNNING",
            "client_id": "host-a",
            "incarnation": self.incarnation,
            "boot_id": "",
            "cluster_id": "c",
            "coordination_topic": "__marshal",
            "bootstrap_servers": ("broker:9092",),
            "heartbeat_interval_ms": H,
            "client_beat_ms_max": 50,
            "span": 1_000,
            "now_ms": self.clock.now_ms(),
        }
        return api.Info(**(fields | self.info_rest))

    def named(self, method, part):
        """Return the bodies of requests with this method and end of the path."""
        with self._lock:
            return [b for m, p, b in self.asked if m == method and p.endswith(part)]

    def handle_request(self, request):
        path, method = request.url.path, request.method
        body = request.read()
        with self._lock:
            fields = msgspec.json.decode(body) if body else None
            self.asked.append((method, path, fields))
        if self.is_dead:
            raise httpx.ConnectError("[Errno 111] Connection refused")
        waiting = self.answers.get((method, path.rpartition("/")[2]))
        if waiting:
            return self._answer(waiting.pop(0))
        if method == "PUT" and path.endswith("/clients/c"):
            self.is_known = True
            return self._answer(api.RegisterResponse(info=self.info(), was_known=False))
        if "/clients/c" in path and not self.is_known:
            return self._answer((404, failure("ClaimLost", reason="unknown")))
        return self._usual(method, path, request)

    def _usual(self, method, path, request):
        if path == paths.INFO:
            return self._answer(self.info())
        if path.endswith("/events"):
            stream = FakeStream(self.incarnation)
            stream.after = request.headers.get("last-event-id")
            self.streams.put(stream)
            headers = {"content-type": "text/event-stream"}
            return httpx.Response(200, stream=stream, headers=headers)
        if path.endswith("/beat"):
            now_ms = self.clock.now_ms()
            return self._answer(
                api.HeartbeatResponse(deadlines=self.deadlines, now_ms=now_ms)
            )
        if "/subscriptions/" in path and method == "PUT":
            return self._answer(
                api.SubscribeResponse(topics={"t": 1}, counts_topics=False)
            )
        if method == "DELETE" and path.endswith("/clients/c"):
            return self._answer(api.LeaveResponse(action="shutdown_now"))
        return httpx.Response(204)

    def _answer(self, answer):
        if isinstance(answer, Exception):
            raise answer
        status = 200
        if isinstance(answer, tuple):
            status, answer = answer
        if isinstance(answer, bytes):
            return httpx.Response(status, content=answer)
        return httpx.Response(status, content=msgspec.json.encode(answer))

    def stream(self):
        """Wait for the client to open its next stream of events."""
        return self.streams.get(timeout=WAIT_S)


class Assigning(FakeSidecar):
    """A sidecar that assigns subscribed or claimed keys, and takes them back.

    It ends the stream of a client that closes: that client cannot shut down a fake one.

    Attributes:
        has: Epochs of the client's keys, by subscription; "" for claimed keys.
    """

    def __init__(self):
        super().__init__()
        self.has = {}
        self._epochs = iter(range(1, 100_000))
        self._stream = None
        self._has_left = False
        self._answering = threading.Lock()
        # Number of the last claim: a late withdrawal does not end a later claim.
        self._number = 0
        # Number of the last claim with a response.
        self._answered = None
        self._is_claimed = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self):
        while not self._is_over.is_set():
            try:
                self._stream = self.streams.get(timeout=0.05)
            except queue.Empty:
                continue
            self._stream.push(self._snapshot())
            if self._has_left:
                self._stream.end()

    def _snapshot(self):
        return api.Snapshot(
            assigned=tuple(self._assigned(*each) for each in self.has.items()),
            releasing=(),
            paused=api.Paused(is_paused=False),
            subscriptions=(),
        )

    def handle_request(self, request):
        if request.method == "PUT" and request.url.path.endswith("/clients/c"):
            self._has_left = False
        return super().handle_request(request)

    def close(self):
        """End all streams; the client calls this as it closes its connections."""
        self._has_left = True
        if self._stream is not None:
            self._stream.end()

    def _usual(self, method, path, request):
        with self._answering:
            return self._usual_alone(method, path, request)

    def _usual_alone(self, method, path, request):
        if path.endswith("/world"):
            return self._answer(WorldNow(as_of=AS_OF, schema=1, partitions={}))
        if path.endswith("/owners/t"):
            return self._answer(OwnersNow(as_of=AS_OF, owners={0: "host-a"}))
        if path.endswith("/groups/g"):
            found = GroupNow(as_of=AS_OF, group="g", claims=(), pauses=())
            return self._answer(found)
        answer = super()._usual(method, path, request)
        if "/subscriptions/" in path and method == "PUT":
            self._assign(path.rpartition("/")[2])
        elif "/claims/" in path and method == "PUT":
            self._number = int(request.url.params["request"])
            self._is_claimed = True
            self._assign("")
        elif path.endswith("/end"):
            self._end(path.split("/")[-2])
        elif path.endswith("/released"):
            self._on_released(msgspec.json.decode(request.content))
        elif "/claims/" in path:
            self._unclaim(int(request.url.params["request"]))
        return answer

    def _unclaim(self, number):
        # A client gets no event about keys that it has released.
        self._is_claimed = self._is_claimed and number < self._number
        if number in {self._number, self._answered}:
            self.has.pop("", None)
            if self._is_claimed:
                self._assign("")

    def _on_released(self, report):
        epochs = [each["epoch"] for each in report["returned"]]
        if self.has.get("") in epochs:
            del self.has[""]
            if self._is_claimed:
                self._assign("")

    def _assign(self, name):
        if name not in self.has:
            self.has[name] = next(self._epochs)
            if not name:
                self._answered = self._number
            if self._stream is not None:
                self._stream.push(self._assigned(name, self.has[name]))

    def _end(self, name):
        epoch = self.has.pop(name, None)
        if epoch is not None and self._stream is not None:
            self._stream.push(
                api.Lost(topic="t", partition=0, epoch=epoch, reason="released")
            )

    def _assigned(self, name, epoch):
        now_ms = self.clock.now_ms()
        return api.Assignment(
            subscription=name,
            topic="t",
            partition=0,
            epoch=epoch,
            token=f"1.0.{epoch}",
            client_id="host-a",
            incarnation=self.incarnation,
            secret="5e" * 16,
            position=0,
            is_anchored=True,
            soft_until_ms=now_ms + 600_000,
            hard_until_ms=now_ms + 900_000,
            request=None if name else self._answered,
        )

    def end(self):
        self._is_over.set()
        self._thread.join()
        if self._stream is not None:
            self._stream.end()


def failure(error, message="no", **rest):
    return api.Failure(error=error, message=message, **rest)


class RequestsBy:
    """Sends requests over a transport of httpx."""

    def __init__(self, transport):
        self._transport = transport
        self._is_closed = False

    def request(self, method, target, *, body, timeout_ms):
        del timeout_ms
        if self._is_closed:
            raise RuntimeError("closed")
        request = httpx.Request(method, f"http://sidecar{target}", content=body)
        try:
            response = self._transport.handle_request(request)
            content = response.read()
        except httpx.HTTPError as error:
            is_early = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            why = str(error) or type(error).__name__
            is_refused = isinstance(error, httpx.ConnectError)
            cause = ConnectionRefusedError(why) if is_refused else error
            raise ExchangeError(why, was_sent=not is_early) from cause
        return Answer(response.status_code, content)

    def close(self):
        self._is_closed = True


def connected(sidecar, *, token=None):
    return Connection.open(
        Address.parse("unix:/run/s.sock"),
        token=token,
        group_id="g",
        client_id="c",
        instance=INSTANCE,
        requests=RequestsBy(sidecar),
        transport=sidecar,
    )
