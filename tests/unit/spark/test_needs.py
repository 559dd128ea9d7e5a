"""What is missing on a machine is told in one sentence."""

import sys
from types import SimpleNamespace

import pytest

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.spark import needs, register


def test_here_is_all_that_is_needed():
    needs.require_spark()
    assert needs.require_java().name == "java"


@pytest.mark.parametrize("missing", ["pyspark", "pyarrow", "pandas"])
def test_a_missing_extra_names_what_installs_it(monkeypatch, missing):
    def find(name):
        if name == missing:
            raise ImportError(f"no module named {name}")

    monkeypatch.setattr(needs, "import_module", find)
    with pytest.raises(ConfigurationError, match=missing) as caught:
        needs.require_spark()
    assert "pip install 'kafka-marshal[spark]'" in str(caught.value)


def test_an_old_spark_is_told(monkeypatch):
    monkeypatch.setattr(needs, "version", lambda name: "4.1.7")
    with pytest.raises(ConfigurationError, match=r"4\.1\.7 is too old"):
        needs.require_spark()


def test_a_spark_without_a_distribution_tells_its_version(monkeypatch):
    def unknown(name):
        raise needs.PackageNotFoundError(name)

    monkeypatch.setattr(needs, "version", unknown)
    needs.require_spark()


def test_a_missing_java_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="has no bin/java"):
        needs.require_java()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="no java command was found"):
        needs.require_java()
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").touch()
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert needs.require_java() == home / "bin" / "java"


def python_that(tmp_path, says, code=0):
    """Return a program that says something, in place of Python."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho '{says}'\nexit {code}\n")
    program.chmod(0o755)
    return str(program)


HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_a_python_that_can_load_the_data_source_is_taken(tmp_path):
    needs.require_worker_python(sys.executable)
    needs.require_worker_python(python_that(tmp_path, f"{HERE} -"))


def test_the_python_of_workers_is_really_asked(tmp_path):
    """A program in between, so that it is not the same file."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    needs.require_worker_python(str(program))


@pytest.mark.parametrize(
    ("says", "code", "told"),
    [
        ("3.9 -", 0, "is Python 3.9, and the driver's is"),
        (f"{HERE} kafka_marshal,pandas", 0, "has no package kafka_marshal,pandas"),
        ("", 3, "cannot be run"),
    ],
)
def test_a_python_that_cannot_is_told_with_the_remedy(tmp_path, says, code, told):
    with pytest.raises(ConfigurationError, match=told) as caught:
        needs.require_worker_python(python_that(tmp_path, says, code))
    assert "set PYSPARK_PYTHON to" in str(caught.value)
    assert caught.value.setting == "PYSPARK_PYTHON"


def test_a_python_that_is_not_there_is_told():
    with pytest.raises(ConfigurationError, match="no program python9"):
        needs.require_worker_python("python9")


def test_it_is_checked_when_a_session_is_told_of_the_format(monkeypatch):
    session = SimpleNamespace(
        sparkContext=SimpleNamespace(pythonExec="python9"),
        dataSource=SimpleNamespace(register=None),
    )
    with pytest.raises(ConfigurationError, match="no program python9"):
        register(session)
