"""The naive twin's set positions: PROTOCOL 8.3 to 8.5."""

from typing import Any

from naive_pauses import Ignored, Refused


class Positions:
    """Stages, decides and resolves set positions; a base of ``Naive``."""

    # Attributes of ``Naive``.
    c: Any
    keys: Any
    pauses: Any
    verdicts: Any
    is_home: Any
    is_over: Any
    is_group_too_many: Any
    is_misplaced: Any
    is_moving: Any
    is_stale: Any
    age: Any
    elsewhere: Any
    limit: Any
    note_over: Any

    # --- Positions: section 8 ---

    def needs_pause(self, data):  # 8.3, 8.4
        group, op = data["group_id"], data["op_id"]
        if self.is_over(group, op):
            raise Refused("op_over")
        if group not in self.pauses or self.pauses[group]["op_id"] != op:
            raise Refused("not_paused")

    def StagePosition(self, _entry, data):  # noqa: N802 - 8.3
        locks = {}
        for topic in data["topics"]:
            for partition, position in topic["positions"]:
                key = (data["group_id"], topic["topic"], partition)
                lock = {name: data[name] for name in ("op_id", "plan_digest")}
                lock |= {"position": position, "topic_id": topic["topic_id"]}
                locks[key] = lock
        self.needs_keys_here(locks)
        self.needs_pause(data)
        for reason, applies in (
            ("unknown_key", lambda state, _: state is None),
            ("old_topic", lambda state, lock: lock["topic_id"] in state["retired"]),
            ("cas", self.is_another_topic),
            (
                "plan_mismatch",
                lambda state, lock: (
                    state["lock"] is not None
                    and state["lock"]["op_id"] == lock["op_id"]
                    and state["lock"] != lock
                ),
            ),
            (
                "locked",
                lambda state, lock: (
                    state["lock"] is not None
                    and state["lock"]["op_id"] != lock["op_id"]
                ),
            ),
            (
                "held",
                lambda state, _: (
                    state["owner"] is not None and not self.is_stale(state)
                ),
            ),
        ):
            for key, lock in locks.items():
                state = self.keys.get(key)
                if applies(state, lock):
                    detail = None
                    if reason == "held":
                        left = 2 * state["h"] - self.age(state) + 1
                        detail = {"remaining_ms": left}
                    raise Refused(reason, detail, key)
        locked = {key for key, state in self.keys.items() if state["lock"] is not None}
        if len(locked | set(locks)) > self.limit("locks"):
            raise Refused("limits")
        for key, lock in locks.items():
            state = self.keys[key]
            if state["lock"] is None:
                state["owner"] = state["handoff"] = state["offer"] = None
                state["lock"] = lock
                state["active"] = self.c
        return [
            ("staged", key, {"position": lock["position"]})
            for key, lock in locks.items()
        ]

    def needs_keys_here(self, keys):  # 10.3
        for key in keys:
            if self.is_moving(key):
                raise Refused("moving", key=key)
        for key in keys:
            if self.is_misplaced(key):
                raise Refused(self.elsewhere(), key=key)

    def is_another_topic(self, state, lock):
        ids = (state["topic_id"], lock["topic_id"])
        return None not in ids and ids[0] != ids[1]

    def DecidePosition(self, entry, data):  # noqa: N802 - 8.4
        group = data["group_id"]
        if not self.is_home(group, before=True):
            raise Refused(self.elsewhere())
        self.needs_pause(data)
        verdict = self.verdicts.get(group)
        if verdict is None or verdict["resolved"]:
            self.verdicts[group] = {
                "op_id": data["op_id"],
                "plan_digest": data["plan_digest"],
                "key_count": data["key_count"],
                "offset": entry["offset"],
                "resolved": False,
            }
        elif verdict["op_id"] != data["op_id"]:
            raise Refused("busy")
        elif any(verdict[x] != data[x] for x in ("plan_digest", "key_count")):
            raise Refused("plan_mismatch")
        return [("decided", None, None)]

    def ResolvePosition(self, entry, data):  # noqa: N802 - 8.5
        group, op, commits = data["group_id"], data["op_id"], data["commit"]
        is_over = self.is_over(group, op)
        is_home = self.is_home(group, before=True)
        verdict = self.verdicts.get(group) if is_home else None
        if verdict is not None and (verdict["resolved"] or verdict["op_id"] != op):
            verdict = None
        locked = [
            key
            for key, state in sorted(self.keys.items())
            if key[0] == group and state["lock"] and state["lock"]["op_id"] == op
        ]
        if is_over and not locked and verdict is None:
            raise Ignored("op_over")
        if is_home and commits and verdict is None:
            raise Refused("undecided")
        if is_home and not commits and verdict is not None:
            raise Refused("resolve_contradicts")
        if self.is_group_too_many(group):
            raise Refused("limits")
        found = []
        for key in locked:
            state = self.keys[key]
            if commits:
                self.set_position(state)
            state["lock"], state["active"] = None, self.c
            at = state["position"]
            detail = None if at is None else {"position": at}
            found.append(("position_set" if commits else "unlocked", key, detail))
        if group in self.pauses and self.pauses[group]["op_id"] == op:
            del self.pauses[group]
        if not is_over:
            self.note_over(entry["offset"], group, op)
        if verdict is not None:
            verdict["resolved"] = True
        return found or [("resolved", None, None)]

    def set_position(self, state):
        lock = state["lock"]
        state["previous"] = (lock["op_id"], state["position"], state["granted"])
        state["position"] = lock["position"]
        if state["granted"] is not None:
            state["granted"] = lock["position"]
        if state["topic_id"] is None:
            state["topic_id"] = lock["topic_id"]
