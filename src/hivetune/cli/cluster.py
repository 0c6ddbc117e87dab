"""`hivetune cluster up`, `status` and `down`: several machines whose devices compute a step together."""

from dataclasses import asdict
from typing import Annotated

import typer

from hivetune.cli.output import emit, say, show, table
from hivetune.cluster.node import Joining, end_node, start_node, view_own
from hivetune.errors import UsageError
from hivetune.machine.cluster import token_path


def up(
    join: Annotated[str | None, typer.Option("--join", metavar="HOST:PORT", help="Join this cluster.")] = None,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST[:PORT]", help="This machine's address for the others.")
    ] = None,
    devices: Annotated[
        str, typer.Option("--devices", metavar="LIST", help="auto, none, or for example cuda:0,cuda:1 or cpu,cpu.")
    ] = "auto",
    python: Annotated[
        str | None, typer.Option("--python", metavar="PATH", help="The environment that computes; default: this one.")
    ] = None,
    redis: Annotated[
        str | None, typer.Option("--redis", metavar="URL", help="Keep the head's state there, so that it may die.")
    ] = None,
) -> None:
    """Begin a cluster with this machine as its head, or join one. Others reach it only with --listen and its token."""
    if join is not None and listen is not None:
        raise UsageError("--listen is the head's; a machine that joins has the address that reaches it")
    membership, warnings = start_node(Joining(listen or "127.0.0.1", join, devices, python, redis))
    for text in warnings:
        say(f"warning: {text}")
    offered = ", ".join(membership.devices) or "no device"
    show(f"this machine is {'the head of' if membership.head else 'in'} the cluster at {membership.address}: {offered}")
    if membership.head and listen is not None:
        show(f"others join with {token_path()} copied to them: hivetune cluster up --join {membership.address}")
    show(f"a run uses it with: hivetune train CONFIG --set workers={membership.address}")
    show(f"whole runs, one on each device: hivetune sweep CONFIG --over KEY=A,B --on {membership.address}")
    emit({**asdict(membership), "warnings": list(warnings)})


def status(address: Annotated[str | None, typer.Argument(metavar="HOST:PORT")] = None) -> None:
    """The machines of the cluster at HOST:PORT, or of the one that this machine is in."""
    view = view_own(address)
    rows = [(node.host, node.address, "alive" if node.alive else "gone", node.devices) for node in view.nodes]
    table(f"cluster at {view.address}", ("machine", "address", "state", "devices"), rows, numeric=("devices",))
    show(f"{view.free} of {view.devices} devices are free")
    emit({**asdict(view), "devices": view.devices})


def down() -> None:
    """Leave the cluster: end its processes on this machine. On the head the cluster ends; runs go on without it."""
    ended = end_node()
    show(f"{ended} processes were ended" if ended else "this machine is in no cluster")
    emit({"ended": ended})
