"""Makes one page of the results of ``make proof``: parts, amounts, outcomes.

Each part has written ``NAME.json`` (when, how long, exit code) and its results: the
summary of the simulator, JUnit XML of pytest, or the report of real faults.
"""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import attrs

ROOT = Path(__file__).resolve().parent.parent
MESSAGE_CHARS_MAX = 600
MINUTE_S, HOUR_S = 60, 3_600
NOTHING = "nothing was found: it ended before its first result"


@attrs.frozen(kw_only=True)
class Case:
    """One test of a part.

    Attributes:
        node: Node id for pytest.
        name: Name of the test, without file and ``test_``.
        seconds: Duration of the test.
        failure: Why it failed, None if it passed.
        figures: Counts that the test recorded, by name.
    """

    node: str
    name: str
    seconds: float
    failure: str | None
    figures: dict[str, str]

    @property
    def repeat(self) -> str:
        """The command that runs the test again, at full size."""
        return f"PROOF=1 .venv/bin/python -m pytest '{self.node}'"


@attrs.frozen(kw_only=True)
class Found:
    """The results of a part.

    Attributes:
        amount: How much ran, in words.
        head: Headings of the columns of its table.
        rows: Rows of its table.
        failures: Title, message and command to repeat of each failure.
    """

    amount: str
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    failures: tuple[tuple[str, str, str], ...] = ()


def write(folder: Path, *, simulation: Path, chaos: Path) -> Path:
    """Write ``report.md`` in a folder; return its path."""
    parts = []
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime):
        ended = json.loads(path.read_text())
        if path.stem == "sim":
            found = found_by_simulator(simulation)
        else:
            found = found_by_tests(cases(folder / f"{path.stem}.xml"))
        if path.stem == "chaos":
            found = attrs.evolve(found_by_chaos(chaos), failures=found.failures)
        parts.append((ended, found))
    report = folder / "report.md"
    report.write_text(page(parts))
    return report


def found_by_simulator(path: Path) -> Found:
    """Return the results of a campaign of the simulator."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return Found(amount=NOTHING)
    seldom = sorted(found["situations"], key=lambda row: row["count"])
    failures = [
        (f"seed {row['seed']}: {row['invariant']}", row["message"], row["repeat"])
        for row in found["broken_seeds"]
    ]
    failures += [
        (f"never reached: {name}", "No seed came to this situation.", "make sim")
        for name in found["never_reached"]
    ]
    faults = sum(row["count"] for row in found["faults"])
    return Found(
        amount=f"{found['seeds']:,} seeds, {found['simulated_minutes']:,} simulated "
        f"minutes, {faults:,} faults, {len(seldom)} situations",
        head=("Situation", "Reached", "Meaning"),
        rows=tuple(
            (row["situation"], f"{row['count']:,}", row["meaning"]) for row in seldom
        ),
        failures=tuple(failures),
    )


def found_by_tests(found: list[Case]) -> Found:
    """Return the results of the tests of a part."""
    if not found:
        return Found(amount=NOTHING)
    totals: dict[str, int] = {}
    for case in found:
        for name, figure in case.figures.items():
            totals[name] = totals.get(name, 0) + int(figure)
    counted = [f"{figure:,} {name}" for name, figure in totals.items()]
    rows = [
        (
            case.name,
            ", ".join(f"{int(v):,} {name}" for name, v in case.figures.items()),
            "passed" if case.failure is None else "**failed**",
            duration(case.seconds),
        )
        for case in found
    ]
    return Found(
        amount=", ".join(
            [f"{len(found)} test{'' if len(found) == 1 else 's'}", *counted]
        ),
        head=("Test", "How much", "Outcome", "Took"),
        rows=tuple(rows),
        failures=tuple(
            (case.name, case.failure, case.repeat)
            for case in found
            if case.failure is not None
        ),
    )


def found_by_chaos(folder: Path) -> Found:
    """Return the results of real faults; ``report.html`` there has all figures."""
    try:
        report = json.loads((folder / "report.json").read_text())
    except (OSError, ValueError):
        return Found(amount=NOTHING)
    rows = report["rows"]
    runs = sum(row["runs"] for row in rows if isinstance(row["runs"], int))
    records = sum(row["records"] for row in rows if isinstance(row["records"], int))
    totals = report["totals"]
    return Found(
        amount=f"{len(rows)} faults in {runs:,} runs, {records:,} records, "
        f"{totals['losses']} losses, {totals['violations']} violations",
        head=("Fault", "Runs", "Records", "Outcome"),
        rows=tuple(
            (
                f"{row['name']}: {row['title']}",
                str(row["runs"]),
                str(row["records"]),
                (row["verdict"].splitlines() or [""])[0],
            )
            for row in rows
        ),
    )


def cases(path: Path) -> list[Case]:
    """Return the tests in a file of pytest's results, the longest first."""
    try:
        root = ET.parse(path).getroot()  # noqa: S314 - pytest wrote it
    except (OSError, ET.ParseError):
        return []
    found = [_case(each) for each in root.iter("testcase")]
    return sorted(found, key=lambda case: -case.seconds)


def _case(element: ET.Element) -> Case:
    name = element.get("name", "")
    node = f"{element.get('classname', '').replace('.', '/')}.py::{name}"
    faults = [*element.findall("failure"), *element.findall("error")]
    failure = "\n".join(
        fault.get("message") or (fault.text or "").strip() for fault in faults
    )
    figures = {
        each.get("name", ""): each.get("value", "") for each in element.iter("property")
    }
    return Case(
        node=node,
        name=name.removeprefix("test_"),
        seconds=float(element.get("time", "0")),
        failure=failure if faults else None,
        figures={name: text for name, text in figures.items() if text.isdigit()},
    )


def page(parts: list[tuple[dict[str, Any], Found]]) -> str:
    """Return the report as Markdown."""
    held = all(ended["code"] == 0 for ended, _ in parts)
    outcome = "Everything held." if held else "**Something did not hold.**"
    took_s = sum(ended["seconds"] for ended, _ in parts)
    system = f"{platform.system()} {platform.release()}, {os.cpu_count()} cores"
    lines = [
        "# Proof",
        "",
        f"{outcome} {system}, {duration(took_s)} in all.",
        "",
    ]
    summary = [
        (
            ended["title"],
            found.amount,
            "held" if ended["code"] == 0 else "**failed**",
            duration(ended["seconds"]),
            ended["at"],
            ended.get("commit", "unknown"),
        )
        for ended, found in parts
    ]
    lines += table(("Part", "How much", "Outcome", "Took", "Ended", "Commit"), summary)
    for ended, found in parts:
        lines += ["", f"## {ended['title']}", "", f"{found.amount}.", ""]
        for title, message, repeat in found.failures:
            text = message[:MESSAGE_CHARS_MAX]
            lines += [f"**{title}**", "", "```text", text, "```", ""]
            lines += ["Repeat it with:", "", "```sh", repeat, "```", ""]
        lines += table(found.head, found.rows)
    return "\n".join(lines) + "\n"


def table(head: tuple[str, ...], rows: Any) -> list[str]:  # noqa: ANN401 - any rows
    """Return the lines of a Markdown table; none without rows."""
    if not rows:
        return []
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in r] for r in rows]
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(row)} |" for row in cells),
    ]


def duration(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours, for people."""
    if seconds < MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < HOUR_S:
        return f"{seconds // MINUTE_S:.0f} min {seconds % MINUTE_S:.0f} s"
    return f"{seconds // HOUR_S:.0f} h {seconds % HOUR_S // MINUTE_S:.0f} min"


def commit() -> str:
    """Return the current commit, marked ``dirty`` if files differ from it."""
    git = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(
            git, cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
