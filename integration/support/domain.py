"""A coordination topic of its own, with data topics, for one test or module."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager

from history import History
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as Place
from kafka.admin import (
    ACL,
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ConfigResource,
    ConfigResourceType,
    KafkaAdminClient,
    ResourcePattern,
    ResourcePatternFilter,
    ResourceType,
)
from sidecars import Sidecar, start_sidecar
from waiting import eventually

from kafka_marshal import Admin, Marshal, TopicPartition, World
from kafka_marshal.admin.formatting import Format
from kafka_marshal.kafka_io.patches import request_updates_once
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topic_rules import coordination_configs
from kafka_marshal.kafka_io.topics import KafkaTopicAdmin
from kafka_marshal.ports import Event, Observer
from kafka_marshal.protocol.state import KeyState
from kafka_marshal.protocol.types import Key

# A claim survives if its process gets no processor for almost two intervals. A test
# that needs more sets a longer interval, and waits longer for takeovers.
HEARTBEAT_MS = 2_000


class Recorder(Observer):
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def observe(self, event: Event) -> None:
        self.events.append(event)

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]


class Domain:
    """One coordination domain on a shared broker.

    Attributes:
        servers: The broker.
        topic: The coordination topic, formatted by default.
        produced: Number of records written, by data partition.
        transport: The transport of the library by default.
        via: Where claims come from: ``direct``, or a ``sidecar`` of this domain.
        replication: Number of copies of data topics, and of a coordination topic
            that is made by hand.
    """

    def __init__(
        self,
        servers: str,
        unique: Callable[[str], str],
        *,
        h_ms: int = HEARTBEAT_MS,
        partitions: int = 4,
        is_formatted: bool = True,
        transport: str = "auto",
        via: str = "direct",
        replication: int = 1,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        self.via = via
        self.replication = replication
        self.servers = servers
        self.transport = transport
        self.unique = unique
        self.h_ms = h_ms
        self.topic = unique("marshal")
        self.produced: dict[TopicPartition, int] = {}
        self.topics = KafkaTopicAdmin(ConnectionConfig(servers))
        self._producer = KafkaProducer(bootstrap_servers=servers, linger_ms=20)
        # Tests delete topics that it has written to.
        request_updates_once(self._producer)
        self._kafka: KafkaAdminClient | None = None
        self._history: History | None = None
        self._sidecars = ExitStack()
        self._sidecar: Sidecar | None = None
        if is_formatted:
            with self.admin() as admin:
                admin.format_topic(
                    Format(
                        partition_count=partitions,
                        heartbeat_interval_ms=h_ms,
                        limits=limits or {},
                    )
                )

    def make_coordination_topic(self, partitions: int, **configs: str) -> None:
        """Create the coordination topic without formatting it."""
        self.topics.create(
            self.topic,
            partitions=partitions,
            replication=self.replication,
            configs=coordination_configs(self.replication) | configs,
        )

    def alter_coordination_topic(self, name: str, value: str) -> None:
        """Change a setting of the coordination topic under running clients."""
        resource = ConfigResource(
            ConfigResourceType.TOPIC, self.topic, configs={name: value}
        )
        self.kafka.alter_configs([resource])

    def grant(self, user: str, operation: str, *, kind: str, name: str) -> None:
        """Give a user a right, in the terms of Kafka's ACLs."""
        pattern = ResourcePattern(ResourceType[kind.upper()], name)
        self.kafka.create_acls([_acl(ACL, user, operation, pattern)])

    def withdraw(self, user: str, operation: str, *, kind: str, name: str) -> None:
        """Take a right away again."""
        pattern = ResourcePatternFilter(
            ResourceType[kind.upper()], name, ACLResourcePatternType.LITERAL
        )
        self.kafka.delete_acls([_acl(ACLFilter, user, operation, pattern)])

    # --- data

    def data_topic(self, partitions: int, records_each: int = 0) -> str:
        """Make a data topic with some records in each partition."""
        name = self.unique("data")
        self.topics.create_data_topic(
            name, partitions=partitions, replication=self.replication
        )
        for number in range(partitions):
            self.produced[TopicPartition(name, number)] = 0
        self.produce(name, records_each)
        return name

    def produce(self, topic: str, records_each: int) -> None:
        """Append records to each partition that the topic is known to have."""
        for place in self.of(topic):
            self.produce_to(place, records_each)

    def produce_to(self, place: TopicPartition, count: int) -> None:
        """Append records to one partition and wait until the broker has them."""
        first = self.produced[place]
        for number in range(first, first + count):
            value = b"%d" % number
            self._producer.send(place.topic, value, partition=place.partition)
        self.produced[place] = first + count
        self._producer.flush(timeout=60)

    def of(self, topic: str) -> dict[TopicPartition, int]:
        """Return the number of records produced to a topic, by partition."""
        return {p: count for p, count in self.produced.items() if p.topic == topic}

    def append(self, value: bytes, *, t: int = 0, topic: str | None = None) -> None:
        """Write raw bytes to a coordination topic, as a foreign program would."""
        self._producer.send(topic or self.topic, value, partition=t).get(timeout=60)

    @property
    def kafka(self) -> KafkaAdminClient:
        """A plain admin client."""
        if self._kafka is None:
            self._kafka = KafkaAdminClient(bootstrap_servers=self.servers)
        return self._kafka

    def committed(self, group_id: str, topic: str) -> dict[TopicPartition, int]:
        """Return the group's committed offsets in Kafka."""
        found = self.kafka.list_group_offsets({group_id: None})[group_id]
        return {
            TopicPartition(*place): entry.offset
            for place, entry in found.items()
            if place.topic == topic and entry.offset >= 0
        }

    def read_committed(self, topic: str) -> Counter[bytes]:
        """Return how often a topic has each value, once no transaction is open."""
        reader = KafkaConsumer(
            bootstrap_servers=self.servers, isolation_level="read_committed"
        )
        plain = KafkaConsumer(bootstrap_servers=self.servers)
        with closing(reader), closing(plain):
            places = [Place(*place) for place in self.of(topic)]
            reader.assign(places)
            reader.seek_to_beginning(*places)
            ends, found = plain.end_offsets(places), Counter[bytes]()

            def has_read_all() -> bool:
                for records in reader.poll(timeout_ms=100).values():
                    found.update(record.value for record in records)
                return all(reader.position(each) >= ends[each] for each in places)

            eventually(has_read_all, f"{topic} is read to its end")
            return found

    def commit(self, group_id: str, place: TopicPartition, offset: int) -> None:
        """Commit an offset as an ordinary Kafka consumer does."""
        from kafka.structs import OffsetAndMetadata

        consumer = KafkaConsumer(bootstrap_servers=self.servers, group_id=group_id)
        try:
            consumer.assign([Place(*place)])
            consumer.commit({Place(*place): OffsetAndMetadata(offset, "", -1)})
        finally:
            consumer.close(autocommit=False)

    # --- the library

    def admin(self, **options: object) -> Admin:
        return Admin(
            self.servers,
            coordination_topic=self.topic,
            **({"transport": self.transport} | options),
        )

    def marshal(self, group_id: str, client_id: str, **options: object) -> Marshal:
        """Open a client; without a state directory unless one is given."""
        usual = {
            "state_dir": "",
            "transport": self.transport,
            "sidecar": self.sidecar_address,
        }
        return Marshal(
            self.servers,
            group_id=group_id,
            client_id=client_id,
            coordination_topic=self.topic,
            **(usual | options),
        )

    @property
    def sidecar_address(self) -> str | None:
        """The address of this domain's sidecar, None without one."""
        return self.sidecar.address if self.via == "sidecar" else None

    @property
    def sidecar(self) -> Sidecar:
        """The sidecar of this domain, started when it is first asked for."""
        if self._sidecar is None:
            self._sidecar = self._sidecars.enter_context(start_sidecar(self))
        return self._sidecar

    def world(self, **options: object) -> World:
        return World.at(
            self.servers,
            coordination_topic=self.topic,
            **({"transport": self.transport} | options),
        )

    def history(self) -> History:
        """The log folded to its end; always the same object."""
        if self._history is None:
            self._history = History(self.servers, self.topic)
        return self._history.read()

    def forget_history(self) -> None:
        """Make the next `history` read from the start, after the log was truncated."""
        if self._history is not None:
            self._history.close()
            self._history = None

    def states(self, group_id: str) -> dict[Key, KeyState]:
        """Return the present state of a group's keys by the log."""
        return self.history().states(group_id)

    def owners(self, group_id: str) -> dict[TopicPartition, str | None]:
        """Return owners by the log; for claims of the sidecar, its clients."""
        owners = {
            key.topic_partition: None if known.owner is None else known.owner.client_id
            for key, known in self.states(group_id).items()
        }
        if self._sidecar is None:
            return owners
        local = self._sidecar.assigned(group_id)
        name = self._sidecar.client_id
        return {
            place: local.get(place, owner) if owner == name else owner
            for place, owner in owners.items()
        }

    def wait_owned(self, group_id: str, topic: str, *, by: set[str]) -> dict:
        """Wait until every partition is owned, and these clients own some."""
        wanted = set(self.of(topic))

        def look():
            owners = {p: c for p, c in self.owners(group_id).items() if c is not None}
            is_all = wanted <= set(owners)
            return owners if is_all and {owners[p] for p in wanted} == by else None

        return eventually(look, f"{sorted(by)} own all of {topic}")

    def close(self) -> None:
        self._sidecars.close()
        self._producer.close(timeout=5)
        self.topics.close()
        if self._kafka is not None:
            self._kafka.close()
        if self._history is not None:
            self._history.close()


def _acl(kind: type, user: str, operation: str, pattern: object) -> ACL:
    return kind(
        principal=f"User:{user}",
        host="*",
        operation=ACLOperation[operation],
        permission_type=ACLPermissionType.ALLOW,
        resource_pattern=pattern,
    )


@contextmanager
def opened(broker, unique, **settings: object) -> Iterator[Domain]:
    """A domain on a broker, closed at the end."""
    domain = Domain(broker.bootstrap_servers, unique, **settings)
    try:
        yield domain
    finally:
        domain.close()
