"""The methods of an admin, as a whole; each is tested with what it does."""

import inspect

import numpy as np
import pytest

from kafka_marshal import Admin
from kafka_marshal.errors import ConfigurationError

NO_ARGUMENTS = {"close", "cluster", "describe_topic", "report_topic"}
# A value of its own class, or Booleans alone.
OWN_TYPES = {"format_topic", "describe_plan", "upgrade_topic", "log_ends"}


def methods():
    return {
        name: method
        for name, method in inspect.getmembers(Admin, inspect.isfunction)
        if not name.startswith("_")
    }


def test_every_method_takes_numbers_and_texts_of_numpy():
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
def test_a_wrong_setting_is_named(wrong):
    with pytest.raises(ConfigurationError) as raised:
        Admin("localhost:1", **wrong)
    assert raised.value.setting == next(iter(wrong))


def test_settings_of_numpy_are_python_s():
    settings = {"client_id": np.str_("a"), "person": np.str_("ada")}
    with Admin("localhost:1", timeout_ms=np.int64(5), **settings) as admin:
        sender = admin._sender
        assert type(admin._timeout_ms) is int
        assert type(sender.client_id) is str
        assert sender.tags
