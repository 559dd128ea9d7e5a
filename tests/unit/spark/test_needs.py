"""What is missing on a machine is told in one sentence."""

import pytest

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.spark import needs


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
