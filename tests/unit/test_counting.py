"""Counts with their nouns."""

import pytest

from kafka_marshal.counting import counted


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 records"), (1, "1 record"), (2, "2 records")]
)
def test_a_count_of_one_has_the_singular(count, text):
    assert counted(count, "record") == text


def test_the_words_after_a_count_depend_on_it():
    found = [counted(n, "key is held", many="keys are held") for n in (1, 2)]
    assert found == ["1 key is held", "2 keys are held"]
