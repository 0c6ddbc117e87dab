"""An evaluation or a comparison as one HTML page that needs nothing else: no script, no font, no network.

Every text is escaped: answers and rows are other people's.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hivetune.base.disk import write_atomic
from hivetune.errors import UsageError
from hivetune.judge.findings import SHARES_OF_ANSWERS, metric_name, passed_text
from hivetune.judge.held_out import SIDES, by_part
from hivetune.models.prepared import spoken_name
from hivetune.models.sides import BASELINE
from hivetune.run.chart import Chart, DrawnCurve, draw_chart

# Files: written aside, then renamed.

EVALUATION_PAGE = "eval.html"


def write_evaluation_page(run: Path, evaluation: Mapping[str, Any], judged: Mapping[str, Any]) -> Path:
    """Write `RUN/eval.html`.

    `judged`: metrics and, after the gate, the verdict.
    """
    base, tuned = evaluation["base"], evaluation["tuned"]
    model = spoken_name(evaluation["model"]) if "model" in evaluation else "the model"  # of an older version
    tuned = {**tuned, "label": f"{model} tuned in {run.name}"}
    if base.get("label", BASELINE) == BASELINE:
        base = {**base, "label": f"{model} untuned"}
    return _write(run / EVALUATION_PAGE, {**evaluation, "base": base, "tuned": tuned}, judged)


def write_comparison_page(folder: Path, document: Mapping[str, Any], run: Path | None) -> Path:
    """Write `RUN/compare-HASH.html` where the rows are a run's, else `compare.html` in the comparison's own folder."""
    path = folder / "compare.html" if run is None else run / f"compare-{folder.name[:8]}.html"
    return _write(path, document, document)


def newest_page(run: Path) -> Path:
    """Return the newest page of a run. Raises UsageError for a run without one."""
    pages = sorted(run.glob("*.html"), key=lambda path: path.stat().st_mtime_ns)
    if not pages:
        raise UsageError(f"{run} has no page yet", hint=f"measure it first: hivetune eval {run.name}")
    return pages[-1]


def _write(path: Path, document: Mapping[str, Any], judged: Mapping[str, Any]) -> Path:
    write_atomic(path, comparison_page(document, judged).encode("utf-8", "replace"))
    return path


SESSIONS_SHOWN = 10
PART_NAMES = {"agent": "agent", "category": "category", "group": "session"}
MAX_ANSWERS = 300  # of 2 kB each: a page of about 1 MB
HIGHER_IS_BETTER = ("success", "ended", "tokens_per_second", "least_success", "preferred", "kept", "kept_general")
NEITHER_IS_BETTER = ("length",)  # shorter answers may be terse, longer ones padded
_STYLE = Path(__file__).with_name("page.css")
_PLOT_WIDTH, _ROW_HEIGHT = 260, 22
_COLOURS = {"yes": "better", "no": "worse"}


def comparison_page(document: Mapping[str, Any], judged: Mapping[str, Any]) -> str:
    """Return the whole page.

    `document`: eval.json or compare.json. `judged`: its metrics and, where it was judged, `verdict` and `reasons`, as
    in gate.json.
    """
    labels = [str(document[side].get("label") or side) for side in SIDES]
    title = f"{labels[1]} against {labels[0]}"
    verdict = judged.get("verdict")
    head = f"{verdict}: {title}" if verdict else title
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE.read_text(encoding='utf-8')}</style></head><body><main>\n"
        f"<h1>{escape(head)}</h1>{comparison_body(document, judged)}</main></body></html>\n"
    )


def comparison_body(document: Mapping[str, Any], judged: Mapping[str, Any]) -> str:
    """Return the page below its title, for pages with a frame and page.css of their own."""
    labels = [str(document[side].get("label") or side) for side in SIDES]
    sections = (
        _section("Why", _reasons(judged.get("reasons") or ())),
        _section("What to change", advice_list(judged.get("advice") or ())),
        _section("Metrics", _metrics(judged["metrics"]), _metrics_note(document)),
        _section(
            "Training", curve_plot(judged.get("curve") or {}), "Nats per token: training, and validation as points."
        ),
        _section("Frozen questions", frozen_table(document), "Never trained; those that B lost are below."),
        _section("Judge model", judge_note(document)),
        _section("Each answer's time", _differences(document, "seconds"), "B - A in seconds; below zero B is faster."),
        _section("Each row's loss", _loss_differences(document), "B - A in nats per token; below zero B is better."),
        _section("By agent", _parts(document, "agent")),
        _section("By category", _parts(document, "category")),
        _section("By session", _parts(document, "group"), f"The {SESSIONS_SHOWN} that gained least."),
        _section("What each side costs", _costs(document)),
        _section("Answers side by side", _answers(document), _answers_note(document)),
        _section("Problems", _problems(document)),
    )
    keys = "".join(
        f'<span class="key {kind}"></span>{name}: {escape(label)} &nbsp; '
        for kind, name, label in zip(("first", "second"), "AB", labels, strict=True)
    )
    return f'<p class="soft">{keys}</p>\n{"".join(sections)}'


def _section(title: str, body: str, note: str = "") -> str:
    note_line = f'<p class="soft">{note}</p>' if note else ""
    return f"<section><h2>{title}</h2>{note_line}{body}</section>\n" if body else ""


def _reasons(reasons: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(reason)}</li>' for reason in reasons)}</ul>" if reasons else ""


def _metrics(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return one line a metric: values, and the difference with its interval as numbers and as a bar around zero."""
    rows = ""
    for metric in metrics:
        name = metric["name"]
        if metric["base"] is None and metric["tuned"] is None:
            continue
        interval = metric["ci95"]
        interval_text = "" if interval is None else f"{_value(name, interval[0])} to {_value(name, interval[1])}"
        passed = "" if metric["passed"] is None else passed_text(metric)
        rows += (
            f"<tr><td>{escape(metric_name(name))}</td>"
            f'<td class="n">{_value(name, metric["base"])}</td><td class="n">{_value(name, metric["tuned"])}</td>'
            f'<td class="n">{_value(name, metric["difference"])}</td><td>{_interval_plot(metric)}</td>'
            f'<td class="n soft">{interval_text}</td><td class="n">{metric["n"]}</td>'
            f'<td class="{_COLOURS.get(passed, "")}">{passed}</td></tr>'
        )
    head = (
        '<tr><th></th><th class="n">A</th><th class="n">B</th><th class="n">B - A</th><th></th>'
        '<th class="n">95 % interval</th><th class="n">n</th><th>passed</th></tr>'
    )
    return f'<div class="wide" tabindex="0"><table>{head}{rows}</table></div>' if rows else ""


def _metrics_note(document: Mapping[str, Any]) -> str:
    missing = "".join(
        f" {escape(m)} is not compared: {escape(reason)}." for m, reason in (document.get("not_compared") or {}).items()
    )
    return f"Bars: the difference with its 95 % interval around zero, each metric on its own scale.{missing}"


def _interval_plot(metric: Mapping[str, Any]) -> str:
    difference, interval = metric["difference"], metric["ci95"]
    if difference is None or interval is None:
        return ""
    low, high = interval
    widest = max(abs(low), abs(high), abs(difference)) or 1.0
    middle, half = _PLOT_WIDTH / 2, _PLOT_WIDTH / 2 - 8

    def x(value: float) -> str:
        return f"{middle + half * value / widest:.1f}"

    kind, y = _direction(metric["name"], low, high), _ROW_HEIGHT / 2
    label = f"{metric['name']}: {difference:.4g}, 95 % interval {low:.4g} to {high:.4g}"
    return (
        f'<svg viewBox="0 0 {_PLOT_WIDTH} {_ROW_HEIGHT}" width="{_PLOT_WIDTH}" role="img" aria-label="{escape(label)}">'
        f'<line class="axis" x1="{middle}" x2="{middle}" y1="0" y2="{_ROW_HEIGHT}"/>'
        f'<line class="{kind}" stroke-width="4" stroke-linecap="round" x1="{x(low)}" x2="{x(high)}" y1="{y}" y2="{y}"/>'
        f'<circle class="{kind}" cx="{x(difference)}" cy="{y}" r="5"/></svg>'
    )


def _direction(name: str, low: float, high: float) -> str:
    if low <= 0 <= high or name in NEITHER_IS_BETTER:
        return "unclear"
    return "better" if (low > 0) == (name in HIGHER_IS_BETTER) else "worse"


def _differences(document: Mapping[str, Any], key: str) -> str:
    pairs = [(answer["base"].get(key), answer["tuned"].get(key)) for answer in document["answers"]]
    return _sorted_bars([b - a for a, b in pairs if a is not None and b is not None])


def _loss_differences(document: Mapping[str, Any]) -> str:
    usable = [
        row for row in document["rows"] if row["tokens"] and all(isinstance(row[side], int | float) for side in SIDES)
    ]
    return _sorted_bars([(row["tuned"] - row["base"]) / row["tokens"] for row in usable])


def _sorted_bars(differences: Sequence[float]) -> str:
    """Draw one bar a row, from the best to the worst, around zero; less is better."""
    if len(differences) < 2:
        return ""
    ordered = sorted(differences)
    if len(ordered) > 400:  # every k-th: more bars than pixels say nothing
        ordered = ordered[:: math.ceil(len(ordered) / 400)]
    width, height, margin = 900.0, 180.0, 70.0
    largest = max(abs(ordered[0]), abs(ordered[-1])) or 1.0
    step = (width - margin) / len(ordered)
    bars = ""
    for number, value in enumerate(ordered):
        tall = abs(value) / largest * (height / 2 - 8)
        top = height / 2 - (tall if value > 0 else 0)
        kind = "better" if value < 0 else "worse" if value > 0 else "unclear"
        bars += (
            f'<rect class="{kind}" stroke="none" x="{margin + number * step:.1f}" y="{top:.1f}" '
            f'width="{max(0.5, step - 1):.1f}" height="{max(tall, 0.5):.1f}"/>'
        )
    less = sum(value < 0 for value in differences)
    texts = (
        f'<text x="0" y="14">+{largest:.3g}</text><text x="0" y="{height / 2 + 4}">0</text>'
        f'<text x="0" y="{height - 4}">-{largest:.3g}</text>'
    )
    caption = f"{less} of {len(differences)} rows are better with B"
    return (
        '<div class="wide" tabindex="0">'
        f'<svg class="plot" viewBox="0 0 {width:.0f} {height:.0f}" width="100%" role="img" '
        f'aria-label="{caption}">{texts}'
        f'<line class="axis" x1="{margin}" x2="{width}" y1="{height / 2}" y2="{height / 2}"/>{bars}</svg></div>'
        f'<p class="soft">{caption}.</p>'
    )


def _parts(document: Mapping[str, Any], part: str) -> str:
    """Return loss and success of each agent, category or session, as numbers and as two bars."""
    lines = by_part(document, part)
    if len(lines) < 2 and (not lines or lines[0][part] is None):
        return ""
    if part == "group":
        lines = sorted(lines, key=lambda line: (line["base_loss"] or 0) - (line["tuned_loss"] or 0))[:SESSIONS_SHOWN]
    most = max((line[f"{side}_loss"] or 0 for line in lines for side in SIDES), default=0)
    rows = ""
    for line in lines:
        losses = [line[f"{side}_loss"] for side in SIDES]
        shares = ["-" if (s := line[f"{side}_success"]) is None else f"{s:.0%}" for side in SIDES]
        rows += (
            f'<tr><td>{escape(line[part] or "-")}</td><td class="n">{line["rows"]}</td>'
            f'<td class="n">{_number(losses[0])}</td><td class="n">{_number(losses[1])}</td>'
            f'<td>{_two_bars(losses, most)}</td><td class="n">{line["answers"]}</td>'
            f'<td class="n">{shares[0]}</td><td class="n">{shares[1]}</td></tr>'
        )
    head = (
        f'<tr><th>{PART_NAMES[part]}</th><th class="n">rows</th><th class="n">loss A</th><th class="n">B</th><th></th>'
        '<th class="n">checked answers</th><th class="n">success A</th><th class="n">B</th></tr>'
    )
    return f'<div class="wide" tabindex="0"><table>{head}{rows}</table></div>'


def _two_bars(values: Sequence[float | None], most: float) -> str:
    if most <= 0 or all(value is None for value in values):
        return ""
    bars = "".join(
        f'<rect class="{kind}" x="0" y="{2 + 10 * i}" width="{160 * (value or 0) / most:.1f}" height="8" rx="2"/>'
        for i, (kind, value) in enumerate(zip(("first", "second"), values, strict=True))
    )
    return f'<svg viewBox="0 0 160 22" width="160" aria-hidden="true">{bars}</svg>'


def _costs(document: Mapping[str, Any]) -> str:
    names = {
        "latency_p50_s": "seconds per answer, p50",
        "latency_p95_s": "seconds per answer, p95",
        "first_token_p50_s": "seconds to the first token, p50",
        "first_token_p95_s": "seconds to the first token, p95",
        "tokens_per_second": "tokens per second, one answer at a time",
        "cold_start_s": "cold start, seconds",
        "peak_memory_bytes": "peak memory",
    }
    rows = ""
    for key, name in names.items():
        values = [document[side].get(key) for side in SIDES]
        if any(value is not None for value in values):
            cells = "".join(f'<td class="n">{_value(key, value)}</td>' for value in values)
            rows += f"<tr><td>{name}</td>{cells}</tr>"
    head = '<tr><th></th><th class="n">A</th><th class="n">B</th></tr>'
    return f'<div class="wide" tabindex="0"><table>{head}{rows}</table></div>' if rows else ""


def _answers(document: Mapping[str, Any]) -> str:
    ordered = sorted(document["answers"], key=_rank)
    body = ""
    for number, answer in enumerate(ordered[:MAX_ANSWERS]):
        origin = " ".join(str(part) for part in (answer["source"], answer["agent"]) if part)
        reference = answer["reference"]
        shown = f'<p class="tag">reference</p><div class="text">{shown_text(reference)}</div>' if reference else ""
        columns = "".join(
            f'<div><p class="tag">{name} {_outcome(answer[side])}</p>'
            f'<div class="text">{shown_text(answer[side]["answer"])}</div></div>'
            for name, side in zip("AB", SIDES, strict=True)
        )
        body += (
            f"<details{' open' if number < 3 else ''}><summary>{_change(answer)}{shown_text(answer['prompt'], 120)} "
            f'<span class="soft">{escape(origin)}</span></summary>'
            f'<p class="tag">prompt</p><div class="text">{shown_text(answer["prompt"])}</div>{shown}'
            f'<div class="pair">{columns}</div></details>'
        )
    return body


def _answers_note(document: Mapping[str, Any]) -> str:
    total = len(document["answers"])
    more = f" The first {MAX_ANSWERS} of {total} are shown; the file beside this page has all." * (total > MAX_ANSWERS)
    return f"Those that only A answers rightly come first, then those that only B does.{more}"


def _rank(answer: Mapping[str, Any]) -> int:
    return {(True, False): 0, (False, True): 1, (False, False): 2}.get(
        (answer["base"]["success"], answer["tuned"]["success"]), 3
    )


def _change(answer: Mapping[str, Any]) -> str:
    tags = {0: '<span class="tag worse">lost</span> ', 1: '<span class="tag better">gained</span> '}
    return tags.get(_rank(answer), "")


def _outcome(side: Mapping[str, Any]) -> str:
    success = {True: '<span class="better">right</span>', False: '<span class="worse">wrong</span>', None: ""}
    parts = [success[side["success"]]]
    if side["seconds"] is not None:
        parts.append(f'<span class="soft">{side["seconds"]:.2f} s</span>')
    if side["ended"] is False:
        parts.append('<span class="soft">cut at the longest answer</span>')
    return " ".join(part for part in parts if part)


def _problems(document: Mapping[str, Any]) -> str:
    problems = document["problems"]
    lines = [f"<li>{escape(p['source'])} ({escape(p['model'])}): {escape(p['problem'])}</li>" for p in problems[:50]]
    lines += [f"<li>and {len(problems) - 50} more</li>"] * (len(problems) > 50)
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def _value(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name == "peak_memory_bytes":
        return f"{value / 1e9:.2f} GB"
    if name in SHARES_OF_ANSWERS:
        return f"{100 * value:.1f} %"
    return _number(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


# Parts about a run: advice, its curve, frozen questions, a judge model.

MAX_TEXT_CHARS = 3000
MAX_LOST = 50
ORIGINS = {"win": "past wins", "own": "your own", "general": "general"}


def shown_text(text: str | None, longest: int = MAX_TEXT_CHARS) -> str:
    """Return somebody else's text, escaped and cut."""
    if text is None:
        return '<span class="soft">none</span>'
    return escape(text if len(text) <= longest else text[:longest] + " ...")


def advice_list(advice: Sequence[Mapping[str, Any]]) -> str:
    """Return each advice with the rows that show it."""
    lines = ""
    for entry in advice:
        rows = "".join(f"<li>{escape(row)}</li>" for row in entry["rows"])
        lines += f"<li>{escape(entry['said'])}{f'<ul>{rows}</ul>' if rows else ''}</li>"
    return f"<ul>{lines}</ul>" if lines else ""


def curve_plot(curve: Mapping[str, Any]) -> str:
    """Return training loss and validations as two lines, with a sentence that says the same."""
    steps, validations = curve.get("steps") or [], curve.get("validations") or []
    if len(steps) < 2:
        return ""
    best = f", validation lowest at step {min(validations, key=lambda v: v[1])[0]}" if validations else ""
    summary = f"training loss from {steps[0][1]:.3g} to {steps[-1][1]:.3g}{best}"
    curves = [DrawnCurve("training", "raw", steps), DrawnCurve("validation", "second", validations, dots=True)]
    chart = draw_chart(Chart("Loss, nats per token", curves, summary))
    return f'<div class="wide" tabindex="0">{chart}</div><p class="soft">{summary}.</p>'


def frozen_table(document: Mapping[str, Any]) -> str:
    """Return how many of each kind both sides answer rightly, and the questions that only A does."""
    rows = document.get("frozen") or ()
    if not rows:
        return ""
    lines = ""
    for origin, name in ORIGINS.items():
        checked = [row for row in rows if row["origin"] == origin]
        if checked:
            right = [sum(row[side]["success"] is True for row in checked) for side in SIDES]
            lines += f'<tr><td>{name}</td><td class="n">{len(checked)}</td><td class="n">{right[0]}</td>'
            lines += f'<td class="n">{right[1]}</td></tr>'
    head = '<tr><th></th><th class="n">asked</th><th class="n">right A</th><th class="n">B</th></tr>'
    lost = [
        row for row in rows if row["tuned"]["success"] is False and (row["origin"] == "win" or row["base"]["success"])
    ]
    shown = "".join(
        f'<details><summary><span class="tag worse">lost</span> {shown_text(row["prompt"], 120)} '
        f'<span class="soft">{escape(row["source"])}</span></summary><div class="pair">'
        + "".join(
            f'<div><p class="tag">{name}</p><div class="text">{shown_text(row[side]["answer"])}</div></div>'
            for name, side in zip("AB", SIDES, strict=True)
        )
        + "</div></details>"
        for row in lost[:MAX_LOST]
    )
    return f'<div class="wide" tabindex="0"><table>{head}{lines}</table></div>{shown}'


def judge_note(document: Mapping[str, Any]) -> str:
    """Return a sentence on a judge model's preferences, and on how often it contradicted itself."""
    given = document.get("preferences")
    if not given:
        return ""
    counts = {side: sum(row["preferred"] == side for row in given["rows"]) for side in (*SIDES, "tie")}
    text = (
        f"{escape(given['judge'])} prefers A in {counts['base']} pairs and B in {counts['tuned']}; {counts['tie']} are "
        f"ties. When they changed places it contradicted itself on {given['contradictions']} of {given['asked']}."
    )
    text += f" {given['unreadable']} of its replies named neither." if given["unreadable"] else ""
    text += " It judges its own answers." if given["judges_itself"] else ""
    return f"<p>{text}</p>"
