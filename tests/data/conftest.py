"""What the tests of the data room share: a small ChatML model, and files of rows."""

from typing import Any

from hivetune.data.prepare.report import Report


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **more}


def adds_up(report: Report) -> bool:
    d = report.document
    placed = d["usable"] + d["duplicates"] + sum(d["rejected"].values()) + sum(d["set_aside"].values())
    return bool(d["rows_in"] == placed and d["usable"] == sum(d["splits"].values()))
