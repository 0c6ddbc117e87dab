"""What a run's own plan expects of it, from the choices beside its settings: tokens a second and the peak of memory."""

from dataclasses import dataclass
from pathlib import Path

from hivetune.data.snapshot import Snapshot, open_snapshot
from hivetune.errors import HivetuneError
from hivetune.models.architecture import read_architecture
from hivetune.run.choices import read_resolved
from hivetune.run.record import read_record
from hivetune.train.plan.layout import shares_prefixes, trim_document
from hivetune.train.plan.memory import TrainingSetup, adapters_of
from hivetune.train.plan.speed import Prediction, micro_batch_shapes
from hivetune.train.plan.steps import read_plan

_STEPS_LOOKED_AT = 24  # they stand for all


@dataclass(frozen=True)
class PlannedRates:
    """`tokens_per_second` of the plan's first steps; `peak_bytes` of memory."""

    tokens_per_second: float
    peak_bytes: int


def planned_rates(run: Path) -> PlannedRates | None:
    """None for a run that was not measured before step 0, or whose model or rows are gone."""
    try:
        config, choices = read_resolved(run)
        record = read_record(run)
        if choices.prediction is None or choices.budget_tokens is None or choices.dtype is None:
            return None
        prediction = Prediction(**choices.prediction)
        architecture = read_architecture(Path(str(record.get("model"))))
        trained, active = adapters_of(architecture, config.lora.r, config.lora.target_modules)
        setup = TrainingSetup(
            architecture,
            trained,
            choices.dtype,
            "cpu" if choices.device == "cpu" else "cuda",
            quantized=config.method == "qlora",
            recompute=choices.recompute or 0,
            path=choices.path or ("fast" if architecture.is_fast and config.method == "lora" else "general"),
            active_adapter_parameters=active,
            streamed=choices.streamed or 0,
        )
        plan, snapshot = read_plan(run), open_snapshot(Path(str(record.get("snapshot"))))
    except (HivetuneError, OSError, TypeError):
        return None
    tokens, seconds = 0, 0.0
    for step in plan.steps[:_STEPS_LOOKED_AT]:
        documents = [trim_document(snapshot.tokens(row).tolist(), snapshot.trained(row)) for row in step.rows]
        shapes = micro_batch_shapes(setup, documents, choices.budget_tokens, share=shares_prefixes(config.lora))
        tokens += _tokens(snapshot, step.rows)
        seconds += prediction.rate.seconds(setup, shapes)
    return PlannedRates(tokens / seconds, prediction.peak_bytes) if seconds else None


def _tokens(snapshot: Snapshot, rows: tuple[int, ...]) -> int:
    return sum(snapshot.length(row) for row in rows)
