"""The verdict on an evaluation, by the thresholds of the run's config."""

from typing import Any

from hivetune.base.disk import write_json
from hivetune.base.sealed import read_sealed
from hivetune.errors import UsageError
from hivetune.judge.gate import judge
from hivetune.records import Verdict
from hivetune.run.adapter import adapter_hash
from hivetune.run.folder import EVALUATION, VERDICT
from hivetune.walk.compare.pages import write_evaluation_page
from hivetune.walk.open import Run


def judge_run(run: Run) -> Verdict:
    """The verdict on `eval.json` by the config's thresholds: `gate.json`. Raises UsageError without an evaluation."""
    path = run.folder / EVALUATION
    evaluation = read_sealed(path) if path.exists() else None
    if evaluation is None or evaluation.get("adapter_sha256") != adapter_hash(run.folder):
        raise UsageError(f"{run.folder} has no evaluation of its present adapter", hint=f"hivetune eval {run.folder}")
    verdict = judge(evaluation, run.config.gate)
    document = verdict_document(verdict)
    write_json(run.folder / VERDICT, document)
    write_evaluation_page(run.folder, evaluation, document)
    return verdict


def verdict_document(verdict: Verdict) -> dict[str, Any]:
    """The JSON of `gate --json` and gate.json."""
    metrics = []
    for metric in verdict.metrics:
        fields = {name: getattr(metric, name) for name in metric.__dataclass_fields__}
        metrics.append({**fields, "ci95": list(metric.ci95) if metric.ci95 else None})
    return {"schema": 1, "verdict": verdict.verdict, "reasons": list(verdict.reasons), "metrics": metrics}
