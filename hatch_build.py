"""Build hook: compiles ``native/`` into ``kafka_marshal._native`` where that is possible.

The compiled part is optional. Without a C compiler or the headers of Python the build
succeeds all the same, and prints what is missing. ``KAFKA_MARSHAL_NATIVE=0`` builds
without it, ``KAFKA_MARSHAL_NATIVE=1`` fails rather than leaving it out. ``CC`` and
``CFLAGS`` are respected.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "KAFKA_MARSHAL_NATIVE"
MODES = {"": None, "0": False, "1": True}
FILE = "_native.abi3.so"
COMPILERS = ("cc", "gcc", "clang")
COMPILE_TIMEOUT_S = 300
MINIMUM_TAG = "cp311"


class CannotCompile(Exception):
    """The reason why nothing was compiled."""


@dataclass(frozen=True)
class Tools:
    """What a build needs.

    Attributes:
        compiler: The command of the C compiler.
        include: Folder of Python's headers.
    """

    compiler: Sequence[str]
    include: Path

    @classmethod
    def find(cls) -> Self:
        """Find them.

        Raises:
            CannotCompile: One of them is missing, or this Python has no stable ABI.
        """
        if sys.implementation.name != "cpython":
            raise CannotCompile(f"{sys.implementation.name} is not CPython")
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            raise CannotCompile("a free-threaded Python has no stable ABI")
        include = Path(sysconfig.get_path("include"))
        if not (include / "Python.h").is_file():
            raise CannotCompile(
                f"no {include}/Python.h (Debian, Ubuntu: apt install python3-dev)"
            )
        command = shlex.split(os.environ.get("CC", ""))
        command = command or [each for each in COMPILERS if shutil.which(each)][:1]
        if not command or shutil.which(command[0]) is None:
            name = command[0] if command else ", ".join(COMPILERS)
            raise CannotCompile(
                f"no C compiler, that is {name} (Debian, Ubuntu: apt install gcc)"
            )
        return cls(command, include)


def compile_native(root: Path, target: Path) -> None:
    """Compile the sources into one file, which is replaced at once.

    Raises:
        CannotCompile: A tool is missing, or the compiler failed.
    """
    tools = Tools.find()
    is_mac = sys.platform == "darwin"
    linking = ("-bundle", "-undefined", "dynamic_lookup") if is_mac else ("-shared",)
    flags = ("-std=c11", "-O3", "-fPIC", "-fvisibility=hidden", "-I", tools.include)
    more = shlex.split(os.environ.get("CFLAGS", ""))
    sources = sorted((root / "native").glob("*.c"))
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".native-") as folder:
        made = Path(folder, FILE)
        words = (*tools.compiler, *flags, *more, *linking, *sources, "-o", made)
        command = [str(word) for word in words]
        try:
            done = subprocess.run(
                command,
                check=False,
                capture_output=True,
                text=True,
                timeout=COMPILE_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotCompile(f"{command[0]}: {error}") from error
        if done.returncode:
            raise CannotCompile(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")
        made.replace(target)


def wanted() -> bool | None:
    """Return whether the compiled part is demanded; None to try."""
    mode = os.environ.get(VARIABLE, "")
    if mode not in MODES:
        raise SystemExit(f"{VARIABLE} must be 0, 1 or unset; it is {mode!r}")
    return MODES[mode]


class NativeBuildHook(BuildHookInterface):
    """Adds the compiled part to wheels, and to the sources of editable installs."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is packed; see ``BuildHookInterface``."""
        root = Path(self.root)
        package = root / "marshal" / "kafka_marshal"
        is_editable = version == "editable"
        self.folder = (
            None if is_editable else tempfile.mkdtemp(prefix="marshal-native-")
        )
        target = Path(self.folder or package, FILE)
        if is_editable:
            # A build of other sources must not stay.
            target.unlink(missing_ok=True)
        is_demanded = wanted()
        if is_demanded is False:
            self.app.display_info(f"kafka-marshal: pure Python, by {VARIABLE}=0")
            return
        try:
            compile_native(root, target)
        except CannotCompile as error:
            if is_demanded:
                raise SystemExit(
                    f"kafka-marshal: nothing was compiled: {error}"
                ) from None
            self.app.display_warning(
                "kafka-marshal: built as pure Python, which is slower and otherwise "
                f"equal: {error}"
            )
            return
        if not is_editable:
            build_data["force_include"][str(target)] = f"kafka_marshal/{FILE}"
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"{MINIMUM_TAG}-abi3-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact: str) -> None:
        """Remove what was compiled for a wheel; see ``BuildHookInterface``."""
        if self.folder is not None:
            shutil.rmtree(self.folder)
