"""A line of the doctor's."""

from kafka_marshal_cli.checks import Check, Result


def test_only_a_failure_fails():
    assert [each.value for each in Result] == ["ok", "note", "failed", "skipped"]
    assert Check("clock", Result.OK, "runs well").run is None
