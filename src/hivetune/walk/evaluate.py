"""The station after training: base and tuned model on the held-out rows."""

from pathlib import Path
from typing import Any

from hivetune.base.journal import DAMAGED, read_journal
from hivetune.base.sealed import write_sealed
from hivetune.errors import HivetuneError, UsageError
from hivetune.judge.evaluate import evaluation_document, plan_evaluation
from hivetune.judge.gate import judge
from hivetune.judge.sides import BASELINE
from hivetune.process.parent import run_task
from hivetune.process.protocol import Beat, Score
from hivetune.records import Progress, silent
from hivetune.run.adapter import adapter_hash
from hivetune.run.folder import ADAPTER, EVALUATION, SCORES, SCORING
from hivetune.walk.compare.pages import write_evaluation_page
from hivetune.walk.compare.station import compare_pair
from hivetune.walk.open import Run
from hivetune.walk.verdict import verdict_document


def evaluate_run(run: Run, progress: Progress = silent) -> dict[str, Any]:
    """Baseline and tuned model on the held-out test rows: `eval.json` and its page.

    Raises UsageError when nothing was trained.
    The base is scored in one task with the tuned model; any other baseline (`eval.baseline`) answers as it is served,
    and so does the tuned model then. Raises what `compare_pair` does.
    """
    if not (run.folder / ADAPTER).exists():
        raise UsageError(f"{run.folder} has no adapter yet", hint="train it first: hivetune train CONFIG")
    about = {"run": str(run.folder), "model": run.config.model, "adapter_sha256": adapter_hash(run.folder)}
    if run.config.eval.baseline == BASELINE:
        evaluation = _beside_base(run, about, progress)
    else:
        settings = run.config.eval
        made = compare_pair(settings.baseline, str(run.folder), settings, run=run, progress=progress)
        evaluation = {**made.document, **about}
    write_sealed(run.folder / EVALUATION, evaluation)
    metrics = verdict_document(judge(evaluation, run.config.gate))["metrics"]
    write_evaluation_page(run.folder, evaluation, {"metrics": metrics})
    return evaluation


def _beside_base(run: Run, about: dict[str, Any], progress: Progress) -> dict[str, Any]:
    rows, generate = plan_evaluation(run.snapshot, run.config.eval)
    folder = run.folder / SCORING
    task = Score(
        model=run.model,
        adapter=run.folder,
        snapshot=run.snapshot.folder,
        scores=folder / SCORES,
        rows=rows,
        generate=generate,
        dtype=run.config.dtype,
        device=run.config.device,
    )
    total = 2 * (len(rows) + len(generate.rows))
    done = 0

    def on_beat(beat: Beat) -> None:
        nonlocal done
        if beat is Beat.ITEM:
            done += 1
            progress(min(done, total), total)

    result = run_task(task, folder, on_beat=on_beat).check("evaluation")
    return evaluation_document(run.snapshot, run.config.eval, read_scores(task.scores), result, about)


def read_scores(path: Path) -> list[dict[str, Any]]:
    """Raises HivetuneError for a damaged file: a row that is missing must not look like one that failed."""
    scores = list(read_journal(path))
    damaged = [entry["line"] for entry in scores if entry["event"] == DAMAGED]
    if damaged:
        raise HivetuneError(f"{path}:{damaged[0]}: this line is damaged", hint="measure again: hivetune eval RUN")
    return scores
