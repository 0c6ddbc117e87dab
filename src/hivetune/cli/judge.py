"""The commands that measure models: `eval` (base and tuned model on held-out rows, and the verdict) and `compare`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from typer import Argument, Exit, Option

from hivetune import walk
from hivetune.base.documents import read_document
from hivetune.base.paths import quoted
from hivetune.base.typed import from_plain
from hivetune.cli.arguments import RunArgument, SetOption
from hivetune.cli.output import Note, Table, answer, progress, say, short
from hivetune.config import DataConfig, EvalConfig, GateConfig, RunConfig, override_config
from hivetune.errors import NotDeployed, UsageError
from hivetune.judge.answers import minutes_text
from hivetune.judge.evaluate import compare_pair, verdict_document, verdict_of
from hivetune.judge.page import GAIN, REQUIRED, agent_cells, metric_cells
from hivetune.judge.verdict import judge
from hivetune.machine.findings import llama_build_problem
from hivetune.machine.inventory import read_cards
from hivetune.machine.look import look
from hivetune.models.sides import BASELINE, parse_side
from hivetune.records import Metric, Verdict
from hivetune.run.figures import report
from hivetune.run.folder import EVALUATION

MAX_PROBLEMS = 5  # shown one by one
SHOWN_ANSWERS = 3  # they fit on a screen
NEXT = {
    "iterate": "train with more or better rows, or other settings; see docs/evaluate.md",
    "abort": "look at the rows, and at the answers in eval.json, before you train longer",
    "not-enough-evidence": "hold out more rows (data.test), or answer more of them (eval.prompts)",
}
MORE_ROWS, MORE_ANSWERS = "hold out more rows (data.test)", "answer more held-out rows (eval.prompts, data.test)"
UNCHECKED = "give held-out rows a checker (in the row, or eval.checker), then evaluate again"
TIMES = {"latency_s", "max_seconds"}
QUIET = "evaluate again when the machine is quiet: hivetune eval RUN"
AGENT = "agent rows loss_base loss_tuned answers success_base success_tuned"


def evaluate(run: RunArgument, overrides: SetOption = None) -> None:
    """Measure base and tuned model on held-out rows, and decide whether the tuned model is better.

    The verdict is deploy, iterate, abort or not-enough-evidence, and the exit code 6 unless it is deploy. Writes
    eval.json into the folder of the run. With --set gate.x=.. alone, an existing eval.json is judged again.
    """
    opened, changes = walk.open_trained(run), overrides or []
    _refuse_others(changes, "eval.", "gate.")
    opened = replace(opened, config=override_config(opened.config, changes))
    measures = not changes or not all(override.startswith("gate.") for override in changes)
    if measures:
        if read_cards() and (words := llama_build_problem(look())):
            say(words + minutes_text(opened.config.model, opened.config.eval))  # before the minutes that it costs
        with progress("scoring, timing and answering", "items") as tell:
            walk.evaluate(opened, progress=tell)
    else:
        walk.gate(opened)
    evaluation = read_document(opened.folder / EVALUATION)
    verdict = verdict_of(evaluation)
    is_better = verdict.verdict == "deploy"
    following = next_step(verdict.verdict, verdict_document(verdict)["metrics"])
    answer(
        evaluation,
        *(measured_text(evaluation) if measures else ()),
        *verdict_text(verdict),
        *map(Note, report(opened.folder, opened.config.report_to)),
        f"next: {f'hivetune export {quoted(run)} --to gguf' if is_better else following}",
    )
    if not is_better:
        raise Exit(NotDeployed.exit_code)  # no error: the document above is the answer


def _refuse_others(overrides: Sequence[str], *sections: str) -> None:
    """Raise UsageError for settings that only affect training."""
    for override in overrides:
        if not override.startswith(sections):
            only = " and ".join(f"{section}*" for section in sections)
            raise UsageError(f"--set {override}: this command can only change {only}")


def measured_text(evaluation: dict[str, Any]) -> Iterator[str | Table]:
    """Yield loss and success by agent, some answers, and problems with single rows."""
    yield Note(f"answers come from {evaluation['answered_by']}")
    yield Table(AGENT, agent_cells(evaluation))
    yield from _problem_text(evaluation["problems"], f"all in {EVALUATION}")
    yield _answers_table(evaluation["answers"], "base", "tuned", "answers; all side by side: eval.html of the run")


def _answers_table(answers: Sequence[Mapping[str, Any]], first: str, second: str, title: str) -> Table:
    """Return a table of the first answers; those that only one of the two models got right come first."""
    ordered = sorted(answers, key=lambda row: row["base"]["success"] == row["tuned"]["success"])[:SHOWN_ANSWERS]
    cells = [(short(row["prompt"]), _marked(row["base"]), _marked(row["tuned"])) for row in ordered]
    return Table(f"prompt {first} {second}", cells, f"{len(cells)} of {len(answers)} {title}")


def _marked(side: Mapping[str, Any]) -> str:
    return {True: "right: ", False: "wrong: ", None: ""}[side["success"]] + short(side["answer"] or "")


def _problem_text(problems: Sequence[Mapping[str, str]], where: str) -> Iterator[Note]:
    for problem in problems[:MAX_PROBLEMS]:
        yield Note(f"{problem['source']} ({problem['model']}): {problem['problem']}")
    if len(problems) > MAX_PROBLEMS:
        yield Note(f"and {len(problems) - MAX_PROBLEMS} more problems, {where}")


def verdict_text(verdict: Verdict) -> Iterator[str | Table]:
    """Yield the metrics, the verdict and its reasons."""
    yield metrics_table(verdict.metrics, "base", "tuned")
    yield f"{GAIN.format('the tuned model')} {REQUIRED}"
    yield f"verdict: {verdict.verdict}"
    yield from (f"  {reason}" for reason in verdict.reasons)


def next_step(verdict: str, metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return the next step after a verdict, or, where evidence is lacking, how many more rows the open metrics need."""
    if verdict != "not-enough-evidence":
        failed = {each["name"] for each in metrics if each["passed"] is False and each.get("needed") is None}
        return QUIET if failed and failed <= TIMES else NEXT.get(verdict, "")
    # More rows do not help where success is required and no row has a checker.
    if any(metric["name"] == "success" and metric["required"] and not metric["n"] for metric in metrics):
        return UNCHECKED
    steps = []
    for metric in metrics:
        if metric["passed"] is False and metric.get("needed") is not None:
            steps.append(MORE_ROWS if metric["name"] == "loss" else MORE_ANSWERS)
        elif metric["passed"] is False and metric["name"] in TIMES and metric["n"]:
            steps.append(QUIET)  # other programs disturbed the times, which more rows would not fix
    return "; ".join(dict.fromkeys(steps)) or NEXT[verdict]


def metrics_table(metrics: Sequence[Metric], first: str, second: str) -> Table:
    """Return a table with one line per metric; gains are positive where the second side is better."""
    cells = [(*row[:-1], row[-1].replace("no", "NO")) for row in map(metric_cells, metrics)]
    return Table(f"metric {first} {second} gain interval_(95_%)=interval n required passed", cells)


SIDE_HELP = "A model: base, NAME@VERSION, a run, a .gguf file or http://HOST:PORT/v1#MODEL."


def compare_sides(
    first: Annotated[str, Argument(metavar="A", help=SIDE_HELP)],
    second: Annotated[
        str, Argument(metavar="B", help="The other model, in the same forms. A gain is positive if B is better.")
    ],
    rows: Annotated[list[str] | None, Option(metavar="DATA", help="File of rows that both models answer.")] = None,
    run: Annotated[
        str | None, Option(metavar="RUN", help="Run whose held-out rows both models answer; 'base' is its base model.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Compare two models on the same rows: success, answer times, memory, and loss where both have one.

    Each model answers as it would be served. The rows are those of --rows, else the held-out rows of a run. --set
    changes a setting in eval.*, such as eval.prompts=100.
    """
    # With --rows a run is read only where its base model is asked.
    needs_run = not rows or BASELINE in (first, second)
    named = run or next((side for side in (second, first) if needs_run and parse_side(side).kind == "run"), None)
    if not rows and named is None:
        hint = "give --rows FILE or --run RUN"
        raise UsageError("neither A nor B is a run, so there are no rows to answer", hint=hint)
    opened = walk.open_trained(named) if named else None
    _refuse_others(overrides or (), "eval.")
    # Without a run only the section `eval` of this config is read.
    rows_alone = RunConfig(model=BASELINE, data=DataConfig(path="-"), eval=EvalConfig())
    config = rows_alone if rows or opened is None else opened.config
    settings = override_config(config, overrides or ()).eval
    with progress("answering", "answers") as tell:
        document = compare_pair(first, second, settings, run=opened, rows=rows or (), progress=tell)
    verdict = judge(document, GateConfig(loss_gain=None), beside_base=False)
    document |= {"metrics": verdict_document(verdict)["metrics"]}
    answer(document, *comparison_text(document), "all answers side by side: hivetune compare ... --json")


def comparison_text(document: dict[str, Any]) -> Iterator[str | Table]:
    """Yield the metrics, and some rows on which the answers of the two sides differ."""
    yield metrics_table([from_plain(Metric, metric) for metric in document["metrics"]], "A", "B")
    yield GAIN.format("B")
    yield from (Note(f"{metric} not compared: {reason}") for metric, reason in document["not_compared"].items())
    if refused := document["rows_refused"]:
        reasons = ", ".join(f"{reason} {count}" for reason, count in refused.items())
        yield Note(f"{sum(refused.values())} rows cannot be answered: {reasons}")
    yield from _problem_text(document["problems"], "all with --json")
    changed = [one for one in document["answers"] if one["base"]["answer"] != one["tuned"]["answer"]]
    yield _answers_table(changed, "A", "B", "answers that changed")
