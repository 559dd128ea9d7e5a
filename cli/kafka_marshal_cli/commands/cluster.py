"""``marshal cluster``: the id and brokers of the cluster."""

import typer

from kafka_marshal_cli.render import Answer
from kafka_marshal_cli.shared import Call, command, wall_ms

app = typer.Typer(no_args_is_help=True)


@app.command("id", epilog="Example: marshal cluster id -b broker-1:9092")
@command()
def cluster_id(call: Call) -> None:
    """Print the cluster's id, its controller and its brokers."""
    with call.admin() as admin:
        cluster = admin.cluster()
    found = {
        "cluster_id": cluster.cluster_id,
        "controller_id": cluster.controller_id,
        "brokers": [f"{b.node_id}@{b.address}" for b in cluster.brokers],
    }
    as_of = {"time_ms": wall_ms(), "offsets": {}}
    call.answer(Answer(as_of, found))
