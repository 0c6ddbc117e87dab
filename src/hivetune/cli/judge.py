"""The commands that measure models: `eval` (base and tuned model on held-out rows, and the verdict) and `compare` (two
models on the same rows)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune import walk
from hivetune.base.disk import write_json
from hivetune.base.paths import quoted
from hivetune.cli.arguments import RunArgument, SetOption
from hivetune.cli.output import emit, number, progress, say, short, show, size, table
from hivetune.cli.verdict import next_step_text, show_metrics, show_verdict
from hivetune.config import DataConfig, EvalConfig, GateConfig, RunConfig, override_config
from hivetune.errors import NotDeployed, UsageError
from hivetune.judge.evaluate import compare_pair, read_evaluation, verdict_document, verdict_of
from hivetune.judge.page import write_comparison_page
from hivetune.judge.verdict import by_part, judge
from hivetune.models.sides import BASELINE, parse_side
from hivetune.release.gguf import SERVED_QUANT
from hivetune.run.figures import report
from hivetune.run.folder import EVALUATION
from hivetune.run.status import find_run
from hivetune.train.open import Run, load_run

MAX_PROBLEMS = 5  # printed one by one


def evaluate(run: RunArgument, overrides: SetOption = None) -> None:
    """Measure base and tuned model on held-out rows, and decide whether the tuned model is better.

    The verdict is deploy, iterate, abort or not-enough-evidence, and the exit code 6 unless it is deploy. Writes
    eval.json into the folder of the run. With --set gate.x=.. alone, an existing eval.json is judged again.
    """
    opened = _open(run, overrides)
    if not overrides or not all(override.startswith("gate.") for override in overrides):
        with progress("scoring and answering", "items") as tell:
            _show_measured(walk.evaluate(opened, progress=tell))
    else:
        walk.gate(opened)
    evaluation = read_evaluation(opened.folder / EVALUATION)
    verdict = verdict_of(evaluation)
    show_verdict(verdict)
    for problem in report(opened.folder, opened.config.report_to):
        say(problem)
    if verdict.verdict == "deploy":
        show(f"next: hivetune export {quoted(run)} --to gguf")
    elif not verdict.advice:
        show(f"next: {next_step_text(verdict)}")
    emit(evaluation)
    if verdict.verdict != "deploy":
        raise typer.Exit(NotDeployed.exit_code)  # no error: the document above is the answer


SHOWN_ANSWERS = 3


def _open(run: str, overrides: Sequence[str] | None) -> Run:
    """Return the run with settings of its evaluation changed; others belong to its training."""
    opened = load_run(find_run(run))
    for override in overrides or ():
        if not override.startswith(("eval.", "gate.")):
            raise UsageError(f"--set {override}: this command can only change eval.* and gate.*")
    return replace(opened, config=override_config(opened.config, overrides or ()))


def _show_measured(evaluation: dict[str, Any]) -> None:
    """Show loss and success by agent and category, some answers, and problems with single rows."""
    say(f"answers come from {evaluation['answered_by']}")
    for part in ("agent", "category"):
        lines = by_part(evaluation, part)
        if part == "agent" or len(lines) > 1:
            _show_parts(part, lines)
    print_row_problems(evaluation["problems"], EVALUATION)
    answers = evaluation["answers"]  # first those where only one of the two succeeded
    for row in sorted(answers, key=lambda row: row["base"]["success"] == row["tuned"]["success"])[:SHOWN_ANSWERS]:
        show(f"\n{short(row['prompt'])}", style="bold")
        for side in ("base", "tuned"):
            mark = {True: "ok    ", False: "wrong ", None: ""}[row[side]["success"]]
            show(f"  {side:6}{mark}{short(row[side]['answer'] or '')}")
    if len(answers) > SHOWN_ANSWERS:
        show(f"\n{len(answers) - SHOWN_ANSWERS} more, side by side: eval.html in the folder of the run")


def print_row_problems(problems: Sequence[Mapping[str, str]], file: str) -> None:
    """Print the first problems with single rows, and name the file that has all."""
    for problem in problems[:MAX_PROBLEMS]:
        say(f"{problem['source']} ({problem['model']}): {problem['problem']}")
    if len(problems) > MAX_PROBLEMS:
        say(f"and {len(problems) - MAX_PROBLEMS} more problems, all in {file}")


def _show_parts(part: str, lines: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for line in lines:
        figures = (number(line[key]) for key in ("base_loss", "tuned_loss"))
        shares = ("-" if line[key] is None else f"{100 * line[key]:.0f} %" for key in ("base_success", "tuned_success"))
        rows.append((line[part] or "-", line["rows"], *figures, line["answers"], *shares))
    columns = (part, "rows", "loss base", "loss tuned", "answers", "success base", "success tuned")
    table("", columns, rows)


_COMPARISON = "compare.json"
_SHOWN_ANSWERS = 5


SIDE_HELP = "A model: base, NAME@VERSION, a run, a .gguf file or http://HOST:PORT/v1#MODEL."


def compare_sides(
    first: Annotated[str, typer.Argument(metavar="A", help=SIDE_HELP)],
    second: Annotated[
        str, typer.Argument(metavar="B", help="The other model, in the same forms. Differences are B - A.")
    ],
    rows: Annotated[list[str] | None, typer.Option(metavar="DATA", help="Answer the rows of this file.")] = None,
    run: Annotated[
        str | None, typer.Option(metavar="RUN", help="Answer the held-out rows of this run; 'base' is its base model.")
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Number of rows to answer.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Maximum tokens of an answer.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="Override a setting in eval.*, such as eval.prompts=100."),
    ] = None,
    quant: Annotated[str, typer.Option(help="Quantization of the base model that adapters run on.")] = (SERVED_QUANT),
) -> None:
    """Compare two models on the same rows: success, answer times, memory, and loss where both have one.

    Each model answers as it would be served. The rows are those of --rows, else the held-out rows of a run.
    """
    # With --rows a run is read only where its base model is asked.
    named = run or (_first_run(second, first) if not rows or BASELINE in (first, second) else None)
    if not rows and named is None:
        raise UsageError(
            "neither A nor B is a run, so there are no rows to answer", hint="give --rows FILE or --run RUN"
        )
    opened = load_run(find_run(named)) if named else None
    wrong = next((override for override in overrides or () if not override.startswith("eval.")), None)
    if wrong:
        raise UsageError(f"--set {wrong}: this command can only change eval.*")
    changes = {"eval.prompts": prompts, "eval.tokens": tokens}
    options = [f"{key}={value}" for key, value in changes.items() if value is not None]
    # Without a run only the section `eval` of this config is read.
    rows_alone = RunConfig(model=BASELINE, data=DataConfig(path="-"), eval=EvalConfig())
    settings = override_config(
        rows_alone if rows or opened is None else opened.config, [*options, *(overrides or ())]
    ).eval
    with progress("answering", "answers") as report:
        comparison = compare_pair(first, second, settings, run=opened, rows=rows or (), quant=quant, progress=report)
    # The measurements and their metrics stay in the folder of the comparison.
    verdict = judge(comparison.document, GateConfig(loss_gain=None), beside_base=False)
    metrics = verdict_document(verdict)["metrics"]
    document = {**comparison.document, "metrics": metrics}
    write_json(comparison.folder / _COMPARISON, document)
    page = write_comparison_page(comparison.folder, document, opened.folder if opened else None)
    document |= {"folder": str(comparison.folder), "page": str(page)}
    _show_comparison(document)
    emit(document)


def _first_run(*sides: str) -> str | None:
    return next((side for side in sides if parse_side(side).kind == "run"), None)


def _show_comparison(document: dict[str, Any]) -> None:
    labels = [document[side]["label"] for side in ("base", "tuned")]
    show(f"A: {labels[0]}\nB: {labels[1]}")
    show_metrics(document["metrics"], ("A", "B"))
    columns = ("side", "answers", "time p50", "p95", "first token p50", "p95", "cold start", "memory")
    table("", columns, [_cost_cells(name, document[side]) for name, side in (("A", "base"), ("B", "tuned"))])
    for metric, reason in document["not_compared"].items():
        say(f"{metric} not compared: {reason}")
    refused = document["rows_refused"]
    if refused:
        say(f"{sum(refused.values())} rows cannot be answered: {', '.join(f'{r} {n}' for r, n in refused.items())}")
    print_row_problems(document["problems"], _COMPARISON)
    # A few answers that only one side got right; without checkers, a few that differ.
    answers = document["answers"]
    changed = [answer for answer in answers if answer["base"]["success"] != answer["tuned"]["success"]]
    changed = changed or [answer for answer in answers if answer["base"]["answer"] != answer["tuned"]["answer"]]
    if changed:
        rows = [
            (short(answer["prompt"]), _marked(answer["base"]), _marked(answer["tuned"]))
            for answer in changed[:_SHOWN_ANSWERS]
        ]
        table(f"{len(changed)} of {len(answers)} answers changed, the first:", ("prompt", "A", "B"), rows)
    show(f"side by side: {document['page']}\nall of it: {Path(document['folder']) / _COMPARISON}")


def _marked(side: Mapping[str, Any]) -> str:
    return {True: "right: ", False: "wrong: ", None: ""}[side["success"]] + short(side["answer"] or "")


def _cost_cells(name: str, side: dict[str, Any]) -> tuple[object, ...]:
    memory = side.get("peak_memory_bytes")
    times = ("latency_p50_s", "latency_p95_s", "first_token_p50_s", "first_token_p95_s")
    return (
        name,
        side["answers"],
        *(number(side.get(key)) for key in times),
        number(side.get("cold_start_s"), 2),
        "-" if memory is None else size(memory),
    )
