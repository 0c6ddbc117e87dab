"""The commands `cluster up`, `status` and `down`: several machines that train together."""

from dataclasses import asdict
from typing import Annotated

import typer

from hivetune.cli.output import emit, say, show, table
from hivetune.cluster.node import Joining, end_node, start_node, view_own
from hivetune.errors import UsageError
from hivetune.machine.cluster import token_path


def up(
    join: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Join this cluster.")] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST[:PORT]", help="Address at which other machines reach this one.")
    ] = None,
    devices: Annotated[
        str,
        typer.Option(metavar="LIST", help="Devices to offer: auto, none, or a list such as cuda:0,cuda:1 or cpu,cpu."),
    ] = "auto",
    python: Annotated[str | None, typer.Option(metavar="PATH", help="Python that trains; default: this one.")] = None,
    redis: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Keep the head's state in Redis, so that the head may be restarted."),
    ] = None,
) -> None:
    """Start a cluster with this machine as its head, or join one with --join.

    Other machines can join only with --listen and the token of the head.
    """
    if join is not None and listen is not None:
        raise UsageError("--listen is only for the head, not for a machine that joins")
    membership, warnings = start_node(Joining(listen or "127.0.0.1", join, devices, python, redis))
    for text in warnings:
        say(f"warning: {text}")
    offered = ", ".join(membership.devices) or "no device"
    show(f"this machine is {'the head of' if membership.head else 'in'} the cluster at {membership.address}: {offered}")
    if membership.head and listen is not None:
        show(
            f"to join another machine, copy {token_path()} to it, then: hivetune cluster up --join {membership.address}"
        )
    show(f"train one run on it: hivetune train CONFIG --set workers={membership.address}")
    emit({**asdict(membership), "warnings": warnings})


def status(address: Annotated[str | None, typer.Argument(metavar="HOST:PORT")] = None) -> None:
    """List the machines and devices of the cluster at HOST:PORT; default: the one of this machine."""
    view = view_own(address)
    rows = [(node.host, node.address, "alive" if node.alive else "gone", node.devices) for node in view.nodes]
    table(f"cluster at {view.address}", ("machine", "address", "state", "devices"), rows, numeric=("devices",))
    show(f"{view.free} of {view.devices} devices are free")
    emit({**asdict(view), "devices": view.devices})


def down() -> None:
    """Leave the cluster and end its processes on this machine. On the head this ends the cluster, not its runs."""
    ended = end_node()
    show(f"{ended} processes ended" if ended else "this machine is not in a cluster")
    emit({"ended": ended})
