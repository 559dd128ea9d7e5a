"""The command ``marshal-probe live|ready|started``: a health check of a local sidecar.

For probes that run as a command every few seconds: the module imports little of the
standard library, so each costs a fraction of what the command ``marshal`` does.
"""

import os
import sys
import time

from kafka_marshal.unix_sockets import connect

PLACES = {"live": b"/livez", "ready": b"/readyz", "started": b"/startupz"}
FOLDER_NAME = "kafka-marshal"
SOCKET_NAME = "sidecar.sock"
# Less than the timeout of a Kubernetes probe, so that this command's message is shown.
TIMEOUT_S = 4.0
ANSWER_BYTES_MAX = 64 * 1024
# The exit codes of the command (docs/cli.md).
OK, USAGE, REFUSED, NO_ANSWER = 0, 2, 3, 5
_STATUS_OK = 200
_USAGE = """\
usage: marshal-probe live|ready|started [SOCKET]

Exits with 0 if yes, 3 if no, 5 if no sidecar answers within 4 s.
SOCKET is the sidecar's Unix socket; by default $MARSHAL_SIDECAR_SOCKET, else
kafka-marshal/sidecar.sock in $XDG_RUNTIME_DIR or /run. Profiles are not read.
"""


def default_socket() -> str:
    """Return the default path of a sidecar's socket.

    It is in the user's runtime directory, which is private, or else in /run.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or "/run"
    return os.path.join(base, FOLDER_NAME, SOCKET_NAME)  # noqa: PTH118 - no pathlib


def ask(path: str, place: bytes, *, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
    """Return status and body of a ``GET``.

    Args:
        path: The sidecar's Unix socket.
        place: Path of the request.
        timeout_s: Limit of the whole exchange, in seconds.

    Raises:
        OSError: No response arrived in time.
        ValueError: The response is not HTTP.
    """
    deadline = time.monotonic() + timeout_s
    found = bytearray()
    with connect(path, timeout_s) as connection:
        connection.sendall(
            b"GET %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % place
        )
        while len(found) < ANSWER_BYTES_MAX:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            piece = connection.recv(ANSWER_BYTES_MAX)
            if not piece:
                break
            found += piece
    head, _, body = bytes(found).partition(b"\r\n\r\n")
    protocol, _, rest = head.partition(b" ")
    if not protocol.startswith(b"HTTP/1."):
        raise ValueError("the response is not HTTP")
    return int(rest[:3]), body


def main() -> None:
    """Send the request, print the response, and exit with the matching code."""
    arguments = sys.argv[1:]
    if arguments in (["--help"], ["-h"]):
        sys.stdout.write(_USAGE)
        sys.exit(OK)
    if not 1 <= len(arguments) <= 2 or arguments[0] not in PLACES:  # noqa: PLR2004
        sys.stderr.write(_USAGE)
        sys.exit(USAGE)
    named = os.environ.get("MARSHAL_SIDECAR_SOCKET") or default_socket()
    path = os.path.expanduser((*arguments[1:], named)[0])  # noqa: PTH111 - no pathlib
    try:
        status, body = ask(path, PLACES[arguments[0]])
    except (OSError, ValueError) as error:
        sys.stderr.write(
            f"marshal-probe: no sidecar answers on {path!r}: {error}; start one with: "
            "marshal sidecar run, or name its socket\n"
        )
        sys.exit(NO_ANSWER)
    sys.stdout.write(body.decode("utf-8", "backslashreplace") + "\n")
    sys.exit(OK if status == _STATUS_OK else REFUSED)


if __name__ == "__main__":
    main()
