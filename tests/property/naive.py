"""A second fold, written from the text of the protocol alone: slow and obvious.

It reads the text form of a log, keeps plain dictionaries, has no index of anything
and shares not a line with the product, not even the hash. Where both agree on random
logs, a mistake is in the protocol itself or was made in both.

Numbers in comments are clauses of the protocol. Members are soft and informative:
the twin accepts any outcome of them (ANYTHING), but no other change of the state.
"""

from hashlib import sha256

from naive_growths import Growths
from naive_layouts import Layouts
from naive_pauses import Ignored, Pauses, Refused
from naive_plans import Plans
from naive_positions import Positions

DEFAULTS = {
    "span": 2**24,
    "max_pause_ms": 24 * 60 * 60 * 1000,
    "keys": 100_000,
    "groups": 10_000,
    "beats": 4096,
    "forget_ms": 30 * 24 * 60 * 60 * 1000,
    "locks": 10_000,
    "operations": 1000,
}
RESERVED = ("/checkpoint", "/planner")
LEVEL_2 = (
    *("PauseGroup", "FencingClient", "HandoffOffer", "HandoffReady"),
    *("Directive", "GroupSettings", "LayoutDone", "LayoutFinal", "Plan", "DataGrowth"),
)
SETTINGS = ("policy", "planner_version_max", "debounce_ms", "handoff_ms")
SETTINGS = ("generation", *SETTINGS, "handoffs_max", "grace_ms")
SEVERAL = (
    *("StagePosition", "DecidePosition", "ResolvePosition", "LayoutImport"),
    "LayoutGroups",
)
ANYTHING = "anything"
PAUSE = ("op_id", "client_id", "incarnation", "seq", "seen", "until")


def as_row(scope):
    """Return a scope as the array that it is on the wire."""
    return [[each["topic"], each["partitions"]] for each in scope]


def murmur3(data: bytes) -> int:
    """MurmurHash3 x86 32 bits, seed 0, unsigned."""

    def rotate(x, by):
        return ((x << by) | (x >> (32 - by))) & 0xFFFFFFFF

    def scramble(k):
        return rotate(k * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF

    h = 0
    whole = len(data) // 4 * 4
    for at in range(0, whole, 4):
        h = rotate(h ^ scramble(int.from_bytes(data[at : at + 4], "little")), 13)
        h = (h * 5 + 0xE6546B64) & 0xFFFFFFFF
    if data[whole:]:
        h ^= scramble(int.from_bytes(data[whole:], "little"))
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


class Naive(Growths, Layouts, Positions, Pauses, Plans):
    """The state of one coordinating partition."""

    def __init__(self, partition):
        self.t = partition
        self.next_offset = 0
        self.leader_epoch = None
        self.w = self.c = None
        self.m = 0
        self.config = None
        self.keys = {}
        self.pauses = {}
        self.scheduled = {}  # of each group: op to pause
        self.scoped = {}  # of each group and op: pause of some partitions
        self.over = []  # (offset, group, op) of ended operations, in log order
        self.verdicts = {}
        self.fences = []  # (offset, group, client, incarnation), in log order
        self.directives = {}  # of each group and op
        self.settings = {}  # of each group: all fields by name
        self.plans = {}  # of each group: generation, log time of the last Plan
        self.layout = None  # the open change of the count
        self.growths = {}  # of each topic and old count
        self.halted = False
        self.counters = {}

    # --- One entry ---

    def apply(self, entry):
        """Fold one entry in text form; return its transitions in text form."""
        if self.halted:
            return []
        self.move_clock(entry)
        self.end_pauses(entry["offset"])
        self.begin_pauses(entry["offset"])
        for group, op in sorted(self.directives):  # 9.7
            if self.m >= self.directives[group, op]["until"]:
                self.note_over(entry["offset"], group, op)
        self.drop_groups()
        payload = entry.get("payload")
        named = []
        if payload is None:
            transitions = [self.transition(entry, "undecodable", reason="undecodable")]
        elif payload["type"] == "Member":
            transitions = ANYTHING
        elif payload["type"] == "BatchHeartbeat":
            transitions = self.batch(entry, payload["data"], named)
        elif payload["type"] in SEVERAL:
            transitions = self.several(entry, payload["type"], payload["data"], named)
        else:
            transitions = [self.single(entry, payload["type"], payload["data"], named)]
        if not self.halted:
            self.next_offset = entry["offset"] + 1
            self.drop_groups()
            self.forget(named)
            self.drop_plans()
            self.drop_groups()
        return transitions

    def single(self, entry, kind, data, named):
        key = None
        if kind in LEVEL_2 and not self.has_level_2():  # 3.3
            return self.transition(entry, "ignored", reason="level")
        if "partition" in data and "topic" in data:
            key = (data["group_id"], data["topic"], data["partition"])
            named.append(key)
        try:
            effect, detail = getattr(self, kind)(entry, data, key)
        except Refused as refused:
            return self.transition(
                entry, "refused", reason=refused.reason, key=key, detail=refused.detail
            )
        except Ignored as ignored:
            return self.transition(entry, "ignored", reason=ignored.reason, key=key)
        if effect == "halted":
            return self.transition(entry, "halted", reason="halted")
        return self.transition(entry, "accepted", effect=effect, key=key, detail=detail)

    def several(self, entry, kind, data, named):
        """Fold a record that has one transition for each of its keys."""
        if not self.has_level_2():  # 3.3
            return [self.transition(entry, "ignored", reason="level")]
        try:
            found = getattr(self, kind)(entry, data)
        except Refused as refused:
            named.append(refused.key)
            return [
                self.transition(
                    entry,
                    "refused",
                    reason=refused.reason,
                    key=refused.key,
                    detail=refused.detail,
                )
            ]
        except Ignored as ignored:
            return [self.transition(entry, "ignored", reason=ignored.reason)]
        named += [key for _, key, _ in found]
        return [
            self.transition(entry, "accepted", effect=effect, key=key, detail=detail)
            if effect
            else self.transition(entry, "ignored", reason=detail, key=key)
            for effect, key, detail in found
        ]

    def transition(
        self, entry, outcome, *, effect=None, reason=None, key=None, detail=None
    ):
        self.count(effect or reason)
        state = self.keys.get(key)
        return {
            "partition": self.t,
            "offset": entry["offset"],
            "transition": outcome,
            "effect": effect,
            "reason": reason,
            "key": key and {"group_id": key[0], "topic": key[1], "partition": key[2]},
            "epoch": state["epoch"] if state else None,
            "detail": detail,
        }

    def count(self, name):
        self.counters[name] = self.counters.get(name, 0) + 1

    def move_clock(self, entry):  # 4.1
        now = entry["timestamp_ms"]
        if self.c is None:
            self.c = now
        if entry["leader_epoch"] != self.leader_epoch:
            self.leader_epoch = entry["leader_epoch"]
            self.w = None
        if entry["timestamp_type"] == "LogAppendTime":
            if self.w is None:
                self.w = now
            else:
                self.c += max(0, now - self.w)
                self.w = max(self.w, now)
            self.m = max(self.m, now)
        else:
            self.count("timestamp_type")

    def note_over(self, offset, group, op):  # 4.8, 13
        self.unschedule(group, op)
        self.scoped.pop((group, op), None)
        self.directives.pop((group, op), None)
        if self.pauses.get(group, {}).get("op_id") == op:
            del self.pauses[group]
        self.over.append((offset, group, op))
        mine = [note for note in self.over if note[1] == group]
        for note in mine[: len(mine) - 64]:
            self.over.remove(note)
        while len(self.over) > self.limit("operations"):
            self.over.remove(min(self.over))

    def drop_groups(self):  # 4.9
        for group in set(self.verdicts) - self.groups():
            del self.verdicts[group]

    def forget(self, named):  # 4.9
        if self.config is None or self.layout is not None:
            return
        silent = [
            (state["active"], key)
            for key, state in self.keys.items()
            if state["owner"] is None
            and state["lock"] is None
            and state["granted"] is None
            and self.c - state["active"] > self.limit("forget_ms")
            and key not in named
        ]
        for _, key in sorted(silent)[:8]:
            del self.keys[key]

    # --- Questions ---

    def limit(self, name):
        value = self.config["limits"].get(name)
        return DEFAULTS[name] if value is None else value

    def groups(self):
        return self.groups_without_plans() | set(self.plans)

    def groups_without_plans(self):
        with_keys = {key[0] for key in self.keys}
        undone = {name for name, one in self.verdicts.items() if not one["resolved"]}
        over = {group for _, group, _ in self.over}
        fenced = {fence[1] for fence in self.fences}
        paused = set(self.pauses) | set(self.scheduled) | {g for g, _ in self.scoped}
        paused |= {group for group, _ in self.directives}
        return with_keys | paused | over | undone | fenced | set(self.settings)

    def is_group_too_many(self, group):
        groups = self.groups()
        return group not in groups and len(groups) >= self.limit("groups")

    def is_over(self, group, op):
        return any(note[1:] == (group, op) for note in self.over)

    def is_fenced(self, data):  # 4.13
        process = (data["group_id"], data["client_id"], data["incarnation"])
        return any(fence[1:] == process for fence in self.fences)

    def is_home(self, group, *, before=False):  # 2.4, 10.2
        count = self.config["K"]
        if before and self.layout is not None:
            count = self.layout["from_count"]
        return murmur3(b"\0group\0" + group.encode()) % count == self.t

    def is_misplaced(self, key):  # 2.3
        _, topic, partition = key
        if topic in RESERVED:
            return partition != self.t
        return self.place(key, self.config["K"]) != self.t

    @staticmethod
    def murmur(key):
        _, topic, partition = key
        return murmur3(topic.encode() + b"\0" + str(partition).encode())

    def age(self, state):
        return self.c - state["renewed"]

    def is_stale(self, state):  # 4.2
        return self.age(state) > 2 * state["h"]

    # --- Claims ---

    def ClaimingPartition(self, entry, data, key):  # noqa: N802
        if self.config is None:
            raise Refused("no_config")
        if data["generation"] != self.config["generation"]:
            moved = self.layout is not None or self.is_retired()
            raise Refused("wrong_generation", self.new_place(key) if moved else None)
        self.judge_sender(data, key)
        if data["resume"] is not None:
            return self.resume(entry, data, key)
        state = self.keys.get(key)
        if state is None:
            is_full = len(self.keys) >= self.limit("keys")
            if is_full or self.is_group_too_many(key[0]):
                raise Refused("limits")
        if self.is_paused(key):
            raise Refused("paused")
        expected, topic_id = data["expected_epoch"], data["topic_id"]
        if state is None:
            if expected is not None:
                raise Refused("cas")
            state = {
                "position": None,
                "granted": None,
                "topic_id": None,
                "retired": [],
                "lock": None,
                "previous": None,
                "handoff": None,
                "offer": None,
            }
            self.keys[key] = state
        else:
            self.judge_known(data, state)
        self.install(entry, data, state)
        state["handoff"] = None
        if topic_id is not None and topic_id != state["topic_id"]:
            if state["topic_id"] is not None:
                state["retired"] = [*state["retired"], state["topic_id"]][-4:]
                state["position"] = state["granted"] = state["previous"] = None
            state["topic_id"] = topic_id
        return "claimed", None

    def judge_sender(self, data, key):  # 2.3, 4.13
        if self.is_misplaced(key):
            raise Refused(self.elsewhere(), self.new_place(key))
        is_unknown = key not in self.keys and data["resume"] is None
        if is_unknown and self.is_importing(key):  # 10.5
            raise Refused("importing")
        if self.is_fenced(data):
            raise Refused("sender_fenced")

    def judge_known(self, data, state):  # 4.3
        expected, topic_id = data["expected_epoch"], data["topic_id"]
        if state["lock"] is not None:
            raise Refused("locked")
        if state["handoff"] is not None:
            successor, deadline = state["handoff"]
            if self.c < deadline and successor != data["client_id"]:
                raise Refused("handoff")
        if state["owner"] is not None and not self.is_stale(state):
            if state["owner"] == (data["client_id"], data["incarnation"]):
                raise Refused("duplicate")
            left = 2 * state["h"] - self.age(state) + 1
            raise Refused("held", {"remaining_ms": left})
        if expected is not None and expected != state["epoch"]:
            raise Refused("cas")
        if topic_id is not None and topic_id in state["retired"]:
            raise Refused("old_topic")
        known = state["topic_id"]
        if None not in (topic_id, known) and topic_id != known and expected is None:
            raise Refused("cas")

    def resume(self, entry, data, key):  # 4.4
        if self.is_paused(key):
            raise Refused("paused")
        state, past = self.keys.get(key), data["resume"]
        if state is not None and state["lock"] is not None:
            raise Refused("locked")
        if (
            state is None
            or state["owner"] is None
            or state["owner"][0] != data["client_id"]
            or state["owner"][1] != past["incarnation"]
            or state["epoch"] != past["epoch"]
            or data["incarnation"] == past["incarnation"]
            or state["resume_hash"] != sha256(bytes.fromhex(past["secret"])).hexdigest()
        ):
            raise Refused("resume_mismatch")
        if not self.age(state) < state["h"]:
            raise Refused("resume_not_fresh")
        self.install(entry, data, state)
        return "resumed", None

    def install(self, entry, data, state):
        state["owner"] = (data["client_id"], data["incarnation"])
        state["epoch"] = entry["offset"]
        # 4.10: a later Config does not change the era of a claim.
        state["token"] = (self.config["era"], entry["leader_epoch"], entry["offset"])
        state["renewed"] = state["active"] = self.c
        state["h"] = self.config["heartbeat_interval_ms"]
        state["resume_hash"] = data["resume_hash"]
        state["offer"] = None  # 9.4: a claim ends any offer

    # --- Records of owners ---

    def owned(self, data, key):  # 2.3, 4.5
        if self.config is None:
            raise Ignored("not_owner")
        if self.is_final(key):  # 10.3
            raise Ignored("not_owner")
        if self.is_misplaced(key) and not self.is_moving(key):
            raise Ignored(self.elsewhere())
        state = self.keys.get(key)
        if state is None or state["owner"] != (data["client_id"], data["incarnation"]):
            raise Ignored("not_owner")
        if state["epoch"] != data["epoch"]:
            raise Ignored("old_epoch")
        return state

    def advance(self, state, position):
        if position is not None:
            old = state["position"]
            state["position"] = position if old is None else max(old, position)

    def renew(self, data, key):  # 4.5, 4.13
        state = self.keys[key]
        state["active"] = self.c
        if self.is_paused(key) or self.is_fenced(data) or self.is_moving(key):
            return "position_only"
        h = self.config["heartbeat_interval_ms"]
        if self.c + 2 * h >= state["renewed"] + 2 * state["h"]:
            state["renewed"], state["h"] = self.c, h
        return "renewed"

    def Heartbeat(self, _entry, data, key):  # noqa: N802
        state = self.owned(data, key)
        if data["rewind"] and data["position"] is not None:
            state["position"] = data["position"]
        else:
            self.advance(state, data["position"])
        return self.renew(data, key), None

    def batch(self, entry, data, named):  # 3.6, type 6
        if self.config is not None and len(data["beats"]) > self.limit("beats"):
            return [self.transition(entry, "refused", reason="limits")]
        transitions = []
        for epoch, position in data["beats"]:
            found = [
                key
                for key, state in self.keys.items()
                if state["epoch"] == epoch != 0 and key[0] == data["group_id"]
            ]
            key = found[0] if found else None
            named += found
            sender = (data["client_id"], data["incarnation"])
            is_over = key is not None and self.is_final(key)
            if key is None or self.keys[key]["owner"] != sender or is_over:
                transitions.append(
                    self.transition(entry, "ignored", reason="not_owner", key=key)
                )
            else:
                self.advance(self.keys[key], position)
                effect = self.renew(data, key)
                transitions.append(
                    self.transition(entry, "accepted", effect=effect, key=key)
                )
        return transitions

    def ReleasingPartition(self, _entry, data, key):  # noqa: N802
        state = self.owned(data, key)  # 4.6
        state["owner"] = state["offer"] = None
        self.advance(state, data["position"])
        state["active"] = self.c
        if data["successor"] is not None:
            deadline = self.c + self.config["heartbeat_interval_ms"] // 2
            state["handoff"] = (data["successor"], deadline)
        return "released", None

    def ForgettingPartition(self, _entry, data, key):  # noqa: N802 - 4.9
        if self.config is None:
            raise Refused("no_config")
        if self.is_moving(key):
            raise Refused("moving")
        if self.is_misplaced(key):
            raise Refused(self.elsewhere())
        if self.layout is not None:
            raise Refused("busy")
        state = self.keys.get(key)
        if state is None:
            raise Refused("cas")
        if state["lock"] is not None:
            raise Refused("locked")
        if state["owner"] is not None and not self.is_stale(state):
            left = 2 * state["h"] - self.age(state) + 1
            raise Refused("held", {"remaining_ms": left})
        if state["epoch"] != data["epoch"]:
            raise Refused("cas")
        del self.keys[key]
        return "forgotten", None

    def ClaimingMessages(self, _entry, data, key):  # noqa: N802
        state = self.owned(data, key)  # 4.7
        self.needs_no_pause(data, key)
        known = [x for x in (state["granted"], state["position"]) if x is not None]
        head = max(known) if known else data["first"]
        last = data["proposed_last_offset"]
        if last < head:
            raise Refused("nothing_left")
        if last - head >= self.limit("span"):
            raise Refused("span")
        state["granted"] = state["position"] = last + 1
        state["active"] = self.c
        return "granted", {"first": head, "last": last}

    # --- Groups and settings ---

    def Config(self, _entry, data, _key):  # noqa: N802 - 4.12, 3.3
        if self.t == 0:
            self.needs_no_change()
        old = self.config
        if old is not None:
            ahead = data["generation"] - old["generation"]
            is_next = ahead == 1 if self.t == 0 else ahead >= 1
            same = all(data[name] == old[name] for name in ("cluster_id", "format_id"))
            if not (is_next and same and data["K"] == old["K"]):
                raise Refused("config")
            if not data["era"] > old["era"]:
                raise Refused("config")
        if data["era"] > self.m // 1000 + 24 * 60 * 60:
            raise Refused("config")
        if data["feature_level"] > 2:
            self.halted = True
            return "halted", None
        self.config = data
        return "configured", None

    def GroupSettings(self, _entry, data, _key):  # noqa: N802 - 9.1
        group = data["group_id"]
        if not self.is_home(group):
            raise Refused(self.elsewhere())
        if self.is_importing_group(group):
            raise Refused("importing")
        before = self.settings.get(group, {"generation": 0})["generation"]
        if data["generation"] != before + 1:
            raise Refused("settings_overtaken")
        if self.is_group_too_many(group):
            raise Refused("limits")
        self.settings[group] = {name: data[name] for name in SETTINGS}
        return "group_configured", None

    def FencingClient(self, entry, data, _key):  # noqa: N802 - 4.13
        group = data["group_id"]
        self.needs_use()
        if self.is_group_too_many(group):
            raise Refused("limits")
        process = (group, data["fenced"], data["fenced_incarnation"])
        if all(fence[1:] != process for fence in self.fences):
            self.fences.append((entry["offset"], *process))
        mine = [fence for fence in self.fences if fence[1] == group]
        for fence in mine[: len(mine) - 64]:
            self.fences.remove(fence)
        while len(self.fences) > self.limit("operations"):
            self.fences.remove(min(self.fences))
        return "fenced", None

    # --- Handoff: 9.4 ---

    def has_level_2(self):
        return self.config is not None and self.config["feature_level"] >= 2

    def HandoffOffer(self, entry, data, key):  # noqa: N802
        state = self.owned(data, key)
        self.needs_no_pause(data, key)
        state["active"] = self.c
        if data["successor"] is None:
            state["offer"] = None
            return "offer_withdrawn", None
        state["offer"] = {
            "successor": data["successor"],
            "until_ms": self.c + min(data["within_ms"], 3_600_000),
            "offset": entry["offset"],
            "ready": None,
        }
        return "offered", None

    def needs_no_pause(self, data, key):
        if self.is_fenced(data):
            raise Refused("sender_fenced")
        if self.is_moving(key):
            raise Refused("moving")
        if self.is_paused(key):
            raise Refused("paused")

    def HandoffReady(self, _entry, data, key):  # noqa: N802
        state = self.keys.get(key)
        if state is None or state["epoch"] != data["epoch"]:
            raise Refused("old_epoch")
        if state["offer"] is None:
            raise Refused("no_offer")
        if state["offer"]["successor"] != data["client_id"]:
            raise Refused("not_successor")
        if self.c >= state["offer"]["until_ms"]:
            raise Refused("late")
        self.needs_no_pause(data, key)
        state["offer"]["ready"] = data["incarnation"]
        state["active"] = self.c
        return "ready", None

    def Directive(self, entry, data, _key):  # noqa: N802 - 9.7
        group, op = data["group_id"], data["op_id"]
        self.needs_use()
        if group != "marshal" and not self.is_home(group):
            raise Refused("wrong_partition")
        if self.is_importing_group(group):
            raise Refused("importing")
        if self.is_group_too_many(group):
            raise Refused("limits")
        if self.is_over(group, op):
            raise Refused("op_over")
        names = ("client", "host", "action")
        known = self.directives.get((group, op))
        ends = data["msg_expire_time"] <= self.m
        if known is None:
            mine = [name for name in self.directives if name[0] == group]
            if ends:
                raise Refused("expired")
            if len(mine) == 64 or len(self.directives) >= self.limit("operations"):
                raise Refused("limits")
        elif not ends and any(known[name] != data[name] for name in names):
            raise Refused("busy")
        elif (
            known["incarnation"] == data["incarnation"] and known["seq"] >= data["seq"]
        ):
            raise Refused("old_seq")
        if ends:
            self.note_over(entry["offset"], group, op)
            return "directive_ended", None
        until = min(data["msg_expire_time"], self.m + self.limit("max_pause_ms"))
        sender = {name: data[name] for name in ("client_id", "incarnation", "seq")}
        self.directives[group, op] = {
            **sender,
            "until": until,
            **{name: data[name] for name in names},
        }
        return "directed", None

    # --- The world: 3.8 ---

    def world(self):
        return {
            "next_offset": self.next_offset,
            "leader_epoch": self.leader_epoch,
            "log_time_ms": self.c,
            "config": self.config,
            "claims": [self.claim(key) for key in sorted(self.keys)],
            "pauses": [
                {
                    "group_id": group,
                    "op_id": pause["op_id"],
                    "client_id": pause["client_id"],
                    "until_ms": pause["until"],
                    "scope": pause["scope"],
                }
                for group in sorted(self.groups())
                for pause in self.lasting(group)
            ],
            "scheduled": [
                {
                    "group_id": group,
                    "op_id": op,
                    "client_id": pause["client_id"],
                    "begin_ms": pause["begin"],
                    "until_ms": pause["until"],
                    "scope": pause["scope"],
                }
                for group in sorted(self.scheduled)
                for op, pause in sorted(
                    self.scheduled[group].items(),
                    key=lambda item: (item[1]["begin"], item[0]),
                )
            ],
            "fences": [
                {
                    "group_id": group,
                    "client_id": client,
                    "incarnation": incarnation,
                    "offset": offset,
                }
                for group in sorted(self.groups())
                for offset, name, client, incarnation in sorted(self.fences)
                if name == group
            ],
            "directives": [
                {
                    "group_id": group,
                    "op_id": op,
                    "client_id": one["client_id"],
                    **{name: one[name] for name in ("client", "host", "action")},
                    "until_ms": one["until"],
                }
                for (group, op), one in sorted(self.directives.items())
            ],
            "settings": [
                {"group_id": group, **self.settings[group]}
                for group in sorted(self.settings)
            ],
            "plans": [
                {"group_id": group, "generation": count, "log_time_ms": at}
                for group, (count, at) in sorted(self.plans.items())
            ],
            "layout": self.layout,
            "growths": self.growth_rows(),
        }

    def claim(self, key):
        state = self.keys[key]
        freshness = age = owner = None
        if state["owner"] is not None:
            age = self.age(state)
            freshness = "fresh" if age < state["h"] else "unknown"
            freshness = "stale" if self.is_stale(state) else freshness
            owner = dict(zip(("client_id", "incarnation"), state["owner"], strict=True))
        return {
            "group_id": key[0],
            "topic": key[1],
            "partition": key[2],
            "owner": owner,
            "epoch": state["epoch"],
            "token": ".".join(map(str, self.token(state))),
            "position": state["position"],
            "granted": state["granted"],
            "freshness": freshness,
            "age_ms": age,
            "locked_by": state["lock"] and state["lock"]["op_id"],
            "offer": state["offer"]
            and {x: state["offer"][x] for x in ("successor", "until_ms", "ready")},
        }

    def token(self, state):  # 4.10: an imported key has the newest era
        return state["token"] if state["epoch"] else (self.config["era"], 0, 0)

    def operations(self):
        """Return the state of 4.13, 8 and 9, in the items of 4."""
        named = [(key, self.keys[key]) for key in sorted(self.keys)]
        return {
            "locks": {
                key: list(state["lock"].values())
                for key, state in named
                if state["lock"]
            },
            "previous": {
                key: list(state["previous"])
                for key, state in named
                if state["previous"]
            },
            "offers": {
                key: list(state["offer"].values())
                for key, state in named
                if state["offer"]
            },
            "schedules": {
                group: [
                    [pause["begin"], op]
                    + [pause[x] for x in ("client_id", "incarnation", "seq", "until")]
                    + ([as_row(pause["scope"])] if pause["scope"] else [])
                    for op, pause in sorted(
                        self.scheduled[group].items(),
                        key=lambda item: (item[1]["begin"], item[0]),
                    )
                ]
                for group in sorted(self.scheduled)
            },
            "scoped": {
                group: [
                    [pause[x] for x in PAUSE] + [as_row(pause["scope"])]
                    for pause in self.lasting(group)
                    if pause["scope"]
                ]
                for group in sorted({group for group, _ in self.scoped})
            },
            "over": {
                group: [[at, op] for at, name, op in self.over if name == group]
                for group in sorted(self.groups())
            },
            "verdicts": {
                group: list(self.verdicts[group].values())
                for group in sorted(self.verdicts)
            },
            "fences": {
                group: [[at, *who] for at, name, *who in self.fences if name == group]
                for group in sorted({fence[1] for fence in self.fences})
            },
            "directives": {
                group: [
                    [op, *one.values()]
                    for (name, op), one in sorted(self.directives.items())
                    if name == group
                ]
                for group in sorted({group for group, _ in self.directives})
            },
            "settings": {
                group: list(self.settings[group].values())
                for group in sorted(self.settings)
            },
            "plans": {group: list(one) for group, one in sorted(self.plans.items())},
        }
