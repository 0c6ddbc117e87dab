"""The tasks of a crew of CrewAI with what came of each (`CrewOutput`).

https://docs.crewai.com/en/concepts/crews#crew-output
"""

from collections.abc import Iterator

from hivetune.data.pieces.format import Batch
from hivetune.data.pieces.said import Row, objects


def rows(row: Row) -> Iterator[Row]:
    tasks = objects(row["tasks_output"]) or []
    if all("description" in task and "raw" in task for task in tasks):
        for task in tasks:
            yield {"task": task["description"], "output": task["raw"], "agent": task.get("agent")}


FORMAT = Batch("crewai", rows, needs=frozenset(("tasks_output",)))
