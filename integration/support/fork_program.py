"""Forks Python programs: the server behind `forked`, which starts it.

It has one thread and has imported what the programs import. Each request is a JSON
object on an inherited socket, with the streams of a program to start beside it.
"""

import gc
import json
import os
import runpy
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path

LENGTH_BYTES = 4
STREAMS = (0, 1, 2)
# What workers and sidecars load, also on first use.
PRELOADED = (
    "kafka_marshal.backend",
    "kafka_marshal.client",
    "kafka_marshal.engine.session",
    "kafka_marshal.engine.snapshotter",
    "kafka_marshal.grants",
    "kafka_marshal.kafka_io.fast.coordination",
    "kafka_marshal.kafka_io.fast.switching",
    "kafka_marshal.kafka_io.fast.transactions",
    "kafka_marshal.remote.backend",
    "kafka_marshal.sidecar.server",
    "kafka_marshal_cli.assembly",
    "kafka_marshal_cli.commands.consume",
    "kafka_marshal_cli.commands.sidecar",
    "worker_notes",
)


def main() -> None:
    """Serve until the socket is closed; in a fork, run its program as ``__main__``."""
    # An interrupt ends the programs; this server must still report their status.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        for name in PRELOADED:
            import_module(name)
        # Objects of the parent are never garbage in a fork.
        gc.collect()
        gc.freeze()
        arguments = serve(asked)
    if arguments:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


def serve(asked: socket.socket) -> list[str]:
    """Answer requests; return the command line in a fork, an empty one at the end."""
    while True:
        head, streams, *_ = socket.recv_fds(asked, LENGTH_BYTES, len(STREAMS))
        if not head:
            return []
        request = json.loads(asked.recv(int.from_bytes(head), socket.MSG_WAITALL))
        if "arguments" not in request:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif answer := os.fork():
            for handle in streams:
                os.close(handle)
        else:
            become(request["env"], streams)
            return request["arguments"]
        body = json.dumps(answer).encode()
        asked.sendall(len(body).to_bytes(LENGTH_BYTES) + body)


def become(env: dict[str, str], streams: list[int]) -> None:
    """Give this fork the environment, the streams and the signals of a new process."""
    for number, handle in zip(STREAMS, streams, strict=True):
        os.dup2(handle, number)
        os.close(handle)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    main()
