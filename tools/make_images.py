"""Makes the pictures of the README from the running product.

    .venv/bin/python tools/make_images.py

Starts an embedded broker and three consumers, and kills one of them while `marshal
claims watch` runs on a pseudo-terminal; a frame of that becomes a picture. Then
`marshal spark audit` writes its page for the same log. Takes about two minutes; needs
the extras `broker`, `spark` and `report`, and Java 17.
"""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kafka_marshal.testing.broker import EmbeddedBroker

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
MARSHAL = str(Path(sys.executable).with_name("marshal"))
KAFKA = str(Path(sys.executable).with_name("kafka-python"))
WORKERS = ("worker-1", "worker-2", "worker-3")
COLUMNS, ROWS = 152, 30
BYTES_MAX = 200_000
COMMAND_TIMEOUT_S = 300

# A frame on the terminal begins by erasing the lines of the frame before.
ERASE = re.compile(r"\x1b\[2K")
CONTROLS = re.compile(r"\x1b\[\?25[lh]|\x1b\[\d*[ABCDK]|\r")


class Screen:
    """A command on a pseudo-terminal; a thread collects its output.

    Attributes:
        text: Output so far, with its control sequences.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        ours, theirs = pty.openpty()
        size = struct.pack("HHHH", ROWS, COLUMNS, 0, 0)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)
        self._ours = ours
        self.text = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 65_536)
            except OSError:  # the process has ended
                return
            self.text += data.decode()

    def frame(self) -> str:
        """Return the last complete frame, with its colors."""
        frames = [CONTROLS.sub("", each) for each in ERASE.split(self.text)]
        return [each for each in frames if each.strip()][-2].strip("\n")

    def close(self) -> None:
        """End the command."""
        self._process.terminate()
        self._process.wait(timeout=60)
        self._reader.join(timeout=60)
        os.close(self._ours)


def save_screen(command: str, frame: str, path: Path) -> None:
    """Write a frame of a terminal as SVG."""
    text = Text.from_ansi(frame)
    width = max(len(line) for line in text.plain.splitlines()) + 1
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=width, file=nowhere)
        console.print(text, no_wrap=True, crop=False)
        path.write_text(console.export_svg(title=command))


def save_timeline(page: Path, path: Path) -> None:
    """Write the first plot of an audit's page as a separate picture."""
    svg = re.search(r"<svg.*?</svg>", page.read_text(), re.DOTALL)
    assert svg is not None
    path.write_text(svg[0] + "\n")


def story(folder: Path, servers: str) -> None:
    """Consume, kill a worker, pause the group, and draw both pictures."""
    environment = os.environ | {
        "MARSHAL_BOOTSTRAP_SERVER": servers,
        "MARSHAL_STATE_DIR": str(folder / "state"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "TERM": "xterm-256color",
    }

    def run(*command: str, data: bytes = b"") -> None:
        subprocess.run(
            command,
            env=environment,
            input=data,
            stdout=subprocess.DEVNULL,
            timeout=COMMAND_TIMEOUT_S,
            check=True,
        )

    def produce() -> None:
        lines = b"".join(b"payment %d\n" % number for number in range(2_000))
        run(KAFKA, "producer", "-b", servers, "-t", "payments", data=lines)

    def consume(name: str, *options: str) -> subprocess.Popen[bytes]:
        command = [MARSHAL, "consume", "payments", "--client-id", name, *options]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    format_options = ("--partitions", "2", "--heartbeat-interval", "2s")
    run(MARSHAL, "topic", "format", *format_options)
    topic = ("-t", "payments", "--num-partitions", "6")
    run(KAFKA, "admin", "-b", servers, "topics", "create", *topic)
    produce()
    workers = [consume(name, "--group", "billing") for name in WORKERS]
    screen = Screen([MARSHAL, "claims", "watch", "--group", "billing"], environment)
    try:
        time.sleep(20)
        produce()
        time.sleep(4)
        workers.pop().kill()
        time.sleep(10)
        frame = screen.frame()
        pause = ("--for", "5s", "--reason", "deploy", "--wait")
        run(MARSHAL, "groups", "pause", "billing", *pause)
        time.sleep(10)
    finally:
        screen.close()
        for worker in workers:
            worker.terminate()
            worker.wait(timeout=60)
    save_screen(
        "marshal claims watch --group billing", frame, IMAGES / "claims-watch.svg"
    )
    amo = ("--group", "alerts", "--delivery", "amo", "--max-records", "500")
    assert consume("worker-1", *amo).wait(timeout=COMMAND_TIMEOUT_S) == 0
    page = IMAGES / "audit.html"
    tables = str(folder / "tables")
    run(MARSHAL, *("spark", "audit", "--out", tables, "--check", "--report", str(page)))
    save_timeline(page, IMAGES / "audit-timeline.svg")


def main() -> None:
    """Make the pictures, and check their sizes."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, EmbeddedBroker() as broker:
        story(Path(name), broker.bootstrap_servers)
    for path in sorted(IMAGES.iterdir()):
        size = path.stat().st_size
        print(f"{path.relative_to(ROOT)}: {size:,} bytes")
        assert size <= BYTES_MAX, path


if __name__ == "__main__":
    main()
