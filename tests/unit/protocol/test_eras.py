import pytest

from kafka_marshal.protocol.eras import ERAS_MAX, end_era, era_at

FULL = tuple((10 * n, n) for n in range(1, ERAS_MAX + 1))
NEXT = (10 * (ERAS_MAX + 1), ERAS_MAX + 1)


def test_an_offset_has_the_era_that_ends_behind_it():
    eras = ((10, 1), (20, 2))
    found = [era_at(eras, offset) for offset in (1, 9, 10, 19, 20, 30)]
    assert found == [1, 1, 2, 2, None, None]
    assert era_at((), 1) is None


def test_all_are_kept_while_there_is_room():
    assert end_era((), (10, 1), epochs=iter(())) == ((10, 1),)
    epochs = iter(range(1_000))
    assert end_era(FULL[:-1], FULL[-1], epochs=epochs) == FULL
    assert next(epochs) == 0


@pytest.mark.parametrize(
    ("epochs", "dropped"),
    [
        pytest.param((), 0, id="no-claim"),
        pytest.param((9_999,), 0, id="claims-of-the-present-era"),
        pytest.param((9, 10, 25), 3, id="claims-of-the-oldest"),
        pytest.param((19, 5), 2, id="in-any-order"),
        pytest.param(range(10 * ERAS_MAX), ERAS_MAX, id="all-but-the-last"),
        pytest.param(range(10 * ERAS_MAX + 10), 0, id="claims-of-all"),
    ],
)
def test_the_oldest_without_a_claim_is_dropped(epochs, dropped):
    eras = [*FULL, NEXT]
    del eras[dropped]
    assert end_era(FULL, NEXT, epochs=epochs) == tuple(eras)


def test_what_is_dropped_has_the_next_era():
    eras = end_era(FULL, NEXT, epochs=[5])
    assert era_at(eras, 5) == 1
    assert era_at(eras, 15) == 3
