"""The pages of a run: of its evaluation, and of the comparisons on its rows. Written aside, then renamed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hivetune.base.disk import write_atomic
from hivetune.errors import UsageError
from hivetune.judge.pages.comparison import comparison_page
from hivetune.models.prepared import spoken_name
from hivetune.models.sides import BASELINE

EVALUATION_PAGE = "eval.html"


def write_evaluation_page(run: Path, evaluation: Mapping[str, Any], judged: Mapping[str, Any]) -> Path:
    """`RUN/eval.html`. `judged`: metrics and, after the gate, the verdict."""
    base, tuned = evaluation["base"], evaluation["tuned"]
    model = spoken_name(evaluation["model"]) if "model" in evaluation else "the model"  # of an older version
    tuned = {**tuned, "label": f"{model} tuned in {run.name}"}
    if base.get("label", BASELINE) == BASELINE:
        base = {**base, "label": f"{model} untuned"}
    return _write(run / EVALUATION_PAGE, {**evaluation, "base": base, "tuned": tuned}, judged)


def write_comparison_page(folder: Path, document: Mapping[str, Any], run: Path | None) -> Path:
    """`RUN/compare-HASH.html` where the rows are a run's, else `compare.html` in the comparison's own folder."""
    path = folder / "compare.html" if run is None else run / f"compare-{folder.name[:8]}.html"
    return _write(path, document, document)


def newest_page(run: Path) -> Path:
    """Raises UsageError for a run without a page."""
    pages = sorted(run.glob("*.html"), key=lambda path: path.stat().st_mtime_ns)
    if not pages:
        raise UsageError(f"{run} has no page yet", hint=f"measure it first: hivetune eval {run.name}")
    return pages[-1]


def _write(path: Path, document: Mapping[str, Any], judged: Mapping[str, Any]) -> Path:
    write_atomic(path, comparison_page(document, judged).encode("utf-8", "replace"))
    return path
