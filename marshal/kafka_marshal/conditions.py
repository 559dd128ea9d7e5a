"""A condition that an exception of a signal handler does not leave locked."""

import threading
from operator import attrgetter


class Condition(threading.Condition):
    """``threading.Condition``, for threads that run signal handlers.

    Python runs a handler between two calls. ``threading.Condition`` enters and leaves
    in Python code: an exception of a handler, as Ctrl-C raises, between its acquiring
    the lock and the beginning of the block left the lock to its thread for good. This
    one is entered and left without a call of Python code, as a plain lock is.
    """

    # Found by `with`; both getters are compiled, not Python code.
    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as ``threading.Condition`` does; the lock is held after any exception.

        Call it where the lock was acquired once.
        """
        try:
            return super().wait(timeout)
        finally:
            # Not if a handler raised as the lock was released, before the wait.
            if not self._is_owned():  # type: ignore[attr-defined]
                self.__enter__()
