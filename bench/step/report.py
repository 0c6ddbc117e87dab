"""From the benchmark's raw steps to its figures: medians, ratios, validity, a table in Markdown."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# A loss curve is the same curve: float32 rows differ by rounding only (measured: 0.0001 %), bfloat16 rows by the
# rounding of the base weights' products, which the reference lacks (1.3 to 1.6 % for every one, ours and the peers').
TOLERANCE = {"float32": 0.002, "bfloat16": 0.03}
REFERENCE = ("transformers + PEFT fp32", "hivetune fp32", "TRL defaults")
JOB_EXAMPLES, JOB_EPOCHS = 1500, 3
BYTES = {"float32": 4, "bfloat16": 2}


def summarize(document: Mapping[str, Any], titles: Mapping[str, str]) -> list[dict[str, Any]]:
    """One line for each set and row, over the rounds after the first. What compares two rows is paired by the round."""
    lines = []
    parameters = document["parameters"]
    for name in titles:
        results = [result for result in document["results"] if result["set"] == name]
        about = document["data"]["sets"][name]
        documents = about["documents_per_step"]
        beside = {r["row"]: r for r in results if not r["failed"]}
        reference = next((r for row in REFERENCE for r in results if r["row"] == row and r["steps"]), None)
        for result in results:
            lines.append(_line(result, about, documents, beside, reference, parameters))
    return lines


def _line(
    result: Mapping[str, Any],
    about: Mapping[str, Any],
    documents: int,
    beside: Mapping[str, Mapping[str, Any]],
    reference: Mapping[str, Any] | None,
    parameters: int,
) -> dict[str, Any]:
    steps = result["steps"]
    line: dict[str, Any] = {"set": result["set"], "row": result["row"], "dtype": result["dtype"], "void": []}
    if result["failed"] or len(steps) < 2:
        line["void"].append(result["failed"] or "too few steps")
        return line
    seconds = [step["seconds"] for step in steps[1:]]
    step_s = statistics.median(seconds)
    line |= {
        "step_s": step_s,
        "step_s_quartiles": quartiles(seconds)[::2],
        "rounds": len(seconds),
        "samples_per_s": documents / step_s,
        "tokens_per_s": about["mean_tokens"] * documents / step_s,
        "load_s": result["load_s"],
        # A projection: measured loading and first step, then as many median steps as the job has.
        "job_s": result["load_s"] + steps[0]["seconds"] + (JOB_EXAMPLES * JOB_EPOCHS / documents - 1) * step_s,
    }
    ours = (beside.get("hivetune fp32") if result["row"].endswith(" fp32") else None) or beside.get("hivetune")
    if ours is not None:
        line["times_hivetune"] = paired(steps, ours["steps"])
    dtype = "bfloat16" if result["dtype"].startswith("bfloat16") else "float32"
    line["peak_bytes"] = max(step["peak_bytes"] for step in steps)
    line["peak_above_bytes"] = line["peak_bytes"] - result["bare_bytes"] - parameters * BYTES[dtype]
    line["losses"] = [step["loss"] for step in steps]
    if reference is not None and not result["own_curve"]:
        pairs = list(zip(line["losses"], (step["loss"] for step in reference["steps"]), strict=False))
        exact = dtype == "float32" and "autocast" not in result["dtype"].replace("no autocast", "")
        worst = max(abs(mine - theirs) / theirs for mine, theirs in pairs)
        line["loss_off"] = worst
        allowed = TOLERANCE["float32" if exact else "bfloat16"]
        if worst > allowed:
            line["void"].append(f"its loss is {100 * worst:.1f} % off the reference")
        first, theirs_first = steps[0]["grad_norm"], reference["steps"][0]["grad_norm"]
        if first is not None and theirs_first and abs(first / theirs_first - 1) > 2 * allowed:
            line["void"].append(f"its first gradient's norm is {first:.3g}, the reference's {theirs_first:.3g}")
    if not all(step["grad_norm"] is None or step["grad_norm"] > 0 for step in steps):
        line["void"].append("its gradient is zero")
    return line


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile; of one value three times that."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, median, third


def paired(ones: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of `ones` over those of `others` in the same round, the first left out: median and quartiles."""
    ratios = [one["seconds"] / other["seconds"] for one, other in zip(ones[1:], others[1:], strict=True)]
    low, median, high = quartiles(ratios)
    return {"median": median, "low": low, "high": high}


def markdown(document: Mapping[str, Any]) -> str:
    """Tables, one for each set, ours against each."""
    parts = []
    for name in dict.fromkeys(line["set"] for line in document["summary"]):
        lines = [line for line in document["summary"] if line["set"] == name]
        about = document["data"]["sets"][name]
        rounds = max((line.get("rounds", 0) for line in lines), default=0)
        parts.append(
            f"### {name}: {about['documents_per_step']} rows a step, {about['mean_tokens']:.0f} tokens a row, "
            f"{100 * about['trained_share']:.0f} % trained; {rounds} rounds\n"
        )
        parts.append("| row | s/step | tokens/s | samples/s | times ours | peak above | load | job | loss off |")
        parts.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        parts += [_table_row(line) for line in lines]
        parts.append("")
    return "\n".join(parts)


def _table_row(line: Mapping[str, Any]) -> str:
    if line["void"]:
        return f"| {line['row']} | void: {'; '.join(line['void'])} | | | | | | | |"
    ratio = (
        "{median:.2f} ({low:.2f} to {high:.2f})".format(**line["times_hivetune"]) if "times_hivetune" in line else ""
    )
    peak = f"{line['peak_above_bytes'] / 1e9:.2f} GB" if "peak_above_bytes" in line else ""
    step = "{:.2f} ({:.2f} to {:.2f})".format(line["step_s"], *line["step_s_quartiles"])
    off = f"{100 * line['loss_off']:.2f} %" if "loss_off" in line else ""
    return (
        f"| {line['row']} ({line['dtype']}) | {step} | {line['tokens_per_s']:,.0f} | "
        f"{line['samples_per_s']:.2f} | {ratio} | {peak} | {line['load_s']:.0f} s | "
        f"{line['job_s'] / 60:.0f} min | {off} |"
    )


def write_report(document: Mapping[str, Any], out: Path | None) -> None:
    """Print the table; with `out`, write the JSON there and the table beside it."""
    table = markdown(document)
    print(table)
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n")
    out.with_suffix(".md").write_text(table)
