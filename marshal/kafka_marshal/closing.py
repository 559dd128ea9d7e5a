"""Closing: by a ``with`` block, and in the background where it may block."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self


def in_background(
    call: Callable[[], object], *, name: str = "marshal-close"
) -> threading.Thread:
    """Start a call, which may block, on a daemon thread of its own; return that.

    Args:
        call: The call; an error of it goes to ``threading.excepthook``.
        name: Name of the thread.
    """
    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    return thread


class Closing(ABC):
    """Closes itself at the end of a ``with`` block, however that ends."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Idempotent."""

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()
