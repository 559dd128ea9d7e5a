"""Tables and invariants of the audit match docs/AUDIT.md and the Arrow schema."""

import re
from pathlib import Path

from kafka_marshal.spark.audit import schema
from kafka_marshal.spark.audit.invariants import INVARIANTS
from kafka_marshal.spark.audit.rows import arrow_schema

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "AUDIT.md"


def listed(mark):
    _, found, rest = DOCUMENT.read_text().partition(f"<!-- {mark} -->\n")
    assert found, f"no <!-- {mark} -->"
    items = " ".join(rest.partition("\n\n")[0].split()).split("- `")[1:]
    return [f"`{item.strip()}" for item in items]


def test_tables_are_documented():
    real = [f"`{table.name}`: {table.meaning}" for table in schema.TABLES]
    assert listed("list: tables") == real


def test_every_column_is_declared_with_its_meaning():
    for table in schema.ALL:
        declared = re.findall(r'`(\w+)` (\w+) COMMENT "([^"]+)"', table.ddl)
        assert [schema.Column(*each) for each in declared] == list(table.columns)


def test_invariants_are_documented():
    real = [f"`{i.name}` ({i.clauses}): {i.meaning}" for i in INVARIANTS]
    assert listed("list: invariants") == real


def test_invariants_use_existing_tables_and_columns():
    names = {table.name for table in schema.ALL}
    columns = {column.name for table in schema.ALL for column in table.columns}
    for each in INVARIANTS:
        asked = set(re.findall(r"(?:(?<!DISTINCT )FROM|JOIN) (\w+)", each.sql))
        assert asked
        assert asked <= names, each.name
        # Names in the query that are neither columns nor aliases of its own.
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
