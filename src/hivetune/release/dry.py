"""The dry export: a small model of the same architecture, and an adapter of it, as GGUF files, before a training.

Whatever the converter, llama.cpp or an adapter's targets make impossible or wrong shows there, in seconds.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hivetune.errors import HivetuneError
from hivetune.models.architecture import Linear
from hivetune.models.prepared import spoken_name
from hivetune.models.targets import named_end
from hivetune.process.parent import run_task
from hivetune.process.protocol import DryGguf, Passage
from hivetune.release.converter import Converter
from hivetune.release.prove import TOP, Saying, Sayings, prove, read_told


def write_dry_export(
    model: Path, linears: Sequence[Linear], rank: int, converter: Converter, passages: Sequence[Passage], folder: Path
) -> tuple[DryGguf, dict[str, list[list[Saying | None]]]]:
    """(what was written below `folder`, what "base" and "tuned" say of the passages) with an adapter of `rank` on the
    modules of `linears`.

    Raises what exporting a trained one would: UsageError for a model that the converter can't write, MachineNotFit for
    a missing package.
    """
    targets = tuple(sorted({named_end(linear.name) for linear in linears}))
    task = DryGguf(
        model=model,
        targets=targets,
        rank=rank,
        file=folder / "model.gguf",
        adapter_file=folder / "adapter.gguf",
        base_name=spoken_name(model),
        converter=converter.folder,
        passages=tuple(passages),
        top=TOP,
    )
    result = run_task(task, folder).check("the dry export")
    return task, {side: read_told(result[side]) for side in ("base", "tuned")}


def check_dry_export(trained: dict[str, Any], base: Sayings, tuned: Sayings) -> None:
    """Raises HivetuneError where llama.cpp computes another model, or not all of the adapter."""
    alone = prove("f32", {"base": trained["base"], "tuned": trained["base"]}, base, None)
    if not alone["holds"]:
        raise HivetuneError(f"llama.cpp computes another model than transformers: {'; '.join(alone['problems'])}")
    beside = prove("f32", trained, tuned, None)
    if not beside["holds"]:
        raise HivetuneError(f"llama.cpp does not apply this adapter as it is trained: {'; '.join(beside['problems'])}")
