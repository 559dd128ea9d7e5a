"""Policies by name: built in, or from packages that the tests install."""

import sys
import textwrap

import pytest

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.policies import (
    BUILT_IN,
    Plan,
    fair,
    find_policy,
    greedy,
    policy_names,
    topic,
)
from kafka_marshal.testing.policies import check_policy

MODULE = """
    from kafka_marshal.policies import Plan, View, greedy

    def careful(view: View) -> Plan:
        return greedy(view)

    class Stateful:
        made = 0

        def __init__(self):
            type(self).made += 1

        def __call__(self, view: View) -> Plan:
            return greedy(view)

    class Needy:
        def __init__(self, something):
            pass

    number = 7
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a distribution with entry points."""

    def install(name, **points):
        module = f"policies_of_{name}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(MODULE))
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
        )
        lines = [f"{point} = {module}{where}" for point, where in points.items()]
        text = "\n".join(["[kafka_marshal.policies]", *lines, ""])
        (info / "entry_points.txt").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        return module

    yield install
    for name in [name for name in sys.modules if name.startswith("policies_of_")]:
        del sys.modules[name]


def test_built_in_policies_have_names():
    assert {"fair": fair, "greedy": greedy, "topic": topic} == BUILT_IN
    assert find_policy("topic") is topic
    assert set(policy_names()) >= set(BUILT_IN)


def test_a_function_is_accepted_as_a_policy():
    def mine(view):
        return Plan()

    assert find_policy(mine) is mine


def test_entry_points_of_an_installed_package_are_policies(install):
    module = install("acme", careful=":careful", stateful=":Stateful")
    assert {"careful", "stateful"} <= set(policy_names())
    found = find_policy("careful")
    assert found.__module__ == module
    check_policy(found)


def test_a_class_makes_an_object_for_each_consumer(install):
    install("acme", stateful=":Stateful")
    one, two = find_policy("stateful"), find_policy("stateful")
    assert one is not two
    assert type(one).made == 2  # type: ignore[attr-defined]


def test_a_built_in_policy_cannot_be_replaced(install):
    install("evil", fair=":careful")
    assert find_policy("fair") is fair


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        pytest.param({}, "unknown policy 'p'", id="unknown"),
        pytest.param({"p": ":absent"}, "cannot be loaded", id="no-such-name"),
        pytest.param({"p": "_missing:it"}, "cannot be loaded", id="no-such-module"),
        pytest.param({"p": ":number"}, "it must be a function", id="no-function"),
        pytest.param({"p": ":Needy"}, "cannot be made without", id="wants-arguments"),
    ],
)
def test_an_unusable_policy_is_an_error(install, points, expected):
    install("acme", **points)
    with pytest.raises(ConfigurationError, match=expected) as caught:
        find_policy("p")
    assert caught.value.setting == "policy"


def test_a_name_in_two_packages_is_ambiguous(install):
    install("acme", p=":careful")
    install("other", p=":careful")
    with pytest.raises(ConfigurationError, match="more than one package"):
        find_policy("p")
