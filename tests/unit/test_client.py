"""``Marshal`` over a cluster in memory."""

import errno
import gc
import inspect
import os
import signal
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np
import pytest
from enginekit import KEY, T0, H, Stepping, fold, lines, world
from fakesidecar import Assigning, RequestsBy
from interrupting import interrupted
from prometheus_client import CollectorRegistry
from slowness import until

from kafka_marshal import backend
from kafka_marshal import runtime as runtimes
from kafka_marshal.client import Marshal
from kafka_marshal.config import ConsumerConfig
from kafka_marshal.errors import (
    ClaimLost,
    ConfigurationError,
    CoordinationError,
    IdentityConflict,
    InvalidTransition,
    LogUnreadable,
    TopicMisconfigured,
)
from kafka_marshal.identity import Identity
from kafka_marshal.kafka_io.topic_rules import TopicDescription
from kafka_marshal.metrics import MarshalCollector
from kafka_marshal.observability.logs import FanOut
from kafka_marshal.ports import Event
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.remote import backend as remote
from kafka_marshal.remote.transport import Connection
from simulator.node import Recorder

SAFE = TopicDescription(name="__marshal", exists=True)


@pytest.fixture
def cluster(monkeypatch):
    """Let every ``Marshal`` that is opened run on one world in memory."""
    cluster = world()
    cluster.opened = []
    cluster.description = SAFE

    def open_runtime(settings, observer, *, timeout_ms, **_rest):
        node = cluster.node(f"runtime-{len(cluster.opened)}")
        cluster.opened.append(node)
        node.engine.remove_session(node.session)
        node.engine.changed = Stepping(cluster)
        node.engine.wait_ready(timeout_ms)
        ports = node.engine.context.ports
        return runtimes.Runtime(
            node.engine, ports, cluster.description, FanOut(), "fake"
        )

    monkeypatch.setattr(runtimes.Runtime, "open", open_runtime)
    monkeypatch.setattr(runtimes, "_running", {})
    yield cluster
    assert runtimes._running == {}, "a Marshal was left open"


def opened(tmp_path, client_id="a", **rest):
    options = {"group_id": "g", "state_dir": tmp_path, "observer": Recorder()} | rest
    return Marshal("broker:9092", client_id=client_id, **options)


def consuming(marshal, cluster, **options):
    consumer = marshal.consumer("t", **options)
    cluster.run_until(consumer.assignment, 4 * H)
    return consumer


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("group_id", None),
        ("group_id", 7),
        ("client_id", None),
        ("timeout_ms", "5s"),
        ("timeout_ms", None),
        ("heartbeat_interval_ms", "2s"),
        ("heartbeat_interval_ms", ""),
        ("checkpoint_interval_ms", "5m"),
        ("timeout_ms", float("nan")),
        ("check_topic", "x"),
        ("mirror_offsets", "no"),
        ("can_plan", 0),
        ("person", 5),
    ],
)
def test_a_setting_of_the_wrong_type_is_named_in_the_error(
    cluster, tmp_path, setting, value
):
    with pytest.raises(ConfigurationError) as caught:
        opened(tmp_path, **{setting: value})
    assert caught.value.setting == setting
    assert repr(value) in str(caught.value)
    assert cluster.opened == []


def test_clients_of_one_process_log_each_event_once(cluster, tmp_path, caplog):
    caplog.set_level("INFO", "kafka_marshal")
    with (
        opened(tmp_path, "a", observer=None),
        opened(tmp_path, "b", observer=None) as marshal,
    ):
        observers = marshal._backend._runtime.observers
        observers.observe(Event("stuck", {"key": KEY}))
    assert sum("stuck" in each.getMessage() for each in caplog.records) == 1


def test_a_client_dropped_open_warns(cluster, tmp_path):
    marshal = opened(tmp_path)
    consumer = marshal.consumer("t")
    left = marshal._backend
    name = repr(marshal)
    gc.collect()  # the garbage of other tests may warn, too
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        del marshal, consumer
        gc.collect()
    assert sum(f"unclosed {name}" in str(each.message) for each in caught) == 1
    left.leave(release=True, timeout_ms=0)
    left.close()


def test_a_client_stays_open_while_the_interpreter_ends(cluster, tmp_path, monkeypatch):
    with opened(tmp_path) as marshal, monkeypatch.context() as ending:
        ending.setattr("sys.is_finalizing", lambda: True)
        marshal.close()
        assert not marshal._is_closed
    assert marshal._is_closed


def test_a_client_closed_or_never_opened_is_dropped_without_warning(cluster, tmp_path):
    marshal = opened(tmp_path)
    marshal.close()
    parents = Marshal.__new__(Marshal)
    vars(parents).update(_backend=None, _is_closed=False, _pid=0)
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        del marshal, parents
        with pytest.raises(ConfigurationError):
            opened(tmp_path, can_plan=0)
        gc.collect()
    assert not [each for each in caught if "<Marshal" in str(each.message)]


def test_a_consumer_reads_commits_and_releases(cluster, tmp_path):
    with opened(tmp_path) as marshal:
        assert (marshal.client_id, marshal.group_id) == ("a", "g")
        with marshal.consumer("t") as consumer:
            cluster.run(200)
            got = []
            for record in consumer:
                got.append(record.offset)
                consumer.commit(record)
                if len(got) == 10:
                    consumer.stop()
        assert got == list(range(10))
    known = fold(cluster).keys[KEY]
    assert (known.owner, known.position) == (None, 10)


def test_a_restart_with_the_same_state_directory_resumes_claims(cluster, tmp_path):
    first = opened(tmp_path)
    consumer = consuming(first, cluster)
    token = consumer.tokens()[T0]
    first.close(release=False)
    cluster.run(H // 3)
    second = opened(tmp_path)
    again = consuming(second, cluster)
    assert again.tokens()[T0] > token
    second.close()
    effects = [line.transition.effect for line in lines(cluster)]
    assert (effects.count("claimed"), effects.count("resumed")) == (1, 1)


def test_closing_without_release_keeps_the_claims(cluster, tmp_path):
    marshal = opened(tmp_path)
    consuming(marshal, cluster)
    marshal.close(release=False)
    marshal.close()
    assert fold(cluster).keys[KEY].owner.client_id == "a"


def test_two_clients_of_one_process_share_an_engine(cluster, tmp_path):
    a, b = opened(tmp_path), opened(tmp_path, "b")
    assert a.engine is b.engine
    assert len(cluster.opened) == 1
    with pytest.raises(IdentityConflict, match="another Marshal of this process"):
        opened(tmp_path)
    with pytest.raises(InvalidTransition, match="already open"):
        opened("", state_dir="")
    a.close()
    cluster.run(H)
    assert b.engine.failure is None
    b.close()


def test_a_claim_is_visible_in_owners_and_world(cluster, tmp_path):
    with opened(tmp_path) as marshal:
        claim = marshal.claim("t", 0)
        assert marshal.owners("t") == {T0: "a"}
        (found,) = marshal.world()["partitions"]["0"]["claims"]
        assert found["token"] == str(claim.token)
        with pytest.raises(InvalidTransition, match="already claimed"):
            marshal.claim("t", 0)
    assert fold(cluster).keys[KEY].owner is None


@pytest.mark.parametrize(
    ("topic", "partition", "count"), [("t", 0, None), ("t", 99, 1), ("tt", 0, 0)]
)
def test_a_claim_of_an_unknown_partition_is_reported(
    cluster, tmp_path, topic, partition, count
):
    with opened(tmp_path) as marshal:
        marshal.claim(topic, partition).check()
        cluster.run(200)
    events = cluster.opened[0].observer.events
    seen = [e.fields for e in events if e.name == "partition_unknown"]
    at = TopicPartition(topic, partition)
    wanted = [] if count is None else [{"partition": at, "partition_count": count}]
    assert seen == wanted


@pytest.mark.parametrize(
    ("topic", "partition"),
    [("t", -1), ("t", "3"), ("t", None), ("t", 2**31), ("t", True), ("a/b", 0), (7, 0)],
)
def test_a_claim_of_an_invalid_partition_is_refused(
    cluster, tmp_path, topic, partition
):
    with (
        opened(tmp_path) as marshal,
        pytest.raises(ConfigurationError, match=r"is invalid: give|a whole number"),
    ):
        marshal.claim(topic, partition)


def test_a_call_with_an_invalid_timeout_claims_nothing(cluster, tmp_path):
    with opened(tmp_path) as marshal:
        with pytest.raises(ConfigurationError, match="timeout_ms must be a number"):
            marshal.claim("t", 0, timeout_ms="5s")
        with pytest.raises(ConfigurationError, match="timeout_ms must be a number"):
            marshal.consumer("t", timeout_ms="5s")
        assert marshal.claim("t", 0).is_valid()


def test_texts_and_numbers_of_numpy_are_accepted(cluster, tmp_path):
    """Else the engine would fail at the first record that it cannot encode."""
    names = {"client_id": np.str_("a"), "labels": {np.str_("rack"): np.str_("r1")}}
    times = {"timeout_ms": np.int64(5_000), "checkpoint_interval_ms": np.int64(0)}
    with opened(tmp_path, **names, **times, person=np.str_("ada")) as marshal:
        with marshal.claim(np.str_("t"), np.int64(0)) as claim:
            claim.set_position(np.int64(3))
        with marshal.consumer(np.str_("t"), claims_max=np.int32(2)) as consumer:
            cluster.run_until(consumer.assignment, 4 * H)
            assert consumer.poll(np.int64(0), np.int64(1)) is not None
            cluster.run(H)
            (member,) = fold(cluster).soft.members.values()
            assert member.record.labels["rack"] == "r1"
        assert marshal.engine.failure is None


def full_disk(*_args, **_rest):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_for_a_named_state_directory_is_an_error(
    cluster, tmp_path, monkeypatch
):
    monkeypatch.setattr(Identity, "remember", full_disk)
    with pytest.raises(ConfigurationError, match="No space left") as caught:
        opened(tmp_path)
    assert caught.value.setting == "state_dir"
    (node,) = cluster.opened
    assert node.engine.sessions == ()
    monkeypatch.undo()
    # Its lock was released.
    domain = cluster.config.format_id.hex()
    Identity.take(tmp_path, domain=domain, group_id="g", client_id="a").close()


def test_a_full_disk_of_the_default_state_directory_is_only_reported(
    cluster, tmp_path, monkeypatch
):
    monkeypatch.setattr(Identity, "remember", full_disk)
    monkeypatch.setenv("MARSHAL_STATE_DIR", "")
    monkeypatch.setattr(backend, "home_of", lambda state_dir: tmp_path)
    with opened(None) as marshal:
        assert marshal.claim("t", 0).is_valid()
    names = [event.name for event in cluster.opened[0].observer.events]
    assert "identity_unavailable" in names


def test_a_client_works_without_a_home_directory(cluster, monkeypatch):
    monkeypatch.setattr(backend, "home_of", lambda state_dir: None)
    with opened(None) as marshal:
        assert marshal.claim("t", 0).is_valid()
    names = [event.name for event in cluster.opened[0].observer.events]
    assert "identity_unavailable" in names


@pytest.mark.parametrize("name", ["", "a b", "a" * 201, "a\n", "ä"])
@pytest.mark.parametrize("setting", ["client_id", "group_id"])
def test_an_invalid_name_is_refused_before_any_io(cluster, tmp_path, setting, name):
    with pytest.raises(ConfigurationError) as caught:
        opened(tmp_path, **{setting: name})
    assert caught.value.setting == setting
    assert not cluster.opened


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"policy": "lazy"}, "policy"),
        ({"claims_max": -1}, "claims_max"),
        ({"on_topics": print}, "on_topics"),
        ({"standbys": 1}, "standbys"),
    ],
)
def test_invalid_consumer_settings_are_refused(cluster, tmp_path, options, setting):
    with opened(tmp_path) as marshal:
        with pytest.raises(ConfigurationError) as caught:
            marshal.consumer("t", **options)
        assert caught.value.setting == setting


@pytest.mark.parametrize("delivery", ["alo", "amo"])
def test_a_delivery_guarantee_can_be_set_by_its_name(cluster, tmp_path, delivery):
    with opened(tmp_path) as marshal:
        consumer = consuming(
            marshal, cluster, delivery=delivery, consumer_timeout_ms=20 * H
        )
        assert next(iter(consumer)).offset == 0
        consumer.stop()
    granted = fold(cluster).keys[KEY].granted
    assert (granted is not None) == (delivery == "amo")


def test_an_unknown_delivery_or_the_coordination_topic_is_refused(cluster, tmp_path):
    with opened(tmp_path) as marshal:
        with pytest.raises(ConfigurationError, match="neither 'alo'"):
            marshal.consumer("t", delivery="exactly once")
        with pytest.raises(ConfigurationError, match="is the coordination topic"):
            marshal.consumer("__marshal")
        with pytest.raises(ConfigurationError, match="is the coordination topic"):
            marshal.ranges(ConsumerConfig(topics=("__marshal",)))


def test_settings_and_callbacks_of_another_class_are_refused(cluster, tmp_path):
    config = ConsumerConfig(topics=("t",))
    with opened(tmp_path) as marshal:
        for given, setting in ((("t",), "config"), ((config, print), "callbacks")):
            with pytest.raises(ConfigurationError, match=f"{setting} must be a"):
                marshal.open_consumer(*given)
        with pytest.raises(ConfigurationError, match="config must be a"):
            marshal.ranges("t")


def test_topics_must_be_named_and_exist(cluster, tmp_path):
    with opened(tmp_path) as marshal:
        with pytest.raises(ConfigurationError, match="at least one"):
            marshal.consumer()
        with pytest.raises(ConfigurationError, match=r"no valid topic.*as pattern"):
            marshal.consumer("^a.*")
        with pytest.raises(ConfigurationError, match="is invalid: give"):
            marshal.claim("t", -1)
        with pytest.raises(LogUnreadable, match="does not exist"):
            marshal.consumer("nowhere")


def test_a_heartbeat_interval_that_differs_from_the_topic_s_is_refused(
    cluster, tmp_path
):
    with pytest.raises(ConfigurationError, match=str(H)):
        opened(tmp_path, heartbeat_interval_ms=H + 1)
    opened(tmp_path, heartbeat_interval_ms=H).close()


def test_a_topic_with_unsafe_settings_is_refused(cluster, tmp_path):
    cluster.description = TopicDescription(
        name="__marshal", exists=True, configs={"message.timestamp.type": "CreateTime"}
    )
    with pytest.raises(TopicMisconfigured, match="settings that break the guarantees"):
        opened(tmp_path)
    opened(tmp_path, check_topic=False).close()


def test_an_unusable_state_directory_is_refused(cluster, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigurationError) as caught:
        opened(blocked)
    assert caught.value.setting == "state_dir"


def test_a_closed_or_forked_marshal_raises(cluster, tmp_path, monkeypatch):
    marshal = opened(tmp_path)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(InvalidTransition, match="after the fork"):
        marshal.consumer("t")
    marshal.expect_restart()
    monkeypatch.undo()
    with pytest.raises(ConfigurationError, match="timeout_ms"):
        marshal.world(timeout_ms="5s")
    with pytest.raises(ConfigurationError, match="timeout_ms"):
        marshal.owners("t", timeout_ms=None)
    marshal.close()
    with pytest.raises(InvalidTransition, match="closed"):
        marshal.world()


# --- Observers and metrics ---


@pytest.mark.parametrize("observer", [5, print, [print], "x"])
def test_an_observer_without_the_method_observe_is_refused(tmp_path, observer):
    """It would be removed at its first event."""
    with pytest.raises(ConfigurationError, match="no method observe") as raised:
        opened(tmp_path, observer=observer)
    assert raised.value.setting == "observer"


def test_all_observers_get_every_event(cluster, tmp_path):
    first, second = Recorder(), Recorder()
    event = Event("clock_step", {"surplus_ms": 1})
    with opened(tmp_path, observer=[first, second]) as marshal:
        runtime = marshal._backend._runtime
        runtime.observers.observe(event)
    runtime.observers.observe(event)
    assert first.events == second.events == [event]


def test_metrics_of_a_closed_client_are_no_longer_exported(cluster, tmp_path):
    registry = CollectorRegistry()
    with opened(tmp_path) as marshal:
        MarshalCollector(marshal, registry=registry)
        consuming(marshal, cluster)
        labels = {"group": "g", "topic": "t", "partition": "0", "state": "held"}
        assert registry.get_sample_value("marshal_claim_state", labels) == 1
        replay = {"topic": "__marshal", "partition": "0"}
        assert registry.get_sample_value("marshal_replay_lag_records", replay) == 0
        assert not marshal.is_closed
    assert marshal.is_closed
    assert list(registry.collect()) == []
    with opened(tmp_path, "b") as marshal:
        MarshalCollector(marshal, registry=registry)
        assert registry.get_sample_value("marshal_up", {"group": "g"}) == 1


def test_ranges_hold_commit_and_release_partitions(cluster, tmp_path):
    with opened(tmp_path) as marshal:
        ranges = marshal.ranges(ConsumerConfig(topics=("t",), starts={T0: 4}))
        cluster.run_until(lambda: T0 in ranges.held(), 4 * H)
        held = ranges.held()[T0]
        assert held.position == 4
        ranges.commit(T0, held.token, end=7)
        marshal.stop()
        with pytest.raises(InvalidTransition):
            marshal.consumer("t")
    assert ranges.is_closed
    assert fold(cluster).keys[KEY].position == 7


def test_lag_of_ranges_ends_at_the_last_stable_offset(cluster, tmp_path):
    cluster.kafka.begin_transaction(T0, [b"open"])
    with opened(tmp_path) as marshal:
        config = ConsumerConfig(topics=("t",), isolation_level="read_committed")
        ranges = marshal.ranges(config)
        cluster.run_until(lambda: T0 in ranges.held(), 4 * H)
        cluster.run_until(lambda: marshal.session.lag_of(KEY) == 10, 2 * H)
        with pytest.raises(ConfigurationError, match="isolation_level"):
            attrs.evolve(config, isolation_level="dirty")


def test_a_repr_has_group_client_and_state(cluster, tmp_path):
    with opened(tmp_path) as marshal:
        assert repr(marshal) == "<Marshal group_id='g' client_id='a' open>"
        with consuming(marshal, cluster) as consumer:
            template = "<Consumer group_id='g' client_id='a' topics=['t'] {}>"
            assert repr(consumer) == template.format("open")
            consumer.stop()
            assert repr(consumer) == template.format("stopped")
        assert repr(consumer) == template.format("closed")
    assert repr(marshal) == "<Marshal group_id='g' client_id='a' closed>"


def test_a_repr_of_a_claim_has_its_state(cluster, tmp_path):
    with opened(tmp_path) as marshal:
        claim = marshal.claim("t", 0)
        template = (
            f"<HeldClaim t-0 group_id='g' client_id='a' token={claim.token} {{}}>"
        )
        assert repr(claim) == template.format("held")
        claim.release()
        assert repr(claim).startswith(template.format("ended: ")[:-1])
    with opened(tmp_path) as marshal:
        marshal.engine.failure = CoordinationError("gone")
        assert repr(marshal).endswith("failed: gone>")
        marshal.engine.failure = None


def test_consumer_arguments_have_the_defaults_of_consumer_config():
    given = {
        name: each.default
        for name, each in inspect.signature(Marshal.consumer).parameters.items()
    }
    plain = attrs.asdict(ConsumerConfig(topics=("t",)))
    settings = given.keys() & plain.keys() - {"topics"}
    assert len(settings) > 8
    assert {name: given[name] for name in settings} == {
        name: plain[name] for name in settings
    }


def test_members_announce_their_labels(cluster, tmp_path):
    with opened(tmp_path, labels={"rack": "r1", "target": "3"}, can_plan=False) as one:
        consuming(one, cluster)
        members = fold(cluster).soft.members.values()
        assert [each.record.labels for each in members] == [
            {"rack": "r1", "target": "3", "layout": "1"}
        ]


@pytest.mark.parametrize(
    "labels",
    [{"weight": "3"}, {"target": "many"}, {str(n): "" for n in range(17)}],
)
def test_invalid_labels_are_refused(cluster, tmp_path, labels):
    with pytest.raises(ConfigurationError) as caught:
        opened(tmp_path, labels=labels)
    assert caught.value.setting == "labels"


def test_a_client_of_a_sidecar_cannot_set_labels(tmp_path):
    with pytest.raises(ConfigurationError, match="labels cannot be set"):
        opened(tmp_path, labels={"rack": "r1"}, sidecar="http://127.0.0.1:1")


@pytest.mark.parametrize("instance", ["x" * 16, b"x" * 15, 5])
def test_a_sidecar_instance_must_be_16_bytes(tmp_path, instance):
    with pytest.raises(ConfigurationError, match="must be 16 bytes") as caught:
        opened(tmp_path, sidecar="http://127.0.0.1:1", sidecar_instance=instance)
    assert caught.value.setting == "sidecar_instance"


def test_closing_for_a_restart_releases_with_reason_restart(cluster, tmp_path):
    marshal = opened(tmp_path)
    consuming(marshal, cluster)
    marshal.close(restarts=True)
    reasons = [
        line.record.reason
        for line in lines(cluster)
        if type(line.record).__name__ == "ReleasingPartition"
    ]
    assert reasons == ["restart"]


@pytest.mark.parametrize(
    ("name", "given"), [("timeout_ms", "5s"), ("restarts", "no"), ("release", "no")]
)
def test_a_close_with_an_invalid_argument_closes_nothing(
    cluster, tmp_path, name, given
):
    """Else the client would be closed, and its claims would not be released."""
    with opened(tmp_path) as marshal:
        consumer = consuming(marshal, cluster)
        with pytest.raises(ConfigurationError, match=name):
            marshal.close(**{name: given})
        assert not marshal.is_closed
    assert consumer.is_closed
    assert fold(cluster).keys[KEY].owner is None


def test_a_signal_before_a_consumer_is_open_stops_it(cluster, tmp_path):
    """Else a process that is asked to end while it starts would never end."""
    with opened(tmp_path) as marshal:
        marshal.stop_on_signals([signal.SIGUSR1])
        signal.raise_signal(signal.SIGUSR1)
        assert list(marshal.consumer("t")) == []


def test_a_closed_client_does_not_handle_signals(cluster, tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    with opened(tmp_path) as marshal:
        pass
    with pytest.raises(InvalidTransition, match="closed"):
        marshal.stop_on_signals([signal.SIGUSR1])
    assert signal.getsignal(signal.SIGUSR1) is before


def test_another_thread_may_close_a_client_that_stops_on_signals(cluster, tmp_path):
    """Only the main thread may change signal handlers; the close must not need that."""
    before = signal.getsignal(signal.SIGUSR1)
    marshal = opened(tmp_path)
    consumer = consuming(marshal, cluster)
    marshal.stop_on_signals([signal.SIGUSR1])
    with ThreadPoolExecutor(1) as thread:
        thread.submit(marshal.close).result()
    signal.signal(signal.SIGUSR1, before)
    assert consumer.is_closed
    assert fold(cluster).keys[KEY].owner is None


# --- Interrupted by a signal handler ---


QUESTIONS = {
    "world": lambda marshal, _: "keys" in str(marshal.world()),
    "owners": lambda marshal, _: marshal.owners("t")[T0],
    "assignment": lambda _, it: it.assignment(),
    "tokens": lambda _, it: set(it.tokens()),
    "position": lambda _, it: it.position(T0),
    "committed": lambda _, it: it.committed(T0),
    "lag": lambda _, it: it.lag(),
    "seek": lambda _, it: it.seek(T0, 4) or it.position(T0),
    "seek to beginning": lambda _, it: it.seek_to_beginning() or it.position(T0),
    "seek to end": lambda _, it: it.seek_to_end(T0) or it.position(T0),
    "pause": lambda _, it: it.pause(T0) or it.paused(),
    "resume": lambda _, it: it.resume(T0) or it.paused(),
    "commit": lambda _, it: (it.poll(0, 2), it.commit())[1],
    "flush": lambda _, it: it.flush() or it.committed(T0),
}


def require_unlocked(engine, at):
    """Check that no thread holds a lock of the engine."""
    found = []

    def look():
        for lock in (engine.lock, engine.changed):
            found.append(lock.acquire(blocking=False))
            if found[-1]:
                lock.release()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [True, True], at


def repeated(call, cluster, consumer):
    """Make a call, again where the error of a seek asks for that."""
    try:
        return call()
    except ClaimLost as error:
        if error.reason != "seek_unconfirmed":
            raise
    cluster.run_until(consumer.assignment, 4 * H)
    return call()


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_call_after_an_interrupted_one_works(cluster, tmp_path, name):
    """Else the interrupted thread would keep the engine's lock, and claims expire."""
    with opened(tmp_path) as marshal:
        consumer = consuming(marshal, cluster)
        cluster.run(H)

        def call():
            return QUESTIONS[name](marshal, consumer)

        wanted, at = call(), 0
        while interrupted(call, at, everywhere=True)[0]:
            require_unlocked(marshal.engine, at)
            assert repeated(call, cluster, consumer) == wanted, at
            cluster.run(20)
            at += 1
        assert at > 0
        assert fold(cluster).keys[KEY].owner.client_id == "a"


def test_an_interrupted_call_of_claim_leaves_no_claim(cluster, tmp_path):
    with opened(tmp_path) as marshal:
        at, claim = 0, None
        while True:
            is_interrupted, claim = interrupted(
                lambda: marshal.claim("t", 0, timeout_ms=2 * H), at, everywhere=True
            )
            require_unlocked(marshal.engine, at)
            if not is_interrupted:
                break
            cluster.run(H)
            found = [each.claim.phase for each in marshal.session.holdings.values()]
            assert found == [], at
            at += 1
        assert at > 0
        claim.seek(3)
        claim.release()


CLOSES = {
    "consumer": lambda _, it: it.close(),
    "marshal": lambda marshal, _: marshal.close(),
    "with": lambda marshal, _: marshal.__exit__(None, None, None),
}


def uninterrupted(monkeypatch, backend):
    """Raise no interrupts once a backend is being closed."""
    plain = backend.close

    def close():
        sys.setprofile(None)
        plain()

    monkeypatch.setattr(backend, "close", close)


@pytest.mark.parametrize("name", CLOSES)
def test_an_interrupted_close_is_completed_by_a_later_one(
    cluster, tmp_path, name, monkeypatch
):
    """Else the claims would be renewed until the process ends."""
    at, is_interrupted = 0, True
    while is_interrupted:
        marshal = opened(tmp_path)
        uninterrupted(monkeypatch, marshal._backend)
        engine, consumer = marshal.engine, consuming(marshal, cluster)
        is_interrupted, _ = interrupted(
            lambda a=marshal, b=consumer: CLOSES[name](a, b), at, everywhere=True
        )
        require_unlocked(engine, at)
        consumer.close()
        marshal.close()
        assert consumer.is_closed, at
        assert runtimes._running == {}, at
        with pytest.raises(InvalidTransition, match="closed"):
            marshal.owners("t")
        at += 1 if at < 20 else 11
    assert at > 100


# --- The same with a sidecar ---


@pytest.fixture
def reached(monkeypatch):
    """A sidecar that every ``Marshal`` of the test reaches, over a data topic ``t``."""
    found, plain = Assigning(), Connection.open

    def connect(*args, **rest):
        return plain(*args, **rest, requests=RequestsBy(found), transport=found)

    kafka = world(records=(10,)).kafka
    monkeypatch.setattr(Connection, "open", connect)
    monkeypatch.setattr(remote, "open_data_log", lambda _: kafka.data_log())
    yield found
    found.end()


def connected():
    return Marshal(
        group_id="g", client_id="c", sidecar="unix:/run/s.sock", observer=Recorder()
    )


def require_ended():
    """Wait until no thread of a client of a sidecar runs."""

    def is_ended():
        names = [each.name for each in threading.enumerate() if each.is_alive()]
        return not any(name.startswith("marshal-remote-") for name in names)

    until(is_ended, "its threads end")


def test_an_interrupted_connection_to_a_sidecar_leaves_no_thread(reached):
    """Else its heartbeats would continue, and its client_id would stay in use."""
    at, is_interrupted = 0, True
    while is_interrupted:
        is_interrupted, marshal = interrupted(connected, at, everywhere=True)
        if marshal is not None:
            marshal.close()
        require_ended()
        at += 1
    assert at > 100


OPENINGS = {
    "consumer": lambda it: it.consumer("t"),
    "ranges": lambda it: it.ranges(ConsumerConfig(topics=("t",))),
}


@pytest.mark.parametrize("name", OPENINGS)
def test_a_consumer_after_an_interrupted_one_gets_the_partition(reached, name):
    """Else no consumer of this client could ever consume the topic."""
    with connected() as marshal:
        at, is_interrupted = 0, True
        while is_interrupted:
            is_interrupted, consumer = interrupted(
                lambda: OPENINGS[name](marshal), at, everywhere=True
            )
            # Python ignores what is raised as it closes a generator.
            if consumer is None:
                consumer = OPENINGS[name](marshal)
            until(lambda: len(marshal.session.holdings) == 1, f"it is assigned: {at}")
            consumer.close()
            assert marshal.session.names == {}, at
            at += 1
        assert at > 50
        until(lambda: reached.has == {}, "all is given back")


def test_a_claim_after_an_interrupted_one_gets_the_partition_of_a_sidecar(reached):
    with connected() as marshal:
        at, is_interrupted = 0, True
        while is_interrupted:
            is_interrupted, claim = interrupted(
                lambda: marshal.claim("t", 0, timeout_ms=60_000), at, everywhere=True
            )
            if claim is None:
                claim = marshal.claim("t", 0, timeout_ms=60_000)
            claim.release()
            at += 1
        assert at > 50
        until(lambda: reached.has == {}, "all is given back")


@pytest.mark.parametrize("name", CLOSES)
def test_closing_after_an_interrupted_close_leaves_no_thread(
    reached, name, monkeypatch
):
    at, is_interrupted = 0, True
    while is_interrupted:
        marshal = connected()
        uninterrupted(monkeypatch, marshal._backend)
        consumer = marshal.consumer("t")
        until(consumer.assignment, "it is assigned")
        is_interrupted, _ = interrupted(
            lambda a=marshal, b=consumer: CLOSES[name](a, b), at, everywhere=True
        )
        consumer.close()
        marshal.close()
        assert consumer.is_closed, at
        require_ended()
        reached.has.clear()
        at += 1 if at < 20 else 11
    assert at > 50
