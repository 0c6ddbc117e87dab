"""The processes that compute a run's steps: this one alone, a group on this machine, or a cluster's actors too."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hivetune.base.disk import MANIFEST, sha256_file
from hivetune.base.journal import Journal
from hivetune.base.typed import to_plain
from hivetune.config import RunConfig
from hivetune.data.snapshot import Snapshot
from hivetune.errors import UsageError
from hivetune.process.child import read_ranks
from hivetune.process.cluster import cluster_of
from hivetune.process.protocol import Train
from hivetune.run.choices import Choices, write_resolved
from hivetune.train.plan.layout import pack_tokens
from hivetune.train.worker.exchange.actor import ActorOrder
from hivetune.train.worker.exchange.cluster import RayCrew
from hivetune.train.worker.exchange.exchange import Exchange, LocalCrew, Packs, Whole
from hivetune.train.worker.exchange.group import GroupCrew, open_store
from hivetune.train.worker.exchange.trust import OWN, class_of, hello
from hivetune.train.worker.model.protocol import LoraModel


def with_packs(run: Path, config: RunConfig, settled: Choices, snapshot: Snapshot) -> Choices:
    """Return `settled` with the size of packs where the config sets `workers`, and write it down before step 0.

    Stage 2 compares rows with each other, so one process computes it.
    """
    if config.workers is None or config.learn.stage == 2 or settled.pack_tokens is not None:
        return settled
    lengths = [length for _, _, length, _ in snapshot.plan_rows("train")]
    device = torch.device(settled.device or "cpu").type
    settled = replace(settled, pack_tokens=pack_tokens(sum(lengths), len(lengths), config.batch_size, device))
    write_resolved(run, config, settled)
    return settled


def open_exchange(task: Train, config: RunConfig, choices: Choices, model: LoraModel, metrics: Journal) -> Exchange:
    """Return how steps are summed: in fp32 without the setting `workers`, as integers with it.

    Raises UsageError where torchrun started several processes for a run without the setting.
    """
    ranks = read_ranks()
    if choices.pack_tokens is None:
        if ranks.size > 1:
            raise UsageError(
                f"torchrun started {ranks.size} processes for a run of one process",
                hint="begin a run with workers: auto; then any number of processes gives the same bits",
            )
        return Whole(model, config.seed)

    def tell(event: str, fields: dict[str, Any]) -> None:
        metrics.append(event, **fields)

    cluster = cluster_of(config)
    if cluster is not None and ranks.size == 1:
        model_hash = sha256_file(task.model / MANIFEST)
        return Packs(
            model,
            config.seed,
            RayCrew(
                model,
                cluster,
                own_device="cuda:0" if choices.device == "cuda" else choices.device or "cpu",
                order=ActorOrder(OWN, config.model, task.model.resolve(), model_hash, welcome_of(config, choices)),
                mine=hello(OWN, task.model),
                kernels=class_of(model),
                tell=tell,
            ),
        )
    if ranks.size == 1 and task.meeting is None:
        return Packs(model, config.seed, LocalCrew(model))
    crew = GroupCrew(
        model,
        open_store(task.meeting),
        local=task.meeting is not None,
        mine=hello(OWN, task.model),
        kernels=class_of(model),
        welcome=welcome_of(config, choices),
        tell=tell,
        expected=ranks.size - 1,
    )
    return Packs(model, config.seed, crew)


def welcome_of(config: RunConfig, choices: Choices) -> dict[str, Any]:
    """Return everything that a worker needs to load the same model by `load_welcomed`."""
    return {
        "lora": config.lora.model_dump(mode="json"),
        "method": config.method,
        "memory_share": config.supervise.memory_share,
        "choices": to_plain(choices),
    }
