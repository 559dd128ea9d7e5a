"""Run the benchmarks one after the other, and write their figures into the documents.

By default these are smoke runs: they share one broker, and their documents go to
build/bench/smoke. ``--docs`` runs in full, each benchmark with a broker and settings of
its own. The documents go to build/bench, and after each benchmark the tables of
benchmarks/RESULTS.md and docs/BENCHMARKS.md are written. ``--docs`` without names
continues an earlier run, with benchmarks that it did not reach and those that failed;
if none are left, all run. ``--all`` always runs all.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pages
from support import show_progress

from kafka_marshal.testing.broker import EmbeddedBroker

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
OUT = ROOT / "build" / "bench"
# File with the benchmarks that a full run has not measured yet.
PENDING = "pending.json"
NOT_BENCHMARKS = {"support", "run", "pages"}
FULL_ARGUMENTS = {"growth": ("--plot", str(ROOT / "docs" / "growth.svg"))}
TIMEOUT_S = 3_600


class Failed(Exception):
    """A benchmark failed; the message says how to run it alone."""


def names() -> list[str]:
    """Return the names of all benchmarks, which are those of their scripts."""
    return sorted(
        path.stem for path in HERE.glob("*.py") if path.stem not in NOT_BENCHMARKS
    )


def needs_broker(name: str) -> bool:
    """Return whether a benchmark has an option for a broker."""
    return "broker_argument(" in (HERE / f"{name}.py").read_text()


def run(name: str, extra: Sequence[str]) -> dict[str, Any]:
    """Run one benchmark in a process of its own; return its document.

    Raises:
        Failed: The benchmark ended with an error, printed no document, or took too
            long.
    """
    command = [sys.executable, str(HERE / f"{name}.py"), *extra]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        raise Failed(f"{name} failed: {error}; run: {' '.join(command)}") from error
    return {**found, "took_s": round(time.monotonic() - began, 1)}


def keep(found: dict[str, Any], folder: Path) -> None:
    """Write a document into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{found['benchmark']}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")


def run_quick(chosen: Iterable[str], out: Path) -> list[str]:
    """Run benchmarks as smoke runs; return the messages of those that failed."""
    failures = []
    with ExitStack() as stack:
        servers = ""
        for name in chosen:
            show_progress(f"== {name}")
            extra = ["--quick"]
            if needs_broker(name):
                if not servers:
                    broker = stack.enter_context(EmbeddedBroker())
                    servers = broker.bootstrap_servers
                extra += ["--bootstrap-servers", servers]
            try:
                keep(run(name, extra), out / "smoke")
            except Failed as error:
                failures.append(str(error))
                show_progress(failures[-1])
    return failures


class Pending:
    """Benchmarks that a full run has not measured yet, kept in a file."""

    def __init__(self, out: Path) -> None:
        """Read the file."""
        self._path = out / PENDING
        self.names: list[str] = []
        if self._path.exists():
            self.names = json.loads(self._path.read_text())

    def add(self, chosen: Iterable[str]) -> None:
        """Add the benchmarks of a run, at its start."""
        self._write({*self.names, *chosen})

    def remove(self, name: str) -> None:
        """Remove a benchmark that was measured."""
        self._write({*self.names} - {name})

    def _write(self, chosen: Iterable[str]) -> None:
        self.names = sorted(chosen)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self.names:
            self._path.write_text(json.dumps(self.names) + "\n")
        else:
            self._path.unlink(missing_ok=True)


def run_full(chosen: Sequence[str], out: Path) -> list[str]:
    """Run benchmarks in full and write the pages after each; return failure messages.

    Args:
        chosen: Names; if empty, those that an earlier run left, or else all.
        out: Folder for the documents.
    """
    pending = Pending(out)
    todo = list(chosen or pending.names or names())
    if not chosen and pending.names:
        show_progress(f"continues with {', '.join(todo)}; from the start: --all")
    pending.add(todo)
    failures = []
    for number, name in enumerate(todo, 1):
        show_progress(f"== {name}, {number} of {len(todo)}")
        try:
            found = run(name, FULL_ARGUMENTS.get(name, ()))
        except Failed as error:
            failures.append(str(error))
            show_progress(failures[-1])
            continue
        keep(found, out)
        show_progress(f"{name} took {found['took_s']:.0f} s")
        try:
            pages.write({name: found})
        except ValueError as error:
            failures.append(str(error))
            show_progress(failures[-1])
        pending.remove(name)
    return failures


def write_pages(chosen: Iterable[str], out: Path) -> None:
    """Write the pages from the documents that exist."""
    files = [out / f"{name}.json" for name in chosen]
    found = {f.stem: json.loads(f.read_text()) for f in files if f.exists()}
    pages.write(found)
    show_progress(f"the pages have the figures of: {', '.join(found) or 'none'}")


def main() -> None:
    """Run the benchmarks named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="which to run; by default all")
    parser.add_argument(
        "--docs", action="store_true", help="run in full, and write the documents"
    )
    parser.add_argument(
        "--all", action="store_true", help="with --docs: continue no earlier run"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="only write the documents, from build/bench",
    )
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(names()))
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are: {', '.join(names())}")
    if options.write:
        try:
            write_pages(options.names or names(), OUT)
        except ValueError as error:
            parser.error(str(error))
        return
    if options.docs:
        failures = run_full(names() if options.all else options.names, OUT)
    else:
        failures = run_quick(options.names or names(), OUT)
    if failures:
        text = "\n".join(failures)
        raise SystemExit(f"{len(failures)} failed:\n{text}")


if __name__ == "__main__":
    main()
