"""Members that stand by for keys of others, on some hosts, well or badly."""

import attrs

from kafka_marshal.protocol.types import TopicPartition
from simulator.node import ConsumerSpec, Node
from simulator.plan import chance

HOSTS = ("h1", "h2", "h3")


def host_of(seed: int, start: int) -> str:
    """Draw the machine of a process.

    Args:
        seed: Seed of the run.
        start: Number of the process.
    """
    return chance(seed, f"hosts/{start}").choice(HOSTS)


def standing_by(spec: ConsumerSpec, seed: int, *, start: int) -> ConsumerSpec:
    """Return a process's subscription, with the standbys that are drawn for it."""
    rng = chance(seed, f"standbys/{start}")
    count = rng.choice((0, 1, 1, 2))
    if not count:
        return spec
    call = _fail if rng.random() < 1 / 4 else _succeed
    callbacks = attrs.evolve(spec.callbacks, on_standby=call)
    config = attrs.evolve(spec.config, standbys=count)
    return attrs.evolve(spec, callbacks=callbacks, config=config)


def hold(node: Node, seed: int, *, start: int) -> None:
    """Make the application of some processes never end its first call."""
    node.standing_by.is_held = chance(seed, f"loading/{start}").random() < 1 / 4


def _succeed(
    partition: TopicPartition, position: int | None, owner: str | None
) -> None:
    """Succeed in loading, or forgetting, the state."""


def _fail(partition: TopicPartition, position: int | None, owner: str | None) -> None:
    raise RuntimeError(f"{partition} of {owner} cannot be loaded from {position}")
