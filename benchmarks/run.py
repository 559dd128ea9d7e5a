"""Run the benchmarks one after the other, and put their figures into the document.

Documents go to build/bench, one JSON file each. Smoke runs share one broker; runs in
earnest start their own, with the settings that they need. ``--docs`` writes the
tables of benchmarks/RESULTS.md from all files that are there.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from support import show_progress

from kafka_marshal.testing.broker import EmbeddedBroker

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
OUT = ROOT / "build" / "bench"
PAGE = HERE / "RESULTS.md"
NOT_BENCHMARKS = {"support", "run"}
IN_EARNEST = {"growth": ("--plot", str(ROOT / "docs" / "growth.svg"))}
TIMEOUT_S = 3 * 3_600
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def names() -> list[str]:
    """Return every benchmark, by the name of its script."""
    return sorted(
        path.stem for path in HERE.glob("*.py") if path.stem not in NOT_BENCHMARKS
    )


def needs_broker(name: str) -> bool:
    """Return whether a benchmark can be given a broker."""
    return "broker_argument(" in (HERE / f"{name}.py").read_text()


def run(name: str, extra: Sequence[str]) -> dict[str, Any]:
    """Run one benchmark in a process of its own; return its document."""
    command = [sys.executable, str(HERE / f"{name}.py"), *extra]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{name} failed, see above; run: {' '.join(command)}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run_all(chosen: Iterable[str], *, is_quick: bool) -> None:
    """Run benchmarks and keep their documents."""
    OUT.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        servers = ""
        for name in chosen:
            show_progress(f"== {name}")
            extra = ["--quick"] if is_quick else list(IN_EARNEST.get(name, ()))
            if is_quick and needs_broker(name):
                if not servers:
                    broker = stack.enter_context(EmbeddedBroker())
                    servers = broker.bootstrap_servers
                extra += ["--bootstrap-servers", servers]
            found = run(name, extra)
            (OUT / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


def _number(value: float) -> str:
    digits = 4 if abs(value) < 1_000 else 0  # noqa: PLR2004 - as people read them
    return f"{value:,.{digits}g}" if digits else f"{value:,.0f}"


def table(found: Mapping[str, Any]) -> str:
    """Return a benchmark's figures as a table for people."""
    rows = [
        "| what | unit | median | min to max | runs | target | |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in found["figures"]:
        spread = f"{_number(each['min'])} to {_number(each['max'])}"
        if each["count"] == 1:
            spread = ""
        verdict = {True: "met", False: "missed", None: ""}[each.get("is_met")]
        cells = (
            each["what"],
            each["unit"],
            _number(each["median"]),
            spread,
            str(each["count"]),
            each.get("target", ""),
            verdict,
        )
        rows.append(f"| {' | '.join(cells)} |")
    facts = found["machine"]
    packages = ", ".join(f"{name} {at}" for name, at in facts["packages"].items() if at)
    when = (
        f"{found['finished'][:10]}; {facts['cores']} cores, {facts['cpu']}, load "
        f"{facts['load_1min']} at the end; Python {facts['python']}, {packages}."
    )
    return "\n".join([*rows, "", when, ""])


def fill(page: str, documents: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page with the tables of these documents; the others stay.

    Raises:
        ValueError: A document is of a smoke run, or has no place on the page.
    """
    places = {name for _, name, _ in BLOCK.findall(page)}
    for name, found in documents.items():
        if found["is_quick"]:
            raise ValueError(f"{name} is of a smoke run; run it without --quick")
        if name not in places:
            raise ValueError(f"the page has no block <!-- figures: {name} -->")

    def filled(block: re.Match[str]) -> str:
        found = documents.get(block[2])
        return block[0] if found is None else f"{block[1]}{table(found)}{block[3]}"

    return BLOCK.sub(filled, page)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="which to run; by default all")
    parser.add_argument("--full", action="store_true", help="in earnest: takes an hour")
    parser.add_argument(
        "--docs", action="store_true", help="only write benchmarks/RESULTS.md"
    )
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(names()))
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are: {', '.join(names())}")
    if not options.docs:
        run_all(options.names or names(), is_quick=not options.full)
        return
    files = [OUT / f"{name}.json" for name in options.names or names()]
    found = {f.stem: json.loads(f.read_text()) for f in files if f.exists()}
    try:
        PAGE.write_text(fill(PAGE.read_text(), found))
    except ValueError as error:
        parser.error(str(error))
    show_progress(f"{PAGE.name} has the figures of: {', '.join(found) or 'none'}")


if __name__ == "__main__":
    main()
