"""Breadth-first search of every state that a small world can reach."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kafka_marshal.gc_pause import uncollected

State = TypeVar("State", bound=Hashable)
NO_WAY = "liveness: a state without a way on"


class Model(Protocol[State]):
    """A small world: its first state, its possible steps, its invariants.

    States that differ only by names should be equal: a step renames its outcome. The
    labels of steps are printed.
    """

    def start(self) -> State: ...

    def steps(self, state: State) -> Iterable[tuple[Hashable, State]]: ...

    def broken(self, state: State) -> str | None: ...


class Broken(Exception):
    """A step itself breaks an invariant; the message names it."""


@dataclass(frozen=True)
class Found(Generic[State]):
    """The result of a search.

    Attributes:
        states: Number of states, up to renaming.
        broken: The invariant that does not hold, None if all hold.
        trace: The shortest sequence of steps that breaks it.
    """

    states: int
    broken: str | None
    trace: tuple[Hashable, ...]

    def __str__(self) -> str:
        if self.broken is None:
            return f"holds in all {self.states} states"
        steps = "\n".join(f"{n:3}. {step}" for n, step in enumerate(self.trace, 1))
        return f"{self.broken} after {self.states} states:\n{steps}"


@uncollected()
def search(
    model: Model, *, goal: Callable | None = None, states_max: int = 5_000_000
) -> Found:
    """Visit every state once; stop at the first that breaks an invariant.

    Args:
        model: The small world.
        goal: Returns whether a state is a goal. A state from which no goal can be
            reached breaks `NO_WAY`.
        states_max: A search with more states fails.
    """
    first = model.start()
    came_from: dict = {first: None}
    befores: dict = {first: []}
    queue = deque([first])
    expand: Callable = model.steps
    while queue:
        state = queue.popleft()
        broken = model.broken(state)
        if broken is not None:
            return Found(len(came_from), broken, _trace(came_from, state))
        assert len(came_from) < states_max, "the bounds are too wide to be exhaustive"
        try:
            for label, after in expand(state):
                if after not in came_from:
                    came_from[after] = (state, label)
                    queue.append(after)
                if goal is not None:
                    befores.setdefault(after, []).append(state)
        except Broken as what:
            return Found(len(came_from), str(what), _trace(came_from, state))
    if goal is not None:
        near = _with_a_way(befores, goal)
        stuck = next((state for state in came_from if state not in near), None)
        if stuck is not None:
            return Found(len(came_from), NO_WAY, _trace(came_from, stuck))
    return Found(len(came_from), None, ())


def assert_found(model: Model, rule: str, *, goal: Callable | None = None) -> None:
    """Search a broken model; the first rule that it breaks must be this one."""
    found = search(model, goal=goal)
    print(found)  # noqa: T201 - the trace, shown with -s
    assert found.broken is not None
    assert found.broken.partition(":")[0] == rule
    assert found.trace


@uncollected()
def reachable(model: Model) -> set:
    """Return every reachable state, without checking invariants."""
    first = model.start()
    found, queue = {first}, [first]
    while queue:
        for _, after in model.steps(queue.pop()):
            if after not in found:
                found.add(after)
                queue.append(after)
    return found


def _with_a_way(befores, goal):
    """Return the states from which a goal can be reached."""
    queue = [state for state in befores if goal(state)]
    near = set(queue)
    while queue:
        for state in befores[queue.pop()]:
            if state not in near:
                near.add(state)
                queue.append(state)
    return near


def _trace(came_from, state):
    labels = []
    while came_from[state] is not None:
        state, label = came_from[state]
        labels.append(label)
    return tuple(reversed(labels))
