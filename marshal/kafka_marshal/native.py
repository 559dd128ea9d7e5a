"""The compiled part of the package, which is optional.

It repeats a few Python functions, many times as fast. The Python functions define the
behavior, and run if nothing was compiled. ``hatch_build.py`` compiles ``native/``.
"""

from importlib import import_module
from types import ModuleType
from typing import Protocol

REVISION = 13
"""Raised with each change of the arguments or results of compiled functions."""


def load(name: str = "kafka_marshal._native") -> ModuleType | None:
    """Return the compiled module; None if it is missing, or of another revision.

    An editable install may have one that was compiled from earlier sources.
    """
    try:
        module = import_module(name)
    except ImportError:
        return None
    return module if getattr(module, "REVISION", None) == REVISION else None


compiled = load()


KnownIndex = tuple[int, int, tuple[bytes, int, int, int, int, int]]
"""Address and size of the records of a partition, and the result of ``index_records``
for them, called without a first offset."""


class Receiver(Protocol):
    """Receives from a socket on a thread of its own, without the interpreter lock.

    ``native/receiver.c`` is the only implementation. One thread at a time may use it,
    and only in the process that made it. The constructor takes the file descriptor of a
    socket that does not block, and uses a duplicate of it.
    """

    def start(
        self, head: memoryview, body: memoryview, at: int, fetch_version: int, /
    ) -> None:
        """Begin to receive a response.

        Args:
            head: Buffer of four bytes for the size of the response; empty to fill all
                of ``body``.
            body: Buffer for the content. If the size is not between half and all of
                this buffer's length, only the head is received.
            at: Number of bytes of the content that were received before.
            fetch_version: Version of a Fetch response, to check and index its batches;
                -1 for other responses.

        Raises:
            ValueError: Another response is being received, or the receiver is closed.
        """
        ...

    def fileno(self) -> int:
        """Return a file descriptor that is readable once ``finish`` has a result."""
        ...

    def finish(self) -> tuple[int, list[KnownIndex]] | None:
        """Return the number of bytes received, and indexes; None while not finished.

        The number is too small if the connection has ended. There is an index for each
        partition that has records. It covers the first batches, as many as were checked
        so far.

        Raises:
            ValueError: Nothing is being received, or the receiver is closed.
        """
        ...

    def close(self) -> None:
        """End the thread; also end the connection if a response is being received."""
        ...
