"""`hivetune lm-eval`: standard tasks, by lm-evaluation-harness."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.cli.compare import SIDE_HELP
from hivetune.cli.output import emit, number, say, table
from hivetune.errors import UsageError
from hivetune.judge.measure.lm_eval import measure_tasks
from hivetune.models.sides import BASELINE, parse_side
from hivetune.release.gguf import SERVED_QUANT
from hivetune.run.find import find_run
from hivetune.train.open import Run, load_run


def lm_eval(
    first: Annotated[str, typer.Argument(metavar="A", help=SIDE_HELP)],
    second: Annotated[str | None, typer.Argument(metavar="B", help="The same; differences are B - A.")] = None,
    task: Annotated[list[str] | None, typer.Option("--task", metavar="NAME", help="A task; may be repeated.")] = None,
    folder: Annotated[Path | None, typer.Option("--task-folder", help="A folder with tasks of your own.")] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="The run whose base `base` is.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first rows of each task.")] = None,
    download: Annotated[bool, typer.Option("--download", help="Let the harness fetch the tasks' data.")] = False,
) -> None:
    """One or two models on tasks of lm-evaluation-harness, with paired intervals (needs the extra `lm-eval`).

    Nothing is fetched without --download. An endpoint can answer only tasks that are answered in words.
    """
    if not task:
        raise UsageError("name at least one task: --task NAME", hint="lm-eval ls tasks shows what the harness knows")
    sides = [first] if second is None else [first, second]
    say("lm-evaluation-harness measures; this may take long")
    document = measure_tasks(
        sides, task, run=_run(run, sides), quant=SERVED_QUANT, folder=folder, limit=limit, download=download
    )
    columns = (
        ("task", "metric", "n", "A") if second is None else ("task", "metric", "n", "A", "B", "B - A", "95 %", "p")
    )
    table("", columns, [_line(figure, two=second is not None) for figure in document["figures"]])
    emit(document)


def _run(named: str | None, sides: list[str]) -> Run | None:
    """The run that says which base is meant, where a side is `base`."""
    named = named or next((text for text in sides if parse_side(text).kind == "run"), None)
    return load_run(find_run(named)) if named is not None and BASELINE in sides else None


def _line(figure: Mapping[str, Any], *, two: bool) -> tuple[object, ...]:
    begins = (figure["task"], figure["metric"], figure["n"] or "-", number(figure["base"]["value"]))
    if not two:
        return begins
    low_high = "-" if figure["ci95"] is None else " to ".join(number(value) for value in figure["ci95"])
    values = (number(figure["tuned"]["value"]), number(figure["difference"]), low_high, number(figure["p_holm"]))
    return (*begins, *values)
