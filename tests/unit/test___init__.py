"""The package's root: what it exports, and what importing the core costs."""

import subprocess
import sys

import pytest
from slices import HANG_S

import kafka_marshal


def test_every_public_name_can_be_imported():
    for name in kafka_marshal.__all__:
        assert getattr(kafka_marshal, name) is not None
    assert dir(kafka_marshal) == sorted(kafka_marshal.__all__)
    assert kafka_marshal._HOMES.keys() | {"__version__"} == set(kafka_marshal.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = kafka_marshal.nonsense


def printed(program):
    """Run a program in a process of its own, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    return done.stdout.strip()


def test_the_protocol_imports_only_allowed_packages():
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['kafka', 'typer', 'rich', 'crc32c']))\n"
        "from kafka_marshal.protocol import claiming, rationalizer, text\n"
        "allowed = {'attr', 'attrs', 'mmh3', 'msgspec', 'kafka_marshal',\n"
        "    'typing_extensions'}\n"
        "tops = {name.split('.')[0] for name in sys.modules}\n"
        "extra = tops - allowed - set(sys.stdlib_module_names)\n"
        "print(sorted(n for n in extra if sys.modules.get(n) and n[0] != '_'))\n"
    )
    assert printed(program) == "[]"


@pytest.mark.parametrize(
    "module",
    ["kafka_marshal.client", "kafka_marshal.views.world", "kafka_marshal.views.watch"],
)
def test_importing_a_module_imports_no_client_library(module):
    program = (
        f"import sys, {module}\n"
        "print({'kafka', 'confluent_kafka', 'httpx', 'rich'} & set(sys.modules))\n"
    )
    assert printed(program) == "set()"


def test_importing_public_classes_does_not_load_the_engine():
    program = (
        "import sys\n"
        "from kafka_marshal import Consumer, Marshal\n"
        "heavy = {'re2', 'asyncio', 'ssl', 'json', 'concurrent.futures', 'tempfile',\n"
        "    'kafka_marshal.engine', 'kafka_marshal.clock', 'kafka_marshal.remote',\n"
        "    'kafka_marshal.protocol.snapshot',\n"
        "    'kafka_marshal.protocol.rationalizer'}\n"
        "print(heavy & set(sys.modules))\n"
    )
    assert printed(program) == "set()"
