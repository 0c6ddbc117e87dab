"""Standard tasks by lm-evaluation-harness: one or two models measured, their figures paired, and one document.

The harness writes `results_*.json` with the figures of each task and `samples_TASK_*.jsonl` with those of each row. Two
models answered the same rows, so their difference has a paired interval wherever a figure is the mean of its rows.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from hivetune.base.disk import home, lock, sha256_file, write_atomic
from hivetune.base.paths import install_command
from hivetune.base.private import make_folder
from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.judge.artefacts import Artefact, find_artefact
from hivetune.judge.statistics import Estimate, holm, jackknife, p_value, paired_proportions
from hivetune.llama.ask import ENDPOINT_KEY
from hivetune.models.sides import SIDES
from hivetune.train.open import Run

TASK_FIGURES = "lm-eval"  # below the home
LOG = "lm-eval.log"
SHOWN_LINES = 6
_MODULE = "lm_eval"


@dataclass(frozen=True)
class TaskFigure:
    """One figure of one task. `rows`: row -> its value, empty unless the figure is their mean."""

    task: str
    metric: str
    value: float
    stderr: float | None
    higher_is_better: bool
    rows: Mapping[int, float]

    @property
    def named(self) -> dict[str, Any]:
        return {"task": self.task, "metric": self.metric, "higher_is_better": self.higher_is_better}

    @property
    def measured(self) -> dict[str, float | None]:
        return {"value": self.value, "stderr": self.stderr}


def measure_tasks(
    sides: Sequence[str],
    tasks: Sequence[str],
    *,
    run: Run | None,
    quant: str,
    folder: Path | None = None,
    limit: int | None = None,
    download: bool = False,
) -> dict[str, Any]:
    """Measure one or two sides on these tasks.

    `folder`: the user's own tasks in the harness's YAML, whose relative paths are relative to it. Without `download`
    nothing is fetched, and the tasks' data must be here. Raises UsageError for sides that the harness can't ask and for
    unknown tasks, MachineNotFit without the harness.
    """
    command = _harness()
    if folder is not None and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", hint="give the folder that the tasks' YAML files are in")
    settings: dict[str, Any] = {"tasks": list(tasks), "log_samples": True, "apply_chat_template": True, "limit": limit}
    own_tasks = []  # names and hashes, so that a changed task counts as another one
    if folder is not None:
        settings["include_path"] = str(folder.resolve())
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        own_tasks = [[str(path.relative_to(folder)), sha256_file(path)] for path in files]
    measured = []
    for text in sides:
        side = find_artefact(text, run, quant)
        model = _model_of(side)
        identity = json.dumps([side.identity, own_tasks, settings], sort_keys=True)
        cache = home() / TASK_FIGURES / hashlib.sha256(identity.encode()).hexdigest()[:16]
        with lock(cache):
            if not list((cache / "out").rglob("results_*.json")):
                _measure(command, {**settings, **model, "output_path": str(cache / "out")}, cache, folder, download)
            measured.append((side.label, _figures(cache)))
    harness = command[0]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        harness = importlib.metadata.version(_MODULE)
    return lm_eval_document(measured, {"tasks": list(tasks), "limit": limit, "harness": harness})


def _harness() -> list[str]:
    if importlib.util.find_spec(_MODULE) is not None:
        return [sys.executable, "-m", _MODULE]
    program = shutil.which("lm-eval")
    if program is None:
        raise MachineNotFit(
            "lm-evaluation-harness is not installed",
            hint=f"{install_command('lm-eval')}, or put the program lm-eval of another environment on PATH",
        )
    return [program]


def _model_of(side: Artefact) -> dict[str, Any]:
    """Return the harness's arguments for a side."""
    if side.endpoint is not None:
        url = f"{side.endpoint.url.removesuffix('/chat/completions')}/chat/completions"
        return {"model": "local-chat-completions", "model_args": {"model": side.endpoint.model, "base_url": url}}
    if side.trained is None:
        raise UsageError(
            f"{side.label} can't be asked by lm-evaluation-harness",
            hint="give a run, a release or base; or serve it, and give its http://HOST:PORT/v1#MODEL",
        )
    base, adapter = side.trained
    arguments = {"pretrained": str(base), "dtype": "auto"}
    return {"model": "hf", "model_args": arguments if adapter is None else {**arguments, "peft": str(adapter)}}


def _measure(
    command: Sequence[str], settings: Mapping[str, Any], target: Path, folder: Path | None, download: bool
) -> None:
    make_folder(target)
    shutil.rmtree(target / "out", ignore_errors=True)
    write_atomic(target / "config.yaml", yaml.safe_dump(dict(settings)).encode())
    environment = {**os.environ, "OPENAI_API_KEY": os.environ.get(ENDPOINT_KEY) or "none", "PYTHONUNBUFFERED": "1"}
    if not download:
        environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
    log = target / LOG
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [*command, "run", "--config", str(target / "config.yaml")],
            cwd=folder or target,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # stopped by a person; or what it left running
            process.wait()
    if code != 0 or not list((target / "out").rglob("results_*.json")):
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        tail = "\n".join(lines[-SHOWN_LINES:])
        hint = "" if download else "; a task's data that are not here yet are fetched with --download"
        raise HivetuneError(f"lm-evaluation-harness ended with {code}; its last lines:\n{tail}", hint=f"{log}{hint}")


def _figures(folder: Path) -> list[TaskFigure]:
    newest = max((folder / "out").rglob("results_*.json"), key=lambda path: path.stat().st_mtime_ns)
    try:
        results = json.loads(newest.read_text(encoding="utf-8"))
        samples = {
            task: [
                json.loads(line)
                for path in newest.parent.glob(f"samples_{task}_*.jsonl")
                for line in path.read_text(encoding="utf-8").splitlines()
            ]
            for task in results["results"]
        }
        return read_figures_of(results, samples)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise HivetuneError(
            f"{newest} has an unknown format: {type(error).__name__}: {error}",
            hint=f"delete {folder} to measure again; is this version of lm-evaluation-harness known?",
        ) from None


# The figures of the harness as one document.

_CLOSE = 1e-6  # a mean that was added up in another order


def read_figures_of(results: Mapping[str, Any], samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[TaskFigure]:
    """Read the harness's `results` and rows of each task. Raises KeyError, TypeError, ValueError for another form."""
    all_figures = []
    for task, figures in results["results"].items():
        better = results.get("higher_is_better", {}).get(task, {})
        for key, value in figures.items():
            name, comma, chosen = key.partition(",")
            if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = figures.get(f"{name}_stderr,{chosen}")
            rows = {
                int(sample["doc_id"]): float(sample[name])
                for sample in samples.get(task, ())
                if sample.get("filter", chosen) == chosen and isinstance(sample.get(name), int | float)
            }
            mean = math.fsum(rows.values()) / len(rows) if rows else math.nan
            all_figures.append(
                TaskFigure(
                    task=task,
                    metric=name if chosen == "none" else f"{name} ({chosen})",
                    value=float(value),
                    stderr=float(error) if isinstance(error, int | float) else None,
                    higher_is_better=better.get(name) is not False,
                    rows=rows if math.isclose(mean, value, rel_tol=_CLOSE, abs_tol=_CLOSE) else {},
                )
            )
    return all_figures


def lm_eval_document(sides: Sequence[tuple[str, Sequence[TaskFigure]]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of one or two models, each with its label; differences are second - first."""
    if len(sides) == 1:
        label, figures = sides[0]
        rows = [{**figure.named, "n": len(figure.rows) or None, "base": figure.measured} for figure in figures]
        return {"schema": 1, **facts, "base": {"label": label}, "tuned": None, "figures": rows}
    others = {(figure.task, figure.metric): figure for figure in sides[1][1]}
    pairs = [(first, others[first.task, first.metric]) for first in sides[0][1] if (first.task, first.metric) in others]
    estimates = [_difference(first, second) for first, second in pairs]
    judged = {number: p_value(e) for number, e in enumerate(estimates) if e is not None and e.ci95 is not None}
    adjusted = dict(zip(judged, holm(list(judged.values())), strict=True))
    rows = [
        {
            **first.named,
            "n": None if estimate is None else len(first.rows),
            "base": first.measured,
            "tuned": second.measured,
            "difference": second.value - first.value,
            "ci95": None if estimate is None or estimate.ci95 is None else list(estimate.ci95),
            "p_holm": adjusted.get(number),
        }
        for number, ((first, second), estimate) in enumerate(zip(pairs, estimates, strict=True))
    ]
    labels = {name: {"label": label} for name, (label, _) in zip(SIDES, sides, strict=True)}
    return {"schema": 1, **facts, **labels, "figures": rows}


def _difference(first: TaskFigure, second: TaskFigure) -> Estimate | None:
    """Return the difference of the means, on the rows of both; None where the harness did not average the same rows."""
    if not first.rows or first.rows.keys() != second.rows.keys():
        return None
    before, after = ([figure.rows[row] for row in sorted(first.rows)] for figure in (first, second))
    if {*before, *after} <= {0.0, 1.0}:
        return paired_proportions([bool(value) for value in before], [bool(value) for value in after])
    count = [1.0] * len(before)
    estimate = jackknife((before, after, count), lambda sums: (sums[1] - sums[0]) / sums[2])
    return replace(estimate, ci95=estimate.ci95 if math.isfinite(estimate.unit_sd) else None)
