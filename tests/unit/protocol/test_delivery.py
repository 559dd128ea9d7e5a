from itertools import permutations, product

import pytest

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.protocol.delivery import AtLeastOnce


def alo(start=0, *offsets):
    it = AtLeastOnce(start)
    for offset in offsets:
        it.hand_out(offset, offset)
    return it


def commit(it, offset):
    it.commit(offset, offset)


# --- At least once ---


class Model:
    """The position by its definition: all handed out below it is committed."""

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
def test_commits_in_any_order_move_the_position_over_the_contiguous_prefix(
    offsets, order
):
    it, model = alo(0, *offsets), Model(0)
    model.handed = list(offsets)
    for index in order:
        commit(it, offsets[index])
        commit(it, offsets[index])  # twice is fine
        model.done.add(offsets[index])
        assert it.position == model.position
        assert it.uncommitted_count == len(set(offsets) - model.done)
    assert it.position == offsets[-1] + 1
    assert it.tracked_count == 0


@pytest.mark.parametrize("opening", range(5))
def test_handing_out_and_committing_may_alternate(opening):
    for rest in product(range(5), repeat=4):
        alternate((opening, *rest))


def alternate(script):
    """Each number commits that offset if it is uncommitted; 4 hands out the next."""
    it, model = AtLeastOnce(0), Model(0)
    for action in script:
        if action == 4:
            offset = 2 * len(model.handed)
            it.hand_out(offset, offset)
            model.handed.append(offset)
        elif 2 * action in model.handed:
            commit(it, 2 * action)
            model.done.add(2 * action)
        else:
            with pytest.raises(InvalidTransition):
                commit(it, 2 * action)
        assert it.position == model.position
        assert it.uncommitted_count == len(set(model.handed) - model.done)


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
def test_a_commit_of_an_offset_not_handed_out_is_refused(
    start, handed, committed, unknown
):
    it = alo(start, *handed)
    for offset in committed:
        commit(it, offset)
    before = (it.position, it.uncommitted_count, it.tracked_count)
    with pytest.raises(InvalidTransition, match=str(unknown)):
        commit(it, unknown)
    assert (it.position, it.uncommitted_count, it.tracked_count) == before


def test_a_commit_below_the_position_changes_nothing():
    it = alo(7, 7, 8)
    commit(it, 3)
    commit(it, 7)
    commit(it, 7)
    assert it.position == 8


def test_zero_is_a_known_position_and_none_an_unknown_one():
    it = alo(0, 0)
    assert it.position == 0
    assert it.position is not None
    commit(it, 0)
    assert it.position == 1
    assert AtLeastOnce(None).position is None


def test_the_first_contiguous_commit_sets_an_unknown_position():
    it = alo(None, 4, 6)
    commit(it, 6)
    assert it.position is None
    commit(it, 4)
    assert it.position == 7


@pytest.mark.parametrize("offset", [3, 2])
def test_an_offset_is_not_handed_out_twice(offset):
    it = alo(0, 3)
    with pytest.raises(InvalidTransition, match="twice"):
        it.hand_out(offset, offset)
    commit(it, 3)
    with pytest.raises(InvalidTransition, match="twice"):
        it.hand_out(offset, offset)
    assert (it.position, it.tracked_count) == (4, 0)


def test_commit_all_commits_every_offset_handed_out():
    it = alo(0, 1, 2, 5)
    commit(it, 2)
    assert (it.uncommitted_count, it.tracked_count) == (2, 3)
    it.commit_all()
    assert (it.position, it.uncommitted_count, it.tracked_count) == (6, 0, 0)
    it.commit_all()
    assert it.position == 6
    commit(it, 5)
    with pytest.raises(InvalidTransition):
        commit(it, 6)


def test_commit_below_leaves_higher_offsets_uncommitted():
    it = alo(0, 1, 2, 5, 6)
    it.commit_below(2)
    assert (it.position, it.uncommitted_count) == (2, 3)
    commit(it, 6)
    it.commit_below(6)
    assert (it.position, it.uncommitted_count, it.tracked_count) == (7, 0, 0)
    it.commit_below(3)
    assert it.position == 7
    it.commit_below(9)
    assert it.position == 9
    with pytest.raises(InvalidTransition, match="twice"):
        it.hand_out(8, 8)


def test_commit_below_sets_an_unknown_position():
    it = AtLeastOnce(None)
    it.commit_below(4)
    assert it.position == 4


def test_a_jump_while_offsets_are_uncommitted_is_refused():
    it = alo(0, 0)
    with pytest.raises(InvalidTransition, match="uncommitted"):
        it.jump(10)
    assert it.position == 0
    commit(it, 0)
    it.jump(10)
    assert it.position == 10
    it.hand_out(10, 10)


# --- Ranges ---


class Naive:
    """A reference for AtLeastOnce, which keeps each offset by itself."""

    def __init__(self, start):
        self.position, self.handed, self.done = start, [], set()

    def commit(self, first, last):
        known = set(self.handed)
        below = -1 if self.position is None else self.position
        for end in (first, last):
            if end not in known and end >= below:
                raise InvalidTransition(str(end))
        self.done |= {o for o in self.handed if first <= o <= last}
        while self.handed and self.handed[0] in self.done:
            self.position = self.handed.pop(0) + 1
        self.done &= set(self.handed)


RUNS = [(0, 2), (3, 3), (6, 9), (12, 12), (13, 15)]


@pytest.mark.parametrize("order", list(permutations(range(len(RUNS)))))
def test_whole_batches_are_committed_in_any_order(order):
    it, naive = AtLeastOnce(None), Naive(None)
    for first, last in RUNS:
        it.hand_out(first, last)
        naive.handed += range(first, last + 1)
    assert it.tracked_count == 12
    for index in order:
        for _ in range(2):  # twice is fine
            it.commit(*RUNS[index])
            naive.commit(*RUNS[index])
            assert it.position == naive.position
            assert it.tracked_count == len(naive.handed)
            assert it.uncommitted_count == len(naive.handed) - len(naive.done)


@pytest.mark.parametrize(
    ("first", "last", "position", "uncommitted"),
    [
        pytest.param(0, 9, 10, 3, id="over-holes-without-records"),
        pytest.param(0, 1, 2, 9, id="part-of-a-run"),
        pytest.param(1, 7, None, 6, id="ahead-of-the-first"),
        pytest.param(3, 8, None, 7, id="across-a-hole-ahead"),
        pytest.param(9, 13, None, 8, id="to-the-end"),
    ],
)
def test_a_range_commits_every_offset_handed_out_within_it(
    first, last, position, uncommitted
):
    it = AtLeastOnce(None)
    for begin, end in ((0, 3), (6, 9), (12, 14)):
        it.hand_out(begin, end)
    it.commit(first, last)
    assert (it.position, it.uncommitted_count) == (position, uncommitted)
    it.commit(0, 14)
    assert (it.position, it.uncommitted_count, it.tracked_count) == (15, 0, 0)


def test_a_range_that_begins_below_the_position_commits_the_rest():
    it = alo(0, 0, 1, 2, 3)
    commit(it, 0)
    it.commit(0, 2)
    assert (it.position, it.uncommitted_count) == (3, 1)


def test_a_range_with_an_end_not_handed_out_is_refused():
    it = alo(0, 1, 2, 4)
    for first, last in ((0, 2), (1, 3), (1, 5)):
        with pytest.raises(InvalidTransition):
            it.commit(first, last)
        assert (it.position, it.uncommitted_count) == (0, 3)


def test_adjacent_ranges_are_tracked_as_one():
    """Memory stays small however many records are handed out and uncommitted."""
    it = AtLeastOnce(0)
    for first in range(0, 100_000, 500):
        it.hand_out(first, first + 499)
    assert (it.tracked_count, len(it._runs)) == (100_000, 1)
    for first in range(99_500, 0, -500):
        it.commit(first, first + 499)
    assert (it.uncommitted_count, len(it._done)) == (500, 1)
    it.commit(0, 499)
    assert (it.position, it.tracked_count) == (100_000, 0)


def test_a_range_that_goes_back_is_not_handed_out():
    it = AtLeastOnce(0)
    with pytest.raises(InvalidTransition):
        it.hand_out(5, 4)
    it.hand_out(0, 4)
    with pytest.raises(InvalidTransition, match="twice"):
        it.hand_out(4, 8)


# --- offsets without records ---


def test_the_position_passes_a_gap_once_all_before_it_is_committed():
    it = alo(0, 0, 1)
    it.skip(2, 4)
    assert it.position == 0
    commit(it, 1)
    assert (it.position, it.uncommitted_count) == (0, 1)
    commit(it, 0)
    assert it.position == 5


def test_the_position_passes_a_gap_at_once_if_nothing_is_uncommitted():
    it = alo(3)
    it.skip(3, 3)
    assert it.position == 4
    it.skip(4, 3)
    assert it.position == 4, "an empty range"
    it.hand_out(4, 4)
    it.skip(5, 5)
    it.skip(6, 6)
    it.commit_all()
    assert it.position == 7


def test_the_position_does_not_pass_uncommitted_records_behind_a_gap():
    it = alo(0, 0)
    it.skip(1, 1)
    it.hand_out(2, 2)
    commit(it, 0)
    assert it.position == 1
    commit(it, 2)
    assert it.position == 3


def test_a_gap_that_does_not_adjoin_handed_out_offsets_is_ignored():
    it = alo(0)
    it.skip(5, 6)
    assert it.position == 0
    it.hand_out(0, 0)
    it.skip(3, 4)
    commit(it, 0)
    assert it.position == 1
    unknown = AtLeastOnce(None)
    unknown.skip(0, 4)
    assert unknown.position is None


# --- Hand-outs that nobody received ---


def test_records_put_back_are_handed_out_again():
    it = alo(0, 0, 1, 2, 5, 6)
    commit(it, 1)
    assert it.put_back(2) == 3
    assert (it.tracked_count, it.uncommitted_count, it.position) == (2, 1, 0)
    assert it.put_back(2) == 0
    it.hand_out(2, 2)
    it.commit(0, 2)
    assert (it.position, it.tracked_count) == (3, 0)


def test_commit_all_does_not_commit_records_put_back():
    it = alo(0, 0, 1, 2, 3)
    it.commit_all(below=2)
    assert it.position == 2
    it.commit_all(below=2)
    assert (it.position, it.uncommitted_count) == (2, 2)
    it.put_back(2)
    it.commit_all()
    assert (it.position, it.tracked_count) == (2, 0)


def test_a_range_is_put_back_in_part():
    it = alo(0)
    it.hand_out(0, 9)
    assert it.put_back(4) == 6
    it.commit_all()
    assert it.position == 4
    it.hand_out(4, 4)


def test_the_position_does_not_pass_a_gap_behind_records_put_back():
    it = alo(0, 0)
    it.skip(1, 3)
    it.hand_out(4, 4)
    it.skip(5, 8)
    it.put_back(4)
    it.commit_all()
    assert it.position == 4


def test_a_hand_out_that_was_interrupted_is_put_back():
    it = alo(0, 0)
    it._runs.append([3, 5])
    it.put_back(3)
    assert (it.tracked_count, list(it._runs)) == (1, [[0, 0]])
