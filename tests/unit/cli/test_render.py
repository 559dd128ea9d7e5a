"""Answers as text and JSON, with any values from the log."""

import json
import re
from collections import Counter
from io import StringIO

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kafka_marshal.clock import duration
from kafka_marshal_cli.render import (
    Answer,
    Column,
    Section,
    column,
    document,
    escape,
    escape_lines,
    fitting,
    json_parts,
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
def test_unprintable_characters_are_escaped(text, shown):
    assert escape(text) == shown


@given(st.text(st.characters(exclude_categories=[])))
def test_escaped_text_and_json_are_printable(text):
    assert escape(text).isprintable()
    assert to_json({text: text}).isprintable()
    assert json.loads(to_json({text: text})) == {text: text}


@given(st.text(), st.text())
def test_different_texts_differ_when_escaped(one, other):
    assert (escape(one) == escape(other)) == (one == other)


def test_lines_of_a_value_after_the_first_are_indented():
    assert escape_lines("error\nmarshal: all is well") == (
        "error\n  marshal: all is well"
    )


def test_json_is_one_line_unless_pretty():
    assert to_json({"a": ["日", "\n", RTL]}) == r'{"a": ["日", "\n", "\u202e"]}'
    assert to_json({"a": 1}, is_pretty=True) == '{\n  "a": 1\n}'


def test_long_json_is_rendered_in_parts():
    rows = [{"topic": f"t-{n}\x1b", "partition": n, "tags": {}} for n in range(9_000)]
    parts = list(json_parts({"claims": rows}))
    assert max(map(len, parts)) * 5 < sum(map(len, parts))
    text = "".join(parts)
    assert text == to_json({"claims": rows}, is_pretty=True)
    assert json.loads(text) == {"claims": rows}
    assert text.replace("\n", "").isprintable()


def test_json_escapes_supplementary_characters_as_surrogates():
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
    {"until_ms": "1970-01-01"},
)


def test_a_table_aligns_its_columns():
    assert table(SECTION).splitlines() == [
        "NAME            AGE",
        "c1             12ms",
        r"[red]\x1b[31m  1.2s",
    ]


def test_a_table_has_color_only_if_allowed():
    assert "\x1b" not in table(SECTION, width=80)
    assert "\x1b[1m" in table(SECTION, width=80, is_color=True)


@pytest.mark.parametrize("width", [None, 20, 40, 200])
def test_a_long_table_is_not_drawn_by_rich(width, monkeypatch):
    folded = []
    wrap = Text.wrap
    monkeypatch.setattr(Text, "wrap", lambda *a, **k: folded.append(a) or wrap(*a, **k))
    monkeypatch.setattr(Console, "print", None)
    rows = [{"owner": f"w{n}", "why": "für später: zurück gegeben"} for n in range(999)]
    section = Section("x", rows, (column("OWNER", "owner"), column("WHY", "why")))
    assert len(table(section, width=width).splitlines()) >= len(rows)
    assert len(folded) <= 1


CELLS = st.text(st.characters(max_codepoint=0x7F), max_size=6) | st.text(max_size=4)
FIELDS = (Column("A", lambda row: row[0]), Column("NUMBER", lambda row: row[1], True))


@given(
    st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=4),
    st.none() | st.integers(1, 50),
    st.booleans(),
)
def test_a_table_has_every_character_of_its_cells(rows, width, is_color):
    section = Section("x", rows, (*FIELDS, Column("LAST", lambda row: row[2])))
    shown = "".join(uncolored(table(section, width=width, is_color=is_color)))
    cells = "".join(escape(cell) for row in rows for cell in row)
    assert Counter("".join(shown.split())) == Counter(
        "".join(f"A NUMBER LAST {cells}".split())
    )


@given(st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=4))
def test_a_table_equals_the_one_that_rich_draws(rows):
    drawn = Table(box=None, pad_edge=False, show_edge=False)
    drawn.add_column("A")
    drawn.add_column("NUMBER", justify="right")
    for row in rows:
        drawn.add_row(*(Text(escape(cell)) for cell in row))
    screen = StringIO()
    Console(file=screen, width=100_000).print(drawn)
    shown = table(Section("x", rows, FIELDS))
    assert uncolored(shown) == uncolored(screen.getvalue().removesuffix("\n"))


def uncolored(text):
    return [line.rstrip() for line in SGR.sub("", text).split("\n")]


WIDE = Section(
    "claims",
    [
        {"owner": "worker-2", "offset": 1234567, "why": "fair: 0 held, share 3 of 6"},
        {"owner": "worker-1", "offset": 7, "why": "handed over by worker-2; free"},
    ],
    (
        column("OWNER", "owner"),
        column("LOG-END-OFFSET", "offset"),
        column("WHY", "why"),
    ),
)


def test_a_narrow_terminal_folds_text_and_titles():
    assert table(WIDE, width=40).splitlines() == [
        "             LOG-",
        "             END-",
        "OWNER      OFFSET  WHY",
        "worker-2  1234567  fair: 0 held, share 3",
        "                   of 6",
        "worker-1        7  handed over by",
        "                   worker-2; free",
    ]


@pytest.mark.parametrize("width", range(1, 60))
def test_names_and_numbers_are_not_folded_at_any_width(width):
    shown = table(WIDE, width=width)
    assert {"worker-2", "worker-1", "1234567", "7"} <= set(shown.split())
    is_narrow = max(map(len, shown.splitlines())) <= width
    assert is_narrow or shown == table(WIDE)


def test_long_texts_share_the_width_of_a_narrow_terminal():
    section = Section(
        "checks",
        [{"name": "log", "found": "a " * 60, "next": "b " * 60, "short": "c d"}],
        tuple(column(key.upper(), key) for key in ("name", "found", "next", "short")),
    )
    assert max(map(len, table(section, width=60).splitlines())) <= 60
    first = table(section, width=60).splitlines()[1]
    assert abs(first.count("a") - first.count("b")) <= 1
    assert first.endswith("c d")


def test_a_name_of_double_width_characters_is_not_folded():
    section = Section("x", [{"name": "日本" * 9}], (column("NAME", "name"),))
    assert table(section, width=36).splitlines() == ["NAME", "日本" * 9]
    assert fitting(section, 10)[1] == []


def test_columns_that_do_not_fit_are_omitted_from_the_right():
    section, left_out = fitting(WIDE, 20)
    assert left_out == ["WHY"]
    assert max(map(len, table(section, width=20).splitlines())) <= 20
    assert fitting(WIDE, 200)[1] == []
    assert fitting(WIDE, 1)[1] == ["WHY", "LOG-END-OFFSET"]
    chosen = attrs.evolve(WIDE, less=("LOG-END-OFFSET", "NONE"))
    assert fitting(chosen, 30)[1] == ["LOG-END-OFFSET"]


def test_a_table_on_a_narrow_terminal_omits_what_matters_less():
    section = attrs.evolve(WIDE, less=("LOG-END-OFFSET",))
    answer = Answer({}, {}, (section,))
    assert people(answer) == people(answer, width=200) == table(WIDE)
    for width in (30, 1):
        lines = people(answer, width=width).splitlines()
        assert lines[-1] == "no room for LOG-END-OFFSET; -o json shows all"
        assert "END-" not in "".join(lines[:-1])
    assert people(Answer({}, {}, (WIDE,)), width=1) == table(WIDE, width=1)


def test_text_output_has_facts_before_tables():
    assert people(ANSWER).splitlines() == [
        r"group id: g\n",
        "until:    1970-01-01",
        "is on:    yes",
        "names:    -",
        "none:     -",
        "",
        *table(SECTION).splitlines(),
    ]


@pytest.mark.parametrize(
    ("shown", "line"),
    [({}, "age ms: 2000"), ({"age_ms": "2000 (2s)"}, "age ms: 2000 (2s)")],
)
def test_a_label_keeps_its_unit_unless_the_value_has_one(shown, line):
    answer = Answer({}, {"age_ms": 2000}, shown=shown)
    assert people(answer) == line
    assert people(Answer({}, {"age_ms": 2000}, shown={"age_ms": "2s"})) == "age: 2s"


def test_text_output_has_ten_items_of_a_long_list():
    names = [f"client-{number}" for number in range(3_000)]
    section = Section("x", [{"names": names}], (column("NAMES", "names"),))
    shown = people(Answer({}, {"held": names, "few": names[:10]}, (section,)))
    held, few, _, _, cell = shown.splitlines()
    assert held.endswith(" client-8, client-9 and 2990 more")
    assert few.endswith(" client-8, client-9")
    assert cell.endswith(" client-8, client-9 and 2990 more")


def test_an_empty_section_is_shown_as_one_line():
    empty = Section("pauses", [], SECTION.columns)
    assert people(Answer({}, {}, (empty,))) == "no pauses"
    both = people(Answer({}, {}, (empty, SECTION))).splitlines()
    assert both[:3] == ["no pauses", "", "CLAIMS"]


def test_document_and_lines_carry_schema_and_as_of():
    whole = document(ANSWER)
    assert list(whole)[:3] == ["schema", "as_of", "group_id"]
    assert whole["claims"] == list(SECTION.rows)
    reported = lines(ANSWER)
    assert [line["section"] for line in reported] == ["facts", "claims", "claims"]
    assert all(line["schema"] == 1 for line in reported)
    assert all(line["as_of"]["offsets"] == {"0": 7} for line in reported)


def test_an_answer_with_only_an_empty_section_has_no_lines():
    assert lines(Answer({}, {}, (Section("x", [], ()),))) == []
    assert len(lines(Answer({}))) == 1


def test_a_column_can_compute_its_cells():
    own = Column("X", lambda row: row["a"] + row["b"])
    assert table(Section("x", [{"a": "1", "b": "2"}], (own,))) == "X\n12"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (False, "no"), ([1, None], "1, -"), ({"a": 1}, "a=1"), ({}, "-")],
)
def test_values_are_shown_as_plain_text(value, shown):
    assert plain(value) == shown
