"""The naive twin's Plans: PROTOCOL 9.2, 4.9."""

from typing import Any

from naive_pauses import Refused


class Plans:
    """Folds Plans into ``plans``; a base of ``Naive``."""

    # Attributes of ``Naive``.
    c: Any
    config: Any
    plans: Any
    limit: Any
    is_home: Any
    is_importing_group: Any
    elsewhere: Any
    is_group_too_many: Any
    groups_without_plans: Any

    def Plan(self, _entry, data, _key):  # noqa: N802 - 9.2
        group = data["group_id"]
        if not self.is_home(group):
            raise Refused(self.elsewhere())
        if self.is_importing_group(group):
            raise Refused("importing")
        generation, _ = self.plans.get(group, (0, None))
        if data["follows"] != generation:
            raise Refused("plan_overtaken")
        if self.is_group_too_many(group):
            raise Refused("limits")
        self.plans[group] = (generation + 1, self.c)
        return "planned", None

    def drop_plans(self):  # 4.9
        if self.config is None:
            return
        for group, (_, planned) in list(self.plans.items()):
            is_old = self.c - planned > self.limit("forget_ms")
            if is_old and group not in self.groups_without_plans():
                del self.plans[group]
