"""A base class that ``with`` blocks close, and new threads for calls that block."""

import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

P = ParamSpec("P")
T = TypeVar("T")


def in_background(
    call: Callable[[], object], *, name: str = "marshal-close"
) -> threading.Thread:
    """Start a call that may block on a new daemon thread; return the thread.

    Args:
        call: The call; its exception goes to ``threading.excepthook``.
        name: Name of the thread.
    """
    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    return thread


def begin(call: Callable[[], T], *, name: str) -> "Future[T]":
    """Start a call like ``in_background``; return a future that cannot be cancelled."""
    from concurrent.futures import Future

    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            found = call()
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            future.set_exception(error)
        else:
            future.set_result(found)

    in_background(run, name=name)
    return future


def unless_finalizing(close: Callable[P, None]) -> Callable[P, None]:
    """Return a function that does nothing while the interpreter ends.

    Then the other threads have stopped for good, so a close would wait for them
    forever: in ``__del__``, or in a generator that was never finished.
    """

    @wraps(close)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        if not sys.is_finalizing():
            close(*args, **kwargs)

    return call


class Closing(ABC):
    """Closes itself at the end of a ``with`` block, also after an exception.

    ``close`` of each subclass does nothing while the interpreter ends, see
    ``unless_finalizing``.
    """

    def __init_subclass__(cls) -> None:
        """Change the ``close`` of a subclass."""
        super().__init_subclass__()
        if "close" in vars(cls):
            setattr(cls, "close", unless_finalizing(vars(cls)["close"]))  # noqa: B010

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


def warn_unclosed(dropped: object) -> None:
    """Warn that an object was dropped open, as files and sockets do; takes no lock.

    For ``__del__``. That may run on any thread and interrupt any code, so it must not
    close the object.
    """
    warnings.warn(
        f"unclosed {dropped!r}: its claims are renewed until the process ends; close "
        "it, or use it in a with statement",
        ResourceWarning,
        stacklevel=3,
        source=dropped,
    )
