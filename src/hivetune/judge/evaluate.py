"""The station `eval`: base and tuned model answer the held-out rows, and eval.json says how they did."""

from collections.abc import Mapping
from typing import Any

from hivetune.base.journal import read_journal
from hivetune.base.sealed import write_sealed
from hivetune.errors import DoesNotFit
from hivetune.judge.answers import continued
from hivetune.judge.artefacts import find_artefact
from hivetune.judge.compare import compare_pair, num_answers
from hivetune.judge.gate import judge, verdict_document
from hivetune.judge.held_out import NO_ANSWERS, evaluation_document, num_losses, plan_evaluation, scored
from hivetune.judge.page import write_evaluation_page
from hivetune.models.sides import BASELINE
from hivetune.records import Progress, silent
from hivetune.release.dry_export import dry_export
from hivetune.release.gguf import SERVED_QUANT
from hivetune.run.folder import EVALUATION, adapter_hash, require_adapter
from hivetune.train.open import Run


def evaluate_run(run: Run, progress: Progress = silent) -> dict[str, Any]:
    """Evaluate baseline and tuned model on the held-out test rows; write `eval.json` and its page.

    Raises UsageError when nothing was trained. Both answer as they are served, by llama.cpp. Where it is not installed
    or can't serve this model, the base is the baseline and the engine answers; `answered_by` says which, and why.
    Raises what `compare_pair` does.
    """
    require_adapter(run.folder)
    facts = {
        "run": str(run.folder),
        "model": run.config.model,
        "adapter_sha256": adapter_hash(run.folder),
        "nearest": run.snapshot.manifest.get("nearest"),  # how near test rows are to training rows
    }
    if run.config.eval.baseline == BASELINE:
        evaluation = _beside_base(run, facts, progress)
    else:
        evaluation = _as_served(run, facts, progress)
    write_sealed(run.folder / EVALUATION, evaluation)
    metrics = verdict_document(judge(evaluation, run.config.gate))["metrics"]
    write_evaluation_page(run.folder, evaluation, {"metrics": metrics})
    return evaluation


def _beside_base(run: Run, facts: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Evaluate by llama.cpp where it can serve the model, else by the engine: one model in memory, and no GGUF."""
    reason, settings = dry_export(run).problem, run.config.eval
    if not reason:
        try:
            return _as_served(run, facts, progress)
        except DoesNotFit as error:
            reason = error.message
    names = [name for name, value in (("eval.judge", settings.judge), ("eval.frozen", settings.frozen)) if value]
    unused = f"; {' and '.join(names)}: not asked, since that needs llama.cpp" if names else ""
    _, generate = plan_evaluation(run.snapshot, settings)
    scores, result = scored(run, run.folder, generate, progress)
    facts = {**facts, "answered_by": f"the engine: {reason}{unused}", "rank": result.get("rank")}
    return evaluation_document(run.snapshot, settings, read_journal(scores), result, facts)


def _as_served(run: Run, facts: dict[str, Any], progress: Progress) -> dict[str, Any]:
    settings = run.config.eval
    if settings.baseline == BASELINE:
        # Losses first: the files for llama.cpp are one core's work, and so is the import of torch.
        def make_files() -> None:
            for side in (settings.baseline, str(run.folder)):
                find_artefact(side, run, SERVED_QUANT)

        answers = num_answers(run, settings, settings.baseline, str(run.folder))
        scored(run, run.folder, NO_ANSWERS, continued(progress, after=answers), make_files)
        progress = continued(progress, before=num_losses(run))
    document = compare_pair(settings.baseline, str(run.folder), settings, run=run, progress=progress).document
    result: Mapping[str, Any] = {}
    if "loss" not in document["not_compared"]:
        _, result = scored(run, run.folder, NO_ANSWERS, silent)  # found: the comparison has computed it
    measured = {key: result.get(key) for key in ("rank", "kl_to_base")}
    return {**document, **facts, **measured, "answered_by": f"llama.cpp, {document['quant']}"}
