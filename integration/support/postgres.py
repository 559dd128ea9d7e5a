"""A PostgreSQL server for tests, in a temporary folder, on a Unix socket."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import debian_tools
import psycopg
from waiting import eventually

START_S = 60
STOP_S = 60
OUTPUT_CHARS_MAX = 1_000
UNPRIVILEGED = "nobody"


class PostgresUnavailable(Exception):
    """There is no server; the message has the reason."""


class Postgres:
    """A running server that lets every user of its socket connect.

    Attributes:
        dsn: Connection string for psycopg.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._process: subprocess.Popen[bytes] | None = None
        self.dsn = f"host={home} user=test dbname=postgres"

    def start(self) -> "Postgres":
        """Make a database cluster and start its server.

        Raises:
            PostgresUnavailable: PostgreSQL cannot be had, or does not start.
        """
        try:
            programs = self._within_reach(debian_tools.postgres())
        except debian_tools.Unavailable as error:
            raise PostgresUnavailable(f"no PostgreSQL: {error}") from error
        data = self._home / "data"
        self._make(programs, data)
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(self._home),
            # What a test writes need not survive the machine.
            "fsync": "off",
            "max_connections": "20",
        }
        settings = [f"--{name}={value}" for name, value in options.items()]
        log = self._home / "server.log"
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [str(programs / "postgres"), "-D", str(data), *settings],
                stdout=out,
                stderr=out,
                **self._as_whom(programs),
            )
        self._wait(log)
        return self

    def stop(self) -> None:
        """End it, by its process id."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=STOP_S)

    def connect(self) -> "psycopg.Connection[tuple]":
        """Return a connection that commits each statement."""
        return psycopg.connect(self.dsn, autocommit=True)

    def _make(self, programs: Path, data: Path) -> None:
        command = [str(programs / "initdb"), "-D", str(data), "-U", "test"]
        done = subprocess.run(
            [*command, "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"],
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
            **self._as_whom(programs),
        )
        if done.returncode != 0:
            raise PostgresUnavailable(f"initdb failed: {done.stderr.strip()}")

    def _within_reach(self, programs: Path) -> Path:
        """Return the programs in a folder that their user may read."""
        is_open = all(f.stat().st_mode & 0o001 for f in (programs, *programs.parents))
        if os.geteuid() != 0 or is_open:
            return programs
        root = programs.parents[4]
        shutil.copytree(root / "usr", self._home / "usr", symlinks=True)
        return self._home / programs.relative_to(root)

    def _as_whom(self, programs: Path) -> dict:
        """Return how to start a process of it: the server refuses to run as root."""
        root = programs.parents[4]
        env = dict(os.environ)
        if root != Path("/"):
            env["LD_LIBRARY_PATH"] = debian_tools.libraries(root)
        how = {"env": env, "cwd": self._home}
        if os.geteuid() == 0:
            who = pwd.getpwnam(UNPRIVILEGED)
            os.chown(self._home, who.pw_uid, who.pw_gid)
            how |= {"user": who.pw_uid, "group": who.pw_gid, "extra_groups": []}
        return how

    def _wait(self, log: Path) -> None:
        def is_up() -> bool:
            assert self._process is not None
            if self._process.poll() is not None:
                text = log.read_text(errors="replace")[-OUTPUT_CHARS_MAX:]
                raise PostgresUnavailable(f"PostgreSQL did not start: {text}")
            try:
                self.connect().close()
            except psycopg.OperationalError:
                return False
            return True

        eventually(is_up, "PostgreSQL answers")


@contextmanager
def running() -> Iterator[Postgres]:
    """Run a server for as long as the block lasts."""
    # Not below the folders of pytest, which only their owner may enter.
    home = Path(tempfile.mkdtemp(prefix="marshal-pg-"))
    server = Postgres(home)
    try:
        yield server.start()
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)
