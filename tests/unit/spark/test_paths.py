"""Folders with names that Spark or Hadoop would take for something else."""

import pytest

from kafka_marshal.spark.paths import for_hadoop, for_reader


@pytest.mark.parametrize(
    ("path", "escaped"),
    [
        ("file:///a b/c-1.2_3", "file:///a b/c-1.2_3"),
        ("/bills[eu]/{x}", "/bills\\[eu\\]/\\{x\\}"),
        ("/a*?\\", "/a\\*\\?\\\\"),
    ],
)
def test_characters_of_patterns_are_escaped_for_readers(path, escaped):
    assert for_reader(path) == escaped


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("audit-2026-01-31T12:30", "./audit-2026-01-31T12:30"),
        ("a:b/c", "./a:b/c"),
        ("audit", "audit"),
        ("out/12:30", "out/12:30"),
        ("/out/12:30", "/out/12:30"),
        ("file:/out", "file:/out"),
        ("hdfs://host:8020/out", "hdfs://host:8020/out"),
    ],
)
def test_a_colon_in_a_relative_path_is_no_scheme_for_hadoop(path, given):
    assert for_hadoop(path) == given
