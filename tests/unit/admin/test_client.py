"""What all methods of Admin have in common, and its settings."""

import inspect

import numpy as np
import pytest

from kafka_marshal import Admin
from kafka_marshal.admin import connection
from kafka_marshal.admin.formatting import Format
from kafka_marshal.clock import SystemClock
from kafka_marshal.errors import ConfigurationError, TopicMisconfigured
from kafka_marshal.kafka_io.topic_rules import ClusterInfo, TopicDescription
from simulator.fakelog import FakeKafka

NO_ARGUMENTS = {"cluster", "describe_topic", "report_topic"}
# Methods that take a value of a class of the product, or only Booleans.
OWN_TYPES = {"format_topic", "describe_plan", "upgrade_topic", "log_ends"}


def methods():
    return {
        name: method
        for name, method in inspect.getmembers(Admin, inspect.isfunction)
        if not name.startswith("_")
    }


def test_methods_with_plain_arguments_convert_numpy_values():
    """Both they and ``close``, which has no arguments, have a wrapper."""
    plain = {name for name, each in methods().items() if hasattr(each, "__wrapped__")}
    assert methods().keys() - plain == NO_ARGUMENTS | OWN_TYPES


@pytest.mark.parametrize(
    "wrong",
    [
        {"state_dir": 5},
        {"timeout_ms": "30s"},
        {"client_id": 5},
        {"person": 5},
    ],
    ids=str,
)
def test_the_error_names_the_wrong_setting(wrong):
    with pytest.raises(ConfigurationError) as raised:
        Admin("localhost:1", **wrong)
    assert raised.value.setting == next(iter(wrong))


def test_numpy_settings_become_python_values():
    settings = {"client_id": np.str_("a"), "person": np.str_("ada")}
    with Admin("localhost:1", timeout_ms=np.int64(5), **settings) as admin:
        sender = admin._sender
        assert type(admin._timeout_ms) is int
        assert type(sender.client_id) is str
        assert sender.tags


class Topics:
    """A cluster that has no coordination topic, and creates it."""

    def describe(self, topic, *, timeout_ms):
        return TopicDescription(name=topic, exists=False)

    def cluster(self, *, timeout_ms):
        return ClusterInfo("c", 1, ())

    def cluster_id(self, *, timeout_ms):
        return "c"

    def create_coordination_topic(self, *, partitions, timeout_ms):
        pass

    def close(self):
        pass


def test_an_admin_stays_open_while_the_interpreter_ends(monkeypatch):
    with Admin("localhost:1", state_dir="") as admin, monkeypatch.context() as ending:
        ending.setattr("sys.is_finalizing", lambda: True)
        admin.close()
        assert not admin._is_closed
    assert admin._is_closed


@pytest.mark.parametrize(("known_after", "timeout_ms"), [(2, 30_000), (None, 1)])
def test_format_waits_until_a_broker_knows_the_created_topic(
    monkeypatch, known_after, timeout_ms
):
    kafka, asked = FakeKafka(SystemClock()), []

    def open_log(*_, **__):
        if len(asked) == known_after:
            kafka.create_topic("__marshal", 2, is_log_append_time=True)
        asked.append(1)
        return kafka.coordination_log()

    monkeypatch.setattr(connection, "open_coordination_log", open_log)
    with Admin("localhost:1", state_dir="", timeout_ms=timeout_ms) as admin:
        admin._topics.close()
        admin._topics = Topics()
        if known_after is None:
            with pytest.raises(TopicMisconfigured, match="There is no"):
                admin.format_topic(Format(partition_count=2))
        else:
            config = admin.format_topic(Format(partition_count=2))
            assert config.partition_count == 2
