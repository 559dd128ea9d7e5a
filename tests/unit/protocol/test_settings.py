import pytest

from kafka_marshal.protocol.settings import NO_SETTINGS, TUNABLES, Settings


@pytest.mark.parametrize("name", TUNABLES)
def test_a_setting_is_its_default_unless_given(name):
    tunable = TUNABLES[name]
    assert tunable.least <= tunable.default <= tunable.most
    assert NO_SETTINGS.value(name) == tunable.default
    given = Settings(1, **{name: tunable.most - 1})
    assert given.value(name) == tunable.most - 1


@pytest.mark.parametrize("name", TUNABLES)
def test_a_setting_beyond_its_bounds_is_clamped(name):
    tunable = TUNABLES[name]
    assert Settings(1, **{name: 2**31 - 1}).value(name) == tunable.most
    assert Settings(1, **{name: 0}).value(name) == tunable.least
