"""A condition that an exception of a signal handler does not leave locked."""

import threading
from operator import attrgetter


class Condition(threading.Condition):
    """``threading.Condition``, for threads that run signal handlers.

    Python runs a handler between two calls. ``threading.Condition`` is entered and left
    in Python code. If a handler raises, as Ctrl-C does, after that code has acquired
    the lock and before the block begins, the thread keeps the lock for ever. This
    class is entered and left without Python code, like a plain lock.
    """

    # Found by `with`; both getters are compiled, not Python code.
    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as ``threading.Condition`` does; the lock is held after any exception.

        The caller must have acquired the lock exactly once.
        """
        try:
            return super().wait(timeout)
        finally:
            # Not held if a handler raised after the lock was released for the wait.
            if not self._is_owned():  # type: ignore[attr-defined]
                self.__enter__()
