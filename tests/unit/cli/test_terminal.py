"""Width and color of terminals."""

import sys

import pytest

from kafka_marshal_cli.terminal import columns, terminal


@pytest.mark.parametrize(
    ("env", "is_color"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
    ],
)
def test_color_depends_on_term_and_no_color(monkeypatch, env, is_color):
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**env, "COLUMNS": "33"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert terminal(sys.stdout) == (33, is_color)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert terminal(sys.stdout) == (None, False)


@pytest.mark.parametrize("given", [None, "0", "wide"])
def test_text_that_goes_to_a_file_has_80_columns(monkeypatch, tmp_path, given):
    monkeypatch.delenv("COLUMNS", raising=False)
    if given is not None:
        monkeypatch.setenv("COLUMNS", given)
    with (tmp_path / "file").open("w") as file:
        assert columns(file) == 80
