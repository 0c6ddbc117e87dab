"""One device of a machine, as the cluster has it: starts the worker of this machine's environment and watches it.

Loads no torch: the worker may have another one, and another Python. Ray makes a process of `Agent` on the machine and
calls its methods one after the other, from one thread. Orders and signs are JSON; no gradient passes here.
"""

import json
import platform
from dataclasses import replace
from functools import partial
from pathlib import Path

from hivetune.base.disk import MANIFEST, home, sha256_file
from hivetune.base.typed import from_plain, to_plain
from hivetune.cluster.machine import claim_device, read_membership
from hivetune.config import SuperviseConfig
from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.machine.doctor.look import Surroundings, look
from hivetune.machine.doctor.variables import advised_variables, proven_environment
from hivetune.machine.inventory import read_machine
from hivetune.machine.profile import read_profile
from hivetune.machine.telemetry import process_tree
from hivetune.models.prepared import find_prepared
from hivetune.process.cluster import AgentSign, Order
from hivetune.process.launch import launch_child
from hivetune.process.limits import LearnedLimits
from hivetune.process.parent import Child, start_child
from hivetune.process.protocol import ChildError, ComputePacks, Outcome


class Agent:
    """Holds its device until its process ends."""

    def __init__(self) -> None:
        self._host = platform.node()
        self._child: Child | None = None
        self._device = ""

    def start(self, order: str) -> str:
        """The sign of a worker that is started, or of one that can't be."""
        try:
            self._child = self._start(from_plain(Order, json.loads(order)))
        except (HivetuneError, OSError, ValueError) as error:
            return self._sign(_refusal(error))
        return self._sign()

    def look(self) -> str:
        """How the worker is; how it ended, once."""
        child = self._child
        if child is None:
            return self._sign()
        child.wait_beats(0)
        outcome = None
        if child.ended:
            child.kill()  # what it may have left running in its session
            outcome = child.outcome()
        elif child.hung:
            outcome = child.end_hung()
        if outcome is not None:
            self._child = None
        return self._sign(outcome, child)

    def stand_still(self, still: bool) -> None:
        if self._child is not None and not self._child.ended:
            self._child.stand_still(still)

    def _start(self, order: Order) -> Child:
        membership = read_membership()
        claimed = None if membership is None else claim_device(membership.devices)
        if membership is None or claimed is None:
            raise OSError(f"every device that {self._host} offers is held by another agent")
        self._device, _ = claimed
        model = find_model(order.model, order.model_folder, order.model_hash, self._host)
        return start_child(
            ComputePacks(model, order.number, order.meeting, self._device, order.changes),
            home() / "cluster" / "workers" / f"{order.run}-{order.number}",
            module=order.module,
            limits=LearnedLimits(SuperviseConfig(**order.supervise)),
            environment={**_own_environment(self._device), **order.environment},
            start=partial(launch_child, python=membership.python),
        )

    def _sign(self, outcome: Outcome | None = None, child: Child | None = None) -> str:
        child = child or self._child
        sign = AgentSign(self._host, self._device)
        if child is not None:
            sign = replace(sign, pid=child.process.pid, worked=child.worked, taken=process_tree(child.process.pid))
        return json.dumps(to_plain(replace(sign, outcome=outcome and replace(outcome, beat=None))))


def find_model(model: str, folder: Path, model_hash: str, host: str) -> Path:
    """The model of the same bytes: where the run's machine has it (`folder`), or where this machine has it by its name.

    Raises MachineNotFit.
    """
    if _is_model(folder, model_hash):
        return folder
    hint = f"prepare it there: hivetune fetch {model}"
    try:
        prepared = find_prepared(model)
    except UsageError:
        prepared = None
    if prepared is None:
        raise MachineNotFit(f"{host} does not have the model {model}", hint=hint)
    if not _is_model(prepared.folder, model_hash):
        raise MachineNotFit(f"the model {model} of {host} has other bytes than the run's", hint=hint)
    return prepared.folder


def _is_model(folder: Path, model_hash: str) -> bool:
    manifest = folder / MANIFEST
    return manifest.exists() and sha256_file(manifest) == model_hash


def _own_environment(device: str) -> dict[str, str | None]:
    """The variables that this machine's card wants, as a run that begins here would get them."""
    if device == "cpu":
        return {}
    proven = proven_environment(read_profile(read_machine().fingerprint), device, "auto")
    advised = advised_variables(look(Surroundings(folder=home(), measure=False)), proven, keep_set=True)
    return {one.name: one.value for one in advised}


def _refusal(error: Exception) -> Outcome:
    code = error.exit_code if isinstance(error, HivetuneError) else 1
    message = error.message if isinstance(error, HivetuneError) else str(error)
    hint = error.hint if isinstance(error, HivetuneError) else ""
    described = ChildError(type(error).__name__, message, hint, code, f"{type(error).__name__}: {message}")
    return Outcome("failed", code, None, 0.0, {}, "", described)
