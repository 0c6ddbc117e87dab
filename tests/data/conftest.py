"""What the tests of the data room share: a small ChatML model, and files of rows."""

import json
from pathlib import Path
from typing import Any

from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check
from hivetune.data.prepare.report import Report
from hivetune.data.prepare.write import beside


def chat(question: str, answer: str, system: str = "", **more: Any) -> dict[str, Any]:
    turns = [{"role": "system", "content": system}] if system else []
    turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **more}


def adds_up(report: Report) -> bool:
    d = report.document
    placed = d["usable"] + d["duplicates"] + sum(d["rejected"].values()) + sum(d["set_aside"].values())
    return bool(d["rows_in"] == placed and d["usable"] == sum(d["splits"].values()))


def written(path: Path, model: Path | None = None, **settings: Any) -> dict[str, list[Any]]:
    """What `check --clean` writes of the rows of a file: those that passed, the rejected ones and the duplicates."""
    out = path.with_name(f"{path.stem}-clean.jsonl")
    max_length = settings.pop("max_length", 2048)
    check(DataConfig(path=str(path), **settings), model_folder=model, max_length=max_length, clean=out)
    files = {"passed": out, **{kind: beside(out, kind) for kind in ("quarantine", "duplicates")}}
    return {kind: [json.loads(line) for line in file.read_text().splitlines()] for kind, file in files.items()}
