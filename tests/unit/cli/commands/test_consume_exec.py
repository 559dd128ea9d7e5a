"""The options of `consume --exec`: what goes together, and what is refused."""

import pytest

from kafka_marshal import ConfigurationError
from kafka_marshal_cli.commands.consume_exec import (
    EXEC,
    RETRIES_DEFAULT,
    asked_for,
)
from kafka_marshal_cli.exec_pipe import ExecFormat, ExecMode, OnError


def asked(**given):
    defaults = {name: default for name, (_, default) in EXEC.options.items()}
    return asked_for(defaults | given)


def of(**given):
    rest = {"at_most_once": False, "batch_max": 5, "records_max": 7, "group": "g"}
    rest |= {name: given.pop(name) for name in list(given) if name in rest}
    return asked(**{"exec_": "true", **given}).of(**rest)


def test_without_exec_nothing_is_asked_for():
    assert asked() is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("on_error", OnError.SKIP), ("workers", 2), ("exec_shell", True)],
)
def test_options_that_need_exec(name, value):
    with pytest.raises(ConfigurationError, match="needs --exec CMD"):
        asked(**{name: value})


def test_what_is_asked_for_and_what_consume_knows():
    found = of(exec_="cat -n 'a b'", exec_timeout="2s", workers=3)
    assert found.argv == ["cat", "-n", "a b"]
    assert (found.timeout_ms, found.grace_ms, found.workers) == (2_000, 5_000, 3)
    assert (found.batch_max, found.records_max) == (5, 7)
    assert found.env == {"MARSHAL_GROUP": "g"}
    assert (found.on_error, found.retries_max) == (OnError.STOP, 0)


def test_a_line_for_a_shell():
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
def test_the_format_that_fits_the_mode(given, expected):
    assert of(**given).format is expected


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({"on_error": OnError.RETRY}, RETRIES_DEFAULT),
        ({"on_error": OnError.RETRY, "retries": 0}, 0),
        ({"on_error": OnError.SKIP, "retries": 2}, 2),
    ],
)
def test_how_often_it_is_tried_again(given, count):
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
def test_what_is_refused(given, message):
    with pytest.raises(ConfigurationError, match=message):
        of(**given)
