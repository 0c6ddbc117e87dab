"""Parts of the page about a run: what to change, its losses step by step, frozen questions, a judge model. Pure.

Every text is escaped: questions, answers and places are other people's.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from hivetune.judge.evaluate import SIDES
from hivetune.run.chart import Chart, DrawnCurve, draw_chart

LONGEST_TEXT = 3000
MOST_LOST = 50
ORIGINS = {"win": "past wins", "own": "your own", "general": "general"}


def shown_text(text: str | None, longest: int = LONGEST_TEXT) -> str:
    """A text of somebody else's, escaped and cut."""
    if text is None:
        return '<span class="soft">none</span>'
    return escape(text if len(text) <= longest else text[:longest] + " ...")


def advice_list(advice: Sequence[Mapping[str, Any]]) -> str:
    """Each advice with the rows that show it."""
    lines = ""
    for one in advice:
        rows = "".join(f"<li>{escape(row)}</li>" for row in one["rows"])
        lines += f"<li>{escape(one['said'])}{f'<ul>{rows}</ul>' if rows else ''}</li>"
    return f"<ul>{lines}</ul>" if lines else ""


def curve_plot(curve: Mapping[str, Any]) -> str:
    """Return training loss and validations as two lines, with a sentence that says the same."""
    steps, validations = curve.get("steps") or [], curve.get("validations") or []
    if len(steps) < 2:
        return ""
    best = f", validation lowest at step {min(validations, key=lambda each: each[1])[0]}" if validations else ""
    summary = f"training loss from {steps[0][1]:.3g} to {steps[-1][1]:.3g}{best}"
    curves = [DrawnCurve("training", "raw", steps), DrawnCurve("validation", "second", validations, dots=True)]
    chart = draw_chart(Chart("Loss, nats per token", curves, summary))
    return f'<div class="wide" tabindex="0">{chart}</div><p class="soft">{summary}.</p>'


def frozen_table(document: Mapping[str, Any]) -> str:
    """How many of each kind both sides answer rightly, and those that only A does."""
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
        for row in lost[:MOST_LOST]
    )
    return f'<div class="wide" tabindex="0"><table>{head}{lines}</table></div>{shown}'


def judge_note(document: Mapping[str, Any]) -> str:
    """What a judge model preferred, and how often it contradicted itself."""
    found = document.get("preferences")
    if not found:
        return ""
    counts = {side: sum(row["preferred"] == side for row in found["rows"]) for side in (*SIDES, "tie")}
    said = (
        f"{escape(found['judge'])} prefers A in {counts['base']} pairs and B in {counts['tuned']}; {counts['tie']} are "
        f"ties. When they changed places it contradicted itself on {found['contradictions']} of {found['asked']}."
    )
    said += f" {found['unreadable']} of its replies named neither." if found["unreadable"] else ""
    said += " It judges its own answers." if found["judges_itself"] else ""
    return f"<p>{said}</p>"
