"""Workers that copy in transactions are killed and suspended between any two steps.

A reader of committed records must find the output of each input exactly once. With a
fault in the worker it must not, which shows that the test detects it.
"""

import json
import signal
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path

import forked
import pytest
import waiting
from domain import opened
from waiting import eventually

from kafka_marshal import MarshalError, PositionSpec, TopicPartition
from kafka_marshal.transactions import SUFFIX

PROGRAM = Path(waiting.__file__).with_name("output_program.py")
RECORDS, BATCH = 24, 4
# When a worker is stopped, and how many transactions it has committed by then.
MOMENTS = {
    "before opening": 0,
    "opened": 0,
    "before begin": 1,
    "sent": 1,
    "marked": 1,
    "committed": 1,
}
FAULTS = {
    "no progress": ("committed", signal.SIGKILL),
    "no fence": ("sent", signal.SIGSTOP),
    "progress outside": ("marked", signal.SIGKILL),
}
END_S = 120


@pytest.fixture(scope="module")
def domain(broker, unique, transport):
    with opened(broker, unique, transport=transport) as domain:
        yield domain


@pytest.fixture(scope="module")
def remote(broker, unique):
    with opened(broker, unique, via="sidecar", transport="fast") as domain:
        yield domain


class Job:
    """Workers that copy one partition to another topic."""

    def __init__(self, domain, fault=None):
        self.domain, self.fault = domain, fault
        self.group = domain.unique("copy")
        self.place = TopicPartition(domain.data_topic(1, records_each=RECORDS), 0)
        self.out = domain.data_topic(3)
        self.cleanup = ExitStack()

    def start(self, client_id, moment=None):
        settings = {
            "servers": self.domain.servers,
            "coordination_topic": self.domain.topic,
            "sidecar": self.domain.sidecar_address,
            "transport": self.domain.transport,
            "group": self.group,
            "client_id": client_id,
            "topic": self.place.topic,
            "out": self.out,
            "batch": BATCH,
            "moment": moment,
            "after": MOMENTS.get(moment, 0),
            "fault": self.fault,
        }
        process = forked.start_piped([PROGRAM, json.dumps(settings)])
        self.cleanup.callback(process.communicate)
        self.cleanup.callback(process.kill)
        return process

    def progress(self):
        found = self.domain.committed(f"{self.group}{SUFFIX}", self.place.topic)
        return found.get(self.place)

    def wait_copied(self, records=RECORDS):
        def position():
            (state,) = self.domain.states(self.group).values()
            return state.position

        eventually(lambda: position() == records, "the log has the end")

    def output(self):
        """Return how often each value is in the output, once no transaction is open."""
        found = self.domain.read_committed(self.out)
        return Counter({int(value): count for value, count in found.items()})


@contextmanager
def job(domain, fault=None):
    found = Job(domain, fault)
    with found.cleanup:
        yield found


def reached(process):
    line = process.stdout.readline()
    assert line == '{"event": "reached"}\n'


def end(process):
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=END_S)
    assert process.returncode == 0, out
    assert json.loads(out.splitlines()[-1]) == {"event": "ended"}


def interrupt(it, moment, number):
    """Interrupt one worker at a moment while another takes over; return the output.

    A worker that was suspended then copies later records alone.
    """
    first = it.start("a", moment)
    reached(first)
    first.send_signal(number)
    second = it.start("b")
    it.wait_copied()
    if number == signal.SIGSTOP:
        first.send_signal(signal.SIGCONT)
        first.stdin.write("\n")
        first.stdin.flush()
        end(second)
        it.domain.produce(it.place.topic, BATCH)
        it.wait_copied(RECORDS + BATCH)
        end(first)
    else:
        end(second)
    return it.output()


def once(it):
    return Counter(range(it.domain.produced[it.place]))


@pytest.mark.proof("kafka-python")
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_each_record_is_output_once_despite_an_interruption(domain, moment, number):
    with job(domain) as it:
        assert interrupt(it, moment, number) == once(it)
        assert it.progress() == it.domain.produced[it.place]


@pytest.mark.parametrize("moment", ["sent", "committed"])
def test_each_record_is_output_once_over_a_sidecar(remote, moment):
    with job(remote) as it:
        assert interrupt(it, moment, signal.SIGKILL) == once(it)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_worker_is_detected(domain, fault):
    moment, number = FAULTS[fault]
    with job(domain, fault) as it:
        assert interrupt(it, moment, number) != once(it)


def test_a_position_set_by_an_admin_overrides_the_progress_of_the_output(domain):
    """Although the output is ahead, and the worker died before its commit."""
    with job(domain) as it:
        first = it.start("a", "committed")
        reached(first)
        first.kill()
        eventually(lambda: it.progress() == 2 * BATCH, "two transactions")
        with domain.admin() as admin:
            plan = admin.plan_reset(it.group, PositionSpec.earliest())
            admin.execute(plan)
        second = it.start("b")
        it.wait_copied()
        end(second)
        assert it.output() == once(it) + Counter(range(2 * BATCH))


def test_a_missing_target_topic_raises_and_loses_no_record(domain):
    topic, group = domain.data_topic(1, records_each=BATCH), domain.unique("copy")
    target = domain.unique("absent")
    with (
        domain.marshal(group, "a") as marshal,
        marshal.consumer(topic) as consumer,
    ):
        with pytest.raises(MarshalError, match=f"Writing to {target} .*not exist"):
            copy(consumer, target)
        domain.topics.create_data_topic(target, partitions=1, replication=1)
        assert copy(consumer, target) == range(BATCH)


def copy(consumer, target):
    """Copy the records of one transaction; return their offsets."""
    with next(consumer.transactions()) as transaction:
        for record in transaction.records:
            transaction.send(target, record.value)
    assert transaction.is_committed
    first, *_, last = (record.offset for record in transaction.records)
    return range(first, last + 1)
