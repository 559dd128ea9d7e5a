import socket
import threading

import pytest
from slowness import until

from kafka_marshal.errors import InvalidTransition
from simulator.slowlink import SlowLink

NEVER_MS = 3_600_000
WAIT_S = 60


@pytest.fixture
def echo():
    """Return the address of a server that echoes the bytes of one client."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S)

        def serve():
            client, _ = server.accept()
            with client:
                client.settimeout(WAIT_S)
                while data := client.recv(1 << 16):
                    client.sendall(data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(timeout=WAIT_S)
        assert not thread.is_alive()


def connect(link):
    host, port = link.address.split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def test_all_bytes_arrive_in_order(echo):
    data = bytes(range(256)) * 4_096
    with SlowLink(delay_ms=5) as link:
        link.lead_to(echo)
        with connect(link) as client:
            threading.Thread(target=client.sendall, args=(data,), daemon=True).start()
            got = b""
            while len(got) < len(data):
                got += client.recv(1 << 16)
            assert got == data
            # The link counts sent bytes on its own thread.
            until(lambda: link.delivered_bytes == len(data), "all counted")
        assert link.under_way_bytes == 0


def test_delayed_bytes_are_in_transit(echo):
    with SlowLink(delay_ms=NEVER_MS) as link:
        link.lead_to(echo)
        with connect(link) as client:
            client.sendall(b"hello")
            client.settimeout(0.01)
            while link.under_way_bytes < 5:
                with pytest.raises(TimeoutError):
                    client.recv(1)
            assert link.delivered_bytes == 0


def test_connections_are_closed_until_the_link_has_a_target():
    with SlowLink(delay_ms=0) as link, connect(link) as client:
        assert client.recv(1) == b""


def test_a_link_cannot_be_entered_twice():
    link = SlowLink(delay_ms=0)
    with link, pytest.raises(InvalidTransition, match="already"):
        link.__enter__()
