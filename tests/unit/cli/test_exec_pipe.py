"""`marshal consume --exec`, with real processes: commits, failures, retries, stops."""

import errno
import json
import os
import resource
import sys
from fcntl import F_DUPFD, fcntl
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
from waiting import eventually

from kafka_marshal import ClaimLost, ConfigurationError, Token, TopicPartition
from kafka_marshal.ports import PlainRecord
from kafka_marshal_cli import exec_pipe
from kafka_marshal_cli.exec_pipe import (
    KEY_BYTES_MAX,
    RETRIES_DEFAULT,
    Child,
    ExecFailed,
    ExecForm,
    ExecFormat,
    ExecLoop,
    ExecMode,
    ExecOptions,
    Hooks,
    Job,
    OnError,
    payload,
    variables,
    wait_any,
)
from kafka_marshal_cli.follow_loop import Idle

TOKEN = Token(1, 0, 5)
P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)


def record(offset=0, *, place=P0, key=b"k", value=b"v"):
    topic, partition = place
    return PlainRecord(topic, partition, offset, 99, 0, key, value, token=TOKEN)


class FakeConsumer:
    """Hands out the given records; notes commits and paused partitions."""

    def __init__(self, *records):
        self.waiting = list(records)
        self.held = {TopicPartition(r.topic, r.partition) for r in records}
        self.committed = []
        self.paused = set()
        self.on_poll = lambda: None

    def poll(self, timeout_ms, most):
        self.on_poll()
        handed = {}
        for each in list(self.waiting):
            place = TopicPartition(each.topic, each.partition)
            if most and place not in self.paused:
                handed.setdefault(place, []).append(each)
                self.waiting.remove(each)
                most -= 1
        return handed

    def tokens(self):
        return dict.fromkeys(self.held, TOKEN)

    def commit(self, records):
        for each in records:
            if TopicPartition(each.topic, each.partition) not in self.held:
                raise ClaimLost("gone")
            self.committed.append((each.partition, each.offset))

    def pause(self, place):
        assert place not in self.paused, "two processes on one partition"
        self.paused.add(place)

    def resume(self, place):
        self.paused.discard(place)


class Drained(Idle):
    """An idle time that is over when no record waits."""

    def __init__(self, consumer):
        super().__init__(None)
        self._consumer = consumer

    @property
    def is_over(self):
        return not self._consumer.waiting


class Run:
    """A run of ExecLoop; ``noted`` has what its processes wrote."""

    def __init__(self, tmp_path, *records):
        self.consumer = FakeConsumer(*records)
        self.notes = tmp_path / "notes"
        self.is_stopped = False
        self.each_round = lambda: None
        self.loop = None

    def __call__(self, script="", **options):
        head = (
            "import os, signal, sys, time\n"
            "value = sys.stdin.buffer.read().decode()\n"
            "offset = int(os.environ['MARSHAL_OFFSET'])\n"
            "attempt = int(os.environ['MARSHAL_ATTEMPT'])\n"
            f"def note(what): open({str(self.notes)!r}, 'a').write(f'{{what}}\\n')\n"
        )
        argv = [sys.executable, "-c", head + script]
        self.loop = ExecLoop(
            self.consumer,
            attrs.evolve(ExecOptions(argv=argv), **options),
            Hooks(lambda: self.is_stopped, self.each_round),
        )
        self.loop.run(Drained(self.consumer))
        assert self.consumer.paused == set()

    @property
    def noted(self):
        return self.notes.read_text().split() if self.notes.exists() else []


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(exec_pipe, "RETRY_MS_MIN", 1)
    return lambda *records: Run(tmp_path, *records)


def test_each_record_has_a_process_whose_success_commits_it(run):
    one = run(record(0, value=b"a"), record(1, value=b"b"), record(0, place=P1))
    one("note(value)")
    assert one.noted == ["a", "b", "v"]
    assert one.consumer.committed == [(0, 0), (0, 1), (1, 0)]


def test_a_failed_record_is_not_committed_and_ends_the_run(run):
    one = run(record(0), record(1), record(2))
    with pytest.raises(ExecFailed, match="t-0 offset 1: exit code 7, try 1 of 1"):
        one("sys.exit(7 if offset == 1 else 0)")
    assert one.consumer.committed == [(0, 0)]
    assert [each.offset for each in one.consumer.waiting] == [2]


def test_a_failed_record_is_retried_and_then_ends_the_run(run, capsys):
    one = run(record(0))
    with pytest.raises(ExecFailed, match="try 3 of 3"):
        one("note(attempt); sys.exit(1)", retries_max=2, on_error=OnError.RETRY)
    assert one.noted == ["1", "2", "3"]
    assert one.consumer.committed == []
    assert capsys.readouterr().err.count("tried again in") == 2


def test_a_retry_that_succeeds_commits(run):
    one = run(record(0), record(1))
    one("sys.exit(attempt < 2)", retries_max=3, on_error=OnError.RETRY)
    assert one.consumer.committed == [(0, 0), (0, 1)]


def test_a_failed_record_is_committed_if_failures_are_skipped(run, capsys):
    one = run(record(0), record(1))
    one("sys.exit(offset == 0)", on_error=OnError.SKIP)
    assert one.consumer.committed == [(0, 0), (0, 1)]
    assert "t-0 offset 0: exit code 1, try 1 of 1; skipped" in capsys.readouterr().err


def test_a_process_that_exceeds_its_timeout_fails(run):
    one = run(record(0))
    with pytest.raises(ExecFailed, match=r"signal 15 \(not done after 50 ms\)"):
        one("time.sleep(600)", timeout_ms=50)
    assert one.consumer.committed == []


def test_a_process_that_ignores_sigterm_is_killed_after_a_stop(run, capsys):
    one = run(record(0))

    def stop():
        one.is_stopped = bool(one.noted)

    one.each_round = stop
    one(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); note('on'); time.sleep(600)",
        grace_ms=50,
    )
    assert "t-0 offset 0: ended by signal 9" in capsys.readouterr().err


def test_a_lost_claim_ends_only_the_process_of_its_partition(run, capsys):
    one = run(record(0), record(0, place=P1), record(1, place=P1))

    def lose():
        if "0" in one.noted:
            one.consumer.held.discard(P0)

    one.each_round = lose
    one(
        "note(os.environ['MARSHAL_PARTITION'])\nif value == 'v' and "
        "os.environ['MARSHAL_PARTITION'] == '0': time.sleep(600)"
    )
    assert one.consumer.committed == [(1, 0), (1, 1)]
    err = capsys.readouterr().err
    assert "(its claim was lost)" in err
    assert "lost: t-0 offset 0" in err


def test_a_commit_without_a_claim_is_reported(run, capsys):
    one = run(record(0))
    one.consumer.commit = lambda records: (_ for _ in ()).throw(ClaimLost("gone"))
    one()
    assert capsys.readouterr().err == "lost: gone\n"


def test_a_stop_ends_the_process_and_commits_nothing(run, capsys):
    one = run(record(0), record(1))

    def stop():
        one.is_stopped = bool(one.noted)

    one.each_round = stop
    one("note('on'); time.sleep(600)")
    assert one.consumer.committed == []
    output = capsys.readouterr().err
    assert (
        "the command was stopped), try 1 of 1; the records stay uncommitted" in output
    )
    assert one.noted == ["on"]


def test_a_process_that_succeeds_after_a_stop_is_committed(run):
    one = run(record(0), record(1))

    def stop():
        one.is_stopped = bool(one.noted)

    one.each_round = stop
    one(
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); note('on')\n"
        "time.sleep(600)"
    )
    assert one.consumer.committed == [(0, 0)]


def test_at_most_once_fetched_records_are_processed_after_a_stop(run):
    one = run(record(0), record(1), record(2))

    def stop():
        one.is_stopped = bool(one.noted)

    one.each_round = stop
    one("note(offset)", at_most_once=True, grace_ms=60_000)
    assert one.noted == ["0", "1", "2"]


def test_at_most_once_a_failed_record_is_reported_as_lost(run):
    one = run(record(0))
    with pytest.raises(ExecFailed, match="the records will not be processed again"):
        one("sys.exit(1)", at_most_once=True)


def test_an_error_of_the_consumer_leaves_no_process_behind(run):
    one = run(record(0))

    def fail():
        if one.noted:
            raise ClaimLost("the engine failed")

    one.each_round = fail
    with pytest.raises(ClaimLost):
        one("note('on'); time.sleep(600)", grace_ms=100)
    assert one.loop._jobs == []


def test_a_run_ends_after_the_maximum_number_of_records(run):
    one = run(*map(record, range(5)))
    one(records_max=2)
    assert one.consumer.committed == [(0, 0), (0, 1)]
    assert len(one.consumer.waiting) == 3


def test_partitions_are_processed_in_parallel_each_in_order(run):
    places = [TopicPartition("t", number) for number in range(3)]
    one = run(*(record(n, place=place) for n in range(3) for place in places))
    seen = []
    one.each_round = lambda: seen.append(len(one.loop._jobs))
    one("time.sleep(0.05)", workers=2)
    assert max(seen) == 2
    for place in places:
        mine = [o for p, o in one.consumer.committed if p == place.partition]
        assert mine == [0, 1, 2]


def test_a_batch_of_a_partition_has_one_process(run):
    one = run(record(0), record(1), record(0, place=P1))
    one(
        "note(value.replace('\\n', '/') + os.environ['MARSHAL_COUNT'])",
        mode=ExecMode.BATCH,
        batch_max=10,
    )
    assert one.noted == ["v/v/2", "v1"]
    assert one.consumer.committed == [(0, 0), (0, 1), (1, 0)]


def test_a_waiting_batch_of_a_lost_claim_is_dropped(run, capsys):
    one = run(record(0), record(0, place=P1))
    one.each_round = lambda: one.consumer.held.discard(P1)
    one(mode=ExecMode.BATCH, batch_max=10)
    assert one.consumer.committed == [(0, 0)]
    assert "lost: t-1 offset 0" in capsys.readouterr().err


def test_the_input_of_a_process_is_values_or_json_lines():
    records = [record(0, value=b"a\xff"), record(1, value=None)]
    assert payload(records[:1], ExecFormat.VALUE) == b"a\xff"
    assert payload(records, ExecFormat.VALUE) == b"a\xff\n\n"
    lines = payload(records, ExecFormat.JSONL).decode().splitlines()
    assert [json.loads(line)["offset"] for line in lines] == [0, 1]


def test_the_environment_of_a_process_describes_its_records():
    text = variables(
        Job(partition=P0, records=[record(7, key=b"\xff", value=None)], attempt=2)
    )
    assert text == {
        "MARSHAL_TOPIC": "t",
        "MARSHAL_PARTITION": "0",
        "MARSHAL_OFFSET": "7",
        "MARSHAL_LAST_OFFSET": "7",
        "MARSHAL_COUNT": "1",
        "MARSHAL_TIMESTAMP_MS": "99",
        "MARSHAL_TOKEN": "1.0.5",
        "MARSHAL_ATTEMPT": "2",
        "MARSHAL_VALUE_IS_NULL": "1",
        "MARSHAL_KEY": "\udcff",
    }
    assert "MARSHAL_KEY" not in variables(
        Job(partition=P0, records=[record(0), record(1)])
    )


@pytest.mark.parametrize("key", [None, b"a\0b", b"x" * (KEY_BYTES_MAX + 1)])
def test_a_key_unfit_for_the_environment_is_omitted(run, key):
    one = run(record(0, key=key))
    one("note('MARSHAL_KEY' in os.environ)")
    assert one.noted == ["False"]


# --- the process

WAIT_MS = 20_000


def started(script, payload=b"", **env):
    argv = [sys.executable, "-c", script]
    return Child(argv, payload, env={**os.environ, **env})


def ended(child):
    eventually(lambda: child.exit_code() is not None, "the process has ended")
    return child.exit_code()


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie that is not reaped yet does not run.
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("size", [0, 5, 4096, 4097, 1_000_000])
def test_a_process_reads_all_of_its_input(tmp_path, size):
    out = tmp_path / "out"
    script = f"import sys; open({str(out)!r}, 'wb').write(sys.stdin.buffer.read())"
    assert ended(started(script, b"x" * size)) == 0
    assert out.read_bytes() == b"x" * size


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_a_process_that_does_not_read_its_input_succeeds(size):
    assert ended(started("", b"x" * size)) == 0


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_of_a_process_can_be_read_repeatedly(code):
    child = started(f"raise SystemExit({code})")
    wait_any([child], WAIT_MS)
    assert child.exit_code() == code
    assert child.exit_code() == code
    assert child.fd is None


def test_background_children_end_with_their_process(tmp_path):
    note = tmp_path / "pid"
    script = (
        "import subprocess, sys\n"
        "code = 'import time; time.sleep(600)'\n"
        "left = subprocess.Popen([sys.executable, '-c', code])\n"
        f"open({str(note)!r}, 'w').write(str(left.pid))"
    )
    assert ended(started(script)) == 0
    pid = int(note.read_text())
    eventually(lambda: not is_running(pid), "nothing is left")


READY = "import signal, sys, time; {}; open({!r}, 'w').close(); time.sleep(600)"


def test_a_terminated_process_ends(tmp_path):
    ready = tmp_path / "ready"
    child = started(READY.format("0", str(ready)))
    eventually(ready.exists, "it runs")
    assert not child.is_terminating
    child.terminate(grace_ms=WAIT_MS)
    assert ended(child) == -15
    assert child.is_terminating


def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(tmp_path):
    ready = tmp_path / "ready"
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    child = started(READY.format(ignore, str(ready)))
    eventually(ready.exists, "it runs")
    child.terminate(grace_ms=0)
    assert child.exit_code() is None
    child.terminate(grace_ms=0)
    assert ended(child) == -9
    child.kill()


def test_a_process_runs_in_its_own_session():
    script = "import os; raise SystemExit(os.getsid(0) != os.getpid())"
    assert ended(started(script)) == 0


def test_a_wait_ends_at_its_timeout():
    child = started("import time; time.sleep(600)")
    wait_any([child], 10)
    assert child.exit_code() is None
    child.kill()
    assert ended(child) == -9


@pytest.fixture
def many_files():
    """Allow 2,000 open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_wait_for_a_process_with_a_high_descriptor_ends(many_files):
    reader, writer = os.pipe()
    os.close(writer)  # readable, as a pidfd after the end of its process
    child = SimpleNamespace(fd=fcntl(reader, F_DUPFD, 1_024))
    wait_any([child], WAIT_MS)
    os.close(child.fd)
    os.close(reader)


def test_a_system_without_pidfd_polls_for_the_end(monkeypatch):
    def refuse(_pid):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(exec_pipe, "open_pidfd", refuse)
    monkeypatch.delattr(os, "waitid", raising=False)
    monkeypatch.setattr(exec_pipe, "POLL_EVERY_S", 0.001)
    child = started("raise SystemExit(3)")
    assert child.fd is None
    wait_any([child], WAIT_MS)
    assert child.exit_code() == 3


def test_a_program_that_cannot_be_started_is_an_error():
    with pytest.raises(ConfigurationError, match="cannot be started"):
        Child(["/no/such/program"], b"", env={})


# --- the options


def asked(**given):
    return ExecForm(**given).chosen()


def of(**given):
    rest = {"at_most_once": False, "batch_max": 5, "records_max": 7, "group": "g"}
    rest |= {name: given.pop(name) for name in list(given) if name in rest}
    return asked(**{"exec_": "true", **given}).of_run(**rest)


def test_without_exec_no_exec_options_are_chosen():
    assert asked() is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("on_error", OnError.SKIP), ("workers", 2), ("exec_shell", True)],
)
def test_options_for_exec_are_refused_without_exec(name, value):
    with pytest.raises(ConfigurationError, match="needs --exec CMD"):
        asked(**{name: value})


def test_options_of_exec_and_consume_are_combined():
    found = of(exec_="cat -n 'a b'", exec_timeout="2s", workers=3)
    assert found.argv == ["cat", "-n", "a b"]
    assert (found.timeout_ms, found.grace_ms, found.workers) == (2_000, 5_000, 3)
    assert (found.batch_max, found.records_max) == (5, 7)
    assert found.env == {"MARSHAL_GROUP": "g"}
    assert (found.on_error, found.retries_max) == (OnError.STOP, 0)


def test_exec_shell_passes_the_line_to_a_shell():
    found = of(exec_="cat | wc", exec_shell=True)
    assert found.argv == ["/bin/sh", "-c", "cat | wc"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ExecFormat.VALUE),
        ({"exec_mode": ExecMode.BATCH}, ExecFormat.JSONL),
        (
            {"exec_mode": ExecMode.BATCH, "exec_format": ExecFormat.VALUE},
            ExecFormat.VALUE,
        ),
    ],
)
def test_the_mode_decides_the_default_format(given, expected):
    assert of(**given).format is expected


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({"on_error": OnError.RETRY}, RETRIES_DEFAULT),
        ({"on_error": OnError.RETRY, "retries": 0}, 0),
        ({"on_error": OnError.SKIP, "retries": 2}, 2),
    ],
)
def test_given_retries_override_the_default(given, count):
    assert of(**given).retries_max == count


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"exec_": ""}, "names no command"),
        ({"exec_": "'open"}, "quote it"),
        ({"exec_": "/no/such/program"}, "--exec-shell"),
        ({"exec_timeout": "soon"}, "--exec-timeout"),
        ({"at_most_once": True, "on_error": OnError.RETRY}, "--delivery alo"),
        ({"at_most_once": True, "workers": 2}, "--delivery alo"),
    ],
)
def test_unusable_exec_options_are_refused(given, message):
    with pytest.raises(ConfigurationError, match=message):
        of(**given)
