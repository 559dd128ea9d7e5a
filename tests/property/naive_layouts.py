"""Changes of the number of coordinating partitions, for the naive twin: PROTOCOL 10."""

from typing import Any

import msgspec
from naive_pauses import Ignored, Refused

RESERVED = ("/checkpoint", "/planner")
FIELDS = (
    *("generation", "format_id", "era", "cluster_id", "heartbeat_interval_ms"),
    *("K", "feature_level", "limits"),
)
LIMITS = (
    *("span", "max_pause_ms", "keys", "groups", "beats", "forget_ms"),
    *("locks", "operations"),
)


def config_of(frame):
    """Return the text form of the Config in a frame: header of three bytes, array."""
    values = msgspec.msgpack.decode(bytes.fromhex(frame)[3:])
    found = dict(zip(FIELDS, values, strict=True))
    found["format_id"] = found["format_id"].hex()
    found["limits"] = dict(zip(LIMITS, found["limits"], strict=True))
    return found


class Layouts:
    """The state of a change of the count, and its records; a base of ``Naive``."""

    # Attributes of ``Naive``.
    t: Any
    c: Any
    m: Any
    config: Any
    layout: Any
    keys: Any
    pauses: Any
    scheduled: Any
    scoped: Any
    verdicts: Any
    murmur: Any
    is_stale: Any
    has_level_2: Any
    end_pause: Any
    note_over: Any
    is_over: Any
    is_group_too_many: Any
    limit: Any
    directives: Any
    settings: Any
    plans: Any

    # --- Questions ---

    def place(self, key, count):
        """Return the partition of a key under a count."""
        return self.murmur(key) % count

    def sources(self, before, after):
        """Return the partitions whose keys may move to this one."""
        if self.t >= after:
            return []
        if before < after:  # growing: one source, for a target above them
            return [self.t % before] if self.t >= before else []
        return [t for t in range(after, before) if t % after == self.t]

    def is_retired(self):
        return self.config is not None and self.t >= self.config["K"]

    def elsewhere(self):
        return "retired" if self.is_retired() else "wrong_partition"

    def is_moving(self, key):
        if self.layout is None or key[1] in RESERVED:
            return False
        before, after = self.layout["from_count"], self.config["K"]
        return self.place(key, before) == self.t != self.place(key, after)

    def is_final(self, key):
        state = self.keys.get(key)
        if state is None or not self.is_moving(key) or state["lock"] is not None:
            return False
        return state["owner"] is None or self.is_stale(state)

    def is_importing(self, key):
        if self.layout is None or key[1] in RESERVED:
            return False
        source = self.place(key, self.layout["from_count"])
        return any(
            each["partition"] == source and each["done_ms"] is None
            for each in self.layout["sources"]
        )

    def is_importing_group(self, group):
        if self.layout is None:
            return False
        undone = [
            s["partition"] for s in self.layout["sources"] if s["done_ms"] is None
        ]
        if group == "marshal" and self.t >= self.layout["from_count"]:
            return bool(undone)
        return self.home(group, self.layout["from_count"]) in undone

    def home(self, group, count):
        return self.murmur(("", "\0group", group)) % count

    def new_place(self, key):
        """Return the detail of a claim that belongs elsewhere by a change, or None."""
        if self.layout is None and not self.is_retired():
            return None
        is_reserved = key[1] in RESERVED
        place = key[2] if is_reserved else self.place(key, self.config["K"])
        return {"generation": self.config["generation"], "partition": place}

    def needs_use(self):
        if self.is_retired():
            raise Refused("retired")

    def needs_no_change(self, ends=False):
        if self.layout is not None and not ends:
            raise Refused("busy")

    # --- Records ---

    def LayoutFence(self, entry, data, _key):  # noqa: N802
        old, new = self.config, config_of(data["config"])
        before, after = data["from_count"], new["K"]
        is_in_use = old is not None and self.t < before
        if is_in_use and not self.has_level_2():
            raise Ignored("level")
        if is_in_use and self.is_busy():
            raise Refused("busy")
        less, more = min(before, after), max(before, after)
        if less == more or more % less or self.t >= more or more > 10_000:
            raise Refused("config")
        is_timed = entry["timestamp_type"] == "LogAppendTime"
        m = max(0, entry["timestamp_ms"]) if is_timed else 0
        if self.t < before:
            m = self.m
        if new["era"] > m // 1000 + 24 * 60 * 60:
            raise Refused("config")
        if not is_in_use and (self.t == 0 or new["feature_level"] < 2):
            raise Refused("config")
        if old is not None and not self.follows(old, new, before):
            raise Refused("config")
        if new["feature_level"] > 2:
            self.halted = True
            return "halted", None
        self.drop_moved()
        if self.t >= before:
            self.drop_all()
            self.c, self.m = entry["timestamp_ms"], m
            self.w = entry["timestamp_ms"] if is_timed else None
        self.config = new
        self.end_all_pauses(entry["offset"])
        self.layout = {
            "op_id": data["op_id"],
            "from_count": before,
            "offset": entry["offset"],
            "sources": [
                {"partition": t, "imported_count": 0, "done_ms": None}
                for t in self.sources(before, after)
            ],
        }
        return "layout_fenced", None

    def is_busy(self):
        if self.t != 0:
            return self.layout is not None and self.is_unresolved()
        paused = self.pauses or self.scoped or any(self.scheduled.values())
        return bool(self.layout or paused or self.is_unresolved())

    def is_unresolved(self):
        locked = any(state["lock"] for state in self.keys.values())
        return locked or any(not one["resolved"] for one in self.verdicts.values())

    def end_all_pauses(self, offset):
        later = {(g, op) for g, found in self.scheduled.items() for op in found}
        for group in sorted({*self.pauses, *(g for g, _ in {*self.scoped, *later})}):
            if group in self.pauses:
                self.end_pause(offset, group)
            for _, op in sorted(each for each in self.scoped if each[0] == group):
                self.note_over(offset, group, op)
            waiting = self.scheduled.get(group, {})
            for op in sorted(waiting, key=lambda op: (waiting[op]["begin"], op)):
                self.note_over(offset, group, op)

    def follows(self, old, new, before):
        names = ("format_id", "cluster_id")
        if any(old[name] != new[name] for name in names) or new["era"] <= old["era"]:
            return False
        if self.t < before and old["K"] != before:
            return False
        ahead = new["generation"] - old["generation"]
        if self.t != 0:
            return ahead > 0
        same = ("heartbeat_interval_ms", "feature_level", "limits")
        return ahead == 1 and all(old[name] == new[name] for name in same)

    def drop_moved(self):
        """Drop the keys that moved away, as a Final does."""
        for key in [key for key in self.keys if self.is_moving(key)]:
            del self.keys[key]
        if self.layout is not None:
            self.drop_homes(self.layout["from_count"], self.config["K"])
        self.layout = None

    def drop_homes(self, before, after):
        """Drop settings, plans and directives of groups whose home moves away."""

        def leaves(group):
            return self.home(group, before) == self.t != self.home(group, after)

        self.settings = {g: one for g, one in self.settings.items() if not leaves(g)}
        self.plans = {g: one for g, one in self.plans.items() if not leaves(g)}
        self.directives = {
            name: one
            for name, one in self.directives.items()
            if name[0] == "marshal" or not leaves(name[0])
        }

    def drop_all(self):
        self.keys = {}
        self.pauses, self.scheduled, self.scoped = {}, {}, {}
        self.over, self.fences = [], []
        self.verdicts, self.directives, self.settings = {}, {}, {}
        self.plans = {}

    def layout_of(self, data):
        if self.layout is None or self.layout["op_id"] != data["op_id"]:
            raise Refused("layout")
        return self.layout

    def source_of(self, data):
        found = [
            each
            for each in self.layout_of(data)["sources"]
            if each["partition"] == data["source"]
        ]
        if not found:
            raise Refused(self.elsewhere())
        if found[0]["done_ms"] is not None:
            raise Refused("done")
        return found[0]

    def LayoutImport(self, _entry, data):  # noqa: N802
        source = self.source_of(data)
        found = []
        for item in data["items"]:
            key = (item["group_id"], item["topic"], item["partition"])
            before, after = self.layout["from_count"], self.config["K"]
            if (self.place(key, before), self.place(key, after)) != (
                data["source"],
                self.t,
            ):
                raise Refused("wrong_partition", key=key)
        for item in data["items"]:
            key = (item["group_id"], item["topic"], item["partition"])
            if source["imported_count"] >= self.limit("keys"):
                found.append((None, key, "limits"))
            elif key in self.keys:
                found.append((None, key, "known"))
            else:
                self.keys[key] = self.imported(item)
                source["imported_count"] += 1
                found.append(("imported", key, None))
        return found

    def LayoutGroups(self, _entry, data):  # noqa: N802
        self.source_of(data)
        before, after = self.layout["from_count"], self.config["K"]
        named = {item["group_id"] for item in data["settings"]}
        for item in data["directives"]:
            if item["group_id"] != "marshal" or self.t < before:
                named.add(item["group_id"])
        for group in named:
            homes = self.home(group, before), self.home(group, after)
            if homes != (data["source"], self.t):
                raise Refused("wrong_partition")
        found = []
        for item in data["settings"]:
            group = item["group_id"]
            if self.is_group_too_many(group):
                found.append((None, None, "limits"))
            elif group in self.settings:
                found.append((None, None, "known"))
            else:
                names = [name for name in item if name != "group_id"]
                self.settings[group] = {name: item[name] for name in names}
                found.append(("group_imported", None, None))
        found += [self.import_directive(item) for item in data["directives"]]
        return found

    def import_directive(self, item):
        name = item["group_id"], item["op_id"]
        if name in self.directives or self.is_over(*name):
            return None, None, "known"
        mine = [other for other in self.directives if other[0] == name[0]]
        if len(mine) == 64 or len(self.directives) >= self.limit("operations"):
            return None, None, "limits"
        names = (
            "client_id",
            "incarnation",
            "seq",
            "until_ms",
            "client",
            "host",
            "action",
        )
        one = {each.removesuffix("_ms"): item[each] for each in names}
        self.directives[name] = one
        return "group_imported", None, None

    def imported(self, item):
        h = self.config["heartbeat_interval_ms"]
        previous, successor = item["previous"], item["successor"]
        return {
            "owner": None,
            "epoch": 0,
            "renewed": self.c,
            "active": self.c,
            "h": h,
            "resume_hash": None,
            "position": item["position"],
            "granted": item["granted"],
            "topic_id": item["topic_id"],
            "retired": list(item["retired_topic_ids"]),
            "lock": None,
            "previous": previous
            and tuple(previous[x] for x in ("op_id", "position", "granted")),
            "handoff": successor and (successor, self.c + h // 2),
            "offer": None,
        }

    def LayoutDone(self, _entry, data, _key):  # noqa: N802
        source = self.source_of(data)
        if source["imported_count"] < data["key_count"]:
            raise Refused("incomplete")
        source["done_ms"] = self.m
        return "layout_done", None

    def LayoutFinal(self, _entry, data, _key):  # noqa: N802
        if any(each["done_ms"] is None for each in self.layout_of(data)["sources"]):
            raise Refused("incomplete")
        if self.is_unresolved():
            raise Refused("busy")
        self.drop_moved()
        return "layout_final", None
