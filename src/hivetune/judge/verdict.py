"""The verdict on an evaluation, by the thresholds of the run's config."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hivetune.base.disk import write_json
from hivetune.base.sealed import read_sealed
from hivetune.errors import HivetuneError, UsageError
from hivetune.judge.advice import advise
from hivetune.judge.gate import judge, refuse_not_finite
from hivetune.judge.measure.curve import contradictory_rows, curve_document, read_curve
from hivetune.judge.measure.pages import write_evaluation_page
from hivetune.records import Verdict
from hivetune.run.adapter import adapter_hash
from hivetune.run.find import shortest_name
from hivetune.run.folder import EVALUATION, VERDICT
from hivetune.train.open import Run


def judge_run(run: Run) -> Verdict:
    """The verdict on `eval.json` by the config's thresholds: `gate.json`. Raises UsageError without an evaluation."""
    path = run.folder / EVALUATION
    evaluation = read_evaluation(path) if path.exists() else None
    if evaluation is None or evaluation.get("adapter_sha256") != adapter_hash(run.folder):
        name = shortest_name(run.folder)
        raise UsageError(f"{name} has no evaluation of its present adapter", hint=f"hivetune eval {name}")
    verdict, curve = judge(evaluation, run.config.gate), read_curve(run)
    found = advise(curve, evaluation, evaluation.get("rank"), contradictory_rows(run.snapshot), verdict.metrics)
    verdict = replace(verdict, advice=found)
    document = verdict_document(verdict)
    write_json(run.folder / VERDICT, document)
    write_evaluation_page(run.folder, evaluation, {**document, "curve": curve_document(curve)})
    return verdict


def read_evaluation(path: Path) -> dict[str, Any]:
    """An eval.json or a comparison of its form. Raises UsageError for a file that is missing or damaged, HivetuneError
    naming file and field for a number that is not finite."""
    evaluation = read_sealed(path)
    try:
        refuse_not_finite(evaluation)
    except HivetuneError as error:
        raise HivetuneError(f"{path}: {error.message}", hint=error.hint) from None
    return evaluation


def verdict_document(verdict: Verdict) -> dict[str, Any]:
    """The JSON of `gate --json` and gate.json."""
    return {
        "schema": 1,
        "verdict": verdict.verdict,
        "reasons": list(verdict.reasons),
        "decisive": verdict.decisive,
        "metrics": [
            {**asdict(metric), "ci95": list(metric.ci95) if metric.ci95 else None} for metric in verdict.metrics
        ],
        "advice": [{"about": one.about, "said": one.said, "rows": list(one.rows)} for one in verdict.advice],
    }
