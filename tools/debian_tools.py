"""Programs of Debian packages, unpacked into build/ without being installed.

Some tests need a real program that no Python package has: ``promtool`` checks alert
rules, ``initdb`` and ``postgres`` run a database. If a program is installed, it is
used. Otherwise apt downloads its package, which needs no root, and the package is
unpacked once into ``build/debian/PACKAGE``.

    program("promtool", "prometheus")
    postgres()

From a shell: ``python tools/debian_tools.py PROGRAM PACKAGE...`` prints its path.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "build" / "debian"
DOWNLOAD_S_MAX = 300
OUTPUT_CHARS_MAX = 500


class Unavailable(Exception):
    """A program is neither installed nor available; says why, and what to do."""


def program(name: str, *packages: str, folder: str = "usr/bin") -> Path:
    """Return the path of a program, installed or unpacked.

    Args:
        name: Its name.
        packages: Packages to unpack if it is not installed: first the one that has it,
            then packages that it needs and a minimal system lacks.
        folder: Folder of the program in the package, below the root of a system.

    Raises:
        Unavailable: The program is not available.
    """
    installed = shutil.which(name) or _executable(Path("/", folder, name))
    if installed is not None:
        return Path(installed)
    found = unpacked(*packages) / folder / name
    if not found.is_file():
        raise Unavailable(f"package {packages[0]} has no {folder}/{name}")
    return found


def postgres() -> Path:
    """Return the folder with PostgreSQL's programs, in any version.

    If the packages were unpacked, call ``libraries`` with their root for the path of
    their libraries.

    Raises:
        Unavailable: PostgreSQL is not available.
    """
    installed = shutil.which("postgres")
    if installed is not None and Path(installed).resolve().with_name("initdb").exists():
        return Path(installed).resolve().parent
    pattern = "usr/lib/postgresql/*/bin/initdb"
    for root in (Path("/"), HOME / "postgresql"):
        for found in sorted(root.glob(pattern), reverse=True):
            return found.parent
    with _alone():
        packages = _with_libraries("postgresql")
    root = unpacked("postgresql", *packages)
    for found in sorted(root.glob(pattern), reverse=True):
        return found.parent
    raise Unavailable(f"packages {' '.join(packages)} have no {pattern}")


def libraries(root: Path) -> str:
    """Return the folders with libraries below a root, for LD_LIBRARY_PATH."""
    return ":".join(sorted({str(f.parent) for f in root.glob("usr/lib/*/*.so*")}))


def _with_libraries(package: str) -> list[str]:
    """Return the packages of a meta package, and the libraries that they need.

    Raises:
        Unavailable: apt does not know the package.
    """
    command = ["install", "--print-uris", "--reinstall", "--no-install-recommends"]
    for apt in (["apt-get"], _apt()):
        options = [*apt, "-q", "-y", "-o", "Debug::NoLocking=1"]
        if apt != ["apt-get"]:
            _run([*options, "update"], HOME)
        depends = _output_of(["apt-cache", *apt[1:], "depends", package]).splitlines()
        meant = [line.split()[-1] for line in depends if f"Depends: {package}-" in line]
        if not meant:
            continue
        plan = _output_of([*options, *command, *meant])
        # A line is 'URI' FILE SIZE HASH; FILE is name_version_architecture.deb.
        lines = [line.split() for line in plan.splitlines() if line.startswith("'")]
        names = {line[1].partition("_")[0] for line in lines}
        # Leave out LLVM, the largest library: it only compiles queries.
        wanted = {n for n in names if n.startswith("lib") and "llvm" not in n}
        return [*meant, *sorted(wanted - set(meant))]
    raise Unavailable(
        f"apt knows no package {package}; where this is a Debian system, install it: "
        f"apt-get install {package}"
    )


def unpacked(*packages: str) -> Path:
    """Unpack packages, if not done, and return the folder, one root for all of them.

    Raises:
        Unavailable: A package cannot be downloaded or unpacked.
    """
    target = HOME / packages[0]
    with _alone():
        named = sha256("+".join(packages).encode()).hexdigest()
        done = target / f".complete-{named[:16]}"
        if not done.exists():
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            for package in packages:
                _unpack(package, target)
            done.touch()
    return target


def _unpack(package: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=HOME) as folder:
        if not _download(package, Path(folder)):
            # A user without root cannot update apt's lists, so use separate lists.
            _run([*_apt(), "update", "-q"], HOME)
            error = _run([*_apt(), "download", "-q", package], Path(folder))
            if not list(Path(folder).glob("*.deb")):
                raise Unavailable(
                    f"Debian package {package} cannot be downloaded: {error}; install "
                    f"it: apt-get install {package}"
                )
        for archive in Path(folder).glob("*.deb"):
            error = _run(["dpkg-deb", "-x", str(archive), str(target)], HOME)
            if error:
                raise Unavailable(f"{archive.name} cannot be unpacked: {error}")


def _download(package: str, folder: Path) -> bool:
    _run(["apt-get", "download", "-q", package], folder)
    return any(folder.glob("*.deb"))


def _apt() -> list[str]:
    """Return an apt-get command that keeps its lists and cache below build/."""
    lists, cache = HOME / "lists", HOME / "cache"
    for each in (lists / "partial", cache / "archives" / "partial"):
        each.mkdir(parents=True, exist_ok=True)
    return [
        "apt-get",
        *("-o", f"Dir::State::lists={lists}"),
        *("-o", f"Dir::Cache={cache}"),
        *("-o", "APT::Sandbox::User="),
    ]


def _run(command: list[str], folder: Path) -> str:
    """Run a command; return its output if it failed, else an empty text."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=DOWNLOAD_S_MAX,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    output = f"{done.stderr} {done.stdout}".strip()
    return (
        ""
        if done.returncode == 0
        else (output[-OUTPUT_CHARS_MAX:] or "no reason given")
    )


def _output_of(command: list[str]) -> str:
    """Return the output of a command, an empty text if it fails."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=DOWNLOAD_S_MAX,
            env=os.environ | {"LC_ALL": "C"},
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _executable(path: Path) -> str | None:
    return str(path) if path.is_file() else None


@contextmanager
def _alone() -> Iterator[None]:
    """Let only one process at a time unpack: tests may run in several."""
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        print(program(sys.argv[1], *sys.argv[2:]))
    except Unavailable as missing:
        sys.exit(str(missing))
