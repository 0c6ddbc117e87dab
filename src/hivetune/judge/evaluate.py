"""The station `eval`: base and tuned model answer the held-out rows, and eval.json says how they did."""

from collections.abc import Mapping
from typing import Any

from hivetune.base.journal import read_journal
from hivetune.base.sealed import write_sealed
from hivetune.config import EvalConfig
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
    """Evaluate by llama.cpp where it can serve the model, else by the engine, which needs one model in memory and no
    GGUF.
    """
    reason = dry_export(run).problem
    if not reason:
        try:
            return _as_served(run, facts, progress)
        except DoesNotFit as error:
            reason = error.message
    return _by_engine(
        run, {**facts, "answered_by": f"the engine: {reason}{_unused_settings(run.config.eval)}"}, progress
    )


def _unused_settings(settings: EvalConfig) -> str:
    """Name the settings that only served sides can follow."""
    names = [name for name, value in (("eval.judge", settings.judge), ("eval.frozen", settings.frozen)) if value]
    return f"; {' and '.join(names)}: not asked, since that needs llama.cpp" if names else ""


def _as_served(run: Run, facts: dict[str, Any], progress: Progress) -> dict[str, Any]:
    settings = run.config.eval
    if settings.baseline == BASELINE:
        # Losses first: the files for llama.cpp are one core's work, and so is the import of torch.
        answers = num_answers(run, settings, settings.baseline, str(run.folder))
        scored(run, run.folder, NO_ANSWERS, continued(progress, after=answers), lambda: _make_files(run))
        progress = continued(progress, before=num_losses(run))
    document = compare_pair(settings.baseline, str(run.folder), settings, run=run, progress=progress).document
    result: Mapping[str, Any] = {}
    if "loss" not in document["not_compared"]:
        _, result = scored(run, run.folder, NO_ANSWERS, silent)  # found: the comparison has computed it
    measured = {key: result.get(key) for key in ("rank", "kl_to_base")}
    return {**document, **facts, **measured, "answered_by": f"llama.cpp, {document['quant']}"}


def _make_files(run: Run) -> None:
    """Make the files that the comparison needs first."""
    for side in (run.config.eval.baseline, str(run.folder)):
        find_artefact(side, run, SERVED_QUANT)


def _by_engine(run: Run, about_run: dict[str, Any], progress: Progress) -> dict[str, Any]:
    _, generate = plan_evaluation(run.snapshot, run.config.eval)
    scores, result = scored(run, run.folder, generate, progress)
    about_run = {**about_run, "rank": result.get("rank")}
    return evaluation_document(run.snapshot, run.config.eval, read_journal(scores), result, about_run)
