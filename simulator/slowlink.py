"""A TCP proxy with a delay, to make a broker seem far away.

Only data from the broker is delayed, so that a round trip takes exactly the delay. A
broker behind the proxy advertises the proxy's address::

    link = SlowLink(delay_ms=50)
    listeners = {"advertised.listeners": f"PLAINTEXT://{link.address}"}
    with link, EmbeddedBroker(properties=listeners) as broker:
        link.lead_to(broker.bootstrap_servers)
"""

import asyncio
import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from kafka_marshal.errors import InvalidTransition

_HOST = "127.0.0.1"
_CHUNK_BYTES = 1 << 18
_CHUNKS_MAX = 1_024
_END_S = 5
_LOOK_S = 10


class SlowLink:
    """Forwards connections, with a delay one way. A context manager.

    Attributes:
        address: Address on which it listens, ``host:port``; known before it is entered.
        delivered_bytes: Bytes delivered from the far end so far.
        under_way_bytes: Bytes sent by the far end and not yet delivered.
    """

    def __init__(self, *, delay_ms: int) -> None:
        """Draw a port; forwarding starts when it is entered.

        Args:
            delay_ms: Delay of all data from the far end.
        """
        self._delay_s = delay_ms / 1000
        self._socket = socket.create_server((_HOST, 0))
        self.address = f"{_HOST}:{self._socket.getsockname()[1]}"
        self.delivered_bytes = 0
        self.under_way_bytes = 0
        self._target: tuple[str, int] | None = None
        self._loop = asyncio.new_event_loop()
        self._is_serving = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="marshal-slow-link", daemon=True
        )

    def lead_to(self, address: str) -> None:
        """Forward new connections to ``host:port``; earlier ones are refused."""
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        serving = asyncio.start_server(self._accept, sock=self._socket)
        server = self._loop.run_until_complete(serving)
        self._is_serving.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        ended = asyncio.gather(*tasks, return_exceptions=True)
        self._loop.run_until_complete(ended)
        # Closed connections take another turn of the loop to be gone.
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            if self._target is not None:
                await self._carry(reader, writer, self._target)
        finally:
            writer.close()

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        target: tuple[str, int],
    ) -> None:
        with suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(*target)
            late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CHUNKS_MAX)
            # The first task to end, on either side, ends the others.
            pumps = [
                asyncio.ensure_future(pump)
                for pump in (
                    self._forward(reader, far_writer),
                    self._collect(far_reader, late),
                    self._deliver(late, writer),
                )
            ]
            try:
                first = asyncio.FIRST_COMPLETED
                while not any(pump.done() for pump in pumps):
                    await asyncio.wait(pumps, timeout=_LOOK_S, return_when=first)
            finally:
                for pump in pumps:
                    pump.cancel()
                far_writer.close()

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                writer.write(data)
                await writer.drain()

    async def _collect(
        self, reader: asyncio.StreamReader, late: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                self.under_way_bytes += len(data)
                await late.put((self._loop.time() + self._delay_s, data))

    async def _deliver(
        self, late: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while True:
                due_s, data = await late.get()
                await asyncio.sleep(due_s - self._loop.time())
                writer.write(data)
                await writer.drain()
                self.under_way_bytes -= len(data)
                self.delivered_bytes += len(data)

    def __enter__(self) -> Self:
        if self._thread.is_alive():
            raise InvalidTransition("the link runs already")
        self._thread.start()
        # A loop that is stopped before it serves would end in an error.
        self._is_serving.wait(timeout=_END_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_END_S)
        self._socket.close()
