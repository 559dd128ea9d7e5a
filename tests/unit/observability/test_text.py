"""Strings from the log cannot act on whoever reads them."""

import pytest

from kafka_marshal.observability.text import TEXT_CHARS_MAX, escaped


@pytest.mark.parametrize("text", ["", "payments-0", "größer 日本", 'a "b" \\c'])
def test_ordinary_text_stays(text):
    assert escaped(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("a\nb", r"a\nb", id="line"),
        pytest.param("\x1b[31m", r"\x1b[31m", id="terminal"),
        pytest.param("a\u202eb", r"a\u202eb", id="direction"),
        pytest.param("日\u2028", r"日\u2028", id="separator"),
        pytest.param("\x00\x7f\x9b", r"\x00\x7f\x9b", id="control"),
        pytest.param("\ud800", r"\ud800", id="surrogate"),
    ],
)
def test_what_acts_is_escaped(text, shown):
    assert escaped(text) == shown
    assert escaped(text).isprintable()


def test_length_is_bounded():
    assert len(escaped("x" * 10_000)) == TEXT_CHARS_MAX
    assert len(escaped("\x1b" * 10_000)) == TEXT_CHARS_MAX * len(r"\x1b")
