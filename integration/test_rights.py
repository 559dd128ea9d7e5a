"""The rights of each role, as SECURITY.md lists them, against a real authorizer.

Each role begins without any right and is granted the rights that error messages name,
one at a time, until it works. These must be the rights of the table: no message names
too many, and none is missing from the table.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import attrs
import msgspec
import pytest
from domain import Domain, Recorder, opened
from waiting import eventually

from kafka_marshal import (
    Admin,
    CoordinationError,
    LogUnwritable,
    Marshal,
    PositionSpec,
    TopicPartition,
    World,
)
from kafka_marshal.admin.formatting import Format
from kafka_marshal.errors import LogUnreadable
from kafka_marshal.protocol.codec import encode
from kafka_marshal.testing.broker import EmbeddedBroker, free_ports

SECURITY = Path(__file__).resolve().parents[1] / "SECURITY.md"
ROLES = (
    *("member", "member without mirror", "client of a sidecar", "view", "pause"),
    *("reset", "format", "grow", "resize", "withdrawn"),
    *("fence", "drain", "cordon", "group settings", "alter", "upgrade"),
    "forget",
)
H_MS = 2_000
# Records before a right is withdrawn; as many follow.
FIRST = 5
RIGHT = re.compile(r"\b([A-Z_]+) on (topic|group)s? ([A-Za-z0-9._-]+)")
# Kafka grants these along with the others.
IMPLIED = {"DESCRIBE": {"READ", "WRITE", "ALTER", "CREATE"}}


class Right(NamedTuple):
    operation: str
    kind: str
    name: str


@attrs.frozen
class Role:
    """The task of one user of the broker.

    Attributes:
        user: Name of its principal.
        servers: The listener that requires a login.
        domain: Its domain, whose own clients have all rights.
        transport: What it reads and writes by.
    """

    user: str
    servers: str
    domain: Domain
    transport: str

    @property
    def options(self) -> dict[str, str]:
        return {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": self.user,
            "sasl.password": self.user,
        }

    @property
    def common(self) -> dict[str, object]:
        return {
            "coordination_topic": self.domain.topic,
            "options": self.options,
            "transport": self.transport,
        }


def words(*parts: str) -> str:
    return "-".join(part.replace(" ", "-") for part in parts)


@pytest.fixture(scope="module")
def listener():
    """A broker that knows a user for each role and transport; none has any right."""
    plain, sasl, controller = free_ports(3)
    users = [words(role, t) for role in ROLES for t in ("fast", "kafka-python")]
    known = " ".join(f'user_{user}="{user}"' for user in users)
    module = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    addresses = f"PLAINTEXT://127.0.0.1:{plain},SASL_PLAINTEXT://127.0.0.1:{sasl}"
    properties = {
        "listeners": f"{addresses},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": addresses,
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,"
        "SASL_PLAINTEXT:SASL_PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": f"{module} {known};",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer."
        "StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
    with EmbeddedBroker(port=plain, properties=properties) as broker:
        yield broker, f"127.0.0.1:{sasl}"


@pytest.fixture(scope="module")
def domain(listener, unique, transport):
    broker, _ = listener
    with opened(broker, unique, h_ms=H_MS, transport=transport) as domain:
        yield domain


# --- What each role does. It returns its missing rights. -----------------------------


def complaints(recorder: Recorder) -> list[str]:
    """Return the events about missing rights."""
    return [
        f"{event.name}: {text}"
        for event in list(recorder.events)
        for text in map(str, event.fields.values())
        if RIGHT.search(text)
    ]


def consume(role: Role, topic: str, group: str, **settings: object) -> list[str]:
    recorder = Recorder()
    # Records of an earlier attempt are not handed out again.
    role.domain.produce(topic, 5)
    (end,) = role.domain.of(topic).values()
    with Marshal(
        role.servers,
        group_id=group,
        client_id="w1",
        state_dir="",
        observer=recorder,
        **role.common,
        **settings,
    ) as marshal:
        consumer = marshal.consumer(topic)
        count = 0

        def is_over():
            nonlocal count
            count += sum(map(len, consumer.poll(timeout_ms=200).values()))
            return count >= 5 or complaints(recorder)

        eventually(is_over, "five records, or a complaint")
        consumer.commit()
        consumer.flush()
        if settings.get("mirror_offsets", True):
            eventually(
                lambda: (
                    complaints(recorder)
                    or end in role.domain.committed(group, topic).values()
                ),
                "the position is mirrored, or a complaint",
            )
    return complaints(recorder)


def view(role: Role, *_: str) -> list[str]:
    World.open(role.servers, **role.common)
    return []


def pause(role: Role, _: str, group: str) -> list[str]:
    with Admin(role.servers, **role.common) as admin:
        admin.pause_group(group, for_ms=60_000)
        admin.resume_group(group)
    return []


def claimed_before(role: Role, topic: str, group: str) -> None:
    """Let a member claim the topic's partitions and leave, once."""
    if not role.domain.states(group):
        with role.domain.marshal(group, "w1") as marshal:
            consumer = marshal.consumer(topic)
            eventually(consumer.assignment, "the claim")


def reset(role: Role, topic: str, group: str) -> list[str]:
    claimed_before(role, topic, group)
    with Admin(role.servers, **role.common) as admin:
        done = admin.execute(admin.plan_reset(group, PositionSpec.earliest()))
    return [] if done.mirror_error is None else [str(done.mirror_error)]


def beside_member(
    work: Callable[[Admin, str], object],
) -> Callable[[Role, str, str], list[str]]:
    """Return work of an admin on the group of a live member."""

    def act(role: Role, topic: str, group: str) -> list[str]:
        with role.domain.marshal(group, "w1") as marshal:
            consumer = marshal.consumer(topic)
            eventually(consumer.assignment, "the claim")
            with Admin(role.servers, **role.common) as admin:
                work(admin, group)
        return []

    return act


def alter(role: Role, topic: str, _: str) -> list[str]:
    name = f"{topic}-marshal"
    wanted = Format(partition_count=1, heartbeat_interval_ms=H_MS)
    with Admin(role.domain.servers, coordination_topic=name) as admin:
        admin.format_topic(wanted, ignore_formatted=True)
    with Admin(role.servers, **role.common | {"coordination_topic": name}) as admin:
        admin.alter_topic(heartbeat_interval_ms=2 * H_MS, execute=True)
    return []


def upgrade(role: Role, topic: str, _: str) -> list[str]:
    name = f"{topic}-marshal"
    wanted = Format(partition_count=1, heartbeat_interval_ms=H_MS)
    with Admin(role.domain.servers, coordination_topic=name) as admin:
        config = admin.format_topic(wanted, ignore_formatted=True)
    lowered = msgspec.structs.replace(
        config,
        generation=config.generation + 1,
        era=config.era + 1,
        feature_level=1,
    )
    role.domain.append(encode(lowered), topic=name)
    with Admin(role.servers, **role.common | {"coordination_topic": name}) as admin:
        assert admin.upgrade_topic(execute=True).level == 1
    return []


def forget(role: Role, topic: str, group: str) -> list[str]:
    claimed_before(role, topic, group)
    with Admin(role.servers, **role.common) as admin:
        admin.forget_keys(group, execute=True)
        assert admin.forget_keys(group, execute=True, allow_existing=True).keys
    return []


def grow(role: Role, topic: str, _: str) -> list[str]:
    with Admin(role.servers, **role.common) as admin:
        admin.grow_topic(topic, 2, settle_ms=0, execute=True)
    return []


def resize(role: Role, topic: str, _: str) -> list[str]:
    name = f"{topic}-marshal"
    wanted = Format(partition_count=1, heartbeat_interval_ms=H_MS)
    with Admin(role.domain.servers, coordination_topic=name) as admin:
        admin.format_topic(wanted, ignore_formatted=True)
    with Admin(role.servers, **role.common | {"coordination_topic": name}) as admin:
        admin.resize_topic(2, execute=True)
    return []


def format_topic(role: Role, topic: str, _: str) -> list[str]:
    common = role.common | {"coordination_topic": f"{topic}-marshal"}
    with Admin(role.servers, **common) as admin:
        wanted = Format(partition_count=1, heartbeat_interval_ms=H_MS)
        # An attempt that may write and not read has formatted it, and cannot know.
        admin.format_topic(wanted, ignore_formatted=True)
    return []


WORK: dict[str, Callable[[Role, str, str], list[str]]] = {
    "member": consume,
    "member without mirror": lambda role, topic, group: consume(
        role, topic, group, mirror_offsets=False
    ),
    "client of a sidecar": lambda role, topic, group: consume(
        role, topic, group, sidecar=role.domain.sidecar.address
    ),
    "view": view,
    "pause": pause,
    "reset": reset,
    "format": format_topic,
    "grow": grow,
    "resize": resize,
    "fence": beside_member(lambda admin, group: admin.fence_client(group, "w1")),
    "drain": beside_member(
        lambda admin, group: admin.drain("w1", group_id=group, for_ms=60_000)
    ),
    "cordon": beside_member(
        lambda admin, group: admin.cordon("w1", group_id=group, for_ms=60_000)
    ),
    "group settings": beside_member(
        lambda admin, group: admin.set_group(group, {"grace_ms": 1_000}, execute=True)
    ),
    "forget": forget,
    "alter": alter,
    "upgrade": upgrade,
}


def listed(role: str, names: dict[str, str]) -> set[Right]:
    """Return the rights of a role by the table, with the names of this test."""
    found = set()
    text = SECURITY.read_text(encoding="utf-8")
    table = text.partition("<!-- table: rights -->")[2].partition("\n\n")[0]
    for line in table.strip().splitlines()[2:]:
        name, resource, operations = (c.strip() for c in line.strip("|").split("|"))
        if name == role:
            kind = resource.partition(" ")[0]
            for operation in operations.split(", "):
                found.add(Right(operation, kind, names[resource]))
    assert found, f"{role} is not in the table"
    return found


def without_implied(rights: set[Right]) -> set[Right]:
    return {
        right
        for right in rights
        if not any(
            right._replace(operation=other) in rights
            for other in IMPLIED.get(right.operation, ())
        )
    }


def roles():
    """Return each role; most admins use the second transport only in a proof."""
    both = {"member", "member without mirror", "client of a sidecar", "view", "pause"}
    return [
        pytest.param(
            name, marks=[] if name in both else pytest.mark.proof("kafka-python")
        )
        for name in WORK
    ]


@pytest.mark.parametrize("name", roles())
def test_error_messages_name_exactly_the_rights_of_the_documented_table(
    listener, domain, unique, name
):
    _, servers = listener
    role = Role(words(name, domain.transport), servers, domain, domain.transport)
    topic, group = domain.data_topic(1), unique("group")
    granted: set[Right] = set()

    def try_it() -> Right | None:
        """Return the missing right, None if none is missing."""
        try:
            refused = WORK[name](role, topic, group)
        except (LogUnreadable, LogUnwritable, CoordinationError) as error:
            refused = [str(error)]
            assert RIGHT.search(refused[0]), refused
        return Right(*RIGHT.search(refused[0]).groups()) if refused else None

    def next_step() -> bool:
        missing = try_it()
        # A right takes effect a little after it was granted.
        if missing is not None and missing not in granted:
            domain.grant(
                role.user, missing.operation, kind=missing.kind, name=missing.name
            )
            granted.add(missing)
        return missing is None

    eventually(next_step, "it works", timeout_ms=240_000)
    has_own = name in {"format", "resize", "alter", "upgrade"}
    coordination = f"{topic}-marshal" if has_own else domain.topic
    names = {
        "topic `__marshal`": coordination,
        "topic of data": topic,
        "group of its name": group,
    }
    assert without_implied(granted) == listed(name, names)


@pytest.mark.parametrize("withdrawn", ["read log", "write log", "read data"])
def test_a_withdrawn_right_ends_a_member_and_loses_no_record(
    listener, domain, unique, withdrawn
):
    """The error names the right; when it is granted again, a new member continues."""
    _, servers = listener
    transport = domain.transport
    role = Role(words("withdrawn", transport), servers, domain, transport)
    topic, group = domain.data_topic(1), unique("group")
    rights = {
        "read log": Right("READ", "topic", domain.topic),
        "write log": Right("WRITE", "topic", domain.topic),
        "read data": Right("READ", "topic", topic),
        "group": Right("READ", "group", group),
    }
    for right in rights.values():
        domain.grant(role.user, right.operation, kind=right.kind, name=right.name)
    gone = rights[withdrawn]
    found: list[int] = []
    refused: list[Right] = []

    def consume_to(end: int) -> None:
        domain.produce(topic, end - domain.of(topic)[TopicPartition(topic, 0)])
        with Marshal(
            servers, group_id=group, client_id="w1", state_dir="", **role.common
        ) as marshal:
            consumer = marshal.consumer(topic)

            def is_over() -> bool:
                for records in consumer.poll(timeout_ms=200).values():
                    found.extend(record.offset for record in records)
                    consumer.commit(records)
                return len(set(found)) >= end

            eventually(is_over, f"{end} records")
            consumer.flush()
            if end == FIRST:
                domain.withdraw(
                    role.user, gone.operation, kind=gone.kind, name=gone.name
                )
                eventually(lambda: consumer.poll(timeout_ms=200), "it is refused")

    def begins() -> bool:
        try:
            consume_to(FIRST)
        except (LogUnreadable, LogUnwritable) as error:
            # Before the rights take effect, and after one is withdrawn.
            named = Right(*RIGHT.search(str(error)).groups())
            if found:
                refused.append(named)
        return bool(refused)

    eventually(begins, "it consumes, and is refused")
    assert refused == [gone]
    domain.grant(role.user, gone.operation, kind=gone.kind, name=gone.name)

    def continues() -> bool:
        try:
            consume_to(2 * FIRST)
        except (LogUnreadable, LogUnwritable):
            return False  # the right is not everywhere yet
        return True

    eventually(continues, "it continues")
    assert sorted(found) == [*range(2 * FIRST)]
