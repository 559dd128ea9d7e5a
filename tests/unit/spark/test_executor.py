"""Tasks that consume through a sidecar: lock, identity, batches and columns."""

import os
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from kafka_marshal.batches import Batch
from kafka_marshal.config import Delivery
from kafka_marshal.errors import (
    ClaimLost,
    ConfigurationError,
    IdentityConflict,
    LogUnreadable,
)
from kafka_marshal.ports import PlainRecord
from kafka_marshal.protocol.types import Token, TopicPartition
from kafka_marshal.spark import executor
from kafka_marshal.spark.executor import consume_in_task, executor_pid, to_arrow

T0 = TopicPartition("t", 0)
WHO = ("unix:/run/s.sock", "g", "task-0")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(executor.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def exclusive(timeout_ms):
    sidecar, group_id, name = WHO
    return executor._exclusive(sidecar, group_id, name=name, timeout_ms=timeout_ms)


def batch(*offsets, commit=lambda *_, **__: None):
    records = tuple(
        PlainRecord("t", 0, n, 1_000 + n, 0, None, b"%d" % n) for n in offsets
    )
    return Batch(partition=T0, records=records, token=Token(1, 0, 7), commit=commit)


class FakeMarshal:
    """A client whose consumer returns the given batches."""

    found: list = []  # noqa: RUF012 - created for each test
    has: tuple = ()
    waits = False  # for records, after the last batch

    def __init__(self, **settings):
        self.settings = settings
        self.is_closed = False
        self.found.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.is_closed = True

    def consumer(self, *topics, **settings):
        self.consumed = (topics, settings)
        self.stopped = threading.Event()
        return SimpleNamespace(batches=self._batches, stop=self.stopped.set)

    def _batches(self):
        yield from self.has
        if self.waits:
            assert self.stopped.wait(60)


@pytest.fixture
def marshal(monkeypatch):
    monkeypatch.setattr(FakeMarshal, "found", [])
    monkeypatch.setattr(executor, "Marshal", FakeMarshal)
    monkeypatch.setattr(executor, "_keep_claims_beyond_worker", lambda *_, **__: None)
    return FakeMarshal


def consume(**rest):
    return consume_in_task("t", sidecar=WHO[0], group_id="g", name="task-0", **rest)


def test_a_batch_is_committed_by_the_next_request(marshal, monkeypatch):
    done = []

    def commit(partition, token, *, first, last):
        done.append((first, last))

    has = (batch(0, 1, commit=commit), batch(2, commit=commit))
    monkeypatch.setattr(marshal, "has", has)
    found = consume()
    assert next(found).column("offset").to_pylist() == [0, 1]
    assert done == []
    next(found)
    assert done == [(0, 1)]
    assert list(found) == []
    assert done == [(0, 1), (2, 2)]
    assert marshal.found[0].is_closed


def test_a_claim_lost_before_the_commit_does_not_end_the_task(marshal, monkeypatch):
    def commit(*_, **__):
        raise ClaimLost("gone")

    monkeypatch.setattr(marshal, "has", (batch(0, commit=commit), batch(1)))
    assert len(list(consume())) == 2


def test_a_task_that_waits_for_records_ends_after_for_ms(marshal, monkeypatch):
    monkeypatch.setattr(marshal, "has", (batch(0),))
    monkeypatch.setattr(marshal, "waits", True)
    assert len(list(consume(for_ms=1))) == 1


def test_a_worker_after_a_crash_resumes_the_same_instance(marshal, monkeypatch):
    monkeypatch.setattr(marshal, "has", (batch(0), batch(1)))
    # A worker that dies releases the lock and cleans up nothing.
    with pytest.raises(RuntimeError), exclusive(0) as before:
        raise RuntimeError
    next(consume())
    assert marshal.found[0].settings["sidecar_instance"] == before
    assert len(before) == 16


def test_after_a_normal_end_the_instance_is_new(marshal):
    with exclusive(0) as first:
        pass
    with exclusive(0) as second:
        assert second != first


def test_the_sidecar_token_file_is_passed_to_the_client(marshal):
    assert list(consume(sidecar_token_file="/run/token")) == []
    assert marshal.found[0].settings["sidecar_token_file"] == "/run/token"


def test_at_most_once_has_no_instance(marshal):
    assert list(consume(delivery="amo")) == []
    assert marshal.found[0].settings["sidecar_instance"] is None
    assert marshal.found[0].consumed[1]["delivery"] is Delivery.AT_MOST_ONCE


def test_a_second_worker_with_the_same_name_is_refused():
    with (
        exclusive(0),
        pytest.raises(IdentityConflict, match="'task-0' of group 'g'"),
        exclusive(60),
    ):
        pass


def test_the_next_worker_waits_until_the_first_has_ended():
    entered, leave = threading.Event(), threading.Event()

    def occupy():
        with exclusive(0):
            entered.set()
            leave.wait(timeout=30)

    thread = threading.Thread(target=occupy)
    thread.start()
    assert entered.wait(timeout=30)
    threading.Timer(0.1, leave.set).start()
    with exclusive(30_000):
        assert leave.is_set()
    thread.join(timeout=30)


def test_lock_files_are_private_to_the_user(folder):
    with exclusive(0):
        for made in folder.rglob("*"):
            wanted = 0o700 if made.is_dir() else 0o600
            assert made.stat().st_mode & 0o777 == wanted
        assert sum(each.is_file() for each in folder.rglob("*")) == 2


@pytest.mark.parametrize("setting", ["group_id", "name"])
def test_invalid_names_are_refused_and_create_no_folder(folder, setting):
    given = {"group_id": "g", "name": "c", "sidecar": WHO[0]} | {setting: "../up"}
    with pytest.raises(ConfigurationError, match=f"{setting} '../up' is no valid"):
        next(consume_in_task("t", **given))
    assert list(folder.iterdir()) == []


def test_a_lock_folder_that_is_a_symbolic_link_is_refused(folder, monkeypatch):
    (folder / "elsewhere").mkdir()
    path = folder / f"kafka-marshal-tasks-{os.getuid()}"
    path.symlink_to(folder / "elsewhere")
    with (
        pytest.raises(ConfigurationError, match=r"symbolic link.* set TMPDIR"),
        exclusive(0),
    ):
        pass


def test_records_become_columns():
    rows = to_arrow(batch(4, 5))
    assert rows.schema.names == [
        "key",
        "value",
        "topic",
        "partition",
        "offset",
        "timestamp",
        "timestampType",
        "token",
    ]
    first = rows.to_pylist()[0]
    assert (first["value"], first["topic"], first["partition"]) == (b"4", "t", 0)
    assert (first["offset"], first["token"]) == (4, "1.0.7")
    assert int(first["timestamp"].timestamp() * 1_000) == 1_004


def test_a_timestamp_out_of_sparks_range_raises_with_its_offset():
    records = [PlainRecord("t", 0, n, 10**n, 0, None, None) for n in (12, 18)]
    token = Token(1, 0, 7)
    wrong = Batch(partition=T0, records=records, token=token, commit=print)
    with pytest.raises(LogUnreadable, match="offset 18 of t-0"):
        to_arrow(wrong)


def test_an_unknown_delivery_raises():
    with pytest.raises(ConfigurationError, match="neither 'alo'"):
        next(consume(delivery="exactly"))


def test_outside_a_task_a_name_is_required():
    with pytest.raises(ConfigurationError, match="set the argument name"):
        next(consume_in_task("t", sidecar=WHO[0], group_id="g"))


@pytest.mark.parametrize(
    ("stat", "found"),
    [
        ("77 (python3 (x) y) S 4242 1 1", 4242),
        # Without a daemon, or within a container.
        pytest.param("77 (python3) S 1 1 1", os.getppid(), id="none"),
    ],
)
def test_the_executor_is_the_parent_of_the_daemon(stat, found):
    assert executor_pid(lambda _: stat) == found


def test_without_proc_the_daemon_stands_for_the_executor(caplog):
    """As on macOS; the daemon ends with the executor, too."""

    def read(path):
        raise FileNotFoundError(2, "No such file or directory", path)

    assert executor_pid(read) == os.getppid()
    assert f"while process {os.getppid()} lives" in caplog.text


class Refusing:
    """A sidecar that refuses to watch children."""

    def __init__(self, setting):
        self.setting = setting
        self.is_closed = False

    def path(self, route):
        return route

    def send(self, method, path, *, body):
        raise ConfigurationError("not known here", setting=self.setting)

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize(("setting", "raises"), [("pids", False), ("token", True)])
def test_a_sidecar_that_cannot_watch_the_executor_is_logged(
    monkeypatch, caplog, setting, raises
):
    """As in another process-id namespace; any other refusal is raised."""
    sidecar = Refusing(setting)
    monkeypatch.setattr(executor.Connection, "open", lambda *_, **__: sidecar)
    context = pytest.raises(ConfigurationError) if raises else nullcontext()
    with context:
        executor._keep_claims_beyond_worker(
            WHO[0], "g", name="task-0", instance=b"i" * 16
        )
    assert sidecar.is_closed
    assert ("executor_unwatched" in caplog.text) is not raises
