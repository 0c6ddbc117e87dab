"""`hivetune compare A B`: any two releases, runs, GGUF files or endpoints on the same rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.base.disk import write_json
from hivetune.cli.judge import say_problems, show_metrics
from hivetune.cli.output import emit, number, progress, say, show, size, table
from hivetune.config import DataConfig, EvalConfig, GateConfig, RunConfig, override_config
from hivetune.errors import UsageError
from hivetune.judge.gate import judge
from hivetune.judge.measure.pages import write_comparison_page
from hivetune.judge.measure.station import Comparison, compare_pair
from hivetune.judge.verdict import verdict_document
from hivetune.models.sides import BASELINE, parse_side
from hivetune.release.gguf import SERVED_QUANT
from hivetune.run.find import find_run
from hivetune.train.open import Run, load_run

_COMPARISON = "compare.json"
_SHOWN_ANSWERS, _SHOWN_CHARS = 5, 160
SIDE_HELP = "base, NAME@VERSION, a run, a .gguf file, http://HOST:PORT/v1#MODEL, or a .yaml file of figures."


def compare_sides(
    first: Annotated[str, typer.Argument(metavar="A", help=SIDE_HELP)],
    second: Annotated[str, typer.Argument(metavar="B", help="The same; differences are B - A.")],
    rows: Annotated[list[str] | None, typer.Option("--rows", metavar="DATA", help="Files of rows to answer.")] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Answer this run's held-out rows.")] = None,
    prompts: Annotated[int | None, typer.Option("--prompts", min=1, help="Most rows that are answered.")] = None,
    new_tokens: Annotated[int | None, typer.Option("--new-tokens", min=1, help="Longest answer, in tokens.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Another setting: eval.judge=URL#MODEL, ...")
    ] = None,
    quant: Annotated[str, typer.Option("--quant", help="Number type of a base that adapters are served on.")] = (
        SERVED_QUANT
    ),
) -> None:
    """Two of anything on the same rows, as they are served: success, times, memory, and loss where both have one."""
    opened = None if rows else _rows_from(run, first, second)
    wrong = next((override for override in overrides or () if not override.startswith("eval.")), None)
    if wrong:
        raise UsageError(f"--set {wrong}: only eval.* can be changed here")
    changes = {"eval.prompts": prompts, "eval.new_tokens": new_tokens}
    given = [f"{key}={value}" for key, value in changes.items() if value is not None]
    # Without a run only `eval` of this config is read; who names the rows is asked nothing else.
    rows_alone = RunConfig(model=BASELINE, data=DataConfig(path="-"), eval=EvalConfig(general=False))
    config = opened.config if opened else rows_alone
    settings = override_config(config, [*given, *(overrides or ())]).eval
    with progress("answering", "answers") as report:
        made = compare_pair(first, second, settings, run=opened, rows=rows or (), quant=quant, progress=report)
    document = _document(made, opened)
    _show(document)
    emit(document)


def _rows_from(run: str | None, first: str, second: str) -> Run:
    """The run that --run names, else the run among the sides: the later one, if both are."""
    named = run or next((text for text in (second, first) if parse_side(text).kind == "run"), None)
    if named is None:
        raise UsageError("neither side is a run, so it is not known which rows to ask", hint="--rows FILE or --run RUN")
    return load_run(find_run(named))


def _document(made: Comparison, run: Run | None) -> dict[str, Any]:
    """What was measured, with its metrics, written into the folder of the comparison."""
    nothing_required = GateConfig(loss_gain=None, latency_ratio=None, memory_ratio=None, least_kept=None)
    metrics = verdict_document(judge(made.document, nothing_required))["metrics"]
    document = {**made.document, "metrics": metrics}
    write_json(made.folder / _COMPARISON, document)
    page = write_comparison_page(made.folder, document, run.folder if run else None)
    return {**document, "folder": str(made.folder), "page": str(page)}


def _show(document: dict[str, Any]) -> None:
    labels = [document[side]["label"] for side in ("base", "tuned")]
    show(f"A: {labels[0]}\nB: {labels[1]}")
    show_metrics(document["metrics"], ("A", "B"))
    columns = ("side", "answers", "time p50", "p95", "first token p50", "p95", "tokens/s", "cold start", "memory")
    table("", columns, [_costs(name, document[side]) for name, side in (("A", "base"), ("B", "tuned"))])
    for what, why in document["not_compared"].items():
        say(f"{what} is not compared: {why}")
    if "preferences" in document:
        say(_judge_said(document["preferences"]))
    refused = document["rows_refused"]
    if refused:
        say(f"{sum(refused.values())} rows can't be asked: {', '.join(f'{why} {n}' for why, n in refused.items())}")
    say_problems(document["problems"], _COMPARISON)
    _show_changes(document["answers"])
    show(f"side by side: {document['page']}\nall of it: {Path(document['folder']) / _COMPARISON}")


def _judge_said(found: Mapping[str, Any]) -> str:
    said = f"the judge {found['judge']} contradicts itself on {found['contradictions']} of {found['asked']} pairs"
    said += " when the answers change places"
    return said + f"; on {found['unreadable']} pairs a reply named neither" * bool(found["unreadable"])


def _show_changes(answers: Sequence[Mapping[str, Any]]) -> None:
    """A few answers that only one side gives rightly; without checkers, a few that differ."""
    changed = [answer for answer in answers if answer["base"]["success"] != answer["tuned"]["success"]]
    changed = changed or [answer for answer in answers if answer["base"]["answer"] != answer["tuned"]["answer"]]
    rows = [
        (_short(answer["prompt"]), *(_marked(answer[side]) for side in ("base", "tuned")))
        for answer in changed[:_SHOWN_ANSWERS]
    ]
    if rows:
        table(f"{len(changed)} of {len(answers)} answers changed, the first:", ("prompt", "A", "B"), rows)


def _marked(side: Mapping[str, Any]) -> str:
    mark = {True: "right: ", False: "wrong: ", None: ""}[side["success"]]
    return mark + _short(side["answer"] or "")


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 4] + " ..."


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
