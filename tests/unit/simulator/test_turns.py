"""Blocking programs that take turns with the loop in virtual time."""

import threading

import pytest

from kafka_marshal.errors import DeadlineExceeded
from simulator.clock import VirtualClock
from simulator.loop import Loop
from simulator.node import Cluster
from simulator.turns import Killed, Program, WaitingLog, refusal_of

START_MS = 1_000


class Scene:
    def __init__(self):
        self.loop = Loop(VirtualClock(now_ms=START_MS))
        self.seen = []
        self.programs = []

    def see(self, what):
        self.seen.append((self.loop.clock.at_ms - START_MS, what))

    def begin(self, call, *, at_ms=0):
        program = Program(self.loop, call, on_end=lambda: self.see("end"))
        self.programs.append(program)
        program.start(START_MS + at_ms)
        return program

    def run(self, duration_ms=100):
        self.loop.run(duration_ms, after=lambda: None)


@pytest.fixture(name="scene")
def _scene():
    scene = Scene()
    before = threading.active_count()
    yield scene
    for program in scene.programs:
        program.close()
    assert threading.active_count() == before


def test_programs_and_the_loop_take_turns_in_virtual_time(scene):
    def call(name, pause_ms):
        program = scene.programs[name]
        for _ in range(2):
            scene.see(name)
            program.sleep(pause_ms)

    scene.begin(lambda: call(0, 10))
    scene.begin(lambda: call(1, 16), at_ms=5)
    scene.loop.at(START_MS + 12, lambda: scene.see("loop"))
    scene.run()
    assert scene.seen == [
        *[(0, 0), (5, 1), (10, 0), (12, "loop")],
        *[(20, "end"), (21, 1), (37, "end")],
    ]
    assert all(each.is_done and not each.is_killed for each in scene.programs)


def test_a_killed_program_ends_where_it_waits(scene):
    def call():
        try:
            scene.programs[0].sleep(1_000)
        except Exception:  # noqa: BLE001 - what its code may catch
            scene.see("caught")
        scene.see("went on")

    program = scene.begin(call)
    scene.run(10)
    program.kill()
    program.kill()
    assert scene.seen == [(10, "end")]
    assert (program.is_done, program.is_killed) == (True, True)
    assert refusal_of(program) is None


def test_a_program_killed_before_its_start_never_runs(scene):
    program = scene.begin(lambda: scene.see("ran"), at_ms=50)
    program.kill()
    scene.run()
    assert scene.seen == [(0, "end")]


def test_a_program_may_kill_itself(scene):
    def call():
        raise Killed

    assert scene.begin(call).is_killed is False
    scene.run()
    assert scene.programs[0].is_killed


def test_a_closed_program_ends_without_a_callback(scene):
    scene.begin(lambda: scene.programs[0].sleep(1_000))
    scene.run(10)
    scene.programs[0].close()
    assert scene.seen == []


def test_a_refusal_is_returned_and_any_other_error_is_raised(scene):
    refused, broken = DeadlineExceeded("too late"), ZeroDivisionError("a bug")

    def fail(error):
        raise error

    scene.begin(lambda: fail(refused))
    scene.begin(lambda: fail(broken))
    scene.run()
    assert refusal_of(scene.programs[0]) is refused
    with pytest.raises(ZeroDivisionError, match="a bug"):
        refusal_of(scene.programs[1])


def test_a_waiting_log_waits_before_a_poll_and_reports_appends():
    cluster = Cluster(partitions=2)
    plain = cluster.kafka.coordination_log(name="admin")
    waits, sent = [], []
    log = WaitingLog(plain, wait=waits.append, on_append=lambda *one: sent.append(one))
    assert (log.topic, log.topic_id, log.partition_count) == (
        plain.topic,
        plain.topic_id,
        2,
    )
    assert [t for t, _ in log.poll(100)] == [0, 1]
    assert waits == [100]
    assert log.append(1, b"x").is_done()
    assert sent == [(1, b"x")]
    assert log.positions() == {0: 1, 1: 1}
    assert (log.start_offsets(9), log.end_offsets(9)) == ({0: 0, 1: 0}, {0: 1, 1: 2})
    assert log.offsets_for_times(0, 9) == {0: 0, 1: 0}
    log.read_from({0: 0})
    assert [t for t, _ in log.poll(0)] == [0, 1]
    log.close(9)
    assert plain.append(0, b"x").error() is not None
