"""Answers as people and programs read them, whatever the log holds."""

import json
import re
import string
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kafka_marshal_cli.render import (
    Answer,
    Column,
    Section,
    abbreviated,
    column,
    document,
    duration,
    escape,
    escape_lines,
    grid,
    lines,
    people,
    plain,
    table,
    to_json,
)

ESC = "\x1b[31m"
RTL = "\u202e"
SGR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text", "plain text"),
        ("日本", "日本"),
        (ESC, r"\x1b[31m"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
        (RTL, r"\u202e"),
        ("\ud800", r"\ud800"),
        (r"\x1b", r"\\x1b"),
        ("[red]x[/red]", "[red]x[/red]"),
    ],
)
def test_escape(text, shown):
    assert escape(text) == shown


@given(st.text(st.characters(exclude_categories=[])))
def test_nothing_gets_past_the_escape(text):
    assert escape(text).isprintable()
    assert to_json({text: text}).isprintable()
    assert json.loads(to_json({text: text})) == {text: text}


@given(st.text(), st.text())
def test_different_texts_look_different(one, other):
    assert (escape(one) == escape(other)) == (one == other)


def test_a_newline_in_a_value_begins_no_line():
    assert escape_lines("error\nmarshal: all is well") == (
        "error\n  marshal: all is well"
    )


def test_json_is_one_line_unless_pretty():
    assert to_json({"a": ["日", "\n", RTL]}) == r'{"a": ["日", "\n", "\u202e"]}'
    assert to_json({"a": 1}, is_pretty=True) == '{\n  "a": 1\n}'


def test_json_escapes_beyond_the_basic_plane_in_pairs():
    assert to_json("\U000e0001") == r'"\udb40\udc01"'


SECTION = Section(
    "claims",
    [
        {"name": "c1", "age_ms": 12, "owner": None},
        {"name": f"[red]{ESC}", "age_ms": 1234, "owner": "x"},
    ],
    (column("NAME", "name"), column("AGE", "age_ms", as_text=duration)),
)
ANSWER = Answer(
    {"time_ms": 5, "offsets": {"0": 7}},
    {"group_id": "g\n", "until_ms": 0, "is_on": True, "names": [], "none": None},
    (SECTION,),
    {"until_ms": "1970"},
)


def test_table():
    assert table(SECTION).splitlines() == [
        "NAME            AGE",
        "c1             12ms",
        r"[red]\x1b[31m  1.2s",
    ]


def test_a_table_has_colour_only_where_it_may():
    assert "\x1b" not in table(SECTION, width=80)
    assert "\x1b[1m" in table(SECTION, width=80, is_color=True)


CELLS = st.text(st.characters(max_codepoint=0x7F), max_size=6) | st.text(max_size=4)
FIELDS = (Column("A", lambda row: row[0]), Column("NUMBER", lambda row: row[1], True))


@given(
    st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=4),
    st.none() | st.integers(1, 50),
    st.booleans(),
)
def test_a_table_is_the_one_of_rich(rows, width, is_color):
    section = Section("x", rows, (*FIELDS, Column("LAST", lambda row: row[2])))
    shown = table(section, width=width, is_color=is_color)
    drawn = StringIO()
    Console(file=drawn, width=width or 100_000).print(grid(section))
    assert uncolored(shown) == uncolored(drawn.getvalue().removesuffix("\n"))


def uncolored(text):
    return [line.rstrip() for line in SGR.sub("", text).split("\n")]


def test_a_narrow_terminal_folds_and_drops_nothing():
    section = Section("x", [{"name": string.ascii_letters}], (column("NAME", "name"),))
    rows = table(section, width=20).splitlines()
    assert "".join(rows[1:]).replace(" ", "") == string.ascii_letters


def test_people():
    assert people(ANSWER).splitlines() == [
        r"group id: g\n",
        "until ms: 1970",
        "is on:    yes",
        "names:    -",
        "none:     -",
        "",
        *table(SECTION).splitlines(),
    ]


def test_an_empty_list_has_a_line():
    empty = Section("pauses", [], SECTION.columns)
    assert people(Answer({}, {}, (empty,))) == "no pauses"
    both = people(Answer({}, {}, (empty, SECTION))).splitlines()
    assert both[:3] == ["no pauses", "", "CLAIMS"]


def test_document_and_lines_carry_schema_and_as_of():
    whole = document(ANSWER)
    assert list(whole)[:3] == ["schema", "as_of", "group_id"]
    assert whole["claims"] == list(SECTION.rows)
    reported = lines(ANSWER)
    assert [line["kind"] for line in reported] == ["facts", "claims", "claims"]
    assert all(line["schema"] == 1 for line in reported)
    assert all(line["as_of"]["offsets"] == {"0": 7} for line in reported)


def test_lines_of_nothing_but_an_empty_list_are_none():
    assert lines(Answer({}, {}, (Section("x", [], ()),))) == []
    assert len(lines(Answer({}))) == 1


def test_a_custom_column():
    own = Column("X", lambda row: row["a"] + row["b"])
    assert table(Section("x", [{"a": "1", "b": "2"}], (own,))) == "X\n12"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0ms"),
        (999, "999ms"),
        (1_000, "1s"),
        (12_345, "12.3s"),
        (60_000, "1m"),
        (90_000, "1m30s"),
        (7_260_000, "2h1m"),
        (2 * 86_400_000, "2d"),
        (-1_500, "-1.5s"),
    ],
)
def test_duration(value, shown):
    assert duration(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (False, "no"), ([1, None], "1, -"), ({"a": 1}, "a=1"), ({}, "-")],
)
def test_plain(value, shown):
    assert plain(value) == shown


def test_names_for_a_line():
    assert abbreviated([1, 2]) == "1, 2"
    assert abbreviated(range(7)) == "0, 1, 2, 3, 4 and 2 more"
