"""`hivetune eval` and `hivetune gate`: measure base and tuned model on held-out rows, and say what follows."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import typer

from hivetune.base.paths import quoted
from hivetune.cli.arguments import RunArgument, SetOption
from hivetune.cli.output import emit, number, progress, say, show, size, table
from hivetune.config import override_config
from hivetune.errors import NotDeployed, UsageError
from hivetune.judge.evaluate import by_part
from hivetune.judge.evaluate_run import evaluate_run
from hivetune.judge.findings import SHARES_OF_ANSWERS, metric_name, said_of_passed
from hivetune.judge.verdict import judge_run, verdict_document
from hivetune.records import Verdict
from hivetune.run.find import find_run
from hivetune.run.folder import EVALUATION
from hivetune.train.open import Run, load_run

MOST_PROBLEMS = 5  # that are told one by one


def evaluate(run: RunArgument, overrides: SetOption = None) -> None:
    """Score base and tuned model on the held-out rows and answer some as they are served. Writes eval.json."""
    opened = _open(run, overrides, "eval.")
    with progress("scoring and answering", "items") as report:
        evaluation = evaluate_run(opened, report)
    show_evaluation(evaluation)
    _show_answers(evaluation["answers"])
    show(f"next: hivetune gate {quoted(run)}")
    emit(evaluation)


def gate(run: RunArgument, overrides: SetOption = None) -> None:
    """The verdict on eval.json: deploy, iterate, abort or not-enough-evidence. Exit code 6 unless deploy."""
    verdict = judge_run(_open(run, overrides, "gate."))
    show_verdict(verdict)
    if verdict.verdict == "deploy":
        show(f"next: hivetune export {quoted(run)} --to gguf")
    emit(verdict_document(verdict))
    if verdict.verdict != "deploy":
        if not verdict.advice:
            show(f"next: {what_next(verdict)}")
        raise typer.Exit(NotDeployed.exit_code)  # not as an error: the document above is the whole answer


SHOWN_ANSWERS, _SHOWN_CHARS = 3, 160
VERDICT_STYLES = {
    "deploy": "bold green",
    "iterate": "bold yellow",
    "not-enough-evidence": "bold yellow",
    "abort": "bold red",
}
NEXT = {
    "iterate": "more or better rows, other settings; docs/evaluate.md says what each verdict means",
    "abort": "look at the rows and at the answers in eval.json before training longer",
    "not-enough-evidence": "hold out more rows (data.test), or answer more of them (eval.prompts)",
}
UNCHECKED = "give held-out rows a checker (their own, or eval.checker) and answer them (eval.prompts)"


def what_next(verdict: Verdict) -> str:
    """More rows are no help where success is required and none of them is checked."""
    unchecked = any(metric.name == "success" and metric.required and not metric.n for metric in verdict.metrics)
    return UNCHECKED if unchecked and verdict.verdict == "not-enough-evidence" else NEXT[verdict.verdict]


def _open(run: str, overrides: Sequence[str] | None, section: str) -> Run:
    """The run, with settings of one section changed: others would not be those that it was trained with."""
    opened = load_run(find_run(run))
    for override in overrides or ():
        if not override.startswith(section):
            raise UsageError(f"--set {override}: only {section}* can be changed here")
    return replace(opened, config=override_config(opened.config, overrides or ()))


def show_evaluation(evaluation: dict[str, Any]) -> None:
    """Loss and success by agent and category, and what was wrong with single rows."""
    say(f"answers come from {evaluation['answered_by']}")
    for part in ("agent", "category"):
        lines = by_part(evaluation, part)
        if part == "agent" or len(lines) > 1:
            _show_parts(part, lines)
    say_problems(evaluation["problems"], EVALUATION)


def say_problems(problems: Sequence[Mapping[str, str]], file: str) -> None:
    """What was wrong with single rows: the first ones, and the file that has all of them."""
    for problem in problems[:MOST_PROBLEMS]:
        say(f"{problem['source']} ({problem['model']}): {problem['problem']}")
    if len(problems) > MOST_PROBLEMS:
        say(f"and {len(problems) - MOST_PROBLEMS} more problems, all in {file}")


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
    """Some answers of both, those first where only one of the two succeeded; all are on the page."""
    ranked = sorted(answers, key=lambda row: row["base"]["success"] == row["tuned"]["success"])
    for row in ranked[:SHOWN_ANSWERS]:
        show(f"\n{_short(row['prompt'])}", style="bold")
        for side in ("base", "tuned"):
            mark = {True: "ok    ", False: "wrong ", None: ""}[row[side]["success"]]
            show(f"  {side:6}{mark}{_short(row[side]['answer'] or '')}")
    if len(answers) > SHOWN_ANSWERS:
        show(f"\n{len(answers) - SHOWN_ANSWERS} more, side by side: hivetune open RUN")


def _short(text: str) -> str:
    return textwrap.shorten(text, _SHOWN_CHARS, placeholder=" ...")


def show_verdict(verdict: Verdict) -> None:
    """The table of the verdict: base | tuned | difference with interval | threshold | passed."""
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
    """The metrics of gate.json as a table."""
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
        said_of_passed(metric).replace("no", "NO"),
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
    """A metric as people read it, in its unit."""
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
