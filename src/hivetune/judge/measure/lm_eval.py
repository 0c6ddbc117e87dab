"""The station beside `compare`: standard tasks by lm-evaluation-harness (the extra `lm-eval`), in a process of its own.

A base, run or release is loaded by the harness through transformers and PEFT, so every kind of task can be asked; an
endpoint is asked over HTTP, so only tasks that are answered in words. What was measured is kept by what it depends on.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hivetune.base.disk import home, lock, sha256_file, write_atomic
from hivetune.base.packages import install_command
from hivetune.base.private import make_folder
from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.judge.lm_eval import TaskFigure, lm_eval_document, read_figures_of
from hivetune.judge.measure.artefacts import Artefact, find_artefact
from hivetune.llama.ask import ENDPOINT_KEY
from hivetune.train.open import Run

TASK_FIGURES = "lm-eval"  # below the home
LOG = "lm-eval.log"
SHOWN_LINES = 6
_MODULE = "lm_eval"


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
    """One or two sides on these tasks. `folder`: of tasks of one's own, in the harness's YAML, whose relative paths are
    relative to it. Without `download` nothing is fetched: the tasks' data are those that are here.

    Raises UsageError for sides that the harness can't ask and for unknown tasks, MachineNotFit without the harness.
    """
    command = _harness()
    if folder is not None and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", hint="give the folder that the tasks' YAML files are in")
    settings: dict[str, Any] = {"tasks": list(tasks), "log_samples": True, "apply_chat_template": True, "limit": limit}
    if folder is not None:
        settings["include_path"] = str(folder.resolve())
    found = []
    for text in sides:
        side = find_artefact(text, run, quant)
        model = _model_of(side)
        key = _key([side.identity, _contents(folder), settings])
        kept = home() / TASK_FIGURES / key
        with lock(kept):
            if not list((kept / "out").rglob("results_*.json")):
                _measure(command, {**settings, **model, "output_path": str(kept / "out")}, kept, folder, download)
            found.append((side.label, _figures(kept)))
    return lm_eval_document(found, {"tasks": list(tasks), "limit": limit, "harness": _version(command)})


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
    """How the harness is told of a side."""
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
    command: Sequence[str], settings: Mapping[str, Any], kept: Path, folder: Path | None, download: bool
) -> None:
    make_folder(kept)
    shutil.rmtree(kept / "out", ignore_errors=True)
    write_atomic(kept / "config.yaml", yaml.safe_dump(dict(settings)).encode())
    environment = {**os.environ, "OPENAI_API_KEY": os.environ.get(ENDPOINT_KEY) or "none", "PYTHONUNBUFFERED": "1"}
    if not download:
        environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
    log = kept / LOG
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [*command, "run", "--config", str(kept / "config.yaml")],
            cwd=folder or kept,
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
    if code != 0 or not list((kept / "out").rglob("results_*.json")):
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        tail = "\n".join(lines[-SHOWN_LINES:])
        hint = "" if download else "; a task's data that are not here yet are fetched with --download"
        raise HivetuneError(f"lm-evaluation-harness ended with {code}; its last lines:\n{tail}", hint=f"{log}{hint}")


def _figures(kept: Path) -> list[TaskFigure]:
    newest = max((kept / "out").rglob("results_*.json"), key=lambda path: path.stat().st_mtime_ns)
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
            f"{newest} can't be understood: {type(error).__name__}: {error}",
            hint=f"delete {kept} to measure again; is this version of lm-evaluation-harness known?",
        ) from None


def _contents(folder: Path | None) -> list[list[str]]:
    """Names and hashes of a folder of tasks: a task that was changed is another one."""
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder is not None else []
    return [[str(path.relative_to(folder)), sha256_file(path)] for path in files if folder is not None]


def _version(command: Sequence[str]) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(_MODULE)
    return command[0]


def _key(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
