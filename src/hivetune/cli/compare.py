"""The commands `compare` (two models on the same rows) and `lm-eval` (models on standard tasks)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.base.disk import write_json
from hivetune.cli.judge import print_row_problems, show_metrics
from hivetune.cli.output import emit, number, progress, say, short, show, size, table
from hivetune.config import DataConfig, EvalConfig, GateConfig, RunConfig, override_config
from hivetune.errors import UsageError
from hivetune.judge.compare import Comparison, compare_pair
from hivetune.judge.gate import judge, verdict_document
from hivetune.judge.lm_eval import measure_tasks
from hivetune.judge.page import write_comparison_page
from hivetune.models.sides import BASELINE, parse_side
from hivetune.release.gguf import SERVED_QUANT
from hivetune.run.status import find_run
from hivetune.train.open import Run, load_run

_COMPARISON = "compare.json"
_SHOWN_ANSWERS = 5
SIDE_HELP = "A model: base, NAME@VERSION, a run, a .gguf file, http://HOST:PORT/v1#MODEL, or a .yaml file of figures."


def compare_sides(
    first: Annotated[str, typer.Argument(metavar="A", help=SIDE_HELP)],
    second: Annotated[
        str, typer.Argument(metavar="B", help="The other model, in the same forms. Differences are B - A.")
    ],
    rows: Annotated[
        list[str] | None, typer.Option("--rows", metavar="DATA", help="Answer the rows of this file.")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="Answer the held-out rows of this run.")
    ] = None,
    prompts: Annotated[int | None, typer.Option("--prompts", min=1, help="Number of rows to answer.")] = None,
    new_tokens: Annotated[int | None, typer.Option("--new-tokens", min=1, help="Maximum tokens of an answer.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="Override a setting in eval.*, such as eval.judge=URL#MODEL."),
    ] = None,
    quant: Annotated[str, typer.Option("--quant", help="Quantization of the base model that adapters run on.")] = (
        SERVED_QUANT
    ),
) -> None:
    """Compare two models on the same rows: success, answer times, memory, and loss where both have one.

    Each model answers as it would be served. The rows are those of --rows, else the held-out rows of a run.
    """
    opened = None if rows else _rows_from(run, first, second)
    wrong = next((override for override in overrides or () if not override.startswith("eval.")), None)
    if wrong:
        raise UsageError(f"--set {wrong}: this command can only change eval.*")
    changes = {"eval.prompts": prompts, "eval.new_tokens": new_tokens}
    options = [f"{key}={value}" for key, value in changes.items() if value is not None]
    # Without a run only the section `eval` of this config is read.
    rows_alone = RunConfig(model=BASELINE, data=DataConfig(path="-"), eval=EvalConfig(general=False))
    settings = override_config(opened.config if opened else rows_alone, [*options, *(overrides or ())]).eval
    with progress("answering", "answers") as report:
        comparison = compare_pair(first, second, settings, run=opened, rows=rows or (), quant=quant, progress=report)
    document = _document(comparison, opened)
    _show(document)
    emit(document)


def _rows_from(run: str | None, first: str, second: str) -> Run:
    """Return the run of --run, else B or A if one of them is a run."""
    named = run or next((text for text in (second, first) if parse_side(text).kind == "run"), None)
    if named is None:
        raise UsageError(
            "neither A nor B is a run, so there are no rows to answer", hint="give --rows FILE or --run RUN"
        )
    return load_run(find_run(named))


def _document(comparison: Comparison, run: Run | None) -> dict[str, Any]:
    """Write the measurements and their metrics into the folder of the comparison, and return them."""
    nothing_required = GateConfig(loss_gain=None, latency_ratio=None, memory_ratio=None, least_kept=None)
    metrics = verdict_document(judge(comparison.document, nothing_required))["metrics"]
    document = {**comparison.document, "metrics": metrics}
    write_json(comparison.folder / _COMPARISON, document)
    page = write_comparison_page(comparison.folder, document, run.folder if run else None)
    return {**document, "folder": str(comparison.folder), "page": str(page)}


def _show(document: dict[str, Any]) -> None:
    labels = [document[side]["label"] for side in ("base", "tuned")]
    show(f"A: {labels[0]}\nB: {labels[1]}")
    show_metrics(document["metrics"], ("A", "B"))
    columns = ("side", "answers", "time p50", "p95", "first token p50", "p95", "tokens/s", "cold start", "memory")
    table("", columns, [_costs(name, document[side]) for name, side in (("A", "base"), ("B", "tuned"))])
    for metric, reason in document["not_compared"].items():
        say(f"{metric} not compared: {reason}")
    if "preferences" in document:
        say(_judge_text(document["preferences"]))
    refused = document["rows_refused"]
    if refused:
        say(f"{sum(refused.values())} rows cannot be answered: {', '.join(f'{r} {n}' for r, n in refused.items())}")
    print_row_problems(document["problems"], _COMPARISON)
    _show_changes(document["answers"])
    show(f"side by side: {document['page']}\nall of it: {Path(document['folder']) / _COMPARISON}")


def _judge_text(given: Mapping[str, Any]) -> str:
    text = f"judge {given['judge']}: {given['contradictions']} of {given['asked']} pairs differ in reverse order"
    return text + f", {given['unreadable']} pairs without a readable reply" * bool(given["unreadable"])


def _show_changes(answers: Sequence[Mapping[str, Any]]) -> None:
    """Show a few answers that only one side got right; without checkers, a few that differ."""
    changed = [answer for answer in answers if answer["base"]["success"] != answer["tuned"]["success"]]
    changed = changed or [answer for answer in answers if answer["base"]["answer"] != answer["tuned"]["answer"]]
    rows = [
        (short(answer["prompt"]), *(_marked(answer[side]) for side in ("base", "tuned")))
        for answer in changed[:_SHOWN_ANSWERS]
    ]
    if rows:
        table(f"{len(changed)} of {len(answers)} answers changed, the first:", ("prompt", "A", "B"), rows)


def _marked(side: Mapping[str, Any]) -> str:
    return {True: "right: ", False: "wrong: ", None: ""}[side["success"]] + short(side["answer"] or "")


def _costs(name: str, side: dict[str, Any]) -> tuple[object, ...]:
    memory = side.get("peak_memory_bytes")
    times = ("latency_p50_s", "latency_p95_s", "first_token_p50_s", "first_token_p95_s")
    return (
        name,
        side.get("answers", "recorded"),
        *(number(side.get(key)) for key in times),
        number(side.get("tokens_per_second"), 1),
        number(side.get("cold_start_s"), 2),
        "-" if memory is None else size(memory),
    )


def lm_eval(
    first: Annotated[str, typer.Argument(metavar="A", help=SIDE_HELP)],
    second: Annotated[
        str | None, typer.Argument(metavar="B", help="The other model, in the same forms. Differences are B - A.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option("--task", metavar="NAME", help="A task of the harness; may be repeated.")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--task-folder", help="Folder with your own tasks.")] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="Take the base model of this run for the side `base`.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Use only the first N rows of each task.")] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Allow the harness to download the data of its tasks.")
    ] = False,
) -> None:
    """Measure one or two models on tasks of lm-evaluation-harness, with paired intervals.

    Needs the extra `lm-eval`. An endpoint can only do tasks whose answers are generated text.
    """
    if not task:
        raise UsageError("no task given: --task NAME", hint="list all tasks: lm-eval ls tasks")
    sides = [first] if second is None else [first, second]
    say("running lm-evaluation-harness; this may take long")
    document = measure_tasks(
        sides, task, run=_run(run, sides), quant=SERVED_QUANT, folder=folder, limit=limit, download=download
    )
    columns = (
        ("task", "metric", "n", "A") if second is None else ("task", "metric", "n", "A", "B", "B - A", "95 %", "p")
    )
    table("", columns, [_line(figure, two=second is not None) for figure in document["figures"]])
    emit(document)


def _run(named: str | None, sides: list[str]) -> Run | None:
    """Return the run with the base model of the side `base`, if there is one."""
    named = named or next((text for text in sides if parse_side(text).kind == "run"), None)
    return load_run(find_run(named)) if named is not None and BASELINE in sides else None


def _line(figure: Mapping[str, Any], *, two: bool) -> tuple[object, ...]:
    begins = (figure["task"], figure["metric"], figure["n"] or "-", number(figure["base"]["value"]))
    if not two:
        return begins
    low_high = "-" if figure["ci95"] is None else " to ".join(number(value) for value in figure["ci95"])
    values = (number(figure["tuned"]["value"]), number(figure["difference"]), low_high, number(figure["p_holm"]))
    return (*begins, *values)
