"""Threads that ask the sidecar for what may take a while, so that no lock waits."""

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import attrs

from kafka_marshal.errors import MarshalError
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api, paths
from kafka_marshal.remote.errors import NotRegistered
from kafka_marshal.remote.transport import Connection

CALLS_MAX = 1_024
IDLE_S = 60.0


class WorkerPool:
    """A few daemon threads for calls, which begin in the order they came.

    Args:
        name: Name of the threads.
        threads: How many calls run at a time. They start with the first call.
    """

    def __init__(self, name: str, *, threads: int) -> None:
        self._name = name
        self._most = threads
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(CALLS_MAX)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._is_closed = False

    def submit(self, call: Callable[[], None]) -> bool:
        """Have a call made soon; return whether there was room. Never blocks.

        What it raises ends nothing but itself: calls take care of their errors.
        """
        with self._lock:
            if self._is_closed:
                return False
            try:
                self._queue.put_nowait(call)
            except queue.Full:
                return False
            self._unfinished += 1
            # Counted until they end: the length of the queue would count a thread that
            # has just taken a call as one that is free for the next.
            if len(self._threads) < min(self._unfinished, self._most):
                thread = threading.Thread(
                    target=self._run, name=self._name, daemon=True
                )
                self._threads.append(thread)
                thread.start()
        return True

    def close(self, timeout_ms: int) -> None:
        """End after the calls under way; what queues is not begun. Idempotent."""
        with self._lock:
            self._is_closed = True
            threads = list(self._threads)
            while True:
                try:
                    self._queue.get_nowait()
                except queue.Empty:
                    break
            for _ in threads:
                self._queue.put_nowait(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout_ms / 1000)

    def _run(self) -> None:
        while True:
            try:
                # The deadline only bounds one wait; a daemon thread may idle.
                call = self._queue.get(timeout=IDLE_S)
            except queue.Empty:
                continue
            if call is None:
                return
            try:
                call()
            finally:
                with self._lock:
                    self._unfinished -= 1


HEARD_MS = 5_000
REST_S = 0.2
FLUSH_TRIES_MAX = 100


@attrs.frozen
class _End:
    name: str
    returned: tuple[api.Release, ...]
    keep: bool


class CommandQueue:
    """Carries what one session says. Called under the lock, but for its own threads.

    Args:
        connection: To the sidecar.
        lock: The lock of the session's engine, as a context.
        news: Called under the lock whenever something was heard.
        workers: Threads that carry.
        stopped: Set once nothing is to be carried any more.
        standings: Returns how far everything is. Under the lock.
        heard: Takes the answer to a flush. Under the lock.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        lock: threading.Condition,
        workers: WorkerPool,
        stopped: threading.Event,
        standings: Callable[[], tuple[api.Progress, ...]],
        heard: Callable[[api.HeartbeatResponse, tuple[api.Progress, ...]], None],
    ) -> None:
        self._connection = connection
        self._lock = lock
        self._workers = workers
        self._stopped = stopped
        self._standings = standings
        self._heard = heard
        self._seq = 0
        self._open: set[int] = set()
        # Not heard, and not asked any more: they may have been all the same.
        self._late: set[int] = set()
        self._returned: dict[tuple[str, int, int], api.Release] = {}
        # Number of the wish for each key that is, or was, wanted alone.
        self._wanted: dict[Key, int] = {}
        self._is_returning = False
        self._is_flushing = False
        self._flushes: list[int] = []

    # --- what the session says

    @property
    def returning_count(self) -> int:
        """Number of keys given back that the sidecar has not confirmed."""
        return len(self._returned)

    def is_pending(self, seqs: Iterable[int], *, late: bool) -> bool:
        """Return whether any is still to be waited for."""
        # What queued when all was stopped is never heard.
        is_over = self._stopped.is_set()
        waiting = set() if is_over else self._open
        lost = self._late | self._open if is_over else self._late
        return any(seq in waiting or (late and seq in lost) for seq in seqs)

    def give_back(self, returned: Sequence[api.Release]) -> None:
        """Tell what is not used any more, until the sidecar knows."""
        for each in returned:
            self._returned[each.topic, each.partition, each.epoch] = each
        if returned and not self._is_returning:
            self._is_returning = self._workers.submit(self._return_all)

    def end(self, name: str, returned: Sequence[api.Release], *, keep: bool) -> int:
        """Tell that a subscription is over; return what to wait for."""
        return self._carry(partial(self._end, _End(name, tuple(returned), keep)))

    def wish_of(self, key: Key) -> int:
        """Return the number of the present wish for a key: the next is another."""
        return self._wanted.get(key, 1)

    def unclaim(self, key: Key) -> None:
        """Tell that a key is wanted no more, after what was given back of it."""
        wish = self.wish_of(key)
        self._wanted[key] = wish + 1
        parts = {"topic": key.topic, "partition": key.partition}
        path = self._connection.path(paths.CLAIM, parts)

        def say() -> None:
            # That may be under way on another thread, and has the position.
            with self._lock:
                left = tuple(
                    each
                    for each in self._returned.values()
                    if (each.topic, each.partition) == key.topic_partition
                )
            if left:
                self._release(left)
            self._connection.tell("DELETE", path, query={"wish": str(wish)})

        self._carry(say)

    def flush(self) -> int:
        """Tell every position; return what to wait for."""
        seq = self._next()
        self._flushes.append(seq)
        if not self._is_flushing:
            self._is_flushing = self._workers.submit(self._flush_all)
        return seq

    def _next(self) -> int:
        self._seq += 1
        self._open.add(self._seq)
        return self._seq

    def _carry(self, say: Callable[[], None]) -> int:
        """Have something said, again and again until it was heard or refused."""
        seq = self._next()

        def carry() -> None:
            is_heard = self._persist(say)
            with self._lock:
                self._settle([seq], is_heard=is_heard)

        if not self._workers.submit(carry):
            self._settle([seq], is_heard=False)
        return seq

    def _settle(self, seqs: Iterable[int], *, is_heard: bool) -> None:
        self._open.difference_update(seqs)
        if not is_heard:
            self._late.update(seqs)
        self._lock.notify_all()

    def _persist(self, say: Callable[[], None]) -> bool:
        """Say something until it was heard; return whether it was."""
        while not self._stopped.is_set():
            try:
                say()
            except NotRegistered:
                return True  # whoever does not know us has nothing of ours
            except MarshalError as error:
                if not may_pass(error):
                    return True
                self._stopped.wait(REST_S)
            else:
                return True
        return False

    # --- on threads of its own

    def _end(self, end: _End) -> None:
        parts = {"name": end.name}
        self._connection.tell(
            "POST",
            self._connection.path(paths.SUBSCRIPTION_END, parts),
            body=api.ReleaseRequest(returned=end.returned, timeout_ms=HEARD_MS),
            timeout_ms=HEARD_MS,
            query={"keep": "true"} if end.keep else None,
        )

    def _release(self, returned: tuple[api.Release, ...]) -> None:
        said = api.ReleaseRequest(returned=returned, timeout_ms=HEARD_MS)
        path = self._connection.path(paths.RELEASED)
        self._connection.tell("POST", path, body=said, timeout_ms=HEARD_MS)

    def _return_all(self) -> None:
        while True:
            with self._lock:
                taken = dict(list(self._returned.items())[: api.PROGRESS_MAX])
                if not taken or self._stopped.is_set():
                    self._is_returning = False
                    return
            is_heard = self._persist(partial(self._release, tuple(taken.values())))
            with self._lock:
                if is_heard:
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
                    self._settle(seqs, is_heard=False)
                    return
                told = self._standings()
            beat = api.HeartbeatRequest(standings=told, flush=True, timeout_ms=HEARD_MS)
            try:
                said = self._connection.ask(
                    "POST",
                    path,
                    answer=api.HeartbeatResponse,
                    body=beat,
                    timeout_ms=HEARD_MS,
                )
            except MarshalError:
                # Also where a claim of these has ended: the event is on its way,
                # and the next try tells of the others.
                tries += 1
                self._stopped.wait(REST_S)
                continue
            tries = 0
            with self._lock:
                self._heard(said, told)
                del self._flushes[: len(seqs)]
                self._settle(seqs, is_heard=True)


def may_pass(error: MarshalError) -> bool:
    """Return whether saying the same again may be heard."""
    return error.retriable or isinstance(error, TimeoutError)
