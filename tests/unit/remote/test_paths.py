"""The path templates of the API."""

import re

from kafka_marshal.remote import paths

ALL = {name: path for name, path in vars(paths).items() if name.isupper()}


def test_path_templates_are_unique():
    assert len(set(ALL.values())) == len(ALL)


def test_path_templates_have_only_the_known_parts():
    parts = {part for path in ALL.values() for part in re.findall(r"{(\w+)}", path)}
    assert parts == {"group", "client", "name", "topic", "partition"}
