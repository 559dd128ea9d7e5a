"""A port whose connections go to another one, and can be cut."""

import select
import socket
import threading
from contextlib import suppress
from typing import Self

LOOK_S = 0.1
BYTES = 65_536


class Forwarder:
    """Forwards connections on a thread of its own, as a context manager.

    Attributes:
        target: Port on this machine that new connections go to.
    """

    def __init__(self, port: int) -> None:
        self.target = 0
        self._listener = socket.create_server(("127.0.0.1", port))
        self._peers: dict[socket.socket, socket.socket] = {}
        self._are_to_cut = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(timeout=30)

    def redirect(self, target: int) -> None:
        """Cut all connections; the next ones go to another port."""
        self.target = target
        self._are_to_cut.set()

    def _run(self) -> None:
        while not self._is_over.is_set():
            if self._are_to_cut.is_set():
                self._are_to_cut.clear()
                self._cut()
            ready, *_ = select.select([self._listener, *self._peers], [], [], LOOK_S)
            for each in ready:
                if each is self._listener:
                    self._connect()
                elif each in self._peers:
                    self._forward(each)
        self._cut()
        self._listener.close()

    def _connect(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            client.close()
            return
        self._peers |= {client: server, server: client}

    def _forward(self, source: socket.socket) -> None:
        peer, data = self._peers[source], b""
        with suppress(OSError):
            data = source.recv(BYTES)
            peer.sendall(data)
        if not data:
            for each in (source, peer):
                del self._peers[each]
                each.close()

    def _cut(self) -> None:
        for each in self._peers:
            each.close()
        self._peers = {}
