"""Admins that set positions of a group whose members use sidecars."""

import random
from functools import partial

from simulator.position_judge import name_of
from simulator.positions import (
    DIES,
    PAUSE_HS_MAX,
    Admin,
    Processes,
    Tools,
    begin,
    draw_plan,
    execute,
    targets_of,
)
from simulator.sidecar.host import SEED_BITS
from simulator.sidecar.world import HostedWorld
from simulator.turns import refusal_of


class HostedAdmins(Processes):
    """Lets admins set positions, and die; members and sidecars finish operations."""

    def __init__(self, world: HostedWorld) -> None:
        """Start without any."""
        super().__init__()
        self._world = world

    def strike(self) -> None:
        """Start an admin."""
        world = self._world
        rng = random.Random(world.rng.getrandbits(SEED_BITS))  # noqa: S311
        count = world.cluster.config.partition_count
        records_max = rng.randint(0, 3 * count + 2) if rng.random() < DIES else None
        number = len(self._admins) + 1
        admin = Admin(
            name=f"admin{number}",
            op_id=f"set {number}".encode().ljust(16, b".").hex(),
            rng=rng,
            for_ms=rng.choice([1, 2, PAUSE_HS_MAX]) * world.h,
            records_max=records_max,
        )
        self._admins.append(admin)
        plan = draw_plan(admin, cluster=world.cluster, places=world.places)
        world.positions.ask(bytes.fromhex(plan.op_id), targets_of(plan))
        world.trace(f"{admin.name} begins with {name_of(admin.op_id)}")

        def work(admin: Admin, tools: Tools) -> None:
            execute(plan, admin, tools=tools)

        begin(
            admin,
            work,
            loop=world.loop,
            cluster=world.cluster,
            on_append=lambda *_: None,
            on_end=partial(self._on_end, admin),
        )

    def _on_end(self, admin: Admin) -> None:
        assert admin.program is not None
        error = refusal_of(admin.program)
        is_killed = admin.program.is_killed
        how = "dies" if is_killed else "ends" if error is None else "gives up"
        self._world.trace(f"{admin.name} {how}")
        self._world.count(f"admin {how}")
