"""Names what is run, so that a failure can be repeated by others."""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

GIT_S_MAX = 5


def build() -> str:
    """Return release and, in a working copy, commit of what is run."""
    try:
        release = version("kafka-marshal")
    except PackageNotFoundError:
        release = "unknown"
    try:
        output = subprocess.run(
            ["git", "describe", "--always", "--dirty"],  # noqa: S607 - any git will do
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=GIT_S_MAX,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return release
    return f"{release} ({output.stdout.strip()})"
