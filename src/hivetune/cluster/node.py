"""This machine in a cluster: starts Ray's processes here, as its head or joined to one, and ends them.

A variable in their environment marks them, so that nobody else's Ray is touched.
"""

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hivetune import __version__
from hivetune.base.disk import home
from hivetune.base.paths import expanded, install_command
from hivetune.base.private import temporary_folder
from hivetune.data.intake.sources.redis_server import connect, explain_redis, load_redis, parse_server
from hivetune.errors import Busy, HivetuneError, MachineNotFit, UsageError
from hivetune.machine.cluster import (
    DEVICE,
    LOOPBACK,
    Membership,
    forget_membership,
    make_token,
    need_ray,
    need_token,
    offered_devices,
    ray_environment,
    read_membership,
    write_membership,
)
from hivetune.machine.inventory import read_machine
from hivetune.process.cluster import own_address

PORT = 6479
# In the environment of all processes of this home's Ray.
HOME_MARK = "HIVETUNE_CLUSTER"
# Of a machine's memory, what Ray shares between its processes there: weights of a round, sums of actors, pieces of a
# run. Ray itself takes three times as much; its least size is 75 MiB.
OBJECT_STORE_SHARE, MIN_OBJECT_STORE_BYTES, MAX_OBJECT_STORE_BYTES = 0.1, 80 << 20, 8 << 30
START_TIMEOUT_S, END_TIMEOUT_S = 120.0, 15.0
# Bytes: a socket's name has at most 107 (unix(7)), and Ray puts /session_DATE_TIME_PID/sockets/plasma_store behind it.
MAX_FOLDER_BYTES = 107 - len("/session_2026-11-25_23-59-59_123456_4194304/sockets/plasma_store")
# `ray start` with its options read from a pipe: a password does not stand in the list of processes.
_START = "import json, sys; from ray.scripts.scripts import cli; cli(json.load(sys.stdin))"
_TAIL_LINES = 5
# Of an environment that shall compute: the version of Hivetune, and which packages are missing.
_VERSIONS_SCRIPT = (
    "import importlib.util, hivetune; print(hivetune.__version__, "
    "*(name for name in ('torch', 'ray') if importlib.util.find_spec(name) is None))"
)


@dataclass(frozen=True)
class Joining:
    """How a machine joins a cluster, or begins one.

    `listen`: the address, or HOST:PORT, that a head listens on; `join`: the address of the head to join; `python`: the
    Python of the environment that trains; `redis`: a URL for the head's state.
    """

    listen: str = LOOPBACK
    join: str | None = None
    devices: str = "auto"
    python: str | None = None
    redis: str | None = None


def start_node(joining: Joining) -> tuple[Membership, tuple[str, ...]]:
    """Start Ray here, and return the membership and warnings.

    A head whose processes died is started again, with the state that its Redis has.

    Raises Busy when this machine is in a cluster already that lives, UsageError, MachineNotFit.
    """
    need_ray()
    _refuse_living()
    python = _checked_python(joining.python)
    machine = read_machine()
    devices = offered_devices(joining.devices, machine)
    warnings: tuple[str, ...] = ()
    if joining.join is None:
        make_token()
        own, _, port = joining.listen.partition(":")
        address = f"{own}:{port or PORT}"
        options = ["--head", "--port", port or str(PORT), "--include-dashboard", "false", "--no-monitor"]
        if joining.redis is not None:
            warnings = check_redis(joining.redis)
    else:
        if joining.redis is not None:
            raise UsageError("--redis is an option of the head only", hint="leave it out with --join")
        need_token()
        address, own, options = joining.join, own_address(joining.join), ["--address", joining.join]
    end_node()
    shown, redis_options = ("", []) if joining.redis is None else redis_for_ray(joining.redis)
    extra = ray_environment(address)
    if shown:  # the same name after a restart of the head, another one for another home
        extra |= {"RAY_REDIS_ADDRESS": shown, "RAY_external_storage_namespace": f"hivetune-{mark_of_home()}"}
    resources = {DEVICE: len(devices)} if devices else {}
    share = int(OBJECT_STORE_SHARE * machine.memory_bytes)
    store_bytes = min(max(share, MIN_OBJECT_STORE_BYTES), MAX_OBJECT_STORE_BYTES)
    options += ["--node-ip-address", own, "--num-cpus", "0", "--num-gpus", "0", "--resources", json.dumps(resources)]
    options += ["--object-store-memory", str(store_bytes), "--temp-dir", str(_ray_folder()), "--disable-usage-stats"]
    options += ["--include-log-monitor", "false", *redis_options]
    try:
        _ray_start(python, options, extra)
    except BaseException:  # what has started already would run for ever
        end_node()
        raise
    membership = Membership(address, joining.join is None, python, devices, shown)
    write_membership(membership)
    return membership, warnings


def end_node() -> int:
    """End all processes of this home's Ray on this machine, actors included, and return how many there were."""
    processes = _processes()
    _signal(processes, signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, END_TIMEOUT_S)
    _signal(alive, signal.SIGKILL)
    psutil.wait_procs(alive, END_TIMEOUT_S)
    forget_membership()
    return len(processes)


def _refuse_living() -> None:
    membership = read_membership()
    if membership is None or not _processes():
        return
    try:
        own_address(membership.address)
    except MachineNotFit:  # its head died: what is left here is of no use
        return
    raise Busy(
        f"this machine is already in the cluster at {membership.address}",
        hint="leave it first: docs/cluster.md",
    )


def _checked_python(python: str | None) -> str:
    """Return the path of a Python. Raises UsageError for an environment that can't compute."""
    if python is None:
        return sys.executable
    path = expanded(python)
    path = path / "bin" / "python" if path.is_dir() else path
    try:
        child = subprocess.run([str(path), "-c", _VERSIONS_SCRIPT], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UsageError(
            f"--python {python}: {error.strerror}", hint="name a Python or a virtual environment"
        ) from None
    if child.returncode or child.stdout.split() != [__version__]:
        has, *missing = child.stdout.split() or ["no version"]
        lacks = f"{missing[0]} is missing" if missing else f"Hivetune {__version__} is needed, it has {has}"
        extra = "cluster" if missing == ["ray"] else "train"
        raise UsageError(f"--python {python}: {lacks}", hint=install_command(extra, str(path)))
    return str(path.absolute())


def mark_of_home() -> str:
    return hashlib.sha256(str(home()).encode()).hexdigest()[:8]


def _ray_folder() -> Path:
    """Return the folder for Ray's sockets and logs.

    It is not in the home, whose path may be too long for a socket. Ray's folder is open to all users, so it is inside a
    private one, in /tmp if TMPDIR is too long.
    """
    name = f"ht-{mark_of_home()}"
    folder = Path(tempfile.gettempdir()) / f"{name}-{os.geteuid()}" / "ray"
    return temporary_folder(name, None if len(os.fsencode(folder)) <= MAX_FOLDER_BYTES else Path("/tmp")) / "ray"


def _ray_start(python: str, options: list[str], extra: Mapping[str, str]) -> None:
    environment = {**os.environ, **extra, HOME_MARK: mark_of_home()}
    try:
        started = subprocess.run(
            [python, "-c", _START],  # the actors that compute run in the environment of their node
            input=json.dumps(["start", *options]),
            env=environment,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise MachineNotFit(
            f"Ray did not start in {START_TIMEOUT_S:.0f} s", hint=f"its logs are in {_ray_folder()}"
        ) from None
    if started.returncode:
        tail = "\n".join((started.stdout + started.stderr).strip().splitlines()[-_TAIL_LINES:])
        raise HivetuneError(f"Ray could not be started:\n{tail}", hint=f"its logs are in {_ray_folder()}")


def _processes() -> list[psutil.Process]:
    """Return the processes with our mark and all below them. A process that sets its title overwrites its mark."""
    by_pid: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(HOME_MARK) == mark_of_home():
                by_pid |= {p.pid: p for p in (process, *process.children(recursive=True))}
    by_pid.pop(os.getpid(), None)
    return list(by_pid.values())


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


# The Redis that keeps the state of a cluster's head, so that the head may die. It is checked before Ray starts.

DEFAULT_PORT = 6379


def check_redis(url: str) -> tuple[str, ...]:
    """Return warnings about a Redis. Raises MachineNotFit when it can't keep the state, UsageError without answer."""
    server = parse_server(url, {})
    try:
        client = connect(server)
        info = dict(client.info())
        cluster = str(client.execute_command("CLUSTER", "INFO")) if info["cluster_enabled"] else "cluster_size:1"
    except HivetuneError:
        raise
    except (load_redis().exceptions.RedisError, OSError) as error:
        explained = explain_redis(error, server, "")
        if isinstance(explained, HivetuneError):
            raise explained from None
        raise UsageError(f"{server.shown} does not answer: {error}", hint="check --redis redis://HOST:PORT") from None
    shards = re.search(r"cluster_size:(\d+)", cluster)
    return judge_redis(server.shown, info, int(shards[1]) if shards else 0)


def judge_redis(shown: str, info: Mapping[str, Any], shards: int) -> tuple[str, ...]:
    """Return warnings by the server's INFO and the number of its shards. Raises MachineNotFit."""
    if shards > 1:
        raise MachineNotFit(
            f"{shown} is a Redis Cluster of {shards} shards: Ray keeps its state in one shard only",
            hint="give the cluster a Redis of its own, a single server or one behind Sentinel",
        )
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        raise MachineNotFit(
            f"{shown} evicts with {policy}: when its memory is full it may delete the state of the cluster",
            hint="redis-cli CONFIG SET maxmemory-policy noeviction, or a Redis of its own",
        )
    if not int(info.get("aof_enabled", 0)):
        return (f"{shown} writes no append-only file: after its own restart the cluster has to be started again",)
    return ()


def redis_for_ray(url: str) -> tuple[str, list[str]]:
    """Return the address of a Redis for Ray, and options for `ray start`."""
    parts = urllib.parse.urlsplit(url)
    scheme = "rediss://" if parts.scheme == "rediss" else ""
    options = []
    if parts.username:
        options += ["--redis-username", urllib.parse.unquote(parts.username)]
    if parts.password:
        options += ["--redis-password", urllib.parse.unquote(parts.password)]
    return f"{scheme}{parts.hostname}:{parts.port or DEFAULT_PORT}", options
