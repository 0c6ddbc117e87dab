"""The tasks of a crew of CrewAI with what came of each (`CrewOutput`).

https://docs.crewai.com/en/concepts/crews#crew-output
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Row, objects


def recognise(row: Row) -> bool:
    tasks = objects(row["tasks_output"])
    return tasks is not None and all("description" in task and "raw" in task for task in tasks)


def rows(row: Row) -> Iterator[Row]:
    for task in row["tasks_output"]:
        yield {"task": task["description"], "output": task["raw"], "agent": task.get("agent")}


FORMAT = Format("crewai", recognise, rows, "batch", needs=frozenset(("tasks_output",)))
