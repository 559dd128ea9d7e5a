"""Shared code of the benchmarks: alternating rounds, spread, processes, documents.

The sides of a comparison run in turns, and each round another side begins. So other
load on the machine slows all sides alike, and the ratio of two sides in a round is
meaningful even if their times alone are not.
"""

import argparse
import http.client
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import attrs

from kafka_marshal.testing.broker import EmbeddedBroker

# Some benchmarks use nodes and links of the simulator.
sys.path.append(str(Path(__file__).resolve().parent.parent))

SCHEMA = 1
SAMPLES_SHOWN_MAX = 200
# State of a listening socket in /proc/net/tcp.
LISTENS = "0A"
HANG_S = 600
"""Limit of waits, long enough for a busy machine."""
SIDECAR_ANSWER_S = 5
PACKAGES = ("kafka-marshal", "kafka-python", "confluent-kafka", "msgspec", "mmh3")


@attrs.frozen
class Target:
    """What a figure must reach.

    Attributes:
        value: The bound.
        is_least: Whether the bound is a minimum; if not, it is a maximum.
    """

    value: float
    is_least: bool

    def __str__(self) -> str:
        """Return the bound in the form of the tables."""
        return f"{'>=' if self.is_least else '<='} {self.value:,.10g}"

    def is_met(self, reached: float) -> bool:
        """Return whether a figure is good enough."""
        return reached >= self.value if self.is_least else reached <= self.value


def at_least(value: float) -> Target:
    """Return a target with a minimum."""
    return Target(value, is_least=True)


def at_most(value: float) -> Target:
    """Return a target with a maximum."""
    return Target(value, is_least=False)


def spread(samples: Sequence[float]) -> dict[str, Any]:
    """Return median, extremes and quartiles of samples, and the first samples."""
    ordered = sorted(samples)
    low, high = ordered[0], ordered[-1]
    if len(ordered) > 1:
        low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return {
        "median": _rounded(statistics.median(ordered)),
        "min": _rounded(ordered[0]),
        "max": _rounded(ordered[-1]),
        "quartiles": [_rounded(low), _rounded(high)],
        "count": len(ordered),
        "samples": [_rounded(each) for each in samples[:SAMPLES_SHOWN_MAX]],
    }


def figure(
    what: str, unit: str, samples: Sequence[float], *, target: Target | None = None
) -> dict[str, Any]:
    """Return one figure of a benchmark's document.

    Args:
        what: Name of the figure in tables.
        unit: Unit of the samples; ``ratio`` for one side divided by the other.
        samples: One per round.
        target: Target of the median; None if it is only reported.
    """
    found = {"what": what, "unit": unit, **spread(samples)}
    if target is not None:
        found["target"] = str(target)
        found["is_met"] = target.is_met(found["median"])
    return found


def alternate(
    sides: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    """Run every side once a round and return its samples.

    Args:
        sides: Functions by name; each returns one sample.
        rounds: Number of rounds; each round another side begins.
    """
    names = list(sides)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(sides[name]())
    return samples


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return one side divided by the other, round by round."""
    return [one / other for one, other in zip(above, below, strict=True)]


def machine() -> dict[str, Any]:
    """Return facts on which figures depend: machine, load, Python and packages."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def document(
    name: str,
    figures: Sequence[Mapping[str, Any]],
    *,
    settings: Mapping[str, Any],
    is_quick: bool,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a benchmark's document.

    Args:
        name: Name of the script, without its ending.
        figures: From ``figure``.
        settings: Settings of the run: sizes, rounds, intervals and the like.
        is_quick: Whether it was a smoke run, whose figures mean little.
        more: Further parts, such as the points of a plot.
    """
    return {
        "schema": SCHEMA,
        "benchmark": name,
        "is_quick": is_quick,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": dict(settings),
        "figures": list(figures),
        **(more or {}),
    }


def arguments(about: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a smoke run; figures mean little",
    )
    parser.add_argument("--rounds", type=int, help="number of rounds")
    parser.add_argument("--out", type=Path, help="also write the document to a file")
    return parser


def broker_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option for a cluster that runs already."""
    parser.add_argument(
        "--bootstrap-servers",
        help="a cluster that runs already; by default an embedded broker is started",
    )


@contextmanager
def cluster(
    servers: str | None, properties: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield the addresses of a cluster; start a broker if none is named.

    Args:
        servers: Addresses of a cluster that runs already, or None.
        properties: Settings of the broker that is started.
    """
    if servers is not None:
        yield servers
        return
    with EmbeddedBroker(properties=properties) as broker:
        yield broker.bootstrap_servers


class SidecarProcess:
    """A sidecar in a process of its own, until the ``with`` block ends.

    Args:
        servers: The cluster.
        log: The coordination topic.
        home: A folder of its own, whose name is the client_id of the sidecar.

    Attributes:
        url: The value for ``Marshal(sidecar=...)``.
    """

    def __init__(self, servers: str, log: str, *, home: Path) -> None:
        self._path = home / "own" / "s.sock"
        self.url = f"unix:{self._path}"
        home.mkdir(parents=True)
        self._output_path = home / "output.txt"
        command = [sys.executable, "-m", "kafka_marshal_cli", "sidecar", "run"]
        command += ["--bootstrap-server", servers, "--coordination-topic", log]
        command += ["--client-id", home.name, "--state-dir", str(home / "state")]
        command += ["--socket", str(self._path)]
        with self._output_path.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def get(self, place: str) -> tuple[int, bytes]:
        """Send a GET request; return status and body, status 0 without an answer."""
        connection = http.client.HTTPConnection("sidecar", timeout=SIDECAR_ANSWER_S)
        try:
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(SIDECAR_ANSWER_S)
            connection.sock.connect(str(self._path))
            connection.request("GET", place)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def wait_ready(self) -> None:
        """Wait until the sidecar is ready."""
        deadline = time.monotonic() + HANG_S
        while self.get("/readyz")[0] != http.client.OK:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(
                    f"no sidecar: {self._output_path.read_text()[-2_000:]}"
                )
            time.sleep(0.05)

    def __enter__(self) -> Self:
        """Wait until the sidecar is ready."""
        try:
            self.wait_ready()
        except BaseException:
            self._process.kill()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the sidecar with SIGTERM; kill it if that takes too long."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(HANG_S)


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def steady_cpu_s(pid: int) -> float:
    """Return the processor time of a JVM's threads, without compiler threads.

    Compilers work less and less in the first minutes of a process.
    """
    used_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread may end meanwhile
            if "CompilerThre" not in (thread / "comm").read_text():
                used_ns += int((thread / "schedstat").read_text().split()[0])
    return used_ns / 1e9


def broker_pid(servers: str) -> int | None:
    """Return the process id of a broker on this machine, None if it is elsewhere."""
    host, _, port = servers.partition(",")[0].rpartition(":")
    if host not in ("127.0.0.1", "localhost"):
        return None
    wanted = f"{int(port):04X}"
    inodes = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            rows = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
            for row in map(str.split, rows):
                if row[1].endswith(f":{wanted}") and row[3] == LISTENS:
                    inodes.add(f"socket:[{row[9]}]")
    for each in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # a process of another user, or one that has ended
            if str(each.readlink()) in inodes:
                return int(each.parts[2])
    return None


def run_again(command: Sequence[str], *, timeout_s: float) -> dict[str, Any]:
    """Run one side of a comparison in a new process; return the JSON it printed."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=True
    )
    output: dict[str, Any] = json.loads(done.stdout)
    return output


def write_document(document: Mapping[str, Any], out: Path | None) -> None:
    """Print the document, the only output on stdout; write it to a file if named."""
    text = json.dumps(document, indent=1)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    print(text)


def show_progress(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def show_figures(figures: Iterable[Mapping[str, Any]]) -> None:
    """Print results to stderr."""
    for each in figures:
        show_progress(
            f"{each['what']}: {each['median']} {each['quartiles']} {each['unit']}"
        )


def _rounded(value: float) -> float:
    """Round to five significant digits; more would not be accurate."""
    return float(f"{value:.5g}")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
