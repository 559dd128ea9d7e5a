"""Which micro-batches of the stream start a run of the audit; without Spark."""

from types import SimpleNamespace

import pytest
from pyspark.errors import PySparkException

from kafka_marshal.errors import ConfigurationError, CoordinationError, LogTruncated
from kafka_marshal.spark.audit import Bounds, Source, await_end, follow, following
from kafka_marshal.spark.audit.job import Step
from kafka_marshal.spark.audit.store import Run

STEP = Step(Source(), Bounds(), sample_ms=60_000)


class Row(dict):
    asDict = dict.copy  # noqa: N815 - Spark's name


def frame(*ends, topic_id="ab"):
    rows = [
        Row(
            coordinating_partition=t,
            end=end,
            as_of_ms=9,
            cluster_id="c",
            topic_id=topic_id,
        )
        for t, end in enumerate(ends)
    ]
    return SimpleNamespace(collect=lambda: rows)


@pytest.fixture
def runs(monkeypatch):
    made = []

    def run_next(step, log, *, store, last, as_of_ms):
        assert (step, store, as_of_ms) == (STEP, "a store", 9)
        assert last is (made[-1] if made else None)
        facts = {
            "cluster_id": log.cluster_id,
            "topic_id": log.topic_id,
            "bounds": dict.fromkeys(("from_offset", "from_ms", "to_offset", "to_ms")),
            "sample_ms": 60_000,
            "as_of": {"offsets": {str(t): end for t, end in log.ends.items()}},
        }
        made.append(Run(len(made) + 1, "path", facts))
        return made[-1]

    monkeypatch.setattr(following, "run_next", run_next)
    return made


def ends(run):
    return list(run.facts["as_of"]["offsets"].values())


def test_only_a_batch_with_new_log_ends_starts_a_run(runs):
    received = []
    batches = following._Batches(
        step=STEP, store="a store", last=None, on_run=received.append
    )
    batches(frame(), 0)
    assert runs == []
    for given in (frame(5, 7), frame(5, 7), frame(6, 7), frame(5, 7), frame(6, 7, 0)):
        batches(given, 0)
    assert [ends(run) for run in runs] == [[5, 7], [6, 7], [6, 7, 0]]
    assert received == runs


def test_a_run_never_ends_before_the_last_run_in_any_partition(runs):
    batches = following._Batches(STEP, "a store", None)
    batches(frame(9, 5), 0)
    batches(frame(4, 6), 1)
    assert ends(runs[-1]) == [9, 6]


def test_a_recreated_topic_is_refused_in_the_same_directory(runs):
    batches = following._Batches(STEP, "a store", None)
    batches(frame(5), 0)
    with pytest.raises(ConfigurationError, match="into another directory"):
        batches(frame(1, topic_id="cd"), 1)
    assert len(runs) == 1


def test_the_error_of_a_query_is_translated():
    text = "Traceback ...\nkafka_marshal.errors.LogTruncated: it went back\n"

    def fails(timeout_s):
        raise PySparkException(text)

    with pytest.raises(LogTruncated, match="it went back"):
        await_end(SimpleNamespace(awaitTermination=fails), 1)

    def fails_otherwise(timeout_s):
        raise PySparkException("no space left")

    with pytest.raises(CoordinationError, match="no space left"):
        await_end(SimpleNamespace(awaitTermination=fails_otherwise), 1)
    assert not await_end(SimpleNamespace(awaitTermination=lambda _: False), 1)
    assert await_end(SimpleNamespace(awaitTermination=lambda _: True), 1)


def test_an_interval_of_zero_is_refused():
    with pytest.raises(ConfigurationError, match="at least 1"):
        follow(None, "out", every_ms=0)
