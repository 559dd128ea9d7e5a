"""Writes valid records of every type whose fields fit each other only by chance.

Many name keys, epochs and operations that exist: a hostile process that knows the log
could write them. The author of random logs mostly writes sensible records.
"""

from hashlib import sha256
from typing import Any

import msgspec
from author import CLIENTS, GROUPS, OPS, PLANS, SECRETS, TOPIC_IDS, Author, incarnation
from msgspec import inspect
from naive import RESERVED

from kafka_marshal.protocol.codec import Undecodable, decode, encode_fields
from kafka_marshal.protocol.records import KINDS
from kafka_marshal.protocol.text import record_to_object

UNKNOWN = {"Reset", "CheckpointBegin", "CheckpointChunk", "CheckpointEnd"}
"""What the naive twin has no opinion on."""
KINDS_BY_NAME = {kind.name: kind for kind in KINDS if kind.name not in UNKNOWN}
LEVELS = (1, 2, 2)
TRIES = 9
LARGEST = 2**64 - 1
OFTEN = 3
"""So much more probable is what the log knows."""


class Nonsense(Author):
    """Writes one log; two of three records have random fields."""

    def rather(self, move):
        if self.naive.config is not None and self.pick((True, True, False)):
            return "nonsense"
        return super().rather(move)

    def nonsense(self):
        for _ in range(TRIES):
            name = self.pick(sorted(KINDS_BY_NAME))
            kind = KINDS_BY_NAME[name]
            record = decode(encode_fields(kind, self.fields(kind.record)))
            if not isinstance(record, Undecodable):
                return record_to_object(record)
        return b"?"

    def fields(self, struct):
        info: Any = inspect.type_info(struct)
        return [self.value(each.type, each.name) for each in info.fields]

    def value(self, kind, name):
        """Return a random value of a field, in its form on the wire."""
        if isinstance(kind, inspect.UnionType):
            return self.one_of(kind, name)
        if isinstance(kind, inspect.StructType):
            return self.fields(kind.cls)
        if isinstance(kind, inspect.NamedTupleType):
            return [self.value(each.type, each.name) for each in kind.fields]
        if isinstance(kind, inspect.VarTupleType):
            count = max(kind.min_length or 0, self.pick((0, 1, 1, 2, 3)))
            return [self.value(kind.item_type, name) for _ in range(count)]
        if isinstance(kind, inspect.TupleType):
            return [self.value(each, name) for each in kind.item_types]
        if isinstance(kind, inspect.LiteralType):
            return self.pick(kind.values)
        if isinstance(kind, inspect.IntType):
            return self.number(kind, name)
        if isinstance(kind, inspect.BytesType):
            return self.bytes_of(kind, name)
        if isinstance(kind, inspect.BoolType):
            return self.pick((True, False))
        return {} if isinstance(kind, inspect.DictType) else self.text(name)

    def one_of(self, union, name):
        if name == "tags":
            return msgspec.UNSET
        is_none = [isinstance(each, inspect.NoneType) for each in union.types]
        if any(is_none) and self.pick((True, False, False)):
            return None
        some = [t for t, none in zip(union.types, is_none, strict=True) if not none]
        return self.value(some[0], name)

    def number(self, kind, name):
        least = kind.ge or 0
        most = LARGEST if kind.le is None else kind.le
        if name == "feature_level":
            return self.pick(LEVELS)  # a later one would halt the fold
        if self.pick((True, *(False,) * 11)):
            return self.pick((least, most, most - 1))
        some = [0, 1, 1, 2, 3, 4, 8, self.offset, *self.known(name) * OFTEN]
        return min(most, max(least, self.pick(some)))

    def known(self, name):
        """Return the numbers of a field that occur in the state."""
        naive, layout = self.naive, self.naive.layout or {"sources": []}
        if name in {"epoch", "expected_epoch"}:
            return [state["epoch"] for state in naive.keys.values()]
        if name in {"begin_time", "msg_expire_time", "until_ms"}:
            return [max(0, naive.m + more) for more in (-1, 0, 1, 10, 50)]
        found = {
            "generation": [naive.config["generation"], naive.config["generation"] + 1],
            "from_count": [naive.config["K"]],
            "source": [each["partition"] for each in layout["sources"]],
            "follows": [generation for generation, _ in naive.plans.values()],
        }
        return found.get(name, [])

    def text(self, name):
        if name == "group_id":
            return self.pick((*GROUPS, "g"))
        if name in {"topic", "topics"}:
            return self.pick(("t", "t", "t", "u", *RESERVED))
        if name == "policy":
            return self.pick(("fair", "planner"))
        return self.pick((*CLIENTS, "admin"))

    def bytes_of(self, kind, name):
        if name == "config":
            return bytes.fromhex(self.layout_fence()["data"]["config"])
        if kind.max_length != kind.min_length:
            return b"data"
        if kind.min_length == sha256().digest_size:
            return sha256(bytes.fromhex(self.pick(SECRETS))).digest()
        return bytes.fromhex(self.pick(self.idents(name)))

    def idents(self, name):
        naive = self.naive
        if name == "op_id":
            found = [pause["op_id"] for pause in naive.pauses.values()]
            found += [one["op_id"] for one in naive.verdicts.values()]
            found += [naive.layout["op_id"]] if naive.layout else []
            found += [s["lock"]["op_id"] for s in naive.keys.values() if s["lock"]]
            return [*OPS[:4], *found * OFTEN, *(op for _, _, op in naive.over)]
        if name.endswith("incarnation"):
            owners = [s["owner"][1] for s in naive.keys.values() if s["owner"]]
            lives = [incarnation(client, life) for client in CLIENTS for life in (0, 1)]
            return [*lives, *owners * OFTEN]
        if "topic_id" in name:
            return TOPIC_IDS[1:]
        if name == "secret":
            return SECRETS
        return ("ff" * 16,) if name == "format_id" else PLANS
