"""Signals that ask the process to end, passed on to its open clients."""

import os
import signal
from collections.abc import Sequence
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, Protocol


class Stoppable(Protocol):
    """A client to stop in a signal handler: ``stop`` neither waits nor takes a lock."""

    def stop(self) -> None:
        """End soon."""
        ...


_clients: dict[int, list[Stoppable]] = {}
# A child has no claims: a signal ends it as if nothing had been registered.
os.register_at_fork(after_in_child=_clients.clear)
# The handler that each signal had before ``_handle``.
_before: dict[int, Any] = {}


def stop_on(signals: Sequence[signal.Signals], client: Stoppable) -> None:
    """Register a client to be stopped when one of the signals arrives.

    Clients that were registered before are stopped as well. For the main thread.

    Raises:
        ValueError: Another thread called it.
    """
    for number in signals:
        if signal.getsignal(number) is not _handle:
            _before[number] = signal.signal(number, _handle) or signal.SIG_DFL
        if client not in (clients := _clients.setdefault(number, [])):
            clients.append(client)


def forget(client: Stoppable) -> None:
    """Unregister a client, if it was registered; for any thread.

    If it was the last client, and this is the main thread, the previous handler is
    restored, unless the application has installed another one since. On other threads
    ``_handle`` stays, and calls the previous handler.
    """
    for number, clients in _clients.items():
        if client not in clients:
            continue
        clients.remove(client)
        is_main = current_thread() is main_thread()
        if not clients and is_main and signal.getsignal(number) is _handle:
            signal.signal(number, _before[number])


def _handle(number: int, frame: FrameType | None) -> None:
    if clients := _clients.get(number):
        for client in tuple(clients):
            client.stop()
        return
    before = _before[number]
    if callable(before):
        before(number, frame)
    elif before is signal.SIG_DFL:
        signal.signal(number, before)
        signal.raise_signal(number)
