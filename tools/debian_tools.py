"""Programs of Debian packages, unpacked into build/ without being installed.

Some tests want a real program that no Python package has: ``promtool`` judges alert
rules, ``initdb`` and ``postgres`` make a database. Where a program is installed, that
one is taken. Otherwise its package is downloaded by apt, which needs no root, and
unpacked once into ``build/debian/PACKAGE``.

    program("promtool", "prometheus")
    program("initdb", "postgresql-15", folder="usr/lib/postgresql/15/bin")

From a shell: ``python tools/debian_tools.py PROGRAM PACKAGE...`` prints its path.
"""

import fcntl
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "build" / "debian"
DOWNLOAD_S_MAX = 300
SAID_CHARS_MAX = 500


class Unavailable(Exception):
    """A program is neither installed nor to be had; says why, and what to do."""


def program(name: str, *packages: str, folder: str = "usr/bin") -> Path:
    """Return the path of a program, installed or unpacked.

    Args:
        name: Its name.
        packages: What to unpack where it is missing: the package that has it, then
            others that it needs and a plain system lacks.
        folder: Where the package puts it, below the root of a system.

    Raises:
        Unavailable: It cannot be had.
    """
    installed = shutil.which(name) or _executable(Path("/", folder, name))
    if installed is not None:
        return Path(installed)
    found = unpacked(*packages) / folder / name
    if not found.is_file():
        raise Unavailable(f"package {packages[0]} has no {folder}/{name}")
    return found


def unpacked(*packages: str) -> Path:
    """Return the folder that packages are unpacked in, one root for all of them.

    Raises:
        Unavailable: They cannot be had.
    """
    target = HOME / packages[0]
    with _alone():
        done = target / f".complete-{'+'.join(packages)}"
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
            # Whoever cannot renew the lists of the system has lists of their own.
            _run([*_apt(), "update", "-q"], HOME)
            said = _run([*_apt(), "download", "-q", package], Path(folder))
            if not list(Path(folder).glob("*.deb")):
                raise Unavailable(
                    f"Debian package {package} cannot be downloaded: {said}; install "
                    f"it: apt-get install {package}"
                )
        for archive in Path(folder).glob("*.deb"):
            said = _run(["dpkg-deb", "-x", str(archive), str(target)], HOME)
            if said:
                raise Unavailable(f"{archive.name} cannot be unpacked: {said}")


def _download(package: str, folder: Path) -> bool:
    _run(["apt-get", "download", "-q", package], folder)
    return any(folder.glob("*.deb"))


def _apt() -> list[str]:
    """Return an apt-get that keeps what it knows below build/."""
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
    """Run a command; return what it said where it failed, else nothing."""
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
    said = f"{done.stderr} {done.stdout}".strip()
    return "" if done.returncode == 0 else (said[-SAID_CHARS_MAX:] or "no reason given")


def _executable(path: Path) -> str | None:
    return str(path) if path.is_file() else None


@contextmanager
def _alone() -> Iterator[None]:
    """Let one process at a time unpack; tests may run in several."""
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        print(program(sys.argv[1], *sys.argv[2:]))
    except Unavailable as missing:
        sys.exit(str(missing))
