"""One thread at a time reads from a consumer; others may call the other methods."""

import os
import signal
import threading

import pytest
from enginekit import ALO, AMO, T0, H, Stepping, held_by, spec, world
from threadkit import in_thread

from kafka_marshal.errors import InvalidTransition


def owning(delivery, meanwhile):
    """Return an owner of a partition; during its next read it calls ``meanwhile``."""
    cluster = world(records=[10])
    node = cluster.node(
        "a",
        spec=spec(delivery=delivery, on_claimed=lambda *_: meanwhile(node.consumer)),
    )
    cluster.run_until(held_by(node, 1), 3 * H)
    cluster.run(40)
    node.engine.changed = Stepping(cluster)
    return cluster, node


@pytest.mark.parametrize("delivery", [ALO, AMO])
@pytest.mark.parametrize(
    "read",
    [
        lambda consumer: consumer.poll(0),
        lambda consumer: consumer.poll(0, 1),
        lambda consumer: consumer.poll_fetched(),
        lambda consumer: consumer.batch_fetched(None, lambda _: None),
        next,
        lambda consumer: next(consumer.batches()),
        lambda consumer: next(consumer.transactions()),
        lambda consumer: consumer.seek(T0, 0),
        lambda consumer: consumer.seek_to_end(),
    ],
)
def test_a_second_thread_that_reads_gets_an_error(read, delivery):
    """Else records would be handed out twice, or committed unread."""
    caught = []
    cluster, node = owning(
        delivery, lambda consumer: caught.append(in_thread(lambda: read(consumer)))
    )
    offsets = []
    for _ in range(20):
        offsets += [each.offset for each in node.consumer.poll(0).get(T0, ())]
        cluster.run(40)
    assert offsets == list(range(10))
    (error,) = caught
    assert isinstance(error, InvalidTransition)
    is_at_all = delivery is ALO or "at most once" not in str(error)
    assert not is_at_all or "another thread is reading" in str(error)


@pytest.mark.parametrize(
    "read",
    [
        lambda consumer: consumer.poll(0),
        next,
        lambda consumer: next(consumer.batches()),
        lambda consumer: next(consumer.transactions()),
        lambda consumer: consumer.seek(T0, 0),
    ],
)
def test_a_forked_child_gets_an_error_although_a_thread_held_the_lock(read):
    """A child has no such thread: the lock is held for ever."""
    _, node = owning(ALO, lambda _: None)
    held, done = threading.Event(), threading.Event()

    def hold():
        with node.engine.lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    pid = os.fork()
    if not pid:
        signal.alarm(60)  # ends a child that waits for the lock
        try:
            read(node.consumer)
        except InvalidTransition as error:
            os._exit(0 if "parent process" in str(error) else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(pid, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


def test_another_thread_may_call_other_methods_during_a_read():
    found = []

    def ask(consumer):
        consumer.pause(T0)
        consumer.resume(T0)
        return (
            consumer.assignment(),
            consumer.position(T0),
            consumer.committed(T0),
            set(consumer.tokens()),
            consumer.lag(),
            consumer.load(),
            consumer.paused(),
        )

    def ask_in_thread(consumer):
        found.append(in_thread(lambda: ask(consumer)))

    _, node = owning(ALO, ask_in_thread)
    records = node.consumer.poll(0)[T0]
    assert found == [({T0}, 0, 0, {T0}, {T0: 10}, 1, set())]
    in_thread(lambda: node.consumer.commit(records))
    assert in_thread(lambda: node.consumer.committed(T0)) == 10


def test_another_thread_may_read_after_a_read_has_ended():
    _, node = owning(ALO, lambda _: None)
    first = node.consumer.poll(0, 4)[T0]
    second = in_thread(lambda: [next(node.consumer), next(node.consumer)])
    assert [each.offset for each in (*first, *second)] == [0, 1, 2, 3, 4, 5]


def test_a_callback_may_seek():
    _, node = owning(ALO, lambda consumer: consumer.seek(T0, 7))
    found = node.consumer.poll(0) or node.consumer.poll(0)
    assert [each.offset for each in found[T0]] == [7, 8, 9]
    assert node.consumer.committed(T0) == 7


@pytest.mark.parametrize("delivery", [ALO, AMO])
def test_a_close_of_another_thread_waits_for_the_call_in_progress(delivery):
    """Else the close could fail, and claims be renewed until the process ends."""
    closers = []

    def begin_to_close(consumer):
        closer = threading.Thread(target=consumer.close)
        closers.append(closer)
        closer.start()
        assert not consumer.is_closed

    _, node = owning(delivery, begin_to_close)
    node.consumer.poll(0)
    closers[0].join(30)
    assert node.consumer.is_closed
    assert not node.held
    with pytest.raises(InvalidTransition, match="closed"):
        node.consumer.poll(0)
