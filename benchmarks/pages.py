"""Writes the figures into benchmarks/RESULTS.md and the table of docs/BENCHMARKS.md.

RESULTS.md has a block for each benchmark, made from its document. The table of
docs/BENCHMARKS.md is made from these blocks and questions.toml, so that making it again
needs no documents.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "RESULTS.md"
RESULTS_LINK = "../benchmarks/RESULTS.md"
ANSWERS = HERE.parent / "docs" / "BENCHMARKS.md"
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
TABLE = re.compile(r"(<!-- answers -->\n).*?(<!-- end -->)", re.DOTALL)
TOOK = re.compile(r"; took ([\d,.]+) min")
UNMEASURED = "not measured"
VERDICTS = {True: "met", False: "missed", None: ""}
COLUMNS = 7


@attrs.frozen(kw_only=True)
class Row:
    """One question, with the fields that questions.toml explains."""

    question: str
    script: str
    ours: str
    why: str
    by: str = ""
    peer: str = ""
    beside: str = ""
    unit: str = ""


ROWS = tuple(
    Row(**each) for each in tomllib.loads((HERE / "questions.toml").read_text())["row"]
)


def number(value: float) -> str:
    """Return a number for people, with thousands separated."""
    digits = 4 if abs(value) < 1_000 else 0  # noqa: PLR2004 - as people read them
    return f"{value:,.{digits}g}" if digits else f"{value:,.0f}"


# --- RESULTS.md


def table(found: Mapping[str, Any]) -> str:
    """Return a benchmark's figures as a table for people."""
    rows = [
        "| what | unit | median | min to max | runs | target | |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in found["figures"]:
        spread = f"{number(each['min'])} to {number(each['max'])}"
        if each["count"] == 1:
            spread = ""
        cells = (
            each["what"],
            each["unit"],
            number(each["median"]),
            spread,
            str(each["count"]),
            each.get("target", ""),
            VERDICTS[each.get("is_met")],
        )
        rows.append(f"| {' | '.join(cells)} |")
    facts = found["machine"]
    packages = ", ".join(f"{name} {at}" for name, at in facts["packages"].items() if at)
    took = f"; took {number(found['took_s'] / 60)} min" if "took_s" in found else ""
    when = (
        f"{found['finished'][:10]}; {facts['cores']} cores, {facts['cpu']}, load "
        f"{facts['load_1min']} at the end{took}; Python {facts['python']}, {packages}."
    )
    return "\n".join([*rows, "", when, ""])


def fill(page: str, documents: Mapping[str, Mapping[str, Any]]) -> str:
    """Return RESULTS.md with the tables of these documents; other tables stay.

    Raises:
        ValueError: A document is of a smoke run, or has no place on the page.
    """
    places = {name for _, name, *_ in BLOCK.findall(page)}
    for name, found in documents.items():
        if found["is_quick"]:
            raise ValueError(f"{name} is of a smoke run; run it without --quick")
        if name not in places:
            raise ValueError(f"the page has no block <!-- figures: {name} -->")

    def filled(block: re.Match[str]) -> str:
        found = documents.get(block[2])
        return block[0] if found is None else f"{block[1]}{table(found)}{block[4]}"

    return BLOCK.sub(filled, page)


@attrs.frozen
class Measured:
    """One figure in RESULTS.md; the fields are the cells of its row."""

    what: str
    unit: str
    median: str
    target: str
    verdict: str


def measured(block: str) -> list[Measured]:
    """Return the figures of a block of RESULTS.md."""
    found = []
    for line in block.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if (
            len(cells) == COLUMNS
            and cells[0] != "what"
            and not cells[0].startswith("-")
        ):
            what, unit, median, _, _, target, verdict = cells
            found.append(
                Measured(
                    what=what, unit=unit, median=median, target=target, verdict=verdict
                )
            )
    return found


def blocks(results: str) -> dict[str, str]:
    """Return the blocks of RESULTS.md, by benchmark."""
    return {name: block for _, name, block, _ in BLOCK.findall(results)}


def anchors(results: str) -> dict[str, str]:
    """Return the anchor of the heading above each block, by benchmark."""
    found, anchor = {}, ""
    for line in results.splitlines():
        if line.startswith("## "):
            anchor = re.sub(r"[^\w\- ]", "", line[3:].lower()).replace(" ", "-")
        elif block := re.fullmatch(r"<!-- figures: (\w+) -->", line):
            found[block[1]] = anchor
    return found


# --- docs/BENCHMARKS.md


def chosen(figures: Iterable[Measured], what: str, unit: str) -> Measured | None:
    """Return the figure of this name and unit, None if there is none; "" = any unit."""
    for each in figures:
        if each.what == what and unit in ("", each.unit):
            return each
    return None


def absent(
    rows: Iterable[Row], documents: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Return the figures that questions name and that these documents lack."""
    found = []
    for row in rows:
        if row.script in documents:
            names = {each["what"] for each in documents[row.script]["figures"]}
            named = (row.ours, row.peer, row.beside)
            found += [
                f"{row.script}: {each}" for each in named if each not in names | {""}
            ]
    return found


def answer(row: Row, figures: Sequence[Measured], question: str) -> str:
    """Return the line of the table for a question; ``question`` may be a link."""
    ours = chosen(figures, row.ours, row.unit)
    peer = chosen(figures, row.peer, row.unit)
    beside = chosen(figures, row.beside, "ratio")
    asked = next((each for each in (beside, ours) if each and each.target), None)
    verdict = asked.verdict if asked else ""
    if verdict == VERDICTS[False]:
        verdict = f"[{verdict}](#{row.why})"
    by = f"{row.by}: " if row.by else ""
    cells = (
        question,
        f"{ours.median} {ours.unit}" if ours else UNMEASURED,
        f"{by}{peer.median if peer else UNMEASURED}" if row.peer else "",
        beside.median if beside else "",
        f"{asked.target}: {verdict}" if asked else "",
    )
    return f"| {' | '.join(cells)} |"


def answers(results: str, rows: Iterable[Row] = ROWS) -> str:
    """Return the table of docs/BENCHMARKS.md, from RESULTS.md.

    The first question of each benchmark is a link to all its figures.
    """
    found, places = blocks(results), anchors(results)
    lines = [
        "| Question | Ours | Peer | Ours / peer | Asked |",
        "|---|---|---|---|---|",
    ]
    linked: set[str] = set()
    for row in rows:
        question = row.question
        if row.script not in linked:
            question = f"[{question}]({RESULTS_LINK}#{places[row.script]})"
        linked.add(row.script)
        lines.append(answer(row, measured(found[row.script]), question))
    took = {name: TOOK.search(block) for name, block in found.items()}
    minutes = sum(float(each[1].replace(",", "")) for each in took.values() if each)
    days = sorted(re.findall(r"^\d{4}-\d\d-\d\d(?=;)", results, re.MULTILINE))
    text = f"Measured from {days[0]} to {days[-1]}." if days else "Not measured yet."
    untimed = sum(each is None for each in took.values())
    if not untimed:
        text += f" The full set took {minutes:,.0f} minutes."
    return "\n".join([*lines, "", text, ""])


def with_answers(page: str, results: str) -> str:
    """Return docs/BENCHMARKS.md with the table for these results."""
    return TABLE.sub(lambda it: f"{it[1]}{answers(results)}{it[2]}", page)


def write(documents: Mapping[str, Mapping[str, Any]]) -> None:
    """Write both pages, with the figures of these documents.

    Raises:
        ValueError: A document is of a smoke run, has no place on the page, or lacks a
            figure that a question names; in the last case the pages were written.
    """
    results = fill(RESULTS.read_text(), documents)
    RESULTS.write_text(results)
    ANSWERS.write_text(with_answers(ANSWERS.read_text(), results))
    if missing := absent(ROWS, documents):
        raise ValueError(
            f"not measured, but named by questions.toml: {'; '.join(missing)}; correct "
            "it, then run: benchmarks/run.py --write"
        )
