from itertools import permutations, product

import pytest

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.protocol.delivery import AtLeastOnce


def alo(start=0, *offsets):
    it = AtLeastOnce(start)
    it.hand_out(offsets)
    return it


# --- At least once ---


class Model:
    """The position by its definition: below the first offset not yet done."""

    def __init__(self, start):
        self.start = start
        self.handed = []
        self.done = set()

    @property
    def position(self):
        position = self.start
        for offset in self.handed:
            if offset not in self.done:
                return position
            position = offset + 1
        return position


@pytest.mark.parametrize(
    "offsets", [(0, 1, 2, 3), (5, 7, 8, 20)], ids=["dense", "gaps"]
)
@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_commits_in_any_order_move_over_the_contiguous_prefix(offsets, order):
    it, model = alo(0, *offsets), Model(0)
    model.handed = list(offsets)
    for index in order:
        it.commit(offsets[index])
        it.commit(offsets[index])  # twice is fine
        model.done.add(offsets[index])
        assert it.position == model.position
        assert it.in_hand_count == len(set(offsets) - model.done)
    assert it.position == offsets[-1] + 1
    assert it.tracked_count == 0


@pytest.mark.parametrize("opening", range(5))
def test_handing_out_and_committing_may_alternate(opening):
    for rest in product(range(5), repeat=4):
        alternate((opening, *rest))


def alternate(script):
    """Each number commits that offset where it is in hand; 4 hands out the next."""
    it, model = AtLeastOnce(0), Model(0)
    for action in script:
        if action == 4:
            offset = 2 * len(model.handed)
            it.hand_out([offset])
            model.handed.append(offset)
        elif 2 * action in model.handed:
            it.commit(2 * action)
            model.done.add(2 * action)
        else:
            with pytest.raises(InvalidTransition):
                it.commit(2 * action)
        assert it.position == model.position
        assert it.in_hand_count == len(set(model.handed) - model.done)


@pytest.mark.parametrize(
    ("start", "handed", "committed", "unknown"),
    [
        pytest.param(0, (), (), 0, id="nothing-handed-out"),
        pytest.param(None, (), (), 0, id="no-start"),
        pytest.param(None, (4,), (), 3, id="no-start-and-below"),
        pytest.param(0, (1, 2), (), 3, id="beyond"),
        pytest.param(0, (1, 4), (), 2, id="in-a-gap"),
        pytest.param(0, (1, 2, 5), (2,), 4, id="in-a-gap-with-commits"),
        pytest.param(0, (0, 1), (0, 1), 2, id="beyond-with-empty-hands"),
        pytest.param(3, (), (), 3, id="at-the-start"),
    ],
)
def test_an_unknown_offset_is_an_error(start, handed, committed, unknown):
    it = alo(start, *handed)
    for offset in committed:
        it.commit(offset)
    before = (it.position, it.in_hand_count, it.tracked_count)
    with pytest.raises(InvalidTransition, match=str(unknown)):
        it.commit(unknown)
    assert (it.position, it.in_hand_count, it.tracked_count) == before


def test_what_lies_below_the_position_is_done_already():
    it = alo(7, 7, 8)
    it.commit(3)
    it.commit(7)
    it.commit(7)
    assert it.position == 8


def test_offset_zero_is_a_real_position():
    it = alo(0, 0)
    assert it.position == 0
    assert it.position is not None
    it.commit(0)
    assert it.position == 1
    assert AtLeastOnce(None).position is None


def test_a_first_commit_makes_a_position():
    it = alo(None, 4, 6)
    it.commit(6)
    assert it.position is None
    it.commit(4)
    assert it.position == 7


@pytest.mark.parametrize("offset", [3, 2])
def test_an_offset_is_handed_out_once(offset):
    it = alo(0, 3)
    with pytest.raises(InvalidTransition, match="twice"):
        it.hand_out([offset])
    it.commit(3)
    with pytest.raises(InvalidTransition, match="twice"):
        it.hand_out([offset])
    assert (it.position, it.tracked_count) == (4, 0)


def test_committing_everything():
    it = alo(0, 1, 2, 5)
    it.commit(2)
    assert (it.in_hand_count, it.tracked_count) == (2, 3)
    it.commit_all()
    assert (it.position, it.in_hand_count, it.tracked_count) == (6, 0, 0)
    it.commit_all()
    assert it.position == 6
    it.commit(5)
    with pytest.raises(InvalidTransition):
        it.commit(6)


def test_a_jump_needs_empty_hands():
    it = alo(0, 0)
    with pytest.raises(InvalidTransition, match="empty hands"):
        it.jump(10)
    assert it.position == 0
    it.commit(0)
    it.jump(10)
    assert it.position == 10
    it.hand_out([10])
