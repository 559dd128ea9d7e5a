"""A signal stops every client that asked for it, and none that is closed."""

import asyncio
import os
import signal
import threading
from signal import SIGUSR1, SIGUSR2

import pytest
from aiokit import Client as LoopClient
from aiokit import opened_over, run
from enginekit import H, Stepping, held_by, spec, world

from kafka_marshal.stopping import forget, stop_on


class Client:
    def __init__(self):
        self.stopped_count = 0

    def stop(self):
        self.stopped_count += 1


@pytest.fixture
def handled():
    """Signals that reached the application's own handlers."""
    found = []
    before = {
        each: signal.signal(each, lambda number, _: found.append(number))
        for each in (SIGUSR1, SIGUSR2)
    }
    yield found
    for each, handler in before.items():
        signal.signal(each, handler)


def in_a_child(work):
    """Call in a forked child; return the signal that ended it, or -1."""
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -1


def on_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_a_signal_stops_all_clients(handled):
    """The last client to register must not replace the others."""
    one, other = Client(), Client()
    stop_on([SIGUSR1, SIGUSR2], one)
    stop_on([SIGUSR1], other)
    stop_on([SIGUSR1], other)
    signal.raise_signal(SIGUSR1)
    signal.raise_signal(SIGUSR2)
    assert (one.stopped_count, other.stopped_count, handled) == (2, 1, [])
    forget(one)
    forget(other)


@pytest.mark.parametrize("last", ["one", "other"])
def test_the_earlier_handler_is_restored_after_the_last_client_closes(handled, last):
    """In whatever order the clients are closed."""
    before = signal.getsignal(SIGUSR1)
    clients = {"one": Client(), "other": Client()}
    for client in clients.values():
        stop_on([SIGUSR1], client)
    left = clients.pop(last)
    (closed,) = clients.values()
    forget(closed)
    signal.raise_signal(SIGUSR1)
    assert (left.stopped_count, closed.stopped_count) == (1, 0)
    forget(left)
    forget(left)
    assert signal.getsignal(SIGUSR1) is before
    signal.raise_signal(SIGUSR1)
    assert handled == [SIGUSR1]


def test_any_thread_may_forget_a_client(handled):
    client = Client()
    stop_on([SIGUSR1], client)
    on_a_thread(lambda: forget(client))
    signal.raise_signal(SIGUSR1)
    assert (client.stopped_count, handled) == (0, [SIGUSR1])


@pytest.mark.parametrize(
    ("before", "ending"), [(signal.SIG_DFL, SIGUSR1), (signal.SIG_IGN, -1)]
)
def test_a_signal_after_the_last_client_has_its_earlier_effect(before, ending):
    def work():
        client = Client()
        signal.signal(SIGUSR1, before)
        stop_on([SIGUSR1], client)
        on_a_thread(lambda: forget(client))
        signal.raise_signal(SIGUSR1)

    assert in_a_child(work) == ending


def test_a_signal_ends_a_forked_child(handled):
    """Else it would only stop the child's copy of its parent's client."""
    client = Client()
    signal.signal(SIGUSR1, signal.SIG_DFL)
    stop_on([SIGUSR1], client)
    assert in_a_child(lambda: signal.raise_signal(SIGUSR1)) == SIGUSR1
    forget(client)


def test_a_handler_installed_later_stays(handled):
    client = Client()
    stop_on([SIGUSR1], client)

    def handle(number, frame):
        before(number, frame)

    before = signal.signal(SIGUSR1, handle)
    signal.raise_signal(SIGUSR1)
    forget(client)
    assert (client.stopped_count, signal.getsignal(SIGUSR1)) == (1, handle)
    signal.raise_signal(SIGUSR1)
    assert handled == [SIGUSR1]


def test_another_thread_cannot_register():
    errors = []

    def register():
        try:
            stop_on([SIGUSR1], Client())
        except ValueError as error:
            errors.append(error)

    on_a_thread(register)
    assert len(errors) == 1


def test_a_signal_stops_the_clients_of_a_loop_until_they_close():
    before, cluster = signal.getsignal(SIGUSR1), world(records=(10, 10))
    nodes = [cluster.node(name, spec=spec()) for name in "ab"]
    cluster.run_until(lambda: all(held_by(each, 1)() for each in nodes), 4 * H)
    for node in nodes:
        node.engine.changed = Stepping(cluster)

    async def iterate(node):
        async with opened_over(lambda: LoopClient(node)) as marshal:
            marshal.stop_on_signals([SIGUSR1])
            consumer = marshal.adopt(lambda: node.consumer)
            return [record async for record in consumer]

    async def work():
        tasks = [asyncio.create_task(iterate(each)) for each in nodes]
        while not all(each.consumer.is_closed for each in nodes):
            await asyncio.sleep(0)
            if signal.getsignal(SIGUSR1) is not before:
                signal.raise_signal(SIGUSR1)
        await asyncio.gather(*tasks)

    run(work)
    assert signal.getsignal(SIGUSR1) is before
