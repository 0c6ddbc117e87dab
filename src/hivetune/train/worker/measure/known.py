"""What a probe measured before on this machine, where it holds for a run that begins: it is not measured again.

It holds for the same weights, the same code of the engine, the same settings of the arithmetic and steps of like size;
another driver, card or torch is another profile. A probe whose steps contradicted each other is never used again.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivetune.base.disk import MANIFEST, sha256_bytes
from hivetune.base.typed import from_plain, to_plain
from hivetune.config import RunConfig
from hivetune.run.choices import NO_CHOICES, Choices
from hivetune.train.plan.memory import TrainingSetup
from hivetune.train.plan.speed import PROBED_TIME_ERROR, StepShape, probe_document, probed_setup, read_probe
from hivetune.train.worker import model as engine_model

# A rate from two steps holds for steps between these multiples of the larger one.
LIKE_SIZE = (0.5, 2.0)


@dataclass(frozen=True)
class Point:
    """One measured step of one micro-batch; `seconds` without those that it waited for streamed layers."""

    shape: StepShape
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Measured:
    """`setup` as the loaded model does it; `canary_flops_per_s`: of the own canary, beside the steps. `changes`: under
    which choices the model computes right (agreement.py)."""

    setup: TrainingSetup
    points: list[Point]
    load_peak_bytes: int
    canary_flops_per_s: float
    changes: Choices = NO_CHOICES
    read_bytes_per_s: float | None = None
    """At which streamed layers came."""


def conditions(model: Path, config: RunConfig, begun: Choices) -> dict[str, Any] | None:
    """What a probe depends on besides its key; None where the model is none that was prepared, and may change.

    `begun`: the choices before the probe.
    """
    manifest = model / MANIFEST
    if not manifest.is_file():
        return None
    digest = hashlib.sha256()
    for source in sorted(Path(engine_model.__path__[0]).rglob("*")):
        if source.suffix in (".py", ".cpp", ".h"):
            digest.update(source.read_bytes())
    return {
        "model": sha256_bytes(manifest.read_bytes()),
        "code": digest.hexdigest(),
        "dropout": config.lora.dropout_per if config.lora.dropout else None,
        "begun": begun.made(),
    }


def document_of(measured: Measured, held: Mapping[str, Any] | None) -> dict[str, Any]:
    """For the profile: what the plan reads, and what a later probe needs to do without measuring."""
    points = [(point.shape, point.seconds, point.peak_bytes) for point in measured.points]
    more = {
        "load_peak_bytes": measured.load_peak_bytes,
        "canary_flops_per_s": measured.canary_flops_per_s,
        "changes": measured.changes.made(),
        "held": held,
    }
    return {**probe_document(measured.setup, points, measured.read_bytes_per_s), **more}


def known_probe(
    probe: Mapping[str, Any] | None, setup: TrainingSetup, holds: Mapping[str, Any] | None, tokens: int
) -> Measured | None:
    """The probe of the profile as if it were measured now; None where it does not hold for steps of `tokens` tokens."""
    if probe is None or holds is None or probe.get("held") != to_plain(holds):
        return None
    largest = max(point["tokens"] for point in probe["points"])
    rate, _ = read_probe(setup, probe)
    if not LIKE_SIZE[0] <= tokens / largest <= LIKE_SIZE[1] or rate.error > PROBED_TIME_ERROR:
        return None
    points = [
        Point(StepShape(point["tokens"], point["squares"], point["trained"]), point["seconds"], point["peak_bytes"])
        for point in probe["points"]
    ]
    changes = from_plain(Choices, probe["changes"])
    return Measured(
        probed_setup(setup, probe),
        points,
        probe["load_peak_bytes"],
        probe["canary_flops_per_s"],
        changes,
        rate.read_bytes_per_s,
    )
