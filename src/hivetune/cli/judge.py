"""The commands `eval` (measure base and tuned model on held-out rows) and `gate` (the verdict)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import typer

from hivetune import walk
from hivetune.base.paths import quoted
from hivetune.cli.arguments import RunArgument, SetOption
from hivetune.cli.output import emit, number, progress, say, short, show, size, table
from hivetune.config import override_config
from hivetune.errors import NotDeployed, UsageError
from hivetune.judge.findings import SHARES_OF_ANSWERS, metric_name, passed_text
from hivetune.judge.gate import verdict_document
from hivetune.judge.held_out import by_part
from hivetune.records import Verdict
from hivetune.run.folder import EVALUATION
from hivetune.run.status import find_run
from hivetune.train.open import Run, load_run

MAX_PROBLEMS = 5  # printed one by one


def evaluate(run: RunArgument, overrides: SetOption = None) -> None:
    """Measure base and tuned model on held-out rows: the loss on all of them, and answers to some.

    Writes eval.json into the folder of the run.
    """
    opened = _open(run, overrides, "eval.")
    with progress("scoring and answering", "items") as report:
        evaluation = walk.evaluate(opened, progress=report)
    show_evaluation(evaluation)
    _show_answers(evaluation["answers"])
    show(f"next: hivetune gate {quoted(run)}")
    emit(evaluation)


def gate(run: RunArgument, overrides: SetOption = None) -> None:
    """Decide whether the tuned model is better, from eval.json and the thresholds in gate.*.

    The verdict is deploy, iterate, abort or not-enough-evidence. Exits with 6 unless it is deploy.
    """
    verdict = walk.gate(_open(run, overrides, "gate."))
    show_verdict(verdict)
    if verdict.verdict == "deploy":
        show(f"next: hivetune export {quoted(run)} --to gguf")
    emit(verdict_document(verdict))
    if verdict.verdict != "deploy":
        if not verdict.advice:
            show(f"next: {next_step_text(verdict)}")
        raise typer.Exit(NotDeployed.exit_code)  # no error: the document above is the answer


SHOWN_ANSWERS = 3
VERDICT_STYLES = {
    "deploy": "bold green",
    "iterate": "bold yellow",
    "not-enough-evidence": "bold yellow",
    "abort": "bold red",
}
NEXT = {
    "iterate": "train with more or better rows, or other settings; see docs/evaluate.md",
    "abort": "look at the rows, and at the answers in eval.json, before you train longer",
    "not-enough-evidence": "hold out more rows (data.test), or answer more of them (eval.prompts)",
}
UNCHECKED = "give held-out rows a checker (in the row, or eval.checker), then evaluate again"


def next_step_text(verdict: Verdict) -> str:
    """Return what to do after a verdict; more rows do not help if success is required and no row is checked."""
    unchecked = any(metric.name == "success" and metric.required and not metric.n for metric in verdict.metrics)
    return UNCHECKED if unchecked and verdict.verdict == "not-enough-evidence" else NEXT[verdict.verdict]


def _open(run: str, overrides: Sequence[str] | None, section: str) -> Run:
    """Return the run with settings of one section changed; others belong to its training."""
    opened = load_run(find_run(run))
    for override in overrides or ():
        if not override.startswith(section):
            raise UsageError(f"--set {override}: this command can only change {section}*")
    return replace(opened, config=override_config(opened.config, overrides or ()))


def show_evaluation(evaluation: dict[str, Any]) -> None:
    """Show loss and success by agent and category, and problems with single rows."""
    say(f"answers come from {evaluation['answered_by']}")
    for part in ("agent", "category"):
        lines = by_part(evaluation, part)
        if part == "agent" or len(lines) > 1:
            _show_parts(part, lines)
    print_row_problems(evaluation["problems"], EVALUATION)


def print_row_problems(problems: Sequence[Mapping[str, str]], file: str) -> None:
    """Print the first problems with single rows, and name the file that has all."""
    for problem in problems[:MAX_PROBLEMS]:
        say(f"{problem['source']} ({problem['model']}): {problem['problem']}")
    if len(problems) > MAX_PROBLEMS:
        say(f"and {len(problems) - MAX_PROBLEMS} more problems, all in {file}")


def _show_parts(part: str, lines: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            line[part] or "-",
            line["rows"],
            number(line["base_loss"]),
            number(line["tuned_loss"]),
            number(line["p_holm"]),
            line["answers"],
            _share(line["base_success"]),
            _share(line["tuned_success"]),
        )
        for line in lines
    ]
    columns = (part, "rows", "loss base", "loss tuned", "p (Holm)", "answers", "success base", "success tuned")
    table("", columns, rows, numeric=columns[1:])


def _show_answers(answers: Sequence[Mapping[str, Any]]) -> None:
    """Show some answers of both models, first those where only one succeeded."""
    for row in sorted(answers, key=lambda row: row["base"]["success"] == row["tuned"]["success"])[:SHOWN_ANSWERS]:
        show(f"\n{short(row['prompt'])}", style="bold")
        for side in ("base", "tuned"):
            mark = {True: "ok    ", False: "wrong ", None: ""}[row[side]["success"]]
            show(f"  {side:6}{mark}{short(row[side]['answer'] or '')}")
    if len(answers) > SHOWN_ANSWERS:
        show(f"\n{len(answers) - SHOWN_ANSWERS} more, side by side: hivetune runs open RUN")


def show_verdict(verdict: Verdict) -> None:
    """Show the metrics, the verdict, its reasons and what to change."""
    show_metrics(verdict_document(verdict)["metrics"], ("base", "tuned"))
    show(f"verdict: {verdict.verdict}", style=VERDICT_STYLES[verdict.verdict])
    for reason in verdict.reasons:
        show(f"  {reason}")
    if verdict.advice:
        show("what to change:")
    for advice in verdict.advice:
        show(f"  {advice.said}")
        for row in advice.rows[:3]:
            show(f"    {row}")


def show_metrics(metrics: Sequence[Mapping[str, Any]], sides: tuple[str, str]) -> None:
    """Show the metrics of gate.json as a table."""
    columns = ("metric", *sides, "difference", "95 % interval", "n", "threshold", "passed")
    table("", columns, [_line(metric) for metric in metrics], numeric=columns[1:7])


def _line(metric: Mapping[str, Any]) -> tuple[object, ...]:
    name, interval = metric["name"], metric["ci95"]
    return (
        metric_name(name),
        metric_value(name, metric["base"]),
        metric_value(name, metric["tuned"]),
        metric_value(name, metric["difference"], sign=True),
        "-" if interval is None else " to ".join(metric_value(name, end, sign=True) for end in interval),
        metric["n"],
        _threshold(metric),
        passed_text(metric).replace("no", "NO"),
    )


def _threshold(metric: Mapping[str, Any]) -> str:
    if metric["threshold"] is None:
        return "-"
    if metric["name"] in ("latency_s", "peak_memory_bytes"):
        return f"at most {metric['threshold']:g} x"
    if metric["name"].startswith(("least_", "most_")):
        return f"at {metric['name'].partition('_')[0]} {metric['threshold']:g}"
    if metric["name"] in ("kept", "kept_general"):
        return f"at least {metric['threshold']:.0%}"
    if metric["name"] == "length":
        return f"within {metric['threshold']:g} x"
    if metric["name"] in ("loops", "refusals"):
        return f"at most {100 * metric['threshold']:+g} %"
    return f"gain > {metric['threshold']:g}"


def metric_value(name: str, value: float | None, *, sign: bool = False) -> str:
    """Return a metric in its unit, for people."""
    if value is None:
        return "-"
    prefix = "+" if sign and value > 0 else ""
    if name == "peak_memory_bytes":
        return prefix + size(value)
    if name in SHARES_OF_ANSWERS:
        return f"{prefix}{100 * value:.1f} %"
    return f"{prefix}{value:.3f}" if abs(value) < 100 else f"{prefix}{value:,.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
