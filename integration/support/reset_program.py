"""Executes plans in child processes that are killed after some of their records.

It is forked for each line of standard input, so that modules are imported once.
"""

import json
import os
import signal
import sys
import time

from kafka_marshal import Admin
from kafka_marshal.admin.group_reset import read_plan
from kafka_marshal.engine.follower import Follower

SETTLE_S = 60


def die_after(count: int, *, is_settled: bool) -> None:
    """Kill this process instead of the record after ``count`` others.

    Args:
        count: Records that are appended.
        is_settled: Whether to wait until the brokers have all of these.
    """
    plain = Follower.append
    appended = []

    def append(self, partition, record):
        if len(appended) == count:
            deadline_s = time.monotonic() + SETTLE_S
            while is_settled and not all(each.append.is_done for each in appended):
                if time.monotonic() > deadline_s:
                    break
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        sent = plain(self, partition, record)
        appended.append(sent)
        return sent

    Follower.append = append


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            die_after(request["count"], is_settled=request["is_settled"])
            with Admin(request["servers"], coordination_topic=request["topic"]) as one:
                one.execute(read_plan(request["plan"]))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(json.dumps({"signal": os.WTERMSIG(status)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
