"""The compiled part of the package, which is optional.

It repeats a few functions, many times as fast. Those in Python are the rule, and
run where nothing was compiled. ``hatch_build.py`` compiles ``native/``.
"""

from importlib import import_module
from types import ModuleType
from typing import Protocol

REVISION = 13
"""Changes with what the compiled functions take or return."""


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
"""Address and size of the records of a partition, and what ``index_records`` returns of
them, without a first offset."""


class Receiver(Protocol):
    """Receives from a socket on a thread of its own, which takes no interpreter lock.

    ``native/receiver.c`` has the only one. It is used by one thread at a time, and only
    by the process that made it. The constructor takes the number of a socket that does
    not block, and uses a duplicate of it.
    """

    def start(
        self, head: memoryview, body: memoryview, at: int, fetch_version: int, /
    ) -> None:
        """Begin to receive a response.

        Args:
            head: For its size, of four bytes; empty to fill all of ``body``.
            body: For its content. If the size is not between the half and all of its
                length, only the head is received.
            at: How much of the content was received before.
            fetch_version: Of Fetch, to check and index its batches; -1 for others.

        Raises:
            ValueError: Another one is being received, or the receiver is closed.
        """
        ...

    def fileno(self) -> int:
        """Return what is readable once ``finish`` returns a number."""
        ...

    def finish(self) -> tuple[int, list[KnownIndex]] | None:
        """Return how many bytes were received, and indexes; None if more are to come.

        Too few if the connection has ended. There is an index of the first batches of
        each partition that has records, as many as were checked since.

        Raises:
            ValueError: Nothing is being received, or the receiver is closed.
        """
        ...

    def close(self) -> None:
        """End the thread, and the connection if something is being received."""
        ...
