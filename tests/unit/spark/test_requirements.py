"""Requirements of Spark, and the session of the commands."""

import sys
from types import SimpleNamespace

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from kafka_marshal import spark
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.spark import register, requirements
from kafka_marshal.spark.requirements import spark_session


def test_this_machine_meets_the_requirements():
    requirements.require_spark()
    assert requirements.require_java().name == "java"


@pytest.mark.parametrize("missing", ["pyspark", "pyarrow", "pandas"])
def test_a_missing_extra_raises_with_the_pip_command(monkeypatch, missing):
    def load(name):
        if name == missing:
            raise ImportError(f"no module named {name}")

    def find(name):
        return None if name == missing else object()

    monkeypatch.setattr(requirements, "import_module", load)
    monkeypatch.setattr(requirements, "find_spec", find)
    with pytest.raises(ConfigurationError, match=missing) as caught:
        requirements.require_spark()
    assert "pip install 'kafka-marshal[spark]'" in str(caught.value)


def test_the_data_source_without_its_extra_raises_with_the_pip_command(monkeypatch):
    def load(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(requirements, "import_module", load)
    with pytest.raises(ConfigurationError, match="kafka-marshal\\[spark\\]"):
        _ = spark.MarshalDataSource


def test_an_old_spark_raises(monkeypatch):
    monkeypatch.setattr(requirements, "version", lambda name: "4.1.7")
    with pytest.raises(ConfigurationError, match=r"4\.1\.7 is too old"):
        requirements.require_spark()


def test_a_spark_without_package_metadata_is_accepted(monkeypatch):
    def unknown(name):
        raise requirements.PackageNotFoundError(name)

    monkeypatch.setattr(requirements, "version", unknown)
    requirements.require_spark()


def test_a_missing_java_raises(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="has no bin/java"):
        requirements.require_java()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="no java command was found"):
        requirements.require_java()
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").touch()
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert requirements.require_java() == home / "bin" / "java"


def python_that(tmp_path, output, code=0):
    """Return a program that prints the output, in place of Python."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho '{output}'\nexit {code}\n")
    program.chmod(0o755)
    return str(program)


HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_a_python_that_can_load_the_data_source_is_accepted(tmp_path):
    requirements.require_worker_python(sys.executable)
    requirements.require_worker_python(python_that(tmp_path, f"{HERE} -"))


def test_the_python_of_workers_is_run_if_it_is_another_file(tmp_path):
    """A wrapper, so that it is not the file of this Python."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    requirements.require_worker_python(str(program))


@pytest.mark.parametrize(
    ("output", "code", "expected"),
    [
        ("3.9 -", 0, "is Python 3.9, and the driver's is"),
        (f"{HERE} kafka_marshal,pandas", 0, "has no package kafka_marshal,pandas"),
        ("", 3, "cannot be run"),
    ],
)
def test_an_unsuitable_python_raises_with_the_remedy(tmp_path, output, code, expected):
    with pytest.raises(ConfigurationError, match=expected) as caught:
        requirements.require_worker_python(python_that(tmp_path, output, code))
    assert "set PYSPARK_PYTHON to" in str(caught.value)
    assert caught.value.setting == "PYSPARK_PYTHON"


def test_a_missing_python_raises():
    with pytest.raises(ConfigurationError, match="no program python9"):
        requirements.require_worker_python("python9")


def test_register_checks_the_python_of_workers(monkeypatch):
    session = SimpleNamespace(
        sparkContext=SimpleNamespace(pythonExec="python9"),
        dataSource=SimpleNamespace(register=None),
    )
    with pytest.raises(ConfigurationError, match="no program python9"):
        register(session)


class Builder:
    """Records the settings, and cannot start a session."""

    def __init__(self):
        self.asked = {}

    def appName(self, name):  # noqa: N802 - Spark's name
        self.asked["name"] = name
        return self

    def master(self, master):
        self.asked["master"] = master
        return self

    def config(self, name, value):
        self.asked[name] = value
        return self

    def getOrCreate(self):  # noqa: N802 - Spark's name
        raise PySparkRuntimeError("no such master\nand more")


@pytest.fixture
def builder(monkeypatch):
    monkeypatch.setattr(SparkSession, "getActiveSession", classmethod(lambda _: None))
    made = Builder()
    monkeypatch.setattr(SparkSession, "builder", made)
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    return made


def open_session(master=None):
    with spark_session(master):
        pass


def test_a_missing_java_raises_before_spark_starts(monkeypatch, builder):
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(ConfigurationError, match="Spark needs Java 17"):
        open_session()
    assert builder.asked == {}


def test_a_session_that_cannot_start_raises_with_the_first_line(monkeypatch, builder):
    monkeypatch.setattr(requirements, "require_java", lambda: None)
    with pytest.raises(
        ConfigurationError, match="did not start with master 'spark://x:1'"
    ) as raised:
        open_session("spark://x:1")
    assert "no such master;" in str(raised.value)
    assert builder.asked["master"] == "spark://x:1"
    assert "spark.driver.host" not in builder.asked


def test_a_new_session_runs_on_this_machine(monkeypatch, builder):
    monkeypatch.setattr(requirements, "require_java", lambda: None)
    with pytest.raises(ConfigurationError):
        open_session()
    assert builder.asked["master"] == "local[*]"
    assert builder.asked["spark.driver.host"] == "localhost"


def test_under_spark_submit_its_master_is_used(monkeypatch, builder):
    monkeypatch.setattr(requirements, "require_java", lambda: None)
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    with pytest.raises(ConfigurationError):
        open_session()
    assert "master" not in builder.asked


def test_an_active_session_is_used_and_left_running(monkeypatch):
    active = object()
    monkeypatch.setattr(requirements, "require_java", lambda: None)
    monkeypatch.setattr(SparkSession, "getActiveSession", classmethod(lambda _: active))
    with spark_session("local[1]") as found:
        assert found is active
