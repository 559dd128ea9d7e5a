"""Connections to the Unix socket of a sidecar.

Imports only a little of the standard library: ``marshal-probe`` uses it.
"""

import socket
import time

RETRY_S = 0.01


def connect(path: str, timeout_s: float) -> socket.socket:
    """Return a connection; its later operations have the same timeout.

    If many processes connect at once, the queue of the listening socket is full for a
    moment. Then the system refuses at once, instead of waiting as over TCP, and this
    tries again.

    Raises:
        OSError: No process listens there, or its queue stays full.
    """
    until_s = time.monotonic() + timeout_s
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        while True:
            try:
                connection.connect(path)
            except BlockingIOError as error:
                if time.monotonic() >= until_s:
                    raise TimeoutError(
                        f"the sidecar accepted no connection for {timeout_s:g} s: "
                        "its listen queue was full"
                    ) from error
                time.sleep(RETRY_S)
            else:
                return connection
    except BaseException:
        connection.close()
        raise
