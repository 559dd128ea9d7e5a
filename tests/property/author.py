"""Writes random logs that often reach the boundaries of rules.

Few clients, few keys, tiny limits; log time often stops exactly at a deadline, or one
millisecond before or after it. Each record depends on the state so far, as the naive
twin has it: the heartbeat of an owner needs the right epoch.

Every choice goes through ``pick``, so that the same author serves Hypothesis, which
shrinks a failure, and a plain seeded generator, which is fast.
"""

import base64
import random
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from naive import RESERVED, SETTINGS, Naive

from kafka_marshal.protocol.codec import encode_fields
from kafka_marshal.protocol.records import KINDS
from kafka_marshal.protocol.text import object_to_entry
from kafka_marshal.protocol.types import LogEntry

H = 10
START_MS = 1_000
FORGET_MS = 5 * H
GROUPS = ("g", "h", "marshal")
CLIENTS = ("c1", "c2", "c3")
TOPIC_IDS = (None, "0a" * 16, "0b" * 16, "0c" * 16)
SECRETS = ("5a" * 16, "5b" * 16)
OPS = ("e1" * 16, "e2" * 16, "e3" * 16, "e4" * 16, "e5" * 16, "e6" * 16)
PLANS = ("d1" * 16, "d2" * 16)
TINY = {
    "span": 4,
    "max_pause_ms": 6 * H,
    "keys": 4,
    "groups": 3,
    "beats": 3,
    "forget_ms": FORGET_MS,
    "locks": 2,
    "operations": 2,
}
SCOPES = (
    None,
    None,
    *[[{"topic": "t", "partitions": []}], [{"topic": "t", "partitions": [0, 2]}]],
    [{"topic": "t", "partitions": [1]}, {"topic": "u", "partitions": []}],
)
KINDS_BY_NAME = {kind.name: kind for kind in KINDS}
NO_LIMITS: dict[str, Any] = dict.fromkeys(TINY)
GARBAGE = (b"", b"\x01\x01\x00\xc1", b"\x02\x01\x00\x90", b"\x01\x63\x00\x90", b"{}")
MOVES = (
    *["claim"] * 6,
    *["beat"] * 9,
    *["batch"] * 3,
    *["release"] * 3,
    *["messages"] * 4,
    *["resume"] * 3,
    *["pause"] * 3,
    *["schedule"] * 2,
    *["offer"] * 4,
    *["ready"] * 4,
    *["stage"] * 6,
    *["decide"] * 3,
    *["resolve"] * 3,
    *["config", "config", "garbage", "member", "nobody", "drop", "fence", "settings"],
    *["direct"] * 2,
    *["plan"] * 2,
)
RESIZING = (
    *["layout_fence"] * 4,
    *["layout_final"] * 2,
    *["layout_import"] * 14,
    *["layout_groups"] * 4,
)
GROWING = ("grow",) * 30
GROWN_MAX = 2_048
PAUSED_MOVES = frozenset({"stage", "decide"})
OWNERS_MOVES = frozenset(
    {"beat", "batch", "release", "messages", "resume", "offer", "ready"}
)
Pick = Callable[[Sequence[Any]], Any]


def picker(choices: bytes) -> Pick:
    """Return a pick that uses one byte per choice, and the first option after them."""
    left = iter(choices)
    return lambda options: options[next(left, 0) % len(options)]


def incarnation(client, life):
    return f"{client}-{life}".encode().ljust(16, b".").hex()


class Author:
    """Writes one log in text form; the caller folds each entry with ``naive``."""

    def __init__(
        self,
        pick: Pick,
        naive: Naive,
        *,
        k: int = 1,
        may_halt: bool = False,
        resizes: bool = False,
        grows: bool = False,
    ):
        self.moves = (*MOVES, *RESIZING) if resizes else MOVES
        self.moves += GROWING if grows else ()
        self.resizes = resizes
        self.pick = pick
        self.naive = naive
        self.k = k
        self.offset = 0
        self.now = START_MS
        self.leader_epoch = 0
        self.may_halt = may_halt
        self.limits = pick((TINY, NO_LIMITS, TINY | {"groups": 2}))

    def write(self) -> dict[str, Any]:
        """Return the next entry."""
        may_configure = self.naive.config is None and self.pick((True,) * 4 + (False,))
        move = "config" if may_configure else self.pick(self.moves)
        if may_configure and self.resizes:
            move = self.pick(("config", "layout_fence"))
        is_owned = any(state["owner"] for state in self.naive.keys.values())
        if not is_owned and move in OWNERS_MOVES and self.pick((True, True, False)):
            move = "claim"
        move = self.rather(move)
        payload = getattr(self, move)()
        self.move_time()
        self.offset += self.pick((0, 0, 0, 0, 0, 2))
        entry = {
            "partition": self.naive.t,
            "offset": self.offset,
            "leader_epoch": self.leader_epoch,
            "timestamp_ms": self.now,
            "timestamp_type": self.pick(("LogAppendTime",) * 9 + ("CreateTime",)),
        }
        self.offset += 1
        if isinstance(payload, bytes):
            value = base64.b64encode(payload).decode()
            entry["undecodable"] = {"reason": "garbage", "value": value}
        else:
            entry["payload"] = payload
        return entry

    def rather(self, move):
        """Return a move that is mostly possible now: set positions need a pause."""
        is_locked = any(state["lock"] for state in self.naive.keys.values())
        is_open = any(not one["resolved"] for one in self.naive.verdicts.values())
        if is_locked or is_open:
            move = self.pick((move, move, move, "decide", "resolve", "stage"))
        elif move == "resolve" and self.pick((True,) * 5 + (False,)):
            move = "stage"
        has_pause = bool(self.naive.pauses)
        if not has_pause and move in PAUSED_MOVES and self.pick((True, True, False)):
            move = "pause"
        return move

    def move_time(self):
        if self.pick((False,) * 9 + (True,)):
            self.leader_epoch += 1
            self.now += self.pick((0, 1, -H, 10 * H))
        steps = [0, 0, 0, 1, 1, H - 1, H, H + 1, -1, -H]
        if self.naive.c is not None:
            steps += [step + self.pick((-1, 0, 1)) for step in self.ends()]
        self.now += self.pick(steps)

    def ends(self):
        """Return the time until a lease, pause or other deadline ends."""
        c = self.naive.c
        for state in self.naive.keys.values():
            if state["owner"] is not None:
                yield state["renewed"] + state["h"] - c
                yield state["renewed"] + 2 * state["h"] - c
                if state["offer"] is not None:
                    yield state["offer"]["until_ms"] - c
            else:
                yield state["active"] + FORGET_MS - c
                if state["handoff"] is not None:
                    yield state["handoff"][1] - c
        for pause in self.naive.pauses.values():
            yield pause["until"] - self.now
        for pause in (*self.naive.scoped.values(), *self.naive.directives.values()):
            yield pause["until"] - self.now
        for group in self.naive.scheduled.values():
            for pause in group.values():
                yield pause["begin"] - self.now

    # --- Senders and keys ---

    def sender(self):
        client = self.pick(CLIENTS)
        return {
            "client_id": client,
            "group_id": self.pick(GROUPS[:2]),
            "incarnation": incarnation(client, self.pick((0, 0, 1))),
            "seq": self.pick(range(4)),
        }

    def key(self):
        topic = self.pick(("t", "t", "t", "u", *RESERVED))
        here = self.naive.t
        number = self.pick((here, here, here, here + 1)) if topic in RESERVED else None
        return {
            "group_id": self.pick(GROUPS),
            "topic": topic,
            "partition": self.pick((0, 0, 1, 2)) if number is None else number,
        }

    def owner(self):
        """Return the claim fields of an owner, mostly a real one with its epoch."""
        fields = self.sender() | self.key() | {"epoch": self.pick(range(4))}
        known = sorted(self.naive.keys)
        owned = [key for key in known if self.naive.keys[key]["owner"] is not None]
        if known and self.pick((True,) * 6 + (False,)):
            key = self.pick(self.pick((owned, owned, owned, known)) or known)
            state = self.naive.keys[key]
            fields |= dict(zip(("group_id", "topic", "partition"), key, strict=True))
            fields["epoch"] = state["epoch"] - self.pick((0, 0, 0, 0, 0, 1))
            fields["epoch"] = max(0, fields["epoch"])
            if state["owner"] is not None and self.pick((True,) * 6 + (False,)):
                fields["client_id"], fields["incarnation"] = state["owner"]
        return fields

    def position(self):
        return self.pick((None, 0, 1, 2, 5, 9))

    @staticmethod
    def payload(kind, fields, *names):
        order = ("client_id", "group_id", "incarnation", "seq", *names)
        return {
            "type": kind,
            "version": 0,
            "data": {name: fields[name] for name in order},
        }

    # --- Moves ---

    def claim(self, resume=None):
        fields = self.sender() | self.key() | {"resume": resume}
        known = sorted(self.naive.keys)
        if known and self.pick((True, True, True, False)):
            key = self.pick(known)
            fields |= dict(zip(("group_id", "topic", "partition"), key, strict=True))
        generation = 1 if self.naive.config is None else self.naive.config["generation"]
        fields["generation"] = generation + self.pick((0,) * 9 + (1,))
        fields["topic_id"] = self.pick(TOPIC_IDS)
        secret = self.pick((None, *SECRETS))
        fields["resume_hash"] = secret and sha256(bytes.fromhex(secret)).hexdigest()
        key = (fields["group_id"], fields["topic"], fields["partition"])
        state = self.naive.keys.get(key)
        epoch = 0 if state is None else state["epoch"]
        fields["expected_epoch"] = self.pick(
            (None, None, epoch, epoch, epoch, epoch + 1)
        )
        if resume is not None:
            self.take_up(fields, state)
        return self.payload(
            "ClaimingPartition",
            fields,
            "generation",
            "topic",
            "partition",
            "topic_id",
            "resume_hash",
            "expected_epoch",
            "resume",
        )

    def resume(self):
        return self.claim(resume={})

    def take_up(self, fields, state):
        """Add a Resume to a claim, mostly one of the right earlier incarnation."""
        client, life = fields["client_id"], fields["incarnation"]
        epoch, secret = 0, self.pick(SECRETS)
        if state is not None:
            epoch = state["epoch"] + self.pick((0,) * 7 + (1,))
            if state["owner"] is not None:
                client, life = state["owner"]
            for known in SECRETS:
                right = sha256(bytes.fromhex(known)).hexdigest()
                if right == state["resume_hash"] and self.pick((True,) * 5 + (False,)):
                    secret = known
        if self.pick((True,) * 7 + (False,)):
            fields["client_id"] = client
            fields["incarnation"] = incarnation(client, self.pick((0, 1, 2)))
        fields["resume"] = {"incarnation": life, "epoch": epoch, "secret": secret}

    def beat(self):
        fields = self.owner() | {"position": self.position()}
        fields["rewind"] = self.pick((False, False, False, True))
        names = ("topic", "partition", "epoch", "position", "rewind")
        return self.payload("Heartbeat", fields, *names)

    def batch(self):
        fields = self.owner()
        sender = fields["client_id"], fields["incarnation"]
        epochs = [fields["epoch"], fields["epoch"], 99]
        for state in self.naive.keys.values():
            epochs += [state["epoch"]] * (4 if state["owner"] == sender else 1)
        count = self.pick((1, 2, 3, 3, 4))
        fields["beats"] = [[self.pick(epochs), self.position()] for _ in range(count)]
        return self.payload("BatchHeartbeat", fields, "beats")

    def release(self):
        fields = self.owner() | {"position": self.position(), "reason": None}
        fields["successor"] = self.pick((None, None, *CLIENTS))
        names = ("topic", "partition", "epoch", "position", "successor", "reason")
        return self.payload("ReleasingPartition", fields, *names)

    def offer(self):
        fields = self.owner()
        fields["successor"] = self.pick((*CLIENTS, None))
        fields["within_ms"] = self.pick((1, H, H, 3 * H, 9 * H, 3_600_001))
        names = ("topic", "partition", "epoch", "successor", "within_ms")
        return self.payload("HandoffOffer", fields, *names)

    def ready(self):
        """Return a HandoffReady, mostly of the successor in an open offer."""
        offered = [
            key for key in sorted(self.naive.keys) if self.naive.keys[key]["offer"]
        ]
        if not offered and self.pick((True, True, True, False)):
            return self.offer()
        fields = self.owner()
        if offered and self.pick((True,) * 5 + (False,)):
            key = self.pick(offered)
            state = self.naive.keys[key]
            fields |= dict(zip(("group_id", "topic", "partition"), key, strict=True))
            fields["epoch"] = state["epoch"]
            if self.pick((True,) * 4 + (False,)):
                fields["client_id"] = state["offer"]["successor"]
        return self.payload("HandoffReady", fields, "topic", "partition", "epoch")

    def drop(self):
        fields = self.owner()
        fields["client_id"] = "admin"
        return self.payload(
            "ForgettingPartition", fields, "topic", "partition", "epoch"
        )

    def messages(self):
        fields = self.owner() | {"grantee": "9a" * 16}
        key = (fields["group_id"], fields["topic"], fields["partition"])
        state = self.naive.keys.get(key, {"position": None, "granted": None})
        head = max(state["position"] or 0, state["granted"] or 0)
        fields["first"] = head + self.pick((0, 1))
        last = head + self.pick((-2, -1, -1, 0, 1, 3, 4, 5, 2**24 - 1, 2**24))
        fields["proposed_last_offset"] = max(0, last)
        names = ("topic", "partition", "epoch", "grantee", "first")
        return self.payload("ClaimingMessages", fields, *names, "proposed_last_offset")

    def fence(self):
        fields = self.owner() | {"reason": self.pick((None, "hung"))}
        fields["fenced"] = fields["client_id"]
        fields["fenced_incarnation"] = fields["incarnation"]
        fields["client_id"] = "admin"
        return self.payload(
            "FencingClient", fields, "fenced", "fenced_incarnation", "reason"
        )

    def direct(self):
        """Return a Directive that begins, changes or ends a drain or a cordon."""
        fields = self.sender() | {"op_id": self.pick(OPS), "reason": None}
        fields["group_id"] = self.pick(GROUPS)
        fields["action"] = self.pick(("drain", "cordon"))
        fields["client"], fields["host"] = self.pick((("c1", None), (None, "host")))
        until = self.naive.m + self.pick((-1, 0, 1, H, 2 * H, *[5 * H] * 3, 9 * H))
        fields["msg_expire_time"] = max(0, until)
        known = sorted(self.naive.directives)
        if known and self.pick((True, True, False)):
            fields["group_id"], fields["op_id"] = self.pick(known)
            one = self.naive.directives[fields["group_id"], fields["op_id"]]
            fields["seq"] = one["seq"] + self.pick((1, 1, 0))
            if self.pick((True, True, False)):
                fields |= {name: one[name] for name in ("client", "host", "action")}
        names = ("op_id", "client", "host", "action", "msg_expire_time", "reason")
        return self.payload("Directive", fields, *names)

    def settings(self):
        fields = self.sender() | {"reason": None}
        before = self.naive.settings.get(fields["group_id"], {"generation": 0})
        fields["generation"] = before["generation"] + self.pick((1, 1, 1, 2))
        fields["policy"] = self.pick((None, "fair", "planner"))
        for name in SETTINGS[2:]:
            fields[name] = self.pick((None, 1, 2**31 - 1))
        return self.payload("GroupSettings", fields, *SETTINGS, "reason")

    def plan(self):
        fields = self.sender() | {"topics": [], "moves": []}
        generation, _ = self.naive.plans.get(fields["group_id"], (0, None))
        fields["follows"] = max(0, generation + self.pick((0, 0, 0, -1, 1)))
        fields["slice_count"] = self.pick((1, 2, 3))
        fields["number"] = self.pick((0, 0, 1, 2))
        fields |= {"planner_version": 1, "input_digest": "00" * 16}
        fields["vector"] = [[self.naive.next_offset, 0]]
        if self.pick((True, False)):
            fields["topics"] = [{"topic": "t", "partition_total": 3}]
            fields["moves"] = [{"client_id": "c1", "keys": [[0, [0, 2]]]}]
        names = ("follows", "number", "slice_count", "planner_version", "vector")
        names = (*names, "input_digest", "topics", "moves")
        return self.payload("Plan", fields, *names)

    def pause(self):
        fields = self.sender() | {"op_id": self.pick(OPS), "reason": None}
        groups = [key[0] for key in sorted(self.naive.keys)]
        fields["group_id"] = self.pick(self.pick((groups, groups, GROUPS)) or GROUPS)
        pause = self.naive.pauses.get(fields["group_id"])
        if pause is not None and self.pick((True, True, False)):
            fields["op_id"] = pause["op_id"]
            fields["seq"] = pause["seq"] + self.pick((0, 1, 1))
            fields["incarnation"] = self.pick(
                (pause["incarnation"], fields["incarnation"])
            )
        until = self.naive.m + self.pick((-1, 0, 1, H, 2 * H, *[5 * H] * 3, 9 * H))
        fields["msg_expire_time"] = max(0, self.pick((0, *[until] * 9)))
        names = ("op_id", "msg_expire_time", "reason")
        return self.payload("ReleaseGroup", fields, *names)

    def schedule(self):
        pause = self.pause()
        data = pause["data"]
        mine = self.naive.scheduled.get(data["group_id"], {})
        lasting = {
            op: pause
            for (group, op), pause in self.naive.scoped.items()
            if group == data["group_id"]
        }
        known = mine | lasting
        data["scope"] = self.pick(SCOPES)
        if known and self.pick((True, True, False)):
            data["op_id"] = self.pick(sorted(known))
            scope = known[data["op_id"]]["scope"]
            data["scope"] = self.pick((scope, scope, data["scope"]))
            if self.pick((True, False)):
                del data["scope"]
                return pause  # it begins at once, ends, or cancels a scheduled one
        begin = self.naive.m + self.pick((-1, 0, 1, 1, H, H, 2 * H, 4 * H))
        far = self.naive.m + 30 * 86_400_000 + self.pick((0, 1))
        begin = max(0, self.pick((*[begin] * 15, far)))
        until = begin + self.pick((0, 1, H, H, 3 * H, 3 * H, 9 * H))
        if data["op_id"] in mine and self.pick((True, False)):
            begin, until = (mine[data["op_id"]][name] for name in ("begin", "until"))
        data |= {"begin_time": begin, "msg_expire_time": until}
        names = ("op_id", "begin_time", "msg_expire_time", "scope", "reason")
        return self.payload("PauseGroup", data, *names)

    def operation(self):
        """Return the operation fields of an admin, mostly of an open operation."""
        fields = self.sender() | {"op_id": self.pick(OPS)}
        fields["plan_digest"] = self.pick((*PLANS[:1] * 8, *PLANS[1:]))
        pauses = sorted(self.naive.pauses)
        if pauses and self.pick((True,) * 7 + (False,)):
            fields["group_id"] = self.pick(pauses)
            if self.pick((True,) * 7 + (False,)):
                fields["op_id"] = self.naive.pauses[fields["group_id"]]["op_id"]
        return fields

    def stage(self):
        fields = self.operation()
        group = fields["group_id"]
        known = [
            key
            for key in sorted(self.naive.keys)
            if key[0] == group and key[1] not in RESERVED
        ]
        free = [key for key in known if self.is_free(self.naive.keys[key])] or known
        if free and self.pick((True,) * 15 + (False,)):
            keys = {self.pick(self.pick((free, free, known)))}
        else:
            keys = {(group, self.pick("tu"), self.pick((0, 1, 2)))}
        if known and self.pick((True, False)):
            keys.add(self.pick(self.pick((free, known))))
        topics = {}
        for key in sorted(keys):
            state = self.naive.keys.get(key, {"topic_id": None, "lock": None})
            lock = state["lock"] or {"position": self.pick((0, 1, 5)), "topic_id": None}
            at = {"position": lock["position"], "topic_id": state["topic_id"]}
            if state["lock"] is not None:
                at["topic_id"] = lock["topic_id"]
            if self.pick((True,) + (False,) * 7):
                at["position"] += 1
            if self.pick((True,) + (False,) * 5):
                at["topic_id"] = self.pick(TOPIC_IDS)
            topic = topics.setdefault(key[1], at | {"topic": key[1], "positions": []})
            topic["positions"].append([key[2], at["position"]])
        order = ("topic", "topic_id", "positions")
        fields["topics"] = [
            {name: topic[name] for name in order} for topic in topics.values()
        ]
        return self.payload("StagePosition", fields, "op_id", "plan_digest", "topics")

    def is_free(self, state):
        return state["owner"] is None or self.naive.is_stale(state)

    def decide(self):
        fields = self.operation() | {"key_count": self.pick((1,) * 8 + (2,))}
        return self.payload(
            "DecidePosition", fields, "op_id", "plan_digest", "key_count"
        )

    def resolve(self):
        fields = self.operation() | {"decided": self.pick((None, 3)), "reason": None}
        open_ = [
            (key[0], state["lock"]["op_id"])
            for key, state in sorted(self.naive.keys.items())
            if state["lock"] is not None
        ]
        open_ += [(name, one["op_id"]) for name, one in self.naive.verdicts.items()]
        if open_ and self.pick((True,) * 5 + (False,)):
            fields["group_id"], fields["op_id"] = self.pick(open_)
        verdict = self.naive.verdicts.get(fields["group_id"])
        is_decided = verdict is not None and verdict["op_id"] == fields["op_id"]
        fields["commit"] = self.pick((is_decided,) * 2 + (not is_decided,))
        return self.payload(
            "ResolvePosition", fields, "op_id", "commit", "decided", "reason"
        )

    def config(self):
        old = self.naive.config
        generation, era = (0, 0) if old is None else (old["generation"], old["era"])
        bad = self.pick((None,) * 6 + ("K", "generation", "era", "format_id", "far"))
        far = self.naive.m // 1000 + 86_400 + self.pick((0, 1))
        levels = (2,) * 6 + (1,) * 3 + (3,) if self.may_halt else (*(2,) * 5, 1)
        level = self.pick(levels)
        data = {
            "generation": generation + (2 if bad == "generation" else 1),
            "format_id": ("bb" if bad == "format_id" else "ff") * 16,
            "era": far
            if bad == "far"
            else era + (0 if bad == "era" else self.pick((1, 1, 7))),
            "cluster_id": "cluster",
            "heartbeat_interval_ms": self.pick((H, H, H // 2, 2 * H)),
            "K": (self.k if old is None else old["K"])
            + (bad == "K" and old is not None),
            "feature_level": level,
            "limits": self.limits,
        }
        return {"type": "Config", "version": 0, "data": data}

    # --- Changes of the count ---

    def admin(self):
        layout = self.naive.layout
        ops = OPS[:2] if layout is None else (*[layout["op_id"]] * 9, *OPS[:1])
        return {
            "client_id": "admin",
            "group_id": "marshal",
            "incarnation": incarnation("admin", 0),
            "seq": 0,
            "op_id": self.pick(ops),
        }

    def layout_fence(self):
        """Return a LayoutFence, mostly one from the count in force."""
        data = self.config()["data"]
        old = self.naive.config
        before = (self.k if old is None else old["K"]) + self.pick((0,) * 9 + (1,))
        fewer = [count for count in range(1, before) if before % count == 0]
        counts = (2 * before, 2 * before, 3 * before, *fewer, *fewer, before)
        data["K"] = self.pick(counts)
        if old is not None and self.pick((True,) * 7 + (False,)):
            names = ("heartbeat_interval_ms", "feature_level", "limits", "format_id")
            data |= {name: old[name] for name in names}
        frame = encode_fields(
            KINDS_BY_NAME["Config"],
            [
                data["generation"],
                bytes.fromhex(data["format_id"]),
                data["era"],
                data["cluster_id"],
                data["heartbeat_interval_ms"],
                data["K"],
                data["feature_level"],
                list(data["limits"].values()),
            ],
        )
        fields = self.admin() | {"from_count": before, "config": frame.hex()}
        return self.payload("LayoutFence", fields, "op_id", "from_count", "config")

    def layout_import(self):
        """Return an import of keys, most of which belong here, or a Done."""
        fields = self.admin() | {"source_offset": 9, "digest": "dd" * 16}
        layout = self.naive.layout or {"sources": [], "from_count": 1}
        sources = [each["partition"] for each in layout["sources"]] or [0]
        fields["source"] = self.pick(sources) + self.pick((0,) * 9 + (1,))
        if self.pick((True,) * 4 + (False,)):
            items = [
                self.item(layout, fields["source"]) for _ in self.pick(("a", "ab"))
            ]
            names = ("op_id", "source", "source_offset", "items")
            return self.payload("LayoutImport", fields | {"items": items}, *names)
        known = [
            each["imported_count"]
            for each in layout["sources"]
            if each["partition"] == fields["source"]
        ]
        fields["key_count"] = (known or [0])[0] + self.pick((0, 0, 0, 1))
        names = ("op_id", "source", "source_offset", "key_count", "digest")
        return self.payload("LayoutDone", fields, *names)

    def layout_groups(self):
        """Return an import of settings and directives, most of which belong here."""
        fields = self.admin() | {"source_offset": 9}
        layout = self.naive.layout or {"sources": [], "from_count": 1}
        sources = [each["partition"] for each in layout["sources"]] or [0]
        fields["source"] = self.pick(sources)
        config = self.naive.config or {"K": 1}
        groups = ("g", "h", "i", "j", "marshal")
        mine = [
            group
            for group in groups
            if self.naive.home(group, layout["from_count"]) == fields["source"]
            and self.naive.home(group, config["K"]) == self.naive.t
        ]
        some = [self.pick(mine or groups) for _ in self.pick(("", "a", "ab"))]
        named = [
            self.pick((*(mine or groups), "marshal"))
            for _ in self.pick(("a", "ab") if not some else ("", "a", "ab"))
        ]
        fields["settings"] = [
            {"group_id": group, "generation": self.pick((1, 2)), "policy": "fair"}
            | {name: self.pick((None, 1)) for name in SETTINGS[2:]}
            for group in some
        ]
        fields["directives"] = [
            {
                "group_id": group,
                "op_id": self.pick(OPS),
                "client_id": "admin",
                "incarnation": incarnation("admin", 0),
                "seq": 0,
                "until_ms": max(0, self.naive.m + self.pick((-1, 1, H, 9 * H))),
                "client": self.pick(("c1", "c2")),
                "host": None,
                "action": "drain",
            }
            for group in named
        ]
        names = ("op_id", "source", "source_offset", "settings", "directives")
        return self.payload("LayoutGroups", fields, *names)

    def item(self, layout, source):
        keys = [("t", n) for n in range(8)] + [("u", n) for n in range(8)]
        config = self.naive.config or {"K": 1}
        mine = [
            key
            for key in keys
            if (self.naive.place(("", *key), layout["from_count"]) == source)
            and self.naive.place(("", *key), config["K"]) == self.naive.t
        ]
        topic, partition = self.pick(
            (mine or keys) if self.pick((1, 1, 1, 0)) else keys
        )
        previous = {"op_id": OPS[0], "position": 1, "granted": None}
        return {
            "group_id": self.pick(GROUPS),
            "topic": topic,
            "partition": partition,
            "position": self.position(),
            "granted": self.pick((None, None, 5)),
            "topic_id": self.pick(TOPIC_IDS),
            "retired_topic_ids": self.pick(([], [TOPIC_IDS[1]])),
            "previous": self.pick((None, None, previous)),
            "successor": self.pick((None, None, *CLIENTS)),
        }

    def grow(self):
        """Return a DataGrowth: announced, ended or withdrawn, mostly a known one."""
        fields = self.admin() | {
            "topic": self.pick(("t", "t", "u", "v")),
            "topic_id": self.pick((None, *TOPIC_IDS)),
            "old_count": self.pick((1, 2, 4, 8)),
            "ends": None,
        }
        fields["new_count"] = fields["old_count"] * self.pick((1, 2, 2, 2, 4))
        # A growth from more than 4,096 partitions, as hostile ones allow, is malformed.
        rows = self.naive.growths.items()
        known = sorted(name for name, row in rows if row["new_count"] <= GROWN_MAX)
        if known and self.pick((True, True, False)):
            row = self.naive.growths[self.pick(known)]
            fields |= {name: row[name] for name in ("topic", "topic_id")}
            count = self.pick(("new_count", "old_count"))
            fields["old_count"] = row[count]
            fields["new_count"] = row["new_count"] * (1 + (count == "new_count"))
            if self.pick((True, False, False)):
                fields["new_count"] = fields["old_count"]
        is_withdrawn = fields["new_count"] == fields["old_count"]
        if not is_withdrawn and self.pick((True, False)):
            fields["ends"] = [self.position() or 0 for _ in range(fields["old_count"])]
        fields["reason"] = None if is_withdrawn else "why"
        names = ("topic", "topic_id", "old_count", "new_count", "ends", "reason")
        return self.payload("DataGrowth", fields, *names)

    def layout_final(self):
        return self.payload("LayoutFinal", self.admin(), "op_id")

    def member(self):
        fields = self.sender()
        data = {name: fields[name] for name in fields} | {
            "topics": ["t"],
            "host": "host",
            "capacity": 1,
            "load": 0,
            "labels": {},
            "draining": False,
            "feature_level_max": 1,
            "plan_generation": None,
        }
        return {"type": "Member", "version": 0, "data": data}

    def garbage(self):
        return self.pick(GARBAGE)

    def nobody(self):
        fields = self.sender() | self.key() | {"epoch": 0, "position": 9}
        names = ("topic", "partition", "epoch", "position", "rewind")
        return self.payload("Heartbeat", fields | {"rewind": False}, *names)


def write_log(seed: int, entries: int = 60) -> list[LogEntry]:
    """Return the entries of a random log that never halts."""
    naive = Naive(0)
    author = Author(random.Random(seed).choice, naive)
    found = []
    for _ in range(entries):
        line = author.write()
        naive.apply(line)
        found.append(object_to_entry(line)[1])
    return found
