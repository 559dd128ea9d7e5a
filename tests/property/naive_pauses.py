"""The naive twin's pauses: PROTOCOL 4.8, 4.14, 4.15."""

from typing import Any

AHEAD_MS = 30 * 24 * 60 * 60 * 1000


class Refused(Exception):
    def __init__(self, reason, detail=None, key=None):
        super().__init__(reason)
        self.reason, self.detail, self.key = reason, detail, key


class Ignored(Exception):
    def __init__(self, reason):
        super().__init__(reason)
        self.reason = reason


class Pauses:
    """Begins, ends and judges pauses; a base of ``Naive``."""

    # Attributes of ``Naive``.
    m: Any
    config: Any
    pauses: Any
    scheduled: Any
    scoped: Any
    limit: Any
    is_over: Any
    is_group_too_many: Any
    note_over: Any
    needs_use: Any
    needs_no_change: Any

    def end_pauses(self, offset):  # 4.8
        for group in sorted(self.pauses):
            if self.m >= self.pauses[group]["until"]:
                self.end_pause(offset, group)
        for group, op in sorted(self.scoped):  # 4.15: behind the group's own
            if self.m >= self.scoped[group, op]["until"]:
                self.note_over(offset, group, op)

    def begin_pauses(self, offset):  # 4.14: only in groups without a pause
        for group in sorted(self.scheduled):
            by_begin = sorted(
                (pause["begin"], op)
                for op, pause in self.scheduled[group].items()
                if pause["scope"] is not None or group not in self.pauses
            )
            for _, op in by_begin:
                if self.m >= self.scheduled[group][op]["until"]:
                    self.note_over(offset, group, op)
            for begin, op in by_begin:
                pause = self.scheduled.get(group, {}).get(op)
                if pause is None or self.m < begin:
                    continue
                if pause["scope"] is not None:
                    self.unschedule(group, op)
                    self.scoped[group, op] = pause
                elif group not in self.pauses:
                    self.unschedule(group, op)
                    self.pauses[group] = pause

    def unschedule(self, group, op):
        self.scheduled.get(group, {}).pop(op, None)
        if not self.scheduled.get(group):
            self.scheduled.pop(group, None)

    def end_pause(self, offset, group):
        self.note_over(offset, group, self.pauses.pop(group)["op_id"])

    def is_paused(self, key):  # 2.3: a pause does not touch the planner key
        if key[1] != "/planner" and key[0] in self.pauses:
            return True
        return any(
            group == key[0] and name == key[1] and (not numbers or key[2] in numbers)
            for (group, _), pause in self.scoped.items()
            for name, numbers in map(dict.values, pause["scope"])
        )

    def scopes(self):  # 4.15: groups of pauses with a scope, also of scheduled ones
        later = [
            group
            for group, mine in self.scheduled.items()
            for pause in mine.values()
            if pause["scope"] is not None
        ]
        return later + [group for group, _ in self.scoped]

    def judge_scope(self, group, scope):
        count = self.scopes().count(group)
        if scope is None:
            return
        if count >= 8 or len(self.scopes()) >= self.limit("operations"):
            raise Refused("limits")

    def ReleaseGroup(self, entry, data, _key):  # noqa: N802 - 4.8
        if self.config is None:
            raise Refused("no_config")
        group, op = data["group_id"], data["op_id"]
        until = data["msg_expire_time"]
        self.needs_use()
        self.needs_no_change(ends=until <= self.m)  # 10.2
        if self.is_group_too_many(group):
            raise Refused("limits")
        if self.is_over(group, op):
            raise Refused("op_over")
        if until <= self.m and op in self.scheduled.get(group, ()):
            self.note_over(entry["offset"], group, op)  # 4.14: cancelled
            return "unpaused", None
        if until <= self.m and (group, op) in self.scoped:
            self.judge_sequence(self.scoped[group, op], data)
            self.note_over(entry["offset"], group, op)
            return "unpaused", None
        mine = self.scoped.get((group, op)) or self.scheduled.get(group, {}).get(op)
        if mine is not None and mine["scope"] is not None:
            raise Refused("busy")  # 4.15: another scope
        pause = self.pauses.get(group)
        if pause is not None and pause["op_id"] != op:
            raise Refused("busy")
        if pause is not None:
            self.judge_sequence(pause, data)
        if pause is None and until <= self.m:
            raise Refused("expired")
        if until <= self.m:
            self.end_pause(entry["offset"], group)
            return "unpaused", None
        self.unschedule(group, op)
        self.pauses[group] = self.paused(pause, data)
        return "paused", None

    def judge_sequence(self, pause, data):
        inc = data["incarnation"]
        is_later = inc == pause["incarnation"] and data["seq"] > pause["seq"]
        if inc in pause["seen"] and not is_later:
            raise Refused("old_seq")
        if inc not in pause["seen"] and len(pause["seen"]) >= 16:
            raise Refused("limits")

    def paused(self, before, data):
        seen = [] if before is None else before["seen"]
        inc = data["incarnation"]
        return {
            "op_id": data["op_id"],
            "client_id": data["client_id"],
            "incarnation": inc,
            "seq": data["seq"],
            "seen": seen if inc in seen else [*seen, inc],
            "until": min(data["msg_expire_time"], self.m + self.limit("max_pause_ms")),
            "scope": data.get("scope"),
        }

    def pause_scope(self, entry, data):  # 4.15, begins at once
        group, op = data["group_id"], data["op_id"]
        if self.is_group_too_many(group):
            raise Refused("limits")
        if self.is_over(group, op):
            raise Refused("op_over")
        later = self.scheduled.get(group, {}).get(op)
        own = self.pauses.get(group)
        lasts = own if own and own["op_id"] == op else self.scoped.get((group, op))
        ends = data["msg_expire_time"] <= self.m
        if later is None or not ends:
            for known in (later, lasts):
                if known and not ends and known["scope"] != data["scope"]:
                    raise Refused("busy")
            if lasts:
                self.judge_sequence(lasts, data)
            elif ends:
                raise Refused("expired")
            elif not later:
                self.judge_scope(group, data["scope"])
        if not ends:
            self.unschedule(group, op)
            self.scoped[group, op] = self.paused(lasts, data)
            return "paused", None
        if lasts and lasts is own:
            del self.pauses[group]
        self.note_over(entry["offset"], group, op)
        return "unpaused", None

    def PauseGroup(self, entry, data, key):  # noqa: N802 - 4.14
        if self.config is None or self.config["feature_level"] < 2:
            raise Ignored("level")
        group, op, begin = data["group_id"], data["op_id"], data["begin_time"]
        self.needs_use()
        self.needs_no_change(ends=max(begin, data["msg_expire_time"]) <= self.m)
        if begin <= self.m:
            if data["scope"] is not None:
                return self.pause_scope(entry, data)
            return self.ReleaseGroup(entry, data, key)
        if self.is_group_too_many(group) or begin > self.m + AHEAD_MS:
            raise Refused("limits")
        if self.is_over(group, op):
            raise Refused("op_over")
        if data["msg_expire_time"] <= begin:
            raise Refused("expired")
        until = min(data["msg_expire_time"], begin + self.limit("max_pause_ms"))
        mine = self.scheduled.get(group, {})
        if op in mine:
            known = tuple(mine[op][name] for name in ("begin", "until", "scope"))
            if known != (begin, until, data["scope"]):
                raise Refused("busy")
            return "scheduled", None
        if group in self.pauses and self.pauses[group]["op_id"] == op:
            raise Refused("busy")
        if (group, op) in self.scoped:
            raise Refused("busy")
        if len(mine) >= 4:
            raise Refused("limits")
        self.judge_scope(group, data["scope"])
        self.scheduled[group] = mine | {
            op: {
                "op_id": op,
                "client_id": data["client_id"],
                "incarnation": data["incarnation"],
                "seq": data["seq"],
                "seen": [data["incarnation"]],
                "until": until,
                "begin": begin,
                "scope": data["scope"],
            }
        }
        return "scheduled", None

    def lasting(self, group):
        own = [self.pauses[group]] if group in self.pauses else []
        names = sorted(name for name in self.scoped if name[0] == group)
        return own + [self.scoped[name] for name in names]
