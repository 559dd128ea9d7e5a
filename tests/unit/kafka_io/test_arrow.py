"""The export of records to Arrow equals batches from lists, and owns its memory."""

import gc
import sys
import threading
from types import SimpleNamespace

import pytest
from batchkit import (
    APPEND_TIME,
    ROWS,
    TOKEN,
    batch,
    numbered,
    piece,
    records,
    run_of,
)

from kafka_marshal.batches import Batch
from kafka_marshal.kafka_io import arrow
from kafka_marshal.kafka_io.arrow import to_arrow
from kafka_marshal.native import compiled
from kafka_marshal.protocol.types import TopicPartition

pytestmark = pytest.mark.skipif(compiled is None, reason="nothing was compiled here")


@pytest.mark.parametrize("flags", [0, APPEND_TIME])
def test_exported_columns_equal_columns_built_from_lists(flags):
    found = records(
        piece(batch(7, *ROWS, flags=flags), 1), piece(numbered(20, 3), 1, 2)
    )
    made = Batch(TopicPartition("t", 2), found, TOKEN, lambda *_, **__: None)
    listed = Batch(TopicPartition("t", 2), tuple(found), TOKEN, lambda *_, **__: None)
    assert to_arrow(found) is not None
    assert made.to_arrow().equals(listed.to_arrow())
    assert made.to_arrow().schema == listed.to_arrow().schema


@pytest.mark.parametrize("count", [1, 3])
def test_exported_columns_are_valid_and_aligned(count):
    found = to_arrow(records(piece(batch(0, *ROWS[:count])), piece(numbered(9, 2))))
    found.validate(full=True)
    buffers = [each for column in found.columns for each in column.buffers() if each]
    assert all(each.address % 64 == 0 for each in buffers)


def test_an_exported_column_outlives_the_others_on_any_thread():
    made = to_arrow(records(piece(numbered(0, 200))))
    kept = made.column("value")[50:52]
    del made
    gc.collect()
    assert kept.to_pylist() == [b"v50", b"v51"]
    held = [kept]
    del kept
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join(30)
    assert not held


def test_an_unused_export_is_freed():
    run = run_of(numbered(0, 3))
    size = len(gc.get_objects())
    for _ in range(200):
        address, capsule = compiled.export_records(
            (run.data, run.places, 0, 3, run.fields)
        )
        assert address > 0
        del capsule
    assert len(gc.get_objects()) <= size + 100


def test_empty_and_parsed_records_are_not_exported():
    assert to_arrow(records()) is None
    assert to_arrow(records(piece(numbered(0, 3)), SimpleNamespace(size=1))) is None


def test_the_export_needs_no_numpy(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    found = to_arrow(records(piece(numbered(0, 3))))
    assert found.column("offset").to_pylist() == [0, 1, 2]


def test_a_batch_that_cannot_be_exported_is_built_from_lists(monkeypatch):
    left = SimpleNamespace(export_records=lambda *_: None)
    monkeypatch.setattr(arrow, "compiled", left)
    found = records(piece(numbered(0, 3)))
    assert to_arrow(found) is None
    made = Batch(TopicPartition("t", 2), found, TOKEN, lambda *_, **__: None)
    assert made.to_arrow().column("offset").to_pylist() == [0, 1, 2]
