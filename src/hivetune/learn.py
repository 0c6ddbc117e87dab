"""The station `learn`: stage 1, stage 2 from its adapter, stage 1 with as many more steps, and which of them ships.

Each stage is a run folder of its own, below one folder: it is resumed, judged, exported and registered like any other.
Stage 2 ships only if its answers succeed more often than those of both rivals. The second rival shows what more
training alone would have done.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hivetune.base.disk import home, read_json, write_json
from hivetune.base.journal import read_journal
from hivetune.base.paths import real_path
from hivetune.config import GateConfig, RunConfig
from hivetune.data.identity import identity_hash
from hivetune.data.intake.files import refuse_read_once
from hivetune.data.snapshot import REPORT
from hivetune.errors import UsageError
from hivetune.judge.gate import Evaluation, judge, verdict_document
from hivetune.judge.held_out import evaluation_document, plan_evaluation, scored
from hivetune.models.sides import BASELINE, SIDES
from hivetune.records import Progress, Verdict, silent
from hivetune.run.folder import EVALUATION, adapter_hash
from hivetune.train.open import Run
from hivetune.train.start import open_run, prepare_run

STAGE1, STAGE2, LONGER = "stage1", "stage2", "stage1-longer"
DOCUMENT, AGAINST = "learn.json", "against"
TrainStage = Callable[[Run], dict[str, Any]]


def learn(
    config: RunConfig,
    name: str,
    *,
    train: TrainStage,
    say: Callable[[str], None],
    comparing: Progress = silent,
) -> dict[str, Any]:
    """Bring all stages to their ends; return the document of `learn --json`, which is `learn.json` too.

    A finished stage is found again. `train`: trains one run to its end. Raises UsageError for a config that is a stage
    itself, and what training does.
    """
    if config.learn.stage != 1:
        raise UsageError("learn.stage is set, so this config is one stage", hint="train it: hivetune train CONFIG")
    refuse_read_once(config.data.path)
    _, _, identity = prepare_run(config)
    made = (home() / "runs" / f"{name}-learn-{identity_hash(identity)[:10]}").resolve()
    root = real_path(config.output) if config.output else made
    say(f"stage 1: {', '.join(kind for kind in config.learn.use if kind in ('sft', 'corrections'))}")
    first = open_run(config.model_copy(update={"output": str(root / STAGE1)}), f"{name}-{STAGE1}")
    document: dict[str, Any] = {
        "schema": 1,
        "folder": str(root),
        "learned_from": read_json(first.snapshot.folder / REPORT)["learn"],
        "stage1": train(first),
        "stage2": None,
        "longer": None,
        "against": {},
    }
    bad_rows = document["bad_rows"] = len(first.snapshot.bad_rows())
    reason = stage2_problem(bad_rows, config.learn.least_bad, first.snapshot.rows("validation"), config.learn.use)
    if reason:
        return _shipped(root, document, STAGE1, [f"no stage 2: {reason}"])
    say(f"stage 2: {bad_rows:,} bad answers beside the good rows")
    after_first = {
        "lora": config.lora.model_copy(update={"start": str(first.folder)}),
        "learning_rate": config.learning_rate * config.learn.rate,
    }
    stage2 = {
        "output": str(root / STAGE2),
        "learn": config.learn.model_copy(update={"stage": 2}),
        "max_steps": config.learn.steps,
    }
    second = open_run(config.model_copy(update=after_first | stage2), f"{name}-{STAGE2}")
    document["stage2"] = train(second)
    steps = document["stage2"]["adapter_step"]
    if not steps:
        return _shipped(root, document, STAGE1, ["stage 2 was stopped before a step that keeps the good rows"])
    say(f"stage 1 with {steps} more steps, for comparison")
    # As many steps at stage 2's rate, without early stopping.
    longer = {
        "output": str(root / LONGER),
        "max_steps": steps,
        "epochs": float(max(1, math.ceil(steps * config.batch_size / len(first.snapshot.rows("train"))))),
        "patience": None,
        "supervise": config.supervise.model_copy(update={"chunk_rows": None}),
    }
    third = open_run(config.model_copy(update=after_first | longer), f"{name}-{LONGER}")
    document["longer"] = train(third)
    evaluations = {rival.folder.name: beside(second, rival, comparing) for rival in (first, third)}
    for rival, evaluation in evaluations.items():
        (root / AGAINST / rival).mkdir(parents=True, exist_ok=True)
        write_json(root / AGAINST / rival / EVALUATION, evaluation)
    ships, verdicts, reasons = choose_stage(evaluations, config.gate, first.snapshot.good_rows("test", MIN_HELD_OUT))
    document["against"] = {rival: verdict_document(verdict) for rival, verdict in verdicts.items()}
    return _shipped(root, document, STAGE2 if ships else STAGE1, reasons)


def beside(run: Run, rival: Run, progress: Progress = silent) -> dict[str, Any]:
    """Return the evaluation of `run` beside `rival`, its baseline. The engine answers for both of them."""
    _, generate = plan_evaluation(run.snapshot, run.config.eval)
    lines: list[Mapping[str, Any]] = []
    outcome: dict[str, Any] = {}
    for side, side_run in ((BASELINE, rival), ("tuned", run)):
        scores, result = scored(run, side_run.folder, generate, progress)
        lines += [{**line, "model": side} for line in read_journal(scores) if line.get("model") == "tuned"]
        outcome[side] = result["tuned"]
    facts = {"run": str(run.folder), "baseline": str(rival.folder), "adapter_sha256": adapter_hash(run.folder)}
    return evaluation_document(run.snapshot, run.config.eval, lines, outcome, {**facts, "answered_by": "the engine"})


def _shipped(root: Path, document: Mapping[str, Any], stage: str, reasons: list[str]) -> dict[str, Any]:
    document = {**document, "ships": stage, "run": str(root / stage), "reasons": reasons}
    write_json(root / DOCUMENT, document)
    return dict(document)


# By how much, compared with stage 1: nats per token of held-out rows; share of answers; ratio of characters.
MAX_WORSE_LOSS = 0.02
MAX_FEWER_ENDED = 0.02
# With fewer held-out rows that were called good, the loss of all of them counts.
MIN_HELD_OUT = 20
LENGTH_RATIOS = (0.8, 1.25)


def safeguards(evaluation: Evaluation, good: Collection[int] | None = None) -> list[str]:
    """Return in words what stage 2 broke against the baseline. `good`: rows whose loss counts; None: all of them."""
    broken = []
    held_out_rows = [row for row in evaluation["rows"] if good is None or row["row"] in good]
    rows = [row for row in held_out_rows if all(isinstance(row[side], float) for side in SIDES)]
    tokens = sum(row["tokens"] for row in rows)
    if len(rows) < len(held_out_rows) or not tokens:
        broken.append("the loss of held-out rows is not known for both")
    else:
        base, tuned = (math.fsum(row[side] for row in rows) / tokens for side in SIDES)
        if tuned > base + MAX_WORSE_LOSS:
            broken.append(f"the loss of held-out rows rose from {base:.4f} to {tuned:.4f}")
    answered = [answer for answer in evaluation["answers"] if all(answer[side]["answer"] is not None for side in SIDES)]
    if answered:
        base, tuned = (sum(bool(answer[side]["ended"]) for answer in answered) / len(answered) for side in SIDES)
        if tuned < base - MAX_FEWER_ENDED:
            broken.append(f"{tuned:.0%} of the answers end by themselves, {base:.0%} did")
        base, tuned = (sum(len(answer[side]["answer"]) for answer in answered) for side in SIDES)
        if not base or not LENGTH_RATIOS[0] <= tuned / base <= LENGTH_RATIOS[1]:
            ratio = f"{tuned / base:.2f} times" if base else "infinitely"
            broken.append(f"answers are {ratio} as long, outside of {LENGTH_RATIOS[0]} to {LENGTH_RATIOS[1]}")
    return broken


def choose_stage(
    evaluations: Mapping[str, Evaluation], gate: GateConfig, good: Collection[int] | None = None
) -> tuple[bool, dict[str, Verdict], list[str]]:
    """Return (whether stage 2 ships, the verdict against each rival, why).

    `evaluations`: rival -> stage 2 beside it. The first one is stage 1, against which the safeguards hold. `good`: as
    in `safeguards`.
    """
    # More answers succeed. Loss, lengths and ends are safeguards.
    gain, no_cost = max(0.0, gate.success_gain or 0.0), {"latency_ratio": None, "memory_ratio": None}
    required = {"success_gain": gain, "loss_gain": None, "least_kept": None, **no_cost}
    more_succeed = GateConfig(tolerance=gate.tolerance).model_copy(update=required)
    verdicts = {rival: judge(evaluation, more_succeed) for rival, evaluation in evaluations.items()}
    broken = safeguards(next(iter(evaluations.values())), good)
    reasons = [f"against {rival}: {reason}" for rival, verdict in verdicts.items() for reason in verdict.reasons[:1]]
    ships = not broken and all(verdict.verdict == "deploy" for verdict in verdicts.values())
    return ships, verdicts, [*broken, *reasons]


def stage2_problem(bad_rows: int, least: int, validation_rows: Sequence[int], use: Sequence[str]) -> str:
    """Return why a stage 2 can't learn or be guarded; empty if it can."""
    if not {"pairs", "failures"} & set(use):
        return "learn names neither pairs nor failures; with them: learn: [sft, corrections, pairs, failures]"
    if bad_rows < least:
        return f"{bad_rows} bad answers are left to learn from, learn.stage2.min_bad asks for {least}"
    if not validation_rows:
        return "there are no validation rows to guard it: raise data.validation"
    return ""
