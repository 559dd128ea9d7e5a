"""A session for the command, or one sentence why there is none."""

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.spark.audit import session
from kafka_marshal.spark.audit.session import spark_session


class Builder:
    """Notes what is asked for, and cannot start."""

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


def test_missing_java_is_told_before_spark_is_asked(monkeypatch, builder):
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(ConfigurationError, match="Spark needs Java 17"):
        open_session()
    assert builder.asked == {}


def test_a_session_that_cannot_start_is_one_sentence(monkeypatch, builder):
    monkeypatch.setattr(session, "require_java", lambda: None)
    with pytest.raises(
        ConfigurationError, match="did not start with master 'spark://x:1'"
    ) as told:
        open_session("spark://x:1")
    assert "no such master;" in str(told.value)
    assert builder.asked["master"] == "spark://x:1"
    assert "spark.driver.host" not in builder.asked


def test_a_session_of_our_own_is_on_this_machine(monkeypatch, builder):
    monkeypatch.setattr(session, "require_java", lambda: None)
    with pytest.raises(ConfigurationError):
        open_session()
    assert builder.asked["master"] == "local[*]"
    assert builder.asked["spark.driver.host"] == "localhost"


def test_under_spark_submit_the_master_is_its_own(monkeypatch, builder):
    monkeypatch.setattr(session, "require_java", lambda: None)
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    with pytest.raises(ConfigurationError):
        open_session()
    assert "master" not in builder.asked


def test_an_active_session_is_taken_and_left_running(monkeypatch):
    active = object()
    monkeypatch.setattr(session, "require_java", lambda: None)
    monkeypatch.setattr(SparkSession, "getActiveSession", classmethod(lambda _: active))
    with spark_session("local[1]") as found:
        assert found is active
