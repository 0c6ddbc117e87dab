"""The devices of a run's ranks on this machine, by a rule."""

from pathlib import Path

from hivetune.config import RunConfig
from hivetune.errors import UsageError
from hivetune.machine.inventory import Machine, cpu_workers


def rank_devices(config: RunConfig, machine: Machine, model: Path, device: str, threads: int | None) -> tuple[str, ...]:
    """Return the device of each rank of a run on `device` (cpu, cuda, cuda:N), which is rank 0's.

    `workers: auto`, and a cluster for this machine's part, have a rank on each card, and on a CPU one for each
    `threads` (default: a quarter of the cores), as far as memory allows. Raises UsageError when there are fewer cards
    than ranks.
    """
    number = config.workers
    if number is None:
        return (device,)
    if device == "cpu":
        fitting = int(machine.memory_bytes * config.memory_share // _memory_of_rank(model))
        most = max(1, min(cpu_workers(machine.cores, threads), fitting))
        return ("cpu",) * (most if isinstance(number, str) else number)
    own_index = int(device.partition(":")[2] or 0)
    others = [f"cuda:{card.index}" for card in machine.cards if card.index != own_index]
    count = len(others) if isinstance(number, str) else number - 1
    if count > len(others):
        raise UsageError(
            f"workers: {number}, but this machine has {len(machine.cards)} cards", hint="set workers: auto"
        )
    return (device, *others[:count])


def _memory_of_rank(model: Path) -> int:
    """Return about the memory of one rank: the weights, and as much again for activations, torch and the adapter."""
    return 2 * sum(path.stat().st_size for path in model.glob("*.safetensors")) + (1 << 30)
