"""A client in this process that works on a thread of its own."""

import threading

from domain import Recorder


class Member:
    """Handles records until it is closed, at least or at most once.

    Attributes:
        marshal: Its connection.
        seen: Every event of it.
        error: What has ended its thread before it was closed, None if nothing has.
    """

    def __init__(self, domain, group, name, *, topic, handled, delivery):
        self.seen = Recorder()
        self.error: BaseException | None = None
        self.marshal = domain.marshal(group, name, observer=self.seen)
        self._consumer = self.marshal.consumer(topic, delivery=delivery)
        self._ends = threading.Event()
        self._handled, self._commits = handled, delivery == "alo"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self._handle()
        except BaseException as error:
            self.error = error
            raise

    def _handle(self):
        while not self._ends.is_set():
            for records in self._consumer.poll(20).values():
                for record in records:
                    self._handled.append((record.partition, record.offset))
                    if self._commits:
                        self._consumer.commit(record)

    def close(self):
        self._ends.set()
        self._thread.join(60)
        self.marshal.close()
