"""Breadth-first search of every state that a small world can reach."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

State = TypeVar("State", bound=Hashable)


class Model(Protocol[State]):
    """A small world: where it begins, what may happen, what must hold.

    Worlds that differ by names only should be equal: a step renames its outcome.
    """

    def start(self) -> State: ...

    def steps(self, state: State) -> Iterable[tuple[str, State]]: ...

    def broken(self, state: State) -> str | None: ...


class Broken(Exception):
    """A step itself breaks an invariant, whose name is the message."""


@dataclass(frozen=True)
class Found(Generic[State]):
    """What a search found.

    Attributes:
        states: Number of states, up to renaming.
        broken: The invariant that does not hold, None where all do.
        trace: Shortest way to where it does not hold.
    """

    states: int
    broken: str | None
    trace: tuple[str, ...]

    def __str__(self) -> str:
        if self.broken is None:
            return f"holds in all {self.states} states"
        steps = "\n".join(f"{n:3}. {step}" for n, step in enumerate(self.trace, 1))
        return f"{self.broken} after {self.states} states:\n{steps}"


def search(model: Model, *, states_max: int = 5_000_000) -> Found:
    """Visit every state once; stop at the first that is broken."""
    first = model.start()
    came_from: dict = {first: None}
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
        except Broken as what:
            return Found(len(came_from), str(what), _trace(came_from, state))
    return Found(len(came_from), None, ())


def _trace(came_from, state):
    labels = []
    while came_from[state] is not None:
        state, label = came_from[state]
        labels.append(label)
    return tuple(reversed(labels))
