"""Names the release and commit that is run, so that others can repeat a failure."""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

GIT_S_MAX = 5


def build() -> str:
    """Return the release that is run and, in a working copy, its commit."""
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
