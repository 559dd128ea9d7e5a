"""Sends the session's commands to the sidecar on worker threads, outside the lock."""

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import attrs

from kafka_marshal.clock import WorkerPool
from kafka_marshal.errors import CoordinationError, MarshalError
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api, paths
from kafka_marshal.remote.transport import Connection, NotRegistered

CALLS_MAX = 1_024
CONFIRM_MS = 5_000
REST_S = 0.2
FLUSH_TRIES_MAX = 100


@attrs.frozen
class _End:
    name: str
    returned: tuple[api.Release, ...]
    keep: bool


class CommandQueue:
    """Sends the commands of one session. Called under the lock.

    Args:
        connection: To the sidecar.
        lock: The condition of the session's engine; notified after each confirmation.
        workers: Threads that send.
        stopped: Set once no more commands may be sent.
        progress: Returns the progress of every held key. Called under the lock.
        on_flushed: Handles the answer to a flush. Called under the lock.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        lock: threading.Condition,
        workers: WorkerPool,
        stopped: threading.Event,
        progress: Callable[[], tuple[api.Progress, ...]],
        on_flushed: Callable[[api.HeartbeatResponse, tuple[api.Progress, ...]], None],
    ) -> None:
        self._connection = connection
        self._lock = lock
        self._workers = workers
        self._stopped = stopped
        self._progress = progress
        self._on_flushed = on_flushed
        self._seq = 0
        self._open: set[int] = set()
        # Commands without confirmation that are not repeated any more; the sidecar may
        # have applied them.
        self._late: set[int] = set()
        self._returned: dict[tuple[str, int, int], api.Release] = {}
        # How many times each key was wanted without a subscription.
        self._wanted: dict[Key, int] = {}
        self._is_returning = False
        self._is_flushing = False
        self._flushes: list[int] = []

    # --- commands of the session

    @property
    def returning_count(self) -> int:
        """Number of releases that the sidecar has not confirmed."""
        return len(self._returned)

    def is_pending(self, seqs: Iterable[int], *, late: bool) -> bool:
        """Return whether any is unconfirmed; with ``late``, also if it was given up."""
        # Commands still queued at the stop are never sent.
        is_over = self._stopped.is_set()
        waiting = set() if is_over else self._open
        lost = self._late | self._open if is_over else self._late
        return any(seq in waiting or (late and seq in lost) for seq in seqs)

    def require_reachable(self) -> None:
        """Require that the sidecar runs, or may be back in a moment.

        Raises:
            CoordinationError: No sidecar has run at the address for a while.
        """
        if self._connection.is_gone:
            raise CoordinationError(
                "no sidecar runs to confirm the release or commit; claims that it held "
                "for this client expire, or are released once it runs again: marshal "
                "sidecar run"
            )

    def give_back(self, returned: Sequence[api.Release]) -> None:
        """Return keys to the sidecar; repeat until it confirms."""
        self._connection.count_gone_again()
        for each in returned:
            self._returned[each.topic, each.partition, each.epoch] = each
        if returned and not self._is_returning:
            self._is_returning = self._workers.submit(self._return_all)

    def end(self, name: str, returned: Sequence[api.Release], *, keep: bool) -> int:
        """End a subscription; return the number to wait for."""
        self._connection.count_gone_again()
        return self._send(partial(self._end, _End(name, tuple(returned), keep)))

    def want_number(self, key: Key) -> int:
        """Return how many times a key has been wanted, at least 1."""
        return self._wanted.get(key, 1)

    def unclaim(self, key: Key) -> None:
        """Withdraw the claim of a key, after the release of what was held of it."""
        number = self.want_number(key)
        self._wanted[key] = number + 1
        parts = {"topic": key.topic, "partition": key.partition}
        path = self._connection.path(paths.CLAIM, parts)

        def command() -> None:
            # Another thread may be sending the release, with the position, right now.
            with self._lock:
                left = tuple(
                    each
                    for each in self._returned.values()
                    if (each.topic, each.partition) == key.topic_partition
                )
            if left:
                self._release(left)
            self._connection.send("DELETE", path, query={"request": str(number)})

        self._send(command)

    def ready(self, key: Key, epoch: int) -> None:
        """Report that the application has warmed up; repeat until it is answered."""
        report = api.ReadyRequest(topic=key.topic, partition=key.partition, epoch=epoch)
        path = self._connection.path(paths.READY)
        self._send(lambda: self._connection.send("POST", path, body=report))

    def flush(self) -> int:
        """Report every position; return the number to wait for."""
        seq = self._next()
        self._flushes.append(seq)
        if not self._is_flushing:
            self._is_flushing = self._workers.submit(self._flush_all)
        return seq

    def _next(self) -> int:
        self._seq += 1
        self._open.add(self._seq)
        return self._seq

    def _send(self, command: Callable[[], None]) -> int:
        """Queue a command, which is repeated until it is confirmed or refused."""
        seq = self._next()

        def run() -> None:
            is_confirmed = self._persist(command)
            with self._lock:
                self._settle([seq], is_confirmed=is_confirmed)

        if not self._workers.submit(run):
            self._settle([seq], is_confirmed=False)
        return seq

    def _settle(self, seqs: Iterable[int], *, is_confirmed: bool) -> None:
        self._open.difference_update(seqs)
        if not is_confirmed:
            self._late.update(seqs)
        self._lock.notify_all()

    def _persist(self, command: Callable[[], None]) -> bool:
        """Repeat a command until it is answered; return False if stopped before."""
        while not self._stopped.is_set():
            try:
                command()
            except NotRegistered:
                return True  # the sidecar holds nothing for a client it does not know
            except MarshalError as error:
                if not may_pass(error):
                    return True
                self._stopped.wait(REST_S)
            else:
                return True
        return False

    # --- on worker threads

    def _end(self, end: _End) -> None:
        parts = {"name": end.name}
        self._connection.send(
            "POST",
            self._connection.path(paths.SUBSCRIPTION_END, parts),
            body=api.ReleaseRequest(returned=end.returned, timeout_ms=CONFIRM_MS),
            timeout_ms=CONFIRM_MS,
            query={"keep": "true"} if end.keep else None,
        )

    def _release(self, returned: tuple[api.Release, ...]) -> None:
        request = api.ReleaseRequest(returned=returned, timeout_ms=CONFIRM_MS)
        path = self._connection.path(paths.RELEASED)
        self._connection.send("POST", path, body=request, timeout_ms=CONFIRM_MS)

    def _return_all(self) -> None:
        while True:
            with self._lock:
                taken = dict(list(self._returned.items())[: api.PROGRESS_MAX])
                if not taken or self._stopped.is_set():
                    self._is_returning = False
                    return
            is_confirmed = self._persist(partial(self._release, tuple(taken.values())))
            with self._lock:
                if is_confirmed:
                    for name, each in taken.items():
                        if self._returned.get(name) is each:
                            del self._returned[name]
                self._lock.notify_all()

    def _flush_all(self) -> None:
        path = self._connection.path(paths.BEAT)
        tries = 0
        while True:
            with self._lock:
                seqs = list(self._flushes)
                is_over = self._stopped.is_set() or tries >= FLUSH_TRIES_MAX
                if not seqs or is_over:
                    self._flushes.clear()
                    self._is_flushing = False
                    self._settle(seqs, is_confirmed=False)
                    return
                reported = self._progress()
            beat = api.HeartbeatRequest(
                progress=reported, flush=True, timeout_ms=CONFIRM_MS
            )
            try:
                response = self._connection.ask(
                    "POST",
                    path,
                    answer=api.HeartbeatResponse,
                    body=beat,
                    timeout_ms=CONFIRM_MS,
                )
            except MarshalError:
                # Also raised if one of these claims has ended: its event will arrive,
                # and the next try reports the others.
                tries += 1
                self._stopped.wait(REST_S)
                continue
            tries = 0
            with self._lock:
                self._on_flushed(response, reported)
                del self._flushes[: len(seqs)]
                self._settle(seqs, is_confirmed=True)


def may_pass(error: MarshalError) -> bool:
    """Return whether the same request may succeed later."""
    return error.retriable or isinstance(error, TimeoutError)
