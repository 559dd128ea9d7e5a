"""The tables are what the document says, and their schema is what Arrow makes of it."""

import re
from pathlib import Path

import pytest

from kafka_marshal.spark.audit import schema
from kafka_marshal.spark.audit.invariants import INVARIANTS
from kafka_marshal.spark.audit.rows import arrow_schema

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "AUDIT.md"


def listed(mark):
    _, found, rest = DOCUMENT.read_text().partition(f"<!-- {mark} -->\n")
    assert found, f"no <!-- {mark} -->"
    lines = rest.partition("\n\n")[0].splitlines()
    if lines[0].startswith("- "):
        return [tuple(line.removeprefix("- ").split(": ", 1)) for line in lines]
    return [tuple(c.strip() for c in line.strip("|").split("|")) for line in lines[2:]]


SHARED = {"all": (schema.T,), "key": schema.KEY, "record": schema.AT}


def columns(cells):
    """Return the columns of rows, whose first cell ends with the type."""
    return [
        schema.Column(name, cell.rpartition(" ")[2], meaning)
        for cell, meaning in cells
        for name in re.findall("`([^`]+)`", cell)
    ]


def test_shared_columns_are_documented():
    found = [(each, columns([cells])) for each, *cells in listed("columns: shared")]
    assert found == [(each, [c]) for each, of in SHARED.items() for c in of]


@pytest.mark.parametrize("table", schema.TABLES, ids=lambda table: table.name)
def test_columns_are_documented(table):
    (row,) = [
        row for row in listed("table: tables") if row[0].startswith(f"[`{table.name}`]")
    ]
    assert row[1] == table.meaning
    shared = [c for name in re.findall(r"\w+", row[2]) for c in SHARED[name]]
    own = columns(listed(f"columns: {table.name}"))
    assert own == [c for c in table.columns if c in own]
    assert {schema.T, *shared, *own} == set(table.columns)


def test_invariants_are_documented():
    real = [(f"`{i.name}`", i.meaning, i.clauses) for i in INVARIANTS]
    assert listed("table: invariants") == real


def test_invariants_use_existing_tables_and_columns():
    names = {table.name for table in schema.ALL}
    columns = {column.name for table in schema.ALL for column in table.columns}
    for each in INVARIANTS:
        asked = set(re.findall(r"(?:(?<!DISTINCT )FROM|JOIN) (\w+)", each.sql))
        assert asked
        assert asked <= names, each.name
        # What it names beside columns it makes up itself, or SQL does.
        words = set(re.findall(r"\b[a-z]+_[a-z_]+\b", each.sql)) - columns
        made = set(re.findall(r"AS (\w+)", each.sql)) | {"tolerance_ms"}
        assert words - made - {"taken_over"} == set(), each.name


def test_no_table_has_a_column_twice():
    for table in schema.ALL:
        assert len(set(table.names)) == len(table.names), table.name


def test_the_staged_schema_has_a_struct_for_each_table():
    form = arrow_schema()
    assert form.names == ["table", "is_open", *(table.name for table in schema.ALL)]
    ddl = schema.staged_ddl()
    for table in schema.ALL:
        fields = [
            form.field(table.name).type.field(i).name
            for i in range(99)[: len(table.columns)]
        ]
        assert tuple(fields) == table.names
        assert f"`{table.name}` struct<`{table.names[0]}`: " in ddl
