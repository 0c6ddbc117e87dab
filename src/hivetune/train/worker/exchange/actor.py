"""One device of a cluster's machine, as an actor of Ray that computes packs for a run.

Ray makes a process of `PackActor` on the machine and calls its methods in order, from one thread. The
environment has to be complete before torch is loaded, so this module loads it late.
"""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hivetune.base.disk import home
from hivetune.base.private import keep_private
from hivetune.errors import HivetuneError, MachineNotFit
from hivetune.machine.cluster import claim_device, find_model, read_membership
from hivetune.machine.doctor.findings import advised_variables
from hivetune.machine.doctor.look import Surroundings, look
from hivetune.process.launch import ENVIRONMENT

if TYPE_CHECKING:
    import torch

    from hivetune.train.worker.exchange.work import Work, WorkResult


@dataclass(frozen=True)
class ActorOrder:
    """The input of an actor, to load the run's model.

    `model`: as the config names it; `model_folder`: where the run's machine has it; `model_hash`: of its manifest;
    `recompute`: layers computed again where memory is too small.
    """

    number: int
    model: str
    model_folder: Path
    model_hash: str
    welcome: Mapping[str, Any]
    recompute: int | None = None


@dataclass
class PackActor:
    """An actor that holds its device until its process ends. `sums`: the integers of each round that are not fetched
    yet.
    """

    sums: dict[int, "torch.Tensor"] = field(default_factory=dict)
    weights_of: int = 0
    """The round whose weights the model has."""

    def load(self, order: ActorOrder) -> dict[str, Any]:
        """Return this worker's description with its device and class, or as `refused` why it can't compute."""
        keep_private()
        host, membership = platform.node(), read_membership()
        try:
            claimed = None if membership is None else claim_device(membership.devices)
            if claimed is None:
                raise MachineNotFit(f"every device that {host} offers is held by another process")
            device, _ = claimed
            model_folder = find_model(order.model, order.model_folder, order.model_hash, host)
            os.environ.update({**ENVIRONMENT, **_own_environment(device)})
            return {**self._load(order, model_folder, device), "host": host, "device": device}
        except (HivetuneError, OSError) as error:
            return {"refused": error.message if isinstance(error, HivetuneError) else f"{host}: {error}", "host": host}

    def _load(self, order: ActorOrder, model_folder: Path, device: str) -> dict[str, Any]:
        from hivetune.run.choices import Choices
        from hivetune.train.worker.exchange.trust import hello
        from hivetune.train.worker.measure import canary
        from hivetune.train.worker.model.load import load_welcomed

        self._model = load_welcomed(model_folder, order.welcome, Choices(device=device, recompute=order.recompute))
        canary.check_model(self._model)
        return hello(order.number, model_folder, self._model)

    def compute(
        self, number: int, weights_N: Any, work: "Work", *, counts: bool, give: bool
    ) -> "tuple[WorkResult, str | None]":
        """Compute one piece of work of round `number`. Return its numbers, and the digest where it is compared.

        `counts`: its integers belong into the sum of the round. `give`: they are returned too.
        """
        import torch

        from hivetune.train.worker.exchange.work import compute

        if self.weights_of != number:
            self._model.master_N.copy_(torch.from_numpy(weights_N.copy()))
            self.weights_of = number
        result = compute(self._model, work)
        if counts and result.integers_N is not None:
            total_N = self.sums.get(number)
            self.sums = {number: torch.clone(result.integers_N) if total_N is None else total_N.add_(result.integers_N)}
        digest = result.digest() if give or not counts else None
        return result if give else replace(result, integers_N=None), digest

    def take(self, number: int) -> Any:
        """Return the sum of the integers that this actor has for a round, and forget it; None without any."""
        total_N = self.sums.pop(number, None)
        return None if total_N is None else total_N.numpy()


def _own_environment(device: str) -> dict[str, str]:
    """Return the environment variables for this machine's card, as for a run on this machine."""
    if device == "cpu":
        return {}
    advised = advised_variables(look(Surroundings(folder=home())), keep_set=True)
    return {variable.name: variable.value for variable in advised if variable.value is not None}
