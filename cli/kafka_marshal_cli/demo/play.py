"""The whole demo: one broker, one round for each guarantee, and the verdict."""

import shutil
import signal
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import attrs

from kafka_marshal import Admin
from kafka_marshal.admin.formatting import Format
from kafka_marshal.deadline import Deadline
from kafka_marshal.testing.broker import EmbeddedBroker
from kafka_marshal.testing.jars import KAFKA_VERSION, fetch_note
from kafka_marshal_cli.demo.show import DELIVERIES, Show
from kafka_marshal_cli.demo.stage import DemoOptions, Plan, Stage
from kafka_marshal_cli.demo.verdict import Verdict, judge
from kafka_marshal_cli.follow_loop import handling

SCHEMA = 1
# With an interval of 2 s the demo ends within two minutes: both rounds together wait
# for about twenty intervals at worst.
BUDGET_S = 65.0
BUDGET_INTERVALS = 20
ROUNDS = (("alo", "payments", "billing"), ("amo", "notices", "notifier"))


@attrs.frozen(kw_only=True)
class Outcome:
    """The result of a demo.

    Attributes:
        options: Options of the demo.
        verdicts: One for each round.
        took_s: Total time.
        folder: Folder of journals and logs, None if they are not kept.
    """

    options: DemoOptions
    verdicts: tuple[Verdict, ...]
    took_s: float
    folder: Path | None

    @property
    def held(self) -> bool:
        """Whether every guarantee of every round held."""
        full = len(self.verdicts) == len(ROUNDS)
        return full and all(verdict.held for verdict in self.verdicts)

    def to_object(self) -> dict[str, Any]:
        """Return the verdict document."""
        return {
            "schema": SCHEMA,
            "held": self.held,
            "kafka": KAFKA_VERSION,
            "heartbeat_interval_ms": self.options.heartbeat_interval_ms,
            "partitions": self.options.partitions,
            "consumers": self.options.consumers,
            "seed": self.options.seed,
            "took_ms": round(self.took_s * 1000),
            "folder": None if self.folder is None else str(self.folder),
            "rounds": [verdict.to_object() for verdict in self.verdicts],
        }


def play(options: DemoOptions, show: Show) -> Outcome:
    """Run the whole demo; stop everything that it started, even after an error.

    Raises:
        MarshalError: The broker could not be started or prepared.
        KeyboardInterrupt: A signal ended the demo.
    """
    with ExitStack() as opened:
        opened.enter_context(handling((signal.SIGTERM, signal.SIGHUP), _interrupt))
        folder = Path(tempfile.mkdtemp(prefix="kafka-marshal-demo-"))
        if not options.keep:
            opened.callback(shutil.rmtree, folder, ignore_errors=True)
        opened.enter_context(show)
        broker = _start_broker(show)
        opened.callback(broker.stop)
        if options.keep:
            opened.callback(_keep_log, broker, folder)
        _format(broker.bootstrap_servers, options, show)
        interval_s = options.heartbeat_interval_ms / 1000
        budget_s = BUDGET_S + BUDGET_INTERVALS * interval_s
        deadline = Deadline(int(budget_s * 1_000))
        verdicts = []
        for delivery, topic, group_id in ROUNDS:
            show.step(f"-- {DELIVERIES[delivery].capitalize()}.")
            plan = Plan(
                delivery=delivery,
                topic=topic,
                group_id=group_id,
                folder=folder / delivery,
                deadline=deadline,
            )
            servers = broker.bootstrap_servers
            with Stage(plan, options, bootstrap_servers=servers, show=show) as stage:
                verdict = judge(stage.run())
            show.verdict(verdict)
            verdicts.append(verdict)
        kept = folder if options.keep else None
        return Outcome(
            options=options,
            verdicts=tuple(verdicts),
            took_s=show.elapsed_s,
            folder=kept,
        )


def _start_broker(show: Show) -> EmbeddedBroker:
    note = fetch_note()
    if note is not None:
        show.step(note)
    show.step(f"Starting Apache Kafka {KAFKA_VERSION}: one broker, on this machine.")
    broker = EmbeddedBroker().start()
    show.step(f"The broker serves at {broker.bootstrap_servers}.")
    return broker


def _format(bootstrap_servers: str, options: DemoOptions, show: Show) -> None:
    with Admin(bootstrap_servers, client_id="demo-admin") as admin:
        wanted = Format(heartbeat_interval_ms=options.heartbeat_interval_ms)
        config = admin.format_topic(wanted)
    interval_s = options.heartbeat_interval_ms / 1000
    show.step(
        f"Formatted __marshal: {config.partition_count} coordinating partitions, "
        f"heartbeat interval {interval_s:g} s. All coordination happens there."
    )


def _keep_log(broker: EmbeddedBroker, folder: Path) -> None:
    with suppress(OSError):
        shutil.copy(broker.log_path, folder / "broker.log")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal like an interrupt."""
    raise KeyboardInterrupt
