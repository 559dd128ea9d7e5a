"""The content of wheel and sdist, and that the wheel works without the repository."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from slices import HANG_S

import hatch_build

ROOT = Path(__file__).resolve().parent.parent

# Imports every module of the unpacked wheel, with the repository off the path: the
# editable install of the environment would stand in for what is missing.
IMPORTS = """
import importlib, pathlib, pkgutil, sys
root, site = map(pathlib.Path, sys.argv[1:])
is_kept = lambda path: path.is_relative_to(sys.prefix) or not path.is_relative_to(root)
sys.path = [str(site), *(p for p in sys.path if is_kept(pathlib.Path(p)))]
for name in ("kafka_marshal", "kafka_marshal_cli"):
    for found in pkgutil.walk_packages([str(site / name)], name + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
for name, module in sys.modules.items():
    if name.startswith("kafka_marshal"):
        assert site in pathlib.Path(module.__file__).parents, (name, module.__file__)
assert "simulator" not in sys.modules
"""


# A program in which a type checker must report exactly the lines marked as wrong.
TYPED = """
from typing import assert_type
from kafka_marshal import AsyncConsumer, AsyncMarshal, Consumer, Marshal, Record
with Marshal("b:1", group_id="g", client_id="c") as marshal:
    assert_type(marshal, Marshal)
    assert_type(marshal.consumer("t"), Consumer)
    assert_type(next(marshal.consumer("t")), Record)
    marshal.consumer("t", max_poll_records="5")  # wrong
async def work() -> None:
    async with AsyncMarshal("b:1", group_id="g", client_id="c") as client:
        assert_type(client, AsyncMarshal)
        assert_type(client.consumer("t"), AsyncConsumer)
        assert_type(await anext(client.consumer("t")), Record)
        client.consumer("t", max_poll_record=5)  # wrong
    AsyncMarshal("b:1", group_id="g", client_id=5)  # wrong
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return the folder that wheel and sdist were built in."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=HANG_S)
    return folder


@pytest.fixture(scope="module")
def site(built, tmp_path_factory):
    """Return a folder with what the wheel installs."""
    folder = tmp_path_factory.mktemp("site")
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


COMPILED = f"kafka_marshal/{hatch_build.FILE}"
USES_IT = """
import sys
sys.path.insert(0, sys.argv[1])
from kafka_marshal import native
assert native.__file__.startswith(sys.argv[1]), native.__file__
assert native.compiled.fold_beats, native.compiled
"""


@pytest.fixture(scope="module")
def tools():
    """Skip a test where nothing can be compiled."""
    try:
        return hatch_build.Tools.find()
    except hatch_build.CannotCompile as error:
        pytest.skip(str(error))


def run(*command, **environ):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=os.environ | environ,
        check=False,
        timeout=HANG_S,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def wheel_in(folder, **environ):
    """Build a wheel; return its name, the names in it, and what the build printed."""
    command = ("-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    code, printed = run(*command, **environ)
    assert code == 0, printed
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return wheel.name, archive.namelist(), printed


def test_a_wheel_with_the_compiled_module_has_an_abi3_tag_and_loads_it(tools, tmp_path):
    name, names, _ = wheel_in(tmp_path, KAFKA_MARSHAL_NATIVE="1")
    assert name.split("-")[2:4] == ["cp311", "abi3"]
    assert names.count(COMPILED) == 1
    with zipfile.ZipFile(tmp_path / name) as archive:
        archive.extractall(tmp_path / "site")
    code, printed = run("-c", USES_IT, tmp_path / "site")
    assert code == 0, printed


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"KAFKA_MARSHAL_NATIVE": "0"}, "KAFKA_MARSHAL_NATIVE=0"),
        ({"CC": "/no/such/compiler"}, "no C compiler, that is /no/such/compiler"),
        ({"CC": "false"}, "pure Python"),
    ],
)
def test_a_wheel_without_the_compiled_module_is_pure_and_states_why(
    environ, reason, tmp_path
):
    name, names, printed = wheel_in(tmp_path, **environ)
    assert name.endswith("-py3-none-any.whl")
    assert not [each for each in names if each.endswith(".so")]
    assert reason in printed


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"KAFKA_MARSHAL_NATIVE": "1", "CC": "/no/such/compiler"}, "no C compiler"),
        ({"KAFKA_MARSHAL_NATIVE": "yes"}, "must be 0, 1 or unset"),
    ],
)
def test_a_build_that_requires_the_compiled_module_fails_without_it(
    environ, reason, tmp_path
):
    command = ("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path)
    code, printed = run(*command, **environ)
    assert code != 0
    assert reason in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("compiler", hatch_build.COMPILERS)
def test_the_sources_compile_without_warnings(compiler, tools, tmp_path, monkeypatch):
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("CFLAGS", "-Wall -Wextra -Werror")
    hatch_build.compile_native(ROOT, tmp_path / hatch_build.FILE)
    assert (tmp_path / hatch_build.FILE).is_file()


def test_the_wheel_has_only_the_product(site):
    found = {path.name for path in site.iterdir() if path.suffix != ".dist-info"}
    assert found == {"kafka_marshal", "kafka_marshal_cli"}
    found = {path.name for path in site.rglob("*simulat*")}
    assert found == {"plan_simulation.py"}


def test_the_wheel_imports_without_the_repository(site, tmp_path):
    command = [sys.executable, "-I", "-c", IMPORTS, str(ROOT), str(site)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        check=False,
        timeout=HANG_S,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_type_checker_finds_mistakes_in_programs(site, tmp_path):
    """A client or consumer of type Any would hide every mistake."""
    program = tmp_path / "program.py"
    program.write_text(TYPED)
    config = tmp_path / "mypy.ini"
    config.write_text(
        f"[mypy]\nstrict = true\nmypy_path = {site}\n"
        "[mypy-kafka_marshal.*]\nfollow_imports = silent\n"
    )
    command = ["-m", "mypy", "--config-file", config, "--cache-dir", tmp_path / "cache"]
    done = subprocess.run(
        [sys.executable, *command, program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=HANG_S,
    )
    wrong = [n for n, line in enumerate(TYPED.splitlines(), 1) if "# wrong" in line]
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [int(line.split(":")[1]) for line in errors] == wrong, done.stdout


def test_the_sdist_has_the_simulator_beside_the_tests(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    inside = {name.partition("/")[2] for name in names}
    assert {"simulator/__main__.py", "tests/simulation/test_simulation.py"} <= inside
    assert {"marshal/kafka_marshal/py.typed", "docs/TESTING.md"} <= inside
    assert {"hatch_build.py", "native/module.c", "native/native.h"} <= inside
    assert not [name for name in inside if name.endswith(".so")]


def test_tests_of_the_sdist_pass(built, tmp_path):
    """Run the tests that read most of the repository; all others need less of it.

    Slow tests are left out, because the rest reads the same files. Of the benchmarks
    the shortest one runs.
    """
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    files = ("tests/test_docs.py", "tests/test_deploy.py", "tests/test_benchmarks.py")
    left_out = ("prometheus", "rules_can_fail", "parse", "(smoke_run and not fold)")
    done = subprocess.run(
        [*pytest, "-k", " and ".join(f"not {each}" for each in left_out), *files],
        cwd=root,
        env=os.environ
        | {"PYTHONPATH": f"{root / 'marshal'}{os.pathsep}{root / 'cli'}"},
        check=False,
        timeout=HANG_S,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
